"""The schema of ``pd_config``: what Ray Serve's own builder takes, as types, every key once.

A key has a **fate**: it is mapped (``mapping.py`` says to what), ignored with a notice, or refused, in which case its
description says why. Invariants of a :class:`PDServingArgs` that exists: no unknown key, every value of its type.
Nothing here looks at the host or at files named by values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from antiphon.config.explain import explain
from antiphon.config.load import read_mapping
from antiphon.config.model import SpecModel
from antiphon.config.problems import Notice, Problem, SpecError
from antiphon.config.spec import EnvText

IGNORED: dict[str, Any] = {"fate": "ignored"}
REFUSED: dict[str, Any] = {"fate": "refused"}
CONFIGS = ("prefill_config", "decode_config")
Resources = dict[str, Annotated[float, Field(ge=0)]]


def _dashes(kwargs: object) -> object:
    """Argument names as Python writes them: no leading dashes, underscores inside."""
    if not isinstance(kwargs, dict):
        return kwargs
    return {str(name).lstrip("-").replace("-", "_"): value for name, value in kwargs.items()}


class ModelLoadingConfig(SpecModel):
    """``model_loading_config``."""

    model_id: str = Field(
        min_length=1, description="Mapped to model.served_name, and to model.path where model_source is left out."
    )
    model_source: str | None = Field(
        default=None,
        min_length=1,
        description="Mapped to model.path: a folder that every node has, or a hub id. A bucket is refused.",
    )
    tokenizer_source: str | None = Field(default=None, min_length=1, description="Mapped to vLLM's --tokenizer.")


class AutoscalingConfig(SpecModel):
    """``deployment_config.autoscaling_config``: the numbers of Ray, by what the engines measure."""

    min_replicas: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Engines at least, 1 to 1024; an empty pool would fail every request.",
    )
    max_replicas: int | None = Field(
        default=None, ge=1, le=1024, description="Engines at most, 1 to 1024 (default: min_replicas)."
    )
    initial_replicas: int | None = Field(
        default=None, ge=1, le=1024, description="Engines at the start, 1 to 1024 (default: min_replicas)."
    )
    target_ongoing_requests: float | None = Field(
        default=None, gt=0, description="Requests running and waiting in an engine, above which the pool grows."
    )
    target_uncached_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Prefill only, not in Ray's schema: prompt tokens still to be computed for each engine, above "
        "which the pool grows.",
    )
    target_first_token_s: float | None = Field(
        default=None,
        gt=0,
        description="Prefill only, not in Ray's schema: seconds that a prefill takes, waiting included, above which "
        "the pool grows, as far as waiting is what takes them.",
    )
    target_kv_usage: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Decode only, not in Ray's schema: share of the KV blocks in use, above which the pool grows; an "
        "engine on which requests wait for room is full.",
    )
    upscale_delay_s: float = Field(
        default=30.0, ge=0, le=86400, description="Seconds that the target is exceeded before the pool grows."
    )
    downscale_delay_s: float = Field(
        default=600.0,
        ge=0,
        le=86400,
        description="Seconds that fewer engines would do before the pool shrinks. More than an engine's start.",
    )
    look_back_period_s: float = Field(
        default=30.0, gt=0, le=86400, description="Seconds over which the measured values are averaged."
    )
    metrics_interval_s: float = Field(
        default=2.0, gt=0, le=3600, description="Seconds between two looks at the engines' metrics."
    )
    upscaling_factor: float | None = Field(
        default=None, gt=0, description="Multiplies a step up (default: smoothing_factor)."
    )
    downscaling_factor: float | None = Field(
        default=None, gt=0, description="Multiplies a step down (default: smoothing_factor)."
    )
    smoothing_factor: float = Field(default=1.0, gt=0, description="Multiplies a step up or down.")
    upscale_smoothing_factor: float | None = Field(
        default=None, gt=0, description="The former name of upscaling_factor."
    )
    downscale_smoothing_factor: float | None = Field(
        default=None, gt=0, description="The former name of downscaling_factor."
    )
    downscale_to_zero_delay_s: float | None = Field(
        default=None, description="A pool is never scaled to zero.", json_schema_extra=IGNORED
    )
    aggregation_function: str | None = Field(
        default=None, description="The mean over the engines is used.", json_schema_extra=IGNORED
    )
    policy: Any = Field(
        default=None, description="A pool is scaled by its engines' metrics.", json_schema_extra=REFUSED
    )


class ActorOptions(SpecModel):
    """``deployment_config.ray_actor_options``: what Ray must find on a node for one engine."""

    num_cpus: float | None = Field(default=None, ge=0, description="Logical CPUs of an engine.")
    num_gpus: float | None = Field(default=None, ge=0, description="GPUs of an engine.")
    memory: float | None = Field(default=None, ge=0, description="Memory of an engine in bytes, for placement.")
    resources: Resources = Field(default_factory=dict, description="Custom resources of an engine.")
    accelerator_type: str | None = Field(default=None, description="As accelerator_type of the config.")
    label_selector: dict[str, str] = Field(default_factory=dict, description="Labels that the node must have.")
    runtime_env: Any = Field(
        default=None, description="Write it as runtime_env of the config.", json_schema_extra=REFUSED
    )
    fallback_strategy: Any = Field(
        default=None, description="Both pools of a deployment are placed by one rule.", json_schema_extra=REFUSED
    )


class DeploymentConfig(SpecModel):
    """``deployment_config``: the options of a Serve deployment."""

    autoscaling_config: AutoscalingConfig = Field(
        default=AutoscalingConfig(), description="How many engines, and when their number changes."
    )
    num_replicas: int | Literal["auto"] | None = Field(
        default=None, description="A fixed number of engines, 1 to 1024, or auto: 1 to 100."
    )
    ray_actor_options: ActorOptions = Field(default=ActorOptions(), description="What an engine needs of a node.")
    max_replicas_per_node: int | None = Field(
        default=None, ge=1, le=100, description="Engines of the pool on one node at most, 1 to 100."
    )
    graceful_shutdown_timeout_s: float = Field(
        default=120.0, ge=0, le=86400, description="Seconds that the requests of a leaving engine may take to end."
    )
    health_check_period_s: float = Field(
        default=2.0, gt=0, le=3600, description="Seconds between two checks of an engine by Ray."
    )
    health_check_timeout_s: float = Field(
        default=10.0, gt=0, le=3600, description="Seconds that an engine may take to answer such a check."
    )
    name: str | None = Field(
        default=None, description="A pool's deployment is named by its role.", json_schema_extra=IGNORED
    )
    max_ongoing_requests: Any = Field(
        default=None,
        description="Requests do not pass through Serve's handles; router.upstream_connections_max bounds them.",
        json_schema_extra=IGNORED,
    )
    max_queued_requests: Any = Field(default=None, description="As max_ongoing_requests.", json_schema_extra=IGNORED)
    graceful_shutdown_wait_loop_s: Any = Field(
        default=None, description="The router reports when a leaving engine is idle.", json_schema_extra=IGNORED
    )
    logging_config: Any = Field(
        default=None, description="Ray's own logs are set for the whole application.", json_schema_extra=IGNORED
    )
    request_router_config: Any = Field(
        default=None,
        description="The router picks engines: write antiphon.router.policy.",
        json_schema_extra=REFUSED,
    )
    user_config: Any = Field(
        default=None, description="An engine is not changed while it runs.", json_schema_extra=REFUSED
    )
    gang_scheduling_config: Any = Field(
        default=None, description="Engines of several nodes are not in this version.", json_schema_extra=REFUSED
    )
    deployment_actors: Any = Field(
        default=None, description="There are no further actors beside an engine.", json_schema_extra=REFUSED
    )
    backpressure_config: Any = Field(
        default=None,
        description="The router bounds what it takes: write antiphon.router.connections_max.",
        json_schema_extra=REFUSED,
    )
    rolling_update_percentage: float | None = Field(
        default=None, description="Not in this version.", json_schema_extra=REFUSED
    )
    max_surge_percent: int | None = Field(default=None, description="Not in this version.", json_schema_extra=REFUSED)
    placement_group_bundle_label_selector: Any = Field(
        default=None, description="Write ray_actor_options.label_selector.", json_schema_extra=REFUSED
    )
    placement_group_bundles: Any = Field(
        default=None, description="Write placement_group_config.bundles of the config.", json_schema_extra=REFUSED
    )
    placement_group_strategy: Any = Field(
        default=None, description="Write placement_group_config.strategy of the config.", json_schema_extra=REFUSED
    )


class RuntimeEnv(SpecModel):
    """``runtime_env``: env_vars reach the engine; the rest is what Ray prepares for the actor that starts it."""

    env_vars: dict[str, EnvText] = Field(
        default_factory=dict, description="Environment variables of the engine; mapped to env of its pool."
    )
    working_dir: str | None = Field(default=None, description="Given to Ray.")
    py_modules: Any = Field(default=None, description="Given to Ray.")
    pip: Any = Field(default=None, description="Given to Ray.")
    uv: Any = Field(default=None, description="Given to Ray.")
    conda: Any = Field(default=None, description="Given to Ray.")
    image_uri: str | None = Field(default=None, description="Given to Ray.")
    container: Any = Field(default=None, description="Given to Ray.")
    excludes: Any = Field(default=None, description="Given to Ray.")
    config: Any = Field(default=None, description="Given to Ray.")


class PlacementGroupConfig(SpecModel):
    """``placement_group_config``: what one engine reserves; it runs on one node."""

    bundles: list[Resources] = Field(
        default_factory=list, max_length=256, description="What an engine needs; the bundles are added up."
    )
    bundle_per_worker: Resources = Field(
        default_factory=dict,
        description="What each GPU worker of an engine needs; multiplied by tensor_parallel_size.",
    )
    strategy: Literal["PACK", "STRICT_PACK"] = Field(
        default="PACK", description="An engine runs on one node, so both mean that; SPREAD would part it."
    )


class AcceleratorConfig(SpecModel):
    """``accelerator_config``."""

    kind: Literal["cpu", "gpu"] | None = Field(default=None, description="Mapped to device of the pool.")


class ExperimentalConfigs(SpecModel):
    """``experimental_configs``: the keys that Ray reads."""

    NIXL_SIDE_CHANNEL_PORT_BASE: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Mapped to side_channel_port of the pool: a replica takes the first free port from there on.",
    )
    stream_batching_interval_ms: float | None = Field(
        default=None, description="Tokens are passed on as they come.", json_schema_extra=IGNORED
    )
    prewarm_prefill_decode: bool | None = Field(
        default=None,
        alias="_prewarm_prefill_decode",
        description="Pairs are warmed before traffic: router.warm_pairs.",
        json_schema_extra=IGNORED,
    )
    pd_tokenize_once: bool | None = Field(default=None, description="Both engines tokenize.", json_schema_extra=IGNORED)
    KV_EVENTS_PORT_BASE: int | None = Field(
        default=None, description="Ports of events are chosen by the replica.", json_schema_extra=IGNORED
    )
    KV_TOKEN_PORT_BASE: int | None = Field(
        default=None, description="As KV_EVENTS_PORT_BASE.", json_schema_extra=IGNORED
    )
    KV_INDEXER_THREADS: int | None = Field(
        default=None, description="The router keeps its index itself.", json_schema_extra=IGNORED
    )
    MORI_HANDSHAKE_PORT_BASE: int | None = Field(
        default=None, description="MoRIIO is not in this version.", json_schema_extra=REFUSED
    )
    MORI_NOTIFY_PORT_BASE: int | None = Field(
        default=None, description="MoRIIO is not in this version.", json_schema_extra=REFUSED
    )


class LLMSection(SpecModel):
    """``prefill_config`` or ``decode_config``."""

    model_loading_config: ModelLoadingConfig = Field(description="The model, the same in both.")
    engine_kwargs: Annotated[dict[str, Any], BeforeValidator(_dashes)] = Field(
        default_factory=dict, description="Arguments of vLLM by their Python names, kv_transfer_config among them."
    )
    deployment_config: DeploymentConfig = Field(
        default=DeploymentConfig(), description="Options of the Serve deployment."
    )
    runtime_env: RuntimeEnv = Field(default=RuntimeEnv(), description="Environment of the engine.")
    accelerator_type: str | None = Field(
        default=None, min_length=1, description="Kind of GPU that the node must have, by Ray's name; implies a GPU."
    )
    accelerator_config: AcceleratorConfig = Field(default=AcceleratorConfig(), description="CPU or GPU.")
    placement_group_config: PlacementGroupConfig = Field(
        default=PlacementGroupConfig(), description="What an engine reserves on its node."
    )
    experimental_configs: ExperimentalConfigs = Field(
        default=ExperimentalConfigs(), description="Further options of Ray's builder."
    )
    llm_engine: Literal["vLLM"] = Field(default="vLLM", description="There is no other.")
    log_engine_metrics: bool | None = Field(
        default=None,
        description="Engines always serve their metrics, by which pools are scaled.",
        json_schema_extra=IGNORED,
    )
    lora_config: Any = Field(
        default=None, description="Adapters loaded at run time are not in this version.", json_schema_extra=REFUSED
    )
    server_cls: Any = Field(
        default=None, description="An engine is a vLLM process, not a class.", json_schema_extra=REFUSED
    )
    callback_config: Any = Field(
        default=None, description="An engine is a vLLM process without such hooks.", json_schema_extra=REFUSED
    )


class PDServingArgs(SpecModel):
    """``pd_config``: the two configs, the ingress, and what Ray's schema has no word for."""

    prefill_config: LLMSection = Field(description="The engines that compute prompts.")
    decode_config: LLMSection = Field(description="The engines that generate tokens.")
    ingress_deployment_config: DeploymentConfig = Field(
        default=DeploymentConfig(),
        description="Options of the deployment that forwards Serve's requests to the router.",
    )
    proxy_deployment_config: DeploymentConfig = Field(
        default=DeploymentConfig(), description="The former name of ingress_deployment_config."
    )
    antiphon: dict[str, Any] = Field(
        default_factory=dict,
        description="Parts of antiphon.yaml that Ray's schema has no word for, such as router, cache, handoff, or "
        "engine.kind. Not in Ray's schema.",
    )
    ingress_cls_config: Any = Field(
        default=None, description="The ingress forwards to the router and nothing else.", json_schema_extra=REFUSED
    )
    proxy_cls_config: Any = Field(
        default=None, description="The former name of ingress_cls_config.", json_schema_extra=REFUSED
    )


