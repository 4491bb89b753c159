"""What the router answers itself: health, readiness, models, metrics, receipts, status.

Health and models are for everybody. Receipts, metrics and status name engines, so they are for clients on this machine,
or for who shows the admin key.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from urllib.parse import parse_qsl

from antiphon.config.router_spec import RouterSpec
from antiphon.core.errors import RequestRefused
from antiphon.observe.receipt import ReceiptRing
from antiphon.observe.router_metrics import CONTENT_TYPE, RouterMetrics
from antiphon.protocol import json
from antiphon.protocol.openai import JSON
from antiphon.router.engines import Engines
from antiphon.router.keys import admin_key, bearer
from antiphon.router.models import ask_for_models, first_answer
from antiphon.router.refusals import unavailable
from antiphon.router.token_reports import READ_WAIT_MAX_S, TokenReports
from antiphon.routing import fleet as fleet_module
from antiphon.routing.endpoint import TIER_DOWN, TIER_WAITING, Cause, Endpoint
from antiphon.routing.fleet import Fleet
from antiphon.routing.states import EndpointState
from antiphon.transport.http.access import is_asked_from_here
from antiphon.transport.http.message import HttpRequest
from antiphon.transport.http.server import Responder

_TIER = attrgetter("tier")


class Admin:
    """The routes that the router answers itself."""

    def __init__(
        self,
        spec: RouterSpec,
        fleet: Fleet,
        engines: Engines,
        metrics: RouterMetrics,
        receipts: ReceiptRing,
        reports: TokenReports,
    ) -> None:
        self._spec = spec
        self._fleet = fleet
        self._engines = engines
        self._metrics = metrics
        self._receipts = receipts
        self._reports = reports
        self._key = admin_key(spec)
        self.is_draining = False
        self.sections: Callable[[], dict[str, object]] = dict
        """What ``/status`` shows beside engines and cache servers."""

    def health(self, responder: Responder) -> None:
        """The router itself is alive."""
        _send_json(responder, 200, {"status": "ok"})

    def readiness(self, responder: Responder) -> None:
        """200 while each configured pool has a usable engine and the router is not stopping, else 503."""
        pools: dict[str, dict[str, int]] = {
            pool.role: {"usable": len(pool.ready), "total": len(pool.endpoints)}
            for pool in (self._fleet.prefill, self._fleet.decode)
        }
        reason = None
        if self.is_draining:
            reason = "the router is stopping"
        elif not pools["decode"]["usable"]:
            reason = "no decode engine is available"
        elif self._fleet.has_prefill_pool and not pools["prefill"]["usable"]:
            reason = "no prefill engine is available"
        answer: dict[str, object] = {"status": "ready" if reason is None else "not_ready", **pools}
        if reason is not None:
            answer["reason"] = reason
        _send_json(responder, 200 if reason is None else 503, answer)

    async def models(self, request: HttpRequest, responder: Responder) -> None:
        """``/v1/models`` of the first engine that answers, decode engines first."""
        known = [*self._fleet.decode.endpoints, *self._fleet.prefill.endpoints]
        timeout_s = self._spec.health_timeout_s
        ask = partial(ask_for_models, self._engines, request, timeout_s)
        # Those that are down come last: they may be back.
        response = await first_answer(sorted(known, key=_TIER), ask, timeout_s)
        if response is None:
            raise unavailable("decode")
        content_type = response.header(b"content-type") or JSON
        responder.send(response.status, [(b"content-type", content_type)], response.body)

    def metrics(self, responder: Responder, gauges: dict[str, int]) -> None:
        """Prometheus text; ``gauges`` as in ``page``."""
        responder.send(200, [(b"content-type", CONTENT_TYPE)], self.page(gauges))

    def page(self, gauges: dict[str, int]) -> bytes:
        """The same as bytes. ``gauges`` holds ``active`` requests and client ``connections``."""
        self._metrics.active.set(gauges["active"])
        self._metrics.connections.set(gauges["connections"])
        return self._metrics.text()

    async def receipt(self, request: HttpRequest, responder: Responder) -> None:
        """``GET /receipts/ID``, or ``GET /receipts`` for the latest hundred. With ``?wait_s=S`` the answer for one
        waits until it is closed and its token reports are there."""
        receipt_id = request.path.removeprefix("/receipts").strip("/")
        if not receipt_id:
            latest = self._receipts.latest(100)
            _send_json(responder, 200, {"receipts": [self._reports.show(receipt) for receipt in latest]})
            return
        receipt = self._receipts.get(receipt_id)
        if receipt is None:
            raise RequestRefused(
                "no such receipt: the id is wrong, or too many requests have passed since",
                status=404,
                code="receipt_not_found",
            )
        wait_s = _wait_s(request.query)
        if wait_s:
            await self._reports.wait(receipt, wait_s, responder)
        _send_json(responder, 200, self._reports.show(receipt))

    def status(self, responder: Responder, gauges: dict[str, int]) -> None:
        """What the router knows of its engines, and what it has in hand."""
        engines = [
            endpoint_row(endpoint) | {"connections": self._engines.pool(endpoint).statistics()}
            for endpoint in self._fleet.all()
        ]
        answer: dict[str, object] = {"engines": engines, "cache_servers": self._reports.status()}
        answer |= self.sections()
        answer |= {"receipts": len(self._receipts), "compiled": is_compiled(), **gauges}
        _send_json(responder, 200, answer)

    def check_access(self, request: HttpRequest, responder: Responder) -> None:
        """Refuse who may not see engines.

        Raises:
            RequestRefused: 401 with a wrong or missing key, 403 from elsewhere while no key is configured.
        """
        if self._key is None:
            if is_asked_from_here(request, responder, self._spec.host):
                return
            raise RequestRefused(
                "this route answers on the router's own machine only",
                status=403,
                kind="permission_error",
                code="admin_only_on_loopback",
            )
        key = bearer(request.header(b"authorization"))
        if key is not None and hmac.compare_digest(key, self._key):
            return
        raise RequestRefused("the admin key is missing or wrong", status=401, kind="authentication_error", code="admin")


def is_compiled() -> bool:
    """Whether the hot modules run in their compiled form: all of them do, or none."""
    return not str(fleet_module.__file__).endswith(".py")


def endpoint_row(endpoint: Endpoint) -> dict[str, object]:
    """What is known of an endpoint, for people."""
    wait_s = endpoint.retry_at_s - time.monotonic()
    return {
        "role": endpoint.role,
        "url": endpoint.url,
        "state": endpoint.shown_state.value,
        "cause": None if endpoint.cause is Cause.NONE else endpoint.cause.value,
        "is_warming": endpoint.is_held,
        "is_leaving": endpoint.is_leaving,
        "breaker": BREAKER[endpoint.shown_state],
        "tried_again_in_s": round(wait_s, 3) if wait_s > 0 and endpoint.tier in (TIER_WAITING, TIER_DOWN) else None,
        "active_requests": endpoint.num_active,
        "answered": endpoint.num_succeeded,
        "ejections": endpoint.num_ejections,
        "failures_in_row": endpoint.num_failures,
        "engine_id": endpoint.engine_id or None,
        "lives": endpoint.life + 1,
    }


BREAKER = {
    EndpointState.UNKNOWN: "half_open",
    EndpointState.READY: "closed",
    EndpointState.SUSPECT: "half_open",
    EndpointState.DOWN: "open",
    EndpointState.DRAINING: "closed",
    EndpointState.REMOVED: "closed",
}
"""The state of an endpoint in the words of a circuit breaker."""


def _wait_s(query: str) -> float:
    """The seconds of ``wait_s=S``; 0 without.

    Raises:
        RequestRefused: 400, not a number of seconds from 0 to ``READ_WAIT_MAX_S``.
    """
    try:
        wait_s = float(dict(parse_qsl(query, keep_blank_values=True, max_num_fields=16)).get("wait_s", "0"))
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= READ_WAIT_MAX_S:  # false for what is not a number, too
        raise RequestRefused(
            f"wait_s must be a number of seconds from 0 to {READ_WAIT_MAX_S:g}", code="invalid_request", param="wait_s"
        )
    return wait_s


def _send_json(responder: Responder, status: int, value: dict[str, object]) -> None:
    responder.send(status, [(b"content-type", JSON)], json.encode(value))
