"""What engines say of their blocks, over real sockets: losses, replays, restarts, garbage, limits."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from antiphon.core.errors import StartError
from antiphon.router.kv_events import KvEvents, KvEventsOptions, KvSource, resolver
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.kv_index import IndexOptions, KvIndex
from antiphon.routing.kv_stream import StreamOptions
from antiphon.routing.states import EndpointState
from tests.router.kv_engines import Listener, Wire, stored, until

TOKENS = list(range(64))


@asynccontextmanager
async def heard(**options: Any) -> AsyncIterator[tuple[Listener, Wire, Endpoint]]:
    """A listener, and an engine whose topic is ``t`` and whose first batch was heard."""
    listener = Listener(**options)
    await listener.events.start()
    wire = Wire(listener.url)
    try:
        endpoint = listener.expect("t", wire.replay_port)
        await connected(listener, wire)
        await wire.say("t", 0, [stored([1], TOKENS[:16])])
        await until(lambda: listener.held(endpoint, TOKENS) == 16, "the first block is known")
        yield listener, wire, endpoint
        assert listener.count("bugs") == 0
    finally:
        wire.close()
        listener.events.close()


async def connected(listener: Listener, wire: Wire) -> None:
    """What is published before the subscription has arrived is lost: say something until it is heard."""
    before = listener.count("messages")
    while listener.count("messages") == before:
        await wire.send(b"stranger", bytes(8), b"\x93\xcb" + bytes(8) + b"\x90\x00")
        await asyncio.sleep(0.01)


async def test_what_is_lost_is_asked_for_and_found() -> None:
    async with heard() as (listener, wire, endpoint):
        wire.answer_replays()
        await wire.say("t", 1, [stored([2], TOKENS[16:32], 1)], is_lost=True)
        await wire.say("t", 2, [stored([3], TOKENS[32:48], 2)])
        await until(lambda: listener.held(endpoint, TOKENS) == 48, "the replay has filled the gap")
        assert (listener.count("gaps"), listener.count("forgotten"), wire.num_asked) == (1, 0, 1)
        assert listener.count("blocks") == {"t:1": 3}


async def test_what_cannot_be_asked_for_is_forgotten_within_a_second() -> None:
    async with heard() as (listener, wire, endpoint):
        await wire.say("t", 1, [{"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}], is_lost=True)
        await wire.say("t", 2, [stored([9], [7] * 16)])
        await until(lambda: listener.held(endpoint, TOKENS) == 0, "nothing is claimed", timeout_s=1.0)
        assert listener.held(endpoint, [7] * 16) == 16
        assert listener.count("replays_failed") == 1


async def test_removed_and_cleared_blocks_are_not_claimed() -> None:
    async with heard() as (listener, wire, endpoint):
        await wire.say("t", 1, [stored([2], TOKENS[16:32], 1), {"type": "BlockRemoved", "block_hashes": [2]}])
        await wire.say("t", 2, [stored([5], [7] * 16)])
        await until(lambda: listener.held(endpoint, [7] * 16) == 16, "the second batch is known")
        assert listener.held(endpoint, TOKENS) == 16
        await wire.say("t", 3, [{"type": "AllBlocksCleared"}])
        await until(lambda: listener.held(endpoint, TOKENS) == 0, "nothing is claimed")


async def test_a_restart_is_seen_in_the_stream() -> None:
    async with heard() as (listener, wire, endpoint):
        wire.said.clear()
        await wire.say("t", 0, [stored([5], [7] * 16)])
        await until(lambda: listener.held(endpoint, [7] * 16) == 16, "the new life is heard")
        assert listener.held(endpoint, TOKENS) == 0
        assert listener.count("restarts") == 1


async def test_a_restart_that_others_have_seen_ends_the_claims_and_the_new_life_is_asked_for() -> None:
    async with heard() as (listener, wire, endpoint):
        wire.answer_replays()
        wire.said.clear()
        await wire.say("t", 0, [stored([5], [7] * 16)], is_lost=True)
        endpoint.life += 1
        assert listener.held(endpoint, TOKENS) == 0
        await until(lambda: listener.held(endpoint, [7] * 16) == 16, "the replay tells of the new life")


async def test_an_engine_that_comes_back_with_another_replay_port_is_followed_once() -> None:
    async with heard() as (listener, old, endpoint):
        new = Wire(listener.url)
        new.answer_replays()
        try:
            listener.sources["t@2"] = KvSource(endpoint, "127.0.0.1", new.replay_port)
            await connected(listener, new)
            await new.say("t@2", 0, [stored([5], [7] * 16)])
            await until(lambda: listener.held(endpoint, [7] * 16) == 16, "the new life is heard")
            assert listener.held(endpoint, TOKENS) == 0, "the old one's blocks are gone"
            assert (listener.count("restarts"), len(listener.events._followed)) == (1, 1)
            # What was on its way from the old one comes late.
            await old.say("t", 1, [stored([2], TOKENS[16:32], 1)], stamp_s=1.0)
            await until(lambda: listener.count("dropped") == 1, "it is not wanted any more")
            assert (listener.held(endpoint, [7] * 16), len(listener.events._followed)) == (16, 1)
            await new.say("t@2", 1, [stored([6], [8] * 16)])
            await until(lambda: listener.held(endpoint, [8] * 16) == 16, "it is still followed")
            assert listener.count("restarts") == 1
        finally:
            new.close()


async def test_a_new_topic_is_followed_though_the_clock_was_set_back() -> None:
    async with heard(stream=StreamOptions(pause_s=0.05)) as (listener, wire, endpoint):
        listener.sources["t@2"] = KvSource(endpoint)
        number = 0
        async with asyncio.timeout(10):
            while listener.held(endpoint, [7] * 16) != 16:  # once the old one has been silent for so long
                await wire.say("t@2", number, [stored([5], [7] * 16)], stamp_s=1.0 + number)
                number += 1
                await asyncio.sleep(0.01)
        assert listener.held(endpoint, TOKENS) == 0


async def test_topics_that_cannot_be_followed_are_logged_once_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="antiphon.router")
    async with heard() as (listener, wire, _):
        caplog.clear()
        other = b"kv@http://10.0.0.1:8001@5657"
        for topic, rank in ((b"mine", 0), (other, 0), (b"mine", 0), (b"\xff\n", 0), (other, 0), (b"t", 3), (b"t", 3)):
            await wire.send(topic, bytes(8), b"\x93\xcb" + bytes(8) + b"\x90" + bytes([rank]))
        before = listener.count("strangers")
        await until(lambda: len(caplog.messages) == 4, "each is logged")
        assert (
            "topic b'mine' are not followed: it names no engine. Start the engine with --kv-events-config"
            in caplog.text
        )
        assert "'http://10.0.0.1:8001' is no engine of this router" in caplog.text
        assert "they are of rank 3, and router.kv_events_ranks is 1" in caplog.text
        assert "\n" not in "".join(caplog.messages)
        for number in range(100):
            await wire.send(b"kv@%d" % number, bytes(8), b"\x93\xcb" + bytes(8) + b"\x90\x00")
        await until(lambda: listener.count("strangers") >= before + 100, "all are counted")
        assert len(caplog.messages) <= 33
        assert caplog.messages[-1].endswith("are counted only (strangers)")


async def test_an_engine_that_is_removed_is_forgotten() -> None:
    async with heard() as (listener, _, endpoint):
        endpoint.state = EndpointState.REMOVED
        await until(lambda: not listener.index.num_blocks(endpoint), "it is forgotten")
        assert listener.count("blocks") == {}


async def test_no_message_ends_the_hearing() -> None:
    async with heard() as (listener, wire, endpoint):
        before = listener.count("messages")
        noise = [
            [b"t"],
            [b"t", b"short", b"x"],
            [b"t", b"\xff" * 8, b"\x93"],
            [b"t", (1).to_bytes(8, "big"), b""],
            [b"t", (1).to_bytes(8, "big"), os.urandom(500)],
            [b"t", (1).to_bytes(8, "big"), b"\x91" * 100_000],
            [b"\xff\xfe", (1).to_bytes(8, "big"), b"\x93\xcb" + bytes(8) + b"\x90\x00"],
            [b"t" * 2000, (1).to_bytes(8, "big"), b"\x93\xcb" + bytes(8) + b"\x90\x00"],
            [b"t", (1).to_bytes(8, "big"), b"\x93\xcb" + bytes(8) + b"\x90\x63"],  # a rank that is not listened for
        ]
        for frames in noise:
            await wire.send(*frames)
        await wire.say("t", 1, [{"type": "Later"}, stored([2], TOKENS[16:32], 1, more="x"), [1], stored([3], [-1], 2)])
        await until(lambda: listener.held(endpoint, TOKENS) == 32, "the good event is known")
        assert listener.count("messages") == before + len(noise) + 1
        assert listener.count("unreadable") >= 6
        assert listener.count("strangers") >= 2
        assert listener.count("unknown_events") == 3


async def test_a_router_that_comes_late_learns_all_by_a_replay() -> None:
    listener = Listener()
    await listener.events.start()
    wire = Wire(listener.url)
    try:
        endpoint = listener.expect("t", wire.replay_port)
        wire.answer_replays()
        for number in range(3):
            tokens, parent = TOKENS[16 * number : 16 * number + 16], number or None
            await wire.say("t", number, [stored([number + 1], tokens, parent)], is_lost=True)
        await connected(listener, wire)
        await wire.say("t", 3, [stored([4], TOKENS[48:], 3)])
        await until(lambda: listener.held(endpoint, TOKENS) == 64, "everything is known")
    finally:
        wire.close()
        listener.events.close()


async def test_replays_are_few_at_a_time_and_short() -> None:
    async with heard(replays_max=0) as (listener, wire, endpoint):
        await wire.say("t", 5, [stored([5], [7] * 16)])
        await until(lambda: listener.held(endpoint, [7] * 16) == 16, "it goes on without a replay")
        assert listener.held(endpoint, TOKENS) == 0
    async with heard(replay_batches_max=2) as (listener, wire, endpoint):
        wire.answer_replays()
        for number in range(1, 6):
            await wire.say("t", number, [stored([number + 1], [number] * 16)], is_lost=number < 5)
        await until(lambda: listener.count("replays_failed") == 1, "the replay was given up")
        await until(lambda: listener.held(endpoint, [5] * 16) == 16, "the newest is known")


async def test_a_quiet_engine_is_asked_and_forgotten_if_it_is_another() -> None:
    async with heard(stream=StreamOptions(verify_s=0.05)) as (listener, wire, endpoint):
        wire.answer_replays()
        await until(lambda: wire.num_asked >= 2, "it is asked")
        assert listener.held(endpoint, TOKENS) == 16
        wire.said.clear()
        await until(lambda: listener.held(endpoint, TOKENS) == 0, "it is another life")


async def test_after_a_pause_it_is_seen_whether_it_is_the_same_life() -> None:
    """The first batches of another life are lost, up to exactly the number that was expected."""
    async with heard(stream=StreamOptions(pause_s=0.5, verify_s=60.0)) as (listener, wire, endpoint):
        wire.answer_replays()
        wire.said.clear()
        later_s = time.time() + 1.0
        await wire.say("t", 0, [stored([5], [7] * 16)], is_lost=True, stamp_s=later_s)
        await wire.say("t", 1, [stored([6], [8] * 16)], stamp_s=later_s + 0.1)
        await until(lambda: listener.held(endpoint, [8] * 16) == 16, "the new life is heard")
        assert (listener.held(endpoint, [7] * 16), listener.held(endpoint, TOKENS)) == (16, 0)


async def test_a_port_that_is_taken_is_a_start_error() -> None:
    listener = Listener()
    await listener.events.start()
    port = listener.events.ports[0]
    other = KvEvents(KvIndex(IndexOptions()), listener.sources.get, KvEventsOptions(port=port))
    try:
        with pytest.raises(StartError, match=str(port)):
            await other.start()
    finally:
        listener.events.close()


def test_topics_are_resolved_among_the_endpoints_and_replays_go_to_their_host() -> None:
    endpoint = Endpoint("http://10.0.0.5:8001", "decode")
    resolve = resolver(lambda: [Endpoint("http://10.0.0.5:8000", "prefill"), endpoint])
    source = resolve("kv@http://10.0.0.5:8001@5600")
    assert source is not None
    assert (source.endpoint, source.replay_host, source.replay_port) == (endpoint, "10.0.0.5", 5600)
    plain = resolve("kv@http://10.0.0.5:8001")
    assert plain is not None
    assert plain.replay_port == 0
    assert resolve("kv@http://10.0.0.6:8001") is None
    assert resolve("anything") is None
