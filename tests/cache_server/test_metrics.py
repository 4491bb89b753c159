"""What the dispatcher of calls counts, and what is taken out for the probe."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from antiphon.cache.effects import ChunkRemoved, ChunkStored, Removal, Verdict
from antiphon.cache.events import Clear
from antiphon.cache_server.metrics import CallTallies, metrics_text, without_probe
from antiphon.cache_server.probe import PROBE_NAME, ProbeTally
from antiphon.observe.cache_metrics import CALL_SECONDS_BOUNDS
from tests.cache_server.admin_standin import PAGE, key_of, namespace_of, standing_in
from tests.cache_server.test_admin import samples


def test_calls_fall_into_the_bucket_whose_bound_they_do_not_exceed() -> None:
    tallies = CallTallies()
    for bound in CALL_SECONDS_BOUNDS:
        tallies.answered("Lookup", bound)
    tallies.answered("Lookup", 2 * CALL_SECONDS_BOUNDS[-1])
    tallies.answered("Ping", 0.0)
    durations = tallies.durations()
    assert list(durations["Lookup"].counts) == [1] * (len(CALL_SECONDS_BOUNDS) + 1)
    assert durations["Lookup"].sum_s == pytest.approx(sum(CALL_SECONDS_BOUNDS) + 2 * CALL_SECONDS_BOUNDS[-1])
    assert (durations["Ping"].counts[0], sum(durations["Ping"].counts)) == (1, 1)


def test_removals_are_counted_and_other_notices_not() -> None:
    tallies = CallTallies()
    names = ("m", "", PAGE)
    tallies.noticed(ChunkStored(1, namespace_of(""), key_of(1), None, *names))
    tallies.noticed(ChunkRemoved(2, namespace_of(""), key_of(1), *names, Removal.EVICTED_FOR_QUOTA))
    tallies.noticed(ChunkRemoved(None, namespace_of(""), key_of(2), *names, Removal.ABANDONED))
    assert tallies.removals == {Removal.EVICTED_FOR_QUOTA: 1, Removal.ABANDONED: 1}


async def test_every_verdict_and_reason_has_a_series_from_the_start(tmp_path: Path) -> None:
    async with standing_in(tmp_path) as server:
        found = samples(metrics_text(server, ProbeTally()))
    for verdict in Verdict:
        assert found[f"stores_total{{verdict={verdict.value}}}"] == 0
    for removal in Removal:
        assert found[f"removals_total{{reason={removal.value}}}"] == 0
    for source in ("device", "l1", "remote_prefill", "computed"):
        assert found[f"reported_tokens_total{{source={source}}}"] == 0


async def test_evictions_are_counted_by_reason(tmp_path: Path) -> None:
    async with standing_in(tmp_path, num_pages=3) as server:
        engine = server.attach_engine()
        server.store(engine, 1, 2, 3)
        server.store(engine, 4)
        found = samples(metrics_text(server, ProbeTally()))
        assert (found["removals_total{reason=evicted}"], found["objects"]) == (1, 3)


async def test_a_chunk_that_a_probe_left_is_taken_out_only_while_it_is_there(tmp_path: Path) -> None:
    async with standing_in(tmp_path) as server:
        engine = server.attach_engine()
        server.store(engine, 1)
        server.store(engine, 2, tenant=PROBE_NAME)
        tally = ProbeTally(num_readable=1)
        assert without_probe(server.statistics(), tally) == (1, PAGE)
        server.control(Clear(PROBE_NAME))
        assert without_probe(server.statistics(), tally) == (1, PAGE)


def test_counting_a_call_costs_next_to_nothing() -> None:
    tallies = CallTallies()
    num = 20_000
    began_s = time.process_time()
    for _ in range(num):
        tallies.answered("Lookup", 0.0001)
    assert (time.process_time() - began_s) / num < 20e-6
