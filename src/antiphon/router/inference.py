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
from typing import NoReturn

from antiphon.config.router_spec import RouterSpec
from antiphon.core.errors import ConnectFailed, ProtocolError, RequestRefused, UpstreamError, UpstreamGarbage
from antiphon.observe.receipt import Receipt, ReceiptRing
from antiphon.observe.router_metrics import RouterMetrics
from antiphon.protocol.body import Body, Buffer, scan
from antiphon.protocol.handoff import REPLACED, decode_body, drain_fields, prefill_body, read_prefill_answer
from antiphon.protocol.openai import error_events
from antiphon.router.engines import Engines
from antiphon.router.headers import answer_lines, engine_request_id, forwarded_headers
from antiphon.router.refusals import (
    handover_timeout,
    kind_of,
    refusal_of,
    send_refusal,
    status_refusal,
    stopping,
    unavailable,
)
from antiphon.router.relay import Relay, RelayTimes
from antiphon.routing.lifecycle import RequestLife, Stage
from antiphon.routing.path import SINGLE_STAGE, choose_path
from antiphon.routing.registry import Endpoint, EndpointRegistry, Role
from antiphon.transport.http.client import HttpCall, HttpClientConnection
from antiphon.transport.http.message import HttpRequest, HttpResponse, field_lines
from antiphon.transport.http.server import Responder

log = logging.getLogger("antiphon.router")


# To look up a member of an Enum takes several calls: here they are plain names.
_PREFILLING, _HANDING_OVER, _DECODING = Stage.PREFILLING, Stage.HANDING_OVER, Stage.DECODING
_COMPLETED, _CANCELLED = Stage.COMPLETED, Stage.CANCELLED

_JOIN_MAX_BYTES = 65_536
"""A request up to this size is written as one piece, which costs less than several."""


class ClientLeft(Exception):
    """The client closed its connection before its answer was complete."""


