"""Cache servers of a deployment that share: the flags that each has for it, and the process of their coordinator.

Pure. Always true: where the servers share, each has a coordinator's address; one is started unless the spec names one
that runs elsewhere, on the host of the first server.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from antiphon.config.cache_servers import CacheServer
from antiphon.config.cluster import host_port_of
from antiphon.config.hosts import http_url, is_loopback
from antiphon.config.plan import ProcessPlan
from antiphon.config.problems import Notice
from antiphon.config.spec import Spec

COORDINATOR_NAME = "coordinator"


def are_peers(spec: Spec, servers: list[CacheServer]) -> bool:
    """Whether the servers share: one alone does only with those of a coordinator elsewhere."""
    return spec.cache.peers and bool(servers) and (len(servers) > 1 or spec.cache.coordinator_url is not None)


def with_peers(plan: ProcessPlan, server: CacheServer, spec: Spec, servers: list[CacheServer]) -> ProcessPlan:
    """``plan`` of ``server``, with what it is told so that it shares; as it is where it does not."""
    cache = spec.cache
    if not are_peers(spec, servers):
        return plan
    host = _reached_at(server)
    bind = _listens_on(host)
    argv = ["--coordinator-url", cache.coordinator_url or _coordinator_url(spec, servers)]
    argv += ["--p2p-advertise-url", http_url(host, server.peer_port)]
    if bind != host:
        argv += ["--p2p-host", bind]
    if cache.peer_transport != "auto":
        argv += ["--p2p-transport", cache.peer_transport]
    return replace(
        plan,
        argv=(*plan.argv, *argv, *_secret_flags(spec)),
        ports={**plan.ports, "peers": server.peer_port},
        addresses={**plan.addresses, "peers": bind},
    )


def coordinator_plans(spec: Spec, servers: list[CacheServer]) -> list[ProcessPlan]:
    """The process of the coordinator, if one is to be started."""
    cache = spec.cache
    if not are_peers(spec, servers) or cache.coordinator_url is not None:
        return []
    return [coordinator_plan(spec, servers[0].host, _listens_on(_reached_at(servers[0])))]


def coordinator_plan(spec: Spec, host: str, bind: str) -> ProcessPlan:
    """The process of a coordinator on ``host``, which listens for cache servers at ``bind``."""
    cache = spec.cache
    argv = [sys.executable, "-m", "antiphon", "coordinator", "--host", bind, "--port", str(cache.coordinator_port)]
    argv += ["--http-host", cache.host, "--http-port", str(cache.coordinator_http_port)]
    if cache.runtime_dir is not None:
        argv += ["--runtime-dir", cache.runtime_dir]
    argv += spec.tracing.flags()
    return ProcessPlan(
        name=COORDINATOR_NAME,
        role="coordinator",
        kind="coordinator",
        host=host,
        argv=(*argv, *_secret_flags(spec)),
        ports={"http": cache.coordinator_http_port, "calls": cache.coordinator_port},
        base_url=http_url(cache.host, cache.coordinator_http_port),
        ready_path="/healthz",
        bind=cache.host,
        addresses={"calls": bind},
    )


def peer_notices(spec: Spec, servers: list[CacheServer]) -> Iterator[Notice]:
    """Where sharing is asked for and there is nobody to share with."""
    if spec.cache.peers and not are_peers(spec, servers):
        text = "there is one cache server" if servers else "there is no cache server"
        yield Notice("cache.peers", f"{text}: nothing is shared, and no coordinator is started")


def is_cluster_open(spec: Spec, servers: list[CacheServer]) -> bool:
    """Whether an address of the cluster is reached from other hosts, so that its members need a secret of their own."""
    hosts = [_reached_at(server) for server in servers]
    if spec.cache.coordinator_url is not None:
        hosts.append(host_port_of(spec.cache.coordinator_url)[0])
    return are_peers(spec, servers) and not all(is_loopback(host) for host in hosts)


def _reached_at(server: CacheServer) -> str:
    """Where other cache servers reach it."""
    return server.address if is_loopback(server.host) else server.host


def _listens_on(host: str) -> str:
    """Loopback stays private; a host's name may be another address inside."""
    if is_loopback(host):
        return host
    return "::" if ":" in host else "0.0.0.0"


def _coordinator_url(spec: Spec, servers: list[CacheServer]) -> str:
    return http_url(_reached_at(servers[0]), spec.cache.coordinator_port)


def _secret_flags(spec: Spec) -> tuple[str, ...]:
    path = spec.cache.cluster_secret_file
    return () if path is None else ("--cluster-secret-file", path)
