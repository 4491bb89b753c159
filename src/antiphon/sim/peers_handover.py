"""Hand-overs through the cache in the simulation: one engine stores a prefix, another looks it up at once.

The store is slow, is refused, or ends in its middle with its writer; where two ranks store, the copy of one may fail.
Who looks it up may leave. What must hold:

- The lookup has its answer by its deadline, and soon after what it waits for is known not to come.
- What it is given is right, byte for byte: nothing that was reserved and not committed.
- Where nothing goes wrong it is given all.
"""

from __future__ import annotations

import hashlib
from typing import Final

from antiphon.cache.arena import RegionHandle
from antiphon.cache.awaiting import UNSEEN_MAX_S
from antiphon.cache.effects import Attached, Found, LeaseNoted, Onboarding, Reserved
from antiphon.cache.events import (
    Abort,
    Attach,
    Commit,
    ConnectionId,
    Detach,
    EngineId,
    HandedOver,
    Lookup,
    Release,
    Reserve,
    TicketId,
)
from antiphon.core.chunks import CHUNK_SIZE_TOKENS, ChunkKey
from antiphon.protocol.peers import Holder
from antiphon.sim.peers_server import CHUNK_BYTES, NAMESPACE, SimServer, content_of
from antiphon.sim.timeline import CheckFailed, Timeline

FIRST_ENGINE: Final = 1_000
"""Connections of hand-overs are numbered from here on."""
CONNECTIONS: Final = 3
"""Of one hand-over, at most: two ranks that store, and who looks up."""
STORE_S: Final = (0.004, 0.004, 0.004, 0.3)
"""Mean time of the store of one chunk."""
HOPELESS_HERE_S: Final = 0.25
"""An answer comes so soon after the last chunk that the same server stores; ``UNSEEN_MAX_S`` later where the store of
one never began; not while a tier is still asked: questions wait behind those to peers that do not answer."""
ASKING_S: Final = 0.02
NEVER_BEGINS: Final = -1
HOPELESS_S: Final = 4.0
"""The same where another server has it: a second for what nobody began, two peers that do not answer, a poll."""
LATE_S: Final = 0.01


