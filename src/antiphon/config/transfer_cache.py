"""The cache connector inside a ``--kv-transfer-config``: made for an engine's cache server, or a user's put right.

Invariants of what :func:`cache_connector` returns: the connector is ours, by name and by module path; it stores and
loads in both pools (``kv_both``); ``antiphon.host`` is loopback and ``antiphon.port`` a port, because KV is shared
through the memory of one host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from antiphon.config.cache_servers import CACHE_CONNECTOR, DEFAULT_HOST, CacheServer, server_of
from antiphon.config.explain import nearest
from antiphon.config.hosts import WILDCARDS, is_loopback
from antiphon.config.problems import Notice, Problem
from antiphon.config.resolve import Engine

MODULE_PATH = "antiphon.connector.vllm_connector"
DEFAULT_PORT = 6555
DEFAULT_CHUNK_SIZE_TOKENS = 256
HOST, PORT, CHUNK_SIZE = "antiphon.host", "antiphon.port", "antiphon.chunk_size"
OWN_KEYS = frozenset(
    {HOST, PORT, CHUNK_SIZE, "antiphon.engine_name", "antiphon.load", "antiphon.lookup_timeout_ms", "antiphon.store"}
    | {"antiphon.onboard_max_ms"}
    | {"antiphon.store_queue_max", "antiphon.weights_revision"}
)
"""The options of the connector, which checks the values of those that are passed on."""
ALIASES = {"lmcache.mp.host": HOST, "lmcache.mp.port": PORT}
"""Keys of LMCache that mean the same as ours."""
NO_EFFECT = frozenset(
    f"lmcache.mp.{name}"
    for name in (
        "mq_timeout",
        "heartbeat_interval",
        "eager_prefetch",
        "save_decode_cache",
        "nonblocking_lookup_status",
        "mp_transfer_mode",
        "isolated_ipc",
        "use_vmm_api",
        "hash_algorithm",
        "lazy_offload",
        "transfer_intermediate_tensors",
        "autostart",
        "autostart.server_args",
        "autostart.wait_timeout",
    )
) | {"lmcache_rpc_port"}
"""Keys of LMCache that tune its own transport, or ask for what always happens here."""
PARTIAL_CHUNKS = "discard_partial_chunks"
KNOWN_KEYS = frozenset({*OWN_KEYS, *ALIASES, *NO_EFFECT, PARTIAL_CHUNKS})
_KEPT = frozenset({"kv_connector", "kv_role", "kv_connector_module_path", "kv_connector_extra_config"})
_LEFT_OUT = frozenset(
    {"kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port", "engine_id"}
    | {"kv_load_failure_policy", "enable_permute_local_kv"}
)
"""Keys that mean nothing to a cache connector; a load failure policy has been taken to the top already."""
_OUR_PLACES = (None, MODULE_PATH)
Finding = Problem | Notice


def own_connectors(server: CacheServer | None, handoff: str) -> dict[str, Any]:
    """What an engine without a ``kv_transfer_config`` gets: NIXL, and beside it the cache where it has a server; the
    cache alone where it hands KV over (``handoff.kind``)."""
    if handoff == "cache":
        return {"kv_connector": CACHE_CONNECTOR}
    nixl = {"kv_connector": "NixlConnector"}
    if server is None:
        return nixl
    children = [nixl, {"kv_connector": CACHE_CONNECTOR}]
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}


def cache_connector(
    raw: dict[str, Any], where: str, engine: Engine, servers: list[CacheServer]
) -> tuple[dict[str, Any], list[Finding]]:
    """The cache connector that ``raw`` asks for, put right, and what was found on the way.

    Args:
        raw: a mapping whose ``kv_connector`` is one of ``CACHE_CONNECTORS``.
        where: its place in the spec.
        engine: the engine that gets it.
        servers: the cache servers of the deployment.
    """
    found: list[Finding] = [*_check_names(raw, where)]
    extra = raw.get("kv_connector_extra_config") or {}
    path = f"{where}.kv_connector_extra_config"
    if not isinstance(extra, dict):
        found.append(Problem(path, "is not a mapping", "write a mapping, or leave it out"))
        extra = {}
    given: dict[str, Any] = {}
    for key, value in _flat(extra):
        found += _take_key(key, value, path, given)
    server = server_of(engine, servers)
    host, host_found = _host(given.pop(HOST, server.address if server is not None else DEFAULT_HOST), path, engine)
    wants_port = PORT in given
    port, port_found = _port(given.pop(PORT, server.port if server is not None else DEFAULT_PORT), path)
    found += [*host_found, *port_found]
    if wants_port and not port_found:
        found += _check_server(port, path, engine, servers)
    used = next((each for each in servers if each.host == engine.host and each.port == port), None)
    if used is not None:
        if given.setdefault(CHUNK_SIZE, used.chunk_size_tokens) != used.chunk_size_tokens:
            message = f"{given[CHUNK_SIZE]!r}, but {used.name} has chunks of {used.chunk_size_tokens}"
            found.append(Problem(f"{path}.{CHUNK_SIZE}", message, "leave it out; cache.chunk_size_tokens sets both"))
        if given[CHUNK_SIZE] == DEFAULT_CHUNK_SIZE_TOKENS:
            del given[CHUNK_SIZE]
    config = {
        "kv_connector": CACHE_CONNECTOR,
        "kv_connector_module_path": MODULE_PATH,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {HOST: host, PORT: port, **given},
    }
    return config, found


def _flat(extra: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys for what is nested below ``antiphon`` and ``lmcache``, as vLLM's dotted command line nests it."""
    for key, value in extra.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name.partition(".")[0] in ("antiphon", "lmcache"):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _check_names(raw: dict[str, Any], where: str) -> Iterator[Finding]:
    """Names and keys beside the extra configuration."""
    name = raw["kv_connector"]
    if name != CACHE_CONNECTOR:
        yield Notice(f"{where}.kv_connector", f"{name} is {CACHE_CONNECTOR} here")
    if raw.get("kv_connector_module_path") not in _OUR_PLACES:
        text = f"{raw['kv_connector_module_path']!r} is {MODULE_PATH} here"
        yield Notice(f"{where}.kv_connector_module_path", text)
    if raw.get("kv_role") not in (None, "kv_both"):
        yield Notice(f"{where}.kv_role", f"kv_both is used: {CACHE_CONNECTOR} stores and loads in both pools")
    for key in raw:
        if key in _LEFT_OUT and key != "kv_load_failure_policy":
            yield Notice(f"{where}.{key}", "is left out: it means nothing to the cache")
        elif key not in _KEPT | _LEFT_OUT:
            near = nearest(str(key), sorted(_KEPT))
            fix = f"did you mean {near}?" if near else f"remove it; known here: {', '.join(sorted(_KEPT))}"
            yield Problem(f"{where}.{key}", "is not a key that can be used here", fix)


