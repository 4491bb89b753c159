"""What a prefill engine is asked for, and what is read of its answer."""

from __future__ import annotations

import json

import pytest

from antiphon.core.errors import ProtocolError
from antiphon.protocol.body import scan
from antiphon.protocol.handoff import (
    COMPLETION,
    GENERATE,
    MESSAGE,
    PARAMS_OF,
    PREFILL_PARAMS,
    RESPONSE,
    Handoff,
)
from antiphon.protocol.prefill_answer import prompt_counts, read_prefill_answer

PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_body(client: str) -> dict[str, object]:
    body = scan(client.encode())
    value: dict[str, object] = json.loads(b"".join(COMPLETION.prefill_body(body)))
    return value


def test_prefill_asks_for_one_token_and_a_handle() -> None:
    assert json.loads(PREFILL_PARAMS) == PARAMS
    assert prefill_body('{"prompt":"x"}') == {
        "prompt": "x",
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "kv_transfer_params": PARAMS,
    }


def test_prefill_overrides_what_would_make_it_more_than_a_prefill() -> None:
    client = (
        '{"messages":[],"max_tokens":900,"max_completion_tokens":800,"min_tokens":700,"n":1,"stream":true,'
        '"stream_options":{"include_usage":true},"logprobs":true,"top_logprobs":5,"kv_transfer_params":null,'
        '"temperature":0.7,"stop":["a"],"seed":18446744073709551616,"tools":[{"strict":true}]}'
    )
    assert prefill_body(client) == json.loads(client) | {
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "stream_options": None,
        "kv_transfer_params": PARAMS,
    }


@pytest.mark.parametrize("key", ["max_completion_tokens", "n", "stream_options", "logprobs", "top_logprobs"])
def test_fields_that_the_client_did_not_send_are_not_added(key: str) -> None:
    """A completion has no max_completion_tokens and some engines refuse what they do not know."""
    assert key not in prefill_body('{"prompt":"x"}')
    assert key in prefill_body(f'{{"prompt":"x","{key}":1}}')


def test_drain_pulls_with_one_token() -> None:
    body = scan(b'{"prompt":"x","max_tokens":9,"stream":true,"stream_options":{"include_usage":true}}')
    assert json.loads(b"".join(body.splice(COMPLETION.drain_fields(body, b'{"remote_port":1}')))) == {
        "prompt": "x",
        "max_tokens": 1,
        "stream": False,
        "stream_options": None,
        "min_tokens": 1,
        "kv_transfer_params": {"remote_port": 1},
    }


@pytest.mark.parametrize(
    ("handoff", "client", "changed"),
    [
        (RESPONSE, '{"input":"x"}', {"max_output_tokens": 1, "stream": False, "store": False}),
        (
            RESPONSE,
            (
                '{"input":"x","max_output_tokens":99,"stream":true,"store":true,"tools":[{"type":"function"}],'
                '"text":{"format":{"type":"json_object"}},"n":2,"max_tokens":5}'
            ),
            {"max_output_tokens": 1, "stream": False, "store": False},
        ),
        (
            MESSAGE,
            (
                '{"messages":[],"max_tokens":99,"stream":true,"tools":[{"name":"f"}],"tool_choice":{"type":"any"},'
                '"thinking":{"type":"enabled","budget_tokens":50},"stop_sequences":["a"]}'
            ),
            {"max_tokens": 1, "stream": False},
        ),
        (
            GENERATE,
            (
                '{"token_ids":[1,2],"sampling_params":{"max_tokens":99,"temperature":0.70,"n":1,"stop":["a"]},'
                '"stream":true,"stream_options":{"include_usage":true}}'
            ),
            {
                "sampling_params": {"max_tokens": 1, "min_tokens": 1, "temperature": 0.7, "n": 1, "stop": ["a"]},
                "stream": False,
                "stream_options": None,
            },
        ),
        (
            GENERATE,
            '{"sampling_params":{"max_tokens":9,"sampling_params":{"max_tokens":9}},"sampling_params":{ }}',
            {"sampling_params": {"max_tokens": 1, "min_tokens": 1}, "stream": False},
        ),
        (GENERATE, '{"token_ids":[1],"sampling_params":7}', {"stream": False}),
        (GENERATE, '{"token_ids":[1]}', {"stream": False}),
    ],
)
def test_prefill_of_the_further_apis(handoff: Handoff, client: str, changed: dict[str, object]) -> None:
    body = scan(client.encode(), handoff.replaced)
    made = json.loads(b"".join(handoff.prefill_body(body)))
    assert made == json.loads(client) | changed | {"kv_transfer_params": PARAMS}


def test_nested_limits_are_replaced_in_place_and_all_else_is_kept_byte_for_byte() -> None:
    client = b'{"sampling_params": {"temperature": 0.70, "max_tokens" :9, "seed":18446744073709551616 , "x":"\\ud800"}}'
    body = scan(client, GENERATE.replaced)
    made = b"".join(GENERATE.prefill_body(body))
    wanted = b'{"sampling_params": {"temperature": 0.70, "max_tokens" :1, "seed":18446744073709551616 , "x":"\\ud800",'
    assert made.startswith(wanted + b'"min_tokens":1},"stream":false,"kv_transfer_params":')


