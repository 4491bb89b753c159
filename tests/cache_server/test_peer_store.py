"""The tier ``peer`` over links that are slow, hang, or fail: who is blamed, who waits, and how long a chunk may take.

Links have their real rates and the server its real times: in shorter ones a machine that is busy would be what is seen.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from antiphon.cache_server import peer_loans, peer_room, peer_store
from antiphon.cache_server.peer_pull import SLOW_MAX
from antiphon.cache_server.peer_room import Place
from antiphon.cache_server.peer_store import PeerStore
from antiphon.cache_server.peers import peer_tier
from antiphon.core.errors import PeerTimeout, PeerUnavailable
from antiphon.core.namespace import NamespaceDigest
from antiphon.core.units import MIB
from antiphon.protocol import peers as wire
from antiphon.storage.record import address_of
from antiphon.storage.tier import ChunkMeta
from antiphon.transport.nixl_agent import Reading, RemoteMemory
from tests.cache_server.world import wait_for

GIGABIT = 0.94e9 / 8
"""What a link of one gigabit brings, bytes per second."""
DIGEST = bytes(16)


class NoDigest:
    """Of any bytes the same, for nothing."""

    def update(self, piece: memoryview) -> None:
        pass

    def digest(self) -> bytes:
        return DIGEST


class Wire:
    """A link of ``rate`` bytes per second that all connections share: first come, first served, piece by piece."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_s = 0.0
        self._never = threading.Event()

    def pause(self, seconds: float) -> None:
        self._never.wait(seconds)

    def ship(self, num_bytes: int) -> None:
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + num_bytes / self._rate
            left_s = self._free_s - time.monotonic()
        self._never.wait(max(0.0, left_s))


class Links:
    """Connections to holders that lend whatever is asked for, and send it over ``wire``."""

    def __init__(self, wire_: Wire) -> None:
        self.wire = wire_
        self.agent: Any = None
        self.memory: RemoteMemory | None = None
        self.lent: Counter[bytes] = Counter()
        """How often each key was asked for."""
        self.num_reads = 0
        self.nixl_oks: list[bool] = []
        self._num_leases = 0
        self._lock = threading.Lock()

    def take(self, holder: wire.Holder, timeout_s: float) -> Link:
        return Link(self)

    def give_back(self, holder: wire.Holder, *_: object) -> None:
        pass

    failed = learn_memory = give_back

    def memory_of(self, holder: wire.Holder) -> RemoteMemory | None:
        return self.memory

    def nixl_ended(self, holder: wire.Holder, *, is_ok: bool) -> None:
        self.nixl_oks.append(is_ok)

    def needs_polls(self, holder: wire.Holder) -> bool:
        return True

    def lend(self, keys: Sequence[bytes]) -> wire.Lent:
        with self._lock:
            self.lent.update(keys)
            first, self._num_leases = self._num_leases, self._num_leases + len(keys)
        return wire.Lent(tuple(wire.LentChunk(at, first + at, 0, DIGEST) for at in range(len(keys))), 0, 0)


class Link:
    has_hung_up = False
    is_closed = False

    def __init__(self, links: Links) -> None:
        self._links = links

    def call(self, body: Any, timeout_s: float) -> wire.Message:
        return self._links.lend(wire.split_keys(body.keys))

    def post(self, body: Any, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def read_into(
        self, lease: int, into: memoryview, deadline_s: Callable[[], float], came: Callable[[memoryview], None]
    ) -> None:
        self._links.num_reads += 1
        for start in range(0, len(into), MIB):
            piece = into[start : start + MIB]
            self._links.wire.ship(len(piece))
            if time.monotonic() > deadline_s():
                raise PeerTimeout("the peer did not answer in time")
            came(piece)


class World:
    """A store, its links, and holders that have everything."""

    def __init__(self, num_bytes: int, rate: float = 1e12, num_holders: int = 1) -> None:
        self.num_bytes = num_bytes
        self.holders = tuple(wire.Holder(f"h{number}", "i", f"host:{number}") for number in range(num_holders))
        self.links: Any = Links(Wire(rate))
        self.into = memoryview(mmap.mmap(-1, num_bytes))
        """Of all pulls: nobody looks at the bytes."""
        self.store = PeerStore(self._locate, self.links, (address_of(self.into), num_bytes))
        self.took_s: list[float] = []

    def _locate(self, keys: list[bytes], timeout_s: float) -> wire.Located:
        num = len(self.holders)
        return wire.Located(self.holders, tuple(tuple((key[0] + at) % num for at in range(num)) for key in keys))

    def pull(self, number: int) -> bool:
        began_s = time.monotonic()
        meta = ChunkMeta(NamespaceDigest(bytes(32)), None, self.num_bytes)
        is_here = self.store.get_into(bytes([number]) * 32, meta, self.into)
        self.took_s.append(time.monotonic() - began_s)
        return is_here


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


@pytest.fixture
def no_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "PayloadDigest", NoDigest)


