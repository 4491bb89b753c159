"""Real processes: prefill and decode engines that hand KV over through their side channel, and their ends."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.simulated_processes import EngineProcess, sse_events

pytestmark = pytest.mark.process

Start = Callable[..., EngineProcess]
LOAD_FAILED = {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}
NOTHING_HELD = {"blocks_used": 0, "blocks_reserved": 0, "leases": 0, "running": 0, "waiting": 0, "in_flight": 0}


@pytest.fixture(scope="module")
def shared(die_with_parent: Callable[[], None]) -> Iterator[EngineProcess]:
    """One engine for the tests that leave nothing behind."""
    engine = EngineProcess.start(die_with_parent, max_model_len=1000)
    yield engine
    engine.stop()


@pytest.fixture
def engine(shared: EngineProcess) -> EngineProcess:
    """The shared engine, with no fault armed and nothing cached."""
    shared.fault("clear")
    shared.wait_state(blocks_used=0)
    shared.json("POST", "/reset_prefix_cache")
    return shared


@pytest.fixture
def start(die_with_parent: Callable[[], None]) -> Iterator[Start]:
    running: list[EngineProcess] = []

    def start_engine(**flags: Any) -> EngineProcess:
        running.append(EngineProcess.start(die_with_parent, **flags))
        return running[-1]

    yield start_engine
    for engine in running:
        engine.stop()


def pair(start: Start, **decode_flags: Any) -> tuple[EngineProcess, EngineProcess]:
    return start(role="prefill", engine_id="P1"), start(role="decode", engine_id="D1", **decode_flags)


def metrics(engine: EngineProcess) -> dict[str, float]:
    """Samples by name, summed over labels."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(engine.ask("GET", "/metrics")[1].decode()):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0) + sample.value
    return samples


# ---- hand-over -------------------------------------------------------------------------------------------------------


def test_prefill_and_decode_give_the_text_of_a_lone_engine(start: Start) -> None:
    prefill, decode = pair(start)
    lone = start()
    chance = random.Random(7)
    for number in range(20):
        prompt = "".join(chance.choice("abc é\n") for _ in range(chance.randint(10, 1500)))
        expected = lone.text(prompt, 12)
        stream = number % 2 == 0
        body = {"prompt": prompt, "max_tokens": 12, "kv_transfer_params": prefill.prefill(prompt), "stream": stream}
        status, data = decode.ask("POST", "/v1/completions", body)
        assert status == 200
        if stream:
            events = sse_events(data)
            assert events.pop() == "[DONE]"
            text = "".join(event["choices"][0]["text"] for event in events)
        else:
            text = json.loads(data)["choices"][0]["text"]
        assert text == expected
    assert decode.state()["num_transfers"] == 20
    state = prefill.wait_state(**NOTHING_HELD)
    assert (state["num_reads"], state["num_stale_reads"]) == (20, 0)
    assert metrics(decode)["vllm:nixl_xfer_time_seconds_count"] == 20


def test_the_handle_has_the_keys_of_vllm(start: Start) -> None:
    prefill = start(role="prefill", engine_id="P1")
    handle = prefill.prefill("twenty bytes of text")
    request_id = handle.pop("remote_request_id")
    assert request_id.startswith("cmpl-")
    assert handle == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[0, 1]],
        "remote_engine_id": "P1",
        "remote_host": "127.0.0.1",
        "remote_port": prefill.side_channel_port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 5,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


