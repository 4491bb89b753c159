"""A process with a cache, an arena and its peers, and nothing else of a cache server; driven by lines of JSON.

What it can be told: ``store`` (chunks whose bytes follow from their key), ``pull`` (chunks of others into reserved
regions, all at once, kept if sound), ``contains``, ``lookup`` (a local hit, timed), ``evict``, ``status``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from antiphon.cache.effects import Attached, Committed, Found, Reserved
from antiphon.cache.events import Abort, Attach, Clear, Commit, ConnectionId, EngineId, Lookup, Release, Reserve
from antiphon.cache.machine import Cache
from antiphon.cache.options import CacheOptions
from antiphon.cache.tier_key import meaning_of
from antiphon.cache_server.driver import CacheDriver
from antiphon.cache_server.metrics import CallTallies
from antiphon.cache_server.peers import Peers, PeersParts, wants_peers
from antiphon.config.cache_server_spec import CacheServerSpec
from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.ids import new_incarnation
from antiphon.core.namespace import NamespaceDigest
from antiphon.core.quiet_log import QuietLog
from antiphon.storage.arena import ArenaOwner
from antiphon.storage.tier import ChunkMeta
from tests.cache_server.world import keys_of, namespace_of

ENGINE = ConnectionId(1)
PULLS_AT_ONCE = 4


class Host:
    """The process."""

    def __init__(self, spec: CacheServerSpec, chunk_bytes: int, fingerprint: str | None) -> None:
        instance, incarnation = spec.instance_id or "host", new_incarnation()
        self.arena = ArenaOwner.create(spec.l1_size_bytes, instance, incarnation)
        self.arena.populate(0, self.arena.data_bytes)
        options = CacheOptions(arena_bytes=self.arena.data_bytes, leased_share_max=1.0, reserved_share_max=1.0)
        self.driver = CacheDriver(Cache(options, first_id=7), CallTallies(), QuietLog(logging.getLogger("host")))
        self.layout = ChunkLayout(1, chunk_bytes, fingerprint)
        engine = EngineId("e", "i")
        reply = self.driver.step(Attach(ENGINE, engine, "m", options.chunk_size_tokens, self.layout, (0,)))
        assert isinstance(reply, Attached), reply
        parts = PeersParts(
            instance, incarnation, self.driver.cache, self.driver.step, self.driver.waiters, self.arena.mapping
        )
        self.peers = Peers.start(spec, parts)
        self.pool = ThreadPoolExecutor(PULLS_AT_ONCE)

    def bytes_of(self, key: bytes) -> bytes:
        """What a chunk of that key holds."""
        return (key * (self.layout.slab_bytes // len(key) + 1))[: self.layout.slab_bytes]

    def _tier_key(self, namespace: bytes, key: bytes) -> bytes:
        return meaning_of(NamespaceDigest(namespace), "t", "m", self.layout).key_of(ChunkKey(key))

    def reserve(self, namespace: bytes, keys: list[bytes]) -> Reserved:
        names = tuple(map(ChunkKey, keys))
        reply = self.driver.step(Reserve(ENGINE, NamespaceDigest(namespace), "t", None, names))
        assert isinstance(reply, Reserved), reply
        return reply

    async def store(self, name: str, num: int) -> Any:
        keys = keys_of(name, num)
        reserved = self.reserve(namespace_of(name), keys)
        for grant in reserved.grants:
            self.arena.mapping.view(grant.region.offset_bytes, self.layout.slab_bytes)[:] = self.bytes_of(grant.key)
        reply = self.driver.step(Commit(ENGINE, tuple(grant.region for grant in reserved.grants)))
        assert isinstance(reply, Committed), reply
        return len(reply.outcomes)

    async def contains(self, name: str, num: int) -> Any:
        keys = [self._tier_key(namespace_of(name), key) for key in keys_of(name, num)]
        found = await asyncio.get_running_loop().run_in_executor(self.pool, self.peers.store.contains, keys)
        return sum(found)

    async def pull(self, name: str, num: int, check: bool = True) -> Any:
        """Pulls; returns how many came, of these how many bit for bit, and the seconds that it took."""
        namespace = namespace_of(name)
        keys = keys_of(name, num)
        loop = asyncio.get_running_loop()
        tier_keys = [self._tier_key(namespace, key) for key in keys]
        began_s = time.perf_counter()
        await loop.run_in_executor(self.pool, self.peers.store.contains, tier_keys)
        grants = self.reserve(namespace, keys).grants
        meta = ChunkMeta(NamespaceDigest(namespace), self.layout.fingerprint, self.layout.chunk_bytes)

        def one(key: bytes, offset: int) -> bool:
            view = self.arena.mapping.view(offset, self.layout.slab_bytes)
            return self.peers.store.get_into(self._tier_key(namespace, key), meta, view)

        pulls = [loop.run_in_executor(self.pool, one, grant.key, grant.region.offset_bytes) for grant in grants]
        came = await asyncio.gather(*pulls)
        took_s = time.perf_counter() - began_s
        kept = [grant for grant, is_here in zip(grants, came, strict=True) if is_here]
        if kept:
            self.driver.step(Commit(ENGINE, tuple(grant.region for grant in kept)))
        if len(kept) < len(grants):
            self.driver.step(Abort(ENGINE, tuple(grant.region for grant in grants if grant not in kept)))
        num_equal = 0
        for grant in kept if check else ():
            view = self.arena.mapping.view(grant.region.offset_bytes, self.layout.slab_bytes)
            num_equal += bytes(view) == self.bytes_of(grant.key)
        return {"came": len(kept), "equal": num_equal, "took_s": took_s}

    async def lookup(self, name: str, num: int) -> Any:
        """Chunks found here, and the seconds from the loop's next turn to the answer."""
        began_s = time.perf_counter()
        await asyncio.sleep(0)
        keys = tuple(map(ChunkKey, keys_of(name, num)))
        reply = self.driver.step(Lookup(ENGINE, "r", NamespaceDigest(namespace_of(name)), "t", keys))
        assert isinstance(reply, Found), reply
        if reply.lease is not None:
            self.driver.step(Release(ENGINE, "r", reply.lease))
        return {"found": len(reply.regions), "took_s": time.perf_counter() - began_s}

    async def evict(self) -> Any:
        self.driver.step(Clear())

    async def status(self) -> Any:
        return self.peers.status()

    def close(self) -> bool:
        self.pool.shutdown()
        is_quiet = self.peers.close()
        self.driver.close()
        return is_quiet


async def main() -> None:
    options = json.loads(sys.argv[1])
    chunk_bytes, fingerprint = options.pop("chunk_bytes"), options.pop("fingerprint", None)
    spec = CacheServerSpec(**options)
    assert wants_peers(spec)
    host = Host(spec, chunk_bytes, fingerprint)
    lines = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(json.dumps({"url": host.peers.url}), flush=True)
    while line := await lines.readline():
        verb, arguments = json.loads(line)
        print(json.dumps(await getattr(host, verb)(**arguments), default=str), flush=True)
    print(json.dumps({"is_quiet": host.close()}), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(main())
