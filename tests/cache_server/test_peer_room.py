"""Room and deadlines of reads from peers: all of them share a link, and so what they wait for."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cache_server.peer_room import BYTES_MAX, BYTES_PER_S, SILENT_S, Life, Place, ReadRoom, ReadTurn
from antiphon.core.units import MIB
from tests.cache_server.world import wait_for

LIFE, OTHER = ("one", "i"), ("two", "i")
CHUNK = 6_000_000
GIGABIT = 0.94e9 / 8
"""What a link of one gigabit brings, bytes per second."""
TRANSFER = 24 * MIB
"""Over NIXL nothing is seen of a transfer before its end."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def room(clock: Clock) -> ReadRoom:
    return ReadRoom(clock)


def wanted() -> bool:
    return True


# ---- deadlines -------------------------------------------------------------------------------------------------------


@dataclass
class Flow:
    """One transfer, which the link serves evenly beside the others."""

    turn: ReadTurn
    left: float
    is_seen_at_end: bool


def serve_evenly(clock: Clock, flows: list[Flow], rate: float) -> float:
    """Until all have come; asserts that nobody gives up before. Returns the seconds."""
    began_s, step_s = clock.now_s, 0.01
    while flows:
        clock.now_s += step_s
        share = rate * step_s / len(flows)
        for flow in list(flows):
            after = f"after {clock.now_s - began_s:.2f} s"
            assert clock.now_s < flow.turn.deadline_s(), f"given up {after}, hung: {flow.turn.is_hung}"
            came = min(share, flow.left)
            flow.left -= came
            if flow.left <= 0:
                flows.remove(flow)
            if not flow.is_seen_at_end:
                flow.turn.came(int(came))
            elif flow.left <= 0:
                flow.turn.came(min(TRANSFER, CHUNK))
    return clock.now_s - began_s


