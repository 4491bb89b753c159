"""Real vLLM, real NIXL, the real router: what a user does, and what happens when parts die.

Goal: P/D gives what a decode engine alone gives, KV is really handed over and really reused, and what is killed is
honest and comes back. Method: one deployment, in float32, since rounding in bfloat16 alone changes a third of the
answers; ``test_client_api.py`` shares it. The tests that kill engines come last.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.process.deployment import reached_from_outside
from tests.real.deployment import LEASE_S, Deployment, wait_for

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(400)]

WORDS = (
    "river",
    "stone",
    "bread",
    "cloud",
    "winter",
    "garden",
    "music",
    "engine",
    "paper",
    "window",
    "orange",
    "market",
)
PROMPT_TOKENS = (10, 12, 15, 19, 24, 30, 38, 48, 60, 76, 96, 121, 127, 129, 192, 255, 257, 430, 840, 1500)
MAX_TOKENS = 12
CHUNK = 256


def prompt_of(num_tokens: int, seed: int) -> str:
    """A text of about ``num_tokens`` tokens; another seed shares no prefix with it."""
    rng = random.Random(seed)
    words = [rng.choice(WORDS) for _ in range(max(3, num_tokens - 6))]
    return f"{seed} " + " ".join(words)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=300) as client:
        yield client


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=300) as found:
        yield found


async def complete(http: httpx.AsyncClient, url: str, **fields: Any) -> httpx.Response:
    body = {"model": "smollm2", "max_tokens": MAX_TOKENS, "temperature": 0, **fields}
    return await http.post(f"{url}/v1/completions", json=body)


# ---- what a user does ------------------------------------------------------------------------------------------------


def test_nothing_is_reached_from_other_machines(deployment: Deployment) -> None:
    """Ports that vLLM, gloo, UCX and NIXL open for themselves, too."""
    assert reached_from_outside("real") == []


async def test_chat_streamed_with_the_official_client(deployment: Deployment, client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = [event async for event in raw.parse()]
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert "Paris" in text
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens > 0
    receipt = deployment.receipt(raw.headers["x-antiphon-receipt"])
    assert receipt["path"] == raw.headers["x-antiphon-path"] == "pd"
    assert receipt["outcome"] == "completed"
    assert receipt["tokens"]["prompt"] == events[-1].usage.prompt_tokens
    assert sum(receipt["tokens"]["by_source"].values()) == receipt["tokens"]["prompt"]
    times = receipt["ms"]
    assert 0 < times["prefill"] < times["first_token"] <= times["total"]
    assert times["prefill"] + times["handover"] == pytest.approx(times["first_token"], rel=0.2, abs=50)
    tag = f"chatcmpl-___prefill_addr_{receipt['prefill']}___decode_addr_{receipt['decode']}_"
    assert events[0].id.startswith(tag)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": ["The sky is", "The sea is"]}, "prompt_list"),
        ({"prompt": "The sky is", "n": 2, "temperature": 0.7}, "n"),
        ({"prompt": "The sky is", "echo": True}, "echo"),
        ({"prompt": "The sky is", "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_requests_that_one_handle_cannot_serve(
    deployment: Deployment, http: httpx.AsyncClient, fields: dict[str, Any], reason: str
) -> None:
    before = deployment.decode_metrics().num_nixl_transfers
    answer = await complete(http, deployment.url, **fields)
    assert answer.status_code == 200, answer.text
    assert (answer.headers["x-antiphon-path"], answer.headers["x-antiphon-reason"]) == ("local", reason)
    assert "x-antiphon-prefill" not in answer.headers
    wanted = 2 if reason in ("prompt_list", "n") else 1
    assert len(answer.json()["choices"]) == wanted
    assert deployment.decode_metrics().num_nixl_transfers == before


async def test_log_probabilities_need_no_compiler(deployment: Deployment, http: httpx.AsyncClient) -> None:
    answer = await complete(http, deployment.url, prompt="The sky is", logprobs=2)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["logprobs"]["top_logprobs"]) == MAX_TOKENS
    assert answer.elapsed.total_seconds() < 10


async def test_token_ids_unknown_fields_and_odd_numbers_are_for_the_engine(
    deployment: Deployment, http: httpx.AsyncClient
) -> None:
    answer = await complete(http, deployment.url, prompt=[504, 3575, 282, 4649, 314], top_p=0.949999999999, x_unknown=1)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-antiphon-path"] == "pd"


async def test_what_the_engine_refuses_reaches_the_client_as_it_is(
    deployment: Deployment, http: httpx.AsyncClient
) -> None:
    refusals = {
        "unknown model": (await complete(http, deployment.url, prompt="hi", model="nope"), {404}),
        "too long": (await complete(http, deployment.url, prompt="word " * 5000), {400}),
        "wrong type": (await complete(http, deployment.url, prompt="hi", temperature="warm"), {400, 422}),
        "own handle": (await complete(http, deployment.url, prompt="hi", kv_transfer_params={"a": 1}), {400}),
    }
    for what, (answer, statuses) in refusals.items():
        assert answer.status_code in statuses, (what, answer.text)
        assert answer.json()["error"]["message"], what
    assert "nope" in refusals["unknown model"][0].text
    assert refusals["own handle"][0].json()["error"]["code"] == "kv_transfer_params_refused"


async def test_models_tokenize_and_live_check(deployment: Deployment, http: httpx.AsyncClient) -> None:
    models = await http.get(f"{deployment.url}/v1/models")
    assert [model["id"] for model in models.json()["data"]] == ["smollm2"]
    tokens = await http.post(f"{deployment.url}/tokenize", json={"model": "smollm2", "prompt": "The sky is blue"})
    assert tokens.json()["count"] == 4
    check = deployment.check_live()
    assert check.returncode == 0, check.stdout + check.stderr
    assert {row["state"] for row in deployment.status().values()} == {"ready"}


def cpu_seconds(session: int) -> float:
    """CPU time that the living processes of a session have used."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def test_an_idle_pair_leaves_the_cores_alone(deployment: Deployment) -> None:
    pids = [deployment.status()[name]["pid"] for name in ("prefill-0", "decode-0")]
    wait_for(lambda: deployment.prefill_metrics().kv_usage == 0, "nothing is held", LEASE_S + 10)
    loop = asyncio.get_running_loop()
    await asyncio.sleep(1.5)  # vLLM itself looks out for a second before it rests
    began, before = loop.time(), sum(map(cpu_seconds, pids))
    await asyncio.sleep(4)
    cores = (sum(map(cpu_seconds, pids)) - before) / (loop.time() - began)
    assert cores < 0.4, f"{cores:.2f} cores busy with nothing to do"