def _take_key(key: str, value: Any, path: str, given: dict[str, Any]) -> Iterator[Finding]:
    """Put ``key`` into ``given`` under our name for it, or say why not."""
    own = ALIASES.get(key, key)
    if own in OWN_KEYS:
        if own in given and given[own] != value:
            message = f"says {value!r}, but {own} is {given[own]!r} already"
            yield Problem(f"{path}.{key}", message, "write one of the two")
        given.setdefault(own, value)
    elif key == "lmcache.mp.server_urls":
        message = "several cache servers for one engine are not part of this version"
        yield Problem(f"{path}.{key}", message, "remove it; an engine uses the server of its own host")
    elif key == PARTIAL_CHUNKS:
        text = (
            "is left out: chunks are whole here; what fills none at the end of a prompt is computed by the decode "
            "engine, and a prompt of less than a chunk wholly"
        )
        yield Notice(f"{path}.{key}", text)
    elif key in NO_EFFECT:
        yield Notice(f"{path}.{key}", "is left out: it has no effect here")
    else:
        near = nearest(key, sorted(KNOWN_KEYS))
        fix = f"did you mean {near}?" if near else f"remove it; known here: {', '.join(sorted(OWN_KEYS))}"
        yield Problem(f"{path}.{key}", "is not a key of the cache connector", fix)


def _host(value: Any, path: str, engine: Engine) -> tuple[str, list[Finding]]:
    """The host to connect to; the engine's own host, however it is spelled, is loopback."""
    host = value.removeprefix("tcp://").rstrip("/") if isinstance(value, str) else value
    if isinstance(host, str) and (is_loopback(host) or host == engine.host or host in WILDCARDS):
        return (host if is_loopback(host) else DEFAULT_HOST), []
    message = (
        f"{value!r} is another host than {engine.host}, where {engine.name} runs and shares memory with its server"
    )
    return DEFAULT_HOST, [Problem(f"{path}.{HOST}", message, f"write {DEFAULT_HOST}, or leave it out")]


def _port(value: Any, path: str) -> tuple[int, list[Finding]]:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= 65535:
        return number, []
    return DEFAULT_PORT, [Problem(f"{path}.{PORT}", f"{value!r} is not a port", "write 1 to 65535, or leave it out")]


def _check_server(port: int, path: str, engine: Engine, servers: list[CacheServer]) -> Iterator[Notice]:
    """Whether ``port`` is that of the engine's own server."""
    own = server_of(engine, servers)
    if own is not None and own.port == port:
        return
    others = [server for server in servers if server.host == engine.host and server.port == port]
    if others:
        mine = f"; {own.name} has {own.port}" if own is not None else ""
        text = f"{port} is the port of {others[0].name}, which is there for the other pool{mine}"
        yield Notice(f"{path}.{PORT}", f"warning: {text}")
    else:
        text = f"{port} is no cache server of this deployment: what listens there on {engine.host} is used"
        if own is not None:
            # The servers of a host count up, so that the port of the first decides that of the engine's own.
            first = min(server.port for server in servers if server.host == engine.host)
            moved = port - (own.port - first)
            set_it = f"set cache.port: {moved}, or " if moved >= 1 else ""
            text += f"; to use {own.name}, {set_it}leave {PORT} out"
        yield Notice(f"{path}.{PORT}", text)