def test_a_second_pull_of_one_handle_gives_other_text(start: Start) -> None:
    prefill, decode = pair(start)
    other = start(role="decode")
    prompt = "some prompt of more than one block"
    handle = prefill.prefill(prompt)
    first = decode.text(prompt, 8, kv_transfer_params=handle)
    prefill.wait_state(leases=0)
    second = other.text(prompt, 8, kv_transfer_params=handle)
    assert first == start().text(prompt, 8)
    assert second != first
    assert prefill.wait_state(num_late_notifications=1)["num_stale_reads"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefill_engine_killed_before_the_pull_fails_the_request(start: Start, stream: bool) -> None:
    prefill, decode = pair(start)
    handle = prefill.prefill("some prompt")
    prefill.kill()
    body = {"prompt": "some prompt", "kv_transfer_params": handle, "stream": stream}
    status, data = decode.ask("POST", "/v1/completions", body)
    if stream:
        assert (status, sse_events(data)) == (200, [LOAD_FAILED, "[DONE]"])
    else:
        assert (status, json.loads(data)) == (500, LOAD_FAILED)
    state = decode.wait_state(**NOTHING_HELD)
    assert state["num_failed_transfers"] == 1
    assert metrics(decode)["vllm:nixl_num_failed_transfers_total"] == 1


def test_policy_recompute_computes_what_cannot_be_pulled(start: Start) -> None:
    prefill, decode = pair(start, kv_load_failure_policy="recompute")
    handle = prefill.prefill("some prompt")
    prefill.kill()
    text = decode.text("some prompt", 8, kv_transfer_params=handle)
    assert text == start().text("some prompt", 8)
    assert decode.state()["num_failed_transfers"] == 1


@pytest.mark.parametrize("change", [{"remote_engine_id": "P0"}, {"remote_block_ids": [[10**6]]}, {"remote_port": None}])
def test_handles_of_an_earlier_life_and_broken_ones_fail(start: Start, change: dict[str, Any]) -> None:
    prefill, decode = pair(start)
    handle = prefill.prefill("abc") | change
    status, data = decode.ask("POST", "/v1/completions", {"prompt": "abc", "kv_transfer_params": handle})
    assert (status, json.loads(data)) == (500, LOAD_FAILED)


def test_another_model_or_block_size_is_refused(start: Start) -> None:
    prefill = start(role="prefill")
    for flags in ({"model_name": "other"}, {"block_size_tokens": 8}):
        decode = start(role="decode", **flags)
        body = {"prompt": "abc", "kv_transfer_params": prefill.prefill("abc")}
        assert decode.ask("POST", "/v1/completions", body)[0] == 500


def test_several_prompts_with_one_handle_get_wrong_text_and_no_error(start: Start) -> None:
    prefill, decode = pair(start)
    prompts = ["one prompt of many bytes", "two prompt of many bytes"]
    right = [start().text(prompt, 8) for prompt in prompts]
    body = decode.complete(prompts, 8, kv_transfer_params=prefill.prefill(prompts[0]))
    texts = [choice["text"] for choice in body["choices"]]
    assert texts[0] == right[0]
    assert texts[1] != right[1]
    assert prefill.wait_state(num_late_notifications=1)["leases"] == 0


def test_an_expired_lease_is_counted(start: Start) -> None:
    prefill = start(role="prefill", lease_s=0.2)
    prefill.prefill("some prompt")
    assert prefill.state()["blocks_used"] == 1
    prefill.wait_state(num_leases_expired=1, **NOTHING_HELD)
    assert metrics(prefill)["vllm:nixl_num_kv_expired_reqs_total"] == 1


def test_a_request_that_queues_longer_than_the_lease_keeps_it_by_heartbeats(start: Start) -> None:
    prefill = start(role="prefill", lease_s=0.6)
    decode = start(role="decode", max_num_seqs=1, decode_token_ms=100, lease_s=0.6)
    handle = prefill.prefill("some prompt")
    with decode.connection() as blocker:
        decode.send(blocker, "POST", "/v1/completions", {"prompt": "busy", "max_tokens": 15})
        decode.wait_state(running=1)
        text = decode.text("some prompt", 2, kv_transfer_params=handle)
    assert text == start().text("some prompt", 2)
    state = prefill.wait_state(leases=0)
    assert (state["num_leases_expired"], state["num_stale_reads"]) == (0, 0)


def test_a_request_that_decode_refuses_frees_the_prefill_engine(start: Start) -> None:
    prefill, decode = pair(start)
    handle = prefill.prefill("some prompt")
    body = {"prompt": "some prompt", "max_tokens": 0, "kv_transfer_params": handle}
    assert decode.ask("POST", "/v1/completions", body)[0] == 400
    assert prefill.wait_state(**NOTHING_HELD)["num_leases_expired"] == 0


# ---- abort -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["prefill", "waiting", "decode", "stream"])
def test_a_client_that_leaves_frees_everything(start: Start, stage: str) -> None:
    engine = start(max_num_seqs=1, decode_token_ms=50 if stage in ("decode", "stream") else 0, prefill_overhead_ms=300)
    body = {"prompt": "some prompt", "max_tokens": 500, "stream": stage == "stream"}
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(engine.connection()) for _ in range(2 if stage == "waiting" else 1)]
        for number, connection in enumerate(connections):
            engine.send(connection, "POST", "/v1/completions", body)
            engine.wait_state(in_flight=number + 1)
        if stage in ("decode", "stream"):
            deadline_s = time.monotonic() + 10
            while engine.state()["num_generated_tokens"] < 2:
                assert time.monotonic() < deadline_s
        if stage == "stream":
            response = connections[0].getresponse()
            assert response.read(6) == b"data: "
            response.close()
        for connection in reversed(connections):
            connection.close()
        count = len(connections)
        state = engine.wait_state(aborted_requests=count, **NOTHING_HELD)
    assert state["finished"] == {"stop": 0, "length": 0, "abort": count, "error": 0}


