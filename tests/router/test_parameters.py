"""What clients ask for, API by API: it goes through prefill and decode with nothing changed but what makes a prefill of
it, or one engine serves it alone and the answer says why, or it is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from antiphon.protocol.handoff import PREFILL_PARAMS
from tests.router.apis import ALL, CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, Spoken, prefills, send, streams
from tests.router.scripted import HANDLE, connected, engine, routing

TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": {"type": "object"}}}
PLAIN = {
    COMPLETIONS.path: {"max_tokens": 1, "min_tokens": 1, "stream": False},
    CHAT.path: {"max_tokens": 1, "min_tokens": 1, "stream": False},
    RESPONSES.path: {"max_output_tokens": 1, "stream": False, "store": False},
    MESSAGES.path: {"max_tokens": 1, "stream": False},
    GENERATE.path: {"stream": False},
}
"""What a prefill asks for, whatever the client asks for."""

THROUGH_BOTH: list[tuple[Spoken, dict[str, Any], dict[str, Any]]] = [
    # (API, the client's fields, what the prefill's differ in beside PLAIN)
    *((api, {"n": 1}, {}) for api in (COMPLETIONS, CHAT)),
    *((api, {"min_tokens": 4}, {}) for api in (COMPLETIONS, CHAT)),
    *((api, {"stop": ["a", "b"], "stop_token_ids": [1], "ignore_eos": True}, {}) for api in (COMPLETIONS, CHAT)),
    *((api, {"structured_outputs": {"regex": "a+"}, "guided_json": {}}, {}) for api in (COMPLETIONS, CHAT, RESPONSES)),
    *((api, {"response_format": SCHEMA}, {}) for api in (COMPLETIONS, CHAT)),
    *((api, {"stream_options": {"include_usage": True}}, {"stream_options": None}) for api in (COMPLETIONS, CHAT)),
    *((api, {"echo": False, "use_beam_search": False, "prompt_logprobs": None}, {}) for api in (COMPLETIONS, CHAT)),
    *((api, {"truncate_prompt_tokens": 10, "best_of": 1}, {}) for api in (COMPLETIONS, CHAT)),
    (COMPLETIONS, {"logprobs": 3, "return_token_ids": True, "add_special_tokens": False}, {}),
    (COMPLETIONS, {"prompt": [1, 2, 3]}, {}),
    (COMPLETIONS, {"seed": 1, "user": "u", "cache_salt": "s", "priority": 0, "session_id": "x"}, {}),
    (CHAT, {"max_completion_tokens": 9}, {"max_completion_tokens": 1}),
    (CHAT, {"logprobs": True, "top_logprobs": 5, "logit_bias": {"1": -1.5}}, {}),
    (CHAT, {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False}, {}),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, {}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"}, {}),
    (RESPONSES, {"instructions": "i", "store": True, "metadata": {"a": "b"}, "previous_response_id": None}, {}),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": {}}], "tool_choice": "required"}, {}),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}, "truncation": "disabled"}, {}),
    (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "stop": "x"}, {}),
    (MESSAGES, {"system": "s", "stop_sequences": ["x"], "top_k": 3, "metadata": {"user_id": "u"}}, {}),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}}, {}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 4}}, {}),
    *(
        (
            GENERATE,
            {"sampling_params": {"max_tokens": 9, "temperature": 0.5, "stop": ["a"], "logprobs": 2} | given},
            {
                "sampling_params": {"max_tokens": 1, "min_tokens": 1, "temperature": 0.5, "stop": ["a"], "logprobs": 2}
                | made
            },
        )
        for given, made in (({}, {}), ({"n": 1, "min_tokens": 3}, {"n": 1}), ({"seed": None}, {"seed": None}))
    ),
    (
        GENERATE,
        {"stream_options": {"include_usage": True}, "output_mode": "text"},
        {"stream_options": None, "sampling_params": {"max_tokens": 1, "min_tokens": 1}},
    ),
]
ALONE: list[tuple[Spoken, dict[str, Any], str]] = [
    *((api, {"n": 2}, "n") for api in (COMPLETIONS, CHAT)),
    *((api, {"best_of": 2}, "best_of") for api in (COMPLETIONS, CHAT)),
    *((api, {"use_beam_search": True, "n": 1}, "beam_search") for api in (COMPLETIONS, CHAT)),
    *((api, {"echo": True}, "echo") for api in (COMPLETIONS, CHAT)),
    *((api, {"prompt_logprobs": 0}, "prompt_logprobs") for api in (COMPLETIONS, CHAT)),
    *((api, {"truncate_prompt_tokens": -1}, "truncation") for api in (COMPLETIONS, CHAT)),
    (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt_list"),
    (COMPLETIONS, {"prompt": ["a"]}, "prompt_list"),
    (COMPLETIONS, {"prompt": [[1, 2], [3]]}, "prompt_list"),
    (COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
    (RESPONSES, {"truncation": "auto"}, "truncation"),
    (RESPONSES, {"truncation": None}, "truncation"),
    (RESPONSES, {"tools": [{"type": "web_search_preview"}]}, "builtin_tools"),
    (RESPONSES, {"tools": [{"type": "mcp", "server_label": "x"}]}, "builtin_tools"),
    (MESSAGES, {"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    (GENERATE, {"sampling_params": {"n": 2}}, "n"),
    (GENERATE, {"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    (GENERATE, {"sampling_params": {"prompt_logprob_token_ids": [[1]]}}, "prompt_logprobs"),
]


def label(value: object) -> str | None:
    return value.path if isinstance(value, Spoken) else json.dumps(value)[:60]


def test_every_api_is_asked() -> None:
    assert {api.path for api, *_ in THROUGH_BOTH} == {api.path for api, *_ in ALONE} | {CHAT.path} == set(PLAIN)
    assert set(PLAIN) == {api.path for api in ALL}


@pytest.mark.parametrize(("api", "fields", "changed"), THROUGH_BOTH, ids=label)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_through_both(api: Spoken, fields: dict[str, Any], changed: dict[str, Any], stream: bool) -> None:
    if not stream and "stream_options" in fields:
        changed = changed | {"stream_options": fields["stream_options"]}  # without a stream an engine may refuse them
    sent = api.body | fields | {"stream": stream}
    async with engine(prefills) as p, engine(streams(api)) as d, routing([p], [d]) as router:
        reply = await send(router, api, **fields, stream=stream)
        assert reply.status == 200
        assert (reply.headers["x-antiphon-path"], reply.headers["x-antiphon-reason"]) == ("pd", "default")
        limits = {"sampling_params": {"max_tokens": 1, "min_tokens": 1}} if api is GENERATE else {}
        params = {"kv_transfer_params": json.loads(PREFILL_PARAMS)}
        assert json.loads(p.seen[0].body) == sent | PLAIN[api.path] | limits | changed | params
        assert json.loads(d.seen[0].body) == sent | {"kv_transfer_params": HANDLE}


@pytest.mark.parametrize(("api", "fields", "reason"), ALONE, ids=label)
async def test_alone(api: Spoken, fields: dict[str, Any], reason: str) -> None:
    async with engine(prefills) as p, engine(streams(api)) as d, routing([p], [d]) as router:
        reply = await send(router, api, **fields)
        assert reply.status == 200
        assert (reply.headers["x-antiphon-path"], reply.headers["x-antiphon-reason"]) == ("local", reason)
        assert p.seen == []
        assert len(d.seen) == 1
        assert "kv_transfer_params" not in json.loads(d.seen[0].body)
        assert fields.items() <= json.loads(d.seen[0].body).items()


@pytest.mark.parametrize("name", ["x-request-id", "traceparent"])
async def test_a_long_header_is_not_kept_with_the_receipt(name: str) -> None:
    """Thousands of receipts are kept, and a header may be as large as the limit of a head."""
    async with engine(streams(COMPLETIONS)) as d, routing([], [d]) as router, connected(router) as client:
        for value in ("a" * 512, "a" * 513):
            body = json.dumps(COMPLETIONS.body).encode()
            head = f"POST {COMPLETIONS.path} HTTP/1.1\r\nhost: x\r\n{name}: {value}\r\n"
            client.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            reply = await client.reply()
            assert reply.status == 200
            receipt = router.receipts.latest(1)[0]
            kept = receipt.traceparent if name == "traceparent" else receipt.client_request_id
            assert kept == (value if len(value) == 512 else None)
            if name == "traceparent":
                assert f"traceparent: {value}\r\n".encode() in d.heads[-1], "engines get it all the same"
            else:
                assert reply.headers[name] == (kept or receipt.id)