class Flight:
    """One request in progress."""

    def __init__(self, request: HttpRequest, responder: Responder, receipt: Receipt, life: RequestLife) -> None:
        self.request = request
        self.responder = responder
        self.receipt = receipt
        self.life = life
        self.forwarded = field_lines(forwarded_headers(request))
        self.client_left = False
        self.prefill_call: HttpCall | None = None
        self.relay: Relay | None = None
        self.params: bytes | None = None
        """The handle of the prefill's KV, raw JSON: whoever has it must let a decode engine pull it."""


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
        # Read once: the fields of a spec are slow to read.
        self._is_split = spec.vllm_pd_disaggregation
        self._is_tagged = spec.request_id_tag
        self._prefill_timeout_s = spec.prefill_timeout_s
        self._handover_timeout_s = spec.handover_timeout_s
        self._relay_times = RelayTimes(spec)
        self._logs_access = spec.access_log
        self._registry = registry
        self._engines = engines
        self._metrics = metrics
        self._receipts = receipts
        self._clock = time.monotonic  # uvloop's own clock counts whole milliseconds
        self._random = random.Random()  # ids need to be unique, not secret
        self.num_active = 0

    async def serve(self, request: HttpRequest, responder: Responder, *, may_split: bool) -> None:
        """Answer one POST on an inference route; ``may_split`` is false for routes that one engine serves alone."""
        client_id = request.first.get(b"x-request-id")
        receipt = Receipt(f"{self._random.getrandbits(128):032x}", request.path, time.time())
        if client_id is not None:
            receipt.client_request_id = client_id.decode("latin-1")
        flight = Flight(request, responder, receipt, RequestLife(self._clock()))
        self._receipts.add(receipt)
        self.num_active += 1
        responder.on_disconnect = lambda: self._client_left(flight)
        if responder.is_disconnected:  # before this began
            self._client_left(flight)
        try:
            await self._serve(flight, may_split=may_split)
        except RequestRefused as refusal:
            if flight.params is not None and flight.life.holds_prefill_blocks:
                self._metrics.handovers_abandoned.inc()
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
        """The way of a request. What waits is awaited here, so that going on after a wait passes few frames."""
        body = self._read(flight, may_split=may_split)
        if flight.receipt.path == "pd":
            endpoint = self._pick("prefill")
            connection = self._engines.pool(endpoint).acquire_nowait()
            if connection is None:
                endpoint, connection = await self._connect(endpoint, flight)
            call = self._start_prefill(flight, endpoint, connection, body)
            try:
                response = await call
            finally:
                self._end_prefill(flight, endpoint, call)
            if not self._hand_over(flight, endpoint, response):
                return
        endpoint = self._pick("decode")
        connection = self._engines.pool(endpoint).acquire_nowait()
        if connection is None:
            endpoint, connection = await self._connect(endpoint, flight)
        if flight.params is not None:
            self._check_lease(flight, endpoint, connection)
            if flight.client_left:
                await self._drain(flight, endpoint, connection, body)
        relay = self._start_decode(flight, endpoint, connection, body)
        try:
            await relay
        finally:
            relay.close()
            self._registry.release(endpoint)
        self._note(flight, relay)
        self._judge(flight, endpoint, relay)
        if flight.params is not None and 400 <= relay.status < 500:
            await self._free(flight, body, flight.params)

    def _read(self, flight: Flight, *, may_split: bool) -> Body:
        """Read the body and choose the path.

        Raises:
            RequestRefused: the body cannot be served, or no engine can.
            ClientLeft: the client left before this began.
        """
        try:
            body = scan(flight.request.body, REPLACED)
        except ProtocolError as error:
            raise RequestRefused(error.message, code="invalid_json") from None
        receipt, values = flight.receipt, body.values
        receipt.stream = "stream" in values and body.get("stream") == b"true"
        if "kv_transfer_params" in values and body.get("kv_transfer_params") != b"null":
            raise RequestRefused(
                "kv_transfer_params is set by the router and cannot be sent by a client",
                code="kv_transfer_params_refused",
                param="kv_transfer_params",
            )
        choice = SINGLE_STAGE
        if may_split:
            choice = choose_path(
                values,
                is_enabled=self._is_split,
                has_prefill_pool=bool(self._registry.pools["prefill"]),
            )
        receipt.path, receipt.reason = choice.path, choice.reason
        if not self._registry.has_usable("decode"):
            raise unavailable("decode")  # before any work
        if choice.path == "local":
            self._metrics.paths.count("local", choice.reason)
        if flight.client_left:
            raise ClientLeft
        return body

    # -- prefill ----------------------------------------------------------------------------------------------------

    def _start_prefill(
        self, flight: Flight, endpoint: Endpoint, connection: HttpClientConnection, body: Body
    ) -> HttpCall:
        receipt = flight.receipt
        request_id = engine_request_id(receipt.id, endpoint.address, None, tagged=self._is_tagged)
        flight.life.enter(_PREFILLING, self._clock())
        receipt.prefill = endpoint.address
        buffers = self._buffers(flight, endpoint, request_id, prefill_body(body))
        self._enter_engine(endpoint)
        call = HttpCall(connection, self._prefill_timeout_s)
        flight.prefill_call = call
        call.start(buffers)
        return call

    def _end_prefill(self, flight: Flight, endpoint: Endpoint, call: HttpCall) -> None:
        """The prefill has been answered, has failed, or is given up."""
        self._registry.release(endpoint)
        flight.prefill_call = None
        if isinstance(call.failure, UpstreamError):
            self._metrics.engine_error("prefill", endpoint.address, kind_of(call.failure))
        if not call.is_resolved:
            call.abort(ClientLeft())

    def _hand_over(self, flight: Flight, endpoint: Endpoint, response: HttpResponse) -> bool:
        """Take the prefill's answer; false if the engine refused the request as invalid: that is the client's answer.

        Raises:
            RequestRefused, UpstreamGarbage: it is no answer to go on with.
        """
        receipt, life, now = flight.receipt, flight.life, self._clock()
        seconds = now - life.times[_PREFILLING]
        receipt.prefill_ms = seconds * 1000
        self._metrics.prefill_seconds.observe(seconds)
        if response.status != 200:
            if 400 <= response.status < 500:
                receipt.error = f"the prefill engine refused the request with {response.status}"
                self._pass_on(flight, response)
                return False
            self._metrics.engine_error("prefill", endpoint.address, "status")
            raise status_refusal(response.status, "prefill")
        try:
            answer = read_prefill_answer(response.body)
        except ProtocolError as error:
            self._metrics.engine_error("prefill", endpoint.address, "garbage")
            raise UpstreamGarbage(error.message) from error
        life.enter(_HANDING_OVER, now)
        receipt.prompt_tokens, receipt.cached_tokens = answer.prompt_tokens, answer.cached_tokens
        flight.params = answer.kv_transfer_params
        if flight.params is None:
            # Right, but not what was asked for: it shows in the header, the receipt and the metric.
            receipt.reason = "no_handle"
            receipt.error = "the prefill engine returned no kv_transfer_params: the decode engine computed the prompt"
        self._metrics.paths.count("pd", receipt.reason)
        return True

    # -- decode -----------------------------------------------------------------------------------------------------

    def _check_lease(self, flight: Flight, endpoint: Endpoint, connection: HttpClientConnection) -> None:
        """Refuse to pull blocks that may hold other requests' KV by now: the pull would read that with no error."""
        if self._clock() - flight.life.times[_HANDING_OVER] > self._handover_timeout_s:
            self._engines.pool(endpoint).give_back(connection)
            raise handover_timeout()

    def _start_decode(self, flight: Flight, endpoint: Endpoint, connection: HttpClientConnection, body: Body) -> Relay:
        """Let a decode engine answer: from the prefill's KV if there is a handle, else from the prompt.

        Raises:
            ClientLeft: the client left, and there is no handle whose KV must be pulled.
        """
        params = flight.params
        if params is not None:
            pieces = decode_body(body, params)
        else:
            if flight.client_left:
                self._engines.pool(endpoint).give_back(connection)
                raise ClientLeft
            pieces = [flight.request.body]
        buffers = self._decode_buffers(flight, endpoint, pieces)
        relay = Relay(flight.responder, connection, self._relay_times, flight.receipt, has_handle=params is not None)
        flight.relay = relay
        self._enter_engine(endpoint)
        relay.start(buffers)
        return relay

    def _note(self, flight: Flight, relay: Relay) -> None:
        """Note what was seen of a decode engine's answer.

        Raises:
            ClientLeft: the client left meanwhile.
        """
        receipt, life = flight.receipt, flight.life
        receipt.num_events = relay.num_pieces
        if relay.status:
            receipt.status = relay.status
        first = relay.first_byte_s
        if first is not None and relay.is_stream:
            receipt.first_token_ms = (first - life.began_s) * 1000
            self._metrics.time_to_first_token_seconds.observe(first - life.began_s)
            handing_over_since = life.times.get(_HANDING_OVER)
            if handing_over_since is not None:
                receipt.handover_ms = (first - handing_over_since) * 1000
                self._metrics.handover_seconds.observe(first - handing_over_since)
        if flight.params is not None:
            self._count_handover(relay)
        if relay.client_left:
            raise ClientLeft

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
            self._close(flight, _COMPLETED)

    async def _drain(
        self, flight: Flight, endpoint: Endpoint, connection: HttpClientConnection, body: Body
    ) -> NoReturn:
        """The client has left after the prefill answered: let a decode engine pull the KV, so that it is freed."""
        assert flight.params is not None
        pieces = body.splice(drain_fields(body, flight.params))
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
            endpoint, connection = await self._connect(self._pick("decode"), flight)
        except RequestRefused:
            self._metrics.handovers_abandoned.inc()
            return
        await self._pull(endpoint, connection, self._buffers(flight, endpoint, f"free-{flight.receipt.id}", pieces))

    async def _pull(self, endpoint: Endpoint, connection: HttpClientConnection, buffers: list[Buffer]) -> None:
        """Send a decode request whose answer nobody wants; counts what became of the KV."""
        self._enter_engine(endpoint)
        call = HttpCall(connection, self._handover_timeout_s)
        call.start(buffers)
        try:
            response = await call
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
        request_id = engine_request_id(receipt.id, receipt.prefill, endpoint.address, tagged=self._is_tagged)
        receipt.decode = endpoint.address
        receipt.engine_request_id = request_id
        flight.life.enter(_DECODING, self._clock())
        return self._buffers(flight, endpoint, request_id, pieces)

    # -- shared -----------------------------------------------------------------------------------------------------

    def _pick(self, role: Role, refused: frozenset[Endpoint] = frozenset()) -> Endpoint:
        """An engine of a pool, none of ``refused``.

        Raises:
            RequestRefused: 503, no engine of the pool can be reached.
        """
        endpoint = self._registry.pick(role, refused)
        if endpoint is None:
            raise unavailable(role)
        return endpoint

    async def _connect(self, endpoint: Endpoint, flight: Flight) -> tuple[Endpoint, HttpClientConnection]:
        """A connection to ``endpoint``, or to another engine of its pool if it refuses: no byte was written.

        Raises:
            RequestRefused: 503, no engine of the pool can be reached.
            ClientLeft: the client left and nothing was handed over yet.
        """
        refused: frozenset[Endpoint] = frozenset()
        while True:
            try:
                connection = await self._engines.connect(endpoint)
            except ConnectFailed:
                refused |= {endpoint}
                endpoint = self._pick(endpoint.role, refused)
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
        self._metrics.engine_requests.count(endpoint.role, endpoint.address)

    def _buffers(self, flight: Flight, endpoint: Endpoint, request_id: str, pieces: list[Buffer]) -> list[Buffer]:
        """A request to an engine: its head and the pieces of its body, as few as is cheap."""
        length = sum(map(len, pieces))
        head = b"POST %b HTTP/1.1\r\nhost: %b\r\n%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
            flight.request.target.encode("latin-1"),
            endpoint.address.encode("latin-1"),
            flight.forwarded,
            request_id.encode("latin-1"),
            length,
        )
        return [b"".join([head, *pieces])] if length <= _JOIN_MAX_BYTES else [head, *pieces]

    def _pass_on(self, flight: Flight, response: HttpResponse) -> None:
        """An engine's own refusal of a request is the client's answer."""
        flight.receipt.status = response.status
        passed_on = [field for field in response.headers if field[0] in (b"content-type", b"retry-after")]
        lines = answer_lines(flight.receipt) + field_lines(passed_on)
        flight.responder.send(response.status, lines, response.body)
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
            send_refusal(responder, refusal, answer_lines(receipt))
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
        receipt.outcome = word = outcome.word
        receipt.total_ms = (now - flight.life.began_s) * 1000
        if outcome is _CANCELLED:
            receipt.status = None
        self._metrics.requests.count(receipt.route, receipt.path or "none", word, receipt.status or 0)
        self._metrics.request_seconds.observe(now - flight.life.began_s)
        if self._logs_access:
            log.info("%s", receipt.as_dict())
