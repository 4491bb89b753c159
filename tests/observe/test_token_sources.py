"""Each prompt token has one source: the merge, case by case, and against a count token by token."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from antiphon.observe.token_metrics import TokenMetrics
from antiphon.observe.token_sources import LegTokens, ReportedTokens, merge, shown


def leg(num: int, device: int = 0, l1: int = 0, remote: int = 0, computed: int = 0, **rest: object) -> LegTokens:
    values = {"num_preemptions": 0, "finish": "finished"} | rest
    return LegTokens("e", "life", num, device, l1, remote, computed, **values)  # type: ignore[arg-type]


def sources(device: int, l1: int, computed: int, unknown: int = 0) -> dict[str, int]:
    found = {"device": device, "l1": l1, "computed": computed}
    return found | {"unknown": unknown} if unknown else found


# ---- cases -----------------------------------------------------------------------------------------------------------

CASES = {
    "cold: all computed on P, the last token on both": (
        leg(100, computed=100),
        leg(100, remote=99, computed=1),
        sources(0, 0, 100),
    ),
    "P loads chunks from the cache server": (
        leg(1062, l1=1024, computed=38),
        leg(1062, remote=1061, computed=1),
        sources(0, 1024, 38),
    ),
    "P has some itself, some from the cache server": (
        leg(100, device=16, l1=32, computed=52),
        leg(100, remote=99, computed=1),
        sources(16, 32, 52),
    ),
    "P has some from the cache server, some from a tier behind it": (
        leg(100, l1=32, computed=36, l2=32),
        leg(100, device=40, remote=59, computed=1),
        {"device": 40, "l1": 0, "l2": 24, "computed": 36},
    ),
    "D has some from a tier": (
        leg(100, computed=100),
        leg(100, l2=64, remote=35, computed=1),
        {"device": 0, "l1": 0, "l2": 64, "computed": 36},
    ),
    "P has some from another cache server": (
        leg(100, l1=32, computed=36, peer=32),
        leg(100, device=40, remote=59, computed=1),
        {"device": 40, "l1": 0, "peer": 24, "computed": 36},
    ),
    "D has some from another cache server": (
        leg(100, computed=100),
        leg(100, l2=32, peer=32, remote=35, computed=1),
        {"device": 0, "l1": 0, "l2": 32, "peer": 32, "computed": 36},
    ),
    "P has some from a tier and some from another server, all handed over": (
        leg(100, l2=32, peer=16, computed=52),
        leg(100, remote=99, computed=1),
        {"device": 0, "l1": 0, "l2": 32, "peer": 16, "computed": 52},
    ),
    "P has some from a tier and some from another server, a part handed over": (
        leg(100, l2=32, peer=16, computed=52),
        leg(100, device=40, remote=59, computed=1),
        {"device": 40, "l1": 0, "computed": 52, "unknown": 8},
    ),
    "P has all but the last token itself": (
        leg(100, device=99, computed=1),
        leg(100, remote=99, computed=1),
        sources(99, 0, 1),
    ),
    "D's own hit hides a part of what P computed": (
        leg(100, computed=100),
        leg(100, device=32, remote=67, computed=1),
        sources(32, 0, 68),
    ),
    "D's own hit hides P's device and a part of its l1": (
        leg(100, device=16, l1=64, computed=20),
        leg(100, device=32, remote=67, computed=1),
        sources(32, 48, 20),
    ),
    "D has all but the last token itself: nothing is handed over": (
        leg(100, l1=64, computed=36),
        leg(100, device=99, computed=1),
        sources(99, 0, 1),
    ),
    "D loads from its cache server before the hand-over": (
        leg(100, device=10, computed=90),
        leg(100, device=8, l1=32, remote=59, computed=1),
        sources(8, 32, 60),
    ),
    "a load failed on D, which computes the rest, whatever P had": (
        leg(100, l1=64, computed=36),
        leg(100, remote=40, computed=60),
        sources(0, 40, 60),
    ),
    "no handle: D computes all": (leg(100, l1=64, computed=36), leg(100, computed=100), sources(0, 0, 100)),
    "a prompt of one token": (leg(1, computed=1), leg(1, computed=1), sources(0, 0, 1)),
    "a preemption on P after which all is handed over": (
        leg(100, device=10, l1=20, computed=70, num_preemptions=1),
        leg(100, remote=99, computed=1),
        sources(10, 20, 70),
    ),
    "a preemption on P that had one source": (
        leg(100, computed=100, num_preemptions=2),
        leg(100, device=32, remote=67, computed=1),
        sources(32, 0, 68),
    ),
    "a preemption on P has mixed the order": (
        leg(100, device=10, l1=20, computed=70, num_preemptions=1),
        leg(100, device=16, remote=83, computed=1),
        sources(16, 0, 1, unknown=83),
    ),
    "a preemption on D changes nothing of its prompt": (
        leg(100, l1=64, computed=36),
        leg(100, device=16, remote=83, computed=1, num_preemptions=3),
        sources(16, 48, 36),
    ),
    "P is itself handed something, by nobody who reports": (
        leg(100, device=10, remote=20, computed=70),
        leg(100, remote=99, computed=1),
        sources(10, 0, 70, unknown=20),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_both_reports(case: str) -> None:
    prefill, decode, by_source = CASES[case]
    found = merge(prefill.num_prompt_tokens, prefill, decode)
    assert found.by_source == by_source
    assert sum(found.by_source.values()) == found.num_prompt_tokens == prefill.num_prompt_tokens
    assert found.is_sum_ok is True


def test_one_engine_alone() -> None:
    found = merge(None, None, leg(100, device=16, l1=32, computed=52))
    assert (found.num_prompt_tokens, found.by_source, found.is_sum_ok) == (100, sources(16, 32, 52), True)


@pytest.mark.parametrize(("told", "by_source"), [(None, {}), (100, {"unknown": 100})])
def test_no_report(told: int | None, by_source: dict[str, int]) -> None:
    found = merge(told, None, None)
    assert (found.num_prompt_tokens, found.by_source, found.is_sum_ok) == (told, by_source, None)


@pytest.mark.parametrize("told", [None, 100])
def test_without_the_last_engine_all_is_unknown(told: int | None) -> None:
    """P's report does not say what D had itself."""
    found = merge(told, leg(100, l1=64, computed=36), None)
    assert (found.num_prompt_tokens, found.by_source, found.is_sum_ok) == (100, {"unknown": 100}, True)