class LLMConfig(LLMSection):
    """A config written in Python, as in ``LLMConfig(model_loading_config={"model_id": "org/name"})``.

    Raises:
        SpecError: with every problem found.
    """

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SpecError(explained(error, LLMSection)) from error


def parse(pd_config: object, folder: Path | None = None) -> PDServingArgs:
    """``pd_config`` as types.

    Args:
        pd_config: ``prefill_config`` and ``decode_config``, each an :class:`LLMConfig`, a mapping, or the name of a
            YAML file that holds one.
        folder: what such a name is relative to (default: the working directory).

    Raises:
        SpecError: with every problem found, each with its path from ``pd_config``.
    """
    if isinstance(pd_config, PDServingArgs):
        return pd_config
    if not isinstance(pd_config, Mapping):
        fix = f"write a mapping with {' and '.join(CONFIGS)}"
        raise SpecError([Problem("pd_config", f"is a {type(pd_config).__name__}, not a mapping", fix)])
    values = dict(pd_config)
    for name in CONFIGS:
        if isinstance(values.get(name), str | Path):
            values[name] = _config_file(name, (folder or Path()) / values[name])
    try:
        return PDServingArgs.model_validate(values)
    except ValidationError as error:
        raise SpecError(explained(error, PDServingArgs)) from error


