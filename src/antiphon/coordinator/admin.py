"""The coordinator's side for people: ``/healthz``, ``/status`` and ``/metrics``, on this machine only."""

from __future__ import annotations

import time
from typing import Final

from antiphon import __version__
from antiphon.coordinator.server import Coordinator
from antiphon.core.errors import RequestRefused
from antiphon.observe.coordinator_metrics import CONTENT_TYPE, metrics_page
from antiphon.protocol import json
from antiphon.protocol.openai import JSON, error_body
from antiphon.transport.http.access import is_asked_from_here
from antiphon.transport.http.message import HttpLimits, HttpRequest
from antiphon.transport.http.server import HttpServer, Responder

LIMITS: Final = HttpLimits(
    header_max_bytes=16_384,
    body_max_bytes=1_024,
    head_timeout_s=5.0,
    body_read_timeout_s=5.0,
    write_stall_timeout_s=30.0,
    connections_max=64,
    pipelined_max=4,
    bodies_max_bytes=65_536,
)
CLOSE_TIMEOUT_S: Final = 0.5
MEMBERS_SHOWN_MAX: Final = 1_000
ROUTES: Final = ("/healthz", "/status", "/metrics")


class CoordinatorAdmin:
    """The routes.

    Args:
        coordinator: what they show.
        host: that is listened on.
    """

    def __init__(self, coordinator: Coordinator, host: str) -> None:
        self._coordinator = coordinator
        self._host = host
        self._http = HttpServer(self._handle, LIMITS)
        self._began_s = time.monotonic()
        self.port = 0

    async def listen(self, port: int) -> None:
        """Listen; ``port`` 0 takes a free one. Raises OSError."""
        self.port = await self._http.listen(self._host, port)

    async def close(self) -> None:
        """Answer who waits, and stop."""
        await self._http.drain(CLOSE_TIMEOUT_S)

    async def _handle(self, request: HttpRequest, responder: Responder) -> None:
        try:
            self._check(request, responder)
        except RequestRefused as refusal:
            kind, code = refusal.kind, refusal.code
            body = error_body(refusal.message, status=refusal.status, kind=kind, code=code, param=refusal.param)
            responder.send(refusal.status, [(b"content-type", JSON)], body)
            return
        if request.path == "/metrics":
            responder.send(200, [(b"content-type", CONTENT_TYPE)], self.page())
        elif request.path == "/status":
            responder.send(200, [(b"content-type", JSON)], json.encode(self._status()))
        else:
            is_alive = self._coordinator.is_alive
            health = {"status": "ok" if is_alive else "unhealthy", "incarnation": self._coordinator.incarnation}
            responder.send(200 if is_alive else 503, [(b"content-type", JSON)], json.encode(health))

    def _check(self, request: HttpRequest, responder: Responder) -> None:
        if not is_asked_from_here(request, responder, self._host):
            raise RequestRefused(
                "this route answers on the coordinator's own machine only",
                status=403,
                kind="permission_error",
                code="admin_only_on_loopback",
            )
        if request.path not in ROUTES:
            known = ", ".join(ROUTES)
            raise RequestRefused(
                f"{request.path[:200]} is not a route of the coordinator; there are {known}",
                status=404,
                code="route_not_found",
            )
        if request.method not in ("GET", "HEAD"):
            message = f"{request.path} takes GET, not {request.method[:20]}"
            raise RequestRefused(message, status=405, code="method_not_allowed")

    def page(self) -> bytes:
        """The metrics, in Prometheus' text format."""
        return metrics_page(self._values())

    def _values(self) -> dict[str, int]:
        coordinator, directory = self._coordinator, self._coordinator.directory
        counts = coordinator.counts
        spans = {} if coordinator.tracing is None else coordinator.tracing.counts
        return {
            "spans_sent": spans.get("sent", 0),
            "spans_dropped": spans.get("dropped", 0),
            "members": len(directory.members()),
            "chunks": directory.num_chunks,
            "placements": directory.num_placements,
            "left_out": sum(member.num_left_out for member in directory.members()),
            "connections": coordinator.num_connections,
            "resyncs": directory.num_resyncs,
            "expired": directory.num_expired,
            **{name: counts[name] for name in ("locates", "located_keys", "found_keys", "joins", "refused")},
        }

    def _status(self) -> dict[str, object]:
        coordinator, directory = self._coordinator, self._coordinator.directory
        members = [
            {
                "instance": member.instance,
                "incarnation": member.incarnation,
                "url": member.url,
                "num_chunks": len(member.keys),
                "is_listed": member.is_listed,
                "num_left_out": member.num_left_out,
            }
            for member in directory.members()[:MEMBERS_SHOWN_MAX]
        ]
        return {
            "is_healthy": coordinator.is_alive,
            "incarnation": coordinator.incarnation,
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._began_s, 3),
            **self._values(),
            "members": members,
        }
