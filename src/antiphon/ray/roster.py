"""Which engines the router knows of, as their replicas report: pure.

A replica says every ``BEAT_S`` that its engine is there. Invariants: one entry for a URL; an entry is of one life of an
engine; a life that has left never comes back; all entries can hand over to each other.

An application that is deployed again with another model has engines of two builds for a while, which cannot: those of
the later build wait until both roles of it are there, and then take the place of the earlier ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from antiphon.config.spec import POOLS, Pool
from antiphon.ray.plans import SHAPE_EQUAL

BEAT_S = 2.0
BEAT_LOST_S = 10.0
"""Without a beat for so long, the replica is gone. The router itself notices a dead engine at its next request."""
LOOK_GAP_S = 3.0
"""Who looks later than this after the look before was stopped meanwhile, and may have heard nobody."""
LEFT_MAX = 4096
"""Lives that have left, so that a late beat does not bring one back."""
Standing = Literal["new", "known", "left"]


@dataclass
class Entry:
    """One engine."""

    info: dict[str, Any]
    last_beat_s: float
    is_registered: bool = False
    """Whether the router has been told."""

    @property
    def role(self) -> Pool:
        return "prefill" if self.info["role"] == "prefill" else "decode"

    @property
    def url(self) -> str:
        return str(self.info["url"])

    @property
    def incarnation(self) -> str:
        return str(self.info["incarnation"])

    @property
    def built_s(self) -> float:
        return float(self.info.get("built_s", 0.0))


@dataclass(frozen=True)
class Verdict:
    """Whether an engine may be added."""

    misfit: str | None = None
    """Why it never can."""
    waits: str | None = None
    """Why it cannot yet."""
    replaced: tuple[Entry, ...] = ()
    """Entries of an earlier build that have left for it, and are to be drained."""

    @property
    def fits(self) -> bool:
        return self.misfit is None and self.waits is None


@dataclass
class Roster:
    """The engines of one application."""

    entries: dict[str, Entry] = field(default_factory=dict)
    waiting: dict[str, Entry] = field(default_factory=dict)
    """Engines of a later build, that wait for the other role of it."""
    left: OrderedDict[str, None] = field(default_factory=OrderedDict)
    last_look_s: float | None = None

    def beat(self, info: dict[str, Any], now_s: float) -> tuple[Standing, Entry | None]:
        """A replica says that its engine is there.

        Returns:
            What it is to the roster, and the entry that it replaces: an earlier life at the same URL.
        """
        incarnation = str(info["incarnation"])
        if incarnation in self.left:
            return "left", None
        entry = self.entries.get(str(info["url"]))
        if entry is not None and entry.incarnation == incarnation:
            entry.last_beat_s = now_s
            return "known", None
        self.entries[str(info["url"])] = Entry(dict(info), now_s)
        return "new", entry

    def knows(self, info: Mapping[str, Any]) -> bool:
        """Whether this life is an entry."""
        entry = self.entries.get(str(info["url"]))
        return entry is not None and entry.incarnation == info["incarnation"]

    def leave(self, info: Mapping[str, Any]) -> Entry | None:
        """A life ends, and is not heard any more. Returns its entry, if there was one."""
        self._remember_left(str(info["incarnation"]))
        waiting = self.waiting.get(str(info["url"]))
        if waiting is not None and waiting.incarnation == info["incarnation"]:
            del self.waiting[waiting.url]
        entry = self.entries.get(str(info["url"]))
        if entry is None or entry.incarnation != info["incarnation"]:
            return None
        return self.entries.pop(entry.url)

    def lost(self, now_s: float) -> list[Entry]:
        """Take out, and return, the entries without a recent beat. Look more often than ``LOOK_GAP_S``: after a longer
        time nobody is lost yet, since beats may lie unread."""
        gap_s = 0.0 if self.last_look_s is None else now_s - self.last_look_s
        self.last_look_s = now_s
        if gap_s > LOOK_GAP_S:
            for entry in (*self.entries.values(), *self.waiting.values()):
                entry.last_beat_s = min(now_s, entry.last_beat_s + gap_s)
        gone = [entry for entry in self.entries.values() if now_s - entry.last_beat_s > BEAT_LOST_S]
        for entry in gone:
            del self.entries[entry.url]
        for entry in [entry for entry in self.waiting.values() if now_s - entry.last_beat_s > BEAT_LOST_S]:
            del self.waiting[entry.url]
        return gone

    def admit(self, info: Mapping[str, Any], own_built_s: float, now_s: float) -> Verdict:
        """Whether this engine can hand over with those that are there. Call it before :meth:`beat`.

        Args:
            own_built_s: the build of the router that asks; an earlier one than the engine's is replaced itself soon.
        """
        new = Entry(dict(info), now_s)
        self.waiting.pop(new.url, None)
        if new.incarnation in self.left:
            return Verdict()
        clashing: list[Entry] = []
        for entry in self.entries.values():
            why = self._clash(new, entry)
            if why is not None and entry.built_s == new.built_s:
                return Verdict(misfit=why)
            if why is not None and entry.built_s > new.built_s:
                return Verdict(misfit=f"{why}, which was deployed later")
            if why is not None:
                clashing.append(entry)
        if not clashing:
            return Verdict()
        self.waiting[new.url] = new
        if own_built_s < new.built_s:
            return Verdict(waits="the router is replaced first")
        there = (*self.waiting.values(), *self.entries.values())
        roles = {entry.role for entry in there if entry.built_s == new.built_s}
        if len(roles) < len(POOLS):
            missing = next(role for role in POOLS if role not in roles)
            return Verdict(waits=f"an earlier deployment serves until a {missing} engine of this one is there")
        del self.waiting[new.url]
        for entry in clashing:
            self.leave(entry.info)
        return Verdict(replaced=tuple(clashing))

    @staticmethod
    def _clash(new: Entry, entry: Entry) -> str | None:
        """Why two engines cannot serve beside each other. Those of one role and build never hand over."""
        if entry.url == new.url or (entry.role == new.role and entry.built_s == new.built_s):
            return None
        shape, theirs = new.info.get("shape", {}), entry.info.get("shape", {})
        for name in SHAPE_EQUAL:
            if shape.get(name) != theirs.get(name):
                return f"{name} is {shape.get(name)!r}, but {theirs.get(name)!r} in {entry.info.get('name')}"
        return None

    def validate(self) -> None:
        """The invariants."""
        assert all(url == entry.url for url, entry in self.entries.items())
        assert not any(entry.incarnation in self.left for entry in self.entries.values())
        assert not any(entry.incarnation in self.left for entry in self.waiting.values())
        assert len(self.left) <= LEFT_MAX

    def _remember_left(self, incarnation: str) -> None:
        self.left[incarnation] = None
        while len(self.left) > LEFT_MAX:
            self.left.popitem(last=False)
