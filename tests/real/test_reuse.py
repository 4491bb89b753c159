"""Real vLLM with the connector and a real cache server: the same tokens with KV from the cache as without, and nothing
lost by any death.

Method: one engine in float32 whose own prefix cache is emptied between a prompt's first and second run, so that the
second loads from the cache server; one engine and one server for the whole file. ``kv_load_failure_policy`` is ``fail``
throughout: a cache fault that failed a request would be seen. The tests that kill something come last.
"""

from __future__ import annotations

import random
import signal
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.real.deployment import wait_for
from tests.real.reuse import BLOCK, CHUNK, CacheServerProcess, Engine, post, tokens

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(400)]

BLOCK_BYTES = BLOCK * 46_080  # of the demo model in float32
KV_MEMORY_BYTES = 34 * BLOCK_BYTES
"""Room for the longest prompt here, 12 chunks and a tail, and too little for four that grow."""
TAIL = 19
STALL_MAX_S = 0.2


@pytest.fixture(scope="module")
def cache(
    tmp_path_factory: pytest.TempPathFactory,
    _ports: object,
    die_with_parent: Callable[[], None],
    adopted: set[int],
) -> Iterator[CacheServerProcess]:
    """A cache server, ready."""
    ports: list[int] = _ports.take(2)  # type: ignore[attr-defined]
    found = CacheServerProcess(tmp_path_factory.mktemp("cache"), *ports, die_with_parent, adopted)
    found.start()
    try:
        yield found
    finally:
        if found.process is not None and found.process.poll() is None:
            found.kill()


@pytest.fixture(scope="module")
def engine(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    cache: CacheServerProcess,
    _ports: object,
    die_with_parent: Callable[[], None],
    adopted: set[int],
) -> Iterator[Engine]:
    """An engine whose gate has passed."""
    (port,) = _ports.take(1)  # type: ignore[attr-defined]
    found = Engine(tmp_path_factory.mktemp("engine"), model, port, cache, die_with_parent, adopted)
    found.start(KV_MEMORY_BYTES)
    try:
        wait_for(cache.has_engine, "the gate has passed", 10.0)
        yield found
    finally:
        if found.process is not None and found.process.poll() is None:
            found.kill()


def sums_up(report: dict[str, int]) -> bool:
    sources = ("device", "l1", "remote_prefill", "computed")
    return sum(report[name] for name in sources) == report["num_prompt_tokens"]


# ---- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5, 8, 12])
def test_output_is_the_same_with_chunks_from_the_cache(engine: Engine, num_chunks: int) -> None:
    prompt = tokens(num_chunks * CHUNK + TAIL, seed=num_chunks)
    cold = engine.complete(prompt)
    engine.forget()
    warm = engine.complete(prompt)
    assert warm.text == cold.text
    assert (cold.source("l1"), cold.source("computed")) == (0, len(prompt))
    assert (warm.source("l1"), warm.source("computed")) == (num_chunks * CHUNK, TAIL)


def test_a_prompt_of_whole_chunks_computes_its_last_token(engine: Engine) -> None:
    prompt = tokens(2 * CHUNK, seed=20)
    cold = engine.complete(prompt)
    engine.forget()
    warm = engine.complete(prompt)
    assert warm.text == cold.text
    assert (warm.source("l1"), warm.source("computed")) == (2 * CHUNK - 1, 1)


def test_a_local_hit_inside_a_chunk_is_completed_from_the_cache(engine: Engine) -> None:
    prompt = tokens(5 * CHUNK + TAIL, seed=21)
    cold = engine.complete(prompt)
    engine.forget()
    engine.complete(prompt[: CHUNK + BLOCK + 1], max_tokens=1)  # three blocks are in the engine: a chunk and a half
    warm = engine.complete(prompt)
    assert warm.text == cold.text
    assert (warm.source("device"), warm.source("l1")) == (CHUNK + BLOCK, 5 * CHUNK - CHUNK - BLOCK)
    assert sums_up(warm.report or {})


def test_a_prompt_that_goes_on_loads_what_it_shares(engine: Engine) -> None:
    first = tokens(3 * CHUNK, seed=22)
    longer = first + tokens(2 * CHUNK + TAIL, seed=23)
    cold = engine.complete(longer, cache_salt="without reuse")
    engine.complete(first)
    engine.forget()
    warm = engine.complete(longer)
    assert warm.text == cold.text
    assert warm.source("l1") == 3 * CHUNK


