"""The number of cached tokens in an answer's bytes: replaced where it stands in usage, and nowhere else."""

from __future__ import annotations

import json

import pytest

from antiphon.protocol.usage import with_cached_tokens

USAGE = (
    '"usage":{"prompt_tokens":64,"total_tokens":80,"prompt_tokens_details":{"cached_tokens":63},"completion_tokens":16}'
)


@pytest.mark.parametrize(("number", "said"), [(7, 7), (0, 0), (None, None)])
def test_number_in_usage_is_replaced_and_nothing_else(number: int | None, said: int | None) -> None:
    body = ('{"id":"x","choices":[{"text":"é \\"usage\\":{\\"cached_tokens\\":63}"}],' + USAGE + "}").encode()
    changed = with_cached_tokens(body, number)
    before, after = json.loads(body), json.loads(changed)
    assert after["usage"]["prompt_tokens_details"].pop("cached_tokens") == said
    before["usage"]["prompt_tokens_details"].pop("cached_tokens")
    assert before == after
    head, _, _ = body.partition(b'"cached_tokens":63}')
    assert changed.startswith(head)


def test_input_tokens_details_and_spaces() -> None:
    body = b'{"usage": {"input_tokens": 9, "input_tokens_details": {"audio": 0, "cached_tokens": 8}}}'
    assert json.loads(with_cached_tokens(body, 3))["usage"]["input_tokens_details"] == {"audio": 0, "cached_tokens": 3}


@pytest.mark.parametrize(
    "body",
    [
        b'{"usage":{"prompt_tokens":3,"prompt_tokens_details":null}}',
        b'{"usage":null,"metadata":{"cached_tokens":5}}',
        b'data: {"usage":{"prompt_tokens_details":{}}}\n\n',
        b"data: [DONE]\n\n",
    ],
)
def test_where_there_is_none_nothing_changes(body: bytes) -> None:
    assert with_cached_tokens(body, 1) == body


def test_every_event_of_a_stream() -> None:
    event = f"data: {{{USAGE}}}\n\n".encode()
    assert with_cached_tokens(event * 3, 2).count(b'"cached_tokens":2}') == 3
