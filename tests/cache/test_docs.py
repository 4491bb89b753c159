"""The tables of the document are the tables of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from antiphon.cache.states import (
    MEANINGS,
    TRANSITIONS,
    ChunkState,
    LeaseState,
    SlabState,
    assert_listed,
    transition_tables,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "cache.md"
BEGIN, END = "<!-- states: begin -->", "<!-- states: end -->"


def test_document_shows_the_tables_of_the_code() -> None:
    text = DOCUMENT.read_text()
    shown = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert shown.strip() == transition_tables().strip(), (
        "replace what stands between the marks by the output of: "
        'python -c "from antiphon.cache.states import transition_tables; print(transition_tables())"'
    )


def test_every_state_has_a_meaning_and_a_way_in() -> None:
    states = {state for kind in (SlabState, ChunkState, LeaseState) for state in kind}
    assert MEANINGS.keys() == states
    first = {SlabState.ABSENT, ChunkState.INCOMPLETE, LeaseState.HELD}
    assert states - {new for _, new in TRANSITIONS} <= first
    assert all(type(old) is type(new) for old, new in TRANSITIONS)


def test_an_unlisted_transition_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="no transition from committed to absent"):
        assert_listed(SlabState.COMMITTED, SlabState.ABSENT)


def test_every_test_that_the_document_names_exists() -> None:
    text = DOCUMENT.read_text()
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", text)
    assert [f"W{number}" in text for number in range(1, 10)] == [True] * 9
    assert len(named) >= 10
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (DOCUMENT.parents[1] / path).read_text(), re.MULTILINE), name
