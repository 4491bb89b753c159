"""A tier behind the simulated server: records that outlive it, written and read over virtual time, with faults.

It does what ``storage.tier.TierStore`` promises, and no more: a fetch writes into the arena before it knows whether the
bytes are right, and says so only at its end; a record whose digest or meaning differs is never given out as good. What
it cannot know is whether the bytes that it was given were the right ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from antiphon.cache.events import TierDone
from antiphon.cache.tier_jobs import JobKind, Outcome, TierJob
from antiphon.cache.tier_key import TierKey
from antiphon.sim.memory import Arena
from antiphon.sim.network import Process
from antiphon.sim.timeline import Timeline

CALL_S = ((0.6, 0.000_5), (0.9, 0.01), (1.0, 0.08))
"""Mean time of a call, with the running share of the calls that have it."""
CALL_MAX_S = 5.0
"""A tier however slow answers by then."""
HANG_BEYOND_S = (0.0, 1.5)
"""A call to a tier that hangs returns this long after its store's deadline, or when the tier goes on."""
STORE_TIMEOUT_S = 0.25
PIECES = 4
NUM_FLIPPED = (1, 4, 16)
TORN_SHARE = 0.8
"""Of the publications that are cut off by the death of the server."""

Meaning = tuple[object, ...]
Done = Callable[[TierDone], None]


@dataclass(slots=True)
class Record:
    """What lies under a key."""

    content: bytearray
    digest: bytes
    meaning: Meaning


@dataclass(slots=True)
class TierFaults:
    """What is wrong with a tier now, until ``SimulatedTier.heal``.

    Args:
        is_hung: no job ends, those under way neither.
        is_down: each job that begins fails.
        is_full: publications are refused.
        slowness: multiplies the time that a job takes.
    """

    is_hung: bool = False
    is_down: bool = False
    is_full: bool = False
    slowness: float = 1.0