def test_a_client_of_decode_that_leaves_before_the_pull_frees_both(start: Start) -> None:
    prefill = start(role="prefill")
    decode = start(role="decode", max_num_seqs=1, decode_token_ms=200)
    handle = prefill.prefill("some prompt")
    with decode.connection() as blocker, decode.connection() as leaver:
        decode.send(blocker, "POST", "/v1/completions", {"prompt": "busy", "max_tokens": 500})
        decode.wait_state(running=1)
        decode.send(leaver, "POST", "/v1/completions", {"prompt": "some prompt", "kv_transfer_params": handle})
        decode.wait_state(waiting=1)
        leaver.close()
        state = prefill.wait_state(**NOTHING_HELD)
    assert (state["num_reads"], state["num_leases_expired"]) == (0, 0)
    decode.wait_state(**NOTHING_HELD)


def test_a_client_of_decode_that_leaves_during_the_pull_frees_both(start: Start) -> None:
    prefill = start(role="prefill")
    decode = start(role="decode", transfer_gb_per_s=0.001)  # 4 tokens of KV take half a second
    handle = prefill.prefill("abc")
    with decode.connection() as leaver:
        decode.send(leaver, "POST", "/v1/completions", {"prompt": "abc", "kv_transfer_params": handle})
        decode.wait_state(blocks_used=1)
        leaver.close()
        decode.wait_state(aborted_requests=1)
        prefill.wait_state(**NOTHING_HELD)
        decode.wait_state(**NOTHING_HELD)
    assert prefill.state()["num_leases_expired"] == 0


# ---- API -------------------------------------------------------------------------------------------------------------


