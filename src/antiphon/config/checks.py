"""What cannot work, seen from the spec alone: clashes between processes, and what must be equal on both sides.

Each check is a function of what was compiled and yields what it finds; :func:`run_checks` runs all of them and those of
``checks_cache.py`` and ``checks_host.py``, so that one run shows every problem.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from antiphon.config.checks_cache import CACHE_CHECKS, check_cache_handoff
from antiphon.config.checks_host import HOST_CHECKS, RESOURCE_CHECKS, check_total_memory
from antiphon.config.compile import Compiled
from antiphon.config.facts import HostFacts
from antiphon.config.hosts import WILDCARDS, is_loopback
from antiphon.config.plan import BEHIND_ENGINES
from antiphon.config.problems import Notice, Problem, SpecError
from antiphon.config.resolve import Engine
from antiphon.config.spec import POOLS, Pool, Spec
from antiphon.config.tenant_files import refuse_both
from antiphon.config.transfer import handover_max_s, lease_s
from antiphon.config.vllm_args import OWNED_ARGS, OWNED_ENV

Finding = Problem | Notice
SpecCheck = Callable[[Compiled, HostFacts], Iterator[Finding]]


@dataclass(frozen=True)
class Report:
    """What the checks found."""

    problems: tuple[Problem, ...]
    notices: tuple[Notice, ...]


def run_checks(
    compiled: Compiled, facts: HostFacts, *, is_running: bool = False, started: Collection[str] | None = None
) -> Report:
    """Every problem and notice of ``compiled`` on the host of ``facts``.

    Args:
        is_running: the deployment is already up, so what is free of memory, shared memory and ports is taken by it and
            not checked; it fits into all the memory of the host.
        started: names of the processes that are about to be started, which alone need free memory, shared memory and
            ports (default: all): what another command starts may hold its own already.
    """
    found: list[Finding] = [*compiled.problems, *compiled.notices]
    for check in (*SPEC_CHECKS, *CACHE_CHECKS, *HOST_CHECKS):
        found += check(compiled, facts)
    if is_running:
        found += check_total_memory(compiled, facts)
    else:
        needing = compiled if started is None else _only(compiled, started)
        for check in RESOURCE_CHECKS:
            found += check(needing, facts)
    # Two checks may find the same thing in two replicas; it is said once.
    found = list(dict.fromkeys(found))
    return Report(
        problems=tuple(item for item in found if isinstance(item, Problem)),
        notices=tuple(item for item in found if isinstance(item, Notice)),
    )


def _only(compiled: Compiled, names: Collection[str]) -> Compiled:
    return replace(
        compiled,
        engines=tuple(engine for engine in compiled.engines if engine.name in names),
        plans=tuple(plan for plan in compiled.plans if plan.name in names),
        servers=tuple(server for server in compiled.servers if server.name in names),
    )


def check_ports(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """No two listeners on one host share a port, and no port runs past the last."""
    taken: dict[tuple[str, int], tuple[str, str]] = {}
    for plan in compiled.plans:
        host = "this machine" if plan.host in facts.local_hosts else plan.host
        each = "server" if plan.role in BEHIND_ENGINES else "replica"
        for use, port in plan.ports.items():
            field = plan.port_field(use)
            if port > 65535:
                fix = f"lower {field} so that every {each} on the host fits below 65536"
                yield Problem(field, f"{plan.name} on {plan.host} would get port {port}", fix)
            mine = (f"the {use.replace('_', ' ')} port of {plan.name}", field)
            other, other_field = taken.setdefault((host, port), mine)
            if (other, other_field) != mine:
                counts = "" if plan.role in ("router", "coordinator") else f"; {each}s on one host count up from it"
                # One field clashes with itself where servers count up into each other's other port.
                fields = field if field == other_field else f"{field} or {other_field}"
                message = f"port {port} on {plan.host} is already {other} ({other_field})"
                yield Problem(field, message, f"give {fields} a value of its own{counts}")


def check_owned(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """``args`` and ``env`` do not repeat what a field of the spec sets."""
    engine = compiled.spec.engine
    for pool in POOLS:
        section = compiled.spec.pool(pool)
        yield from _repeated(pool, "args", section.args, engine.args, OWNED_ARGS)
        yield from _repeated(pool, "env", section.env, engine.env, OWNED_ENV)
        if section.devices and "CUDA_VISIBLE_DEVICES" in section.env:
            fix = f"remove it from env; {pool}.devices sets it"
            yield Problem(f"{pool}.env.CUDA_VISIBLE_DEVICES", f"contradicts {pool}.devices", fix)


def _repeated(
    pool: Pool, kind: str, own: Mapping[str, object], shared: Mapping[str, object], owners: dict[str, str]
) -> Iterator[Finding]:
    """The names in ``own`` that belong to a field; one that ``engine`` brought in is reported there, once."""
    for name in own:
        if name not in owners:
            continue
        where, pools = ("engine", POOLS) if name in shared else (pool, (pool,))
        fields = dict.fromkeys(owners[name].format(pool=each) for each in pools)
        yield Problem(
            f"{where}.{kind}.{name}", "is set from a field of the spec", f"remove it; use {' and '.join(fields)}"
        )


def check_handoff(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """The way of handing over can work, and its deadline lies inside the lease, where there is one."""
    router, kind = compiled.spec.router, compiled.spec.handoff.kind
    if "handoff" in router.model_fields_set and router.handoff != kind:
        yield Problem("router.handoff", f"{router.handoff}, but handoff.kind is {kind}", "leave it out")
    if kind == "cache":
        yield from check_cache_handoff(compiled)
        return
    lease = lease_s(compiled.transfers["prefill"].config)
    longest_s = handover_max_s(lease)
    if "handover_timeout_s" in router.model_fields_set and router.handover_timeout_s > longest_s:
        message = (
            f"{router.handover_timeout_s:g} s leaves too little of the lease of the KV, {lease} s, for a late hand-over"
        )
        yield Problem("router.handover_timeout_s", message, f"write at most {longest_s:g}, or raise handoff.lease_s")


def check_pools_agree(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """What NIXL compares, and what decides the bytes of a KV block, is equal in both pools."""
    spec = compiled.spec
    prefill, decode = spec.prefill, spec.decode
    for pool in POOLS:
        path = spec.pool(pool).model_path
        if path is not None and path != spec.model.path:
            message = (
                f"{path!r} is not model.path {spec.model.path!r}; NIXL compares the text and refuses the hand-over"
            )
            yield Problem(f"{pool}.model_path", message, "remove it, or write the same text in both")
    for name in ("kind", "kv_cache_dtype", "block_size_tokens"):
        yield from _unequal(f"decode.{name}", getattr(prefill, name), getattr(decode, name), f"engine.{name}")
    if prefill.kind == decode.kind == "vllm":
        devices = {engine.pool: engine.device for engine in compiled.engines}
        yield from _unequal("decode.device", devices["prefill"], devices["decode"], "engine.device")
    layouts = [pool.env.get("VLLM_KV_CACHE_LAYOUT") for pool in (prefill, decode)]
    yield from _unequal("decode.env.VLLM_KV_CACHE_LAYOUT", layouts[0], layouts[1], "engine.env.VLLM_KV_CACHE_LAYOUT")
    sizes = sorted((prefill.tensor_parallel_size, decode.tensor_parallel_size))
    if sizes[1] % sizes[0]:
        message = f"{decode.tensor_parallel_size}, but {prefill.tensor_parallel_size} in prefill: neither is a multiple"
        yield Problem("decode.tensor_parallel_size", message, "make one a multiple of the other, or equal")


def _unequal(field: str, prefill: object, decode: object, shared: str) -> Iterator[Finding]:
    if prefill != decode:
        theirs, ours = ("not set" if value is None else value for value in (prefill, decode))
        message = f"{ours} in decode but {theirs} in prefill; KV is handed over only where they are equal"
        yield Problem(field, message, f"write {shared} once, for both pools")


def check_hosts(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """No engine names itself loopback where another or the router is elsewhere, and none names itself a wildcard."""
    others = {
        plan.host: "the router runs" if plan.role == "router" else "an engine runs"
        for plan in reversed(compiled.plans)
        if not is_loopback(plan.host) and plan.host not in facts.local_hosts
    }
    for pool in POOLS:
        for host in compiled.spec.pool(pool).hosts:
            if host in WILDCARDS:
                fix = f"name the address that peers reach, and set {pool}.bind to {host} if need be"
                yield Problem(f"{pool}.hosts", f"{host} is not an address that peers can reach", fix)
            elif is_loopback(host) and others:
                fix = "name the address that the other hosts reach it at"
                other = min(others)
                message = f"{host} cannot be reached from {other}, where {others[other]}"
                yield Problem(f"{pool}.hosts", message, fix)
        bind = compiled.spec.pool(pool).bind
        if bind is not None and is_loopback(bind) and not all(is_loopback(h) for h in compiled.spec.pool(pool).hosts):
            fix = f"leave {pool}.bind out, or write 0.0.0.0"
            yield Problem(f"{pool}.bind", f"{bind} cannot be reached at {compiled.spec.pool(pool).hosts[0]}", fix)


def check_router(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """The router is not published by accident, drains before it is killed, and its engines come from the pools."""
    router = compiled.spec.router
    has_keys = router.api_key_file is not None or router.tenants_file is not None
    if not is_loopback(router.host) and not has_keys and not router.public_without_key:
        message = (
            f"{router.host} can be reached from other hosts, and no client needs a key: anybody who reaches it may use "
            "the inference routes"
        )
        fix = (
            "name a file with the keys of clients in router.api_key_file or router.tenants_file, write 127.0.0.1, or "
            "allow it with router.public_without_key: true"
        )
        yield Problem("router.host", message, fix)
    try:
        refuse_both(router)
    except SpecError as error:
        yield from error.problems
    grace_s = compiled.spec.supervisor.stop_grace_s
    names = [name for name in ("drain_timeout_s", "stop_notice_s") if name in router.model_fields_set]
    stop_s = sum(getattr(router, name) for name in names)
    if names and stop_s >= max(grace_s, 1e-9):
        message = (
            f"{stop_s:g} s is not less than supervisor.stop_grace_s, {grace_s:g} s, after which the "
            "router is killed, draining or not"
        )
        fix = (
            f"write less than {grace_s:g}, or raise supervisor.stop_grace_s"
            if grace_s
            else "write 0, or raise supervisor.stop_grace_s"
        )
        yield Problem(f"router.{names[0]}", f"with router.stop_notice_s {message}" if len(names) > 1 else message, fix)
    if router.port == 0:
        message = "0 takes any free port, which nobody else would know"
        yield Problem("router.port", message, "write a port, such as 30000")
    yield from facts.key_file_problems
    yield from facts.key_file_notices
    yield from facts.tenants_problems
    for role in POOLS:
        if getattr(router, role):
            fix = f"remove it; the engines come from the {role} pool"
            yield Problem(f"router.{role}", "is filled in from the pool and may not be written in a spec", fix)


def check_devices(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """GPUs suffice, are given out once, and are not asked for on CPU; block sizes on CPU fit the kernel."""
    for pool in POOLS:
        engines = [engine for engine in compiled.engines if engine.pool == pool and engine.spec.kind == "vllm"]
        if engines:
            yield from _check_pool_devices(compiled.spec, engines, facts)
    yield from _check_gpu_shares(compiled)


def _check_pool_devices(spec: Spec, engines: list[Engine], facts: HostFacts) -> Iterator[Finding]:
    pool, section, device = engines[0].pool, engines[0].spec, engines[0].device
    num_needed = section.replicas * section.tensor_parallel_size
    if device == "cpu":
        if section.devices:
            fix = "remove them, or write engine.device: cuda"
            yield Problem(f"{pool}.devices", "names GPUs, but the engines run on CPU", fix)
        if section.block_size_tokens is not None and section.block_size_tokens % 32:
            message = f"{section.block_size_tokens} is not a multiple of 32, which the attention kernel on CPU needs"
            field = spec.knob_path(pool, "block_size_tokens")
            yield Problem(field, message, "write 32, 64 or 128, or leave it out (128)")
        return
    if section.devices and len(section.devices) != num_needed:
        sum_text = f"replicas {section.replicas} × tensor_parallel_size {section.tensor_parallel_size}"
        message = f"names {len(section.devices)} GPUs, but {sum_text} is {num_needed}"
        yield Problem(f"{pool}.devices", message, f"name {num_needed}, or change replicas or tensor_parallel_size")
    for engine in engines:
        if engine.host not in facts.local_hosts:
            continue
        if facts.num_cuda_devices == 0:
            fix = "write engine.device: cpu, or run on a host with an NVIDIA GPU"
            yield Problem(spec.knob_path(pool, "device"), "cuda, but this host has no NVIDIA GPU", fix)
            return
        for number in engine.devices:
            if number.isdigit() and int(number) >= facts.num_cuda_devices:
                message = f"names GPU {number}, but this host has GPUs 0 to {facts.num_cuda_devices - 1}"
                yield Problem(f"{pool}.devices", message, "name GPUs that exist")
        if not engine.devices and section.tensor_parallel_size > facts.num_cuda_devices:
            message = f"{section.tensor_parallel_size}, but this host has {facts.num_cuda_devices} GPUs"
            yield Problem(f"{pool}.tensor_parallel_size", message, f"write at most {facts.num_cuda_devices}")


def _check_gpu_shares(compiled: Compiled) -> Iterator[Finding]:
    """Engines that share a GPU do not ask for more than all of it."""
    shares: dict[tuple[str, str], list[Engine]] = {}
    for engine in compiled.engines:
        if engine.spec.kind != "vllm" or engine.device != "cuda" or engine.kv_memory_bytes is not None:
            continue
        visible = engine.spec.env.get("CUDA_VISIBLE_DEVICES")
        own = engine.devices or tuple(
            visible.split(",") if visible else map(str, range(engine.spec.tensor_parallel_size))
        )
        for number in own:
            shares.setdefault((engine.host, number), []).append(engine)
    for (host, number), engines in shares.items():
        total = sum(engine.spec.gpu_memory_utilization for engine in engines)
        if total > 1 + 1e-9:
            names = " and ".join(engine.name for engine in engines)
            message = f"{names} share GPU {number} of {host} and ask for {total:.0%} of its memory"
            fix = "give each pool its own devices, or lower engine.gpu_memory_utilization"
            yield Problem(f"{engines[-1].pool}.devices", message, fix)


def check_exposure(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """Control routes of an engine that other hosts can reach are pointed out."""
    for engine in compiled.engines:
        if engine.spec.dev_mode and not is_loopback(engine.bind):
            text = f"{engine.name} listens on {engine.bind}: whoever reaches it can pause it and reset its cache"
            yield Notice(f"{engine.pool}.dev_mode", text)


SPEC_CHECKS: list[SpecCheck] = [
    check_ports,
    check_owned,
    check_handoff,
    check_pools_agree,
    check_hosts,
    check_router,
    check_devices,
    check_exposure,
]
