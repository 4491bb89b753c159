"""Every bound of the tiers behind the arena, once, with its unit and reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from antiphon.core.units import MIB

ASKS_MAX: Final = 2
"""Questions to a tier at once: each is one round trip for many keys."""

StorePolicy = Literal["through", "back", "none"]


@dataclass(frozen=True, slots=True)
class TierOptions:
    """One tier. The order of the tiers is that in which a chunk is fetched: the fastest first.

    Args:
        name: for people and metrics.
        store: ``through`` publishes a chunk as soon as it is readable; ``back`` when it is to be evicted, or was stored
            ``flush_after_s`` ago; ``none`` only reads.
        source: what the tokens of its chunks count as in reports.
        is_shared: others write to it too, so that it is asked for what is not known to be there.
        can_list: whether what others, and earlier lives, have put there can be gone through for a ``Clear``.
        fetches_max: chunks that are fetched at once; each has a thread of the shell.
        publishes_max: chunks that are published at once, with threads of their own: writes delay no read.
        queue_bytes_max: bytes of chunks that wait to be published or are being published; past it a chunk is refused,
            and counted.
        timeout_s: after so long a call counts as failed. Its memory is held until it has really ended.
        list_timeout_s: the same for what goes through all keys, once at the start and for each ``Clear``; a long one
            is several jobs.
        flush_after_s: seconds from the store of a chunk to its publication by ``back``.
        promotion_hits: a chunk that was fetched so often from a slower tier is published to this one; 0: never.
        retry_min_s: from a failure to the first probe; it doubles up to ``retry_max_s``.
        retry_max_s: longest wait between two probes. With the time of a probe itself it is well below 5 s.
        full_pause_s: nothing is published for so long after the tier had no room.
        known_max: keys remembered as being there, about 100 bytes each. Past it the tier is asked.
        first_probe_s: the tier is probed once at the start, in the background, so that one that is not there is known
            before it is needed. A store that starts itself has so long; until then it counts as starting, and is used
            as if there were no probe. None: no such probe.
    """

    name: str
    store: StorePolicy = "through"
    source: str = "l2"
    is_shared: bool = False
    can_list: bool = True
    fetches_max: int = 4
    publishes_max: int = 2
    queue_bytes_max: int = 256 * MIB
    timeout_s: float = 2.0
    list_timeout_s: float = 120.0
    flush_after_s: float = 10.0
    promotion_hits: int = 2
    retry_min_s: float = 0.1
    retry_max_s: float = 2.0
    full_pause_s: float = 1.0
    known_max: int = 262_144
    first_probe_s: float | None = None

    @property
    def num_threads(self) -> int:
        """Threads that the shell needs, so that no job waits for one of another kind: list, clear and probe have one
        each."""
        return self.fetches_max + self.publishes_max + ASKS_MAX + 3

    def __post_init__(self) -> None:
        for name in ("fetches_max", "publishes_max", "queue_bytes_max", "known_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("timeout_s", "list_timeout_s", "retry_min_s", "full_pause_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0")
        if self.first_probe_s is not None and self.first_probe_s < self.timeout_s:
            raise ValueError("first_probe_s is at least timeout_s: the first probe is one call, or several")
        if self.retry_max_s < self.retry_min_s or self.flush_after_s < 0 or self.promotion_hits < 0:
            raise ValueError("retry_max_s is at least retry_min_s; flush_after_s and promotion_hits are not negative")


@dataclass(frozen=True, slots=True)
class TiersOptions:
    """All tiers of one server, and what lookups may wait for.

    Args:
        tiers: the fastest first, names unique.
        onboard_max_s: longest wait of a lookup for chunks of tiers, whatever it asks for.
        onboards_max: lookups that wait at once; further ones are answered from L1.
        onboard_share_max: share of the arena that waiting lookups may hold, together.
        ahead_max: chunks of one lookup that are asked for ahead of what it has in one piece.
        ask_keys_max: keys that a tier is asked for at once; what lies behind them is not found.
        dirty_free_share: with less free than this share of the arena, ``back`` publishes the oldest chunks at once, so
            that there is something to evict.
        private_tenants: tenants whose chunks never leave the arena.
    """

    tiers: tuple[TierOptions, ...]
    onboard_max_s: float = 5.0
    onboards_max: int = 256
    onboard_share_max: float = 0.5
    ahead_max: int = 32
    ask_keys_max: int = 512
    dirty_free_share: float = 0.1
    private_tenants: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise ValueError(f"tiers have names of their own: {names}")
        if self.onboard_max_s <= 0 or not 0 < self.onboard_share_max <= 1 or not 0 <= self.dirty_free_share <= 1:
            raise ValueError("onboard_max_s is above 0, shares are from 0 to 1")
        if min(self.onboards_max, self.ahead_max, self.ask_keys_max) < 1:
            raise ValueError("onboards_max, ahead_max and ask_keys_max are at least 1")
