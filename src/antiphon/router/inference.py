"""One inference request: prefill on one engine, hand over, decode on another; or a decode engine alone.

Owns the order of the steps and what the client is told when one fails. Bytes pass through: the client's body is
spliced, never decoded and encoded again, and the decode engine's answer goes back as it comes.

The contract of cancellation: a client that leaves while the prefill runs cancels the prefill. Once the prefill has
answered, its engine holds blocks until a decode engine has pulled them, so the hand-over is completed first, with a
decode request of one token if none was sent yet.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field

from antiphon.config.router_spec import RouterSpec
from antiphon.core.errors import ConnectFailed, ProtocolError, RequestRefused, UpstreamError, UpstreamGarbage
from antiphon.observe.receipt import Receipt, ReceiptRing
from antiphon.observe.router_metrics import RouterMetrics
from antiphon.protocol.body import Body, Buffer, scan
from antiphon.protocol.handoff import PrefillAnswer, drain_fields, prefill_fields, read_prefill_answer
from antiphon.protocol.openai import error_events
from antiphon.router.engines import Engines
from antiphon.router.headers import answer_headers, engine_request_id, forwarded_headers
from antiphon.router.refusals import (
    handover_timeout,
    kind_of,
    refusal_of,
    send_refusal,
    status_refusal,
    stopping,
    unavailable,
)
from antiphon.router.relay import Relay
from antiphon.routing.lifecycle import RequestLife, Stage
from antiphon.routing.path import SINGLE_STAGE, choose_path
from antiphon.routing.registry import Endpoint, EndpointRegistry, Role
from antiphon.transport.http.client import HttpCall, HttpClientConnection, request_head
from antiphon.transport.http.message import HttpRequest, HttpResponse
from antiphon.transport.http.server import Responder

log = logging.getLogger("antiphon.router")


class ClientLeft(Exception):
    """The client closed its connection before its answer was complete."""


@dataclass(slots=True)
class Flight:
    """One request in progress."""

    request: HttpRequest
    responder: Responder
    receipt: Receipt
    life: RequestLife
    prefill_call: HttpCall | None = None
    relay: Relay | None = None
    forwarded: list[tuple[bytes, bytes]] = field(default_factory=list)
    client_left: bool = False


class Inference:
    """The inference routes of one router."""

    def __init__(
        self,
        spec: RouterSpec,
        registry: EndpointRegistry,
        engines: Engines,
        metrics: RouterMetrics,
        receipts: ReceiptRing,
    ) -> None:
        self._spec = spec
        self._registry = registry
        self._engines = engines
        self._metrics = metrics
        self._receipts = receipts
        self._clock = time.monotonic  # uvloop's own clock counts whole milliseconds
        self._random = random.Random()  # ids need to be unique, not secret
        self.num_active = 0

    async def serve(self, request: HttpRequest, responder: Responder, *, may_split: bool) -> None:
        """Answer one POST on an inference route; ``may_split`` is false for routes that one engine serves alone."""
        now = self._clock()
        client_id = request.header(b"x-request-id")
        receipt = Receipt(f"{self._random.getrandbits(128):032x}", request.path, time.time())
        receipt.client_request_id = None if client_id is None else client_id.decode("latin-1")
        flight = Flight(request, responder, receipt, RequestLife(now), forwarded=forwarded_headers(request))
        self._receipts.add(receipt)
        self.num_active += 1
        responder.on_disconnect = lambda: self._client_left(flight)
        if responder.is_disconnected:  # before this began
            self._client_left(flight)
        try:
            await self._serve(flight, may_split=may_split)
        except RequestRefused as refusal:
            self._fail(flight, refusal)
        except ClientLeft:
            self._close(flight, Stage.CANCELLED)
        except UpstreamError as error:
            self._fail(flight, refusal_of(error, "decode" if flight.receipt.decode else "prefill"))
        except asyncio.CancelledError:
            if not flight.life.is_over:
                self._fail(flight, stopping())
            raise
        finally:
            self.num_active -= 1
            if not flight.life.is_over:  # a bug is on its way up
                self._close(flight, Stage.FAILED)

    async def _serve(self, flight: Flight, *, may_split: bool) -> None:
        try:
            body = scan(flight.request.body)
        except ProtocolError as error:
            raise RequestRefused(error.message, code="invalid_json") from None
        receipt = flight.receipt
        receipt.stream = body.get("stream") == b"true"
        if body.get("kv_transfer_params") not in (None, b"null"):
            raise RequestRefused(
                "kv_transfer_params is set by the router and cannot be sent by a client",
                code="kv_transfer_params_refused",
                param="kv_transfer_params",
            )
        choice = SINGLE_STAGE
        if may_split:
            choice = choose_path(
                body.get,
                is_enabled=self._spec.vllm_pd_disaggregation,
                has_prefill_pool=bool(self._registry.pools["prefill"]),
            )
        receipt.path, receipt.reason = choice.path, choice.reason
        if self._registry.num_usable("decode") == 0:
            raise unavailable("decode")  # before any work
        if choice.path == "local":
            self._metrics.path("local", choice.reason).inc()
            await self._decode(flight)
            return
        answer = await self._prefill(flight, body)
        if answer is None:
            return
        if answer.kv_transfer_params is None:
            # Right, but not what was asked for: it shows in the header, the receipt and the metric.
            receipt.reason = "no_handle"
            receipt.error = "the prefill engine returned no kv_transfer_params: the decode engine computed the prompt"
        self._metrics.path("pd", receipt.reason).inc()
        await self._hand_over(flight, body, answer)

    # -- prefill ----------------------------------------------------------------------------------------------------

    async def _prefill(self, flight: Flight, body: Body) -> PrefillAnswer | None:
        """Run the prefill; None if the engine refused the request as invalid, which is then the client's answer."""
        endpoint, connection = await self._connect("prefill", flight)
        response = await self._call_prefill(flight, endpoint, connection, body.splice(prefill_fields(body)))
        if 400 <= response.status < 500:
            flight.receipt.error = f"the prefill engine refused the request with {response.status}"
            self._pass_on(flight, response)
            return None
        if response.status != 200:
            self._metrics.engine_error("prefill", endpoint.address, "status")
            raise status_refusal(response.status, "prefill")
        try:
            answer = read_prefill_answer(response.body)
        except ProtocolError as error:
            self._metrics.engine_error("prefill", endpoint.address, "garbage")
            raise UpstreamGarbage(error.message) from error
        flight.life.enter(Stage.HANDING_OVER, self._clock())
        flight.receipt.prompt_tokens = answer.prompt_tokens
        if answer.prompt_tokens is not None and answer.cached_tokens is not None:
            computed = answer.prompt_tokens - answer.cached_tokens
            flight.receipt.tokens_by_source = {"device": answer.cached_tokens, "computed": computed}
        return answer

    async def _call_prefill(
        self, flight: Flight, endpoint: Endpoint, connection: HttpClientConnection, pieces: list[Buffer]
    ) -> HttpResponse:
        request_id = engine_request_id(flight.receipt.id, endpoint.address, None, tagged=self._spec.request_id_tag)
        began = self._clock()
        flight.life.enter(Stage.PREFILLING, began)
        flight.receipt.prefill = endpoint.address
        buffers = self._buffers(flight, endpoint, request_id, pieces)
        pool = self._engines.pool(endpoint)
        self._enter_engine(endpoint)
        call = pool.call(connection, buffers, timeout_s=self._spec.prefill_timeout_s)
        flight.prefill_call = call
        try:
            response = await call.done
        except UpstreamError as error:
            self._metrics.engine_error("prefill", endpoint.address, kind_of(error))
            raise
        finally:
            self._registry.release(endpoint)
            flight.prefill_call = None
            call.abort(ClientLeft())
        seconds = self._clock() - began
        flight.receipt.prefill_ms = seconds * 1000
        self._metrics.prefill_seconds.observe(seconds)
        return response

    # -- decode -----------------------------------------------------------------------------------------------------

    async def _hand_over(self, flight: Flight, body: Body, answer: PrefillAnswer) -> None:
        """Send the request on to a decode engine, with what the prefill engine answered."""
        params = answer.kv_transfer_params
        if params is None:
            await self._decode(flight)
            return
        try:
            endpoint, connection = await self._connect("decode", flight)
        except RequestRefused:
            self._metrics.handovers_abandoned.inc()
            raise
        if self._clock() - flight.life.times[Stage.HANDING_OVER] > self._spec.handover_timeout_s:
            # Its blocks may hold other requests' KV by now, and a pull would read that with no error.
            self._engines.pool(endpoint).give_back(connection)
            self._metrics.handovers_abandoned.inc()
            raise handover_timeout()
        if flight.client_left:
            await self._drain(flight, endpoint, connection, body.splice(drain_fields(body, params)))
        else:
            relay = await self._relay(flight, endpoint, connection, body.splice({"kv_transfer_params": params}))
            self._judge(flight, endpoint, relay)
            if 400 <= relay.status < 500:
                await self._free(flight, body, params)

    async def _decode(self, flight: Flight) -> None:
        """Let one decode engine serve the whole request."""
        endpoint, connection = await self._connect("decode", flight)
        if flight.client_left:
            self._engines.pool(endpoint).give_back(connection)
            raise ClientLeft
        relay = await self._relay(flight, endpoint, connection, [flight.request.body])
        self._judge(flight, endpoint, relay)

    async def _relay(
        self, flight: Flight, endpoint: Endpoint, connection: HttpClientConnection, pieces: list[Buffer]
    ) -> Relay:
        """Let a decode engine answer, and note what was seen of it.

        Raises:
            ClientLeft: the client left meanwhile.
        """
        receipt = flight.receipt
        handing_over_since = flight.life.times.get(Stage.HANDING_OVER)
        buffers = self._decode_buffers(flight, endpoint, pieces)
        has_handle = handing_over_since is not None and receipt.reason != "no_handle"
        relay = Relay(flight.responder, connection, self._spec, receipt, has_handle=has_handle)
        flight.relay = relay
        self._enter_engine(endpoint)
        try:
            await relay.run(buffers)
        finally:
            self._registry.release(endpoint)
        first = relay.first_byte_s
        receipt.num_events = relay.num_pieces
        receipt.status = relay.status or None
        if first is not None and relay.is_stream:
            receipt.first_token_ms = (first - flight.life.began_s) * 1000
            self._metrics.time_to_first_token_seconds.observe(first - flight.life.began_s)
            if handing_over_since is not None:
                receipt.handover_ms = (first - handing_over_since) * 1000
                self._metrics.handover_seconds.observe(first - handing_over_since)
        if has_handle:
            self._count_handover(relay)
        if relay.client_left:
            raise ClientLeft
        return relay

    def _count_handover(self, relay: Relay) -> None:
        """Count what became of the KV where it is not an ordinary answer: pulled for nobody, or not pulled at all."""
        if relay.status >= 500 or (relay.error is not None and relay.first_byte_s is None):
            self._metrics.handovers_abandoned.inc()
        elif relay.left_before_first_byte:
            self._metrics.handovers_after_disconnect.inc()

    def _judge(self, flight: Flight, endpoint: Endpoint, relay: Relay) -> None:
        """Close a request whose client stayed to the end."""
        if relay.error is not None:
            flight.receipt.error = relay.error.message
            self._metrics.engine_error("decode", endpoint.address, kind_of(relay.error))
            if not flight.responder.started:
                raise relay.error
            self._metrics.truncations.inc()
            self._close(flight, Stage.FAILED)
        elif relay.status >= 500 or relay.has_error_event:
            said = "ended its stream with an error event" if relay.has_error_event else f"answered with {relay.status}"
            flight.receipt.error = f"the decode engine {said}"
            self._metrics.engine_error("decode", endpoint.address, "status")
            if not flight.responder.started:
                raise status_refusal(relay.status, "decode")
            self._close(flight, Stage.FAILED)
        else:
            self._close(flight, Stage.COMPLETED)

    async def _drain(
        self, flight: Flight, endpoint: Endpoint, connection: HttpClientConnection, pieces: list[Buffer]
    ) -> None:
        """The client has left after the prefill answered: let a decode engine pull the KV, so that it is freed."""
        await self._pull(endpoint, connection, self._decode_buffers(flight, endpoint, pieces))
        raise ClientLeft

    async def _free(self, flight: Flight, body: Body, params: bytes) -> None:
        """A decode engine refused the request as invalid, which the prefill engine did not: let the KV be pulled all
        the same, since not every refusal of vLLM frees it.

        Where this one did, the pull reads other data: the salt keeps that from ever being found again.
        """
        salt = b'"antiphon-free-%b"' % flight.receipt.id.encode()
        pieces = body.splice(drain_fields(body, params) | {"cache_salt": salt})
        try:
            endpoint, connection = await self._connect("decode", flight)
        except RequestRefused:
            self._metrics.handovers_abandoned.inc()
            return
        await self._pull(
            endpoint, connection, self._buffers(flight, endpoint, f"free-{flight.receipt.id}".encode(), pieces)
        )

    async def _pull(self, endpoint: Endpoint, connection: HttpClientConnection, buffers: list[Buffer]) -> None:
        """Send a decode request whose answer nobody wants; counts what became of the KV."""
        pool = self._engines.pool(endpoint)
        self._enter_engine(endpoint)
        call = pool.call(connection, buffers, timeout_s=self._spec.handover_timeout_s)
        try:
            response = await call.done
        except UpstreamError as error:
            self._metrics.engine_error("decode", endpoint.address, kind_of(error))
            self._metrics.handovers_abandoned.inc()
        else:
            is_done = response.status == 200
            (self._metrics.handovers_after_disconnect if is_done else self._metrics.handovers_abandoned).inc()
        finally:
            self._registry.release(endpoint)
            call.abort(ClientLeft())

    def _decode_buffers(self, flight: Flight, endpoint: Endpoint, pieces: list[Buffer]) -> list[Buffer]:
        """The decode request, and the note of it in the receipt."""
        receipt = flight.receipt
        request_id = engine_request_id(receipt.id, receipt.prefill, endpoint.address, tagged=self._spec.request_id_tag)
        receipt.decode = endpoint.address
        receipt.engine_request_id = request_id.decode("latin-1")
        flight.life.enter(Stage.DECODING, self._clock())
        return self._buffers(flight, endpoint, request_id, pieces)

    # -- shared -----------------------------------------------------------------------------------------------------

    async def _connect(self, role: Role, flight: Flight) -> tuple[Endpoint, HttpClientConnection]:
        """An engine of a pool and a connection to it; one that refuses is passed over, since no byte was written.

        Raises:
            RequestRefused: 503, no engine of the pool can be reached.
            ClientLeft: the client left and nothing was handed over yet.
        """
        refused: frozenset[Endpoint] = frozenset()
        while True:
            endpoint = self._registry.pick(role, refused)
            if endpoint is None:
                raise unavailable(role)
            try:
                connection = await self._engines.connect(endpoint)
            except ConnectFailed:
                refused |= {endpoint}
                continue
            if flight.client_left and not flight.life.holds_prefill_blocks:
                self._engines.pool(endpoint).give_back(connection)
                raise ClientLeft
            return endpoint, connection

    def _client_left(self, flight: Flight) -> None:
        """Called by the edge when the client closes its connection before its answer is complete."""
        if flight.life.is_over:
            return
        flight.client_left = True
        self._metrics.disconnected(flight.life.stage.value)
        if flight.prefill_call is not None:
            if not flight.prefill_call.has_head:  # else the prefill has ended and holds blocks: they are handed over
                flight.prefill_call.abort(ClientLeft())
        elif flight.relay is not None:
            flight.relay.leave()

    def _enter_engine(self, endpoint: Endpoint) -> None:
        """Count a request that goes to an engine; the registry's ``release`` follows when it has ended there."""
        self._registry.acquire(endpoint)
        self._metrics.engine_request(endpoint.role, endpoint.address).inc()

    def _buffers(self, flight: Flight, endpoint: Endpoint, request_id: bytes, pieces: list[Buffer]) -> list[Buffer]:
        """A request to an engine: its head, then the pieces of its body."""
        fields = [*flight.forwarded, (b"x-request-id", request_id)]
        length = sum(len(piece) for piece in pieces)
        authority = self._engines.pool(endpoint).authority
        return [request_head("POST", flight.request.target, authority, fields, length=length), *pieces]

    def _pass_on(self, flight: Flight, response: HttpResponse) -> None:
        """An engine's own refusal of a request is the client's answer."""
        flight.receipt.status = response.status
        headers = answer_headers(flight.receipt)
        for name in (b"content-type", b"retry-after"):
            value = response.header(name)
            if value is not None:
                headers.append((name, value))
        flight.responder.send(response.status, headers, response.body)
        self._close(flight, Stage.COMPLETED)

    def _fail(self, flight: Flight, refusal: RequestRefused) -> None:
        """Tell the client, unless it has left; in the middle of a stream by an error event."""
        receipt = flight.receipt
        receipt.error = receipt.error or refusal.message
        if flight.client_left:
            self._close(flight, Stage.CANCELLED)
            return
        responder = flight.responder
        if not responder.started:
            receipt.status = refusal.status
            send_refusal(responder, refusal, answer_headers(receipt))
        elif not responder.finished:
            if flight.relay is not None and flight.relay.is_stream:
                flight.relay.break_off(error_events(refusal.message, status=refusal.status))
            else:
                responder.abort()
            self._metrics.truncations.inc()
        self._close(flight, Stage.FAILED)

    def _close(self, flight: Flight, outcome: Stage) -> None:
        """The one place where a request ends."""
        now = self._clock()
        flight.life.enter(outcome, now)
        flight.responder.on_disconnect = None
        receipt = flight.receipt
        receipt.outcome = outcome.value
        receipt.total_ms = (now - flight.life.began_s) * 1000
        if outcome is Stage.CANCELLED:
            receipt.status = None
        self._metrics.request(receipt.route, receipt.path or "none", outcome.value, receipt.status or 0).inc()
        self._metrics.request_seconds.observe(now - flight.life.began_s)
        if self._spec.access_log:
            log.info("%s", receipt.as_dict())
