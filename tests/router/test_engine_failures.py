"""Engines that fail as processes of their own, and what a client of a router process is told: some of each kind.

All kinds, and what is tried again for each, are in ``test_failure_matrix.py``.
"""

from __future__ import annotations

import pytest

from tests.router.stack import Answer, RouterProcess, Stack, address_of, text_of, total

pytestmark = pytest.mark.process

PROMPT = "What do you make of this?"
TOKENS = 6


def ask_for(router: RouterProcess, *, stream: bool, path: str = "/v1/completions") -> Answer:
    body = {"prompt": PROMPT, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "stream": stream}
    return router.ask("POST", path, body)


def check_names_no_engine(stack: Stack, answer: Answer) -> None:
    """The engines' addresses are for the receipt and the log only."""
    text = answer.body.decode()
    assert "127.0.0.1" not in text
    for engine in stack.engines:
        assert str(engine.port) not in text
        assert str(engine.side_channel_port) not in text


def failures(router: RouterProcess, role: str) -> float:
    return total(router.metrics(), "engine_errors_total", f"role={role}")


@pytest.mark.parametrize(
    ("kind", "status", "error_type", "code", "metric", "stream"),
    [
        ("reset", 502, "upstream_error", "prefill_lost", "lost", False),
        ("hang", 504, "timeout_error", "prefill_timeout", "timeout", True),
    ],
)
def test_prefill_engine_fails(
    stack: Stack, kind: str, status: int, error_type: str, code: str, metric: str, stream: bool
) -> None:
    router = stack.quick
    before = total(router.metrics(), "engine_errors_total", "role=prefill", f"kind={metric}")
    decode_before = [engine.state()["requests"] for engine in stack.decode]
    stack.fault("prefill", kind)
    answer = ask_for(router, stream=stream)
    assert answer.status == status
    assert (answer.error["type"], answer.error["code"]) == (error_type, code)
    assert ("retry-after" in answer.headers) == (status == 503)
    check_names_no_engine(stack, answer)
    receipt = router.receipt(answer)
    assert (receipt["outcome"], receipt["status"]) == ("failed", status)
    assert receipt["error"]
    assert receipt["prefill"] in [address_of(engine) for engine in stack.prefill]
    assert receipt["decode"] is None
    assert [engine.state()["requests"] for engine in stack.decode] == decode_before
    # Another engine was tried, and where the connection was lost the same one again.
    assert total(router.metrics(), "engine_errors_total", "role=prefill", f"kind={metric}") >= before + 1


@pytest.mark.parametrize(
    ("kind", "status", "error_type", "code", "metric", "stream"),
    [
        ("cut_mid_stream", 502, "upstream_error", "decode_lost", "lost", False),
        ("respond_500", 502, "upstream_error", "decode_error", "status", True),
        ("hang", 504, "timeout_error", "decode_timeout", "timeout", False),
    ],
)
def test_decode_engine_fails_before_its_answer(
    stack: Stack, kind: str, status: int, error_type: str, code: str, metric: str, stream: bool
) -> None:
    router = stack.quick
    before = total(router.metrics(), "engine_errors_total", "role=decode", f"kind={metric}")
    stack.fault("decode", kind)
    answer = ask_for(router, stream=stream)
    assert answer.status == status
    assert (answer.error["type"], answer.error["code"]) == (error_type, code)
    assert ("retry-after" in answer.headers) == (status == 503)
    check_names_no_engine(stack, answer)
    receipt = router.receipt(answer)
    assert (receipt["outcome"], receipt["status"]) == ("failed", status)
    assert receipt["error"]
    assert receipt["decode"] in [address_of(engine) for engine in stack.decode]
    assert total(router.metrics(), "engine_errors_total", "role=decode", f"kind={metric}") >= before + 1