def test_without_the_prefill_engine_what_was_handed_over_is_unknown() -> None:
    found = merge(100, None, leg(100, device=32, remote=67, computed=1))
    assert (found.by_source, found.is_sum_ok) == (sources(32, 0, 1, unknown=67), True)


def test_an_aborted_request_leaves_what_it_never_came_to() -> None:
    found = merge(100, None, leg(100, device=16, computed=32, finish="aborted"))
    assert (found.by_source, found.is_sum_ok) == (sources(16, 0, 32, unknown=52), True)


def test_an_aborted_prefill_does_not_say_where_the_rest_is_from() -> None:
    aborted = leg(100, device=16, computed=32, finish="aborted")
    found = merge(100, aborted, leg(100, remote=99, computed=1))
    assert (found.by_source, found.is_sum_ok) == (sources(16, 0, 33, unknown=51), True)


@pytest.mark.parametrize(
    ("told", "prefill", "decode"),
    [
        (100, leg(100, computed=99), leg(100, remote=99, computed=1)),
        (100, leg(100, computed=100), leg(100, remote=98, computed=1)),
        (100, leg(100, computed=100), leg(100, remote=100, computed=1)),
        (100, leg(101, computed=101), leg(100, remote=99, computed=1)),
        (99, leg(100, computed=100), leg(100, remote=99, computed=1)),
        (99, None, leg(100, computed=100)),
        (99, leg(100, computed=100), None),
        (None, None, leg(100, computed=101, finish="aborted")),
    ],
)
def test_what_does_not_add_up_is_said(told: int | None, prefill: LegTokens | None, decode: LegTokens | None) -> None:
    found = merge(told, prefill, decode)
    assert found.is_sum_ok is False
    assert found.num_prompt_tokens is not None
    assert sum(found.by_source.values()) >= found.num_prompt_tokens
    assert all(number >= 0 for number in found.by_source.values())


# ---- token by token --------------------------------------------------------------------------------------------------


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[str], list[str]]:
    """A prompt, and where each engine has each of its tokens from; the last one is computed on both."""
    number = draw(st.integers(1, 40))

    def laid_out(kinds: tuple[str, ...]) -> list[str]:
        cuts = sorted(draw(st.integers(0, number - 1)) for _ in kinds[1:])
        spans = zip(kinds, [0, *cuts], [*cuts, number], strict=True)
        return [kind for kind, first, end in spans for _ in range(end - first)]

    return number, laid_out(("device", "l1", "computed")), laid_out(("device", "l1", "remote", "computed"))