class SimHandover:
    """One hand-over.

    Args:
        timeline: virtual time.
        number: of it; names its engines and keys.
        prefill: the server of the engine that stores.
        decode: the server of the engine that looks up; may be the same. Both have one layout.
        num_chunks: of the prefix.
        is_clean: nothing goes wrong with its engines.
    """

    def __init__(
        self,
        timeline: Timeline,
        number: int,
        pair: tuple[SimServer, SimServer],
        num_chunks: int,
        *,
        is_clean: bool = False,
    ) -> None:
        self._timeline = timeline
        self._prefill, self._decode = pair
        self.keys = tuple(
            ChunkKey(hashlib.sha256(b"handed over %d %d" % (number, place)).digest()) for place in range(num_chunks)
        )
        self._number = number
        self._connection = ConnectionId(FIRST_ENGINE + CONNECTIONS * number)
        self._is_here = pair[0] is pair[1]
        chance = timeline.random
        self._dies_at = None if is_clean or chance.random() < 0.6 else chance.randrange(NEVER_BEGINS, num_chunks + 1)
        self._leaves_s = None if is_clean or chance.random() < 0.9 else chance.expovariate(20)
        self._store_s = STORE_S[0] if is_clean else chance.choice(STORE_S)
        self._onboard_s = chance.choice((0.3, 2.0, 9.0))
        self._ended_s = float("inf")
        """When nothing more of it was to come."""
        self._num_ranks = 2 if self._prefill.layout.num_slabs == 2 and chance.random() < 0.5 else 1
        self._fails_at: tuple[int, int] | None = None
        """Chunk and rank whose copy fails."""
        if self._num_ranks == 2 and not is_clean and chance.random() < 0.3:
            self._fails_at = chance.randrange(num_chunks), chance.randrange(2)
        self._has_failed = False
        self._num_stored = 0
        """Chunks that all ranks are done with."""
        self._is_unseen = self._dies_at == NEVER_BEGINS
        """Whether some of it looks as if its store had not begun yet: it never will, or what was stored had gone when
        the lookup came, or its failure is long ago."""
        self._num_stops = self._decode.num_stops
        self._ticket = TicketId(-1)
        self.num_found: int | None = None
        """Chunks that the lookup was given; None while it waits, and where it has left."""
        self.is_over = False
        self.waited_s = 0.0
        # The prefill engine answers, and then stores: the lookup may come first.
        self._prefill.process.on_death.append(self._store_ends)
        self._prefill.process.after(chance.random() * 0.01, self._reserve)
        self._decode.process.after(0.002 + chance.random() * 0.01, self._look_up)

    # ---- the engine that stores --------------------------------------------------------------------------------------

    def _attach(self, server: SimServer, role: str, number: int, slabs: tuple[int, ...]) -> ConnectionId:
        connection = ConnectionId(self._connection + number)
        engine = EngineId(f"{role}{self._number}", "i")
        server.reply(Attach(connection, engine, "m", CHUNK_SIZE_TOKENS, server.layout, slabs), Attached)
        return connection

    def _reserve(self) -> None:
        server = self._prefill
        if self._dies_at == NEVER_BEGINS:
            self._timeline.count("writer died", server.host)
            self._store_ends()
            return
        writers = [
            self._attach(server, "prefill", rank, self._slabs_of(server, rank)) for rank in range(self._num_ranks)
        ]
        replies = [server.step(Reserve(writer, NAMESPACE, "t", None, self.keys)) for writer in writers]
        grants = [reply.grants if isinstance(reply, Reserved) else () for reply in replies]
        if any(len(each) < len(self.keys) for each in grants):
            self._timeline.count("hand-over without room", server.host)
        for grant in grants[0]:
            server.write(grant.region, b"\xee" * CHUNK_BYTES)
        left = [
            (place, rank, grant.region)
            for place, of_ranks in enumerate(zip(*grants, strict=False))
            for rank, grant in enumerate(of_ranks)
        ]

        def store_one() -> None:
            if left and self._dies_at is not None and left[0][0] >= self._dies_at:
                self._timeline.count("writer died", server.host)
                left.clear()
            if not left:
                for writer in writers:
                    server.step(Detach(writer))
                self._store_ends()
                return
            self._store(server, writers, *left.pop(0))
            server.process.after(self._pause_s(), store_one)

        server.process.after(self._pause_s(), store_one)

    def _slabs_of(self, server: SimServer, rank: int) -> tuple[int, ...]:
        num_slabs = server.layout.num_slabs // self._num_ranks
        return tuple(range(rank * num_slabs, (rank + 1) * num_slabs))

    def _pause_s(self) -> float:
        return self._timeline.random.expovariate(self._num_ranks / self._store_s)

    def _store(
        self, server: SimServer, writers: list[ConnectionId], place: int, rank: int, region: RegionHandle
    ) -> None:
        """One rank copies its part of a chunk, or fails to."""
        if (place, rank) == self._fails_at:
            self._timeline.count("rank failed", server.host)
            self._has_failed = True
            server.step(Abort(writers[rank], (region,)))
        else:
            num_bytes = CHUNK_BYTES // self._num_ranks
            first = rank * num_bytes
            data = content_of(self.keys[place], server.layout)[first : first + num_bytes]
            server.memory[region.offset_bytes + first : region.offset_bytes + first + num_bytes] = data
            server.step(Commit(writers[rank], (region,)))
        if rank == self._num_ranks - 1:
            self._num_stored = place + 1

    def _store_ends(self) -> None:
        """Nothing more is stored."""
        if self._ended_s == float("inf"):
            self._ended_s = self._timeline.now_s
            self._timeline.after(HOPELESS_HERE_S if self._is_here else HOPELESS_S, self._check_hope)

    # ---- the engine that looks up ------------------------------------------------------------------------------------

    def _look_up(self) -> None:
        server, keys = self._decode, self.keys
        reader = self._attach(server, "decode", CONNECTIONS - 1, tuple(range(server.layout.num_slabs)))
        if not self._is_here:
            holder = Holder(self._prefill.host, self._prefill.incarnation, "")
            chunks = [(bytes(server.tier_key_of(key)), bytes(key)) for key in keys]
            server.expected.add(holder, chunks, self._timeline.now_s, self._onboard_s)
        has_gone = self._has_failed or not all(map(server.is_readable, keys[: self._num_stored]))
        self._is_unseen |= self._is_here and has_gone
        handed = HandedOver(len(keys), self._is_here)
        reply = server.step(Lookup(reader, "r", NAMESPACE, "t", keys, self._onboard_s, handed_over=handed))
        began_s = self._timeline.now_s

        def answered(found: Found) -> None:
            self.waited_s = self._timeline.now_s - began_s
            self._answered(reader, found)

        if isinstance(reply, Onboarding):
            self._timeline.count("hand-over waits", server.host)
            waits = reply
            self._ticket = waits.ticket
            early = server.early.pop(waits.ticket, None)
            if early is None:
                server.on_onboarded[waits.ticket] = answered
                self._timeline.after(waits.wait_s + LATE_S, self._check_deadline)
                if self._leaves_s is not None:
                    server.process.after(self._leaves_s, lambda: self._leave(reader, waits))
                return
            reply = early
        assert isinstance(reply, Found), reply
        answered(reply)

    def _answered(self, reader: ConnectionId, found: Found) -> None:
        server = self._decode
        self.is_over = True
        self.num_found = len(found.regions)
        self._timeline.count(f"hand-over {'whole' if self.num_found == len(self.keys) else 'in part'}", server.host)
        for key, region in zip(self.keys, found.regions, strict=False):
            data = bytes(server.memory[region.offset_bytes : region.offset_bytes + CHUNK_BYTES])
            if data != content_of(key, server.layout):
                raise CheckFailed(f"{server.process.name} hands over wrong bytes for chunk {key.hex()[:8]}")
        if found.lease is not None:
            server.reply(Release(reader, "r", found.lease), LeaseNoted)
        server.step(Detach(reader))

    def _leave(self, reader: ConnectionId, waits: Onboarding) -> None:
        if not self.is_over:
            self._timeline.count("hand-over left", self._decode.host)
            self.is_over = True
            del self._decode.on_onboarded[waits.ticket]
            self._decode.step(Detach(reader))

    # ---- what must hold ----------------------------------------------------------------------------------------------

    @property
    def _is_excused(self) -> bool:
        """Whether it has an answer, or its server is dead or was stopped meanwhile."""
        server = self._decode
        return self.is_over or not server.process.is_alive or server.num_stops != self._num_stops

    @property
    def _is_asking(self) -> bool:
        """Whether a tier is being asked for what comes next, after all that is readable here."""
        waiter = self._decode.cache._books.tiers.onboardings.waiters.get(self._ticket)  # type: ignore[union-attr]
        if waiter is None or not waiter.num_asks:
            return False
        return not any(map(self._decode.is_readable, self.keys[waiter.position : waiter.position + 1]))

    def _check_deadline(self) -> None:
        if not self._is_excused:
            raise CheckFailed(f"a lookup of {self._decode.process.name} waits past its deadline")

    def _check_hope(self) -> None:
        if self._is_here and not self._is_excused and self._is_asking:
            self._timeline.after(ASKING_S, self._check_hope)
        elif self._is_unseen and not self._is_excused:
            self._is_unseen = False
            self._timeline.count("hand-over of what is unseen", self._decode.host)
            self._timeline.after(2 * UNSEEN_MAX_S if self._has_failed else UNSEEN_MAX_S, self._check_hope)
        elif not self._is_excused:
            raise CheckFailed(f"a lookup of {self._decode.process.name} waits for what does not come")
