"""What goes through unchanged: text, bytes, ids, headers; and which engines a request visits."""

from __future__ import annotations

import http.client
import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.protocol.handoff import PREFILL_PARAMS
from tests.protocol.json_texts import JsonText, object_texts, value_texts
from tests.router.stack import Answer, Stack, address_of, ask, total

pytestmark = pytest.mark.process

CHAT = {"messages": [{"role": "user", "content": "Which way is the sea?"}], "max_tokens": 9}
PREFILL_FIELDS = {
    "max_tokens": b"1",
    "min_tokens": b"1",
    "stream": b"false",
    "kv_transfer_params": PREFILL_PARAMS,
}


def alone(stack: Stack, path: str, body: Any) -> Answer:
    """The answer of a decode engine without a router."""
    return ask(stack.decode[0].port, "POST", path, body)


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("length", [1, 30, 1500, 40_000])
def test_completion_is_what_one_engine_alone_gives(stack: Stack, length: int, stream: bool) -> None:
    body = {"prompt": ("Tell me more. " * 3000)[:length], "max_tokens": 24, "stream": stream}
    answer = stack.router.ask("POST", "/v1/completions", body)
    assert answer.status == 200
    assert answer.text == alone(stack, "/v1/completions", body).text
    assert answer.headers["x-antiphon-path"] == "pd"
    receipt = stack.router.receipt(answer)
    assert receipt["outcome"] == "completed"
    assert receipt["prefill"] in [address_of(engine) for engine in stack.prefill]
    assert receipt["decode"] in [address_of(engine) for engine in stack.decode]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat_is_what_one_engine_alone_gives(stack: Stack, stream: bool) -> None:
    body = CHAT | {"stream": stream, "stream_options": {"include_usage": True} if stream else None}
    answer = stack.router.ask("POST", "/v1/chat/completions", body)
    assert answer.text == alone(stack, "/v1/chat/completions", body).text
    assert answer.headers["x-antiphon-path"] == "pd"
    assert stack.router.receipt(answer)["reason"] == "default"
    if stream:
        assert answer.events[-2]["usage"]["completion_tokens"] == 9


def test_a_prompt_of_token_ids_is_split(stack: Stack) -> None:
    body = {"prompt": list(range(1, 60)), "max_tokens": 5}
    answer = stack.router.ask("POST", "/v1/completions", body)
    assert answer.headers["x-antiphon-path"] == "pd"
    assert answer.text == alone(stack, "/v1/completions", body).text


def test_requests_with_a_handle_were_really_handed_over(stack: Stack) -> None:
    before = [engine.state()["num_transfers"] for engine in stack.decode]
    for number in range(8):
        assert stack.router.complete(f"prompt number {number}").status == 200
    after = [engine.state()["num_transfers"] for engine in stack.decode]
    assert sum(after) - sum(before) == 8


def test_pairs_mix(stack: Stack) -> None:
    pairs: Counter[tuple[str, str]] = Counter()
    for number in range(24):
        if number % 3 == 0:
            stack.router.complete("x", n=2)  # visits a decode engine only
        headers = stack.router.complete("x").headers
        pairs[headers["x-antiphon-prefill"], headers["x-antiphon-decode"]] += 1
    assert len(pairs) == 4


# ---- ids and headers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "prefix"), [("/v1/completions", "cmpl"), ("/v1/chat/completions", "chatcmpl")])
def test_id_names_both_engines(stack: Stack, path: str, prefix: str, stream: bool) -> None:
    answer = stack.router.ask("POST", path, CHAT | {"prompt": "x", "stream": stream})
    response_id = answer.events[0]["id"] if stream else answer.json["id"]
    found = re.fullmatch(
        prefix + r"-___prefill_addr_([\d.]+:\d+)___decode_addr_([\d.]+:\d+)_([0-9a-f]{32})", response_id
    )
    assert found, response_id
    assert (found[1], found[2]) == (answer.headers["x-antiphon-prefill"], answer.headers["x-antiphon-decode"])
    receipt = stack.router.receipt(answer)
    assert (found[1], found[2], found[3]) == (receipt["prefill"], receipt["decode"], receipt["id"])
    assert f"{prefix}-{receipt['engine_request_id']}" == response_id


