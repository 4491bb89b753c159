"""Cache servers of nodes that share what they hold: what is refused, where their coordinator is, what each is told.

Pure but for the file of the secret, which is read. Always true of what is built: a server of a node has a name that no
other node's server has, and tells others the address of its node; an address beyond loopback has a secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from antiphon.config.cache_server_spec import default_runtime_dir
from antiphon.config.cache_servers import CacheServer
from antiphon.config.checks_cache import missing_secret
from antiphon.config.cluster import cluster_secret, host_port_of
from antiphon.config.compile import compile_all
from antiphon.config.hosts import WILDCARDS, http_url, is_loopback
from antiphon.config.key_files import shown_to_others
from antiphon.config.peers_plan import coordinator_plan
from antiphon.config.plan import ProcessPlan
from antiphon.config.problems import Notice, Problem
from antiphon.config.resolve import Machine
from antiphon.config.spec import Spec
from antiphon.core.errors import ConfigError, StartError

SECRET_FIELD = "cache.cluster_secret_file"
INSTANCE_CHARS_MAX = 48
"""Of ``--instance-id``."""
DIGEST_CHARS = 12


def starts_coordinator(spec: Spec) -> bool:
    """Whether the router's replica starts the coordinator: nobody has named one that runs elsewhere."""
    return spec.cache.enabled and spec.cache.peers and spec.cache.coordinator_url is None


def coordinator_url(spec: Spec, router_address: str) -> str | None:
    """Where the coordinator is, with the router at ``router_address``; None where nothing is shared."""
    if starts_coordinator(spec):
        return http_url(router_address, spec.cache.coordinator_port)
    return spec.cache.coordinator_url if spec.cache.peers else None


def coordinator_beside_router(spec: Spec, address: str, machine: Machine) -> ProcessPlan | None:
    """The coordinator that the router's replica starts at ``address``; None: it starts none."""
    if not starts_coordinator(spec) or not compile_all(spec, machine).servers:
        return None
    return coordinator_plan(spec, address, address)


def at_node(plan: ProcessPlan, address: str) -> ProcessPlan:
    """``plan`` of a cache server that shares, as the one of the node at ``address``: under a name of its own, and
    listening there alone. As it is where it does not share."""
    if "peers" not in plan.ports:
        return plan
    argv = list(plan.argv)
    named = argv.index("--instance-id") + 1
    argv[named] = _name_at(argv[named], address)
    listens = plan.addresses
    if "--p2p-host" in argv:
        bound = argv.index("--p2p-host")
        del argv[bound : bound + 2]
        listens = {**listens, "peers": address}
    return replace(plan, argv=tuple(argv), addresses=listens)


def peers_problems(spec: Spec, servers: Sequence[CacheServer]) -> Iterator[Problem]:
    """Why the cache servers of the nodes could not share, as far as the spec alone tells."""
    cache = spec.cache
    if not cache.peers or not servers:
        return
    is_published = not is_loopback(spec.router.host)
    host = None if cache.coordinator_url is None else host_port_of(cache.coordinator_url)[0]
    if host is not None:
        yield from _misplaced(host, is_published=is_published)
    if cache.cluster_secret_file is None and (is_published or (host is not None and not is_loopback(host))):
        yield missing_secret("node")
    error = _secret_error(spec) if _secret_is_here(spec) else None
    if error is not None:
        yield Problem(SECRET_FIELD, error.message, error.remedy or "name a readable text file that holds the secret")


def peers_notices(spec: Spec, servers: Sequence[CacheServer]) -> Iterator[Notice]:
    """What is to be known of cache servers that are to share."""
    if not spec.cache.peers:
        return
    if not servers:
        yield Notice(
            "antiphon.cache.peers", "there is no cache server: nothing is shared, and no coordinator is started"
        )
        return
    if starts_coordinator(spec):
        text = "true: the cache servers of the nodes share, and their coordinator is started beside the router"
        if is_loopback(spec.router.host) and len(servers) == 1:
            text = (
                "true, but the router is on loopback: all is on its node, whose cache server has no other to share with"
            )
        yield Notice("antiphon.cache.peers", text)
    path = spec.cache.cluster_secret_file
    if path is None:
        return
    said = shown_to_others(path)
    if said is not None:
        yield Notice(f"antiphon.{SECRET_FIELD}", said)
    if not _secret_is_here(spec):
        text = f"{path} is not on this machine, where the application is built: each node of an engine must have it"
        yield Notice(f"antiphon.{SECRET_FIELD}", text)


def check_secret_here(spec: Spec) -> None:
    """The secret of the cluster can be used on this node.

    Raises:
        StartError: it cannot.
    """
    error = _secret_error(spec)
    if error is not None:
        raise StartError(
            f"{error.message} (on this node)", field=f"antiphon.{SECRET_FIELD}", remedy=error.remedy
        ) from error


def _misplaced(host: str, *, is_published: bool) -> Iterator[Problem]:
    """A coordinator that the servers, or that other members, could not reach."""
    own = "leave it out: then the coordinator is started beside the router"
    if host in WILDCARDS:
        yield Problem(
            "cache.coordinator_url", f"{host} is no address to connect to", f"write the one of its node, or {own}"
        )
    elif is_loopback(host) and is_published:
        message = (
            f"{host} is reached from its own node only, and the router is published, so that engines are on several"
        )
        yield Problem("cache.coordinator_url", message, f"write the address that all nodes reach it at, or {own}")
    elif not is_loopback(host) and not is_published:
        message = (
            f"{host} is not loopback, but the router is, and so are the cache servers: no other member reaches them"
        )
        fix = f"publish the router (antiphon.router.host: 0.0.0.0, with keys); or {own}"
        yield Problem("cache.coordinator_url", message, fix)


def _name_at(instance: str, address: str) -> str:
    """A name for the server of the node at ``address``; coordinators know members by their names."""
    named = f"{instance}-{address.replace(':', '.').strip('.')}"
    if len(named) <= INSTANCE_CHARS_MAX:
        return named
    digest = hashlib.sha256(named.encode()).hexdigest()[:DIGEST_CHARS]
    return f"{instance[: INSTANCE_CHARS_MAX - DIGEST_CHARS - 1]}-{digest}"


def _secret_is_here(spec: Spec) -> bool:
    path = spec.cache.cluster_secret_file
    return path is not None and Path(path).expanduser().exists()


def _secret_error(spec: Spec) -> ConfigError | None:
    """Why the file of the secret, where one is named, cannot be used here."""
    path = spec.cache.cluster_secret_file
    if path is None:
        return None
    try:
        cluster_secret(path, spec.cache.runtime_dir or default_runtime_dir(), [])
    except ConfigError as error:
        return error
    return None