def leg_of(places: list[str]) -> LegTokens:
    return leg(len(places), *(places.count(kind) for kind in ("device", "l1", "remote", "computed")))


@given(prompts())
def test_against_a_count_token_by_token(case: tuple[int, list[str], list[str]]) -> None:
    number, on_prefill, on_decode = case
    truth = [there if here == "remote" else here for there, here in zip(on_prefill, on_decode, strict=True)]
    found = merge(number, leg_of(on_prefill), leg_of(on_decode))
    assert found.by_source == sources(*(truth.count(kind) for kind in ("device", "l1", "computed")))
    assert found.is_sum_ok is True
    blind = merge(number, None, leg_of(on_decode))
    lost = on_decode.count("remote")
    assert blind.by_source == sources(*(on_decode.count(kind) for kind in ("device", "l1", "computed")), lost)


counts = st.integers(0, 60)
any_leg = st.builds(
    LegTokens,
    engine=st.just("e"),
    incarnation=st.just("life"),
    num_prompt_tokens=counts,
    device=counts,
    l1=counts,
    remote_prefill=counts,
    computed=counts,
    l2=counts,
    peer=counts,
    num_preemptions=st.integers(0, 1),
    finish=st.sampled_from(["finished", "aborted"]),
)


@given(st.none() | counts, st.none() | any_leg, st.none() | any_leg)
def test_whatever_is_reported(told: int | None, prefill: LegTokens | None, last: LegTokens | None) -> None:
    """Garbage gives no negative number and no sum that is wrong in silence."""
    found = merge(told, prefill, last)
    assert all(number >= 0 for number in found.by_source.values())
    assert (found.is_sum_ok is None) == (prefill is None and last is None)
    if found.num_prompt_tokens is None:
        assert found.by_source == {}
    elif sum(found.by_source.values()) != found.num_prompt_tokens:
        assert found.is_sum_ok is False


# ---- collecting ------------------------------------------------------------------------------------------------------


def test_reports_of_one_leg_add_up() -> None:
    reported = ReportedTokens()
    reported.add("decode", leg(10, device=4, computed=6))
    reported.add("decode", leg(20, l1=16, computed=4, num_preemptions=1, finish="aborted"))
    whole = leg(30, device=4, l1=16, computed=10, num_preemptions=1, finish="aborted", num_requests=2)
    assert reported.leg("decode") == reported.decode == whole
    assert reported.leg("prefill") is None
    reported.add("prefill", leg(10, computed=10))
    assert reported.leg("prefill") == leg(10, computed=10)
    assert reported.decode == whole


def test_a_leg_as_json() -> None:
    one = leg(10, device=4, computed=6)
    values = shown(one)
    assert json.loads(json.dumps(values)) == {
        "engine": "e",
        "incarnation": "life",
        "num_prompt_tokens": 10,
        "device": 4,
        "l1": 0,
        "remote_prefill": 0,
        "l2": 0,
        "peer": 0,
        "computed": 6,
        "num_preemptions": 0,
        "finish": "finished",
        "num_requests": 1,
    }
    assert shown(None) is None
    assert shown(replace(one, l1=3)) != values


def test_metrics_are_read_as_they_stand() -> None:
    registry, up = CollectorRegistry(), {"http://a": True, "http://b": False}
    metrics = TokenMetrics(registry, lambda: up)
    metrics.by_source.update({"l1": 1024, "computed": 38})
    metrics.missing["decode"] += 1
    metrics.reports["matched"] += 2
    metrics.num_sums_wrong += 1

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"antiphon_router_{name}", labels)

    assert value("prompt_tokens_total", source="l1") == 1024
    assert value("prompt_tokens_total", source="computed") == 38
    assert value("prompt_tokens_total", source="device") is None
    assert value("token_reports_missing_total", leg="decode") == 1
    assert value("token_reports_total", result="matched") == 2
    assert value("token_sums_wrong_total") == 1
    assert value("cache_server_up", server="http://a") == 1
    assert value("cache_server_up", server="http://b") == 0
    metrics.by_source["l1"] += 1
    assert value("prompt_tokens_total", source="l1") == 1025