@pytest.mark.usefixtures("no_digests")
@pytest.mark.parametrize("num_holders", [1, 2])
@pytest.mark.parametrize(
    ("num_bytes", "rate", "num", "num_min"),
    [
        (6_000_000, GIGABIT, 16, 16),
        (32 * MIB, GIGABIT, 16, 7),
        (32 * MIB, 2 * GIGABIT, 16, 14),
        (128 * MIB, GIGABIT, 16, 2),
        (128 * MIB, 10 * GIGABIT, 16, 14),
    ],
)
def test_a_slow_link_costs_chunks_and_closes_nobody_out(
    pool: ThreadPoolExecutor, num_bytes: int, rate: float, num: int, num_min: int, num_holders: int
) -> None:
    world = World(num_bytes, rate, num_holders)
    came = list(pool.map(world.pull, range(num)))
    counts = world.store.where.counts
    assert sum(came) >= num_min
    assert world.store.breakers() == {}
    assert counts == {name: number for name, number in counts.items() if name in ("pulled", "late") or not number}
    assert counts["pulled"] + counts["late"] == num
    assert max(world.links.lent.values()) == 1, "another holder was tried"
    assert max(world.took_s) < 3.3 + 0.1
    assert world.store.room.num_bytes == 0


def test_one_pull_ends_below_what_the_tier_plan_waits() -> None:
    calls_s = 2 * peer_loans.LEND_TIMEOUT_S + peer_loans.RETURN_TIMEOUT_S
    assert peer_store.BUDGET_S + calls_s < peer_tier().timeout_s


def pull_without_room(pool: ThreadPoolExecutor) -> tuple[World, Place, Future[bool]]:
    """A pull that waits for room, and who has it all."""
    world = World(6_000_000)
    held = Place(peer_room.BYTES_MAX)
    assert world.store.room.take(held, time.monotonic() + 3.0, lambda: True)
    pulling = pool.submit(world.pull, 1)
    wait_for(lambda: world.store.room.num_waiting, "its wait")
    return world, held, pulling


@pytest.mark.usefixtures("no_digests")
def test_room_is_taken_before_a_loan_is_asked_for(pool: ThreadPoolExecutor) -> None:
    world, held, pulling = pull_without_room(pool)
    assert not world.links.lent
    world.store.room.give_back(held)
    assert pulling.result(5.0)
    assert sum(world.links.lent.values()) == 1


@pytest.mark.usefixtures("no_digests")
def test_nobody_waits_for_room_to_read_from_a_peer_that_has_failed(pool: ThreadPoolExecutor) -> None:
    world, _, pulling = pull_without_room(pool)
    world.store.hung(world.holders[0], PeerTimeout("another read"))
    assert pulling.result(1.0) is False
    assert world.took_s[0] < 1.0
    assert world.store.where.counts["late"] == 0
    assert not world.links.lent


