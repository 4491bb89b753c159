"""The inference routes: reads a request, chooses its path, and leads it through prefill and decode.

Owns what all requests share: their options, the sweep that watches their deadlines. What happens to one request is in
``flight``; what is decided about it, in ``routing``.

The contract of cancellation: a client that leaves while the prefill runs cancels the prefill. Once the prefill has
answered, its engine holds blocks until a decode engine has pulled them, so the hand-over is completed first, with a
decode request of one token if none was sent yet.
"""

from __future__ import annotations

import asyncio
import random
import time

from antiphon.config.router_spec import RouterSpec
from antiphon.core.errors import ProtocolError, RequestRefused
from antiphon.observe.receipt import Receipt, ReceiptRing
from antiphon.observe.router_metrics import RouterMetrics
from antiphon.protocol import json
from antiphon.protocol.body import Body, scan
from antiphon.router.access_log import AccessLog
from antiphon.router.desk import Desk
from antiphon.router.engines import Engines
from antiphon.router.entry import Entry, Ticket
from antiphon.router.flight import Flight
from antiphon.router.routes import Route, check_own_fields
from antiphon.router.tenants import SALT_FIELD, SALT_REFUSALS, UNSTAMPED, Stamp, Tenant
from antiphon.router.traces import RouterTraces
from antiphon.routing.ask import Ask
from antiphon.routing.fleet import Fleet
from antiphon.routing.life import Life
from antiphon.routing.options import LifeOptions
from antiphon.routing.path import SINGLE_STAGE, PathChoice, choose_path, served_alone
from antiphon.routing.pickers import affinity_key
from antiphon.routing.states import OUTCOMES, Stage
from antiphon.transport.http.message import HttpRequest
from antiphon.transport.http.server import Responder

LOOK_INTERVAL_S = 0.025
"""Deadlines are noticed this late at most. One look for all requests costs less than a timer for each."""

SESSION_HEADER = b"x-session-id"

KEPT_MAX_BYTES = 512
"""A longer header field is not kept in a receipt: there are thousands of receipts."""


