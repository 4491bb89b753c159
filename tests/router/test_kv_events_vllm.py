"""The listener against the publisher that vLLM ships: its frames, its classes, its replay."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon.routing.kv_chain import chain_root
from tests.router.kv_engines import Listener, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
TOKENS = list(range(48))


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **fields: Any) -> list[Any]:
    plain = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": 16}
    return ["BlockStored", plain | {"lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0} | fields]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def test_vllms_publisher_is_heard_and_replayed(die_with_parent: Callable[[], None]) -> None:
    listener = Listener(replay_timeout_s=5.0)
    replay_port = free_port()
    await listener.events.start()
    endpoint = listener.expect("engine", replay_port)
    script = Path(__file__).with_name("vllm_publisher.py")
    argv = [sys.executable, str(script), listener.url, f"tcp://127.0.0.1:{replay_port}", "engine"]
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin = process.stdin

    def say(*events: list[Any]) -> None:
        stdin.write(json.dumps(list(events)) + "\n")
        stdin.flush()

    try:
        lines = asyncio.to_thread(process.stdout.readline)
        assert (await asyncio.wait_for(lines, 110)).strip() == "ready"
        say(stored([2**64 - 1], TOKENS[:16], kv_cache_spec_kind="full_attention", session_id="s"))  # lost or not
        while not listener.count("messages"):
            say()
            await asyncio.sleep(0.05)
        say(stored([2, 3], TOKENS[16:], 2**64 - 1, extra_keys=[None, None]))
        await until(lambda: listener.held(endpoint, TOKENS) == 48, "what was lost was replayed")
        say(stored([9], TOKENS[:16], lora_name="poet", lora_id=1, extra_keys=[["poet", "acme"]]))
        root = chain_root("poet", "acme")
        await until(lambda: listener.index.match([*TOKENS[:16], 0], [endpoint], root) == [16], "the adapter's block")
        say(["BlockRemoved", {"block_hashes": [3], "medium": "GPU", "group_idx": 0}])
        await until(lambda: listener.held(endpoint, TOKENS) == 32, "a block is gone")
        say(["AllBlocksCleared", {}])
        await until(lambda: listener.held(endpoint, TOKENS) == 0, "all are gone")
        statistics = listener.events.statistics()
        assert [statistics[name] for name in ("unreadable", "unknown_events", "bugs", "strangers")] == [0] * 4
    finally:
        stdin.close()
        listener.events.close()
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait(10)
            process.stdout.close()
