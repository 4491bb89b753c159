"""What cannot work about the cache: chunks against blocks, the sockets' paths, quotas, and what loads the connector."""

from __future__ import annotations

import os
from collections.abc import Iterator

from antiphon.config.cache_servers import server_of
from antiphon.config.compile import Compiled
from antiphon.config.facts import HostFacts, interpreter_key
from antiphon.config.problems import Notice, Problem
from antiphon.config.units import format_bytes
from antiphon.core.ids import new_incarnation

Finding = Problem | Notice
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


CACHE_CHECKS = [check_chunks, check_socket_paths, check_quotas, check_connector]