class SimulatedTier:
    """One tier.

    Args:
        capacity: records; the oldest go first.
        can_list: whether it says which keys it has.
    """

    def __init__(self, timeline: Timeline, name: str, capacity: int, can_list: bool) -> None:
        self.name = name
        self.faults = TierFaults()
        self.records: dict[TierKey, Record] = {}
        self.begun_at_s = float("-inf")
        """When a job began last."""
        self._timeline = timeline
        self._capacity = capacity
        self._can_list = can_list

    def heal(self) -> None:
        """Nothing is wrong any more; what is damaged stays damaged."""
        self.faults = TierFaults()

    def flip(self) -> None:
        """A bit flips, in some record or in several."""
        chance = self._timeline.random
        for key in chance.sample(list(self.records), min(len(self.records), chance.choice(NUM_FLIPPED))):
            content = self.records[key].content
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)

    def run(self, job: TierJob, process: Process, arena: Arena, done: Done) -> None:
        """Does a job on a thread of ``process``."""
        chance = self._timeline.random
        if self.faults.is_down:
            process.after(0.000_2, lambda: done(TierDone(job.id, Outcome.FAILED, reason="down")))
            return
        self.begun_at_s = self._timeline.now_s
        if self.faults.is_hung:
            self._hang(job, process, arena, done)
            return
        share = 0.0 if self._timeline.is_calm else chance.random()
        mean_s = next(time_s for upto, time_s in CALL_S if share <= upto) * self.faults.slowness
        delay_s = min(chance.expovariate(1 / mean_s), CALL_MAX_S)
        if job.kind is JobKind.FETCH:
            self._fetch(job, process, arena, done, delay_s)
        elif job.kind is JobKind.PUBLISH:
            self._publish(job, process, arena, done, delay_s)
        else:
            self._timeline.count(f"{job.kind.value} begins", process.name)
            process.after(delay_s, lambda: self._end(job, process, arena, done))

    def _end(self, job: TierJob, process: Process, arena: Arena, done: Done) -> None:
        """The answer to a job that moves no bytes."""
        if self.faults.is_hung:
            self._hang(job, process, arena, done)
        else:
            done(self._answer(job))

    def _hang(self, job: TierJob, process: Process, arena: Arena, done: Done) -> None:
        """The job begins, or goes on, while the tier hangs."""
        chance = self._timeline.random
        self._timeline.count(f"tier hangs in {job.kind.value}")
        if job.kind is JobKind.FETCH:
            done = self._writing_late(job, arena, done)
        self._wait(job, process, done, STORE_TIMEOUT_S + chance.choice((0.0, chance.uniform(*HANG_BEYOND_S))))

    def _wait(self, job: TierJob, process: Process, done: Done, left_s: float) -> None:
        """Looks now and then whether the tier goes on, or the time is over."""
        if left_s <= 0 or not self.faults.is_hung:
            done(TierDone(job.id, Outcome.FAILED, reason="no answer in time"))
        else:
            process.after(min(0.02, left_s), lambda: self._wait(job, process, done, left_s - 0.02))

    def _writing_late(self, job: TierJob, arena: Arena, done: Done) -> Done:
        """A read that hangs may write until the moment it ends."""
        region = job.region
        assert region is not None

        def ended(event: TierDone) -> None:
            noise = self._timeline.random.randbytes(job.num_bytes)
            arena.data[region.offset_bytes : region.offset_bytes + job.num_bytes] = noise
            done(event)

        return ended

    def _answer(self, job: TierJob) -> TierDone:
        if job.kind is JobKind.ASK:
            return TierDone(job.id, Outcome.DONE, found=tuple(key in self.records for key in job.keys))
        if job.kind is JobKind.LIST:
            return TierDone(job.id, Outcome.DONE, keys=tuple(self.records) if self._can_list else None)
        if job.kind is JobKind.CLEAR:
            assert job.selection is not None
            keys = dict.fromkeys(job.keys)
            if self._can_list:
                keys |= dict.fromkeys(key for key in self.records if job.selection.matches(key))
            for key in keys:
                self.records.pop(key, None)
            return TierDone(job.id, Outcome.DONE, keys=tuple(keys))
        return TierDone(job.id, Outcome.DONE)

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def _publish(self, job: TierJob, process: Process, arena: Arena, done: Done, delay_s: float) -> None:
        """Reads the region piece by piece; the record appears whole, or, if the process dies, now and then torn."""
        region = job.region
        assert region is not None
        start, piece = region.offset_bytes, max(1, -(-job.num_bytes // PIECES))
        content = bytearray()

        def died() -> None:
            if content and self._timeline.random.random() < TORN_SHARE:
                self._timeline.count("torn record")
                whole = bytes(content) + bytes(job.num_bytes - len(content))
                self._keep(job, Record(bytearray(content), _digest(whole), _meaning(job)))

        def ended(event: TierDone) -> None:
            process.on_death.remove(died)
            done(event)

        def step() -> None:
            if self.faults.is_hung:
                self._hang(job, process, arena, ended)
                return
            at = start + len(content)
            content.extend(arena.data[at : min(at + piece, start + job.num_bytes)])
            if len(content) < job.num_bytes:
                process.after(delay_s / PIECES, step)
                return
            if self.faults.is_full:
                ended(TierDone(job.id, Outcome.FULL))
                return
            self._keep(job, Record(content, _digest(content), _meaning(job)))
            ended(TierDone(job.id, Outcome.DONE))

        self._timeline.count("publish begins", process.name)
        process.on_death.append(died)
        process.after(delay_s / PIECES, step)

    def _keep(self, job: TierJob, record: Record) -> None:
        self.records.pop(job.keys[0], None)
        self.records[job.keys[0]] = record
        while len(self.records) > self._capacity:
            self._timeline.count("tier evicts")
            del self.records[next(iter(self.records))]

    def _fetch(self, job: TierJob, process: Process, arena: Arena, done: Done, delay_s: float) -> None:
        """Writes into the region piece by piece, and then tells whether it was right."""
        region, record = job.region, self.records.get(job.keys[0])
        assert region is not None
        if record is None:
            process.after(delay_s, lambda: done(TierDone(job.id, Outcome.MISSING)))
            return
        content = bytes(record.content)
        piece = max(1, -(-len(content) // PIECES))
        written = 0

        def step() -> None:
            nonlocal written
            if self.faults.is_hung:
                self._hang(job, process, arena, done)
                return
            part = content[written : written + piece]
            at = region.offset_bytes + written
            arena.data[at : at + len(part)] = part
            written += piece
            if written < len(content):
                process.after(delay_s / PIECES, step)
                return
            is_good = record.digest == _digest(content) and record.meaning == _meaning(job)
            if not is_good:
                self.records.pop(job.keys[0], None)
            done(TierDone(job.id, Outcome.DONE if is_good else Outcome.CORRUPT))

        self._timeline.count("fetch begins", process.name)
        process.after(delay_s / PIECES, step)


def _digest(content: bytes | bytearray) -> bytes:
    return blake2b(content, digest_size=16).digest()


def _meaning(job: TierJob) -> Meaning:
    return (job.namespace, job.fingerprint, job.num_bytes)
