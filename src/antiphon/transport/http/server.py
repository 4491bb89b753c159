"""The server side of HTTP/1.1: listens, runs one handler for each request, drains.

Owns the listening socket, the handlers at work and what all connections share. Knows nothing of routing, JSON or
engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

from antiphon.protocol.openai import JSON, error_body
from antiphon.transport.http.message import HttpLimits, HttpRequest
from antiphon.transport.http.responder import Responder
from antiphon.transport.http.server_connection import HttpServerConnection
from antiphon.transport.http.strand import Activity, Strand

log = logging.getLogger("antiphon.http")

__all__ = ["Handler", "HttpServer", "HttpServerConnection", "Responder"]

Handler = Callable[[HttpRequest, Responder], "Coroutine[Any, Any, None] | Activity"]
"""What serves one request: work to be run; or, where handlers run in strands, an activity that has begun."""


class Job(Protocol):
    """A handler at work: a task, a strand or an activity."""

    def cancel(self) -> object:
        """Raise ``CancelledError`` in it."""


class _Work(Strand):
    """A handler at work as a strand."""

    __slots__ = ("_request", "_responder", "_server")

    def __init__(
        self, server: HttpServer, request: HttpRequest, responder: Responder, work: Coroutine[Any, Any, None]
    ) -> None:
        Strand.__init__(self, work)
        self._server = server
        self._request = request
        self._responder = responder

    def ended(self, error: Exception | None) -> None:
        if error is not None:
            _tell(error, self._request, self._responder)
        self._server.finished(self)


def _tell(error: BaseException, request: HttpRequest, responder: Responder) -> None:
    """A handler failed, which is a bug: log it, and let the client know."""
    log.error("the handler of %s %s failed", request.method, request.path, exc_info=error)
    if not responder.started:
        responder.send(500, [(b"content-type", JSON)], error_body("internal error", status=500))
    elif not responder.finished:
        responder.abort()


_SWEEP_INTERVAL_S = 1.0
TURNED_AWAY_MAX = 64
"""Connections past the limit that stay for a few seconds, so that their clients can read why; others are closed."""


class HttpServer:
    """A listening server.

    Args:
        handler: called once for each request; it owns the response.
        limits: what one client may cost.
        in_strands: handlers run in strands rather than in tasks: see :mod:`antiphon.transport.http.strand`.
    """

    def __init__(self, handler: Handler, limits: HttpLimits | None = None, *, in_strands: bool = False) -> None:
        self.limits = limits or HttpLimits()
        self.loop = asyncio.get_running_loop()
        self.is_draining = False
        self.held_bytes = 0
        """Bytes of request bodies that are held now."""
        self.num_refused: dict[int, int] = {}
        """Requests that never reached the handler, and connections past the limit, by the status that says why."""
        self.may_send: Callable[[HttpRequest], bool] | None = None
        """Whether a large body is kept, asked when its head is here. If not, the handler gets the request without one,
        to refuse it: what a client may not send costs no memory."""
        self.handler = handler
        self._connections: set[HttpServerConnection] = set()
        self.turned_away: set[HttpServerConnection] = set()
        """Past the limit, told so, and not gone yet."""
        self._jobs: set[Job] = set()
        self._in_strands = in_strands
        self._server: Any = None  # asyncio.Server, as uvloop makes it
        self._sweeper: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        """No handler is at work; kept while the server drains."""
        self._unconnected = asyncio.Event()
        self._unconnected.set()
        self._hurry = asyncio.Event()

    async def listen(self, host: str, port: int, *, sock: socket.socket | None = None) -> int:
        """Listen on ``host:port`` (0: any free port), or on ``sock``; returns the port.

        Raises:
            OSError: the address cannot be bound.
        """

        def make() -> Any:
            return HttpServerConnection(self)

        if sock is not None:
            self._server = await self.loop.create_server(make, sock=sock, backlog=1024)
        else:
            self._server = await self.loop.create_server(make, host, port, backlog=1024)
        self._sweep()
        first: socket.socket = self._server.sockets[0]
        return int(first.getsockname()[1])

    async def drain(self, timeout_s: float) -> int:
        """Stop accepting and let requests in progress finish for at most ``timeout_s``; returns how many were cut.

        A handler that is cut is cancelled, and may still say so to its client. What was written is flushed, within the
        same time but for at least a second.
        """
        deadline = self.loop.time() + timeout_s
        self.is_draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            if not connection.is_busy:
                connection.close()
        if self._jobs:
            await self._wait(self._idle, timeout_s)
        cut = await self._cut()
        for connection in list(self._connections):
            connection.close()
        await self._wait(self._unconnected, max(1.0, deadline - self.loop.time()))
        if self._connections:
            log.warning("%d clients had not taken their answers when the time was up", len(self._connections))
        for connection in list(self._connections):
            connection.abort()  # the sweep that would end it stops with the server
        self.close()
        return cut

    def hurry(self) -> None:
        """End the waits of :meth:`drain` at once."""
        self._hurry.set()

    async def _wait(self, event: asyncio.Event, timeout_s: float) -> None:
        """Wait for ``event``, at most ``timeout_s``, and no longer than until :meth:`hurry`."""
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self._hurry.wait())]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _cut(self) -> int:
        """Cancel the handlers that still run, and wait until they have said so; returns how many there were."""
        jobs = list(self._jobs)
        self._idle.clear()
        for job in jobs:
            job.cancel()
        if jobs:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._idle.wait()
        return len(jobs)

    def close(self) -> None:
        """Stop at once: cut every connection and cancel every handler."""
        self.is_draining = True
        if self._server is not None:
            self._server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for job in list(self._jobs):
            job.cancel()
        for connection in list(self._connections):
            connection.close()
        for connection in list(self.turned_away):
            connection.abort()

    def statistics(self) -> dict[str, int]:
        """Counts now: open ``connections``, requests in progress (``busy``)."""
        return {"connections": len(self._connections), "busy": len(self._jobs)}

    def admit(self, connection: HttpServerConnection) -> bool:
        """Whether there is room for one more connection; it is then counted."""
        if len(self._connections) >= self.limits.connections_max:
            return False
        self._connections.add(connection)
        self._unconnected.clear()
        return True

    def turn_away(self, connection: HttpServerConnection) -> bool:
        """Count a connection that there is no room for; whether it may stay for a few seconds, to be read."""
        self.num_refused[503] = self.num_refused.get(503, 0) + 1
        if len(self.turned_away) >= TURNED_AWAY_MAX:
            return False
        self.turned_away.add(connection)
        return True

    def forget(self, connection: HttpServerConnection) -> None:
        """A connection has ended."""
        self._connections.discard(connection)
        self.turned_away.discard(connection)
        if not self._connections:
            self._unconnected.set()

    def start(self, request: HttpRequest, responder: Responder) -> None:
        """Run the handler for one request."""
        if self._in_strands:
            self._begin(request, responder)
        else:
            task = self.loop.create_task(self._supervise(request, responder))
            self._jobs.add(task)
            task.add_done_callback(self.finished)

    def _begin(self, request: HttpRequest, responder: Responder) -> None:
        try:
            begun = self.handler(request, responder)
        except Exception as error:  # supervised: one request's bug must not end the server; it is logged and answered
            _tell(error, request, responder)
            return
        if not isinstance(begun, Activity):
            work = _Work(self, request, responder, begun)
            self._jobs.add(work)
            work.step()
        elif begun.failure is not None:
            _tell(begun.failure, request, responder)
        elif not begun.is_resolved:
            self._attend(begun, request, responder)

    def _attend(self, activity: Activity, request: HttpRequest, responder: Responder) -> None:
        def ended() -> None:
            if activity.failure is not None:
                _tell(activity.failure, request, responder)
            self.finished(activity)

        self._jobs.add(activity)
        activity.then(ended)

    async def _supervise(self, request: HttpRequest, responder: Responder) -> None:
        try:
            await cast("Coroutine[Any, Any, None]", self.handler(request, responder))
        except Exception as error:  # supervised: one request's bug must not end the server; it is logged and answered
            _tell(error, request, responder)

    def finished(self, job: Job) -> None:
        """A handler has ended."""
        self._jobs.discard(job)
        if self.is_draining and not self._jobs:
            self._idle.set()

    def _sweep(self) -> None:
        now = self.loop.time()
        for connection in [*self._connections, *self.turned_away]:
            connection.sweep(now)
        self._sweeper = self.loop.call_later(_SWEEP_INTERVAL_S, self._sweep)