# ---- the same answers ------------------------------------------------------------------------------------------------


async def test_same_greedy_tokens_as_the_decode_engine_alone(deployment: Deployment, http: httpx.AsyncClient) -> None:
    before = deployment.decode_metrics().num_nixl_transfers
    assert before is not None
    lengths, different = [], []
    for index, wanted in enumerate(PROMPT_TOKENS):
        prompt = prompt_of(wanted, seed=1000 + index)
        split = await complete(http, deployment.url, prompt=prompt)
        assert split.headers["x-antiphon-path"] == "pd", split.text
        # The salt keeps the decode engine from using the blocks that it was just handed.
        alone = await complete(http, deployment.decode_url, prompt=prompt, cache_salt=f"alone-{index}")
        lengths.append(split.json()["usage"]["prompt_tokens"])
        if split.json()["choices"][0]["text"] != alone.json()["choices"][0]["text"]:
            different.append((wanted, split.json()["choices"][0]["text"], alone.json()["choices"][0]["text"]))
    assert not different
    assert min(lengths) <= 12, lengths
    assert 1400 <= max(lengths) <= 1600, lengths
    wait_for(
        lambda: deployment.decode_metrics().num_nixl_transfers == before + len(PROMPT_TOKENS),
        "one NIXL transfer for each request",
        15,
    )


async def test_a_request_that_only_the_decode_engine_refuses_strands_no_kv(
    deployment: Deployment, http: httpx.AsyncClient
) -> None:
    before = deployment.prefill_metrics().num_nixl_expired
    answer = await complete(http, deployment.url, prompt=prompt_of(300, seed=77), max_tokens=100_000)
    assert answer.status_code == 400, answer.text
    assert answer.headers["x-antiphon-path"] == "pd"
    wait_for(lambda: deployment.prefill_metrics().kv_usage == 0, "the prefill engine's KV is free", 8)
    assert deployment.prefill_metrics().num_nixl_expired == before


