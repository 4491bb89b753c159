"""The admin side of a cache server over HTTP: health, status, metrics, events, leases, and what ``admin_control`` adds.

Always true:

- Every request has one answer, JSON but for ``/metrics``; what is refused says why, with an OpenAI-shaped error.
- Only this machine is answered, and no web page: there is no key in this version.
- No answer here waits for an engine, and no engine's call for an answer here; one thread gives both.

It decides nothing about chunks. What an answer says is put together in ``status``, ``metrics`` and ``probe``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from antiphon.cache.effects import ChunkRemoved, ChunkStored
from antiphon.cache_server import status
from antiphon.cache_server.admin_control import Control
from antiphon.cache_server.admin_poll import LongPolls, NumberedLog, Page
from antiphon.cache_server.admin_request import check_access, listing_query, no_query, poll_query
from antiphon.cache_server.admin_view import ServerView
from antiphon.cache_server.metrics import metrics_text
from antiphon.cache_server.probe import Probe
from antiphon.cache_server.views import TokenReport
from antiphon.core.errors import RequestRefused
from antiphon.observe.cache_metrics import CONTENT_TYPE
from antiphon.protocol import json
from antiphon.protocol.openai import JSON, error_body
from antiphon.transport.http.message import Headers, HttpLimits, HttpRequest
from antiphon.transport.http.server import HttpServer, Responder

log = logging.getLogger("antiphon.cache_server")

LIMITS: Final = HttpLimits(
    header_max_bytes=16_384,
    body_max_bytes=65_536,
    head_timeout_s=5.0,
    body_read_timeout_s=5.0,
    write_stall_timeout_s=30.0,
    connections_max=256,
    pipelined_max=4,
    bodies_max_bytes=1_048_576,
)
"""People, a router and a scraper or two: far less than what the router's clients may take."""

RETRY_AFTER_S: Final = 1
SETTLE_TIMEOUT_S: Final = 0.05
"""How long a scrape waits for a probe to be over, so that its chunk is not counted: it takes a millisecond or two."""

CLOSE_TIMEOUT_S: Final = 0.5
"""For answers in progress when the server stops; the whole process has 2 s."""

Route = Callable[[HttpRequest, Responder], Awaitable[None]]