@pytest.mark.parametrize("lives", [[LIFE], [LIFE, OTHER]], ids=["one holder", "two holders"])
@pytest.mark.parametrize("num_bytes", [CHUNK, 32 * MIB, 128 * MIB])
@pytest.mark.parametrize("is_seen_at_end", [False, True], ids=["tcp", "nixl"])
def test_a_full_room_over_a_link_of_a_gigabit_ends_in_time(
    room: ReadRoom, clock: Clock, lives: list[Life], num_bytes: int, *, is_seen_at_end: bool
) -> None:
    with ExitStack() as stack:
        flows = []
        for number in range(min(16, BYTES_MAX // num_bytes)):
            num_unseen = num_bytes if is_seen_at_end else MIB
            life = lives[number % len(lives)]
            turn = stack.enter_context(room.reading(life, num_bytes, num_unseen, clock.now_s + 3.0))
            parts = [min(TRANSFER, num_bytes - first) for first in range(0, num_bytes, TRANSFER)]
            flows += [Flow(turn, part, is_seen_at_end) for part in parts]
        took_s = serve_evenly(clock, flows, GIGABIT)
    assert took_s > SILENT_S + CHUNK / BYTES_PER_S, "the link was too fast to show anything"


def test_a_small_read_beside_many_of_another_peer_is_not_taken_for_hung(room: ReadRoom, clock: Clock) -> None:
    end_s = clock.now_s + 3.0
    with ExitStack() as stack:
        turns = [stack.enter_context(room.reading(OTHER, CHUNK, CHUNK, end_s)) for _ in range(15)]
        turns.append(stack.enter_context(room.reading(LIFE, CHUNK, CHUNK, end_s)))
        took_s = serve_evenly(clock, [Flow(turn, CHUNK, is_seen_at_end=True) for turn in turns], GIGABIT)
    assert took_s > SILENT_S + CHUNK / BYTES_PER_S, "the link was too fast to show anything"


@pytest.mark.parametrize("num_reads", [1, 16])
@pytest.mark.parametrize("num_unseen", [MIB, CHUNK])
def test_a_peer_that_hangs_is_found_after_the_time_of_its_own_bytes(
    room: ReadRoom, clock: Clock, num_reads: int, num_unseen: int
) -> None:
    with ExitStack() as stack:
        turns = [
            stack.enter_context(room.reading(LIFE, CHUNK, num_unseen, clock.now_s + 3.0)) for _ in range(num_reads)
        ]
        found_s = clock.now_s + SILENT_S + num_reads * num_unseen / BYTES_PER_S
        assert [turn.deadline_s() for turn in turns] == [pytest.approx(found_s)] * num_reads
        assert not turns[0].is_hung
        clock.now_s = found_s + 0.001
        assert all(turn.is_hung for turn in turns)


def test_a_peer_that_hangs_beside_one_that_is_quick_is_found_as_soon(room: ReadRoom, clock: Clock) -> None:
    end_s = clock.now_s + 3.0
    with room.reading(LIFE, CHUNK, CHUNK, end_s) as turn, room.reading(OTHER, BYTES_MAX, BYTES_MAX, end_s) as quick:
        began_s = clock.now_s
        assert turn.deadline_s() > began_s + 1.5, "the other may have the link first"
        while clock.now_s < turn.look_s():
            assert turn.look_s() <= clock.now_s + 0.1 + 1e-9, "who waits has to see it come nearer"
            clock.now_s += 0.01
            quick.came(20 * MIB)
        assert clock.now_s - began_s < SILENT_S + CHUNK / BYTES_PER_S + 0.02
        assert turn.is_hung
        assert not quick.is_hung


def test_a_peer_that_hangs_after_a_while_is_given_up_after_silence(room: ReadRoom, clock: Clock) -> None:
    with room.reading(LIFE, CHUNK, MIB, clock.now_s + 3.0) as turn:
        clock.now_s += 0.4
        turn.came(MIB)
        assert turn.deadline_s() == pytest.approx(clock.now_s + SILENT_S + MIB / BYTES_PER_S)


def test_a_peer_that_gets_on_for_ever_is_given_up_as_late_and_not_as_hung(room: ReadRoom, clock: Clock) -> None:
    began_s = clock.now_s
    with room.reading(LIFE, CHUNK, MIB, began_s + 3.0) as turn:
        trickle(clock, turn)
        assert not turn.is_hung
    assert clock.now_s - began_s <= SILENT_S + BYTES_MAX / BYTES_PER_S + 0.1


def trickle(clock: Clock, turn: ReadTurn) -> None:
    """Signs and hardly any bytes, until it is given up."""
    while clock.now_s < turn.deadline_s():
        turn.came(10)
        clock.now_s += 0.1


@pytest.mark.parametrize("num_bytes", [CHUNK, 32 * MIB, BYTES_MAX, 2 * BYTES_MAX])
def test_a_peer_that_has_the_link_for_itself_and_is_late_is_slow(room: ReadRoom, clock: Clock, num_bytes: int) -> None:
    with room.reading(LIFE, num_bytes, MIB, clock.now_s + 9.0) as turn:
        assert not turn.is_slow
        trickle(clock, turn)
        assert turn.is_slow
        assert not turn.is_hung
    room.validate()


def test_all_reads_of_a_peer_that_trickles_are_slow(room: ReadRoom, clock: Clock) -> None:
    with ExitStack() as stack:
        turns = [stack.enter_context(room.reading(LIFE, 8 * MIB, MIB, clock.now_s + 3.0)) for _ in range(16)]
        trickle(clock, turns[0])
        assert [turn.is_slow for turn in turns] == [True] * 16


def test_a_read_that_ends_before_its_time_says_nothing_of_the_peer(room: ReadRoom, clock: Clock) -> None:
    with room.reading(LIFE, 64 * MIB, MIB, clock.now_s + 1.0) as turn:
        trickle(clock, turn)
        assert not turn.is_slow


def test_a_small_chunk_that_trickles_beside_a_peer_that_is_quick_is_the_peers_doing(
    room: ReadRoom, clock: Clock
) -> None:
    end_s = clock.now_s + 3.0
    with room.reading(LIFE, CHUNK, MIB, end_s) as turn, room.reading(OTHER, MIB, MIB, end_s):
        while clock.now_s < turn.deadline_s():
            with room.reading(OTHER, 64 * MIB, MIB, end_s) as quick:
                quick.came(64 * MIB)
            turn.came(10)
            clock.now_s += 0.1
        assert turn.is_slow


@pytest.mark.parametrize("rate", [1e6, 12e6, 50e6, 100e6])
def test_a_slow_link_that_others_have_too_is_not_the_doing_of_a_peer(room: ReadRoom, clock: Clock, rate: float) -> None:
    end_s = clock.now_s + 3.0
    with room.reading(LIFE, 32 * MIB, MIB, end_s) as turn, room.reading(OTHER, 96 * MIB, MIB, end_s) as other:
        while clock.now_s < turn.deadline_s():
            clock.now_s += 0.1
            other.came(int(rate * 0.075))
            turn.came(int(rate * 0.025))
        assert not turn.is_slow
        assert not other.is_slow


def test_a_peer_is_not_slow_for_what_came_before_its_bytes_over_a_link(room: ReadRoom, clock: Clock) -> None:
    """Which serves what was asked for first."""
    end_s = clock.now_s + 3.0
    num_before = BYTES_MAX - MIB
    with room.reading(OTHER, num_before, MIB, end_s) as other, room.reading(LIFE, MIB, MIB, end_s) as turn:
        other.came(num_before)
        assert not turn.is_slow


def test_what_was_given_up_is_not_waited_for(room: ReadRoom, clock: Clock) -> None:
    end_s = clock.now_s + 9.0
    with room.reading(LIFE, MIB, MIB, end_s):
        with room.reading(LIFE, 100 * MIB, MIB, end_s) as turn:
            turn.came(MIB)
        with room.reading(LIFE, CHUNK, MIB, end_s) as turn:
            clock.now_s += SILENT_S + (CHUNK + MIB) / BYTES_PER_S - 0.01
            assert not turn.is_slow
            clock.now_s += 0.02
            assert turn.is_slow


def test_a_peer_is_not_slow_for_what_others_had_of_the_link_before(room: ReadRoom, clock: Clock) -> None:
    with room.reading(LIFE, CHUNK, MIB, clock.now_s + 3.0) as turn:
        with room.reading(OTHER, 32 * MIB, MIB, clock.now_s + 3.0):
            clock.now_s += 1.5
            turn.came(10)
        clock.now_s += SILENT_S + CHUNK / BYTES_PER_S - 0.01
        assert not turn.is_slow
        clock.now_s += 0.02
        assert turn.is_slow


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 2), st.integers(0, 150)), min_size=1, max_size=60),
    st.sampled_from([20e6, BYTES_PER_S, GIGABIT, 1e9]),
    st.sampled_from(["evenly", "first come"]),
)
def test_no_peer_is_slow_but_one_that_has_a_slow_link_for_itself(
    steps: list[tuple[int, int, int]], rate: float, order: str
) -> None:
    """Whatever else is read meanwhile; what came is seen at its end."""
    clock = Clock()
    room = ReadRoom(clock)
    waiting = [(num_mib * MIB, (f"peer {number}", "i"), begin / 50) for num_mib, number, begin in steps]
    waiting.sort(key=lambda each: -each[2])
    under_way: list[tuple[ExitStack, Flow]] = []
    began_s = clock.now_s
    while waiting or under_way:
        while waiting and waiting[-1][2] <= clock.now_s - began_s:
            num_bytes, life, _ = waiting[-1]
            if len(under_way) == 16 or sum(flow.left for _, flow in under_way) + num_bytes > BYTES_MAX:
                break
            waiting.pop()
            stack = ExitStack()
            turn = stack.enter_context(room.reading(life, num_bytes, num_bytes, clock.now_s + 99.0))
            under_way.append((stack, Flow(turn, num_bytes, is_seen_at_end=True)))
        clock.now_s += 0.02
        is_slow_alone = rate < BYTES_PER_S and len({id(flow.turn.peer) for _, flow in under_way}) == 1
        assert is_slow_alone or not any(flow.turn.is_slow for _, flow in under_way)
        left = 0.02 * rate
        by_left = sorted(under_way, key=lambda each: each[1].left) if order == "evenly" else under_way
        for number, (_, flow) in enumerate(by_left):
            came = min(flow.left, left / (len(by_left) - number) if order == "evenly" else left)
            flow.left -= came
            left -= came
        for each in [each for each in under_way if each[1].left <= 0]:
            under_way.remove(each)
            each[0].close()
        room.validate()