class Inference:
    """The inference routes of one router."""

    def __init__(
        self,
        spec: RouterSpec,
        fleet: Fleet,
        engines: Engines,
        metrics: RouterMetrics,
        receipts: ReceiptRing,
        entry: Entry | None = None,
    ) -> None:
        # Read once: the fields of a spec are slow to read.
        self._is_split = spec.vllm_pd_disaggregation
        self._fleet = fleet
        self._options = life_options(spec)
        self._needs_key = "consistent_hash" in (fleet.options.prefill_policy, fleet.options.decode_policy)
        self._metrics = metrics
        self._receipts = receipts
        self._entry = entry
        self._random = random.Random()  # ids need to be unique, not secret
        self.access_log = AccessLog() if spec.access_log else None
        self._desk = Desk(
            *(engines, metrics, spec.request_id_tag, self.access_log), spec.handoff, chance=self._random.random
        )
        self.traces: RouterTraces | None = None
        """None where nothing is traced."""
        self._loop = asyncio.get_running_loop()
        self._look: asyncio.TimerHandle | None = None

    @property
    def num_active(self) -> int:
        """Requests in progress."""
        return len(self._desk.flights)

    def num_by_stage(self) -> dict[str, int]:
        """Requests in progress by stage, every stage named."""
        numbers = {stage.value: 0 for stage in Stage if stage not in OUTCOMES}
        for flight in self._desk.flights:
            numbers[flight.life.stage.value] += 1
        return numbers

    def serve(self, request: HttpRequest, responder: Responder, route: Route, tenant: Tenant | None = None) -> Flight:
        """Begin to answer one POST on an inference route.

        Args:
            tenant: whose request it is; None where there are none.
        """
        client_id = request.first.get(b"x-request-id")
        receipt = Receipt(self._random.getrandbits(128).to_bytes(16, "big").hex(), request.path, time.time())
        if client_id is not None and len(client_id) <= KEPT_MAX_BYTES:
            receipt.client_request_id = client_id.decode("latin-1")
        traceparent = request.first.get(b"traceparent")
        if traceparent is not None and len(traceparent) <= KEPT_MAX_BYTES:
            receipt.traceparent = traceparent.decode("latin-1")
        flight = Flight(self._desk, request, responder, receipt, route.api)
        trace = None if self.traces is None else self.traces.begin(receipt, flight.began_s)
        flight.trace = trace
        self._receipts.add(receipt)
        stamp = UNSTAMPED
        try:
            body = self._read(request, route)
            if trace is not None:
                trace.model = json.text_in(body.get("model"))
            if tenant is not None:
                receipt.tenant = tenant.name
                stamp = tenant.stamp(request.path, body)
                if stamp.fields:
                    body = _stamped(request, body, stamp, route)
            choice = self._choose(body, route)
        except RequestRefused as refusal:
            if receipt.tenant is not None and refusal.code in SALT_REFUSALS:
                self._metrics.salt_refusals.count(receipt.tenant, refusal.code or "")
            flight.refuse(refusal)
            return flight
        receipt.stream = "stream" in body.values and body.get("stream") == b"true"
        receipt.path, receipt.reason = choice.path, choice.reason
        key = _key_of(request, body) if self._needs_key else None
        life = Life(receipt.id, self._fleet, self._options, path=choice.path, ask=Ask(key) if key is not None else None)
        if self._entry is None:
            if choice.path == "local":
                self._metrics.paths.count("local", choice.reason)
            flight.begin(life, body)
        else:
            salt = stamp.salt or json.text_in(body.get(SALT_FIELD))
            self._enter(flight, Ticket(self._entry, flight, choice, key, salt), life, body)
        if self._look is None and not flight.is_resolved:
            self._look = self._loop.call_later(LOOK_INTERVAL_S, self._look_at_deadlines)
        return flight

    def close(self) -> None:
        """Watch no more, and write the rest of the access log."""
        if self._look is not None:
            self._look.cancel()
        if self.access_log is not None:
            self.access_log.close()

    def _enter(self, flight: Flight, ticket: Ticket, life: Life, body: Body) -> None:
        flight.ticket = ticket
        flight.hold(life, body)
        if not flight.is_resolved:
            ticket.enter()

    def _read(self, request: HttpRequest, route: Route) -> Body:
        """Read the body.

        Raises:
            RequestRefused: it cannot be served.
        """
        try:
            body = scan(request.body, route.api.handoff.replaced) if route.is_json else Body(request.body, {})
        except ProtocolError as error:
            raise RequestRefused(error.message, code="invalid_json") from None
        if "vllm_xargs" in body.values or "kv_transfer_params" in body.values:
            check_own_fields(body)
        return body

    def _choose(self, body: Body, route: Route) -> PathChoice:
        """The path that the request's form allows.

        Raises:
            RequestRefused: none does.
        """
        if not route.is_split:
            return SINGLE_STAGE
        alone = route.judge(body) if route.judge is not None else None
        if alone is not None:
            return served_alone(alone)
        return choose_path(body.values, is_enabled=self._is_split, has_prefill_pool=self._fleet.has_prefill_pool)

    def _look_at_deadlines(self) -> None:
        flights = self._desk.flights
        if not flights:
            self._look = None
            return
        self._look = self._loop.call_later(LOOK_INTERVAL_S, self._look_at_deadlines)
        now_s = self._desk.clock()
        for flight in [flight for flight in flights if flight.life.deadline_s <= now_s]:
            if not flight.is_resolved:
                flight.late()
        if self._entry is not None:
            self._entry.tick()


def life_options(spec: RouterSpec) -> LifeOptions:
    """What the spec says of the life of a request."""
    return LifeOptions(
        connect_s=spec.connect_timeout_s,
        prefill_s=spec.prefill_timeout_s,
        handover_s=spec.handover_timeout_s,
        first_token_s=spec.first_token_timeout_s,
        idle_s=spec.idle_timeout_s,
        abort_grace_s=spec.abort_grace_s,
        prefill_fallback=spec.prefill_fallback,
        is_kept=spec.handoff == "cache",
    )


def _key_of(request: HttpRequest, body: Body) -> int | None:
    """What consistent_hash goes by: the session, else the user, else the beginning of the prompt."""
    prompt = body.get("prompt") or body.get("messages") or body.get("input") or body.get("token_ids")
    return affinity_key(request.first.get(SESSION_HEADER), body.get("user"), prompt)


def _stamped(request: HttpRequest, body: Body, stamp: Stamp, route: Route) -> Body:
    """The request with its tenant's salt in it, whatever is sent of it to whom.

    Raises:
        RequestRefused: there is no room for it among the keys.
    """
    try:
        if SALT_FIELD in body.values:
            body = scan(request.body, frozenset((SALT_FIELD,)))  # to find where it stands
        request.body = b"".join(body.splice(stamp.fields))
        return scan(request.body, route.api.handoff.replaced)
    except ProtocolError as error:
        raise RequestRefused(error.message, code="invalid_json") from None
