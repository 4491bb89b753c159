"""W3C trace context: what is one, and what is made of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.observe.trace_context import TRACEPARENT_CHARS, SpanContext, child_of, parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

contexts = st.builds(SpanContext, st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1), st.booleans())


@given(contexts)
def test_what_is_written_is_read_again(context: SpanContext) -> None:
    text = context.traceparent
    assert len(text) == TRACEPARENT_CHARS
    assert parse_traceparent(text) == context


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-ff", True),
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
    ],
)
def test_what_is_a_traceparent(text: str, expected: bool) -> None:
    found = parse_traceparent(text)
    assert found == SpanContext(int(TRACE, 16), int(SPAN, 16), expected)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-01.more",
        "0" * 55,
    ],
)
def test_what_is_none(text: str | None) -> None:
    assert parse_traceparent(text) is None


@given(st.text(alphabet="0123456789abcdefABg-\n ", max_size=80) | st.text(max_size=80))
def test_whatever_comes_is_read_or_left(text: str) -> None:
    found = parse_traceparent(text)
    if found is not None:
        assert found.trace_id
        assert found.span_id
        assert text[3:35] == f"{found.trace_id:032x}"
        assert text[36:52] == f"{found.span_id:016x}"


@given(contexts, st.integers())
def test_a_part_of_a_trace_keeps_it(parent: SpanContext, seed: int) -> None:
    part = child_of(parent, random.Random(seed), is_sampled=not parent.is_sampled)
    assert (part.trace_id, part.is_sampled) == (parent.trace_id, parent.is_sampled)
    assert part.span_id


def test_a_new_trace_has_ids_of_its_own() -> None:
    chance = random.Random(1)
    made = [child_of(None, chance, is_sampled=number % 2 == 0) for number in range(1000)]
    assert len({context.trace_id for context in made}) == len({context.span_id for context in made}) == 1000
    assert [context.is_sampled for context in made[:2]] == [True, False]