def test_a_read_ends_with_its_pull(room: ReadRoom, clock: Clock) -> None:
    with room.reading(LIFE, CHUNK, CHUNK, clock.now_s + 0.2) as turn:
        assert turn.deadline_s() == clock.now_s + 0.2
        clock.now_s += 0.3
        assert not turn.is_hung, "there was no time to tell"


def test_a_slow_peer_does_not_lengthen_the_reads_of_another(room: ReadRoom, clock: Clock) -> None:
    end_s = clock.now_s + 3.0
    with room.reading(LIFE, CHUNK, MIB, end_s) as slow, room.reading(OTHER, CHUNK, MIB, end_s) as turn:
        before_s = turn.deadline_s()
        clock.now_s += 0.4
        slow.came(MIB)
        assert turn.deadline_s() <= before_s
    room.validate()


# ---- room ------------------------------------------------------------------------------------------------------------


def test_no_more_is_under_way_than_there_is_room_for(room: ReadRoom, clock: Clock) -> None:
    full, small, large = Place(BYTES_MAX), Place(1), Place(2 * BYTES_MAX)
    assert room.take(full, clock.now_s + 3.0, wanted)
    assert not room.take(small, clock.now_s, wanted)
    assert room.num_bytes == BYTES_MAX
    room.give_back(full)
    room.give_back(full)
    assert room.num_bytes == 0
    assert room.take(large, clock.now_s + 3.0, wanted), "a chunk that is larger goes alone"
    assert not room.take(small, clock.now_s, wanted)
    room.give_back(large)
    assert room.take(small, clock.now_s + 3.0, wanted)
    room.validate()


