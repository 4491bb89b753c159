"""How many replicas a pool has, by what they are scaled, and what each needs of a node.

Invariants of a :class:`ReplicaSettings`: 1 <= min <= initial <= max; a pool that can grow has a target; the resources
are those of one engine, which runs on one node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from antiphon.config.problems import Notice, Problem
from antiphon.config.spec import Pool
from antiphon.ray.schema import AutoscalingConfig, DeploymentConfig, LLMSection

Role = Pool | Literal["ingress"]
AUTO_REPLICAS_MAX = 100
"""What num_replicas: auto means to Ray."""
TARGET_UNCACHED_TOKENS = 16384
"""Two steps of a prefill engine on a large GPU, 8192 tokens each: one that runs and one that waits."""
TARGET_FIRST_TOKEN_S = 2.0
"""Longer, and a reader waits for an answer to begin. Only waiting is shortened by more engines (``autoscaling.py``)."""
TARGET_KV_USAGE = 0.8
"""The rest is for sequences that grow: past it vLLM begins to preempt them."""
TARGET_RUNNING_SHARE = 0.75
"""Of max_num_seqs, past which requests would wait."""
ROLE_TARGETS: dict[str, tuple[str, ...]] = {
    "prefill": ("ongoing_requests", "uncached_tokens", "first_token_s"),
    "decode": ("ongoing_requests", "kv_usage"),
    "ingress": ("ongoing_requests",),
}


@dataclass(frozen=True)
class Targets:
    """What a replica should carry; the pool grows when the mean of any of them is above. None: not looked at."""

    ongoing_requests: float | None = None
    """Requests running and waiting in an engine."""
    uncached_tokens: int | None = None
    """Prompt tokens that an engine has still to compute, by what its latest requests computed."""
    first_token_s: float | None = None
    """Seconds that a prefill takes, waiting included."""
    kv_usage: float | None = None
    """Share of the KV blocks in use, 0 to 1; more where requests wait for room."""


@dataclass(frozen=True)
class ReplicaSettings:
    """The replicas of one pool, or of the ingress."""

    role: Role
    min_replicas: int
    max_replicas: int
    initial_replicas: int
    targets: Targets
    upscale_delay_s: float
    downscale_delay_s: float
    look_back_s: float
    metrics_interval_s: float
    upscaling_factor: float
    downscaling_factor: float
    drain_timeout_s: float
    health_interval_s: float
    health_timeout_s: float
    max_replicas_per_node: int | None
    resources: dict[str, float] = field(default_factory=dict)
    """Of one replica, by Ray's names: CPU, GPU, memory (bytes), and custom ones."""
    accelerator_type: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    runtime_env: dict[str, Any] = field(default_factory=dict)
    """What Ray prepares for the actor, without env_vars."""
    files: tuple[str, ...] = ()
    """Files that the environment names, and that were read where the application was built."""

    def __post_init__(self) -> None:
        assert 1 <= self.min_replicas <= self.initial_replicas <= self.max_replicas, self

    @property
    def only_of_ray(self) -> list[str]:
        """What of it a spec, whose pools have a fixed size, cannot say."""
        says = {
            "min_replicas": self.min_replicas != self.initial_replicas,
            "max_replicas": self.max_replicas != self.initial_replicas,
            "targets": self.max_replicas != self.min_replicas,
            "accelerator_type": self.accelerator_type is not None,
            "labels": bool(self.labels),
            "runtime_env": bool(self.runtime_env),
        }
        return [name for name, is_said in says.items() if is_said]


@dataclass(frozen=True)
class Replicas:
    """What :func:`replicas_of` found; ``settings`` is None where a problem leaves none."""

    settings: ReplicaSettings | None
    problems: tuple[Problem, ...]
    notices: tuple[Notice, ...]


def replicas_of(role: Role, options: DeploymentConfig, path: str, max_num_seqs: int | None = None) -> Replicas:
    """The replicas that ``options``, at ``path``, ask for, without what they need of a node.

    Args:
        max_num_seqs: the requests that an engine of the pool runs at once, where it is set.
    """
    scaling = options.autoscaling_config
    problems = list(_contradictions(role, options, path))
    counts = _counts(options)
    lowest, initial, most = counts
    where = f"{path}.autoscaling_config"
    if most < lowest:
        problems.append(Problem(f"{where}.max_replicas", f"{most} is below min_replicas, {lowest}", "raise it"))
    elif not lowest <= initial <= most:
        message = f"{initial} is not between min_replicas and max_replicas, {lowest} and {most}"
        problems.append(Problem(f"{where}.initial_replicas", message, "write a number between them, or leave it out"))
    if problems:
        return Replicas(None, tuple(problems), ())
    targets, filled = _targets(role, scaling, max_num_seqs if lowest < most else None)
    if lowest == most:
        filled = []
    settings = ReplicaSettings(
        role=role,
        min_replicas=lowest,
        max_replicas=most,
        initial_replicas=initial,
        targets=targets,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
        look_back_s=scaling.look_back_period_s,
        metrics_interval_s=scaling.metrics_interval_s,
        upscaling_factor=scaling.upscaling_factor or scaling.upscale_smoothing_factor or scaling.smoothing_factor,
        downscaling_factor=scaling.downscaling_factor or scaling.downscale_smoothing_factor or scaling.smoothing_factor,
        drain_timeout_s=options.graceful_shutdown_timeout_s,
        health_interval_s=options.health_check_period_s,
        health_timeout_s=options.health_check_timeout_s,
        max_replicas_per_node=options.max_replicas_per_node,
    )
    return Replicas(settings, (), tuple(Notice(f"{where}.target_{name}", text) for name, text in filled))


