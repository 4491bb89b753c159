"""The directory against a plain model, and its fences and bounds one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from antiphon.coordinator.directory import Directory, DirectoryOptions
from antiphon.core.errors import CapacityExceeded, StaleHandle

KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(6)]
NAMES = ("a", "b", "c")


def listed(directory: Directory, session: int, keys: Iterable[bytes], next_sequence: int = 1) -> None:
    assert directory.listed(session, keys, next_sequence, is_first=True, is_last=True)


def holders(directory: Directory, session: int, key: bytes) -> set[str]:
    return {member.instance for member in directory.locate(session, [key])[0]}


class AgainstAModel(RuleBasedStateMachine):
    """Sessions that come, tell, fall silent and go, beside sets of keys."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory(DirectoryOptions(heartbeat_timeout_s=3.0, holders_per_key_max=9))
        self.now_s = 0.0
        self.current: dict[str, int] = {}
        self.held: dict[int, set[bytes]] = {}
        self.sequence: dict[int, int] = {}
        self.heard_s: dict[int, float] = {}
        self.num_lives = 0

    def is_current(self, session: int) -> bool:
        return session in self.current.values()

    @rule(target=sessions, name=st.sampled_from(NAMES))
    def join(self, name: str) -> int:
        self.num_lives += 1
        session = self.directory.join(name, f"life{self.num_lives}", "host:1", self.now_s)
        self.current[name] = session
        self.held[session] = set()
        self.sequence[session] = 0
        self.heard_s[session] = self.now_s
        return session

    @rule(session=sessions, keys=st.sets(st.sampled_from(KEYS)), sequence=st.integers(1, 5))
    def list_all(self, session: int, keys: set[bytes], sequence: int) -> None:
        if not self.is_current(session):
            with pytest.raises(StaleHandle):
                self.directory.listed(session, keys, sequence, is_first=True, is_last=True)
            return
        listed(self.directory, session, keys, sequence)
        self.held[session], self.sequence[session] = set(keys), sequence

    @rule(
        session=sessions,
        changes=st.lists(st.tuples(st.booleans(), st.sampled_from(KEYS)), max_size=4),
        is_next=st.booleans(),
    )
    def change(self, session: int, changes: list[tuple[bool, bytes]], is_next: bool) -> None:
        first = self.sequence[session] + (0 if is_next else 1)
        if not self.is_current(session):
            with pytest.raises(StaleHandle):
                self.directory.changed(session, first, len(changes), changes)
            return
        is_kept = self.directory.changed(session, first, len(changes), changes)
        assert is_kept == (is_next and self.sequence[session] > 0)
        if not is_kept:
            self.held[session], self.sequence[session] = set(), 0
            return
        for is_stored, key in changes:
            (self.held[session].add if is_stored else self.held[session].discard)(key)
        self.sequence[session] += len(changes)

    @rule(session=sessions, passed_s=st.sampled_from((0.0, 1.0, 2.0)))
    def hear(self, session: int, passed_s: float) -> None:
        self.now_s += passed_s
        if self.is_current(session):
            self.directory.heard(session, self.now_s)
            self.heard_s[session] = self.now_s

    @rule()
    def expire(self) -> None:
        gone = {name for name, session in self.current.items() if self.heard_s[session] < self.now_s - 3.0}
        assert {member.instance for member in self.directory.expire(self.now_s)} == gone
        for name in gone:
            del self.current[name]

    @rule(target=sessions, session=consumes(sessions))
    def leave(self, session: int) -> object:
        self.directory.leave(session)
        self.current = {name: each for name, each in self.current.items() if each != session}
        return multiple(session)

    @invariant()
    def agrees(self) -> None:
        self.directory.validate()
        for asker_name, asker in self.current.items():
            for key in KEYS:
                expected = {name for name, session in self.current.items() if key in self.held[session]} - {asker_name}
                assert holders(self.directory, asker, key) == expected


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_life_that_was_followed_by_another_does_not_come_back() -> None:
    directory = Directory(DirectoryOptions())
    old = directory.join("a", "one", "host:1", 0.0)
    listed(directory, old, KEYS[:2])
    new = directory.join("a", "two", "host:1", 1.0)
    with pytest.raises(StaleHandle):
        directory.changed(old, 1, 1, [(True, KEYS[3])])
    with pytest.raises(StaleHandle, match="followed by another"):
        directory.join("a", "one", "host:1", 2.0)
    directory.leave(old)
    assert [member.session for member in directory.members()] == [new]


def test_what_a_dead_life_said_last_does_not_shut_its_successor_out() -> None:
    directory = Directory(DirectoryOptions())
    directory.join("a", "new", "host:1", 0.0)
    late = directory.join("a", "old", "host:1", 1.0)  # sent before the new one, and held up on its way
    with pytest.raises(StaleHandle):
        directory.join("a", "new", "host:1", 2.0)
    directory.leave(late)
    session = directory.join("a", "new", "host:1", 3.0)
    with pytest.raises(StaleHandle):
        directory.heard(late, 4.0)
    directory.heard(session, 4.0)


def test_one_life_may_join_again() -> None:
    directory = Directory(DirectoryOptions())
    first = directory.join("a", "one", "host:1", 0.0)
    listed(directory, first, KEYS)
    second = directory.join("a", "one", "host:1", 1.0)
    assert second != first
    assert directory.num_placements == 0


def test_what_does_not_fit_is_left_out_and_counted() -> None:
    directory = Directory(DirectoryOptions(placements_max=4, members_max=2))
    one, other = (directory.join(name, "i", "host:1", 0.0) for name in "ab")
    with pytest.raises(CapacityExceeded):
        directory.join("c", "i", "host:1", 0.0)
    listed(directory, one, KEYS[:3])
    listed(directory, other, KEYS[:3])
    assert directory.num_placements == 4
    assert [member.num_left_out for member in directory.members()] == [0, 2]
    directory.validate()
    directory.leave(one)
    assert directory.changed(other, 1, 1, [(True, KEYS[4])])
    assert directory.num_placements == 2


def test_pages_of_a_listing_follow_on_a_first_one() -> None:
    directory = Directory(DirectoryOptions())
    asker = directory.join("asker", "i", "host:1", 0.0)
    session = directory.join("a", "i", "host:1", 0.0)
    assert not directory.listed(session, KEYS[:1], 1, is_first=False, is_last=True)
    assert directory.listed(session, KEYS[:2], 5, is_first=True, is_last=False)
    assert not directory.changed(session, 5, 1, [(True, KEYS[4])]), "events before the last page"
    assert holders(directory, asker, KEYS[0]) == set()
    assert directory.listed(session, KEYS[:2], 5, is_first=True, is_last=False)
    assert directory.listed(session, KEYS[2:4], 5, is_first=False, is_last=True)
    assert directory.changed(session, 5, 2, [(False, KEYS[0])])
    assert directory.changed(session, 7, 1, [(True, KEYS[5])])
    assert [holders(directory, asker, key) for key in KEYS] == [set(), {"a"}, {"a"}, {"a"}, set(), {"a"}]


def test_readers_of_one_chunk_are_spread_over_its_holders() -> None:
    directory = Directory(DirectoryOptions(holders_per_key_max=2))
    sessions = [directory.join(f"m{number}", "i", "host:1", 0.0) for number in range(12)]
    for session in sessions[:4]:
        listed(directory, session, KEYS[:1])
    firsts = {directory.locate(session, KEYS[:1])[0][0].instance for session in sessions[4:]}
    assert len(firsts) == 4
    assert all(len(directory.locate(session, KEYS[:1])[0]) == 2 for session in sessions)
