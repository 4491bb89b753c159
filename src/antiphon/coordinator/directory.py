"""The directory: who is a member, and which members hold which chunk. No socket, clock, thread or chance.

It is a hint, never the truth: what it names may be gone a moment later, and the holder says so. It lives in memory
alone; after a restart of the coordinator the members join again and list what they hold.

Always true:

- A member has one session at a time, that of its last ``join``; what comes under an earlier session, or from a life
  that was followed by one that is a member, is refused and changes nothing.
- A member's chunks are those of its last complete or growing listing and the events that follow it without a gap.
- Members, chunks of all members together, and remembered lives have limits; what does not fit is left out and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from antiphon.core.errors import CapacityExceeded, StaleHandle

__all__ = ["Directory", "DirectoryOptions", "Member"]


@dataclass(frozen=True, slots=True)
class DirectoryOptions:
    """The bounds.

    Args:
        members_max: members at once.
        placements_max: pairs of member and chunk, about 200 bytes each; what comes past it is left out.
        heartbeat_timeout_s: a member that was not heard of for so long is none any more.
        holders_per_key_max: holders that an answer names for a key.
        lives_remembered: earlier incarnations of each member that are refused while a later one is a member.
    """

    members_max: int = 1_024
    placements_max: int = 4_000_000
    heartbeat_timeout_s: float = 3.0
    holders_per_key_max: int = 3
    lives_remembered: int = 16


class Member:
    """One life of a cache server, for as long as its session lasts.

    Args:
        session: names the join.
        instance, incarnation: of the server.
        url: where peers reach it.
        heard_s: when it was heard of last.
    """

    def __init__(self, session: int, instance: str, incarnation: str, url: str, heard_s: float) -> None:
        self.session = session
        self.instance = instance
        self.incarnation = incarnation
        self.url = url
        self.heard_s = heard_s
        self.keys: set[bytes] = set()
        self.next_sequence = 0
        """Number of the next event; 0 until a listing has begun."""
        self.is_listed = False
        self.num_left_out = 0


class Directory:
    """The members and what they hold.

    Args:
        options: the bounds.
    """

    def __init__(self, options: DirectoryOptions) -> None:
        self._options = options
        self._members: dict[str, Member] = {}
        self._sessions: dict[int, Member] = {}
        self._holders: dict[bytes, tuple[Member, ...]] = {}
        self._former: dict[str, deque[str]] = {}
        self._next_session = 1
        self.num_placements = 0
        self.num_resyncs = 0
        self.num_expired = 0

    # ---- membership --------------------------------------------------------------------------------------------------

    def join(self, instance: str, incarnation: str, url: str, now_s: float) -> int:
        """A new session of a server, which holds nothing yet. An earlier session of its name ends.

        A life that was followed by another is refused only while that other is a member: what a dead process said last
        may arrive after its successor has joined, and must not shut that out for good.

        Raises:
            StaleHandle: a later life of that server is a member.
            CapacityExceeded: there are as many members as there may be.
        """
        former = self._former.get(instance, ())
        known = self._members.get(instance)
        if known is not None and known.incarnation != incarnation and incarnation in former:
            raise StaleHandle(
                f"incarnation {incarnation} of {instance} was followed by another",
                remedy="give each cache server its own --instance-id",
            )
        if known is None and len(self._members) >= self._options.members_max:
            raise CapacityExceeded(
                f"there are {len(self._members)} members already", remedy="run a coordinator for each part of the fleet"
            )
        if known is not None:
            self._drop(known)
            if known.incarnation != incarnation:
                self._remember(instance, known.incarnation)
        member = Member(self._next_session, instance, incarnation, url, now_s)
        self._next_session += 1
        self._members[instance] = self._sessions[member.session] = member
        return member.session

    def _remember(self, instance: str, incarnation: str) -> None:
        former = self._former.setdefault(instance, deque(maxlen=self._options.lives_remembered))
        if incarnation not in former:
            former.append(incarnation)
        while len(self._former) > 4 * self._options.members_max:
            del self._former[next(iter(self._former))]

    def heard(self, session: int, now_s: float) -> None:
        """The member is alive. Raises StaleHandle where the session is over."""
        self._current(session).heard_s = now_s

    def leave(self, session: int) -> None:
        """The session is over, if it is not already."""
        member = self._sessions.get(session)
        if member is not None:
            self._drop(member)

    def expire(self, now_s: float) -> list[Member]:
        """Ends the sessions that were not heard of in time; returns them."""
        since_s = now_s - self._options.heartbeat_timeout_s
        silent = [member for member in self._members.values() if member.heard_s < since_s]
        for member in silent:
            self._drop(member)
        self.num_expired += len(silent)
        return silent

    def _drop(self, member: Member) -> None:
        del self._sessions[member.session]
        if self._members.get(member.instance) is member:
            del self._members[member.instance]
        self._forget_all(member)

    def _current(self, session: int) -> Member:
        member = self._sessions.get(session)
        if member is None:
            raise StaleHandle(f"session {session} is over", remedy="join again")
        return member

    # ---- what they hold ----------------------------------------------------------------------------------------------

    def listed(self, session: int, keys: Iterable[bytes], next_sequence: int, *, is_first: bool, is_last: bool) -> bool:
        """A page of what the member holds. Returns False where it does not follow on a first page.

        Raises:
            StaleHandle: the session is over.
        """
        member = self._current(session)
        if is_first:
            self._forget_all(member)
            member.next_sequence = next_sequence
            member.is_listed = False
            member.num_left_out = 0
        elif member.is_listed or not member.next_sequence:
            return self._lost(member)
        for key in keys:
            self._add(member, key)
        member.is_listed = is_last
        return True

    def changed(
        self, session: int, first_sequence: int, num_events: int, changes: Sequence[tuple[bool, bytes]]
    ) -> bool:
        """Events of the member. Returns False where they do not follow on what is known: it must list again.

        Raises:
            StaleHandle: the session is over.
        """
        member = self._current(session)
        if not member.is_listed or first_sequence != member.next_sequence:
            return self._lost(member)
        for is_stored, key in changes:
            if is_stored:
                self._add(member, key)
            else:
                self._remove(member, key)
        member.next_sequence += num_events
        return True

    def _lost(self, member: Member) -> bool:
        """What is known of the member is not true any more."""
        self._forget_all(member)
        member.is_listed = False
        member.next_sequence = 0
        self.num_resyncs += 1
        return False

    def _add(self, member: Member, key: bytes) -> None:
        if key in member.keys:
            return
        if self.num_placements >= self._options.placements_max:
            member.num_left_out += 1
            return
        member.keys.add(key)
        self._holders[key] = (*self._holders.get(key, ()), member)
        self.num_placements += 1

    def _remove(self, member: Member, key: bytes) -> None:
        if key not in member.keys:
            return
        member.keys.discard(key)
        left = tuple(holder for holder in self._holders[key] if holder is not member)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]
        self.num_placements -= 1

    def _forget_all(self, member: Member) -> None:
        for key in list(member.keys):
            self._remove(member, key)

    # ---- questions ---------------------------------------------------------------------------------------------------

    def locate(self, session: int, keys: Sequence[bytes]) -> list[list[Member]]:
        """For each key, members that hold it, the asker not among them; where there are many, not always the same.

        Raises:
            StaleHandle: the session is over.
        """
        asker = self._current(session)
        most = self._options.holders_per_key_max
        found: list[list[Member]] = []
        for key in keys:
            others = [member for member in self._holders.get(key, ()) if member is not asker]
            if len(others) > 1:
                # By asker and key: readers of one chunk spread over its holders, and each goes on with the same.
                first = (asker.session + key[-1]) % len(others)
                others = others[first:] + others[:first]
            found.append(others[:most])
        return found

    @property
    def num_chunks(self) -> int:
        """Different chunks that are held by anybody."""
        return len(self._holders)

    def members(self) -> list[Member]:
        """The members, in the order in which they joined."""
        return list(self._members.values())

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._sessions) == len(self._members), "a member has two sessions"
        for instance, member in self._members.items():
            assert member.instance == instance
            assert self._sessions[member.session] is member
            assert all(member in self._holders[key] for key in member.keys)
            assert not member.keys or member.next_sequence, "chunks without a listing"
        total = 0
        for key, holders in self._holders.items():
            assert holders, "a chunk that nobody holds"
            assert len(set(map(id, holders))) == len(holders), "a member twice"
            for holder in holders:
                assert self._members.get(holder.instance) is holder, "a chunk of one who is gone"
                assert key in holder.keys
            total += len(holders)
        assert total == self.num_placements <= self._options.placements_max