def _config_file(name: str, path: Path) -> dict[str, Any]:
    try:
        return read_mapping(path)
    except SpecError as error:
        fix = f"write a mapping, or the name of a YAML file that holds {name}"
        raise SpecError(
            [replace(problem, field=f"{name}: {problem.field}", fix=fix) for problem in error.problems]
        ) from None


def explained(error: ValidationError, model: type[SpecModel]) -> list[Problem]:
    """As ``explain``, which names the page about the spec where there is no near key."""
    return [
        replace(problem, fix=problem.fix.replace("docs/configuration.md", "docs/ray.md"))
        for problem in explain(error, model)
    ]


def set_aside(section: SpecModel, path: str) -> Iterator[Problem | Notice]:
    """What is written in ``section`` at ``path`` and not used: a notice where ignored, a problem where refused."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{path}.{field.alias or name}".lstrip(".")
        if name not in section.model_fields_set or value is None:
            continue
        if isinstance(value, SpecModel):
            yield from set_aside(value, key)
        fate = fate_of(field.json_schema_extra)
        text = (field.description or "").rstrip(".")
        if fate == "ignored":
            yield Notice(key, f"is ignored: {text[:1].lower()}{text[1:]}")
        elif fate == "refused":
            is_advice = text.startswith("Write ")
            yield Problem(
                key,
                "is not used" if is_advice else f"is not used: {text[:1].lower()}{text[1:]}",
                text[:1].lower() + text[1:] if is_advice else "remove it",
            )


def fate_of(extra: object) -> str:
    """``mapped``, ``ignored`` or ``refused``, from what a field carries."""
    fate = extra.get("fate") if isinstance(extra, dict) else None
    return fate if isinstance(fate, str) else "mapped"
