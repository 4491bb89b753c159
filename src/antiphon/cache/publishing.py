"""What of the arena is published to which tier, and when.

Always true: only readable chunks are published, each from its own region, which is held until the job has really
ended; so what a tier gets are the bytes that were committed. A chunk of a private tenant is never published.

``through`` publishes what was stored as soon as a job is free; ``back`` when the chunk is to be evicted, when it was
stored a while ago, or when the arena runs short of free bytes. What does not fit the queue is refused and counted; what
leaves the arena before its turn is lost and counted. Neither is an error: a cache may miss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from antiphon.cache.effects import Removal
from antiphon.cache.index import Chunk
from antiphon.cache.states import ChunkState
from antiphon.cache.tier import Publication, Running, Tier
from antiphon.cache.tier_jobs import JobKind, Outcome
from antiphon.cache.tier_key import TierKey

if TYPE_CHECKING:
    from antiphon.cache.tiers import Tiers

_TRIES_MAX: Final = 3
"""A chunk at which a tier fails again and again must not keep it busy."""


def stored(tiers: Tiers, chunk: Chunk) -> None:
    """A writer's last commit has made the chunk readable."""
    if is_private(tiers, chunk):
        return
    key = tiers.key_of(chunk)
    for tier in tiers.tiers:
        if tier.options.store == "through":
            enqueue(tiers, tier, chunk, key)
        elif tier.options.store == "back" and key not in tier.known:
            tier.waiting.dirty[chunk] = tiers.books.now_s


def is_private(tiers: Tiers, chunk: Chunk) -> bool:
    """Whether the chunk must not leave the arena."""
    return chunk.binding.tenant in tiers.options.private_tenants


def promote(tiers: Tiers, chunk: Chunk, source: Tier) -> None:
    """A chunk was fetched from ``source``: the faster tiers get it, once that has happened often enough."""
    key = tiers.key_of(chunk)
    source.remember(key)
    num_hits = source.known[key] = source.known[key] + 1
    for tier in tiers.tiers[: source.number]:
        hits_min = tier.options.promotion_hits
        is_due = 0 < hits_min <= num_hits and tier.options.store != "none"
        if is_due and enqueue(tiers, tier, chunk, key):
            tier.counts.num_promoted += 1


def enqueue(tiers: Tiers, tier: Tier, chunk: Chunk, key: TierKey, is_held: bool = False) -> bool:
    """Has the chunk published when its turn comes. Returns whether it waits."""
    waiting = tier.waiting
    is_there = key in tier.known and not tier.is_hidden(key)
    if chunk in waiting.publications or is_there or _is_running(tier, chunk):
        waiting.dirty.pop(chunk, None)
        return False
    if tier.queued_bytes + chunk.num_bytes > tier.options.queue_bytes_max:
        tier.counts.num_refused += 1
        return False
    tier.queued_bytes += chunk.num_bytes
    waiting.publications[chunk] = Publication(chunk, key, is_held)
    waiting.dirty.pop(chunk, None)
    if is_held:
        tiers.books.hold(chunk)
    return True


def _is_running(tier: Tier, chunk: Chunk) -> bool:
    return any(
        isinstance(running.subject, Publication) and running.subject.chunk is chunk for running in tier.running.values()
    )


def saves(tiers: Tiers, chunk: Chunk) -> bool:
    """The chunk is to be evicted. Returns whether it stays for now, to be published first."""
    for tier in tiers.tiers:
        is_open = tier.breaker.is_closed and tier.full_until_s <= tiers.books.now_s
        if chunk in tier.waiting.dirty and is_open and not tier.waiting.clears:
            return enqueue(tiers, tier, chunk, tiers.key_of(chunk), is_held=True)
    return False


def unlinked(tiers: Tiers, chunk: Chunk, removal: Removal) -> None:
    """The chunk has left the index: what waits to be published of it is not."""
    is_lost = removal in (Removal.EVICTED, Removal.EVICTED_FOR_QUOTA, Removal.EVICTED_IN_WINDOW)
    for tier in tiers.tiers:
        was_dirty = tier.waiting.dirty.pop(chunk, None) is not None
        publication = tier.waiting.publications.pop(chunk, None)
        if publication is not None:
            tier.queued_bytes -= chunk.num_bytes
            if publication.is_held:  # cleared: an eviction does not take what is held
                chunk.num_holds -= 1
        tier.counts.num_lost += is_lost and (was_dirty or publication is not None)


def pump(tiers: Tiers, tier: Tier) -> None:
    """Begins what may be published now."""
    waiting = tier.waiting
    if not tier.breaker.is_closed or tier.is_clearing:
        return
    if tier.full_until_s > tiers.books.now_s:
        return
    if waiting.dirty:
        _flush(tiers, tier)
    while waiting.publications and tier.has_slot(JobKind.PUBLISH):
        publication = waiting.publications.pop(next(iter(waiting.publications)))
        chunk = publication.chunk
        assert chunk.state is ChunkState.READABLE, "only what is readable is published"
        if not publication.is_held:
            publication.is_held = True
            tiers.books.hold(chunk)
        publication.num_tries += 1
        tiers.start(tier, tiers.record_job(tier, JobKind.PUBLISH, publication.key, chunk), publication)


def _flush(tiers: Tiers, tier: Tier) -> None:
    """Has the oldest chunks that are due published: no more than jobs are free, so that most stay out of the queue."""
    books, dirty = tiers.books, tier.waiting.dirty
    free_min_bytes = books.arena.usable_bytes * tiers.options.dirty_free_share
    is_short = books.arena.free_bytes < free_min_bytes
    num_free = tier.options.publishes_max - tier.num_running[JobKind.PUBLISH] - len(tier.waiting.publications)
    for _ in range(num_free):
        chunk = next(iter(dirty), None)
        if chunk is None or not (is_short or dirty[chunk] + tier.options.flush_after_s <= books.now_s):
            return
        if tier.queued_bytes + chunk.num_bytes > tier.options.queue_bytes_max:
            if not tier.queued_bytes:
                del dirty[chunk]  # larger than the queue
                tier.counts.num_refused += 1
            return
        del dirty[chunk]
        enqueue(tiers, tier, chunk, tiers.key_of(chunk))


def ended(tiers: Tiers, tier: Tier, running: Running, outcome: Outcome) -> None:
    """A publication has really ended."""
    publication = running.subject
    assert isinstance(publication, Publication)
    chunk, counts = publication.chunk, tier.counts
    tier.queued_bytes -= chunk.num_bytes
    if outcome is Outcome.DONE:
        tier.remember(publication.key)
        tiers.wrote(tier)
        counts.num_published += 1
        counts.published_bytes += chunk.num_bytes
        counts.publish_s += tiers.books.now_s - running.began_s
    elif outcome is Outcome.FULL:
        counts.num_full += 1
        tier.full_until_s = tiers.books.now_s + tier.options.full_pause_s
    elif chunk.is_indexed and publication.num_tries < _TRIES_MAX:
        again = Publication(chunk, publication.key, False, publication.num_tries)
        if tier.queued_bytes + chunk.num_bytes <= tier.options.queue_bytes_max:
            tier.queued_bytes += chunk.num_bytes
            tier.waiting.publications[chunk] = again
        else:
            counts.num_refused += 1
    tiers.books.unhold(chunk)
