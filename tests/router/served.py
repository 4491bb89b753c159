"""Requests to a router in the test's own loop from clients that show keys, engines that answer when a test lets them,
and what must be true of a router that has nothing to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from antiphon.router.app import Router
from antiphon.routing.cold import AdmissionStatistics
from antiphon.routing.tenants import TenantStatistics
from tests.router import scripted
from tests.router.apis import COMPLETIONS, Script, Spoken
from tests.router.scripted import (
    DONE,
    EVENT,
    HANDLE,
    Client,
    Reply,
    ScriptedEngine,
    Seen,
    Wire,
    connected,
    until,
)


class Gate:
    """Requests stand before it until they are let through, first come, first served."""

    def __init__(self) -> None:
        self.standing: deque[tuple[Seen, asyncio.Event]] = deque()
        self.num_arrived = 0
        self.most = 0
        """Requests that stood here at once."""
        self.is_open = False

    async def arrive(self, seen: Seen) -> None:
        self.num_arrived += 1
        if self.is_open:
            return
        let_through = asyncio.Event()
        self.standing.append((seen, let_through))
        self.most = max(self.most, len(self.standing))
        await let_through.wait()

    def open_one(self) -> Seen:
        """Let the one go that came first; returns it."""
        seen, let_through = self.standing.popleft()
        let_through.set()
        return seen

    def open(self) -> None:
        """Let all go, and whoever comes."""
        self.is_open = True
        while self.standing:
            self.open_one()


def prefills_at(gate: Gate, num_tokens: int = 3) -> Script:
    """A prefill engine's script: the handle of a prompt of so many tokens, once it is let through."""
    answer = json.dumps({"id": "x", "kv_transfer_params": HANDLE, "usage": {"prompt_tokens": num_tokens}}).encode()

    async def script(seen: Seen, wire: Wire) -> None:
        await gate.arrive(seen)
        wire.whole(answer)

    return script


def streams_at(gate: Gate) -> Script:
    """A decode engine's script: as many events as the request allows tokens, or one whole answer, once it is let
    through."""

    async def script(seen: Seen, wire: Wire) -> None:
        await gate.arrive(seen)
        body = json.loads(seen.body)
        num = body.get("max_tokens", 3)
        if not body.get("stream"):
            usage = {"prompt_tokens": 3, "completion_tokens": num, "total_tokens": 3 + num}
            wire.whole(json.dumps({"id": "x", "choices": [{"text": "word" * num}], "usage": usage}).encode())
            return
        wire.begin()
        for _ in range(num):
            wire.piece(EVENT)
        wire.piece(DONE)
        wire.end()

    return script


@contextlib.asynccontextmanager
async def engine(script: Script) -> AsyncIterator[ScriptedEngine]:
    """A listening engine that has no metrics, and does not count who asks for them."""

    async def asked(seen: Seen, wire: Wire) -> None:
        if seen.path == "/metrics":
            made.seen.remove(seen)
            wire.whole(b"", status=404)
        else:
            await script(seen, wire)

    async with scripted.engine(asked) as made:
        yield made


# ---- clients ---------------------------------------------------------------------------------------------------------


def post(
    client: Client,
    body: dict[str, Any] | bytes,
    key: str | None = None,
    path: str = "/v1/completions",
    header: str = "",
) -> None:
    """Write one request; ``header`` are further lines, each with its end."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    if key is not None:
        lines += f"authorization: Bearer {key}\r\n"
    client.writer.write(f"{lines}{header}\r\n".encode() + data)


async def ask_as(router: Router, key: str | None, api: Spoken = COMPLETIONS, **fields: Any) -> Reply:
    """One request on its own connection, with this key; streamed unless ``stream`` says otherwise."""
    async with connected(router) as client:
        post(client, api.body | {"stream": True} | fields, key, api.path)
        return await client.reply()


async def get_as(router: Router, path: str, key: str | None = None) -> Reply:
    """A GET on its own connection."""
    async with connected(router) as client:
        shown = "" if key is None else f"authorization: Bearer {key}\r\n"
        client.writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n{shown}\r\n".encode())
        return await client.reply()


def error_of(reply: Reply) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(reply.body)["error"]
    return error


class Crowd:
    """Clients whose answers are read as they come."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.tasks: set[asyncio.Task[Reply]] = set()

    def ask(self, key: str | None = None, **fields: Any) -> asyncio.Task[Reply]:
        task = asyncio.get_running_loop().create_task(ask_as(self.router, key, **fields))
        self.tasks.add(task)
        return task

    async def replies(self) -> list[Reply]:
        """All of them, in no order."""
        return [await task for task in self.tasks]

    async def leave(self) -> None:
        """Every client closes its connection."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def crowd(router: Router) -> AsyncIterator[Crowd]:
    made = Crowd(router)
    try:
        yield made
    finally:
        await made.leave()


# ---- tenants ---------------------------------------------------------------------------------------------------------


def tenants_file(folder: Path, *tenants: dict[str, Any], **bounds: Any) -> str:
    """A file of these tenants, with the key ``sk-NAME`` each."""
    for tenant in tenants:
        name = tenant["name"]
        (folder / f"{name}.keys").write_text(f"sk-{name}\n")
        tenant["api_key_files"] = [f"{name}.keys"]
    path = folder / "tenants.yaml"
    path.write_text(json.dumps(bounds | {"tenants": list(tenants)}))
    return str(path)


def tenant(router: Router, name: str) -> TenantStatistics:
    assert router.tenants is not None
    router.tenants.validate()
    return next(each for each in router.tenants.statistics() if each.name == name)


# ---- the router ------------------------------------------------------------------------------------------------------


def cold(router: Router) -> AdmissionStatistics:
    assert router.cold is not None
    router.cold.validate()
    return router.cold.statistics(time.monotonic())


def check_idle(router: Router) -> None:
    """Nothing is left of any request."""
    assert router.inference.num_active == 0
    for endpoint in router.fleet.all():
        assert (endpoint.num_active, endpoint.num_uncached_tokens) == (0, 0), endpoint.url
    if router.tenants is not None:
        router.tenants.validate(time.monotonic())
        assert (router.tenants.num_in_flight, router.tenants.num_waiting) == (0, 0)
    if router.cold is not None:
        shown = cold(router)
        assert (shown.num_waiting, shown.num_held, shown.num_cold, shown.num_warm) == (0, 0, 0, 0), shown
        assert (shown.committed_bytes, shown.waiting_bytes, shown.waiting_body_bytes) == (0, 0, 0), shown
        assert all(load.in_flight_bytes == 0 for load in shown.decodes), shown
    assert not any(router.inference.num_by_stage().values())


async def idle(router: Router) -> None:
    """Wait until no request is in progress, and check that nothing is left of any."""
    await until(lambda: router.inference.num_active == 0, "no request is in progress")
    check_idle(router)
