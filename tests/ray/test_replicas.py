"""The replicas of engines, router and cache servers without Ray: what they do when others are late, gone or replaced.

Ray's handles, the held processes and the router are those of stand_ins.py, whose answers a test can hold back.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray.serve", reason="needs Ray")

from antiphon.config.plan import ProcessPlan
from antiphon.core.errors import StartError
from antiphon.ray import cache_actor, engine_replica, inside
from antiphon.ray.cache_actor import CacheActor
from antiphon.ray.engine_replica import EngineReplica
from antiphon.ray.replica import Tasks, within
from antiphon.ray.roster import BEAT_LOST_S
from tests.ray.configs import Change
from tests.ray.stand_ins import (
    SIMULATED,
    SOON_S,
    WITH_CACHE,
    Handle,
    HeldProcess,
    SlowLease,
    info,
    made,
    router_of,
    settings,
    wait_until,
    without_ray,
)

__all__ = ["without_ray"]


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_cancel_is_heard_whenever_it_comes(num_turns: int) -> None:
    """Also when the answer has just come: ``asyncio.wait_for`` of Python 3.11 loses that one, and a replica that ends
    then waits for its beats for ever."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[int] = loop.create_future()
    asking = asyncio.create_task(within(10.0, answer))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answer.set_result(1)
    for _turn in range(num_turns):
        await asyncio.sleep(0)
    is_heard = asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled() == is_heard


async def test_a_task_that_does_not_end_does_not_keep_its_replica(caplog: pytest.LogCaptureFixture) -> None:
    over = asyncio.Event()

    async def stays() -> None:
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await over.wait()

    tasks = Tasks(stop_timeout_s=0.05)
    tasks.start(stays(), "the one that stays")
    await asyncio.sleep(0)
    async with asyncio.timeout(SOON_S):
        await tasks.stop()
    assert "the one that stays has not ended 0.05 s after" in caplog.text
    over.set()
    async with asyncio.timeout(SOON_S):
        await tasks.stop()


# ---- the router's replica --------------------------------------------------------------------------------------------


async def test_an_engine_whose_beat_comes_while_it_is_removed_is_known_again() -> None:
    replica, client = await router_of(settings(SIMULATED))
    try:
        await replica.beat(info())
        (entry,) = replica._roster.entries.values()
        client.gates["remove"] = asyncio.Event()
        del replica._roster.entries[entry.url]
        removing = asyncio.create_task(replica._remove_lost(entry))
        await wait_until(lambda: ("remove", entry.url) in client.asked, "it is being removed")
        beating = asyncio.create_task(replica.beat(info()))
        await asyncio.sleep(0.02)
        client.gates.pop("remove").set()
        await asyncio.gather(removing, beating)
        await replica.beat(info())
        assert client.known == {entry.url}, "its replica beats, and the router does not know it"
    finally:
        await replica.end()


async def test_a_beat_that_is_only_late_cuts_no_request() -> None:
    replica, client = await router_of(settings(SIMULATED))
    try:
        await replica.beat(info())
        (entry,) = replica._roster.entries.values()
        del replica._roster.entries[entry.url]
        await replica.beat(info())
        await replica._remove_lost(entry)
        assert ("remove", entry.url) not in client.asked
    finally:
        await replica.end()


async def test_an_engine_that_leaves_while_it_is_added_is_not_left_behind() -> None:
    replica, client = await router_of(settings(SIMULATED))
    try:
        client.gates["register"] = asyncio.Event()
        joining = asyncio.create_task(replica.join(info(), 1.0))
        await wait_until(lambda: client.asked, "it is being added")
        assert (await replica.leave(info(), 1.0))["is_gone"] is False
        await asyncio.sleep(0.02)
        client.gates.pop("register").set()
        await joining
        await wait_until(lambda: not replica._leaving, "it has left")
        assert client.known == set()
    finally:
        await replica.end()


async def test_a_replica_that_stood_still_removes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, client = await router_of(settings(SIMULATED))
    try:
        await replica.beat(info())
        now_s = asyncio.get_running_loop().time()
        replica._roster.lost(now_s)
        assert replica._roster.lost(now_s + 6 * BEAT_LOST_S) == []
        assert client.known
    finally:
        await replica.end()


