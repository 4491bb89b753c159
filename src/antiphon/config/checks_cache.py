"""What cannot work about the cache: chunks against blocks, the sockets' paths, quotas, and what loads the connector."""

from __future__ import annotations

import os
from collections.abc import Iterator

from antiphon.config.cache_servers import server_of
from antiphon.config.compile import Compiled
from antiphon.config.facts import HostFacts, interpreter_key
from antiphon.config.peers_plan import are_peers, is_cluster_open
from antiphon.config.problems import Notice, Problem
from antiphon.config.resolve import Engine
from antiphon.config.spec import POOLS
from antiphon.config.units import format_bytes
from antiphon.core.ids import new_incarnation

Finding = Problem | Notice
CHUNKS_MIN = 8
"""Fewer are all in use by a few requests at once, so that none is kept for a later one."""
CHUNKS_FEW = 64
"""Fewer hold some conversations."""
SOCKET_PATH_MAX_BYTES = 107
"""``sun_path`` of Linux has 108 bytes, the last of which is zero."""


def check_chunks(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """A chunk is made of whole blocks of every engine that stores or loads it."""
    chunk = compiled.spec.cache.chunk_size_tokens
    blocks: dict[int, dict[str, None]] = {}
    for engine in compiled.engines:
        if engine.spec.kind == "vllm" and server_of(engine, list(compiled.servers)) is not None:
            blocks.setdefault(engine.block_size_tokens, {})[engine.pool] = None
    for block, pools in blocks.items():
        if chunk % block:
            message = f"{chunk} is not a multiple of {block}, the block size of the {' and '.join(pools)} engines"
            fix = f"write {max(1, round(chunk / block)) * block}, or set engine.block_size_tokens to a divisor"
            yield Problem("cache.chunk_size_tokens", message, fix)


def check_chunk_length(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """The longest request fills a chunk: one that is never full is never stored."""
    spec = compiled.spec
    served = [engine for engine in compiled.engines if _is_cached(engine, compiled)]
    length, where = spec.model.max_model_len, "model.max_model_len"
    if length is None:
        length, where = facts.model.longest_request_tokens, "what the model takes"
    chunk = spec.cache.chunk_size_tokens
    # The last token of a request is never computed on, so that its KV is one token shorter.
    if not served or length is None or chunk < length:
        return
    block = max(engine.block_size_tokens for engine in served)
    most = (length - 1) // block * block
    fix = f"write at most {most}" if most else f"write engine.block_size_tokens below {length}, and here a multiple"
    message = f"{chunk} tokens are never stored: a request has at most {length} ({where}), and fills no chunk"
    longer = ", or raise model.max_model_len" if spec.model.max_model_len is not None else ""
    yield Problem("cache.chunk_size_tokens", message, f"{fix}{longer}")


def check_capacity(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """A server holds some chunks of the model, where its KV is known: with a few, nothing stays until it is wanted."""
    spec = compiled.spec
    for engine in compiled.engines:
        server = server_of(engine, list(compiled.servers))
        token_bytes = facts.model.kv_token_bytes(spec.model.dtype, engine.spec.kv_cache_dtype)
        if server is None or token_bytes is None or not _is_cached(engine, compiled):
            continue
        chunk_bytes = token_bytes * server.chunk_size_tokens
        num_chunks = server.l1_size_bytes // chunk_bytes
        size, tokens = format_bytes(server.l1_size_bytes), num_chunks * server.chunk_size_tokens
        holds = f"{size} holds {num_chunks} chunks of this model, {tokens} tokens ({format_bytes(chunk_bytes)} a chunk)"
        if num_chunks < CHUNKS_MIN:
            enough = format_bytes(-(-CHUNKS_FEW * chunk_bytes // 10**6) * 10**6)
            fix = f"write {enough} or more, or lower cache.chunk_size_tokens"
            yield Problem("cache.l1_size_bytes", f"{holds}; {CHUNKS_MIN} are the least", fix)
        elif num_chunks < CHUNKS_FEW:
            text = f"{holds}: little is found again; {format_bytes(CHUNKS_FEW * chunk_bytes)} hold {CHUNKS_FEW}"
            yield Notice("cache.l1_size_bytes", text)


def _is_cached(engine: Engine, compiled: Compiled) -> bool:
    return engine.spec.kind == "vllm" and server_of(engine, list(compiled.servers)) is not None


def check_socket_paths(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """The path of each local server's unix socket fits into a socket address."""
    local = [server for server in compiled.servers if server.host in facts.local_hosts]
    if not local:
        return
    folder = compiled.spec.cache.runtime_dir or facts.runtime_dir
    longest = max(local, key=lambda server: len(server.instance))
    num_bytes = len(os.fsencode(f"{folder}/cache-{longest.instance}-{new_incarnation()}.sock"))
    if num_bytes > SOCKET_PATH_MAX_BYTES:
        spare = len(os.fsencode(folder)) - (num_bytes - SOCKET_PATH_MAX_BYTES)
        message = (
            f"the unix socket of {longest.name} in {folder} would have a path of {num_bytes} bytes, but "
            f"{SOCKET_PATH_MAX_BYTES} is the most"
        )
        yield Problem("cache.runtime_dir", message, f"write a folder of at most {spare} bytes")


def check_quotas(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """A quota that is larger than the cache limits nothing."""
    cache = compiled.spec.cache
    if not compiled.servers:
        return
    smallest = min(server.l1_size_bytes for server in compiled.servers)
    quotas = {f"cache.quota_bytes.{tenant}": size for tenant, size in cache.quota_bytes.items()}
    for field, size in {**quotas, "cache.default_quota_bytes": cache.default_quota_bytes or 0}.items():
        if size > smallest:
            text = f"{format_bytes(size)} limits nothing: a cache server has {format_bytes(smallest)}"
            yield Notice(field, text)


def check_connector(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """The interpreters of engines with a cache can import the connector."""
    for engine in compiled.engines:
        if engine.spec.kind != "vllm" or engine.host not in facts.local_hosts:
            continue
        found = facts.interpreters[interpreter_key(engine)]
        if found.error is None and not found.has_antiphon and server_of(engine, list(compiled.servers)) is not None:
            message = f"{engine.spec.python} has no antiphon, from which the engine loads its connector to the cache"
            fix = "install antiphon in it, or write cache.enabled: false"
            yield Problem(compiled.spec.knob_path(engine.pool, "python"), message, fix)


def missing_secret(place: str) -> Problem:
    """Cache servers are reached from other places of this kind (``host``, ``node``) without a secret."""
    message = f"is missing, and the cache servers are reached from other {place}s: who reached one could change KV"
    fix = f"write a secret with: openssl rand -hex 32 > FILE, copy it to every {place}, and name it here"
    return Problem("cache.cluster_secret_file", message, fix)


def check_cluster_secret(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """Servers that are reached from other hosts share a secret that the operator gave."""
    cache, servers = compiled.spec.cache, list(compiled.servers)
    if cache.cluster_secret_file is None and is_cluster_open(compiled.spec, servers):
        yield missing_secret("host")


def check_cache_handoff(compiled: Compiled) -> Iterator[Finding]:
    """KV can get from the prefill engines' cache servers to those of the decode engines."""
    spec, servers = compiled.spec, list(compiled.servers)
    without = [engine.name for engine in compiled.engines if server_of(engine, servers) is None]
    if without:
        message = f"{', '.join(without)} has no cache server, through which KV is handed over (handoff.kind: cache)"
        yield Problem("cache.enabled", message, "write true, or handoff.kind: nixl")
        return
    for pool in POOLS:
        extra = compiled.transfers[pool].config.get("kv_connector_extra_config", {})
        key = {"prefill": "antiphon.store", "decode": "antiphon.load"}[pool]
        if str(extra.get(key, True)).lower() == "false":
            path = f"{pool}.kv_transfer_config.kv_connector_extra_config.{key}"
            yield Problem(path, "false, but KV is handed over through the cache", "leave it out")
    has_shared_tier = any(tier.is_shared and tier.store != "none" for tier in spec.cache.tiers)
    if len(servers) > 1 and not are_peers(spec, servers) and not has_shared_tier:
        message = "cache, but nothing brings KV from one cache server to another"
        fix = "write cache.peers: true, name a tier in cache.l2 that all reach, or, on one host, cache.shared: true"
        yield Problem("handoff.kind", message, fix)


CACHE_CHECKS = [
    check_chunks,
    check_chunk_length,
    check_capacity,
    check_socket_paths,
    check_quotas,
    check_connector,
    check_cluster_secret,
]
