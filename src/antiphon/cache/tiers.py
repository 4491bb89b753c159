"""The plan of the tiers behind the arena: what is asked of which tier, and when.

Ties together what lookups wait for (``onboarding``), what is published (``publishing``) and the state of each tier
(``tier``). It gives ``TierJob`` notices and takes their ends; a job that has no end in time, or fails, opens the
breaker of its tier, and nothing waits for that tier any more.

Always true: a lookup that is wholly answered from the arena is not touched here; what a job reads or writes is held in
the arena until the job has really ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from antiphon.cache import publishing
from antiphon.cache.breaker import BreakerState
from antiphon.cache.effects import Removal, TierChanged
from antiphon.cache.events import TierDone
from antiphon.cache.index import Chunk
from antiphon.cache.onboarding import FETCHER, Ask, Fetch, Onboardings
from antiphon.cache.tier import Publication, Running, Tier, TierCounts
from antiphon.cache.tier_jobs import JobId, JobKind, Outcome, TierJob
from antiphon.cache.tier_key import Selection, TierKey, meaning_of, selection_of
from antiphon.cache.tier_options import TiersOptions
from antiphon.core.chunks import ChunkKey
from antiphon.core.errors import ProtocolError

if TYPE_CHECKING:
    from antiphon.cache.books import Books


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """One tier at one moment.

    Args:
        is_shared: whether others write to it too.
        can_list: whether a clear can go through what others, and earlier lives, have put there.
        reason: why the breaker is not closed, or, where it is, why publications are refused; empty without either.
        num_known: keys that are known to be there.
        is_complete: whether nothing else is there.
        num_running: jobs that have not ended, overdue ones too.
        queued_bytes: bytes that wait to be published or are being published.
        num_waiting: chunks that wait to be published; those that ``back`` will publish later apart.
        num_clears: clears that have not reached the tier.
        is_paused: whether nothing is published for now: the tier has no room, or refuses what is written.
    """

    name: str
    store: str
    source: str
    is_shared: bool
    can_list: bool
    breaker: BreakerState
    reason: str
    num_opened: int
    num_known: int
    is_complete: bool
    num_running: int
    queued_bytes: int
    queue_bytes_max: int
    num_waiting: int
    num_dirty: int
    num_clears: int
    is_paused: bool
    counts: TierCounts


class Tiers:
    """The plan.

    Args:
        books: of the cache.
        options: the tiers.
        first_id: of jobs and tickets; drawn at random by who starts the server.
    """

    def __init__(self, books: Books, options: TiersOptions, first_id: int) -> None:
        self.books = books
        self.options = options
        self.tiers = tuple(Tier(number, tier) for number, tier in enumerate(options.tiers))
        self.onboardings = Onboardings(self, first_id)
        self._next_job = first_id
        self._tier_of_job: dict[JobId, Tier] = {}

    # ---- what the cache tells --------------------------------------------------------------------------------------

    def stored(self, chunk: Chunk) -> None:
        """A writer's last commit has made the chunk readable."""
        publishing.stored(self, chunk)
        self.onboardings.awaiting.stored(chunk.key)

    def saves(self, chunk: Chunk) -> bool:
        """The chunk is to be evicted. Returns whether it stays for now, to be published first."""
        return publishing.saves(self, chunk)

    def unlinked(self, chunk: Chunk, removal: Removal) -> None:
        """The chunk has left the index."""
        publishing.unlinked(self, chunk, removal)
        if removal is Removal.CLEARED and any(writer != FETCHER for writer in chunk.writers):
            self.abandoned(chunk.key)

    def abandoned(self, key: ChunkKey) -> None:
        """The chunk does not become whole: a writer has given its slabs up or died, or it was cleared."""
        self.onboardings.awaiting.abandoned(key)

    def begun(self, key: ChunkKey) -> None:
        """Somebody has begun to store the chunk, of which nothing was there."""
        self.onboardings.awaiting.begun(key)

    def refused(self, key: ChunkKey) -> None:
        """There was no room to store the chunk."""
        self.onboardings.awaiting.refused(key)

    def was_fetched(self, chunk: Chunk, source: Tier) -> None:
        """The chunk came from ``source``."""
        publishing.promote(self, chunk, source)

    def clear(self, tenant: str | None, model: str | None) -> None:
        """What is selected must go from every tier; from here on it is not found there."""
        selection = selection_of(tenant, model)
        for tier in self.tiers:
            tier.clear(selection)

    def key_of(self, chunk: Chunk) -> TierKey:
        """The chunk's key in a tier."""
        binding = chunk.binding
        return meaning_of(binding.namespace, binding.tenant, binding.model, binding.layout).key_of(chunk.key)

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def plain_job(
        self, tier: Tier, kind: JobKind, keys: tuple[TierKey, ...] = (), selection: Selection | None = None
    ) -> TierJob:
        """A job that touches no region."""
        return TierJob(self._new_id(), tier.number, kind, keys, selection=selection)

    def record_job(self, tier: Tier, kind: JobKind, key: TierKey, chunk: Chunk) -> TierJob:
        """A job that reads or writes the chunk's region."""
        binding = chunk.binding
        meaning = (binding.namespace, binding.layout.fingerprint, binding.layout.chunk_bytes)
        return TierJob(self._new_id(), tier.number, kind, (key,), chunk.region, *meaning)

    def _new_id(self) -> JobId:
        job_id = JobId(self._next_job)
        self._next_job += 1
        return job_id

    def start(self, tier: Tier, job: TierJob, subject: Fetch | Ask | Publication | None) -> None:
        """Gives a job to the shell."""
        assert tier.breaker.is_closed or job.kind is JobKind.PROBE, "only a probe goes to a tier that is left alone"
        tier.begin(job, self.books.now_s, subject)
        self._tier_of_job[job.id] = tier
        self.books.notices.append(job)

    def done(self, event: TierDone) -> None:
        """A job has really ended.

        Raises:
            ProtocolError: no such job runs.
        """
        tier = self._tier_of_job.pop(event.job, None)
        running = None if tier is None else tier.end(event.job)
        if tier is None or running is None:
            raise ProtocolError(f"no job {event.job} runs")
        if event.outcome is Outcome.FAILED and not running.is_overdue:
            tier.counts.num_failed += 1
            self._failed(tier, event.reason or "it failed", is_refused_write=running.job.kind is JobKind.PUBLISH)
        match running.job.kind:
            case JobKind.FETCH:
                self.onboardings.fetched(tier, running, event.outcome)
            case JobKind.PUBLISH:
                publishing.ended(self, tier, running, event.outcome)
            case JobKind.ASK:
                self.onboardings.asked(tier, running, event)
            case JobKind.LIST:
                self._listed(tier, event)
            case JobKind.CLEAR:
                self._cleared(tier, event)
            case JobKind.PROBE:
                self._probed(tier, running, event.outcome)

    def _listed(self, tier: Tier, event: TierDone) -> None:
        if event.outcome is not Outcome.DONE:
            return
        tier.must_list = False
        if event.keys is not None:
            tier.is_complete = True
            for key in event.keys:
                tier.remember(key)

    def _cleared(self, tier: Tier, event: TierDone) -> None:
        tier.counts.num_cleared += len(event.keys or ()) + event.num_paged
        if event.outcome is Outcome.DONE and not event.is_whole:
            tier.is_clear_cut = True
            return
        selection, tier.clearing = tier.clearing, None
        assert selection is not None
        if event.outcome is not Outcome.DONE:
            tier.clear(selection)
            return
        for key in [key for key in tier.known if selection.matches(key)]:
            tier.forget(key)

    def _probed(self, tier: Tier, running: Running, outcome: Outcome) -> None:
        if outcome is Outcome.DONE and tier.breaker.state is BreakerState.HALF_OPEN:
            tier.breaker.recovered()
            self.books.notices.append(TierChanged(tier.options.name, tier.breaker.state.value, ""))

    def wrote(self, tier: Tier) -> None:
        """A publication has succeeded."""
        tier.is_write_doubted = False
        if tier.write_reason:
            tier.write_reason = ""
            said = "What is written is taken again"
            self.books.notices.append(TierChanged(tier.options.name, tier.breaker.state.value, said))

    def _failed(self, tier: Tier, reason: str, *, is_refused_write: bool = False) -> None:
        """A call failed, or had no answer in time.

        Args:
            is_refused_write: it was a publication, and was answered.
        """
        if is_refused_write and tier.breaker.is_closed and tier.is_write_doubted:
            # The tier has answered a probe since the last one was refused: it can be read, and has no room, for which
            # it has an error of its own.
            tier.full_until_s = self.books.now_s + tier.options.retry_max_s
            if not tier.write_reason:
                tier.write_reason = reason
                said = f"It is read, and refuses what is written: {reason}"
                self.books.notices.append(TierChanged(tier.options.name, tier.breaker.state.value, said))
        elif tier.breaker.failed(self.books.now_s, reason):
            tier.is_write_doubted = is_refused_write
            self.books.notices.append(TierChanged(tier.options.name, tier.breaker.state.value, reason))

    # ---- time --------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Looks at the time, and begins what may be begun. After every step of the cache."""
        for tier in self.tiers:
            if tier.running:
                self._end_overdue(tier)
        self.onboardings.end_overdue()
        for tier in self.tiers:
            self._pump(tier)

    def _end_overdue(self, tier: Tier) -> None:
        for running in tier.overdue(self.books.now_s):
            job = running.job
            self._failed(tier, f"{job.kind.value} had no answer in {running.deadline_s - running.began_s:g} s")
            if job.kind is JobKind.FETCH:
                self.onboardings.overdue(running)
            elif job.kind is JobKind.ASK:
                self.onboardings.ask_overdue(running)

    def _pump(self, tier: Tier) -> None:
        breaker, waiting = tier.breaker, tier.waiting
        if breaker.is_due(self.books.now_s) and tier.has_slot(JobKind.PROBE):
            breaker.probing()
            self.start(tier, self.plain_job(tier, JobKind.PROBE), None)
        elif breaker.is_closed:
            if tier.must_probe:
                self._start_first_probe(tier)
            if tier.must_list and tier.has_slot(JobKind.LIST):
                self.start(tier, self.plain_job(tier, JobKind.LIST), None)
            if tier.is_clear_cut:
                self._go_on_clearing(tier)
            elif waiting.clears:
                self._start_clear(tier)
        self.onboardings.pump(tier)
        publishing.pump(self, tier)

    def _start_first_probe(self, tier: Tier) -> None:
        """The breaker stays closed meanwhile: what is asked before the probe has its answer finds out by itself."""
        first_probe_s = tier.options.first_probe_s
        assert first_probe_s is not None
        tier.must_probe = False
        probe = self.plain_job(tier, JobKind.PROBE)
        self.start(tier, replace(probe, patience_s=first_probe_s - tier.options.timeout_s), None)

    def _start_clear(self, tier: Tier) -> None:
        """The oldest clear goes out once no publication runs that it means: that one would come after it."""
        selection = tier.waiting.clears[0]
        is_published = any(
            running.job.kind is JobKind.PUBLISH and selection.matches(running.job.keys[0])
            for running in tier.running.values()
        )
        if is_published or not tier.has_slot(JobKind.CLEAR):
            return
        tier.clearing = tier.waiting.clears.pop(0)
        keys = tuple(key for key in tier.known if selection.matches(key))
        self.start(tier, self.plain_job(tier, JobKind.CLEAR, keys, selection), None)

    def _go_on_clearing(self, tier: Tier) -> None:
        """What a clear has not gone through yet. Nothing was published since it began."""
        tier.is_clear_cut = False
        job = self.plain_job(tier, JobKind.CLEAR, selection=tier.clearing)
        self.start(tier, replace(job, is_continued=True), None)

    @property
    def next_deadline_s(self) -> float | None:
        """When there is something to do for the time alone."""
        due_s, now_s = self.onboardings.next_deadline_s, self.books.now_s
        for tier in self.tiers:
            tier_s = tier.next_deadline_s(now_s)
            if tier_s is not None and (due_s is None or tier_s < due_s):
                due_s = tier_s
        return due_s

    # ---- what it shows -----------------------------------------------------------------------------------------------

    def statistics(self) -> list[TierStatistics]:
        """Each tier in numbers."""
        return [
            TierStatistics(
                name=tier.options.name,
                store=tier.options.store,
                source=tier.options.source,
                is_shared=tier.options.is_shared,
                can_list=tier.options.can_list,
                breaker=tier.breaker.state,
                reason=tier.breaker.reason or tier.write_reason,
                num_opened=tier.breaker.num_opened,
                num_known=len(tier.known),
                is_complete=tier.is_complete,
                num_running=len(tier.running),
                queued_bytes=tier.queued_bytes,
                queue_bytes_max=tier.options.queue_bytes_max,
                num_waiting=len(tier.waiting.publications),
                num_dirty=len(tier.waiting.dirty),
                num_clears=len(tier.waiting.clears) + (tier.clearing is not None),
                is_paused=tier.full_until_s > self.books.now_s,
                counts=replace(tier.counts),
            )
            for tier in self.tiers
        ]