async def test_a_later_deployment_of_another_model_takes_the_place_of_the_earlier_one() -> None:
    """The earlier one serves until both roles of the later one are there; its engines are drained, not cut."""
    replica, client = await router_of(replace(settings(SIMULATED), built_s=2.0))
    old = [info("p1", "prefill", url="http://127.0.0.1:11"), info("d1", url="http://127.0.0.1:12")]
    new = [info("p2", "prefill", url="http://127.0.0.1:21"), info("d2", url="http://127.0.0.1:22")]
    for each in new:
        each |= {"built_s": 2.0, "shape": {"model": "other"}}
    try:
        for each in old:
            await replica.beat(each)
        said = await replica.join(new[0], 1.0)
        assert "until a decode engine" in said["waits"]
        assert client.known == {each["url"] for each in old}
        said = await replica.join(new[1], 1.0)
        assert (said["waits"], said["misfit"]) == (None, None)
        assert (await replica.join(new[0], 1.0))["waits"] is None
        await wait_until(lambda: not replica._leaving, "the earlier ones have left")
        for each in old:
            await replica.beat(each)
        assert client.known == {each["url"] for each in new}
        assert [what for what, _ in client.asked].count("leave") == 2
    finally:
        await replica.end()


async def test_an_engine_that_a_deploy_has_kept_is_one_of_the_build_that_kept_it() -> None:
    """A was deployed, then B with another model, then A again while engines of both run: Serve keeps those of A."""
    replica, client = await router_of(replace(settings(SIMULATED), built_s=3.0, version="a"))
    kept = [info("d1", url="http://127.0.0.1:11", version="a"), info("p1", "prefill", version="a")]
    other = [info("d2", url="http://127.0.0.1:21"), info("p2", "prefill", url="http://127.0.0.1:22")]
    for each in other:
        each |= {"built_s": 2.0, "shape": {"model": "other"}, "version": "b"}
    new = info("p3", "prefill", url="http://127.0.0.1:31", built_s=3.0, version="a")
    try:
        for each in other:
            await replica.beat(each)
        said = await replica.join(new, 1.0)
        assert "until a decode engine" in said["waits"]
        await replica.beat(kept[0])
        assert (await replica.join(new, 1.0))["waits"] is None
        for each in (*kept, *other):
            await replica.beat(each)
        await wait_until(lambda: not replica._leaving, "those of the other model have left")
        assert client.known == {each["url"] for each in (*kept, new)}
    finally:
        await replica.end()


async def test_a_router_on_loopback_takes_no_engine_of_another_node() -> None:
    """Its URL would be that of something else, or nothing, on the router's own node."""
    replica, client = await router_of(settings(SIMULATED))
    said = await replica.join(info(node_id="elsewhere"), 1.0)
    assert "another node" in said["misfit"]
    await replica.beat(info(node_id="elsewhere"))
    assert client.known == set()
    await replica.end()


async def test_the_router_starts_without_an_engine() -> None:
    replica, client = await router_of(settings(SIMULATED))
    assert "--allow-empty" in replica._holder.plan.argv
    assert client.asked == []
    await replica.end()
    assert HeldProcess.running == []


# ---- an engine's replica ---------------------------------------------------------------------------------------------


async def test_an_engine_is_heard_of_while_its_cache_server_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_replica, "CacheLease", SlowLease)
    own = settings(WITH_CACHE)
    router, _ = await router_of(own)
    handle = Handle(router)
    replica = await made(EngineReplica, own, "decode", handle)
    try:
        num = handle.called.count("beat")
        await wait_until(lambda: handle.called.count("beat") >= num + 3, "beats")
    finally:
        await replica.end()
        await router.end()


async def test_an_engine_that_has_started_outlives_the_router_that_it_joins() -> None:
    router, client = await router_of(settings(SIMULATED))
    handle = Handle(router)
    handle.errors["join"] = [RuntimeError("the actor died"), TimeoutError()]
    replica = await made(EngineReplica, settings(SIMULATED), "decode", handle)
    assert client.known == {replica.info()["url"]}
    assert handle.called.count("join") == 3
    await replica.end()
    assert client.known == set()
    await router.end()
    assert HeldProcess.running == []


async def test_an_engine_without_a_router_says_which_deployment_to_look_at() -> None:
    router, _ = await router_of(settings(SIMULATED))
    handle = Handle(router)
    handle.errors["where"] = [TimeoutError()]
    with pytest.raises(StartError, match="has not started for 120 s") as raised:
        await made(EngineReplica, settings(SIMULATED), "decode", handle)
    assert "deployment router" in str(raised.value)
    await router.end()


