"""What the replicas' tests have in the place of Ray's handles, of the held processes and of the router, whose answers a
test can hold back; and replicas made as Serve makes them.

A file that imports ``without_ray`` has it for every test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("ray.serve", reason="needs Ray")

from antiphon.config.plan import ProcessPlan
from antiphon.core.errors import StartError
from antiphon.ray import cache_actor, coordinator, engine_replica, inside, router_replica
from antiphon.ray.draining import Left
from antiphon.ray.plans import AppSettings
from antiphon.ray.router_replica import RouterReplica
from tests.ray.configs import Change, mapped_from

SIMULATED: Change = ("antiphon.engine.kind", "simulated")
WITH_CACHE: Change = ("antiphon.cache", {"shared": True})


def settings(*changes: Change) -> AppSettings:
    found = mapped_from(*changes)
    return AppSettings.of(found.spec, found.pools, 1.0)


SOON_S = 30.0
"""For what takes no time on a machine that has some."""


async def wait_until(holds: Callable[[], object], what: str) -> None:
    deadline_s = asyncio.get_running_loop().time() + SOON_S
    while not holds():
        assert asyncio.get_running_loop().time() < deadline_s, f"not in time: {what}"
        await asyncio.sleep(0.005)


class HeldProcess:
    """In the place of ``Holder``."""

    failing: ClassVar[list[str]] = []
    running: ClassVar[list[HeldProcess]] = []

    def __init__(self, plan: ProcessPlan, options: object, say: Callable[[str], None]) -> None:
        self.plan, self.pid, self.ended = plan, 1, None
        self.incarnation, self.log_path = "life", "/log"
        self.on_end: Callable[[str], None] | None = None

    async def start(self, on_end: Callable[[str], None] | None = None) -> None:
        await asyncio.sleep(0)
        if self.failing:
            raise StartError(self.failing.pop())
        self.running.append(self)
        self.on_end = on_end

    async def stop(self) -> None:
        if self in self.running:
            self.running.remove(self)


class RouterClientStandIn:
    """In the place of ``RouterClient``: a set of URLs, each change of which may be held back before it is made."""

    def __init__(self, *_: object) -> None:
        self.known: set[str] = set()
        self.gates: dict[str, asyncio.Event] = {}
        self.asked: list[tuple[str, str]] = []

    async def _turn(self, what: str, url: str) -> None:
        self.asked.append((what, url))
        gate = self.gates.get(what)
        await (asyncio.sleep(0) if gate is None else gate.wait())

    async def register(self, role: str, url: str) -> None:
        await self._turn("register", url)
        self.known.add(url)

    async def remove(self, role: str, url: str, *, force: bool = False) -> int:
        await self._turn("remove", url)
        self.known.discard(url)
        return 0

    async def leave(self, role: str, url: str, drain_timeout_s: float) -> Left:
        await self._turn("leave", url)
        self.known.discard(url)
        return Left()

    async def wait_open(self, role: str, url: str, wait_s: float) -> None:
        await self._turn("wait_open", url)


class Handle:
    """In the place of a deployment's handle: calls methods of ``target``; a method may be held up or fail."""

    def __init__(self, target: object) -> None:
        self.target = target
        self.errors: dict[str, list[Exception]] = {}
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            self.called.append(name)
            if self.errors.get(name):
                raise self.errors[name].pop(0)
            said = getattr(self.target, name)(*args)
            return await said if asyncio.iscoroutine(said) else said

        return type("Method", (), {"remote": staticmethod(call)})


MADE: list[Any] = []


@pytest.fixture(autouse=True)
async def without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[None]:
    """What Ray would say. A test that fails leaves no replica behind, which would soon ask the real one."""

    def end_process(code: int = 1) -> None:
        raise AssertionError("the replica ends the process of the tests")

    values = {
        "end_process": end_process,
        "keep_replica_near": lambda *, is_published: None,
        "replica_identity": lambda: ("app", "r1"),
        "node_id": lambda: "node",
        "node_address": lambda: "192.0.2.1",
        "gpus": lambda: (),
        "log_dir": lambda: tmp_path,
    }
    for name, value in values.items():
        monkeypatch.setattr(inside, name, value)
    for module in (engine_replica, router_replica, cache_actor, coordinator):
        monkeypatch.setattr(module, "Holder", HeldProcess)
    monkeypatch.setattr(router_replica, "RouterClient", RouterClientStandIn)
    monkeypatch.setattr(engine_replica, "BEAT_S", 0.01)
    monkeypatch.setattr(engine_replica, "JOIN_AGAIN_S", 0.01)
    HeldProcess.failing, HeldProcess.running = [], []
    MADE.clear()
    yield
    async with asyncio.timeout(SOON_S):
        for replica in MADE:
            await replica._tasks.stop()


async def made(kind: type[Any], *args: Any) -> Any:
    """As Serve constructs a replica; the interpreter is not to end it as well."""
    own: Any = type(kind.__name__, (kind,), {"__del__": lambda self: None, "end": kind.__del__})
    replica = own.__new__(own)
    MADE.append(replica)
    await replica.__init__(*args)
    return replica


async def router_of(own: AppSettings) -> tuple[Any, RouterClientStandIn]:
    replica = await made(RouterReplica, own)
    return replica, replica._client


def info(life: str = "a", role: str = "decode", **more: Any) -> dict[str, Any]:
    return {
        "name": f"{role}-{life}",
        "role": role,
        "url": "http://127.0.0.1:9",
        "incarnation": life,
        "node_id": "node",
        "shape": {},
        "built_s": 1.0,
        **more,
    }


class SlowLease:
    """A cache server that was killed, and takes long to come back."""

    plans: ClassVar[list[ProcessPlan]] = []

    def __init__(self, app: str, name: str, plan: ProcessPlan, *_: object) -> None:
        self.plans.append(plan)

    async def take(self) -> str:
        return "http://127.0.0.1:1"

    async def renew(self) -> None:
        await asyncio.Event().wait()

    async def give_up(self) -> None: ...
