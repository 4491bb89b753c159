"""The tier ``peer``: chunks in the arenas of other cache servers, as a store that is only read.

``contains`` asks the coordinator, once for many keys; ``get_into`` pulls a chunk into its target. Both are called from
a bounded pool of threads, several at once, and decide by ``peer_pull``.

Always true:

- What cannot be had is a miss: neither a peer nor the coordinator that is dead, hung or slow is an error of the tier.
- ``get_into`` returns only when nothing writes to its target any more. With a peer that hangs during a read over NIXL
  that takes longer than its deadline: the peer's breaker opens at the deadline.
- True means that the target has the digest that the holder gave.
- What was handed over (``expect``) is asked of the server that was named, which must prove the cluster secret, and of
  no coordinator; until it is there, that server says it will not come, does not answer, or the time is over.

It does not decide what is kept of it, and never writes to a peer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from antiphon.cache.lending import Wanted
from antiphon.cache_server.peer_expected import Expectations, Question
from antiphon.cache_server.peer_links import PeerLinks
from antiphon.cache_server.peer_pull import Action, Ended, GiveBack, LendFrom, ReadFrom, Verify, Whereabouts, pull
from antiphon.core.errors import AntiphonError, PeerTimeout, PeerUnavailable, ProtocolError, TierError, TierUnavailable
from antiphon.observe.tracing import active_span, active_traceparent
from antiphon.protocol import peers as wire
from antiphon.storage.record import PayloadDigest, address_of
from antiphon.storage.tier import ChunkMeta, TierUsage
from antiphon.transport.peer_tcp import PeerSocket

TIER_NAME: Final = "peer"

LEND_TIMEOUT_S: Final = 0.25
"""From the call to the loan: connection and proof included. A peer takes some milliseconds."""
READ_BASE_S: Final = 0.5
READ_BYTES_PER_S: Final = 100e6
"""A read may take half a second, and what its bytes take at this rate: slower than that, computing is faster."""
RETURN_TIMEOUT_S: Final = 0.25
ASK_TIMEOUT_S: Final = 0.05
CAPPED_PAUSE_S: Final = 0.005

Locate = Callable[[list[bytes], float], wire.Located | None]


class PeerStore:
    """The tier.

    Args:
        locate: asks the coordinator; None where it does not say in time.
        links: to peers.
        arena: first address and bytes of the arena, which NIXL reads into.
    """

    def __init__(self, locate: Locate, links: PeerLinks, arena: tuple[int, int]) -> None:
        self._locate = locate
        self._links = links
        self._arena_address, self._arena_bytes = arena
        self._lock = threading.Lock()
        self._is_closed = False
        self.on_pulled: Callable[[bytes], None] = _nobody_cares
        """Told of each key whose chunk is in its target."""
        self.expected = Expectations()
        """Under ``lock`` alone."""
        self.where = Whereabouts()
        """Under ``lock`` alone."""

    @property
    def name(self) -> str:
        """Of the tier."""
        return TIER_NAME

    def put(self, key: bytes, payload: memoryview, meta: ChunkMeta) -> None:
        """Raises TierError: nothing is written to peers, which pull what they want."""
        raise TierError("the tier peer is only read")

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of ``keys`` a peer holds that can be used now."""
        self._check_open()
        with self._lock:
            open_questions = self.expected.questions(keys, time.monotonic())
        for question in open_questions:
            self._ask_held(question)
        with self._lock:
            now_s = time.monotonic()
            others = [key for key in keys if not self.expected.is_expected(key, now_s)]
        for first in range(0, len(others), wire.KEYS_PER_CALL_MAX):
            self._ask(others[first : first + wire.KEYS_PER_CALL_MAX])
        now_s = time.monotonic()
        with self._lock:
            return [bool(self.where.usable(key, now_s)) for key in keys]

    def _ask(self, keys: Sequence[bytes]) -> None:
        now_s = time.monotonic()
        with self._lock:
            unknown = [key for key in keys if not self.where.is_known(key, now_s)]
        if not unknown:
            return
        located = self._locate(unknown, ASK_TIMEOUT_S)
        if located is None:
            return
        members = located.members
        now_s = time.monotonic()
        with self._lock:
            for key, numbers in zip(unknown, located.holders, strict=True):
                if all(0 <= number < len(members) for number in numbers):
                    self.where.located(key, [members[number] for number in numbers], now_s)

    def expect(self, holder: wire.Holder, chunks: Sequence[tuple[bytes, bytes]], wait_s: float) -> None:
        """The holder will have these chunks (tier key and chunk key), for as long as somebody waits for them."""
        with self._lock:
            self.expected.add(holder, chunks, time.monotonic(), wait_s)

    def gone(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of ``keys`` were expected and will not come."""
        with self._lock:
            return [self.expected.is_gone(key) for key in keys]

    def _ask_held(self, question: Question) -> None:
        holder, chunks = question
        with self._lock:
            if not self.where.take(holder, time.monotonic()):
                self.expected.lost(chunks)
                return
        link: PeerSocket | None = None
        try:
            link = self._links.take(holder, LEND_TIMEOUT_S)
            body = wire.AskHeld(b"".join(key for key, _ in chunks), b"".join(key for _, key in chunks))
            held = link.call(body, LEND_TIMEOUT_S)
            if not isinstance(held, wire.Held) or len(held.states) != len(chunks):
                raise ProtocolError(f"AskHeld is not answered by {type(held).__name__}")
            states = [
                wire.HELD_STATES[number] if number < len(wire.HELD_STATES) else "refused" for number in held.states
            ]
        except AntiphonError as error:
            if link is not None:
                link.close()
            self._links.failed(holder)
            with self._lock:
                self.where.counts["failed"] += 1
                self.where.failed(holder, time.monotonic(), error.message)
                self.expected.lost(chunks)
            return
        self._links.give_back(holder, link)
        now_s = time.monotonic()
        with self._lock:
            self.where.answered(holder)
            for key in self.expected.answered(chunks, states, now_s):
                self.where.located(key, [holder], now_s)

    def get_into(self, key: bytes, meta: ChunkMeta, into: memoryview) -> bool:
        """Pulls a chunk into ``into``, of ``meta.num_bytes`` bytes; False where no peer gave it."""
        self._check_open()
        assert len(into) == meta.num_bytes, (len(into), meta.num_bytes)
        self._ask([key])
        wanted = Wanted(meta.namespace, meta.layout_fingerprint, meta.num_bytes, meta.format_version)
        drive = _Drive(self, into)
        with self._lock:
            pulling = pull(self.where, key, wanted, time.monotonic)
        try:
            ended: Ended = None
            while True:
                with self._lock:
                    try:
                        action = pulling.send(ended)
                    except StopIteration as stop:
                        if stop.value:
                            self.on_pulled(key)
                        return bool(stop.value)
                ended = drive.do(action)
        finally:
            with self._lock:
                pulling.close()
            drive.close()

    def hung(self, holder: wire.Holder, reason: str) -> None:
        """A read from the holder has missed its deadline, and is not over yet."""
        with self._lock:
            self.where.failed(holder, time.monotonic(), reason)

    def breakers(self) -> dict[str, dict[str, object]]:
        """Which peers are left alone, and why."""
        with self._lock:
            return self.where.breakers()

    def remove(self, keys: Sequence[bytes]) -> None:
        """Nothing is removed from peers."""

    def keys(self) -> Iterator[bytes] | None:
        """None: the coordinator is asked instead."""
        return None

    def usage(self) -> TierUsage:
        """Nothing of this server's."""
        return TierUsage(0, 0, None)

    def probe(self) -> None:
        """Nothing to try out: each peer and the coordinator have a breaker of their own."""
        self._check_open()

    def close(self) -> None:
        """Closes the links."""
        self._is_closed = True
        self._links.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierUnavailable("the tier peer is closed")

    def is_registered(self, address: int, num_bytes: int) -> bool:
        """Whether NIXL can read into this memory."""
        return self._arena_address <= address and address + num_bytes <= self._arena_address + self._arena_bytes


def _nobody_cares(key: bytes) -> None:
    pass


def _note_transport(name: str) -> None:
    span = active_span()
    if span is not None:
        span.attributes["antiphon.transport"] = name


class _Drive:
    """Does what one pull asks for.

    Args:
        store: whose.
        into: the target.
    """

    def __init__(self, store: PeerStore, into: memoryview) -> None:
        self._store = store
        self._links = store._links
        self._into = into
        self._link: PeerSocket | None = None
        self._holder: wire.Holder | None = None

    def do(self, action: Action) -> Ended:
        """The answer to ``action``; errors are values."""
        try:
            match action:
                case LendFrom():
                    return self._lend(action)
                case ReadFrom():
                    self._read(action)
                    return None
                case Verify():
                    digest = PayloadDigest()
                    digest.update(self._into)
                    return digest.digest() == action.digest
                case GiveBack():
                    self._give_back(action)
                    return None
        except AntiphonError as error:
            if isinstance(action, LendFrom | ReadFrom):
                self._links.failed(action.holder)
            return error

    def _lend(self, action: LendFrom) -> wire.LentChunk | None:
        self.close()
        deadline_s = time.monotonic() + LEND_TIMEOUT_S
        self._holder, wanted = action.holder, action.wanted
        link = self._link = self._links.take(action.holder, LEND_TIMEOUT_S)
        meaning = (wanted.namespace, wanted.fingerprint, wanted.num_bytes, wanted.format_version)
        body = wire.Lend(*meaning, action.key, active_traceparent())
        span = active_span()
        if span is not None:
            span.attributes["antiphon.peer"] = action.holder.instance
        while True:
            lent = link.call(body, max(0.001, deadline_s - time.monotonic()))
            if not isinstance(lent, wire.Lent):
                raise ProtocolError(f"Lend is answered by Lent, not by {type(lent).__name__}")
            if lent.chunks or not lent.num_capped or time.monotonic() + CAPPED_PAUSE_S > deadline_s:
                return lent.chunks[0] if lent.chunks else None
            time.sleep(CAPPED_PAUSE_S)  # this server has its share already, and gives of it back in a moment

    def _read(self, action: ReadFrom) -> None:
        assert self._link is not None, "lent first"
        num_bytes = len(self._into)
        timeout_s = READ_BASE_S + num_bytes / READ_BYTES_PER_S
        agent = self._links.agent
        address = address_of(self._into)
        if agent is not None and self._store.is_registered(address, num_bytes):
            memory = self._links.memory_of(action.holder, self._link, LEND_TIMEOUT_S)
            if memory is not None:
                reading = agent.read(memory, memory.address + action.loan.offset, address, num_bytes)
                try:
                    reading.wait(timeout_s)
                except PeerTimeout as error:
                    self._links.failed(action.holder)
                    self._store.hung(action.holder, error.message)
                    with contextlib.suppress(PeerUnavailable):  # closed: its end settles the read
                        agent.expire(reading)
                    reading.settle()
                    raise
                except PeerUnavailable:
                    self._links.nixl_ended(action.holder, is_ok=False)  # a peer that lives is read over TCP
                else:
                    self._links.nixl_ended(action.holder, is_ok=True)
                    _note_transport("nixl")
                    return
        _note_transport("tcp")
        self._link.read_into(action.loan.lease, self._into, timeout_s)

    def _give_back(self, action: GiveBack) -> None:
        if self._link is not None and not self._link.is_closed:
            self._link.post(wire.Return((action.loan.lease,)), RETURN_TIMEOUT_S)

    def close(self) -> None:
        """The link goes back."""
        if self._link is not None and self._holder is not None:
            self._links.give_back(self._holder, self._link)
        self._link = None