def test_the_tag_can_be_switched_off(stack: Stack) -> None:
    answer = stack.quick.complete("x")
    assert answer.json["id"] == f"cmpl-{answer.headers['x-antiphon-receipt']}"


def test_every_request_has_an_id_of_its_own_at_the_engines(stack: Stack) -> None:
    seen = set()
    for _ in range(4):
        answer = stack.router.complete("x", user="same")
        for role in ("prefill", "decode"):
            seen.add(stack.last(answer.headers[f"x-antiphon-{role}"])[0]["x-request-id"])
    assert len(seen) == 8


def test_headers_and_receipt_agree(stack: Stack) -> None:
    answer = stack.router.ask(
        "POST",
        "/v1/completions",
        {"prompt": "some words", "max_tokens": 4, "stream": True},
        headers={"X-Request-Id": "mine"},
    )
    receipt = stack.router.receipt(answer)
    headers = answer.headers
    assert headers["x-request-id"] == receipt["client_request_id"] == "mine"
    assert headers["x-antiphon-path"] == receipt["path"] == "pd"
    assert headers["x-antiphon-reason"] == receipt["reason"] == "default"
    assert headers["x-antiphon-prefill"] == receipt["prefill"]
    assert headers["x-antiphon-decode"] == receipt["decode"]
    assert float(headers["x-antiphon-prefill-ms"]) == pytest.approx(receipt["ms"]["prefill"], abs=0.06)
    assert receipt["status"] == answer.status == 200
    assert receipt["route"] == "/v1/completions"
    assert receipt["stream"] is True
    assert receipt["error"] is None
    times = receipt["ms"]
    assert 0 < times["prefill"] <= times["first_token"] <= times["total"]
    assert 0 < times["handover"] <= times["first_token"]
    assert sum(receipt["tokens"]["by_source"].values()) == receipt["tokens"]["prompt"] > 0
    assert 1 <= receipt["num_events"] <= len(answer.events)


def test_tokens_by_source_tell_of_the_prefix_cache(stack: Stack) -> None:
    body = {"prompt": "a prompt that comes again " * 40, "max_tokens": 2}
    receipts = [stack.router.receipt(stack.router.ask("POST", "/v1/completions", body)) for _ in range(3)]
    sources = [receipt["tokens"]["by_source"] for receipt in receipts]
    assert sources[0] == {"device": 0, "computed": receipts[0]["tokens"]["prompt"]}
    # The third request is at the first one's prefill engine again.
    assert receipts[2]["prefill"] == receipts[0]["prefill"]
    assert sources[2]["device"] > sources[2]["computed"]


def test_client_headers_reach_both_engines_except_what_concerns_the_connection(stack: Stack) -> None:
    mine = {
        "Authorization": "Bearer secret",
        "X-Session-Id": "s-1",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "User-Agent": "tests",
        "X-Request-Id": "mine",
        "TE": "trailers",
        "Accept-Encoding": "gzip",
        "Connection": "keep-alive",
    }
    answer = stack.router.ask("POST", "/v1/completions?api=1", {"prompt": "x"}, headers=mine)
    for role in ("prefill", "decode"):
        got, _ = stack.last(answer.headers[f"x-antiphon-{role}"])
        for name in ("Authorization", "X-Session-Id", "traceparent", "User-Agent"):
            assert got[name.lower()] == mine[name]
        assert got["x-request-id"] != "mine"
        assert got["host"] == answer.headers[f"x-antiphon-{role}"]
        assert not {"te", "accept-encoding", "connection", "transfer-encoding"} & set(got)
    assert answer.headers["x-request-id"] == "mine"


# ---- bytes -----------------------------------------------------------------------------------------------------------

REQUEST_KEYS = (("prompt", '"one two three"'), ("max_tokens", "3"), ("user", '"\\u00e9/é"'), ("temperature", "1.10"))
# The simulated engine reads numbers past the range of a double as an error.
VALUES = value_texts.filter(lambda text: "1e400" not in text)
UNKNOWN_KEYS = st.from_regex(r"x_[a-zé\"/]{0,6}", fullmatch=True)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(text=object_texts(UNKNOWN_KEYS, VALUES, REQUEST_KEYS, max_extra=4))
def test_client_bytes_reach_both_engines_untouched(processes: Stack, text: JsonText) -> None:
    answer = processes.router.ask("POST", "/v1/completions", text.raw)
    assert answer.status == 200, answer.body
    _, at_prefill = processes.last(answer.headers["x-antiphon-prefill"])
    assert at_prefill == text.replaced(PREFILL_FIELDS)
    _, at_decode = processes.last(answer.headers["x-antiphon-decode"])
    params = json.dumps(json.loads(at_decode)["kv_transfer_params"], separators=(",", ":")).encode()
    assert at_decode == text.replaced({"kv_transfer_params": params})
    assert json.loads(params)["remote_port"] in [engine.side_channel_port for engine in processes.prefill]


