"""The spec: ``antiphon.yaml`` as types, every knob once with its unit, range and reason.

Invariants of a :class:`Spec` that exists: no unknown key, every value in its range, both pools resolved (a knob that
``prefill`` or ``decode`` does not set itself holds the value of ``engine``). What concerns more than one value, or this
host, is in ``checks.py``; defaults that depend on the device are filled in by ``resolve.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from antiphon.config.cache_spec import CacheSpec
from antiphon.config.model import SpecModel
from antiphon.config.router_spec import RouterSpec
from antiphon.config.simulated_spec import SimulatedSpec
from antiphon.config.supervisor_spec import SupervisorSpec
from antiphon.config.tracing_spec import TracingSpec
from antiphon.config.units import Bytes

Pool = Literal["prefill", "decode"]
POOLS: tuple[Pool, Pool] = ("prefill", "decode")
ArgValue = bool | int | float | str | list[Any] | dict[str, Any]


def _absolute(path: str) -> str:
    """A path relative to the working directory or the home folder, made absolute; anything else as it is."""
    if path.startswith(("./", "../", "~")):
        return str(Path(path).expanduser().absolute())
    return path


def _flag_name(args: dict[str, ArgValue]) -> dict[str, ArgValue]:
    """vLLM argument names as vLLM prints them: no leading dashes, dashes inside."""
    return {name.lstrip("-").replace("_", "-"): value for name, value in args.items()}


def _env_text(value: object) -> object:
    """Numbers in ``env`` as text, as a shell would have them; a boolean stays and is refused, being ambiguous there."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _json_text(value: object) -> object:
    """JSON as people copy it from a command line, quotes included, as the mapping that it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON at character {error.pos + 1}: write a mapping") from error


ModelPath = Annotated[str, AfterValidator(_absolute)]
EnvText = Annotated[str, BeforeValidator(_env_text)]
TransferConfig = Annotated[dict[str, Any], BeforeValidator(_json_text)]
EngineArgs = Annotated[dict[str, ArgValue], AfterValidator(_flag_name)]
HostName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._:-]+$")]


class ModelSpec(SpecModel):
    """The ``model:`` section: the same for both pools."""

    path: ModelPath = Field(
        min_length=1,
        description="Folder with the weights, or a hub id. NIXL compares this text between prefill and decode, so "
        "there is "
        "one for both pools.",
    )
    served_name: str | None = Field(
        default=None, min_length=1, description="Model name that clients send (default: the last component of path)."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of the weights and the KV. float32 gives the same greedy text on prefill and decode alike; "
        "auto is what the model was saved in.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=100_000_000,
        description="Longest prompt plus output in tokens, 1 to 1e8 (default: the model's).",
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="auto reads the weights; dummy makes random ones, to measure speed without a download.",
    )

    @property
    def served(self) -> str:
        """The served model name."""
        return self.served_name or self.path.rstrip("/").rsplit("/", 1)[-1]


class EngineSpec(SpecModel):
    """The ``engine:`` section: what both pools share unless a pool sets it itself."""

    kind: Literal["vllm", "simulated"] = Field(
        default="vllm",
        description="vllm is the real engine; simulated speaks the same API with a stated latency model.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="auto is cuda where this host has an NVIDIA GPU, else cpu. Name it when the engines run on "
        "other hosts.",
    )
    python: str = Field(
        default_factory=lambda: sys.executable,
        min_length=1,
        description="Interpreter that has vLLM and NIXL (default: the one that runs antiphon).",
    )
    block_size_tokens: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Tokens in a KV block, 1 to 4096 (default: vLLM's). A multiple of 32 on CPU.",
    )
    kv_cache_dtype: str = Field(
        default="auto",
        pattern=r"^[a-z0-9_]+$",
        description="Type that the KV cache is stored in, a --kv-cache-dtype of vLLM; auto is model.dtype.",
    )
    kv_memory_bytes: Bytes | None = Field(
        default=None,
        ge=1_000_000,
        le=2**50,
        description="KV cache of each engine in bytes, 1 MB to 1 PiB, also 400MB or 2GiB. Default: 400 MB on CPU, "
        "where "
        "touching more costs seconds at start; on CUDA what gpu_memory_utilization leaves.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of a GPU's memory that an engine may use, above 0 to 1. CUDA only."
    )
    enforce_eager: bool | None = Field(
        default=None,
        description="Do not compile or capture graphs. Default: true on CPU, where compiling takes minutes; false "
        "on CUDA.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="OpenMP threads of an engine on CPU, 1 to 1024 (default: the host's cores shared by its engines).",
    )
    nixl_progress_thread: bool | None = Field(
        default=None,
        description="Whether NIXL polls on a thread of its own (default: off on CPU, where that thread would keep a "
        "core busy even while the engine is idle; as vLLM has it on CUDA). Off, the engine's own steps drive NIXL.",
    )
    spin_wait: bool | None = Field(
        default=None,
        description="Whether vLLM's processes wait for each other in a loop that yields (default: off on CPU, where "
        "such loops take the cores from the model; as vLLM has it on CUDA). Off, they sleep 0.1 ms at a time.",
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Requests that an engine runs at once, 1 to 1e6 (default: vLLM's).",
    )
    dev_mode: bool = Field(
        default=False,
        description="Set VLLM_SERVER_DEV_MODE=1: cache reset and other control routes. Anyone who reaches the port "
        "may use them.",
    )
    args: EngineArgs = Field(
        default_factory=dict,
        description="Further vLLM arguments, name without dashes to value; true is a bare flag, false leaves it out.",
    )
    env: dict[str, EnvText] = Field(
        default_factory=dict, description="Further environment variables of the engine; they win over those set here."
    )
    simulated: SimulatedSpec = Field(
        default=SimulatedSpec(), description="Latency model of the simulated engine; ignored by vllm."
    )


class PoolSpec(EngineSpec):
    """The ``prefill:`` and ``decode:`` sections: the pool, and any knob of ``engine`` that differs in it."""

    replicas: int = Field(default=1, ge=1, le=1024, description="Engines in the pool, 1 to 1024.")
    hosts: list[HostName] = Field(
        default=["127.0.0.1"],
        min_length=1,
        max_length=1024,
        description="Hosts as their peers reach them; replica i runs on hosts[i % len(hosts)].",
    )
    bind: HostName | None = Field(
        default=None,
        description="Address that the engines listen on (default: a loopback host itself, otherwise 0.0.0.0).",
    )
    port: int = Field(
        default=8001,
        ge=1,
        le=65535,
        description="HTTP port of the first engine on a host, 1 to 65535; the next gets one more.",
    )
    side_channel_port: int = Field(
        default=5600,
        ge=1,
        le=65535,
        description="NIXL handshake port of the first engine on a host, 1 to 65535; the next gets one more.",
    )
    kv_replay_port: int = Field(
        default=5800,
        ge=1,
        le=65535,
        description="Port at which the first engine on a host repeats KV events that the router has missed, 1 to "
        "65535; the next gets one more. Used with router.policy kv_aware or router.local_max_tokens.",
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, le=256, description="GPUs that one engine is spread over, 1 to 256."
    )
    devices: list[int | str] = Field(
        default_factory=list,
        max_length=4096,
        description="CUDA device ids for each replica in turn, tensor_parallel_size each (default: as CUDA counts "
        "them).",
    )
    model_path: ModelPath | None = Field(
        default=None, min_length=1, description="Must equal model.path; here because NIXL compares it, and checked."
    )
    kv_transfer_config: TransferConfig | None = Field(
        default=None,
        description="A --kv-transfer-config as written for vLLM (default: made from handoff). Engine ids are "
        "replaced and a "
        "nested kv_load_failure_policy is moved to the top, both with a notice.",
    )


class PrefillSpec(PoolSpec):
    """The ``prefill:`` section."""


class DecodeSpec(PoolSpec):
    """The ``decode:`` section."""

    port: int = Field(
        default=8101,
        ge=1,
        le=65535,
        description="HTTP port of the first engine on a host, 1 to 65535; the next gets one more.",
    )
    side_channel_port: int = Field(
        default=5700,
        ge=1,
        le=65535,
        description="NIXL handshake port of the first engine on a host, 1 to 65535; the next gets one more.",
    )
    kv_replay_port: int = Field(
        default=5900,
        ge=1,
        le=65535,
        description="Port at which the first engine on a host repeats KV events that the router has missed, 1 to "
        "65535; the next gets one more. Used with router.policy kv_aware or router.local_max_tokens.",
    )


class HandoffSpec(SpecModel):
    """The ``handoff:`` section: how the KV of a prompt gets from prefill to decode."""

    kind: Literal["nixl", "cache"] = Field(
        default="nixl",
        description="nixl: the decode engine pulls from the prefill engine. cache: the prefill engine stores in its "
        "cache server, from which that of the decode engine has it: what is stored survives the prefill engine. It "
        "needs one server for both pools, cache.peers, or a tier in cache.l2 that all servers share.",
    )
    kv_load_failure_policy: Literal["fail", "recompute"] = Field(
        default="fail",
        description="When the pull fails: fail the request, so that the router knows; or recompute the prompt on "
        "the decode "
        "engine, silently slower.",
    )
    lease_s: int = Field(
        default=30,
        ge=6,
        le=86400,
        description="Seconds a prefill engine keeps KV that nobody has pulled, 6 to 86400. vLLM renews it every "
        "lease_s // 6 "
        "seconds, in whole seconds.",
    )
    backends: list[str] = Field(
        default=["UCX"], min_length=1, max_length=8, description="NIXL backends in order of preference."
    )
    kv_buffer_device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Memory that NIXL sends from: auto is the device of the engine; cpu stages through the host.",
    )


class Spec(SpecModel):
    """A whole deployment."""

    name: str = Field(
        default="antiphon",
        pattern=r"^[a-z0-9-]{1,32}$",
        description="Name of the deployment: 1 to 32 of a-z, 0-9 and -. Folders of state and logs carry it.",
    )
    model: ModelSpec = Field(description="The model, the same for both pools.")
    engine: EngineSpec = Field(default=EngineSpec(), description="What both pools share unless a pool sets it itself.")
    prefill: PrefillSpec = Field(default=PrefillSpec(), description="The engines that compute prompts.")
    decode: DecodeSpec = Field(default=DecodeSpec(), description="The engines that generate tokens.")
    handoff: HandoffSpec = Field(default=HandoffSpec(), description="How KV gets from prefill to decode.")
    cache: CacheSpec = Field(default=CacheSpec(), description="The cache servers that keep KV for later requests.")
    router: RouterSpec = Field(default=RouterSpec(), description="The router that clients talk to.")
    tracing: TracingSpec = Field(default=TracingSpec(), description="Where spans and metrics are sent.")
    supervisor: SupervisorSpec = Field(
        default=SupervisorSpec(), description="How antiphon up starts, watches and stops the processes."
    )

    @model_validator(mode="after")
    def _resolve_pools(self) -> Spec:
        """Give each pool the engine knobs that it does not set itself; mappings are merged key by key."""
        for pool in POOLS:
            # The model is frozen for everyone else; a validator that returned a copy would be ignored by pydantic.
            self.__dict__[pool] = _resolved(self.engine, self.pool(pool))
        return self

    def pool(self, pool: Pool) -> PoolSpec:
        """The section of ``pool``."""
        return self.prefill if pool == "prefill" else self.decode

    def knob_path(self, pool: Pool, name: str) -> str:
        """Where the engine knob ``name`` of ``pool`` gets its value: ``prefill.device`` or ``engine.device``."""
        same = getattr(self.pool(pool), name) == getattr(self.engine, name)
        return f"engine.{name}" if same else f"{pool}.{name}"


def _resolved(engine: EngineSpec, pool: PoolSpec) -> PoolSpec:
    """``pool`` with what it does not set itself taken from ``engine``."""
    own = pool.model_fields_set
    update: dict[str, Any] = {
        name: getattr(engine, name)
        for name in EngineSpec.model_fields
        if name in engine.model_fields_set and name not in own
    }
    for name in ("args", "env"):
        update[name] = {**getattr(engine, name), **getattr(pool, name)}
    simulated = {
        part: getattr(source, part) for source in (engine.simulated, pool.simulated) for part in source.model_fields_set
    }
    update["simulated"] = SimulatedSpec(**simulated)
    return pool.model_copy(update=update)
