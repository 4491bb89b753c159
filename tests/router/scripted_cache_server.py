"""The ``/reports`` of a cache server, as a test wants it: a log with lives, and answers that are none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qsl

from antiphon.transport.http.message import HttpRequest
from antiphon.transport.http.server import HttpServer, Responder


class ScriptedCacheServer:
    """One server, of many lives."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(4)
        self._num_lives = 1
        self.log: list[dict[str, Any]] = []
        self.num_lost = 0
        self.polls: list[dict[str, str]] = []
        """The query of each poll."""
        self.answers: list[tuple[int, bytes]] = []
        """What is answered instead, each once."""
        self.is_hanging = False
        self.num_waiting = 0
        self.port = 0
        self._changed = asyncio.Event()
        self._http: HttpServer | None = None

    @property
    def incarnation(self) -> str:
        return f"{self._name}-{self._num_lives}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def listen(self) -> None:
        """Listen, on the port of before if there was one."""
        self._http = HttpServer(self._handle)
        self.port = await self._http.listen("127.0.0.1", self.port)

    async def close(self) -> None:
        """Cut everything."""
        if self._http is not None:
            self._http.close()
            await self._http.drain(0.0)
            self._http = None

    def report(self, request: str, prompt: int, **counts: object) -> None:
        """One more report."""
        names = ("device", "l1", "remote_prefill", "computed", "num_preemptions")
        entry = {"sequence": len(self.log) + 1, "request": request, "engine": "e", "incarnation": "engine-life"}
        entry |= {"num_prompt_tokens": prompt, "finish": "finished", "at": 1.5} | dict.fromkeys(names, 0) | counts
        self.log.append(entry)
        self.wake()

    def restart(self) -> None:
        """A new life, whose log is empty."""
        self._num_lives += 1
        self.log = []
        self.wake()

    def wake(self) -> None:
        """Answer who waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _handle(self, request: HttpRequest, responder: Responder) -> None:
        assert request.path == "/reports"
        query = dict(parse_qsl(request.query))
        self.polls.append(query)
        if self.is_hanging:
            await asyncio.Event().wait()
        if self.answers:
            status, body = self.answers.pop(0)
            responder.send(status, [], body)
            return
        asked, incarnation = self._since(query), self.incarnation
        if asked > len(self.log):
            self.num_waiting += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(float(query["wait_s"])):
                    await self._changed.wait()
            self.num_waiting -= 1
        since = asked if incarnation == self.incarnation else 1
        events = self.log[since - 1 :]
        answer = {"incarnation": self.incarnation, "next": since + len(events), "num_lost": self.num_lost}
        responder.send(200, [], json.dumps(answer | {"events": events}).encode())

    def _since(self, query: dict[str, str]) -> int:
        return int(query["since"]) if query.get("incarnation", self.incarnation) == self.incarnation else 1


@contextlib.asynccontextmanager
async def cache_server() -> AsyncIterator[ScriptedCacheServer]:
    """A listening server."""
    server = ScriptedCacheServer()
    await server.listen()
    try:
        yield server
    finally:
        await server.close()