# ---- KV from the cache server ----------------------------------------------------------------------------------------


async def forget(deployment: Deployment, http: httpx.AsyncClient) -> None:
    """Both engines' own prefix caches are empty; vLLM refuses while blocks are in use."""
    deadline = asyncio.get_running_loop().time() + LEASE_S + 10
    for url in (deployment.prefill_url, deployment.decode_url):
        while not (await http.post(f"{url}/reset_prefix_cache")).json()["success"]:
            assert asyncio.get_running_loop().time() < deadline, "an engine holds blocks all the time"
            await asyncio.sleep(0.05)


async def sources_of(deployment: Deployment, http: httpx.AsyncClient, answer: httpx.Response) -> dict[str, Any]:
    """The ``tokens`` of an answer's receipt, once both engines have reported."""
    receipt_id = answer.headers["x-antiphon-receipt"]
    tokens: dict[str, Any] = (await http.get(f"{deployment.url}/receipts/{receipt_id}?wait_s=5")).json()["tokens"]
    assert tokens["state"] == "complete", tokens
    assert sum(tokens["by_source"].values()) == tokens["prompt"]
    return tokens


def token_ids(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(num_tokens)]


async def test_prefill_loads_from_the_cache_and_decode_pulls(deployment: Deployment, http: httpx.AsyncClient) -> None:
    prompt = token_ids(3 * CHUNK + 30, seed=300)
    cold = await complete(http, deployment.url, prompt=prompt)
    assert (await sources_of(deployment, http, cold))["by_source"]["computed"] == len(prompt)
    await forget(deployment, http)
    before = deployment.decode_metrics().num_nixl_transfers
    warm = await complete(http, deployment.url, prompt=prompt)
    assert warm.json()["choices"][0]["text"] == cold.json()["choices"][0]["text"]
    tokens = await sources_of(deployment, http, warm)
    assert (tokens["by_source"]["l1"], tokens["by_source"]["computed"]) == (3 * CHUNK, 30)
    assert (tokens["prefill"]["l1"], tokens["prefill"]["computed"]) == (3 * CHUNK, 30)
    assert (tokens["decode"]["remote_prefill"], tokens["decode"]["computed"]) == (len(prompt) - 1, 1)
    wait_for(lambda: deployment.decode_metrics().num_nixl_transfers == (before or 0) + 1, "one NIXL transfer", 15)


async def test_the_next_turn_finds_on_prefill_what_decode_has_stored(
    deployment: Deployment, http: httpx.AsyncClient
) -> None:
    prompt = token_ids(3 * CHUNK - 60, seed=301)
    options = {"max_tokens": 90, "ignore_eos": True, "return_token_ids": True}
    first = await complete(http, deployment.url, prompt=prompt, **options)
    turn = prompt + first.json()["choices"][0]["token_ids"] + token_ids(40, seed=302)
    await sources_of(deployment, http, first)
    await forget(deployment, http)
    second = await complete(http, deployment.url, prompt=turn)
    # Of these three chunks, prefill has computed two; the third was completed by decoding.
    assert (await sources_of(deployment, http, second))["prefill"]["l1"] == 3 * CHUNK
    alone = await complete(http, deployment.decode_url, prompt=turn, cache_salt="alone")
    assert second.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]


async def test_blocks_of_a_producer_are_freed_and_loaded_at_once(
    deployment: Deployment, http: httpx.AsyncClient
) -> None:
    prompts = [token_ids(4 * CHUNK + 20, seed=310 + index) for index in range(4)]
    cold = [(await complete(http, deployment.url, prompt=prompt)).json()["choices"][0]["text"] for prompt in prompts]
    for _ in range(3):
        await forget(deployment, http)
        answers = await asyncio.gather(*(complete(http, deployment.url, prompt=prompt) for prompt in prompts))
        assert [answer.json()["choices"][0]["text"] for answer in answers] == cold


