"""Room and deadlines of reads from peers: what shares a link has its deadline by all that comes over it."""

from __future__ import annotations

import threading

import pytest

from antiphon.cache_server.peer_room import BYTES_MAX, BYTES_PER_S, SILENT_S, ReadRoom
from antiphon.core.errors import PeerTimeout, PeerUnavailable

LIFE, OTHER = ("one", "i"), ("two", "i")
CHUNK = 6_000_000


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


def test_a_peer_of_which_nothing_comes_has_its_deadline_by_its_own_bytes(room: ReadRoom, clock: Clock) -> None:
    with room.taken(LIFE, CHUNK, 0.0) as turn:
        assert turn.deadline_s() == pytest.approx(clock.now_s + SILENT_S + CHUNK / BYTES_PER_S)


def test_sixteen_reads_over_a_link_of_a_gigabit_all_end_in_time(room: ReadRoom, clock: Clock) -> None:
    """They share it evenly, so that the first ends after three quarters of a second."""
    begins_s, rate = clock.now_s, 125e6
    turns = [room.taken(LIFE, CHUNK, 0.0) for _ in range(16)]
    entered = [turn.__enter__() for turn in turns]
    piece = 1 << 20
    num_pieces = CHUNK // piece + 1
    for number in range(num_pieces * 16):
        clock.now_s = begins_s + min((number + 1) * piece, 16 * CHUNK) / rate
        turn = entered[number % 16]
        assert clock.now_s < turn.deadline_s(), f"piece {number} after {clock.now_s - begins_s:.2f} s"
        turn.came()
    assert clock.now_s - begins_s > SILENT_S + CHUNK / BYTES_PER_S, "the link was too fast to show anything"
    for turn_ in turns:
        turn_.__exit__(None, None, None)
    assert not room.num_bytes


def test_a_peer_that_gets_on_for_ever_is_given_up_all_the_same(room: ReadRoom, clock: Clock) -> None:
    begins_s = clock.now_s
    with room.taken(LIFE, CHUNK, 0.0) as turn:
        while clock.now_s < turn.deadline_s():
            turn.came()
            clock.now_s += 0.1
    assert clock.now_s - begins_s <= SILENT_S + BYTES_MAX / BYTES_PER_S + 0.1


def test_a_peer_that_hangs_after_a_while_is_given_up_after_silence(room: ReadRoom, clock: Clock) -> None:
    with room.taken(LIFE, CHUNK, 0.0) as turn:
        clock.now_s += 0.6
        turn.came()
        assert turn.deadline_s() == pytest.approx(clock.now_s + SILENT_S)


def test_a_slow_peer_does_not_lengthen_the_reads_of_another(room: ReadRoom, clock: Clock) -> None:
    with room.taken(LIFE, CHUNK, 0.0) as slow, room.taken(OTHER, CHUNK, 0.0) as turn:
        before_s = turn.deadline_s()
        clock.now_s += 0.55
        slow.came()
        assert turn.deadline_s() == before_s


def test_no_more_is_under_way_than_there_is_room_for(room: ReadRoom) -> None:
    with room.taken(LIFE, BYTES_MAX, 0.0):
        with pytest.raises(PeerTimeout, match="no room"), room.taken(LIFE, 1, 0.0):
            pass
        with room.taken(OTHER, CHUNK, 0.0):
            assert room.num_bytes == {LIFE: BYTES_MAX, OTHER: CHUNK}
    with room.taken(LIFE, 2 * BYTES_MAX, 0.0):  # a chunk that is larger goes alone
        assert room.num_bytes == {LIFE: 2 * BYTES_MAX}
    assert not room.num_bytes


def test_who_waits_for_room_gets_it_or_ends_with_a_failure(room: ReadRoom) -> None:
    ended: list[str] = []
    is_read = threading.Event()

    def read() -> None:
        try:
            with room.taken(LIFE, CHUNK, 10.0):
                ended.append("read")
                is_read.set()
        except PeerUnavailable:
            ended.append("failed")

    for ending in ("read", "failed"):
        with room.taken(LIFE, BYTES_MAX, 0.0):
            thread = threading.Thread(target=read)
            thread.start()
            while not room._peers[LIFE].num_waiting:
                is_read.wait(0.001)
            if ending == "failed":
                room.failed(LIFE)
                thread.join(10.0)
        thread.join(10.0)
        is_read.clear()
    assert ended == ["read", "failed"]
    room.failed(LIFE)  # of nobody
    assert not room.num_bytes
