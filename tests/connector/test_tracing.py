"""The trace of a request goes with its lookup and its stores, where vLLM tells it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.connector.compat import TRACEPARENT_CHARS_MAX, traceparent_of
from antiphon.protocol import cache as calls
from tests.connector.harness import Harness

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PROMPT = list(range(100, 128))


def seen_by(harness: Harness) -> list[calls.Body]:
    """What the sessions are asked from here on."""
    seen: list[calls.Body] = []
    for client in harness.clients:
        session: Any = client.session
        submit = session.submit

        def watched(body: calls.Body, *arguments: Any, submit: Any = submit, **options: Any) -> Any:
            seen.append(body)
            return submit(body, *arguments, **options)

        session.submit = watched
    return seen


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (None, ""),
        ({}, ""),
        ({"traceparent": TRACEPARENT, "tracestate": "a=1"}, TRACEPARENT),
        ({"traceparent": "x" * (TRACEPARENT_CHARS_MAX + 1)}, ""),
        ({"traceparent": 5}, ""),
    ],
)
def test_the_trace_of_a_request(headers: Any, expected: str) -> None:
    request: Any = SimpleNamespace(trace_headers=headers)
    assert traceparent_of(request) == expected


def test_a_vllm_that_tells_no_trace_tells_none() -> None:
    request: Any = SimpleNamespace()
    assert traceparent_of(request) == ""


@pytest.mark.parametrize("text", [TRACEPARENT, ""])
def test_lookups_and_stores_carry_it(new_harness: Callable[..., Harness], text: str) -> None:
    harness = new_harness()
    seen = seen_by(harness)
    harness.run(PROMPT, trace_headers={"traceparent": text} if text else None)
    lookups = [body for body in seen if isinstance(body, calls.Lookup)]
    stores = [body for body in seen if isinstance(body, calls.Reserve)]
    assert lookups
    assert stores
    assert {body.traceparent for body in (*lookups, *stores)} == {text}
    harness.assert_idle()
