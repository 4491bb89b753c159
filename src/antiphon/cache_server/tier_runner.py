"""Runs the jobs of the tiers on threads: each tier has its own, so that none waits for another.

Owns the stores and the threads. The plan (``cache.tiers``) gives no more jobs of a tier than it has threads, so that
nothing queues here. Bytes go between the arena and the store in one piece; a job's end is told on the loop's thread,
once, however late.

Always true: a region is touched from the moment its job is given until its end is told, and never else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Final

from antiphon.cache.events import TierDone
from antiphon.cache.tier_jobs import JobKind, Outcome, TierJob
from antiphon.cache.tier_key import TAG_BYTES, Selection, TierKey
from antiphon.cache_server.giving_way import give_way
from antiphon.cache_server.traces import ServerTraces
from antiphon.core.errors import AntiphonError, TierCorrupt, TierFull, TierTimeout
from antiphon.core.quiet_log import QuietLog
from antiphon.observe.trace_context import SpanContext
from antiphon.observe.tracing import activated
from antiphon.storage.arena import ArenaMapping
from antiphon.storage.tier import ChunkMeta, ExpectingStore, PagedStore, TierStore

log = logging.getLogger("antiphon.cache_server")

JOIN_TIMEOUT_S: Final = 1.0
"""For calls in progress when the server stops; the whole process has 2 s."""
_REMOVED_AT_ONCE: Final = 256
_CLEAR_MAX_S: Final = 30.0
"""Of one job that goes through a service for a clear; the next job goes on."""


@dataclass(slots=True)
class _Tier:
    store: TierStore
    known_max: int
    jobs: SimpleQueue[tuple[TierJob, SpanContext | None] | None]
    """What is to be done, and the lookup that it is traced for."""
    threads: list[threading.Thread]
    unread: Iterator[list[bytes]] | None = None
    """Pages of a clear that is not whole. Only the one thread that clears touches it."""


class TierRunner:
    """The stores, and their threads.

    Args:
        stores: in the order of the tiers of the plan.
        limits: for each, how many threads it has, and how many keys may be listed.
        arena: the arena; it must stay mapped until ``close`` has returned True.
        on_done: told of each end, on the loop's thread.
    """

    def __init__(
        self,
        stores: Sequence[TierStore],
        limits: Sequence[tuple[int, int]],
        arena: ArenaMapping,
        on_done: Callable[[TierDone], None],
    ) -> None:
        self._arena = arena
        self._on_done = on_done
        self._loop = asyncio.get_running_loop()
        self._quiet = QuietLog(log)
        self._is_closed = False
        self.traces: ServerTraces | None = None
        """None where nothing is traced."""
        self._tiers: list[_Tier] = []
        for store, (num_threads, known_max) in zip(stores, limits, strict=True):
            tier = _Tier(store, known_max, SimpleQueue(), [])
            for number in range(num_threads):
                name = f"antiphon-tier-{store.name}-{number}"
                thread = threading.Thread(target=self._serve, args=(tier,), name=name, daemon=True)
                tier.threads.append(thread)
                thread.start()
            self._tiers.append(tier)

    def run(self, job: TierJob) -> None:
        """Begins a job."""
        parent = None if self.traces is None else self.traces.parent_of(job)
        self._tiers[job.tier].jobs.put((job, parent))

    def usages(self) -> list[tuple[int, int, int | None]]:
        """For each tier: records, their bytes, and the most bytes, as far as this process knows."""
        usages = (tier.store.usage() for tier in self._tiers)
        return [(usage.num_chunks, usage.held_bytes, usage.capacity_bytes) for usage in usages]

    def close(self) -> bool:
        """Closes the stores and ends the threads; returns whether all have ended, so that none touches the arena."""
        self._is_closed = True
        for tier in self._tiers:
            for _ in tier.threads:
                tier.jobs.put(None)
            try:
                tier.store.close()
            except AntiphonError as error:
                log.warning("tier %s was not closed well: %s", tier.store.name, error)
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        threads = [thread for tier in self._tiers for thread in tier.threads]
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        left = [thread.name for thread in threads if thread.is_alive()]
        if left:
            log.warning("a call to a tier does not end: %s", ", ".join(left))
        return not left

    # ---- the threads -------------------------------------------------------------------------------------------------

    def _serve(self, tier: _Tier) -> None:
        give_way()
        while True:
            given = tier.jobs.get()
            if given is None:
                return
            job, parent = given
            done = self._end_of(tier, job) if parent is None else self._traced_end_of(tier, job, parent)
            if self._is_closed:
                continue
            try:
                self._loop.call_soon_threadsafe(self._told, done)
            except RuntimeError:  # the loop is closed: nobody wants to know
                return

    def _told(self, done: TierDone) -> None:
        if not self._is_closed:
            self._on_done(done)

    def _traced_end_of(self, tier: _Tier, job: TierJob, parent: SpanContext) -> TierDone:
        """The same, with a span of its own."""
        traces = self.traces
        part = None if traces is None else traces.begin_part(parent)
        if traces is None or part is None:
            return self._end_of(tier, job)
        with activated(part[0]):
            done = self._end_of(tier, job)
        traces.record(job, tier.store.name, part, done)
        return done

    def _end_of(self, tier: _Tier, job: TierJob) -> TierDone:
        try:
            return self._do(tier, job)
        except TierCorrupt as error:
            self._quiet.warning("corrupt", f"tier {tier.store.name}: {error}")
            return TierDone(job.id, Outcome.CORRUPT, reason=error.message)
        except TierFull as error:
            return TierDone(job.id, Outcome.FULL, reason=error.message)
        except AntiphonError as error:
            return TierDone(job.id, Outcome.FAILED, reason=error.message)
        except Exception as error:  # supervised: a bug in a store costs its tier, not the thread or the server
            self._quiet.error(f"store {type(error).__name__}", f"tier {tier.store.name} has a bug", error)
            return TierDone(job.id, Outcome.FAILED, reason=repr(error))

    def _do(self, tier: _Tier, job: TierJob) -> TierDone:
        store = tier.store
        match job.kind:
            case JobKind.FETCH:
                with self._view(job) as view:
                    is_there = store.get_into(job.keys[0], _meta_of(job), view)
                return TierDone(job.id, Outcome.DONE if is_there else Outcome.MISSING)
            case JobKind.PUBLISH:
                with self._view(job) as view, view.toreadonly() as readable:
                    store.put(job.keys[0], readable, _meta_of(job))
                return TierDone(job.id, Outcome.DONE)
            case JobKind.ASK:
                found = tuple(store.contains(job.keys))
                gone = tuple(store.gone(job.keys)) if isinstance(store, ExpectingStore) else ()
                return TierDone(job.id, Outcome.DONE, found=found, gone=gone)
            case JobKind.LIST:
                listed = store.keys()
                keys = None if listed is None else tuple(map(TierKey, islice(listed, tier.known_max + 1)))
                return TierDone(job.id, Outcome.DONE, keys=keys)
            case JobKind.CLEAR:
                return self._clear_pages(tier, store, job) if isinstance(store, PagedStore) else self._clear(store, job)
            case JobKind.PROBE:
                self._probe(store, job.patience_s)
                return TierDone(job.id, Outcome.DONE)

    def _probe(self, store: TierStore, patience_s: float) -> None:
        """Probes, again and again for ``patience_s`` while the answer is late: the store starts."""
        patient_until_s = time.monotonic() + patience_s
        while True:
            try:
                store.probe()
                return
            except TierTimeout:
                if time.monotonic() >= patient_until_s or self._is_closed:
                    raise

    def _view(self, job: TierJob) -> memoryview:
        assert job.region is not None
        return self._arena.view(job.region.offset_bytes, job.num_bytes)

    @staticmethod
    def _clear(store: TierStore, job: TierJob) -> TierDone:
        """Removes what is named, and what the tier lists of the selection."""
        assert job.selection is not None
        selection = job.selection
        keys: dict[bytes, None] = dict.fromkeys(job.keys)
        listed = store.keys()
        if listed is not None:
            keys |= dict.fromkeys(key for key in listed if selection.matches(key))
        removed = list(keys)
        _remove(store, removed)
        return TierDone(job.id, Outcome.DONE, keys=tuple(map(TierKey, removed)))

    def _clear_pages(self, tier: _Tier, store: PagedStore, job: TierJob) -> TierDone:
        """Removes what a service has of the selection, page by page, for ``_CLEAR_MAX_S`` at most."""
        assert job.selection is not None
        unread, tier.unread = tier.unread, None
        pages = unread if job.is_continued and unread is not None else _pages_of(store, job.selection)
        end_s = time.monotonic() + _CLEAR_MAX_S
        num_removed = 0
        for page in pages:
            keys = [key for key in page if job.selection.matches(key)]
            _remove(tier.store, keys)
            num_removed += len(keys)
            if time.monotonic() >= end_s or self._is_closed:
                tier.unread = pages
                return TierDone(job.id, Outcome.DONE, num_paged=num_removed, is_whole=False)
        return TierDone(job.id, Outcome.DONE, num_paged=num_removed)


def _pages_of(store: PagedStore, selection: Selection) -> Iterator[list[bytes]]:
    """Tier keys begin with the tags of tenant and model."""
    if selection.tenant is None:
        return store.pages(selection.model or b"", 0 if selection.model is None else TAG_BYTES)
    return store.pages(selection.tenant + (selection.model or b""))


def _remove(store: TierStore, keys: Sequence[bytes]) -> None:
    for start in range(0, len(keys), _REMOVED_AT_ONCE):
        store.remove(keys[start : start + _REMOVED_AT_ONCE])


def _meta_of(job: TierJob) -> ChunkMeta:
    assert job.namespace is not None
    return ChunkMeta(job.namespace, job.fingerprint, job.num_bytes)
