"""Routing by what is where, on real engines: KV events of vLLM's own publisher, its tokenizer, its prefix cache.

Goal: a repeated prefix goes to the engine that holds it; a prompt that a decode engine or its cache server holds is
sent there without a hand-over; and where the claim was wrong, the answer is right all the same. Method: the engines of
the shared deployment, behind routers that each test starts.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from antiphon.engine.vllm import EngineMetrics, parse_metrics
from tests.real.deployment import Deployment, wait_for
from tests.real.reuse import BLOCK, CHUNK, tokens

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(400)]

MAX_TOKENS = 8
LOCAL_MAX_TOKENS = 160
"""More than the tail of a prompt that is no whole block or chunk."""


class RouterProcess:
    """``antiphon router`` before engines of the deployment."""

    def __init__(self, url: str) -> None:
        self.url = url

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/status", timeout=30).json()
        return found

    def ask(self, prompt: list[int] | str, key: str = "", **fields: Any) -> tuple[str, dict[str, Any]]:
        """The text of a greedy answer, and the receipt with what the engines reported."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, **fields}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=300)
        assert answer.status_code == 200, answer.text
        receipt = httpx.get(f"{self.url}/receipts/{answer.headers['x-antiphon-receipt']}?wait_s=5", timeout=30).json()
        assert receipt["path"] == answer.headers["x-antiphon-path"]
        return answer.json()["choices"][0]["text"], receipt

    def num_blocks(self, address: str) -> int:
        """Blocks that an engine is known to hold."""
        events = self.status()["whereabouts"]["kv_events"]
        return int(events["blocks"].get(address, 0))