class AdminServer:
    """The admin side of ``server``. Made by ``start_admin``."""

    def __init__(self, server: ServerView, host: str) -> None:
        self._server = server
        self._host = host
        self._probe = Probe(server.socket_path)
        self._polls = LongPolls(server.incarnation)
        self._is_closing = False
        self._http = HttpServer(self._handle, LIMITS)
        self._routes: dict[str, dict[str, Route]] = {
            "/healthz": {"GET": self._health},
            "/readiness": {"GET": self._readiness},
            "/status": {"GET": self._status},
            "/metrics": {"GET": self._metrics},
            "/events": {"GET": self._events},
            "/chunks": {"GET": self._chunks},
            "/reports": {"GET": self._reports},
            "/leases": {"GET": self._leases},
        }
        for path, methods in Control(server).routes.items():
            self._routes[path] = {method: self._controlled(answer) for method, answer in methods.items()}
        self._event_log: NumberedLog[ChunkStored | ChunkRemoved] = NumberedLog(
            self._events_since, server.wait_events, status.event_of
        )
        self._report_log: NumberedLog[TokenReport] = NumberedLog(
            self._reports_since, server.wait_reports, status.report_of
        )
        self.port = 0

    async def listen(self, port: int) -> None:
        """Listen; ``port`` 0 takes a free one. Raises OSError."""
        self.port = await self._http.listen(self._host, port)

    async def close(self) -> None:
        """Answer who waits, cut who does not take the answer, and end the probe."""
        self._is_closing = True
        self._polls.close()
        await self._http.drain(CLOSE_TIMEOUT_S)
        await self._probe.close()

    async def _handle(self, request: HttpRequest, responder: Responder) -> None:
        try:
            check_access(request, responder, self._host)
            if request.path not in self._routes:
                known = ", ".join(self._routes)
                raise RequestRefused(
                    f"{request.path[:200]} is not a route of the cache server; there are {known}",
                    status=404,
                    code="route_not_found",
                )
            routes = self._routes[request.path]
            route = routes.get("GET" if request.method == "HEAD" else request.method)
            if route is None:
                _refuse(responder, _wrong_method(request, routes), [(b"allow", _allowed(routes))])
                return
            await route(request, responder)
        except RequestRefused as refusal:
            retry = [(b"retry-after", b"%d" % RETRY_AFTER_S)] if refusal.status == 503 else []
            _refuse(responder, refusal, retry)

    async def _checked_health(self) -> status.Json:
        probe = await self._probe.result()
        return status.health_of(self._server, probe, time.monotonic())

    async def _health(self, request: HttpRequest, responder: Responder) -> None:
        health = await self._checked_health()
        _send_json(responder, 200 if health["reason"] is None else 503, health)

    async def _readiness(self, request: HttpRequest, responder: Responder) -> None:
        if self._is_closing:
            _send_json(responder, 503, {"status": "not_ready", "reason": "the cache server is stopping"})
        else:
            _send_json(responder, 200, {"status": "ready"})

    async def _status(self, request: HttpRequest, responder: Responder) -> None:
        no_query(request)
        # After a result there is no probe under way whose chunk would be counted.
        health = await self._checked_health()
        _send_json(responder, 200, status.status_of(self._server, health, self._probe.tally))

    async def _metrics(self, request: HttpRequest, responder: Responder) -> None:
        await self._probe.settle(SETTLE_TIMEOUT_S)
        responder.send(200, [(b"content-type", CONTENT_TYPE)], self.page())

    def page(self) -> bytes:
        """The metrics, in Prometheus' text format."""
        return metrics_text(self._server, self._probe.tally)

    def page_to_send(self) -> bytes | None:
        """The same; None while a probe runs, which does not wait here: its chunk would go up and down in counters."""
        return None if self._probe.is_running else self.page()

    async def _events(self, request: HttpRequest, responder: Responder) -> None:
        _send_json(responder, 200, await self._polls.answer(self._event_log, poll_query(request), responder))

    async def _chunks(self, request: HttpRequest, responder: Responder) -> None:
        _send_json(responder, 200, status.chunks_of(self._server, listing_query(request)))

    async def _reports(self, request: HttpRequest, responder: Responder) -> None:
        _send_json(responder, 200, await self._polls.answer(self._report_log, poll_query(request), responder))

    async def _leases(self, request: HttpRequest, responder: Responder) -> None:
        no_query(request)
        _send_json(responder, 200, status.leases_of(self._server))

    def _controlled(self, answer: Callable[[HttpRequest], status.Json]) -> Route:
        """A route of ``Control``, while no chunk of the probe is there."""

        async def route(request: HttpRequest, responder: Responder) -> None:
            await self._probe.settle(SETTLE_TIMEOUT_S)
            _send_json(responder, 200, answer(request))

        return route

    def _events_since(self, sequence: int, num_max: int) -> Page[ChunkStored | ChunkRemoved]:
        page = self._server.events_since(sequence, num_max)
        return Page(page.events, page.next_sequence, page.num_lost)

    def _reports_since(self, sequence: int, num_max: int) -> Page[TokenReport]:
        page = self._server.reports_since(sequence, num_max)
        return Page(page.reports, page.next_sequence, page.num_lost)


async def start_admin(server: ServerView, host: str, port: int) -> AdminServer:
    """Serve the admin side of ``server``, which listens on its socket already; ``port`` 0 takes a free one.

    Raises:
        OSError: the address cannot be bound.
    """
    admin = AdminServer(server, host)
    await admin.listen(port)
    return admin


def _allowed(routes: Iterable[str]) -> bytes:
    return ", ".join("GET, HEAD" if method == "GET" else method for method in routes).encode()


def _wrong_method(request: HttpRequest, routes: Iterable[str]) -> RequestRefused:
    return RequestRefused(
        f"{request.path} takes {' and '.join(routes)}, not {request.method[:20]}", status=405, code="method_not_allowed"
    )


def _refuse(responder: Responder, refusal: RequestRefused, headers: Headers) -> None:
    body = error_body(refusal.message, status=refusal.status, kind=refusal.kind, code=refusal.code, param=refusal.param)
    responder.send(refusal.status, [*headers, (b"content-type", JSON)], body)


def _send_json(responder: Responder, code: int, value: object) -> None:
    responder.send(code, [(b"content-type", JSON)], json.encode(value))
