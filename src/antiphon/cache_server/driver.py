"""Drives the cache: gives it events and the time, passes on what it notices.

Owns the one ``Cache``. Everything here runs on the event loop's thread. A ``Tick`` comes when the cache asks for one,
so that a quarantine ends on time on an idle server. An assertion of the cache is not caught: a server whose books are
wrong must end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from antiphon.cache.effects import (
    ChunkRemoved,
    ChunkStored,
    LeaseAlarm,
    Onboarded,
    Reply,
    ReservationAlarm,
    TierChanged,
)
from antiphon.cache.events import Event, Tick
from antiphon.cache.machine import Cache
from antiphon.cache.tier_jobs import TierJob
from antiphon.cache_server.metrics import CallTallies
from antiphon.cache_server.waiting import Waiters
from antiphon.core.quiet_log import QuietLog

log = logging.getLogger("antiphon.cache_server")

_TICK_SLACK_S = 0.001
"""A timer may fire this much early by its own clock; a tick that comes too early would come again at once."""


_NOTICES = ChunkStored | ChunkRemoved | LeaseAlarm | ReservationAlarm | TierJob | Onboarded | TierChanged


def _nobody_runs(job: TierJob) -> None:
    raise AssertionError(f"nobody runs {job}")


def _nobody_waits(notice: Onboarded) -> None:
    raise AssertionError(f"nobody waits for {notice}")


class CacheDriver:
    """The cache, with a clock.

    Args:
        cache: new.
        tallies: what is counted of notices.
        quiet: for alarms.
    """

    def __init__(self, cache: Cache, tallies: CallTallies, quiet: QuietLog) -> None:
        self.cache = cache
        self._tallies = tallies
        self._quiet = quiet
        self._loop = asyncio.get_running_loop()
        self._tick: asyncio.TimerHandle | None = None
        self._tick_at_s = 0.0
        self._num_events = 0
        self.waiters = Waiters(lambda: self._num_events + 1)
        self.on_job: Callable[[TierJob], None] = _nobody_runs
        """Takes the jobs of the tiers."""
        self.on_onboarded: Callable[[Onboarded], None] = _nobody_waits
        """Takes the final answers of lookups that waited for tiers. It may make steps."""

    @property
    def now_s(self) -> float:
        """The time that the cache is given."""
        return self._loop.time()

    def step(self, event: Event) -> Reply:
        """Handles one event; returns its reply."""
        reply, *notices = self.cache.step(event, self._loop.time())
        assert not isinstance(reply, _NOTICES)
        num_events = self._num_events
        for notice in notices:
            assert isinstance(notice, _NOTICES), notice
            self._tallies.noticed(notice)
            match notice:
                case ChunkStored():
                    self._num_events = notice.sequence
                case ChunkRemoved():
                    self._num_events = notice.sequence or self._num_events
                case TierJob():
                    self.on_job(notice)
                case Onboarded():
                    self.on_onboarded(notice)
                case TierChanged():
                    log.warning("tier %s: the breaker is %s. %s", notice.name, notice.state, notice.reason)
                case LeaseAlarm():
                    self._quiet.say(
                        logging.WARNING,
                        "lease alarms",
                        "lease %d of request %s (engine %s) is %.0f s old and %s; it protects %d bytes",
                        *(notice.lease, notice.request, notice.engine.name),
                        *(notice.age_s, notice.state.value, notice.num_bytes),
                    )
                case ReservationAlarm():
                    self._quiet.say(
                        logging.WARNING,
                        "reservation alarms",
                        "engine %s reserved %d bytes %.0f s ago and has neither committed nor aborted them",
                        *(notice.engine.name, notice.num_bytes, notice.age_s),
                    )
        if self._num_events != num_events:
            self.waiters.wake()
        self._plan_tick()
        return reply

    def _plan_tick(self) -> None:
        deadline_s = self.cache.next_deadline_s
        if deadline_s is None or (self._tick is not None and self._tick_at_s <= deadline_s):
            return  # a tick that comes too early plans the next
        if self._tick is not None:
            self._tick.cancel()
        self._tick_at_s = deadline_s
        self._tick = self._loop.call_at(deadline_s + _TICK_SLACK_S, self._on_tick)

    def _on_tick(self) -> None:
        self._tick = None
        self.step(Tick())

    def close(self) -> None:
        """No further tick comes."""
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