async def test_an_engine_of_a_later_deployment_waits_for_the_other_role() -> None:
    router, client = await router_of(replace(settings(SIMULATED), built_s=2.0))
    await router.beat(info("old", "prefill"))
    later = replace(settings(SIMULATED), built_s=2.0)
    prefill = asyncio.create_task(made(EngineReplica, later, "prefill", Handle(router)))
    await wait_until(lambda: router._roster.waiting, "it waits")
    assert not prefill.done()
    decode = await made(EngineReplica, later, "decode", Handle(router))
    replicas = [decode, await prefill]
    await wait_until(lambda: client.known == {each.info()["url"] for each in replicas}, "both serve")
    for each in (*replicas, router):
        await each.end()


async def test_an_engine_ends_when_the_router_cannot_reach_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(inside, "end_process", lambda code=1: ends.append(code))
    router, _ = await router_of(settings(SIMULATED))
    replica = await made(EngineReplica, settings(SIMULATED), "decode", Handle(router))
    where = router.where()
    router.where = lambda: where | {"node_id": "elsewhere"}
    await wait_until(lambda: ends, "the replica ends")
    await replica.end()
    await router.end()


async def test_an_engine_says_when_its_kv_events_go_to_where_the_router_was(caplog: pytest.LogCaptureFixture) -> None:
    events: Change = ("antiphon.router", {"policy": "kv_aware", "kv_events_port": 9600})
    own = settings(SIMULATED, events)
    router, _ = await router_of(own)
    replica = await made(EngineReplica, own, "decode", Handle(router))
    where = router.where()
    router.where = lambda: where | {"address": "192.0.2.9"}
    with caplog.at_level("INFO", "ray.serve"):
        await wait_until(lambda: "the router is at 192.0.2.9 now" in caplog.text, "it is said")
    await replica.end()
    await router.end()


async def test_one_unanswered_question_is_no_reason_to_leave_without_the_router() -> None:
    router, client = await router_of(settings(SIMULATED))
    handle = Handle(router)
    replica = await made(EngineReplica, settings(SIMULATED), "decode", handle)
    handle.errors["leave"] = [TimeoutError()]
    await replica.end()
    assert client.known == set()
    await router.end()


async def test_a_file_that_this_node_lacks_is_named_before_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text("chunk_size: 256\n")
    file = ("decode_config.runtime_env.env_vars.LMCACHE_CONFIG_FILE", str(path))
    own = settings(SIMULATED, file, ("antiphon.cache.enabled", False))
    path.unlink()
    router, _ = await router_of(own)
    with caplog.at_level("INFO", "ray.serve"):
        replica = await made(EngineReplica, own, "decode", Handle(router))
    assert any(f"{path} cannot be read on this node" in record.getMessage() for record in caplog.records)
    await replica.end()
    await router.end()


# ---- the cache server of a node --------------------------------------------------------------------------------------

PLAN = ProcessPlan("cache", "cache_server", "cache_server", "127.0.0.1", ("x",), base_url="http://127.0.0.1:5")


async def test_a_cache_server_that_does_not_start_is_not_the_answer_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor ends, so that the next engine that asks has another."""
    ends: list[int] = []
    monkeypatch.setattr(inside, "end_process", lambda code=1: ends.append(code))
    monkeypatch.setattr(cache_actor, "FAILED_LINGER_S", 0.01)
    HeldProcess.failing = ["its port is taken"]
    actor = CacheActor("app", str(tmp_path))
    with pytest.raises(StartError, match="its port is taken"):
        await actor.hold("e", PLAN, 1.0)
    await wait_until(lambda: ends, "the actor ends")
    assert actor._reaper is not None
    actor._reaper.cancel()


async def test_the_server_of_a_later_deployment_replaces_that_of_the_earlier_one(tmp_path: Path) -> None:
    actor = CacheActor("app", str(tmp_path))
    bigger = replace(PLAN, argv=("x", "--l1-size-gb", "2"))
    for plan, built_s, right in ((PLAN, 1.0, PLAN), (bigger, 1.0, PLAN), (bigger, 2.0, bigger), (PLAN, 1.0, bigger)):
        assert await actor.hold("e", plan, built_s) == PLAN.base_url
        assert [each.plan for each in HeldProcess.running] == [right]
    assert actor._reaper is not None
    actor._reaper.cancel()