def test_what_was_generated_is_stored_too(engine: Engine) -> None:
    prompt = tokens(CHUNK - 40, seed=24)
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 80, "temperature": 0, "ignore_eos": True}

    answer = post(f"{engine.url}/v1/completions", {**body, "return_token_ids": True})
    turn = prompt + answer["choices"][0]["token_ids"] + tokens(TAIL, seed=25)
    engine.forget()
    assert engine.complete(turn).source("l1") == CHUNK


def test_equal_prompts_at_the_same_time(engine: Engine) -> None:
    prompt = tokens(3 * CHUNK + TAIL, seed=26)
    cold = engine.complete(prompt)
    engine.forget()
    warm = engine.complete_all([prompt] * 4)
    assert {answer.text for answer in warm} == {cold.text}
    assert all(sums_up(answer.report or {}) for answer in warm)
    assert all(answer.source("computed") < CHUNK for answer in warm)


def test_requests_that_are_preempted_and_resumed(engine: Engine, cache: CacheServerProcess) -> None:
    # Eight blocks each fill the engine; each needs a ninth after a few tokens, and some must give theirs up.
    prompts = [tokens(8 * BLOCK - 14, seed=30 + index) for index in range(4)]
    alone = [engine.complete(prompt, max_tokens=60, ignore_eos=True) for prompt in prompts]
    engine.forget()
    before = engine.metrics().get("vllm:num_preemptions_total") or 0
    together = engine.complete_all(prompts, max_tokens=60, ignore_eos=True)
    assert (engine.metrics().get("vllm:num_preemptions_total") or 0) > before, "nothing was preempted: no test"
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert all(sums_up(answer.report or {}) for answer in together)
    wait_for(lambda: cache.num_leases() == 0, "every lease has ended", 5.0)


def test_blocks_that_are_freed_and_loaded_again_at_once(engine: Engine) -> None:
    prompts = [tokens(4 * CHUNK + TAIL, seed=40 + index) for index in range(3)]
    cold = [engine.complete(prompt).text for prompt in prompts]
    for _ in range(3):
        engine.forget()
        assert [answer.text for answer in engine.complete_all(prompts)] == cold


def test_aborted_requests_leave_nothing(engine: Engine, cache: CacheServerProcess) -> None:
    rng = random.Random(5)
    prompts = [tokens(4 * CHUNK + TAIL, seed=50 + index) for index in range(4)]
    for prompt in prompts:
        engine.complete(prompt, max_tokens=1)
    engine.forget()
    for index in range(16):
        body = f'{{"model": "smollm2", "prompt": {prompts[index % 4]}, "max_tokens": 200, "ignore_eos": true}}'
        leave_s = rng.choice((0.002, 0.01, 0.03, 0.1, 0.3))
        request = urllib.request.Request(
            f"{engine.url}/v1/completions", data=body.encode(), headers={"content-type": "application/json"}
        )
        with pytest.raises(OSError):
            urllib.request.urlopen(request, timeout=leave_s)
        if index % 4 == 3:
            engine.forget()
    wait_for(lambda: engine.metrics().kv_usage == 0.0, "the engine holds no block", 5.0)
    wait_for(lambda: cache.num_leases() == 0, "every lease has ended", 5.0)
    assert cache.status()["storage_manager"]["l1_manager"]["write_locked_count"] == 0


def test_prompt_logprobs_are_computed(engine: Engine) -> None:
    prompt = tokens(2 * CHUNK + TAIL, seed=60)
    engine.complete(prompt)
    engine.forget()
    bypassed = engine.complete(prompt, prompt_logprobs=1)
    assert bypassed.source("computed") == len(prompt)


def test_another_salt_shares_nothing(engine: Engine) -> None:
    prompt = tokens(2 * CHUNK + TAIL, seed=61)
    engine.complete(prompt, cache_salt="one")
    engine.forget()
    assert engine.complete(prompt, cache_salt="two").source("l1") == 0
    engine.forget()
    assert engine.complete(prompt, cache_salt="one").source("l1") == 2 * CHUNK


def test_time_to_first_token_from_the_cache(engine: Engine) -> None:
    prompt = tokens(6 * CHUNK + 24, seed=70)
    cold, warm = [], []
    for round_number in range(5):
        own = [100 + round_number, *prompt[1:]]
        cold.append(engine.complete(own, max_tokens=1).seconds)
        engine.forget()
        again = engine.complete(own, max_tokens=1)
        assert again.source("l1") == 6 * CHUNK
        warm.append(again.seconds)
        engine.forget()
    ratio = statistics.median(warm) / statistics.median(cold)
    print(f"TTFT cold {statistics.median(cold):.3f} s, from L1 {statistics.median(warm):.3f} s: {ratio:.3f}")
    assert ratio <= 0.15