def test_a_null_handle_of_the_client_is_replaced_in_place(stack: Stack) -> None:
    answer = stack.router.ask("POST", "/v1/completions", b'{"kv_transfer_params": null , "prompt":"x" }')
    assert answer.status == 200
    assert answer.headers["x-antiphon-path"] == "pd"
    _, at_prefill = stack.last(answer.headers["x-antiphon-prefill"])
    start = b'{"kv_transfer_params": ' + PREFILL_PARAMS + b' , "prompt":"x" ,"max_tokens":1'
    assert at_prefill.startswith(start)


def test_a_body_in_chunks_and_one_of_a_megabyte(stack: Stack) -> None:
    prompt = "word " * 200_000
    body = json.dumps({"prompt": prompt, "max_tokens": 2}).encode()
    pieces = (body[start : start + 50_000] for start in range(0, len(body), 50_000))
    connection = http.client.HTTPConnection("127.0.0.1", stack.router.port, timeout=20)
    connection.request("POST", "/v1/completions", pieces, {"Content-Type": "application/json"}, encode_chunked=True)
    response = connection.getresponse()
    # Too long for this engine's model: its own words come back, and they prove that it read all of it.
    assert response.status == 400
    assert b"maximum context length" in response.read()
    connection.close()
    _, at_prefill = stack.last(stack.router.latest()["prefill"])
    assert json.loads(at_prefill)["prompt"] == prompt


# ---- the local path --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "n"),
        ({"n": 3, "stream": True}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"prompt": ["x", "y"]}, "prompt_list"),
        ({"prompt": [[1, 2], [3]]}, "prompt_list"),
        ({"prompt": ["x"]}, "prompt_list"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"use_beam_search": True}, "beam_search"),
    ],
)
def test_what_one_handle_cannot_serve_is_answered_by_a_decode_engine_alone(
    stack: Stack, fields: dict[str, Any], reason: str
) -> None:
    body = {"prompt": "x", "max_tokens": 4} | fields
    before = stack.requests()
    answer = stack.router.ask("POST", "/v1/completions", body)
    assert (answer.headers["x-antiphon-path"], answer.headers["x-antiphon-reason"]) == ("local", reason)
    assert "x-antiphon-prefill" not in answer.headers
    receipt = stack.router.receipt(answer)
    assert (receipt["path"], receipt["reason"], receipt["prefill"]) == ("local", reason, None)
    after = stack.requests()
    assert all(after[address_of(engine)] == before[address_of(engine)] for engine in stack.prefill)
    assert after[receipt["decode"]] == before[receipt["decode"]] + 1
    headers, at_decode = stack.last(receipt["decode"])
    assert at_decode == json.dumps(body).encode()
    assert headers["x-request-id"] == receipt["id"]
    reference = alone(stack, "/v1/completions", body)
    assert answer.status == reference.status == 200
    assert answer.text == reference.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/tokenize", {"prompt": "some words"}),
        ("/detokenize", {"tokens": [65, 66]}),
    ],
)
def test_routes_of_one_stage_go_to_a_decode_engine(stack: Stack, path: str, body: dict[str, Any]) -> None:
    before = stack.router.metrics()
    answer = stack.router.ask("POST", path, body)
    assert answer.status == 200
    assert (answer.headers["x-antiphon-path"], answer.headers["x-antiphon-reason"]) == ("local", "single_stage")
    expected = alone(stack, path, body).json
    got = answer.json
    for volatile in ("id", "created"):
        assert (volatile in got) == (volatile in expected)
        got.pop(volatile, None)
        expected.pop(volatile, None)
    assert got == expected
    after = stack.router.metrics()
    assert total(after, "engine_requests_total", "role=prefill") == total(
        before, "engine_requests_total", "role=prefill"
    )