@pytest.mark.usefixtures("no_digests")
def test_a_peer_that_trickles_is_closed_out_after_some_chunks(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_room, "SILENT_S", 0.1)
    monkeypatch.setattr(peer_room, "BYTES_PER_S", 1e9)
    world = World(6_000_000)

    def trickle(link: Link, lease: int, into: memoryview, deadline_s: Callable[[], float], came: Any) -> None:
        while time.monotonic() < deadline_s():
            came(into[:1])
            world.links.wire.pause(0.01)
        raise PeerTimeout("the peer did not answer in time")

    monkeypatch.setattr(Link, "read_into", trickle)
    for number in range(SLOW_MAX):
        assert world.store.breakers() == {}
        assert not world.pull(number)
    assert list(world.store.breakers()) == ["h0 (i)"]
    assert world.store.where.counts == {"late": SLOW_MAX, "breakers_opened": 1}
    assert not world.pull(SLOW_MAX)
    assert world.took_s[-1] < 0.1 + peer_room.BYTES_MAX / 1e9, "it was asked"


# ---- over NIXL -------------------------------------------------------------------------------------------------------


class Agent:
    """Reads that end as the test says."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self.expired: list[Reading] = []
        self.on_read: Callable[[Reading], None] = lambda reading: None
        self.on_expire: Callable[[Reading], None] = lambda reading: None

    def read(self, memory: RemoteMemory, there: int, here: int, num_bytes: int) -> Reading:
        reading = Reading(memory, there, here, num_bytes)
        self.readings.append(reading)
        self.on_read(reading)
        return reading

    def expire(self, reading: Reading) -> None:
        self.expired.append(reading)
        self.on_expire(reading)


@pytest.fixture
def over_nixl(no_digests: None, pool: ThreadPoolExecutor) -> Iterator[World]:
    world = World(32 * MIB, num_holders=1)
    world.links.agent = Agent()
    world.links.memory = RemoteMemory("h/i", b"m", 0)
    yield world
    for reading in world.links.agent.readings:  # whose thread would wait for ever
        reading.over(PeerTimeout("the test is over"))


def test_what_fails_over_nixl_comes_over_tcp_however_long_its_other_pieces_take(
    over_nixl: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end after the deadline of the reads."""
    monkeypatch.setattr(peer_room, "SILENT_S", 0.2)
    monkeypatch.setattr(peer_room, "BYTES_PER_S", 1e9)
    agent, timers = over_nixl.links.agent, []

    def fail_first(reading: Reading) -> None:
        if len(agent.readings) == 1:
            reading.over(PeerUnavailable("a read over NIXL failed"))

    def end_late(reading: Reading) -> None:
        timers.append(threading.Timer(0.5, reading.over, [PeerTimeout("the read was given up")]))
        timers[-1].start()

    agent.on_read, agent.on_expire = fail_first, end_late
    assert over_nixl.pull(1)
    assert over_nixl.took_s[0] > 0.2 + peer_room.BYTES_MAX / 1e9, "the pieces took too little to show anything"
    assert over_nixl.links.nixl_oks == [False]
    assert over_nixl.store.breakers() == {}
    for timer in timers:
        timer.join()


def test_a_peer_that_hangs_over_nixl_keeps_its_target_and_nobody_else(
    over_nixl: World, pool: ThreadPoolExecutor
) -> None:
    world, began_s = over_nixl, time.monotonic()
    pulling: Future[bool] = pool.submit(world.pull, 1)
    wait_for(lambda: len(world.links.agent.expired) == 4, "the end of its patience")
    took_s = time.monotonic() - began_s
    assert 0.5 < took_s < 0.5 + 0.34 + 0.5
    assert list(world.store.breakers()) == ["h0 (i)"]
    assert world.store.room.num_bytes == 0, "what hangs keeps others waiting"
    assert not pulling.done(), "its target is written to still"
    for reading in world.links.agent.readings:
        reading.over(PeerTimeout("the read was given up"))
    assert pulling.result(5.0) is False
    assert world.store.where.counts["failed"] == 1


def test_a_read_over_nixl_that_is_late_is_no_failure_of_its_peer(
    over_nixl: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_store, "BUDGET_S", 0.6)
    agent = over_nixl.links.agent
    agent.on_read = lambda reading: len(agent.readings) == 1 and reading.over(None)
    agent.on_expire = lambda reading: reading.over(PeerTimeout("the read was given up"))
    assert over_nixl.pull(1) is False
    assert len(agent.expired) == 4
    assert over_nixl.store.breakers() == {}
    assert over_nixl.store.where.counts == {"late": 1}
    assert over_nixl.links.num_reads == 0
    assert over_nixl.store.where._slow == {}, "it did not have its time"


