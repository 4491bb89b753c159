"""The number of cached tokens in an answer's bytes: replaced where it stands in usage, and nowhere else."""

from __future__ import annotations

import json

import pytest

from antiphon.protocol.usage import output_tokens, with_cache_read, with_cached_tokens, with_cached_tokens_at_end

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


RESPONSE_USAGE = (
    '"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":8,"cache_write_tokens":0,'
    '"input_tokens_per_turn":[9],"cached_tokens_per_turn":[8]},"output_tokens":2}'
)


def test_of_a_response_the_last_usage_is_meant_and_its_turn_too() -> None:
    """A tool's schema is the client's, and may hold whatever a usage object holds."""
    client = '{"name":"f","parameters":{"default":{"usage":{"input_tokens_details":{"cached_tokens":1}}}}}'
    body = f'{{"tools":[{client}],{RESPONSE_USAGE},"user":null}}'
    changed = with_cached_tokens_at_end(body.encode(), 3).decode()
    assert changed == body.replace('"cached_tokens":8', '"cached_tokens":3').replace("[8]", "[3]")


def test_of_a_response_without_usage_nothing_changes() -> None:
    body = b'event: response.created\ndata: {"usage":null,"x":"\\"cached_tokens\\""}\n\n'
    assert with_cached_tokens_at_end(body, 3) == body


@pytest.mark.parametrize(
    ("usage", "number", "said"),
    [
        ({"input_tokens": 1, "output_tokens": 5, "cache_read_input_tokens": 99}, 40, (60, 40)),
        ({"input_tokens": 0, "cache_creation_input_tokens": 1, "cache_read_input_tokens": 99}, 0, (99, 0)),
        ({"input_tokens": 1, "output_tokens": 5, "cache_read_input_tokens": 99}, None, (100, None)),
        ({"cache_read_input_tokens": 99, "input_tokens": 1}, 200, (0, 200)),
    ],
)
@pytest.mark.parametrize("is_event", [False, True], ids=["whole", "event"])
def test_what_a_message_read_from_the_cache(
    usage: dict[str, int], number: int | None, said: tuple[int, int | None], is_event: bool
) -> None:
    """The sum stays: a message's input tokens are those that no cache had a part in."""
    before = {"type": "message_delta", "usage": usage}
    text = json.dumps(before)
    changed = with_cache_read((f"event: message_delta\ndata: {text}\n\n" if is_event else text).encode(), number)
    after = json.loads(changed.decode().removeprefix("event: message_delta\ndata: "))
    read = {"input_tokens": said[0], "cache_read_input_tokens": said[1]}
    assert after == before | {"usage": usage | read}
    assert with_cache_read(changed, number) == changed or number is None  # nothing is counted twice


def test_of_a_whole_message_the_last_usage_is_meant() -> None:
    """The input of a tool is JSON of the model's."""
    tool = '{"type":"tool_use","input":{"usage":{"input_tokens":1,"cache_read_input_tokens":2}}}'
    body = f'{{"content":[{tool}],"usage":{{"input_tokens":1,"output_tokens":3,"cache_read_input_tokens":9}}}}'
    changed = with_cache_read(body.encode(), 4).decode()
    assert changed == body.replace('"input_tokens":1,"output', '"input_tokens":6,"output').replace(":9}", ":4}")


@pytest.mark.parametrize(
    ("body", "number"),
    [
        (b'{"choices":[{"text":"\\"completion_tokens\\":9"}],%b}' % USAGE.encode(), 16),
        (b'{"usage": {"input_tokens": 9, "output_tokens" : 8}}', 8),
        (b'{"usage":{"completion_tokens":null}}', None),
        (b'{"usage":{"completion_tokens":99999999999}}', None),
        (b'{"choices":[{"text":"\\"completion_tokens\\":9"}]}', None),
        (b"", None),
    ],
)
def test_tokens_of_a_whole_answer(body: bytes, number: int | None) -> None:
    for form in (body, bytearray(body), memoryview(body)):
        assert output_tokens(form) == number