@pytest.mark.parametrize(
    ("kind", "status", "path"),
    [
        ("reset", 502, "/v1/completions"),
        ("cut_mid_stream", 502, "/v1/chat/completions"),
        ("hang_mid_stream", 504, "/v1/completions"),
    ],
)
def test_decode_engine_fails_in_the_middle_of_a_stream(stack: Stack, kind: str, status: int, path: str) -> None:
    router = stack.quick
    whole = ask_for(router, stream=True, path=path).events
    before = router.metrics()
    stack.fault("decode", kind, after_events=3)
    answer = ask_for(router, stream=True, path=path)
    assert answer.status == 200  # it had been sent
    assert not answer.is_cut
    *events, error, done = answer.events
    assert done == "[DONE]"
    assert set(error) == {"error"}
    assert error["error"]["code"] == status
    assert len(events) <= 3
    assert [event["choices"] for event in events] == [event["choices"] for event in whole[: len(events)]]
    check_names_no_engine(stack, answer)
    receipt = router.receipt(answer)
    assert (receipt["outcome"], receipt["status"]) == ("failed", 200)
    assert receipt["error"]
    after = router.metrics()
    assert total(after, "stream_truncations_total") == total(before, "stream_truncations_total") + 1


@pytest.mark.parametrize("after_events", [1, 5])
def test_no_whole_event_that_the_engine_sent_in_time_is_lost(stack: Stack, after_events: int) -> None:
    """The engine goes silent with its connection open, so that everything it sent has arrived."""
    stack.fault("decode", "hang_mid_stream", after_events=after_events)
    answer = ask_for(stack.quick, stream=True)
    assert len(answer.events) == after_events + 2


def test_slow_is_not_dead(stack: Stack) -> None:
    """Longer in all than each deadline of this router, and never silent for that long."""
    stack.fault("decode", "slow", factor=60)  # 60 ms a token
    answer = stack.quick.complete(PROMPT, 12, stream=True)
    assert len(text_of(answer.events).split()) > 1
    receipt = stack.quick.receipt(answer)
    assert receipt["outcome"] == "completed"
    assert receipt["ms"]["total"] > 500


def test_unknown_model_is_the_prefill_engines_verdict(stack: Stack) -> None:
    before = [engine.state()["requests"] for engine in stack.decode]
    answer = stack.router.complete("x", model="another")
    assert answer.status == 404
    assert "`another` does not exist" in answer.error["message"]
    assert [engine.state()["requests"] for engine in stack.decode] == before
    receipt = stack.router.receipt(answer)
    assert (receipt["outcome"], receipt["status"], receipt["decode"]) == ("completed", 404, None)


def test_unknown_model_on_the_local_path_is_the_decode_engines_verdict(stack: Stack) -> None:
    answer = stack.router.complete("x", model="another", n=2)
    assert answer.status == 404
    assert "`another` does not exist" in answer.error["message"]


@pytest.mark.parametrize("value", ["{}", '{"do_remote_prefill":true}', "1", "[]", '""', "false"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
def test_a_handle_of_the_client_is_refused(stack: Stack, path: str, value: str) -> None:
    before = stack.requests()
    for key in ("kv_transfer_params", "kv_transfer_p\\u0061rams"):
        body = f'{{"prompt":"x","n":2,"kv_transfer_params":null,"{key}":{value}}}'.encode()
        answer = stack.router.ask("POST", path, body)
        assert answer.status == 400
        assert answer.error["param"] == "kv_transfer_params"
        assert answer.error["type"] == "invalid_request_error"
    assert stack.requests() == before


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"null", b'{"prompt":"\xff"}', b'{"a":' * 5000, b"\x00"])
def test_a_body_that_is_no_json_object_is_refused(stack: Stack, body: bytes) -> None:
    before = stack.requests()
    for path in ("/v1/completions", "/tokenize"):
        answer = stack.router.ask("POST", path, body)
        assert answer.status == 400
        assert (answer.error["type"], answer.error["code"]) == ("invalid_request_error", "invalid_json")
        assert stack.router.receipt(answer)["outcome"] == "failed"
    assert stack.requests() == before