def resources_of(config: LLMSection, tensor_parallel_size: int, path: str) -> tuple[dict[str, float], list[Problem]]:
    """What one engine reserves by ``config``, at ``path``, by Ray's names; empty where nothing is written."""
    group, actor = config.placement_group_config, config.deployment_config.ray_actor_options
    problems = []
    found: dict[str, float] = {}
    if group.bundles and group.bundle_per_worker:
        message = "bundles and bundle_per_worker are both written"
        return {}, [Problem(f"{path}.placement_group_config", message, "keep one of them")]
    for bundle in group.bundles:
        for name, each in bundle.items():
            found[name] = found.get(name, 0) + each
    for name, each in group.bundle_per_worker.items():
        found[name] = found.get(name, 0) + each * tensor_parallel_size
    own: dict[str, float | None] = {
        "CPU": actor.num_cpus,
        "GPU": actor.num_gpus,
        "memory": actor.memory,
        **actor.resources,
    }
    for name, amount in own.items():
        if amount is not None and name in found and found[name] != amount:
            message = f"{amount:g} {name}, but placement_group_config has {found[name]:g}"
            fix = "write it in one of the two"
            problems.append(Problem(f"{path}.deployment_config.ray_actor_options", message, fix))
        elif amount is not None:
            found[name] = amount
    gpus = found.get("GPU", 0)
    if gpus >= 1 and gpus != tensor_parallel_size:
        message = f"an engine reserves {gpus:g} GPUs, but tensor_parallel_size is {tensor_parallel_size}"
        problems.append(Problem(f"{path}.placement_group_config", message, "make them equal"))
    return found, problems


def _contradictions(role: Role, options: DeploymentConfig, path: str) -> list[Problem]:
    scaling, number = options.autoscaling_config, options.num_replicas
    problems = []
    if isinstance(number, int):
        if not 1 <= number <= 1024:
            message = f"{number} is out of range: it must be 1 to 1024"
            problems.append(Problem(f"{path}.num_replicas", message, "an empty pool would fail every request"))
        if "autoscaling_config" in options.model_fields_set:
            message = "a fixed number, and autoscaling_config"
            problems.append(Problem(f"{path}.num_replicas", message, "keep one of them, or write auto"))
    for name in ("uncached_tokens", "first_token_s", "kv_usage"):
        if getattr(scaling, f"target_{name}") is not None and name not in ROLE_TARGETS[role]:
            known = " and ".join(f"target_{each}" for each in ROLE_TARGETS[role])
            place = f"{path}.autoscaling_config.target_{name}"
            problems.append(Problem(place, f"says nothing about the {role} replicas", f"write {known}"))
    return problems


def _counts(options: DeploymentConfig) -> tuple[int, int, int]:
    """Lowest, initial and largest number."""
    scaling, number = options.autoscaling_config, options.num_replicas
    if isinstance(number, int):
        return number, number, number
    lowest = scaling.min_replicas
    most = scaling.max_replicas or (AUTO_REPLICAS_MAX if number == "auto" else lowest)
    return lowest, scaling.initial_replicas or lowest, most


def _targets(role: Role, scaling: AutoscalingConfig, max_num_seqs: int | None) -> tuple[Targets, list[tuple[str, str]]]:
    """What is written; where nothing is, what the role is scaled by, each with its words."""
    written = {name: getattr(scaling, f"target_{name}") for name in ROLE_TARGETS[role]}
    if any(value is not None for value in written.values()):
        return Targets(**written), []
    if role == "prefill":
        filled: dict[str, tuple[Any, str]] = {
            "uncached_tokens": (TARGET_UNCACHED_TOKENS, "prompt tokens to be computed for each engine"),
            "first_token_s": (TARGET_FIRST_TOKEN_S, "seconds that a prefill takes, waiting included"),
        }
    elif role == "decode":
        filled = {"kv_usage": (TARGET_KV_USAGE, "of the KV blocks in use")}
        if max_num_seqs is not None:
            filled["ongoing_requests"] = (max(1.0, max_num_seqs * TARGET_RUNNING_SHARE), "requests in each engine")
    else:
        filled = {"ongoing_requests": (100.0, "requests in each ingress replica")}
    texts = [(name, f"{value:g} {text}, since none is written") for name, (value, text) in filled.items()]
    return Targets(**{name: value for name, (value, _) in filled.items()}), texts
