"""The further APIs and engines added at run time, on real engines.

Goal: responses, messages and generation from tokens are handed over, and answer as the decode engine alone does,
streamed and whole; an engine that is removed and added again takes requests once its pair is warm. Method: the same
greedy request to the router and to the decode engine, under different salts.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.real.deployment import Deployment, wait_for

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(400)]

QUESTION = "Name the capital of France, the river that runs through it, and a bridge over that river."
TOKENS = [(7 * number) % 9000 + 300 for number in range(180)]

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 16, "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16},
    "/inference/v1/generate": {"token_ids": TOKENS, "sampling_params": {"max_tokens": 16, "temperature": 0, "seed": 1}},
}
ENDS = {
    "/v1/responses": "response.completed",
    "/v1/messages": "message_stop",
    "/inference/v1/generate": "[DONE]",
}


def asked(path: str, salt: str, *, stream: bool) -> dict[str, Any]:
    """The body of a greedy request; another ``salt`` shares no KV with it, where the API has one."""
    body = {"model": "smollm2", "stream": stream} | REQUESTS[path]
    if path != "/inference/v1/generate":
        body["temperature"] = 0
    if path != "/v1/messages":
        body["cache_salt"] = salt
    return body


def answer_of(path: str, value: dict[str, Any]) -> Any:
    """What the model wrote, of a whole answer."""
    if path == "/v1/responses":
        return [part["text"] for item in value["output"] for part in item.get("content") or []]
    if path == "/v1/messages":
        return [part.get("text") for part in value["content"]]
    return [choice["token_ids"] for choice in value["choices"]]


def events_of(text: str) -> list[dict[str, Any] | str]:
    """The data of each event."""
    found: list[dict[str, Any] | str] = []
    for line in text.splitlines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def written_in(path: str, events: list[dict[str, Any] | str]) -> Any:
    """What the model wrote, of a stream; pieces are put together, since their size depends on the moment."""
    values = [event for event in events if isinstance(event, dict)]
    if path == "/v1/responses":
        return "".join(event["delta"] for event in values if event["type"] == "response.output_text.delta")
    if path == "/v1/messages":
        return "".join(event["delta"].get("text", "") for event in values if event["type"] == "content_block_delta")
    return [token for event in values for choice in event["choices"] for token in choice["token_ids"]]


def end_of(events: list[dict[str, Any] | str]) -> str:
    """The name of the last event."""
    last = events[-1]
    return last if isinstance(last, str) else str(last["type"])


@pytest.mark.parametrize("path", REQUESTS)
def test_whole_answer_is_that_of_the_engine_alone(deployment: Deployment, path: str) -> None:
    routed = httpx.post(deployment.url + path, json=asked(path, "routed whole", stream=False), timeout=120)
    assert routed.status_code == 200, routed.text
    alone = httpx.post(deployment.decode_url + path, json=asked(path, "alone whole", stream=False), timeout=120)
    assert alone.status_code == 200, alone.text
    assert answer_of(path, routed.json()) == answer_of(path, alone.json())
    assert answer_of(path, routed.json())
    assert routed.headers["x-antiphon-path"] == "pd", routed.headers["x-antiphon-reason"]
    receipt = deployment.receipt(routed.headers["x-antiphon-receipt"])
    assert receipt["outcome"] == "completed"
    assert receipt["reason"] == "default", "the prefill engine returned no handle"


@pytest.mark.parametrize("path", REQUESTS)
def test_stream_is_that_of_the_engine_alone(deployment: Deployment, path: str) -> None:
    seen = []
    for url, salt in ((deployment.url, "routed stream"), (deployment.decode_url, "alone stream")):
        answer = httpx.post(url + path, json=asked(path, salt, stream=True), timeout=120)
        assert answer.status_code == 200, answer.text
        seen.append(events_of(answer.text))
    assert end_of(seen[0]) == end_of(seen[1]) == ENDS[path]
    assert written_in(path, seen[0]) == written_in(path, seen[1])
    assert written_in(path, seen[0])


def test_an_engine_that_is_added_is_warmed_and_takes_requests(deployment: Deployment) -> None:
    engine = {"role": "decode", "url": deployment.decode_url}
    warmed = deployment.router_metric("antiphon_router_pair_warmups_total")
    removed = httpx.request("DELETE", f"{deployment.url}/endpoints", json=engine | {"allow_empty": True}, timeout=30)
    assert removed.status_code in (200, 202), removed.text
    wait_for(lambda: not states(deployment, "decode"), "the decode engine is gone", 20)
    refused = httpx.post(f"{deployment.url}/v1/completions", json={"model": "smollm2", "prompt": "a"}, timeout=30)
    assert refused.status_code == 503
    added = httpx.post(f"{deployment.url}/endpoints", json=engine, timeout=30)
    assert added.status_code == 201, added.text
    wait_for(lambda: states(deployment, "decode") == ["ready"], "the decode engine takes requests again", 60)
    assert deployment.router_metric("antiphon_router_pair_warmups_total") == warmed + 1
    body = {"model": "smollm2", "prompt": "The river and the stone", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{deployment.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-antiphon-path"] == "pd"
    wait_for(lambda: deployment.prefill_metrics().kv_usage == 0, "the prefill engine's KV is free", 40)


def states(deployment: Deployment, role: str) -> list[str]:
    """Of the router's engines of a role."""
    found = httpx.get(f"{deployment.url}/endpoints", timeout=30).json()["endpoints"]
    return [endpoint["state"] for endpoint in found if endpoint["role"] == role]
