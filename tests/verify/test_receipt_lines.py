"""What the demo prints of a receipt: prompt tokens by source, in words, whatever is known of them."""

from __future__ import annotations

from typing import Any

import pytest

from antiphon.verify.questions import QUESTIONS, Answer

KNOWN = {"reported_by": "cache_server", "state": "complete", "missing": [], "sum_ok": True}
NO_PREFILL = " (no report of prefill)"
WRONG = " (the reports do not add up)"


def lines(tokens: dict[str, Any]) -> list[str]:
    times = {"prefill": 1.0, "handover": None, "first_token": None, "total": 2.0}
    receipt = {"path": "pd", "reason": "default", "prefill": "p:1", "decode": "d:1", "ms": times, "tokens": tokens}
    return Answer(QUESTIONS[0], "text", "id", receipt).receipt_lines()


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (
            KNOWN | {"prompt": 1062, "by_source": {"device": 0, "l1": 1024, "computed": 38}},
            "1062 prompt tokens: 1024 from the cache server, 38 computed, 0 from the engine's own cache",
        ),
        (
            {"prompt": 19, "by_source": {"device": 0, "computed": 19}, "reported_by": "usage"},
            "19 prompt tokens: 19 computed, 0 from the engine's own cache",
        ),
        (
            KNOWN
            | {"missing": ["prefill"], "prompt": 9, "by_source": {"device": 0, "l1": 0, "computed": 1, "unknown": 8}},
            "9 prompt tokens: 0 from the cache server, 1 computed, 0 from the engine's own cache, 8 unknown"
            + NO_PREFILL,
        ),
        (
            KNOWN | {"missing": ["prefill", "decode"], "prompt": 9, "by_source": {"unknown": 9}, "sum_ok": None},
            "9 prompt tokens: 9 unknown (no report of prefill and decode)",
        ),
        ({"prompt": None, "by_source": {}, "reported_by": None}, "unknown prompt tokens: sources unknown"),
        (
            KNOWN | {"prompt": 3, "by_source": {"device": 0, "l1": 0, "computed": 4}, "sum_ok": False},
            f"3 prompt tokens: 0 from the cache server, 4 computed, 0 from the engine's own cache{WRONG}",
        ),
    ],
)
def test_tokens_by_source_in_words(tokens: dict[str, Any], line: str) -> None:
    assert lines(tokens)[-1].strip() == line
