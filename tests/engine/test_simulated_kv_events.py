"""The KV events of the simulated engine: pure, against its cache; and from a real process to the listener."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.engine.simulated.kv import chain_keys, pack, root_state
from antiphon.engine.simulated.kv_log import KvLog
from antiphon.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from antiphon.router.kv_events import stored_blocks
from antiphon.router.tokenizing import Tokenizing, TokenizingOptions
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.kv_chain import chain_root
from antiphon.routing.kv_index import IndexOptions, KvIndex
from antiphon.transport.http.client import HttpPool
from tests.engine.simulated_processes import EngineProcess
from tests.engine.simulated_world import World
from tests.router.kv_engines import Listener, until

PROMPT = list(range(100, 113))
"""Three blocks of four, and one token."""


class Heard:
    """An index that hears the pure engine ``e`` of a world."""

    def __init__(self, **spec: int) -> None:
        self.world = World.of("e", **spec)
        self.engine = self.world.engines["e"]
        self.log = KvLog(b"secret", 4)
        self.engine.log_to(self.log)
        self.index, self.endpoint = KvIndex(IndexOptions()), Endpoint("http://e:1", "prefill")
        self.kinds: list[type] = []

    def hear(self) -> None:
        for event in self.log.take():
            self.kinds.append(type(event))
            if isinstance(event, BlockStored):
                self.index.store(self.endpoint, 0, stored_blocks(event))
            elif isinstance(event, BlockRemoved):
                self.index.remove(self.endpoint, 0, event.block_hashes, 0, event.medium or "")
            else:
                self.index.clear(self.endpoint, 0)
        self.index.validate()

    def agrees(self, prompt: list[int], salt: str = "") -> int:
        """Tokens held of a prompt, which engine and index must agree on."""
        keys = chain_keys(root_state("m", salt), pack(prompt), 4)
        held = 4 * len(self.engine.kv.lookup(keys[: (len(prompt) - 1) // 4]))
        assert self.index.match(prompt, [self.endpoint], chain_root("", salt)) == [held]
        return held


def test_prompt_and_answer_are_announced_and_the_clearing_too() -> None:
    heard = Heard()
    sequence = heard.world.submit("e", PROMPT, 9)
    heard.world.run()
    heard.hear()
    assert heard.agrees(PROMPT) == 12
    assert heard.agrees([*PROMPT, *sequence.output]) == 20
    assert heard.agrees(PROMPT, "acme") == 0
    assert heard.index.num_unplaced == 0
    heard.engine.kv.reset_cache()
    heard.hear()
    assert heard.agrees(PROMPT) == 0
    assert heard.kinds[-1] is AllBlocksCleared


def test_blocks_of_one_prompt_come_in_one_event_under_names_of_this_life() -> None:
    first, second = Heard(), Heard()
    second.log = KvLog(b"another", 4)
    second.engine.log_to(second.log)
    names = []
    for heard in (first, second):
        heard.world.submit("e", PROMPT, 1, namespace="acme")
        heard.world.run()
        (event,) = heard.log.take()
        assert isinstance(event, BlockStored)
        assert (event.token_ids, event.extra_keys, event.parent_block_hash) == (
            PROMPT[:12],
            [["acme"], None, None],
            None,
        )
        names.append(event.block_hashes)
    assert set(names[0]).isdisjoint(names[1])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 22), st.integers(1, 6), st.booleans(), st.booleans()), max_size=25
    )
)
def test_the_index_knows_what_a_small_cache_holds(script: list[tuple[int, int, int, bool, bool]]) -> None:
    heard = Heard(kv_blocks=10)
    prompts = [[which, *range(21)] if which else list(range(22)) for which in range(4)]
    for which, length, max_tokens, is_salted, hands_over in script:
        salt = "acme" if is_salted else ""
        heard.world.submit("e", prompts[which][:length], max_tokens, namespace=salt, hands_over=hands_over)
        heard.world.run()
        heard.hear()
        for prompt in prompts:
            heard.agrees(prompt)
            heard.agrees(prompt, "acme")
    assert heard.index.num_unplaced == 0


@pytest.mark.process
async def test_a_real_process_is_heard_and_asked(die_with_parent: Callable[[], None]) -> None:
    listener = Listener(replay_timeout_s=2.0)
    await listener.events.start()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        replay_port = sock.getsockname()[1]
    endpoint = listener.expect("engine", replay_port)
    flags = {"kv-events-endpoint": listener.url, "kv-events-topic": "engine"}
    flags["kv-events-replay-endpoint"] = f"tcp://127.0.0.1:{replay_port}"
    process = await asyncio.to_thread(EngineProcess.start, die_with_parent, **flags)
    pool = HttpPool("127.0.0.1", process.port)
    tokenizing = Tokenizing(lambda _: pool, TokenizingOptions(wait_s=5.0))
    try:
        tokens = await tokenizing.token_ids(endpoint, b'{"model":"m","prompt":"one two three four five six seven"}')
        assert tokens is not None
        whole = len(tokens) - len(tokens) % 4
        while not listener.held(endpoint, list(tokens[:whole])):
            # What is said before the subscription has arrived is lost; then it is replayed.
            await asyncio.to_thread(process.complete, "one two three four five six seven", 4)
        assert listener.held(endpoint, list(tokens[:whole])) == whole
        await asyncio.to_thread(process.ask, "POST", "/reset_prefix_cache")
        await until(lambda: not listener.held(endpoint, list(tokens[:whole])), "it is cleared")
        assert listener.count("unreadable") == listener.count("bugs") == 0
    finally:
        tokenizing.close()
        pool.close()
        await asyncio.to_thread(process.stop)
        listener.events.close()
