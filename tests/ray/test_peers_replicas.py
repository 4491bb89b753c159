"""The replicas where cache servers share: the coordinator beside the router, and what a cache server is told of it.

Stand-ins as in test_replicas.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("ray.serve", reason="needs Ray")

from antiphon.core.errors import StartError
from antiphon.ray import coordinator, engine_replica, router_replica
from antiphon.ray.engine_replica import EngineReplica
from tests.ray.configs import Change
from tests.ray.stand_ins import Handle, HeldProcess, SlowLease, made, router_of, settings, wait_until, without_ray

__all__ = ["without_ray"]

SHARING: Change = ("antiphon.cache", {"shared": True, "peers": True})


def running(role: str) -> list[HeldProcess]:
    return [each for each in HeldProcess.running if each.plan.role == role]


async def test_the_coordinator_of_the_cache_servers_ends_with_the_router() -> None:
    replica, _ = await router_of(settings(SHARING))
    assert [each.plan.role for each in HeldProcess.running] == ["coordinator", "router"]
    await replica.end()
    assert HeldProcess.running == []


async def test_a_coordinator_that_ends_is_started_again_and_the_router_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "AGAIN_S", 0.01)
    replica, _ = await router_of(settings(SHARING))
    (router,) = running("router")
    for failing in ([], ["its port is taken", "its port is taken"]):
        (first,) = running("coordinator")
        HeldProcess.running.remove(first)
        HeldProcess.failing = list(failing)
        assert first.on_end is not None
        first.on_end("was killed")
        await wait_until(lambda: running("coordinator"), "it runs again")
        assert running("coordinator") != [first]
    assert running("router") == [router]
    await replica.end()
    assert HeldProcess.running == []


async def test_a_coordinator_that_does_not_start_leaves_no_router() -> None:
    HeldProcess.failing = ["its port is taken"]
    with pytest.raises(StartError, match="its port is taken"):
        await router_of(settings(SHARING))
    assert HeldProcess.running == []


async def test_a_router_that_does_not_start_leaves_no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingRouter(HeldProcess):
        async def start(self, on_end: Callable[[str], None] | None = None) -> None:
            assert running("coordinator")
            raise StartError("its port is taken")

    monkeypatch.setattr(router_replica, "Holder", FailingRouter)
    with pytest.raises(StartError, match="its port is taken"):
        await router_of(settings(SHARING))
    assert HeldProcess.running == []


async def test_a_cache_server_joins_the_coordinator_beside_the_router(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """At the address of the node; when the router comes back elsewhere, it is said that the server does not follow."""
    monkeypatch.setattr(engine_replica, "CacheLease", SlowLease)
    secret = tmp_path / "secret"
    secret.write_text("s" * 64)
    cache = {"shared": True, "peers": True, "cluster_secret_file": str(secret)}
    own = settings(("antiphon.cache", cache), ("antiphon.router", {"host": "0.0.0.0", "public_without_key": True}))
    router, _ = await router_of(own)
    SlowLease.plans.clear()
    replica = await made(EngineReplica, own, "decode", Handle(router))
    (plan,) = SlowLease.plans
    told = dict(pairwise(plan.argv))
    assert (told["--coordinator-url"], told["--p2p-advertise-url"]) == (
        "http://192.0.2.1:6655",
        "http://192.0.2.1:6755",
    )
    where = router.where()
    router.where = lambda: where | {"address": "192.0.2.9"}
    with caplog.at_level("INFO", "ray.serve"):
        await wait_until(lambda: "the coordinator is at 192.0.2.9 now" in caplog.text, "it is said")
    await replica.end()
    secret.unlink()
    with pytest.raises(StartError, match="cannot be read"):
        await made(EngineReplica, own, "decode", Handle(router))
    await router.end()