def test_ids_follow_the_request_id_and_may_occur_twice(start: Start) -> None:
    engine = start(decode_token_ms=20)
    with engine.connection() as first, engine.connection() as second:
        for connection in (first, second):
            body = {"prompt": "x", "max_tokens": 20}
            engine.send(connection, "POST", "/v1/completions", body, X_Request_Id="R")
        answers = [json.loads(connection.getresponse().read()) for connection in (first, second)]
    assert [answer["id"] for answer in answers] == ["cmpl-R", "cmpl-R"]
    assert answers[0]["choices"] == answers[1]["choices"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert engine.json("POST", "/v1/chat/completions", chat, X_Request_Id="R")["id"] == "chatcmpl-R"
    assert engine.json("POST", "/v1/embeddings", {"input": "hi"}, X_Request_Id="R")["id"] == "embd-R"
    assert engine.complete("x", request_id="mine")["id"] == "cmpl-mine"


def test_prefix_cache_shows_in_usage_and_metrics_and_can_be_reset(start: Start) -> None:
    engine = start()
    prompt = "a prompt of some blocks, that is asked twice"
    first, second = (engine.complete(prompt)["usage"] for _ in range(2))
    assert first["prompt_tokens"] == second["prompt_tokens"] == 11
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, second)] == [0, 8]
    samples = metrics(engine)
    assert samples["vllm:prefix_cache_queries_total"] == 22
    assert samples["vllm:prefix_cache_hits_total"] == 8
    assert engine.json("POST", "/reset_prefix_cache") == {"success": True}
    assert engine.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_cached_tokens_of_a_handed_over_request_are_those_of_prefill(start: Start) -> None:
    prefill, decode = pair(start)
    prompt = "a prompt of some blocks, that is asked twice"
    seen = []
    for _ in range(2):
        usage = decode.complete(prompt, kv_transfer_params=prefill.prefill(prompt))["usage"]
        seen.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert seen == [0, 8]


def test_metrics_are_valid_and_count_what_happened(start: Start) -> None:
    engine = start(model_name='m"\\')
    engine.complete("hello world", 5)
    samples = metrics(engine)
    expected = {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:prompt_tokens_total": 3,
        "vllm:generation_tokens_total": 5,
        "vllm:request_success_total": 1,
        "vllm:external_prefix_cache_queries_total": 0,
        "vllm:external_prefix_cache_hits_total": 0,
        "vllm:nixl_xfer_time_seconds_count": 0,
        "vllm:nixl_num_kv_expired_reqs_total": 0,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:request_prefill_time_seconds_count": 1,
        "vllm:request_prefill_kv_computed_tokens_sum": 3,
    }
    assert {name: samples[name] for name in expected} == expected


def test_gauges_during_work(start: Start) -> None:
    engine = start(max_num_seqs=1, decode_token_ms=50, kv_blocks=100)
    with engine.connection() as first, engine.connection() as second:
        for connection in (first, second):
            engine.send(connection, "POST", "/v1/completions", {"prompt": "abcdefgh", "max_tokens": 60})
        engine.wait_state(running=1, waiting=1)
        samples = metrics(engine)
    assert (samples["vllm:num_requests_running"], samples["vllm:num_requests_waiting"]) == (1, 1)
    assert 0 < samples["vllm:kv_cache_usage_perc"] < 1


def test_other_routes(engine: EngineProcess) -> None:
    assert engine.ask("GET", "/health") == (200, b"")
    assert engine.json("GET", "/v1/models")["data"][0]["id"] == "m"
    assert engine.json("GET", "/version")["version"].startswith("0.32")
    assert engine.json("GET", "/load") == {"server_load": 0}
    tokens = engine.json("POST", "/tokenize", {"prompt": "hello world", "return_token_strs": True})
    assert (tokens["count"], tokens["max_model_len"], tokens["token_strs"]) == (3, 1000, ["hell", "o wo", "rld"])
    assert engine.json("POST", "/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": "hello world"}
    messages = [{"role": "user", "content": "hi"}]
    chat = engine.json("POST", "/tokenize", {"messages": messages})
    used = engine.json("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert chat["count"] == used["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", "/nothing", None, 404, "Not Found"),
        ("GET", "/v1/completions", None, 405, "Method Not Allowed"),
        ("POST", "/v1/completions", b"{", 400, "Bad Request"),
        ("POST", "/v1/completions", {"model": "other", "prompt": "x"}, 404, "NotFoundError"),
        ("POST", "/v1/completions", {"prompt": "x" * 5000}, 400, "BadRequestError"),
        ("POST", "/v1/chat/completions", {}, 400, "Bad Request"),
        ("POST", "/tokenize", {}, 400, "Bad Request"),
        ("POST", "/v1/embeddings", {}, 400, "Bad Request"),
    ],
)
def test_errors_have_the_shape_of_vllm(
    engine: EngineProcess, method: str, path: str, body: Any, status: int, kind: str
) -> None:
    got, data = engine.ask(method, path, body)
    assert got == status
    error = json.loads(data)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == (kind, status)


