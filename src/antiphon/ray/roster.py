"""Which engines the router knows of, as their replicas report: pure.

A replica says every ``BEAT_S`` that its engine is there. Invariants: one entry for a URL; an entry is of one life of an
engine; a life that has left never comes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from antiphon.config.spec import Pool
from antiphon.ray.plans import SHAPE_EQUAL

BEAT_S = 2.0
BEAT_LOST_S = 10.0
"""Without a beat for so long, the replica is gone. The router itself notices a dead engine at its next request."""
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


@dataclass
class Roster:
    """The engines of one application."""

    entries: dict[str, Entry] = field(default_factory=dict)
    left: OrderedDict[str, None] = field(default_factory=OrderedDict)

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

    def leave(self, info: Mapping[str, Any]) -> Entry | None:
        """A life ends, and is not heard any more. Returns its entry, if there was one."""
        self._remember_left(str(info["incarnation"]))
        entry = self.entries.get(str(info["url"]))
        if entry is None or entry.incarnation != info["incarnation"]:
            return None
        return self.entries.pop(entry.url)

    def lost(self, now_s: float) -> list[Entry]:
        """Take out, and return, the entries without a recent beat."""
        gone = [entry for entry in self.entries.values() if now_s - entry.last_beat_s > BEAT_LOST_S]
        for entry in gone:
            del self.entries[entry.url]
        return gone

    def misfit(self, info: Mapping[str, Any]) -> str | None:
        """Why this engine cannot hand over with those that are there; None where it can."""
        shape = info.get("shape", {})
        for entry in self.entries.values():
            theirs = entry.info.get("shape", {})
            if entry.role == info["role"] or entry.url == info["url"]:
                continue
            for name in SHAPE_EQUAL:
                if shape.get(name) != theirs.get(name):
                    return f"{name} is {shape.get(name)!r}, but {theirs.get(name)!r} in {entry.info.get('name')}"
        return None

    def validate(self) -> None:
        """The invariants."""
        assert all(url == entry.url for url, entry in self.entries.items())
        assert not any(entry.incarnation in self.left for entry in self.entries.values())
        assert len(self.left) <= LEFT_MAX

    def _remember_left(self, incarnation: str) -> None:
        self.left[incarnation] = None
        while len(self.left) > LEFT_MAX:
            self.left.popitem(last=False)