@pytest.fixture
def start_router(
    deployment: Deployment, tmp_path: Path, free_port: int, die_with_parent: Callable[[], None]
) -> Callable[..., contextlib.AbstractContextManager[RouterProcess]]:
    """Starts a router on the port that the engines' events go to."""

    @contextlib.contextmanager
    def start(*flags: str) -> Iterator[RouterProcess]:
        port = free_port
        command = [sys.executable, "-m", "antiphon", "router", "--port", str(port), *flags]
        command += ["--kv-events-port", str(deployment.ports["events"]), "--tokenize-timeout-s", "2"]
        with (tmp_path / f"{port}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent)
        try:
            router = RouterProcess(f"http://127.0.0.1:{port}")

            def is_ready() -> bool:
                assert process.poll() is None, (tmp_path / f"{port}.log").read_text()
                with contextlib.suppress(httpx.TransportError):
                    return httpx.get(f"{router.url}/readiness", timeout=5).status_code == 200
                return False

            wait_for(is_ready, "the router is ready", 30)
            yield router
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 0, (tmp_path / f"{port}.log").read_text()

    return start


def metrics_of(url: str) -> EngineMetrics:
    return parse_metrics(httpx.get(f"{url}/metrics", timeout=30).text)


def reset(url: str) -> None:
    """Empty an engine's prefix cache; it cannot be emptied while a request or a hand-over holds blocks."""
    wait_for(lambda: httpx.post(f"{url}/reset_prefix_cache", timeout=30).json()["success"], "the cache is empty", 40)


def address_of(url: str) -> str:
    return url.removeprefix("http://")


def poke(url: str) -> None:
    """An engine says what has changed when it next computes: let it, with too little to fill a block."""
    body = {"model": "smollm2", "prompt": tokens(5, seed=int(time.time())), "max_tokens": 1}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()


def test_what_a_decode_engine_holds_is_not_handed_over(
    deployment: Deployment, start_router: Callable[..., contextlib.AbstractContextManager[RouterProcess]]
) -> None:
    """First ``pd``; then ``cached``, on the engine itself; then on its cache server; then a claim that is wrong, which
    costs time and no answer; then ``pd`` again."""
    decode = address_of(deployment.decode_url)
    prompt = tokens(2 * CHUNK + 90, seed=4001)
    with start_router(
        *("--prefill", deployment.prefill_url, "--decode", deployment.decode_url, "--policy", "kv_aware"),
        *("--local-max-tokens", str(LOCAL_MAX_TOKENS), "--cache-server", deployment.cache_url),
    ) as router:
        text, first = router.ask(prompt)
        assert (first["path"], first["reason"]) == ("pd", "default")
        wait_for(lambda: router.num_blocks(decode) >= len(prompt) // BLOCK, "the decode engine's blocks are known", 20)
        transfers = metrics_of(deployment.decode_url).num_nixl_transfers

        again, second = router.ask(prompt)
        assert again == text
        assert (second["path"], second["reason"], second["prefill"]) == ("cached", "held_by_engine", None)
        assert second["num_held_tokens"] == len(prompt) // BLOCK * BLOCK
        assert second["tokens"]["by_source"]["device"] == second["num_held_tokens"]

        reset(deployment.decode_url)
        poke(deployment.decode_url)
        wait_for(lambda: router.num_blocks(decode) == 0, "the router knows that the blocks are gone", 20)
        again, third = router.ask(prompt)
        assert again == text
        assert (third["path"], third["reason"]) == ("cached", "held_by_server")
        assert third["tokens"]["by_source"]["l1"] == 2 * CHUNK
        wait_for(lambda: router.num_blocks(decode) >= len(prompt) // BLOCK, "its blocks are known again", 20)

        httpx.post(f"{deployment.cache_url}/clear", json={}, timeout=30).raise_for_status()
        reset(deployment.decode_url)  # without a word, as the engine has nothing to compute
        again, fourth = router.ask(prompt)
        assert again == text
        assert (fourth["path"], fourth["reason"]) == ("cached", "held_by_engine")
        assert fourth["tokens"]["by_source"]["computed"] == len(prompt), "it was not there"
        assert metrics_of(deployment.decode_url).num_nixl_transfers == transfers

        httpx.post(f"{deployment.cache_url}/clear", json={}, timeout=30).raise_for_status()
        reset(deployment.decode_url)
        poke(deployment.decode_url)
        wait_for(lambda: router.num_blocks(decode) == 0, "the router knows that the blocks are gone", 20)
        again, fifth = router.ask(prompt)
        assert again == text
        assert fifth["path"] == "pd"
        assert metrics_of(deployment.decode_url).num_nixl_transfers == transfers + 1


def test_a_text_is_tokenized_by_an_engine(
    deployment: Deployment, start_router: Callable[..., contextlib.AbstractContextManager[RouterProcess]]
) -> None:
    """A chat is looked up by the tokens that the engine's own template makes of it."""
    decode = address_of(deployment.decode_url)
    question = "Which of these words comes twice? " + " ".join(f"word{number}" for number in range(160))
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "max_tokens": 4, "temperature": 0}
    with start_router(
        *("--prefill", deployment.prefill_url, "--decode", deployment.decode_url, "--policy", "kv_aware"),
        *("--local-max-tokens", str(LOCAL_MAX_TOKENS)),
    ) as router:
        answers = []
        for path in ("pd", "cached"):
            answer = httpx.post(f"{router.url}/v1/chat/completions", json=body, timeout=300)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-antiphon-path"] == path
            answers.append(answer.json()["choices"][0]["message"]["content"])
            num_tokens = answer.json()["usage"]["prompt_tokens"]
            wait_for(lambda num=num_tokens: router.num_blocks(decode) >= num // BLOCK, "its blocks are known", 20)
        assert answers[0] == answers[1]
        assert router.status()["whereabouts"]["tokenize"]["asked"] == 1, "the second time it is remembered"


def test_a_repeated_prefix_goes_to_the_engine_that_holds_it(
    deployment: Deployment, start_router: Callable[..., contextlib.AbstractContextManager[RouterProcess]]
) -> None:
    """Both engines as decode engines that serve alone: each conversation stays where its beginning is."""
    urls = (deployment.prefill_url, deployment.decode_url)
    for url in urls:
        reset(url)
    with start_router(
        *("--decode", urls[0], "--decode", urls[1], "--policy", "kv_aware"),
        *("--cache-server", deployment.cache_url),
    ) as router:
        homes: dict[int, str] = {}
        for seed in (4003, 4004, 4005):
            _, receipt = router.ask(tokens(2 * BLOCK, seed))
            homes[seed] = receipt["decode"]
            wait_for(lambda home=receipt["decode"]: router.num_blocks(home) >= 2, "its blocks are known", 20)
        for turn in range(1, 4):
            for seed, home in homes.items():
                prompt = tokens(2 * BLOCK, seed) + tokens(40 * turn, seed + 100)
                _, receipt = router.ask(prompt)
                assert receipt["decode"] == home, f"turn {turn} of {seed}"
                by_source = receipt["tokens"]["by_source"]
                assert by_source["device"] >= 2 * BLOCK, by_source


def test_tenants_share_no_kv(
    deployment: Deployment,
    start_router: Callable[..., contextlib.AbstractContextManager[RouterProcess]],
    tmp_path: Path,
) -> None:
    """The same prompt of two tenants is computed twice, and of one tenant once; without a key there is no answer."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.keys").write_text(f"sk-{name}-0123456789abcdef\n")
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("tenants: [{name: a, api_key_files: [a.keys]}, {name: b, api_key_files: [b.keys]}]\n")
    prompt = tokens(2 * CHUNK + 10, seed=4006)
    flags = ("--prefill", deployment.prefill_url, "--decode", deployment.decode_url, "--policy", "kv_aware")
    with start_router(*flags, "--cache-server", deployment.cache_url, "--tenants-file", str(tenants)) as router:
        found = []
        for name in ("a", "b", "a"):
            text, receipt = router.ask(prompt, key=f"sk-{name}-0123456789abcdef")
            assert receipt["tenant"] == name
            found.append((text, receipt["tokens"]["by_source"]))
        assert len({text for text, _ in found}) == 1
        for _, by_source in found[:2]:
            assert by_source["device"] == by_source["l1"] == 0, "it was computed by someone before"
        assert found[2][1]["device"] >= 2 * CHUNK
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1}
        for headers in ({}, {"authorization": "Bearer sk-c-0123456789abcdef"}):
            assert httpx.post(f"{router.url}/v1/completions", json=body, headers=headers).status_code == 401