def test_the_last_request_is_kept_byte_for_byte(start: Start) -> None:
    engine = start()
    assert engine.ask("GET", "/simulated/last")[0] == 404
    body = b'{"prompt" : "x",\t"temperature":1.50,"unknown":{"a":[1e3]}, "max_tokens":1}\n'
    engine.json("POST", "/v1/completions?a=b", body, X_Custom="Kept As Is")
    last = engine.json("GET", "/simulated/last")
    assert base64.b64decode(last["body"]) == body
    assert (last["method"], last["path"], last["query"]) == ("POST", "/v1/completions", "a=b")
    assert ["x-custom", "Kept As Is"] in last["headers"]


def test_list_of_prompts_and_n_make_choices_in_order(engine: EngineProcess) -> None:
    alone = [engine.text(prompt, 4) for prompt in ("one", "two")]
    body = engine.complete(["one", "two"], 4, n=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in body["choices"]]
    assert [texts[0], texts[2]] == alone
    assert len(set(texts)) == 4
    assert body["usage"] == body["usage"] | {"prompt_tokens": 2, "completion_tokens": 16}
    stream = {"prompt": ["one", "two"], "n": 2, "max_tokens": 4, "stream": True}
    streamed = [""] * 4
    for event in sse_events(engine.ask("POST", "/v1/completions", stream)[1])[:-1]:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "status"), [("respond_500", 500), ("respond_503", 503), ("respond_429", 429)])
def test_status_faults_hit_as_many_requests_as_asked(engine: EngineProcess, kind: str, status: int) -> None:
    engine.fault(kind, count=2)
    got = [engine.ask("POST", "/v1/completions", {"prompt": "x"})[0] for _ in range(3)]
    assert got == [status, status, 200]