def test_a_peer_that_trickles_over_nixl_is_slow(over_nixl: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_room, "SILENT_S", 0.5)
    monkeypatch.setattr(peer_room, "BYTES_PER_S", 1e9)
    agent = over_nixl.links.agent

    def trickle(reading: Reading) -> None:
        if len(agent.readings) < 4:  # one at once, and one somewhat later, so that it gives signs until the end
            threading.Timer(0.2 * len(agent.readings) - 0.2, reading.over, [None]).start()

    agent.on_read = trickle
    agent.on_expire = lambda reading: reading.over(PeerTimeout("the read was given up"))
    assert over_nixl.pull(1) is False
    assert over_nixl.store.breakers() == {}
    assert over_nixl.store.where.counts == {"late": 1}
    assert over_nixl.store.where._slow[("h0", "i")][0] == 1


def test_a_peer_that_is_back_is_not_blamed_for_a_read_that_has_not_settled(
    over_nixl: World, pool: ThreadPoolExecutor
) -> None:
    world = over_nixl
    pulling: Future[bool] = pool.submit(world.pull, 1)
    wait_for(lambda: len(world.links.agent.expired) == 4, "the end of its patience")
    world.links.agent.on_read = lambda reading: threading.Timer(0.02, reading.over, [None]).start()
    wait_for(lambda: world.store._is_usable(bytes([1]) * 32), "its breaker")
    assert world.pull(2)
    assert not pulling.done()
    for reading in world.links.agent.readings:
        reading.over(PeerTimeout("the read was given up"))
    assert pulling.result(5.0) is False


class OtherDigest(NoDigest):
    """Of any bytes another than their holder said."""

    def digest(self) -> bytes:
        return bytes([1]) * 16


@pytest.mark.parametrize(
    ("is_lost", "is_match", "counts"),
    [
        (False, False, {"corrupt": 1, "breakers_opened": 1}),
        (True, False, {"failed": 1, "breakers_opened": 1}),
        (True, True, {"pulled": 1}),
    ],
    ids=["held", "lost", "lost, and the bytes are right"],
)
@pytest.mark.parametrize("how", ["here", "there"])
def test_a_peer_is_not_accused_of_bytes_whose_loan_had_ended(
    over_nixl: World,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    counts: dict[str, int],
    *,
    is_lost: bool,
    is_match: bool,
) -> None:
    """The connection of all loans ends here as another call of the peer fails, or there, while the bytes come."""
    if not is_match:
        monkeypatch.setattr(peer_store, "PayloadDigest", OtherDigest)
    world = over_nixl

    def read(reading: Reading) -> None:
        if is_lost and how == "here":
            world.store.broken(world.holders[0], PeerTimeout("another call"))
        elif is_lost:
            world.store._loans._account(world.holders[0]).link.has_hung_up = True
        reading.over(None)

    world.links.agent.on_read = read
    assert world.pull(1) == is_match
    assert world.store.where.counts == counts
    reasons = [str(breaker["reason"]) for breaker in world.store.breakers().values()]
    assert ["digest" in reason for reason in reasons] == ([] if is_match else [not is_lost])


def test_what_is_read_when_the_agent_is_closed_ends_with_it(over_nixl: World, pool: ThreadPoolExecutor) -> None:
    """Nothing can be given up then; the agent's end does it."""
    world = over_nixl
    agent = world.links.agent

    def refuse(reading: Reading) -> None:
        raise PeerUnavailable("the NIXL agent is closed")

    def end(reading: Reading) -> None:
        reading.failed(PeerUnavailable("the NIXL agent was closed"))

    agent.on_read, agent.on_expire = end, refuse
    pulling = pool.submit(world.pull, 1)
    wait_for(lambda: len(agent.expired) == len(agent.readings) == 4, "the end of the reads")
    assert not pulling.done(), "its target may be written to still"
    assert world.links.num_reads == 0
    for reading in agent.readings:
        reading.over(None)
    assert pulling.result(5.0), "it comes over TCP"
