"""How an engine comes to a running router and leaves it: the calls of the router's endpoint routes, from asyncio.

Owns one connection a question, and nothing between questions. Every wait has a bound. What is allowed, and what happens
to an endpoint, is the router's decision (``router/endpoints.py``); a new engine is warmed by the router before it takes
requests (``router/warming.py``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from antiphon.config.hosts import host_and_port
from antiphon.config.spec import Pool
from antiphon.core.errors import ProtocolError, RequestRefused, UpstreamError, UpstreamGarbage, UpstreamTimeout
from antiphon.protocol import json
from antiphon.protocol.openai import JSON
from antiphon.transport.http.client import HttpPool, request_head

log = logging.getLogger("antiphon.ray")

TIMEOUT_S = 5.0
"""Of one question."""
POLL_INTERVAL_S = 0.1
UNKNOWN_ENDPOINT = "endpoint_not_found"

Row = dict[str, Any]
"""An endpoint as the router shows it: ``role``, ``url``, ``state``, ``is_warming``, ``is_leaving``,
``active_requests``, and more."""


@dataclass(frozen=True)
class Left:
    """How an engine left the router.

    Args:
        num_cut: requests that had not ended by the deadline, and were cut.
        trouble: why the router could not be told; empty where it was.
    """

    num_cut: int = 0
    trouble: str = ""


class RouterClient:
    """The endpoint routes of one router.

    Args:
        url: ``http://HOST:PORT``.
        key: of the admin routes, where the router has one, or is not asked from its own machine.
        timeout_s: of one question.

    Every method raises:
        UpstreamError: the router does not answer.
        RequestRefused: it refuses, with its status, code and message.
        ProtocolError: what answers is no router.
    """

    def __init__(self, url: str, key: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self._host, self._port = host_and_port(url)
        self._timeout_s = timeout_s
        self._fields = [(b"accept", JSON)]
        if key is not None:
            self._fields.append((b"authorization", b"Bearer " + key.encode()))

    async def rows(self) -> list[Row]:
        """Every endpoint of both pools."""
        answer = await self._ask("GET", "/endpoints")
        rows = answer.get("endpoints")
        if not isinstance(rows, list):
            raise ProtocolError(f"what answers at {self.url} is no router: it lists no endpoints")
        return [row for row in rows if isinstance(row, dict)]

    async def row(self, role: Pool, url: str) -> Row | None:
        """One endpoint; None where the router does not know it."""
        return next((row for row in await self.rows() if (row.get("role"), row.get("url")) == (role, url)), None)

    async def register(self, role: Pool, url: str) -> Row:
        """Add the engine at ``url``; nothing changes where it is known and takes requests. One that drains is opened
        again, so an engine that leaves must not be registered any more."""
        return _endpoint(await self._ask("POST", "/endpoints", {"role": role, "url": url}))

    async def wait_open(self, role: Pool, url: str, wait_s: float) -> Row:
        """Its row, once it takes requests: it answers, and is warm where the router warms pairs.

        Raises:
            UpstreamTimeout: not within ``wait_s``.
        """
        row = await self._wait(role, url, _is_open, wait_s)
        if row is None or not _is_open(row):
            shown = "not known" if row is None else "still warming" if row.get("is_warming") else row.get("state")
            raise UpstreamTimeout(f"the {role} engine {url} takes no requests after {wait_s:g} s: it is {shown}")
        return row

    async def drain(self, role: Pool, url: str) -> Row | None:
        """Send it no new requests; those in flight go on. None where the router does not know it. It may be the last of
        its pool: that it leaves is decided already."""
        body = {"role": role, "url": url, "allow_empty": True}
        answer = await self._ask_known("POST", "/endpoints/drain", body)
        return None if answer is None else _endpoint(answer)

    async def wait_idle(self, role: Pool, url: str, wait_s: float) -> int:
        """Its requests in flight: 0 as soon as it has none, else what there are after ``wait_s``."""
        row = await self._wait(role, url, lambda row: not row.get("active_requests"), wait_s, none_holds=True)
        return 0 if row is None else int(row.get("active_requests", 0))

    async def remove(self, role: Pool, url: str, *, force: bool = False) -> int:
        """Forget it when its last request has ended; with ``force`` its requests are cut now, and tried again by the
        router where that is safe. Returns how many were cut."""
        body = {"role": role, "url": url, "allow_empty": True, "force": force}
        answer = await self._ask_known("DELETE", "/endpoints", body)
        return 0 if answer is None else int(answer.get("num_cut", 0))

    async def leave(self, role: Pool, url: str, drain_timeout_s: float) -> Left:
        """Drain it, wait for its requests, remove it: what a replica does before its engine stops.

        It ends within ``drain_timeout_s`` and a few questions, and raises nothing: without a router there is nobody to
        send requests either.
        """
        try:
            if await self.drain(role, url) is None:
                return Left()
            num_active = await self.wait_idle(role, url, drain_timeout_s)
            num_cut = await self.remove(role, url, force=num_active > 0)
        except (UpstreamError, ProtocolError) as error:
            log.warning("the router at %s cannot be told that %s engine %s leaves: %s", self.url, role, url, error)
            return Left(trouble=str(error))
        if num_cut:
            log.warning("%s engine %s leaves with %d requests after %g s", role, url, num_cut, drain_timeout_s)
        return Left(num_cut)

    # -- one question -----------------------------------------------------------------------------------------------

    async def _wait(
        self, role: Pool, url: str, holds: Callable[[Row], bool], wait_s: float, *, none_holds: bool = False
    ) -> Row | None:
        """Its row once it ``holds``, or as it is after ``wait_s``. A question that fails is asked again until then."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        while True:
            try:
                row = await self.row(role, url)
                if (row is None and none_holds) or (row is not None and holds(row)):
                    return row
            except UpstreamError:
                if loop.time() >= deadline_s:
                    raise
            else:
                if loop.time() >= deadline_s:
                    return row
            await asyncio.sleep(min(POLL_INTERVAL_S, max(0.0, deadline_s - loop.time())))

    async def _ask_known(self, method: str, path: str, body: dict[str, object]) -> dict[str, Any] | None:
        """The answer; None where the router does not know the endpoint."""
        try:
            return await self._ask(method, path, body)
        except RequestRefused as error:
            if error.code == UNKNOWN_ENDPOINT:
                return None
            raise

    async def _ask(self, method: str, path: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        data = None if body is None else json.encode(body)
        pool = HttpPool(self._host, self._port, connections_max=1, connect_timeout_s=self._timeout_s)
        fields = self._fields if data is None else [*self._fields, (b"content-type", JSON)]
        head = request_head(method, path, pool.authority, fields, length=None if data is None else len(data))
        try:
            response = await pool.fetch([head + (data or b"")], timeout_s=self._timeout_s)
        finally:
            pool.close()
        try:
            answer = json.decode(response.body)
        except ProtocolError:
            answer = None
        if not isinstance(answer, dict):
            raise UpstreamGarbage(f"the router at {self.url} answers {path} with {response.status} and no JSON object")
        if response.status < 300:
            return answer
        error = answer.get("error")
        if not isinstance(error, dict) or response.status < 400:
            raise ProtocolError(f"what answers at {self.url} is no router: {path} is answered with {response.status}")
        code = error.get("code")
        raise RequestRefused(
            str(error.get("message"))[:1000], status=response.status, code=code if isinstance(code, str) else None
        )


def _is_open(row: Row) -> bool:
    return row.get("state") == "ready" and not row.get("is_warming") and not row.get("is_leaving")


def _endpoint(answer: dict[str, Any]) -> Row:
    row = answer.get("endpoint")
    if not isinstance(row, dict):
        raise ProtocolError("what answers is no router: it names no endpoint")
    return row
