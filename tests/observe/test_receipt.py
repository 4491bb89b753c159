"""The receipt as JSON, and the bound of the ring."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.observe.receipt import Receipt, ReceiptRing
from antiphon.observe.token_sources import LegTokens, ReportedTokens


def receipt(number: int) -> Receipt:
    return Receipt(f"id-{number}", "/v1/completions", 1.5)


def test_a_receipt_at_its_start() -> None:
    """The shape that clients of /receipts rely on: every key is always there."""
    assert receipt(1).as_dict() == {
        "id": "id-1",
        "route": "/v1/completions",
        "created_unix_s": 1.5,
        "path": "",
        "reason": "",
        "handoff": "none",
        "handle": None,
        "num_held_tokens": None,
        "stream": False,
        "client_request_id": None,
        "engine_request_id": None,
        "trace_id": None,
        "tenant": None,
        "prefill": None,
        "decode": None,
        "status": None,
        "outcome": None,
        "error": None,
        "code": None,
        "tokens": {"prompt": None, "by_source": {}, "reported_by": None},
        "ms": {"prefill": None, "handover": None, "first_token": None, "total": None},
        "num_events": 0,
    }


def test_times_are_rounded_to_microseconds_and_zero_stays() -> None:
    one = receipt(1)
    one.created_unix_s, one.prefill_ms, one.first_token_ms = 1700000000.123456, 12.3456789, 0.0
    shown = one.as_dict()
    assert shown["created_unix_s"] == 1700000000.123
    assert shown["ms"] == {"prefill": 12.346, "handover": None, "first_token": 0.0, "total": None}
    assert one.as_dict() == shown
    assert json.loads(json.dumps(shown)) == shown


def test_two_receipts_share_nothing() -> None:
    first, second = receipt(1), receipt(2)
    first.tokens_by_source["device"] = 3
    assert second.tokens_by_source == {}


@pytest.mark.parametrize(
    ("prompt", "cached", "placed", "shown"),
    [
        (None, None, None, (None, {}, None)),
        (None, None, 9, (9, {"unknown": 9}, None)),
        (8, None, 9, (8, {"unknown": 8}, None)),
        (8, 0, 9, (8, {"device": 0, "computed": 8}, "usage")),
        (8, 6, None, (8, {"device": 6, "computed": 2}, "usage")),
    ],
)
def test_every_token_that_is_known_of_has_a_source(
    prompt: int | None, cached: int | None, placed: int | None, shown: tuple[int | None, dict[str, int], str | None]
) -> None:
    one = receipt(1)
    one.prompt_tokens, one.cached_tokens, one.num_placed_tokens = prompt, cached, placed
    assert one.as_dict()["tokens"] == dict(zip(("prompt", "by_source", "reported_by"), shown, strict=True))


@given(st.integers(0, 5), st.integers(0, 20), st.integers(0, 8))
def test_the_ring_keeps_the_latest(receipts_max: int, num_added: int, num_asked: int) -> None:
    ring = ReceiptRing(receipts_max)
    added = [receipt(number) for number in range(num_added)]
    for each in added:
        ring.add(each)
        assert len(ring) <= receipts_max
    kept = added[max(0, num_added - receipts_max) :]
    assert len(ring) == len(kept)
    assert [ring.get(each.id) for each in added] == [each if each in kept else None for each in added]
    assert ring.latest(num_asked) == list(reversed(kept))[:num_asked]


def test_a_receipt_can_be_filled_in_after_it_was_added() -> None:
    ring = ReceiptRing(2)
    one = receipt(1)
    ring.add(one)
    one.outcome = "completed"
    found = ring.get("id-1")
    assert found is not None
    assert found.outcome == "completed"
    assert ring.get("id-2") is None


def test_a_negative_size_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        ReceiptRing(-1)


@pytest.mark.parametrize(
    ("handed_over_by", "num_handed_over", "says"),
    [
        (None, None, "none"),
        (None, 0, "none"),
        ("cache", None, None),
        ("cache", 512, "cache"),
        ("cache", 0, "none"),
        ("nixl", 512, "nixl"),
        ("nixl", 0, "none"),
        ("nixl", None, None),
    ],
)
def test_the_hand_over_that_served_is_the_one_that_the_decode_engine_had_tokens_from(
    handed_over_by: str | None, num_handed_over: int | None, says: str | None
) -> None:
    one = receipt(1)
    one.handed_over_by = handed_over_by
    if num_handed_over is not None:
        one.reported = ReportedTokens()
        one.reported.add(
            "decode", LegTokens("d", "1", 600, 0, 0, num_handed_over, 600 - num_handed_over, 0, "finished")
        )
    assert one.handoff == says
    assert one.as_dict()["handle"] == one.handed_over_by