# ---- deaths ----------------------------------------------------------------------------------------------------------


def test_a_server_that_hangs_costs_little_and_fails_nothing(engine: Engine, cache: CacheServerProcess) -> None:
    usual = [engine.complete(tokens(CHUNK + TAIL, seed=80 + index), max_tokens=1).seconds for index in range(5)]
    with cache.hung():
        stalled = []
        for index in range(5):
            prompt = tokens(CHUNK + TAIL, seed=90 + index)
            began = time.perf_counter()

            post(f"{engine.url}/v1/completions", {"model": "smollm2", "prompt": prompt, "max_tokens": 1})
            stalled.append(time.perf_counter() - began)
    assert statistics.median(stalled) - statistics.median(usual) < STALL_MAX_S
    prompt = tokens(2 * CHUNK + TAIL, seed=99)

    def is_reused() -> bool:
        engine.forget()
        return engine.complete(prompt).source("l1") == 2 * CHUNK

    wait_for(is_reused, "reuse is back", 15.0)  # it takes two requests to see it


def test_a_server_killed_under_load_fails_no_request(engine: Engine, cache: CacheServerProcess) -> None:
    prompts = [tokens(3 * CHUNK + TAIL, seed=100 + index) for index in range(4)]
    expected = [engine.complete(prompt).text for prompt in prompts]
    has_stopped = threading.Event()
    texts: list[tuple[int, str]] = []
    short_s: list[float] = []

    def load(index: int) -> None:
        while not has_stopped.is_set():
            texts.append((index, engine.complete(prompts[index]).text))

    def short(number: int) -> float:
        """Seconds of a request of one token, which is stalled by whatever stalls the engine's loop."""
        began = time.perf_counter()
        post(f"{engine.url}/v1/completions", {"model": "smollm2", "prompt": tokens(20, seed=number), "max_tokens": 1})
        return time.perf_counter() - began

    threads = [threading.Thread(target=load, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(texts) >= 4, "the load runs", 60.0)
    usual_s = [short(2000 + number) for number in range(6)]
    cache.kill(signal.SIGKILL)
    num_before = len(texts)
    short_s += [short(3000 + number) for number in range(6)]
    wait_for(lambda: len(texts) >= num_before + 4, "requests go on without a server", 60.0)
    cache.start()
    # Reuse is back: the engine is attached, its gate known, and running requests store.
    wait_for(lambda: cache.has_engine() and cache.num_objects > 0, "chunks are stored again", 5.0)
    num_before = len(texts)
    wait_for(lambda: len(texts) >= num_before + 4, "requests go on with the new server", 60.0)
    has_stopped.set()
    for thread in threads:
        thread.join()
    assert all(text == expected[index] for index, text in texts)
    assert statistics.median(short_s) - statistics.median(usual_s) < STALL_MAX_S
    engine.forget()
    again = engine.complete(prompts[0])
    assert (again.text, again.source("l1")) == (expected[0], 3 * CHUNK)


def test_a_server_restarted_in_order_loses_no_request(engine: Engine, cache: CacheServerProcess) -> None:
    prompt = tokens(2 * CHUNK + TAIL, seed=110)
    cold = engine.complete(prompt)
    cache.kill(signal.SIGTERM)
    assert engine.complete(prompt).text == cold.text
    cache.start()
    wait_for(cache.has_engine, "the engine is attached again", 5.0)
    engine.forget()
    engine.complete(prompt)
    engine.forget()
    warm = engine.complete(prompt)
    assert (warm.text, warm.source("l1")) == (cold.text, 2 * CHUNK)


def test_an_engine_killed_leaves_nothing_and_its_next_life_hits(engine: Engine, cache: CacheServerProcess) -> None:
    prompt = tokens(4 * CHUNK + TAIL, seed=120)
    cold = engine.complete(prompt)
    engine.kill()
    wait_for(lambda: cache.status()["engines"] == [], "no registration is left", 5.0)
    assert cache.num_leases() == 0
    engine.start(KV_MEMORY_BYTES)
    warm = engine.complete(prompt)
    assert (warm.text, warm.source("l1")) == (cold.text, 4 * CHUNK)
