"""What a request leaves behind: nothing that only the garbage collector finds.

A body held by a cycle stays until the next collection: with long prompts that is hundreds of megabytes.
"""

from __future__ import annotations

import gc
import json

import pytest

from tests.router.scripted import Seen, Wire, ask, engine, prefills, routing, streams

OF_A_REQUEST = {"Body", "Flight", "Handle", "HttpRequest", "Life", "Relay", "Responder", "WholeAnswer"}


async def answers_whole(_: Seen, wire: Wire) -> None:
    wire.whole(json.dumps({"choices": [{"text": "a"}], "usage": {"prompt_tokens": 3}}).encode())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_leaves_no_cycle(kept_garbage: list[object], stream: bool) -> None:
    async with engine(prefills) as p, engine(streams if stream else answers_whole) as d, routing([p], [d]) as router:
        await ask(router, stream=stream)  # connections are made
        gc.collect()
        kept_garbage.clear()
        for _ in range(3):
            assert (await ask(router, stream=stream)).status == 200
        gc.collect()
        assert not OF_A_REQUEST & {type(each).__name__ for each in kept_garbage}
