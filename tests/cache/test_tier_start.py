"""The first probe of a tier: one that is not there is known before it is needed, and one that starts is let be.

No store, no thread, no time. Out of scope: the probes of a breaker that is open (test_tiers).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from antiphon.cache.breaker import BreakerState
from antiphon.cache.effects import Notice, TierChanged
from antiphon.cache.tier_jobs import JobKind, Outcome
from antiphon.cache.tier_options import TierOptions
from tests.cache.test_tiers import THROUGH, TierWorld

AT_ONCE = dataclasses.replace(THROUGH, first_probe_s=THROUGH.timeout_s, is_shared=True)
STARTS = dataclasses.replace(THROUGH, first_probe_s=10.0, is_shared=True)


def said(notices: list[Notice]) -> list[tuple[str, str]]:
    return [(notice.state, notice.reason) for notice in notices if isinstance(notice, TierChanged)]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_tier_is_probed_once_at_the_start_and_used_meanwhile(is_shared: bool) -> None:
    world = TierWorld(4, dataclasses.replace(AT_ONCE, is_shared=is_shared))
    (probe,) = world.of(JobKind.PROBE)
    assert probe.patience_s == 0
    assert world.tier.breaker is BreakerState.CLOSED
    world.store(world.attach(), "a")
    assert len(world.of(JobKind.PUBLISH)) == 1, "nothing waits for the probe"
    world.end_all(JobKind.PUBLISH)
    assert world.end(probe) == []
    world.tick(100.0)
    assert world.of(JobKind.PROBE) == []


def test_without_the_option_nothing_is_probed() -> None:
    assert TierWorld(4, THROUGH).of(JobKind.PROBE) == []


@pytest.mark.parametrize("options", [AT_ONCE, STARTS])
@pytest.mark.parametrize("how", ["failed", "late"])
def test_a_tier_that_fails_its_first_probe_is_left_alone_and_says_so_once(how: str, options: TierOptions) -> None:
    world = TierWorld(4, options)
    (probe,) = world.of(JobKind.PROBE)
    first_s = options.first_probe_s
    assert first_s is not None
    if how == "failed":
        notices: list[Any] = world.end(probe, Outcome.FAILED, reason="nobody listens")
    else:
        assert said(world.tick(first_s - 0.25)) == []
        assert world.tier.breaker is BreakerState.CLOSED
        notices = world.tick(0.25)
    reason = "nobody listens" if how == "failed" else f"probe had no answer in {first_s:g} s"
    assert said(notices) == [("open", reason)]
    assert world.tier.reason == reason
    world.cache.validate()
    if how == "late":
        assert said(world.end(probe)) == []
    for _ in range(3):
        assert said(world.tick(10.0)) == []
        (again,) = world.of(JobKind.PROBE)
        assert again.patience_s == 0, "later probes are not repeated"
        assert said(world.end(again, Outcome.FAILED, reason="nobody listens")) == []
    assert world.tier.num_opened == 1
    world.tick(10.0)
    (again,) = world.of(JobKind.PROBE)
    assert said(world.end(again)) == [("closed", "")]


def test_a_tier_that_starts_is_not_left_alone_for_the_probe_and_is_told_its_patience() -> None:
    world = TierWorld(4, STARTS)
    (probe,) = world.of(JobKind.PROBE)
    assert probe.patience_s == pytest.approx(STARTS.first_probe_s - STARTS.timeout_s)  # type: ignore[operator]
    for _ in range(9):
        assert said(world.tick(1.0)) == []
    assert world.tier.breaker is BreakerState.CLOSED
    assert said(world.end(probe)) == []
    assert world.tier.num_opened == 0


def test_a_request_that_fails_meanwhile_is_not_held_up_by_the_first_probe() -> None:
    """As without it: the tier is left alone, and used as soon as it answers."""
    world = TierWorld(4, STARTS)
    (first,) = world.of(JobKind.PROBE)
    world.store(world.attach(), "a")
    (publish,) = world.of(JobKind.PUBLISH)
    assert said(world.end(publish, Outcome.FAILED, reason="it starts")) == [("open", "it starts")]
    world.tick(5.0)
    assert world.of(JobKind.PROBE) == [first], "one at a time"
    world.end(first)
    (second,) = world.of(JobKind.PROBE)
    assert said(world.end(second)) == [("closed", "")]
    assert len(world.of(JobKind.PUBLISH)) == 1, "what waited is published"
    world.cache.validate()


def test_a_first_probe_is_no_shorter_than_a_call() -> None:
    with pytest.raises(ValueError, match="first_probe_s is at least timeout_s"):
        dataclasses.replace(THROUGH, first_probe_s=THROUGH.timeout_s / 2)
