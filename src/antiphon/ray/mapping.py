"""What a ``pd_config`` means: a spec, and for each pool how many replicas and what each needs.

Invariants of a :class:`Mapped`: the spec compiles; its pools have the initial number of replicas; it has no hosts and
no devices, which Ray chooses; everything that was filled in, replaced or ignored is among the notices. Every problem
names the key of ``pd_config``, also where a rule of the spec found it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from antiphon.config.compile import compile_all
from antiphon.config.explain import nearest
from antiphon.config.knobs import knobs, section_model
from antiphon.config.problems import Notice, Problem, SpecError
from antiphon.config.resolve import CPU_KV_MEMORY_BYTES, Machine, this_machine
from antiphon.config.spec import POOLS, Pool, Spec
from antiphon.config.tier_spec import parse_tier
from antiphon.config.units import format_bytes
from antiphon.ray import engine_kwargs as kwargs
from antiphon.ray.lmcache_files import (
    CONNECTOR_KEYS,
    ENV_KEYS,
    LmcacheFile,
    not_built,
    read_lmcache_file,
)
from antiphon.ray.scaling import ReplicaSettings, Role, replicas_of, resources_of
from antiphon.ray.schema import DeploymentConfig, LLMSection, PDServingArgs, explained, set_aside

LMCACHE = "LMCacheConnectorV1"
CONFIG_FILE, LMCACHE_PREFIX = "LMCACHE_CONFIG_FILE", "LMCACHE_"
ENGINE_CPUS, SIMULATED_CPUS = 0.5, 0.1
"""Logical CPUs of an engine on CPU, where nothing is written: they bound how many Ray puts on a node, and nothing else.
A node of two cores takes one of each pool and two more."""
LEFT_TO_RAY = {
    "supervisor.restart": "Ray starts again what has ended",
    "supervisor.state_dir": "Ray knows what runs",
    "supervisor.log_dir": "logs are beside those of Ray",
    "prefill.hosts": "Ray places the engines",
    "decode.hosts": "Ray places the engines",
    "prefill.bind": "a replica listens where its node is reached",
    "decode.bind": "a replica listens where its node is reached",
    "prefill.devices": "Ray gives each engine its GPUs",
    "decode.devices": "Ray gives each engine its GPUs",
    "prefill.replicas": "write deployment_config.autoscaling_config",
    "decode.replicas": "write deployment_config.autoscaling_config",
}
"""Parts of the spec that have no place under ``antiphon``, and why."""


@dataclass(frozen=True)
class Mapped:
    """What a ``pd_config`` means."""

    spec: Spec
    pools: dict[Pool, ReplicaSettings]
    ingress: ReplicaSettings
    notices: tuple[Notice, ...]


@dataclass
class _Draft:
    """A spec in the making: values by section, and where in ``pd_config`` each came from."""

    raw: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    def put(self, path: str, value: Any, origin: str, inner: str | None = None) -> None:
        """``value`` at the dotted ``path`` of the spec; a problem where another key has set something else there.

        Args:
            inner: the key in the mapping at ``path``, which may have dots of its own.
        """
        parents, last = path.split("."), inner
        if last is None:
            last = parents.pop()
        place: Any = self.raw
        for part in parents:
            place = place.setdefault(part, {}) if isinstance(place, dict) else None
        whole = path if inner is None else f"{path}.{inner}"
        if not isinstance(place, dict):
            self.problems.append(Problem(origin, f"{'.'.join(parents)} is a value elsewhere", "make it a section"))
        elif last in place and place[last] != value:
            other = self.origins[whole]
            is_of_both = {origin.partition(".")[0], other.partition(".")[0]} == {"prefill_config", "decode_config"}
            remedy = "make them equal" if is_of_both else "make them equal, or keep one"
            self.problems.append(Problem(origin, f"{value!r}, but {other} has {place[last]!r}", remedy))
        else:
            place[last] = value
            self.origins.setdefault(whole, origin)

    def add(self, *found: Problem | Notice) -> None:
        self.problems += [item for item in found if isinstance(item, Problem)]
        self.notices += [item for item in found if isinstance(item, Notice)]

    def has(self, path: str) -> bool:
        return path in self.origins

    def engine_value(self, pool: Pool, name: str) -> Any:
        """What ``antiphon`` says about the knob ``name`` of the engines of ``pool``; None where nothing."""
        sections = [self.raw.get(part) for part in (pool, "engine")]
        return next((part[name] for part in sections if isinstance(part, dict) and name in part), None)

    def renamed(self, found: Problem | Notice) -> Any:
        """``found``, which names a field of the spec, with the key of ``pd_config`` that set it."""
        for path in sorted(self.origins, key=len, reverse=True):
            if found.field == path or found.field.startswith((f"{path}.", f"{path}[")):
                return replace(found, field=self.origins[path] + found.field[len(path) :])
        return found


def mapped(
    args: PDServingArgs, *, name: str | None = None, folder: Path | None = None, machine: Machine | None = None
) -> Mapped:
    """The spec and the replicas that ``args`` mean.

    Args:
        name: the name of the deployment (default: the spec's own).
        folder: what the names of LMCache's files are relative to (default: the working directory).
        machine: says whether there are GPUs where the configs do not (default: this one).

    Raises:
        SpecError: with every problem found.
    """
    machine = machine or this_machine()
    draft = _Draft()
    draft.add(*set_aside(args, ""))
    _overlay(draft, args.antiphon)
    pools: dict[Pool, ReplicaSettings] = {}
    for pool in POOLS:
        config = args.prefill_config if pool == "prefill" else args.decode_config
        _model(draft, config, f"{pool}_config")
        _engine_kwargs(draft, pool, config)
        _environment(draft, pool, config, folder or Path())
        settings = _pool(draft, pool, config, machine)
        if settings is not None and (named := config.runtime_env.env_vars.get(CONFIG_FILE)) is not None:
            settings = replace(settings, files=(str(((folder or Path()) / named).absolute()),))
        if settings is not None:
            pools[pool] = settings
    _agree(draft, args)
    ingress = _ingress(draft, args)
    if name is not None and not draft.has("name"):
        draft.put("name", name, "name")
    spec = _checked(draft, machine)
    assert ingress is not None, "a missing ingress is a problem"
    return Mapped(spec, pools, ingress, tuple(dict.fromkeys(draft.notices)))


def _model(draft: _Draft, config: LLMSection, path: str) -> None:
    loading, where = config.model_loading_config, f"{path}.model_loading_config"
    source = loading.model_source or loading.model_id
    if "://" in source:
        fix = "fetch the weights to a folder that every node has, and write that"
        draft.problems.append(Problem(f"{where}.model_source", f"{source} is no folder and no hub id", fix))
    key = "model_source" if loading.model_source else "model_id"
    draft.put("model.served_name", loading.model_id, f"{where}.model_id")
    draft.put("model.path", source, f"{where}.{key}")


def _engine_kwargs(draft: _Draft, pool: Pool, config: LLMSection) -> None:
    base = f"{pool}_config.engine_kwargs"
    tokenizer = config.model_loading_config.tokenizer_source
    if tokenizer is not None:
        where = f"{pool}_config.model_loading_config.tokenizer_source"
        draft.put(f"{pool}.args", tokenizer, where, "tokenizer")
    for name, value in config.engine_kwargs.items():
        where = f"{base}.{name}"
        if value is None:
            continue
        if name in kwargs.REFUSED:
            draft.problems.append(Problem(where, "is not used", kwargs.REFUSED[name]))
        elif name in kwargs.ONE_ONLY:
            if value != 1:
                draft.problems.append(
                    Problem(where, f"{value!r}: an engine is one process group", kwargs.ONE_ONLY[name])
                )
        elif name in kwargs.ALWAYS:
            draft.notices.append(Notice(where, f"is ignored: {kwargs.ALWAYS[name]}"))
        elif name in kwargs.MODEL_FIELDS:
            draft.put(f"model.{kwargs.MODEL_FIELDS[name]}", value, where)
        elif name in kwargs.POOL_FIELDS:
            draft.put(f"{pool}.{kwargs.POOL_FIELDS[name]}", value, where)
        elif name == "distributed_executor_backend" and value not in kwargs.EXECUTORS:
            fix = "remove it, or write mp"
            draft.problems.append(Problem(where, f"{value!r}: an engine's workers are its own processes", fix))
        else:
            flag, arg = kwargs.as_arg(name, value)
            draft.put(f"{pool}.args", arg, where, flag)


def _environment(draft: _Draft, pool: Pool, config: LLMSection, folder: Path) -> None:
    """The environment, and what LMCache's variables in it ask for."""
    where = f"{pool}_config.runtime_env.env_vars"
    variables = config.runtime_env.env_vars
    for name, value in variables.items():
        if not name.startswith(LMCACHE_PREFIX):
            draft.put(f"{pool}.env", value, f"{where}.{name}", name)
            continue
        key = ENV_KEYS.get(name)
        if key is None:
            fix = f"write it as {name.removeprefix(LMCACHE_PREFIX).lower()} in the file of {CONFIG_FILE}"
            draft.problems.append(Problem(f"{where}.{name}", "is not read", fix))
        elif key.fate == "ignored":
            draft.notices.append(Notice(f"{where}.{name}", f"is ignored: {key.text}"))
    named = variables.get(CONFIG_FILE)
    found = LmcacheFile()
    if named is not None:
        found = read_lmcache_file((folder / named).absolute(), pool, f"{where}.{CONFIG_FILE}")
        draft.add(*found.problems, *found.notices)
        for path, value in found.values.items():
            draft.put(path, value, f"{where}.{CONFIG_FILE}: {named}")
    _lmcache_connector(draft, pool)
    draft.add(*not_built(found, f"{where}.{CONFIG_FILE}: {named}"))


def _lmcache_connector(draft: _Draft, pool: Pool) -> None:
    """LMCache's connector by itself hands KV over through the cache: ``handoff.kind`` says so.

    In a MultiConnector it is the cache connector, which the spec knows.
    """
    where = f"{pool}_config.engine_kwargs.kv_transfer_config"
    raw = draft.raw.get(pool, {}).get("kv_transfer_config")
    transfer = _mapping(raw)
    if transfer.get("kv_connector") != LMCACHE:
        return
    extra = transfer.get("kv_connector_extra_config") or {}
    for name in extra if isinstance(extra, dict) else ():
        key = CONNECTOR_KEYS.get(name)
        place = f"{where}.kv_connector_extra_config.{name}"
        if key is not None:
            draft.notices.append(Notice(place, f"is ignored: {key.text}"))
        else:
            near = nearest(name, list(CONNECTOR_KEYS))
            fix = f"did you mean {near}?" if near else f"remove it; known here: {', '.join(CONNECTOR_KEYS)}"
            draft.problems.append(Problem(place, "is not a known key", fix))
    text = f"{LMCACHE} alone: KV is handed over through the cache servers (handoff.kind: cache)"
    draft.notices.append(Notice(f"{where}.kv_connector", text))
    draft.put("handoff.kind", "cache", f"{where}.kv_connector")
    del draft.raw[pool]["kv_transfer_config"]  # what an engine gets for that way is made from the spec


def _mapping(raw: Any) -> dict[str, Any]:
    """A ``kv_transfer_config``, also where it is written as JSON; empty where it is neither."""
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except json.JSONDecodeError:
            return {}
    return raw if isinstance(raw, dict) else {}


def _pool(draft: _Draft, pool: Pool, config: LLMSection, machine: Machine) -> ReplicaSettings | None:
    """The replicas of ``pool``; its device and number in the draft, with the defaults of an engine on CPU."""
    path = f"{pool}_config"
    size = config.engine_kwargs.get("tensor_parallel_size") or 1
    size = size if isinstance(size, int) else 1  # another type is reported by the spec
    seqs = config.engine_kwargs.get("max_num_seqs")
    found = replicas_of(
        pool, config.deployment_config, f"{path}.deployment_config", seqs if isinstance(seqs, int) else None
    )
    resources, problems = resources_of(config, size, path)
    draft.add(*found.problems, *problems, *found.notices)
    accelerator = config.accelerator_type or config.deployment_config.ray_actor_options.accelerator_type
    if draft.engine_value(pool, "kind") == "simulated":
        resources.setdefault("CPU", SIMULATED_CPUS)
    else:
        _device(draft, pool, config, (resources, accelerator, machine, size))
    base = config.experimental_configs.NIXL_SIDE_CHANNEL_PORT_BASE
    if base is not None:
        draft.put(f"{pool}.side_channel_port", base, f"{path}.experimental_configs.NIXL_SIDE_CHANNEL_PORT_BASE")
    if found.settings is None:
        return None
    draft.put(f"{pool}.replicas", found.settings.initial_replicas, f"{path}.deployment_config")
    return replace(
        found.settings,
        resources=resources,
        accelerator_type=accelerator,
        labels=config.deployment_config.ray_actor_options.label_selector,
        runtime_env={
            name: value
            for name, value in config.runtime_env.model_dump(exclude={"env_vars"}, exclude_unset=True).items()
            if value is not None
        },
    )


def _device(
    draft: _Draft, pool: Pool, config: LLMSection, around: tuple[dict[str, float], str | None, Machine, int]
) -> None:
    """The device of ``pool`` in the draft, and what its engines reserve at least.

    It is what ``antiphon`` says, else what the config says, else auto, which is cpu where there is no GPU.

    Args:
        around: resources (added to), accelerator type, machine, tensor parallel size.
    """
    resources, accelerator, machine, size = around
    path, kind = f"{pool}_config", config.accelerator_config.kind
    said = draft.engine_value(pool, "device")
    if kind is not None:
        device = "cpu" if kind == "cpu" else "cuda"
    elif accelerator is not None or resources.get("GPU"):
        device = "cuda"
    elif said not in (None, "auto"):
        device = said
    else:
        device = "cpu" if resources or not machine.has_cuda else "auto"
    if said != device and device != "auto":
        draft.put(f"{pool}.device", device, f"{path}.accelerator_config")
    if device == "cpu":
        _cpu_defaults(draft, pool, config, resources)
    else:
        resources.setdefault("CPU", 1)
        resources.setdefault("GPU", size)


def _cpu_defaults(draft: _Draft, pool: Pool, config: LLMSection, resources: dict[str, float]) -> None:
    """Fill in what an engine on CPU needs and the config does not say, each with a notice."""
    path = f"{pool}_config"
    if not resources:
        if draft.engine_value(pool, "device") in (None, "auto") or draft.has(f"{pool}.device"):
            draft.notices.append(Notice(path, "names no GPU, and there is none here: its engines run on CPU"))
        draft.notices.append(
            Notice(f"{path}.placement_group_config", f'{{"bundles": [{{"CPU": {ENGINE_CPUS}}}]}} for each engine')
        )
    said = draft.engine_value(pool, "threads")
    resources.setdefault("CPU", said if isinstance(said, int) else ENGINE_CPUS)
    kwarg = f"{path}.engine_kwargs"
    size = format_bytes(CPU_KV_MEMORY_BYTES)
    threads = max(1, int(resources["CPU"]))
    defaults: list[tuple[str, str, Any, str]] = [
        ("enforce_eager", f"{kwarg}.enforce_eager", True, "true on CPU, where compiling takes minutes"),
        (
            "kv_memory_bytes",
            f"{kwarg}.kv_cache_memory_bytes",
            CPU_KV_MEMORY_BYTES,
            f"{size} of KV cache for each engine on CPU",
        ),
        ("threads", f"antiphon.{pool}.threads", threads, f"{threads}: the CPUs that an engine reserves, at least 1"),
    ]
    for name, origin, value, text in defaults:
        if draft.engine_value(pool, name) is None:
            draft.put(f"{pool}.{name}", value, origin)
            draft.notices.append(Notice(origin, text))


def _agree(draft: _Draft, args: PDServingArgs) -> None:
    """What is one value for both pools is written in both: an argument that one of them lacks is not the other's."""
    for name, own in kwargs.MODEL_FIELDS.items():
        values = [config.engine_kwargs.get(name) for config in (args.prefill_config, args.decode_config)]
        if values.count(None) == 1:
            lacking, having = ("decode", "prefill") if values[1] is None else ("prefill", "decode")
            message = f"is in {having}_config alone: model.{own} is one value for both pools"
            fix = f"write it in {lacking}_config too"
            draft.problems.append(Problem(f"{having}_config.engine_kwargs.{name}", message, fix))


def _ingress(draft: _Draft, args: PDServingArgs) -> ReplicaSettings | None:
    names = ("ingress_deployment_config", "proxy_deployment_config")
    written = [name for name in names if name in args.model_fields_set]
    if len(written) == 2:
        message = f"is the former name of {names[0]}, which is written too"
        draft.problems.append(Problem(names[1], message, f"keep {names[0]}"))
    options: DeploymentConfig = getattr(args, written[0] if written else names[0])
    role: Role = "ingress"
    found = replicas_of(role, options, written[0] if written else names[0])
    draft.add(*found.problems, *found.notices)
    actor = options.ray_actor_options
    if found.settings is None:
        return None
    resources = {"CPU": actor.num_cpus if actor.num_cpus is not None else 0, **actor.resources}
    return replace(found.settings, resources=resources, labels=actor.label_selector)


def _overlay(draft: _Draft, values: dict[str, Any]) -> None:
    """The parts under ``antiphon``, laid into the draft."""
    sections = {name for name, field in Spec.model_fields.items() if section_model(field) is not None}
    for name in [name for name in values if name in sections and not isinstance(values[name], dict)]:
        draft.add(Problem(f"antiphon.{name}", "is not a mapping", "write it as in antiphon.yaml"))
        values = {other: value for other, value in values.items() if other != name}
    for path, value in _leaves(values, ""):
        where = f"antiphon.{path}"
        left = next((each for each in LEFT_TO_RAY if path == each or path.startswith(f"{each}.")), None)
        if left is not None:
            draft.add(Problem(where, f"is not used with Ray: {LEFT_TO_RAY[left]}", "remove it"))
        elif path.rpartition(".")[2] in ("args", "env") and isinstance(value, dict):
            for name, item in value.items():
                draft.put(path, item, f"{where}.{name}", str(name))
        else:
            draft.put(path, value, where)


@functools.cache
def _knob_paths() -> frozenset[str]:
    return frozenset(knob.path for knob in knobs(Spec))


def _leaves(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The values by dotted path; a mapping that is a knob itself is one value."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and path not in _knob_paths():
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _checked(draft: _Draft, machine: Machine) -> Spec:
    """The spec, compiled once for what the rules of the spec say; SpecError with every problem, by key."""
    spec = None
    try:
        spec = Spec.model_validate(draft.raw)
    except ValidationError as error:
        found = [draft.renamed(problem) for problem in explained(error, Spec)]
        fields = {problem.field for problem in draft.problems}
        draft.problems += [problem for problem in found if problem.field not in fields]
    if spec is not None:
        compiled = compile_all(spec, machine)
        has_store = any(parse_tier(text).is_shared for text in spec.cache.l2)
        if spec.handoff.kind == "cache" and not spec.cache.peers and not has_store:
            text = (
                "cache: engines of one node hand over through its cache server; between nodes nothing is handed over, "
                "and the decode engine computes the prompt. Write cache.peers: true under antiphon, or name a store "
                "that all nodes reach: remote_url, or cache.l2"
            )
            draft.notices.append(Notice(draft.origins.get("handoff.kind", "antiphon.handoff.kind"), text))
        draft.problems += [draft.renamed(problem) for problem in compiled.problems]
        for pool in POOLS:
            draft.notices += [draft.renamed(notice) for notice in compiled.transfers[pool].notices]
            section = spec.pool(pool)
            if section.env.get("CUDA_VISIBLE_DEVICES"):
                fix = "remove it; write num_gpus, accelerator_type or placement_group_config"
                place = f"{pool}.env.CUDA_VISIBLE_DEVICES"
                draft.add(draft.renamed(Problem(place, "Ray gives each engine GPUs of its own", fix)))
            if section.kv_transfer_config and section.device == "cpu" and not compiled.servers and spec.cache.enabled:
                text = "has no cache connector, so there is no cache server; leave it out to have NIXL and the cache"
                draft.notices.append(Notice(draft.origins[f"{pool}.kv_transfer_config"], text))
    if draft.problems:
        raise SpecError(list(dict.fromkeys(draft.problems)))
    assert spec is not None
    return spec
