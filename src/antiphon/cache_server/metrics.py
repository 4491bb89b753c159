"""The numbers of ``/metrics``: what the dispatcher of calls counts as it goes, and the page gathered at a scrape.

The rest of the page comes from what the cache and the server keep anyway. Names are in ``observe/cache_metrics.py``.
What the self-probe did is taken out (``probe.ProbeTally``), except from the calls, which it really made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from antiphon import __version__
from antiphon.cache.effects import ChunkRemoved, Notice, Removal, Verdict
from antiphon.cache.states import ChunkState
from antiphon.cache.statistics import Statistics
from antiphon.cache_server.probe import PROBE_BYTES, PROBE_NAME, ProbeTally
from antiphon.cache_server.tier_views import set_tiers
from antiphon.observe import cache_metrics as names
from antiphon.observe.cache_metrics import CALL_SECONDS_BOUNDS, Durations, MetricsPage

if TYPE_CHECKING:
    from antiphon.cache_server.admin_view import ServerView


class CallTallies:
    """Counts of what calls brought about, by whoever dispatches them. Cheap: a dictionary access each."""

    __slots__ = ("_counts", "_sums_s", "removals", "spans", "verdicts")

    def __init__(self) -> None:
        self.verdicts: Counter[str] = Counter()
        """Chunks that ``Reserve`` was asked about, by verdict."""
        self.removals: Counter[Removal] = Counter()
        """Chunks that left the index."""
        self.spans: Mapping[str, int] = {}
        """Spans by outcome; empty where nothing is traced."""
        self._counts: dict[str, list[int]] = {}
        self._sums_s: dict[str, float] = {}

    def answered(self, call: str, seconds: float) -> None:
        """A call of that name was answered, ``seconds`` after it was read."""
        counts = self._counts.get(call)
        if counts is None:
            counts = self._counts[call] = [0] * (len(CALL_SECONDS_BOUNDS) + 1)
            self._sums_s[call] = 0.0
        counts[bisect_left(CALL_SECONDS_BOUNDS, seconds)] += 1
        self._sums_s[call] += seconds

    def noticed(self, notice: Notice) -> None:
        """The cache told of something that happened."""
        if type(notice) is ChunkRemoved:
            self.removals[notice.removal] += 1

    def durations(self) -> dict[str, Durations]:
        """By call."""
        return {call: Durations(counts, self._sums_s[call]) for call, counts in self._counts.items()}


def without_probe(statistics: Statistics, tally: ProbeTally) -> tuple[int, int]:
    """Chunks that a lookup can report, and bytes of the arena that chunks hold, both without the probe's own."""
    account = statistics.tenants.get(PROBE_NAME)
    probe_bytes = account.used_bytes if account is not None else 0
    # One that the probe left behind may have been evicted since.
    num_probe_chunks = min(tally.num_readable, probe_bytes // PROBE_BYTES)
    num_readable = statistics.num_chunks[ChunkState.READABLE] - num_probe_chunks
    return num_readable, statistics.usable_bytes - statistics.free_bytes - probe_bytes


def metrics_text(server: ServerView, tally: ProbeTally) -> bytes:
    """The page."""
    page = MetricsPage()
    statistics = server.statistics()
    _set_state(page, server, statistics, tally)
    _set_totals(page, server, statistics, tally)
    set_tiers(page, server.tiers())
    _set_peers(page, server.peers)
    return page.text()


def _set_peers(page: MetricsPage, peers: dict[str, object] | None) -> None:
    counts = {} if peers is None else peers["counts"]
    assert isinstance(counts, dict)
    page.set_labeled(names.PEER_MEMBER, {} if peers is None else {(): float(bool(peers["is_member"]))})
    page.set_all(names.PEER_EVENTS, counts)


def _set_state(page: MetricsPage, server: ServerView, statistics: Statistics, tally: ProbeTally) -> None:
    num_readable, used_bytes = without_probe(statistics, tally)
    num_chunks = {state.value: count for state, count in statistics.num_chunks.items()}
    engines = [engine for engine in server.engines() if engine.engine != PROBE_NAME]
    population = server.population
    page.set(names.INFO, 1, server.instance, server.incarnation, __version__)
    page.set(names.START_TIME_SECONDS, server.started_at)
    page.set(names.OBJECTS, num_readable)
    page.set_all(names.CHUNKS, num_chunks | {ChunkState.READABLE.value: num_readable})
    page.set(names.USED_BYTES, used_bytes)
    page.set(names.USABLE_BYTES, statistics.usable_bytes)
    page.set(names.ARENA_BYTES, statistics.arena_bytes)
    page.set(names.POPULATED_RATIO, population.populated_bytes / population.total_bytes)
    page.set(names.LARGEST_HOLE_BYTES, statistics.largest_hole_bytes)
    page.set_all(names.LEASES, {state.value: count for state, count in statistics.num_leases.items()})
    page.set(names.LEASED_BYTES, sum(engine.leased_bytes for engine in engines))
    page.set(names.RESERVED_BYTES, statistics.reserved_bytes)
    page.set(names.PINS, statistics.num_pins)
    page.set(names.PINNED_BYTES, statistics.pinned_bytes)
    quotas = server.cache.quotas()
    used = {name: each.used_bytes for name, each in statistics.tenants.items()}
    page.set_all(names.TENANT_QUOTA_BYTES, quotas)
    page.set_all(names.TENANT_USED_BYTES, {name: used.get(name, 0) for name in quotas})
    page.set(names.ENGINES, len(engines))
    page.set(names.CONNECTIONS, sum(len(engine.processes) for engine in engines))


def _set_totals(page: MetricsPage, server: ServerView, statistics: Statistics, tally: ProbeTally) -> None:
    counters = statistics.counters
    chunk_size_tokens = server.spec.chunk_size
    hit_tokens = statistics.hit_tokens - tally.num_hit_chunks * chunk_size_tokens
    lookup_tokens = statistics.hit_tokens + statistics.miss_tokens - tally.num_lookup_chunks * chunk_size_tokens
    tallies = server.tallies
    probe_verdicts = {Verdict.WRITE: tally.num_written, Verdict.REFUSED: tally.num_without_room}
    probe_removals = {Removal.CLEARED: tally.num_cleared}
    calls: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    for (call, outcome), count in server.call_counts.items():
        calls[call] += count
        if outcome != "ok":
            codes[outcome] += count
    page.set(names.LOOKUPS, counters.num_lookups - tally.num_lookups)
    page.set(names.LOOKUP_TOKENS, lookup_tokens)
    page.set(names.HIT_TOKENS, hit_tokens)
    page.set(names.CAPPED_LOOKUPS, counters.num_capped_lookups)
    page.set_all(
        names.STORES, {each.value: tallies.verdicts[each.value] - probe_verdicts.get(each, 0) for each in Verdict}
    )
    page.set(names.STORED_CHUNKS, counters.num_stored - tally.num_stored)
    page.set(names.STORED_BYTES, counters.stored_bytes - tally.num_stored * PROBE_BYTES)
    page.set_all(names.REMOVALS, {each.value: tallies.removals[each] - probe_removals.get(each, 0) for each in Removal})
    page.set_all(names.CALLS, dict(calls))
    page.set_durations(names.CALL_SECONDS, tallies.durations())
    page.set_all(names.REFUSED_CALLS, dict(codes))
    totals = server.token_totals
    sources = ("device", "l1", "l2", "peer", "remote_prefill", "computed")
    page.set_all(names.REPORTED_TOKENS, {source: getattr(totals, source) for source in sources})
    alarms = {
        "lease": counters.num_lease_alarms,
        "reservation": counters.num_reservation_alarms,
        "report_mismatch": totals.num_mismatched,
    }
    page.set_all(names.ALARMS, alarms)
    page.set_all(names.SPANS, dict(tallies.spans))
    page.set_all(names.PROBES, {"ok": tally.num_ok, "failed": tally.num_failed})