def test_drain_of_a_message_has_no_thinking_budget() -> None:
    """vLLM holds it against max_tokens, and would refuse the request: the KV would stay where it is."""
    client = b'{"messages":[],"max_tokens":99,"thinking":{"type":"enabled","budget_tokens":50}}'
    body = scan(client, MESSAGE.replaced)
    fields = MESSAGE.drain_fields(body, b'{"remote_port":1}')
    assert json.loads(b"".join(body.splice(fields))) == {
        "messages": [],
        "max_tokens": 1,
        "stream": False,
        "thinking": None,
        "kv_transfer_params": {"remote_port": 1},
    }


def test_params_of_the_answer_are_kept_as_they_were_written() -> None:
    params = b'{"remote_block_ids":[[1, 2]], "x": 1.10, "big":123456789012345678901234567890, "\\u006b":"\xc3\xa9"}'
    answer = read_prefill_answer(b'{"id":"x","kv_transfer_params":' + params + b',"usage":{"prompt_tokens":7}}')
    assert answer.kv_transfer_params == params
    assert answer.prompt_tokens == 7
    assert answer.cached_tokens is None


@pytest.mark.parametrize(
    ("raw", "prompt_tokens", "cached_tokens"),
    [
        (b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}', 9, 4),
        (b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}', 9, None),
        (b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":null}}}', 9, None),
        (b'{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4}}}', 9, 4),
        (b'{"usage":{"input_tokens":9,"output_tokens":1,"cache_read_input_tokens":4}}', 13, 4),
        (b'{"usage":{"input_tokens":0,"cache_read_input_tokens":4,"cache_creation_input_tokens":5}}', 9, 4),
        (b'{"usage":{"input_tokens":9,"output_tokens":1}}', 9, None),
        (b'{"usage":null,"kv_transfer_params":null}', None, None),
        (b"{}", None, None),
    ],
)
def test_counts_that_are_there_are_read(raw: bytes, prompt_tokens: int | None, cached_tokens: int | None) -> None:
    answer = read_prefill_answer(raw)
    assert (answer.prompt_tokens, answer.cached_tokens) == (prompt_tokens, cached_tokens)
    assert answer.kv_transfer_params is None


@pytest.mark.parametrize(
    "raw",
    [b"", b"<html>", b"[]", b"null", b'{"usage":', b'{"usage":[]}', b'{"usage":{"prompt_tokens":"7"}}'],
)
def test_an_answer_that_is_no_completion_is_an_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a completion"):
        read_prefill_answer(raw)


def test_what_a_decode_engine_would_refuse_is_left_for_the_prefill_engine_to_refuse() -> None:
    for client in ('{"stream_options":{}}', '{"stream":false,"stream_options":{}}', '{"top_logprobs":99}'):
        kept = {key: value for key, value in json.loads(client).items() if key != "stream"}
        assert kept.items() <= prefill_body(client).items()


@pytest.mark.parametrize(
    ("answer", "counts"),
    [
        (b'{"id":"x","usage":{"prompt_tokens":64,"prompt_tokens_details":{"cached_tokens":63}}}', (64, 63)),
        (b'{"id":"x","usage" : {"prompt_tokens":64,"prompt_tokens_details":null,"completion_tokens":2}}', (64, None)),
        (b'{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":0},"output_tokens":1}}', (9, 0)),
        (b'{"usage":{"input_tokens":9,"cache_read_input_tokens":5,"output_tokens":1}}', (14, 5)),
        (b'data: {"usage":{"prompt_tokens":3}}\n\ndata: {"usage":{"prompt_tokens":4}}\n\ndata: [DONE]\n\n', (4, None)),
        (b'{"text":"\\"usage\\":{\\"prompt_tokens\\":3}"}', (None, None)),
        (b'{"usage":null}', (None, None)),
        (b"data: [DONE]\n\n", (None, None)),
        (b"", (None, None)),
        (b'{"usage":{"prompt_tokens":"3"}}', (None, None)),
        (b'{"usage":{"prompt_tokens":-3}}', (None, None)),
        (b'{"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}', (3, None)),
        (b'{"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":-1}}}', (3, None)),
        (b'{"usage":{"prompt_tokens":3,}}', (None, None)),
        (b'{"usage":{"prompt_tokens":3}}' + b" " * 5000, (None, None)),
    ],
)
def test_the_last_usage_of_an_answer_is_read(answer: bytes, counts: tuple[int | None, int | None]) -> None:
    assert prompt_counts(answer) == prompt_counts(bytearray(answer)) == counts


def test_a_prefill_whose_kv_goes_through_cache_servers_asks_for_that_and_for_nothing_of_nixl() -> None:
    for handoff in (COMPLETION, RESPONSE, MESSAGE, GENERATE):
        for client in (b'{"prompt":"x"}', b'{"prompt":"x","kv_transfer_params":null}'):
            body = scan(client, handoff.replaced)
            usual = json.loads(b"".join(handoff.prefill_body(body)))
            made = json.loads(b"".join(handoff.prefill_body(body, PARAMS_OF["cache"])))
            assert made == usual | {"kv_transfer_params": {"antiphon_handoff": True}}
            assert json.loads(b"".join(handoff.prefill_body(body, PARAMS_OF["nixl"]))) == usual
