"""The tables of the document are the tables of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.routing.endpoint import TIERS
from antiphon.routing.machine import TABLE, event_table
from antiphon.routing.policies import POLICIES
from antiphon.routing.states import (
    MEANINGS,
    OUTCOMES,
    TRANSITIONS,
    EndpointState,
    Stage,
    assert_listed,
    transition_tables,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "routing.md"


@pytest.mark.parametrize(
    ("mark", "wanted", "made_by"),
    [
        ("states", transition_tables(), "antiphon.routing.states import transition_tables as table"),
        pytest.param(
            "events",
            event_table(),
            "antiphon.routing.machine import event_table as table",
            marks=pytest.mark.interpreted,  # it is made from docstrings, which the compiled form does not have
        ),
    ],
)
def test_document_shows_the_tables_of_the_code(mark: str, wanted: str, made_by: str) -> None:
    text = DOCUMENT.read_text()
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    shown = text[text.index(begin) + len(begin) : text.index(end)]
    assert shown.strip() == wanted.strip(), (
        f'replace what stands between the marks by the output of: python -c "from {made_by}; print(table())"'
    )


def test_document_names_every_policy() -> None:
    text = DOCUMENT.read_text()
    assert [name for name in POLICIES if f"| `{name}` |" not in text] == []


def test_every_state_has_a_meaning_a_way_in_and_a_way_out() -> None:
    states = {*EndpointState, *Stage}
    assert MEANINGS.keys() == states
    assert TIERS.keys() == set(EndpointState)
    assert states - {new for _, new in TRANSITIONS} == {Stage.RECEIVED}
    assert states - {old for old, _ in TRANSITIONS} == {*OUTCOMES, EndpointState.REMOVED}
    assert all(type(old) is type(new) for old, new in TRANSITIONS)
    assert TABLE.keys() == set(Stage)


def test_an_unlisted_transition_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="no transition from streaming to awaiting"):
        assert_listed(Stage.STREAMING, Stage.AWAITING)