async def test_a_killed_cache_server_fails_no_request_and_comes_back(
    deployment: Deployment, http: httpx.AsyncClient
) -> None:
    prompts = [token_ids(2 * CHUNK + 20, seed=320 + index) for index in range(3)]
    cold = [(await complete(http, deployment.url, prompt=prompt)).json()["choices"][0]["text"] for prompt in prompts]
    row = deployment.status()["cache"]
    is_over = asyncio.Event()

    async def ask(index: int) -> None:
        while not is_over.is_set():
            answer = await complete(http, deployment.url, prompt=prompts[index])
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == cold[index]

    asking = [asyncio.create_task(ask(index)) for index in range(3)]
    os.kill(row["pid"], signal.SIGKILL)

    def is_back() -> bool:
        found = deployment.status()["cache"]
        return found["state"] == "ready" and found["pid"] != row["pid"]

    while not await asyncio.to_thread(is_back):
        assert not any(task.done() for task in asking), "a request failed while the cache server was away"
    is_over.set()
    await asyncio.gather(*asking)
    began = asyncio.get_running_loop().time()
    while True:
        await forget(deployment, http)
        again = await complete(http, deployment.url, prompt=prompts[0])
        if (await sources_of(deployment, http, again))["prefill"]["l1"]:
            break
        assert asyncio.get_running_loop().time() - began < 20, "reuse does not come back"


# ---- engines that die ------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What one client saw."""

    status: int
    text: str
    is_whole: bool
    has_error: bool


async def stream_once(http: httpx.AsyncClient, deployment: Deployment, index: int) -> Seen:
    body = {"model": "smollm2", "prompt": prompt_of(40, 9000 + index), "max_tokens": 24, "stream": True}
    text, is_whole = "", True
    async with http.stream("POST", f"{deployment.url}/v1/completions", json=body) as response:
        try:
            async for piece in response.aiter_text():
                text += piece
        except httpx.RemoteProtocolError:
            is_whole = False
    return Seen(response.status_code, text, is_whole, '"error"' in text)


async def kill_under_load(deployment: Deployment, http: httpx.AsyncClient, name: str) -> list[Seen]:
    """Four clients stream without pause while the engine is killed; what each request saw."""
    seen: list[Seen] = []
    is_killed = asyncio.Event()
    pid = deployment.status()[name]["pid"]

    async def client(number: int) -> None:
        index = number * 1000
        after_kill = 0
        while after_kill < 2:
            after_kill += is_killed.is_set()
            seen.append(await stream_once(http, deployment, index))
            index += 1

    clients = [asyncio.create_task(client(number)) for number in range(4)]
    wait_until_busy = asyncio.get_running_loop().time() + 60
    while len(seen) < 4:  # every client has had an answer, so the pair is warm and busy
        assert asyncio.get_running_loop().time() < wait_until_busy
        await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    is_killed.set()
    await asyncio.gather(*clients)
    return seen


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_killed_engine_is_honest_and_comes_back(
    deployment: Deployment, http: httpx.AsyncClient, name: str
) -> None:
    restarts = deployment.status()[name]["restarts"]
    seen = await kill_under_load(deployment, http, name)
    assert any(one.has_error for one in seen), "the kill was noticed by nobody"
    for one in seen:
        assert one.is_whole, one
        if one.status == 200:
            assert one.text.endswith("data: [DONE]\n\n"), one
        else:
            assert one.status in (502, 503), one
            assert json.loads(one.text)["error"]["message"]
        assert "127.0.0.1" not in one.text.replace("___prefill_addr_127.0.0.1", "").replace(
            "___decode_addr_127.0.0.1", ""
        )
    # It says `dead` for the moment in which the supervisor has not yet noticed.
    states = wait_for(lambda: {deployment.status()[name]["state"]} - {"dead"}, "status says that it restarts", 15)
    assert states <= {"restarting", "starting"}
    await asyncio.to_thread(deployment.wait_ready)
    row = deployment.status()[name]
    assert (row["state"], row["restarts"]) == ("ready", restarts + 1)
    answer = await complete(http, deployment.url, prompt="The capital of France is")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-antiphon-path"] == "pd"
    assert "Paris" in answer.json()["choices"][0]["text"]