def test_garbage_is_not_http(engine: EngineProcess) -> None:
    engine.fault("garbage")
    with socket.create_connection(("127.0.0.1", engine.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    assert b"\x00" in answer.split(b"\r\n")[1]


@pytest.mark.parametrize("after_events", [0, 2])
def test_reset_cuts_the_connection_with_a_reset(engine: EngineProcess, after_events: int) -> None:
    engine.fault("reset", after_events=after_events)
    stream = {"prompt": "x", "stream": True, "max_tokens": 50}
    with engine.connection() as connection, pytest.raises(ConnectionResetError):
        engine.exchange(connection, "POST", "/v1/completions", stream)
    engine.wait_state(**NOTHING_HELD)


@pytest.mark.parametrize(("kind", "stream"), [("hang", False), ("hang_mid_stream", True), ("hang_mid_stream", False)])
def test_a_hanging_request_ends_when_the_client_leaves(start: Start, kind: str, stream: bool) -> None:
    engine = start()
    engine.fault(kind, after_events=2)
    body = {"prompt": "x", "stream": stream, "max_tokens": 5}
    with engine.connection(timeout_s=0.3) as connection:
        engine.send(connection, "POST", "/v1/completions", body)
        with pytest.raises(TimeoutError):
            connection.getresponse().read()
    engine.wait_state(aborted_requests=1, **NOTHING_HELD)
    assert engine.text("x", 2)


def test_a_stream_cut_after_some_events_is_not_complete(engine: EngineProcess) -> None:
    engine.fault("cut_mid_stream", after_events=3)
    with engine.connection() as connection:
        engine.send(connection, "POST", "/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 9})
        with pytest.raises(http.client.IncompleteRead) as caught:
            connection.getresponse().read()
    assert len(sse_events(caught.value.partial)) == 3
    engine.wait_state(**NOTHING_HELD)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_mid_stream_is_killed(start: Start, stream: bool) -> None:
    engine = start()
    engine.fault("die_mid_stream", after_events=2)
    body = {"prompt": "x", "stream": stream, "max_tokens": 9}
    with engine.connection() as connection, pytest.raises((http.client.HTTPException, ConnectionError)):
        engine.exchange(connection, "POST", "/v1/completions", body)
    assert engine.process.wait(10) == -9


def test_no_kv_params_keeps_nothing(engine: EngineProcess) -> None:
    engine.fault("no_kv_params")
    body = engine.complete("x", 1, kv_transfer_params={"do_remote_decode": True})
    assert body["kv_transfer_params"] is None
    engine.wait_state(**NOTHING_HELD)


def test_slow_multiplies_the_times(start: Start) -> None:
    engine = start(prefill_overhead_ms=30)
    engine.fault("slow", factor=20)
    before_s = time.monotonic()
    engine.text("x", 1)
    assert time.monotonic() - before_s >= 0.6


def test_health_faults(engine: EngineProcess) -> None:
    engine.fault("health_503", count=None)
    assert [engine.ask("GET", "/health")[0] for _ in range(3)] == [503] * 3
    engine.fault("clear")
    assert engine.ask("GET", "/health")[0] == 200
    engine.fault("hang_health")
    with engine.connection(timeout_s=0.3) as connection, pytest.raises(TimeoutError):
        engine.exchange(connection, "GET", "/health")
    assert engine.ask("GET", "/health")[0] == 200


def test_an_unknown_fault_is_refused(engine: EngineProcess) -> None:
    status, data = engine.ask("POST", "/simulated/fault", {"kind": "nonsense"})
    assert status == 400
    assert b"hang_mid_stream" in data


# ---- life ------------------------------------------------------------------------------------------------------------


def test_it_starts_in_under_a_second_of_cpu_time(start: Start) -> None:
    engine = start()
    assert engine.ask("GET", "/health")[0] == 200
    assert engine.cpu_s() < 1.0


def test_sigterm_ends_it_at_once_with_work_in_progress(start: Start) -> None:
    engine = start(decode_token_ms=100)
    with engine.connection() as connection:
        engine.send(connection, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1000, "stream": True})
        engine.wait_state(running=1)
        before_s = time.monotonic()
        assert engine.stop() == 0
        assert time.monotonic() - before_s < 3
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            connection.getresponse().read()


def test_a_taken_port_is_an_error_with_a_remedy(start: Start, die_with_parent: Callable[[], None]) -> None:
    taken = start().port
    argv = [sys.executable, "-m", "antiphon", "sim-engine", "--port", str(taken)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=30, preexec_fn=die_with_parent, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(f"antiphon sim-engine: cannot listen on 127.0.0.1:{taken}: Address already in use")
    assert result.stdout == ""


def test_it_refuses_connections_until_it_is_ready(free_port: int, die_with_parent: Callable[[], None]) -> None:
    argv = [sys.executable, "-m", "antiphon", "sim-engine", "--port", str(free_port), "--start-delay-s", "1"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent) as process:
        try:
            deadline_s = time.monotonic() + 10
            while not _is_bound(free_port):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", free_port)).close()
            assert process.stdout is not None
            assert process.stdout.readline().startswith("simulated engine ready")
            socket.create_connection(("127.0.0.1", free_port)).close()
        finally:
            process.terminate()
    assert process.returncode == 0


def _is_bound(port: int) -> bool:
    """Whether somebody holds the port, listening or not."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def test_bad_flags_name_the_option(die_with_parent: Callable[[], None]) -> None:
    argv = [sys.executable, "-m", "antiphon", "sim-engine", "--kv-blocks", "0"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=30, preexec_fn=die_with_parent, check=False)
    assert result.returncode == 2
    assert "--kv-blocks" in result.stderr