def test_nobody_waits_who_does_not_want_it(room: ReadRoom, clock: Clock) -> None:
    assert not room.take(Place(1), clock.now_s + 3.0, lambda: False)
    assert room.num_bytes == 0


def test_room_that_comes_too_late_for_the_bytes_is_not_taken(room: ReadRoom, clock: Clock) -> None:
    """Nine tenths of a second are enough for 80 MB at 100 MB/s, but not beside 40 MB."""
    first, second = Place(40_000_000), Place(80_000_000)
    assert room.take(first, clock.now_s + 3.0, wanted)
    began_s = clock.now_s

    def passing() -> bool:
        clock.now_s = began_s + 2.0
        return True

    assert not room.take(second, began_s + 2.9, passing)
    clock.now_s = began_s
    room.give_back(first)
    assert room.take(second, began_s + 2.9, passing)


class Waiting:
    """A thread that waits for room."""

    def __init__(self, room: ReadRoom, num_bytes: int, end_s: float = 1e6) -> None:
        self.place = Place(num_bytes)
        self.is_wanted = True
        self.has_room: bool | None = None
        before = room.num_waiting
        self._room, self._end_s = room, end_s
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        wait_for(lambda: room.num_waiting > before or self.has_room is not None, "its wait")

    def _run(self) -> None:
        self.has_room = self._room.take(self.place, self._end_s, lambda: self.is_wanted)

    def joined(self) -> bool | None:
        self.thread.join(10.0)
        return self.has_room


def test_room_is_given_in_order_and_small_chunks_do_not_pass_large_ones(room: ReadRoom, clock: Clock) -> None:
    first, second = Place(CHUNK), Place(CHUNK)
    for place in (first, second):
        assert room.take(place, clock.now_s + 3.0, wanted)
    large = Waiting(room, BYTES_MAX - CHUNK)
    small = Waiting(room, CHUNK)
    assert small.has_room is None, "it has passed the large one"
    room.give_back(first)
    assert large.joined()
    assert small.has_room is None
    room.give_back(second)
    assert small.joined()
    room.validate()


def test_who_no_longer_wants_room_does_not_wait_for_it(room: ReadRoom, clock: Clock) -> None:
    held = Place(BYTES_MAX)
    assert room.take(held, clock.now_s + 3.0, wanted)
    gone, after = Waiting(room, CHUNK), Waiting(room, CHUNK)
    gone.is_wanted = False
    room.look()
    assert gone.joined() is False
    room.give_back(held)
    assert after.joined()


def test_the_wait_is_bounded_by_the_bytes_before_it(room: ReadRoom, clock: Clock) -> None:
    held = Place(BYTES_MAX)
    assert room.take(held, clock.now_s + 3.0, wanted)
    waiting = Waiting(room, CHUNK)
    clock.now_s += SILENT_S + BYTES_MAX / BYTES_PER_S - 0.01
    room.look()
    assert waiting.has_room is None
    clock.now_s += 0.02
    room.look()
    assert waiting.joined() is False
    room.validate()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 200), st.booleans()), max_size=40))
def test_room_is_what_a_plain_count_says(steps: list[tuple[int, bool]]) -> None:
    clock = Clock()
    room = ReadRoom(clock)
    held: list[Place] = []
    for num_mib, is_given_back in steps:
        if is_given_back and held:
            room.give_back(held.pop(0))
            continue
        place = Place(num_mib * MIB)
        under_way = sum(each.num_bytes for each in held)
        assert room.take(place, clock.now_s, wanted) == (not held or under_way + place.num_bytes <= BYTES_MAX)
        if place.is_held:
            held.append(place)
        assert room.num_bytes == sum(each.num_bytes for each in held)
        room.validate()
