"""Which cache servers a deployment has, where each runs and with what; and the command line of each.

Pure: the machine is an argument; only ``with_local_hosts`` looks at this one. Invariants: instance names and process
names are unique in the deployment; the ports of the servers of one host count up; an engine has at most one server, on
its own host.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from antiphon.config.cache_server_spec import GB
from antiphon.config.hosts import WILDCARDS, http_url, is_loopback, is_this_machine
from antiphon.config.plan import ProcessPlan
from antiphon.config.problems import Notice
from antiphon.config.resolve import PROCESS_BYTES_PER_ENGINE, Engine, Machine
from antiphon.config.spec import POOLS, Pool, Spec
from antiphon.config.tier_spec import TierSpec
from antiphon.config.units import format_bytes
from antiphon.core.tenants import tenant_named

CACHE_CONNECTOR = "AntiphonConnector"
CACHE_CONNECTORS = frozenset({CACHE_CONNECTOR, "LMCacheConnector", "LMCacheConnectorV1", "LMCacheMPConnector"})
"""Names that a ``kv_transfer_config`` may call the cache connector by; those of LMCache stand for ours."""
DEFAULT_HOST = "127.0.0.1"
L1_FREE_SHARE = 4
"""One part in so many of the memory that the engines leave is for cache servers: weights, whose size is not known here,
and the rest of the host need the others."""
L1_DEFAULT_MAX_BYTES = {"cpu": 2 << 30, "cuda": 16 << 30}
"""More is populated for a long time, and is worth saying in the spec."""
L1_DEFAULT_MIN_BYTES = 64 << 20
SERVER_NAMES: dict[Pool | None, tuple[str, str]] = {
    "prefill": ("cache-prefill", "prefiller"),
    "decode": ("cache-decode", "decoder"),
    None: ("cache", "shared"),
}
"""Process name and instance name of the server of a pool, and of one that both pools share."""


@dataclass(frozen=True)
class CacheServer:
    """One cache server, every default filled in."""

    pool: Pool | None
    """The pool that it serves; None: both."""
    name: str
    instance: str
    """Carries the name of the deployment: there may be another one on the host, of the same user."""
    host: str
    """The host that it runs on, as the spec names it."""
    address: str
    """Loopback address that it listens on."""
    port: int
    http_port: int
    peer_port: int
    """For other cache servers, where they share."""
    l1_size_bytes: int
    chunk_size_tokens: int
    store_host: str | None
    """Its ``local_host`` in a Mooncake store, where there are servers on several hosts; None: as the tier says."""

    def serves(self, engine: Engine) -> bool:
        """Whether it is the server of ``engine``."""
        return self.host == engine.host and self.pool in (None, engine.pool)


def place_cache_servers(spec: Spec, engines: list[Engine], machine: Machine) -> list[CacheServer]:
    """Every cache server of the deployment: those of prefill first, in the order of their hosts."""
    pools = pools_with_cache(spec, engines)
    places: dict[tuple[Pool | None, str], None] = {}
    for engine in engines:
        if engine.pool in pools:
            places[(None if spec.cache.shared else engine.pool, engine.host)] = None
    has_hosts = len({host for _, host in places}) > 1
    num_hosts = Counter(group for group, _ in places)
    num_on_host = Counter(host for _, host in places)
    on_host: Counter[str] = Counter()
    seen: Counter[Pool | None] = Counter()
    servers = []
    for group, host in places:
        suffix = f"-{seen[group]}" if num_hosts[group] > 1 else ""
        name, instance = SERVER_NAMES[group]
        size = spec.cache.l1_size_bytes or _default_l1_bytes(host, engines, num_on_host[host], machine)
        server = CacheServer(
            pool=group,
            name=name + suffix,
            instance=f"{spec.name}-{instance}{suffix}",
            host=host,
            address=spec.cache.host,
            port=spec.cache.port + on_host[host],
            http_port=spec.cache.http_port + on_host[host],
            peer_port=spec.cache.peer_port + on_host[host],
            l1_size_bytes=size,
            chunk_size_tokens=spec.cache.chunk_size_tokens,
            store_host=host if has_hosts and not is_loopback(host) else None,
        )
        servers.append(server)
        on_host[host] += 1
        seen[group] += 1
    assert len({server.name for server in servers}) == len({server.instance for server in servers}) == len(servers)
    return servers


def pools_with_cache(spec: Spec, engines: list[Engine]) -> tuple[Pool, ...]:
    """The pools whose engines get a cache server.

    Those of simulated engines and of engines on CUDA start only where it is written: as any key of ``cache``, as a
    hand-over through the cache or, on CUDA, as a connector of the pool. A pool whose own ``kv_transfer_config``
    names no cache connector needs none.
    """
    if not spec.cache.enabled:
        return ()
    is_written = _is_written(spec)
    unused = _pools_on_cuda_by_default(spec, engines)
    return tuple(
        pool
        for pool in POOLS
        if (is_written if spec.pool(pool).kind == "simulated" else _asks(spec, pool) and pool not in unused)
    )


def _is_written(spec: Spec) -> bool:
    """Whether somebody has written that engines shall have a cache, also those that have none by default."""
    return bool(spec.cache.model_fields_set) or spec.handoff.kind == "cache"


def _pools_on_cuda_by_default(spec: Spec, engines: list[Engine]) -> list[Pool]:
    """The pools on CUDA for which nobody has written that they shall have a cache."""
    if _is_written(spec):
        return []
    on_cuda = {engine.pool for engine in engines if engine.device == "cuda" and engine.spec.kind == "vllm"}
    return [pool for pool in POOLS if pool in on_cuda and spec.pool(pool).kv_transfer_config is None]


def server_of(engine: Engine, servers: list[CacheServer]) -> CacheServer | None:
    """The server that ``engine`` uses, or None."""
    return next((server for server in servers if server.serves(engine)), None)


def cache_notices(spec: Spec, engines: list[Engine], servers: list[CacheServer]) -> list[Notice]:
    """What was filled in for the cache, and which engines have none although it is enabled."""
    notices = []
    if spec.cache.enabled:
        if not _is_written(spec) and any(spec.pool(pool).kind == "simulated" for pool in POOLS):
            text = (
                "simulated engines use no cache server, and without a cache: section none is started for them; write "
                "true to start them"
            )
            notices.append(Notice("cache.enabled", text))
        if on_cuda := _pools_on_cuda_by_default(spec, engines):
            text = (
                f"the {' and '.join(on_cuda)} engines run on CUDA, and without a cache: section no cache server is "
                "started for them: KV of earlier requests is not kept; write true to start one"
            )
            notices.append(Notice("cache.enabled", text))
        for pool in POOLS:
            if spec.pool(pool).kind == "vllm" and not _asks(spec, pool):
                text = f"names no {CACHE_CONNECTOR}: the {pool} engines reuse no KV of earlier requests"
                notices.append(Notice(f"{pool}.kv_transfer_config", text))
    hosts = {server.store_host for server in servers} - {None}
    for tier in spec.cache.tiers:
        if hosts and tier.kind == "mooncake" and "local_host" in tier.model_fields_set:
            text = f"local_host {tier.local_host} is one machine's: each cache server has the address of its own host"
            notices.append(Notice("cache.l2", f"{text}, as prefill.hosts and decode.hosts name it"))
    if spec.cache.l1_size_bytes is None:
        for size in dict.fromkeys(server.l1_size_bytes for server in servers):
            text = f"{format_bytes(size)} for each cache server: a share of the memory that the engines leave"
            notices.append(Notice("cache.l1_size_bytes", text))
    return notices


def cache_server_plan(server: CacheServer, spec: Spec) -> ProcessPlan:
    """The process of ``server``; its admin HTTP answers on its own host only."""
    cache = spec.cache
    argv = [sys.executable, "-m", "antiphon", "cache-server"]
    argv += ["--host", cache.host, "--port", str(server.port), "--http-port", str(server.http_port)]
    argv += ["--l1-size-gb", _gb_text(server.l1_size_bytes), "--eviction-policy", cache.eviction_policy]
    argv += ["--chunk-size", str(cache.chunk_size_tokens), "--instance-id", server.instance]
    optional: list[tuple[str, Any]] = [
        ("--http-host", cache.host if cache.host != DEFAULT_HOST else None),
        ("--runtime-dir", cache.runtime_dir),
        ("--default-quota-gb", _gb_text(cache.default_quota_bytes) if cache.default_quota_bytes else None),
        *(("--quota", f"{tenant_named(tenant)}={_gb_text(size)}") for tenant, size in cache.quota_bytes.items()),
    ]
    if cache.l2:
        optional += [("--l2", _own_tier(tier, server)) for tier in cache.tiers]
        optional.append(("--onboard-max-s", repr(cache.onboard_max_s)))
    for flag, value in optional:
        if value is not None:
            argv += [flag, value]
    argv += spec.tracing.flags()
    return ProcessPlan(
        name=server.name,
        role="cache_server",
        kind="cache_server",
        host=server.host,
        argv=tuple(argv),
        ports={"http": server.http_port, "calls": server.port},
        base_url=http_url(cache.host, server.http_port),
        ready_path="/readiness",
        bind=cache.host,
    )


def with_local_hosts(spec: Spec, address: str) -> Spec:
    """``spec`` for the cache server of this machine, where each machine compiles for itself and knows no other.

    The ``local_host`` of a Mooncake store is ``address`` where what is written is another machine's, or is loopback,
    at which the other nodes of the store reach nothing.

    Args:
        address: at which other machines reach this one; with loopback nothing is changed.
    """
    if is_loopback(address):
        return spec
    texts = [
        _at(tier, address).text() if tier.kind == "mooncake" and not _is_reached(tier.local_host) else text
        for text, tier in zip(spec.cache.l2, spec.cache.tiers, strict=True)
    ]
    if texts == spec.cache.l2:
        return spec
    return spec.model_copy(update={"cache": spec.cache.model_copy(update={"l2": texts})})


def _is_reached(host: str) -> bool:
    """Whether ``host`` is this machine, for other machines too."""
    return is_this_machine(host) and not is_loopback(host) and host not in WILDCARDS


def _at(tier: TierSpec, host: str) -> TierSpec:
    return tier.model_copy(update={"local_host": host})


def _own_tier(tier: TierSpec, server: CacheServer) -> str:
    """The tier as one server uses it: a folder belongs to one server, an address in a Mooncake store to one host."""
    if tier.kind == "disk":
        tier = tier.model_copy(update={"url": f"{tier.url.rstrip('/')}/{server.instance}"})
    if tier.kind == "mooncake" and server.store_host is not None:
        tier = _at(tier, server.store_host)
    return tier.text()


def _gb_text(num_bytes: int) -> str:
    """The size as the flags of the server take it, exactly."""
    return repr(num_bytes / GB).removesuffix(".0")


def _asks(spec: Spec, pool: Pool) -> bool:
    raw = spec.pool(pool).kv_transfer_config
    return raw is None or names_a_cache(raw)


def names_a_cache(transfer: dict[str, Any]) -> bool:
    """Whether a raw ``kv_transfer_config`` has a cache connector, at its top or in a MultiConnector."""
    extra = transfer.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, dict) else None
    parts = [transfer, *children] if isinstance(children, list) else [transfer]
    names = [part.get("kv_connector") for part in parts if isinstance(part, dict)]
    return any(isinstance(name, str) and name in CACHE_CONNECTORS for name in names)


def _default_l1_bytes(host: str, engines: list[Engine], num_servers: int, machine: Machine) -> int:
    """A share of what the engines of ``host`` leave of the memory, in whole steps of 64 MiB."""
    here = [engine for engine in engines if engine.host == host]
    most = L1_DEFAULT_MAX_BYTES["cuda" if any(engine.device == "cuda" for engine in here) else "cpu"]
    if machine.mem_available_bytes is None:
        return most
    on_cpu = [engine for engine in here if engine.device == "cpu"]
    taken = sum((engine.kv_memory_bytes or 0) + PROCESS_BYTES_PER_ENGINE for engine in on_cpu)
    share = max(0, machine.mem_available_bytes - taken) // (L1_FREE_SHARE * num_servers)
    return max(L1_DEFAULT_MIN_BYTES, min(most, share - share % L1_DEFAULT_MIN_BYTES))
