"""One inference request in progress: does what its :class:`~antiphon.routing.life.Life` commands, and tells it what
happens.

Owns the request's connections and what its client is sent. Decides nothing: which engine, whether to try again and what
the client is told is the life's decision. Bytes pass through: the client's body is spliced, never decoded and encoded
again, and the decode engine's answer goes back as it comes.

No task and no timer belongs to a request: engines' bytes continue it in place, and one sweep of the router looks at
all deadlines. Only a new connection is made in a task.

Invariant: a flight resolves once, when its life has finished.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from antiphon.core.errors import ConnectFailed, OwnLimit, ProtocolError, RequestRefused, UpstreamError, UpstreamGarbage
from antiphon.observe.receipt import Receipt
from antiphon.protocol.apis import Api
from antiphon.protocol.body import Body
from antiphon.protocol.handoff import PARAMS_OF, decode_body
from antiphon.protocol.prefill_answer import read_prefill_answer
from antiphon.router.desk import Desk
from antiphon.router.headers import answer_lines, engine_request_id, retry_after_s
from antiphon.router.refusals import broken_off, kind_of, refusal_for, send_refusal, stopping
from antiphon.router.relay import Relay, WholeAnswer
from antiphon.router.sending import buffers_of, decode_id, drain_request, engine_head
from antiphon.router.traces import RequestTrace
from antiphon.routing.commands import (
    CancelUpstream,
    Command,
    CompleteHandover,
    ConnectDecode,
    ConnectPrefill,
    EndStreamWithError,
    Finish,
    PassOn,
    ProbeDecode,
    RespondError,
    SendDecode,
)
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.events import (
    BytesWritten,
    ClientLeft,
    Connected,
    ConnectRefused,
    Deadline,
    DecodeRefused,
    Event,
    FirstByte,
    PrefillAnswered,
    PrefillHead,
    Received,
    StreamEnded,
    UpstreamLost,
)
from antiphon.routing.life import Life
from antiphon.routing.machine import step
from antiphon.routing.states import Stage
from antiphon.transport.http.client_connection import HttpClientConnection
from antiphon.transport.http.message import HttpRequest, HttpResponse, field_lines
from antiphon.transport.http.server import Responder
from antiphon.transport.http.strand import Activity

if TYPE_CHECKING:
    from antiphon.router.entry import Ticket

_STREAMING, _CANCELLED = Stage.STREAMING, Stage.CANCELLED
_WORDS: Final = {stage: stage.value for stage in Stage}
"""Enum's ``value`` is a call into Python."""

_FROM_THE_ENGINE: Final = -1

Connecting = ProbeDecode | ConnectPrefill | ConnectDecode


class Flight(Activity):
    """One request in progress, resolved when it has ended.

    Args:
        desk: shared.
        request: complete.
        responder: to its client.
        receipt: to be filled in.
        api: of the request and its answer.
    """

    life: Life
    body: Body
    connection: HttpClientConnection | None = None
    exchange: Relay | WholeAnswer | None
    relay: Relay | None = None
    """The answer that the client gets, or got a part of."""
    refusal: HttpResponse | None = None
    """An engine's own."""
    connecting: asyncio.Task[None] | None = None
    ticket: Ticket | None = None
    """What it takes part in beside its life; None where the router looks at a request's form alone."""
    trace: RequestTrace | None = None
    """None where nothing is traced."""
    sent_s = 0.0
    """When the prefill request was sent."""
    handed_over_s = 0.0
    """When its answer was here."""
    has_path = False
    """The path is counted: once, however often the request is prefilled."""
    left_before_first_byte = False
    is_pulled = False
    """By a request whose answer nobody wanted."""

    def __init__(self, desk: Desk, request: HttpRequest, responder: Responder, receipt: Receipt, api: Api) -> None:
        Activity.__init__(self)
        self.exchange = None  # no default of the class: mypyc leaves one of a union of three unset
        self.desk = desk
        self.request = request
        self.responder = responder
        self.receipt = receipt
        self.api = api
        self.head = engine_head(request, desk.engines.access)
        """The head of a request to an engine, as far as it is the same for each."""
        self.began_s = desk.clock()

    def begin(self, life: Life, body: Body) -> None:
        """The request is valid: serve it."""
        self.hold(life, body)
        self.go()

    def hold(self, life: Life, body: Body) -> None:
        """The request is valid, and waits for :meth:`go` or :meth:`turn_away`; its client may leave before."""
        self.life = life
        self.body = body
        self.desk.flights.add(self)
        responder = self.responder
        responder.on_disconnect = self.client_left
        if responder.is_disconnected:  # before this began
            self.client_left()

    def go(self) -> None:
        """Serve it."""
        if not self.is_resolved:
            self.tell(Received())

    def turn_away(self, refusal: RequestRefused, retry_after_s: int | None = None) -> None:
        """It is not served now: that is the answer. Instead of :meth:`go`."""
        if self.is_resolved:
            return
        self._say(refusal, retry_after_s)
        self.life.cut()
        self._close(Stage.FAILED)

    def refuse(self, refusal: RequestRefused) -> None:
        """The request is not valid: that is the answer. Instead of :meth:`begin`."""
        self._say(refusal)
        self._close(Stage.FAILED)

    def _say(self, refusal: RequestRefused, retry_after_s: int | None = None) -> None:
        """A refusal of the router's own is the answer, for a client that is there."""
        receipt, responder = self.receipt, self.responder
        receipt.error = receipt.error or refusal.message
        receipt.status, receipt.code = refusal.status, refusal.code
        responder.on_disconnect = None
        if not responder.is_disconnected:
            send_refusal(responder, refusal, answer_lines(receipt), retry_after_s, self.api)

    def cancel(self) -> None:
        """The router stops: tell the client, and let go of everything."""
        if self.is_resolved:
            return
        if self.ticket is not None:
            self.ticket.stop()
        refusal = stopping()
        self.receipt.error = self.receipt.error or refusal.message
        self._cancel_upstream()
        if not self.life.client_left and not self.responder.finished:
            if not self.responder.started:
                self._say(refusal)
            elif self.relay is not None:
                self.relay.break_off(refusal.message, refusal.status)
        outcome = _CANCELLED if self.life.client_left else Stage.FAILED
        self.life.cut()
        self._close(outcome)

    # -- what happens -----------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Tell the life of an event, and do what it commands."""
        desk, trace = self.desk, self.trace
        try:
            commands = step(self.life, event, desk.clock(), desk.chance())
            if trace is not None:
                trace.stepped(event, commands, desk.clock(), self.receipt)
            for command in commands:
                self._do(command)
        except Exception as error:  # supervised: a bug ends this request, and no other; the server logs and answers it
            self.broken(error)

    def late(self) -> None:
        """The life's deadline has passed."""
        life, relay = self.life, self.relay
        if relay is not None and relay.is_paused:
            life.last_byte_s = self.desk.clock()  # it is the client that is slow
        endpoint, stage = life.endpoint, life.stage
        if endpoint is not None and not life.client_left and (relay is None or not relay.is_paused):
            due_s = life.last_byte_s + life.options.idle_s if stage is _STREAMING else 0.0
            if self.desk.clock() >= due_s:
                self._engine_error(endpoint, "timeout" if self.connecting is None else "connect")
        self._say_written()
        self.tell(Deadline())

    def client_left(self) -> None:
        """Called by the edge when the client closes its connection before its answer is complete."""
        life = self.life
        if life.is_over:
            return
        exchange = self.exchange
        self.desk.metrics.disconnected(_WORDS[life.stage])
        self.left_before_first_byte = life.stage is not _STREAMING
        if isinstance(exchange, WholeAnswer) and exchange.has_head and exchange.status == 200:
            self.tell(PrefillHead(life.attempt))  # the prefill has ended and holds blocks: they are handed over
        self._say_written()
        self.tell(ClientLeft())

    def answered(self, response: HttpResponse) -> None:
        """A prefill engine has answered, or a decode engine whose answer nobody wants."""
        life, receipt, desk = self.life, self.receipt, self.desk
        endpoint, attempt, status = life.endpoint, life.attempt, response.status
        assert endpoint is not None
        if endpoint.role == "decode":
            self.is_pulled = status == 200
            self.tell(StreamEnded(attempt) if self.is_pulled else DecodeRefused(attempt, status))
            return
        now_s = self.handed_over_s = desk.clock()
        seconds = now_s - self.sent_s
        receipt.prefill_ms = seconds * 1000
        desk.metrics.prefill_seconds.observe(seconds)
        if status != 200:
            self._refused(endpoint, response)
            self.tell(PrefillAnswered(attempt, status, retry_after_s=retry_after_s(response)))
            return
        try:
            answer = read_prefill_answer(response.body)
        except ProtocolError as error:
            self.lost(UpstreamGarbage(error.message))
            return
        receipt.prompt_tokens, receipt.cached_tokens = answer.prompt_tokens, answer.cached_tokens
        params = answer.kv_transfer_params
        if self.ticket is not None:
            self.ticket.prefilled(answer.cached_tokens)
        if params is None:
            # Right, but not what was asked for: it shows in the header, the receipt and the metric.
            receipt.reason = "no_handle"
            receipt.error = "the prefill engine returned no kv_transfer_params: the decode engine computed the prompt"
        else:
            receipt.error = None
            receipt.reason = "default"
            receipt.handed_over_by = desk.handoff
        receipt.path = "pd"  # also of one that was to be served alone
        if not self.has_path:
            self.has_path = True
            desk.metrics.paths.count("pd", receipt.reason)
        self.tell(PrefillAnswered(attempt, 200, params, answer.engine_id))

    def first_byte(self) -> None:
        """The first part of the answer is here: from now on the client gets it."""
        life, receipt = self.life, self.receipt
        self.tell(FirstByte(life.attempt))
        if life.stage is not _STREAMING:
            return
        relay, ticket = self.relay, self.ticket
        assert relay is not None
        receipt.status = relay.status
        if ticket is not None:
            ticket.pulled(life.last_byte_s)
        if relay.is_stream:
            first_s, metrics = life.last_byte_s, self.desk.metrics
            receipt.first_token_ms = (first_s - self.began_s) * 1000
            metrics.time_to_first_token_seconds.observe(first_s - self.began_s)
            if self.handed_over_s:
                receipt.handover_ms = (first_s - self.handed_over_s) * 1000
                metrics.handover_seconds.observe(first_s - self.handed_over_s)

    def declined(self, response: HttpResponse, status: int) -> None:
        """A decode engine answered with an error before any part of an answer."""
        endpoint = self.life.endpoint
        assert endpoint is not None
        self._refused(endpoint, response)
        self.tell(DecodeRefused(self.life.attempt, status, retry_after_s(response)))

    def ended(self, *, is_complete: bool, has_error: bool, is_json: bool = True) -> None:
        """The decode engine's answer has ended."""
        life = self.life
        endpoint = life.endpoint
        assert endpoint is not None
        if not is_complete:
            self._engine_error(endpoint, "lost")
            self.receipt.error = "the decode engine ended its stream before its end"
        elif has_error:
            self._engine_error(endpoint, "status")
            self.receipt.error = "the decode engine ended its stream with an error event"
        elif not is_json:
            self._engine_error(endpoint, "garbage")
        self.tell(StreamEnded(life.attempt, is_complete, has_error))

    def lost(self, error: UpstreamError) -> None:
        """The engine's connection ended before the answer was complete."""
        endpoint = self.life.endpoint
        assert endpoint is not None
        self.receipt.error = error.message
        self._engine_error(endpoint, kind_of(error))
        self._say_written()
        self.tell(UpstreamLost(self.life.attempt, isinstance(error, UpstreamGarbage)))

    # -- what is commanded ------------------------------------------------------------------------------------------

    def _do(self, command: Command) -> None:
        """The most frequent first."""
        if isinstance(command, (ConnectPrefill, ConnectDecode, ProbeDecode)):  # a union is made anew at each call
            self._connect(command)
        elif isinstance(command, SendDecode):
            self._send_decode(command)
        elif isinstance(command, Finish):
            self._finish(command)
        elif isinstance(command, CancelUpstream):
            self._cancel_upstream()
        elif isinstance(command, CompleteHandover):
            self._complete_handover(command)
        elif isinstance(command, PassOn):
            self._pass_on(command)
        elif isinstance(command, RespondError):
            self._say(refusal_for(command), command.retry_after_s)
        else:
            self._end_stream_with_error(command)

    def _connect(self, command: Connecting) -> None:
        """An idle connection is used in place; a new one is made in a task. Not yet where the ticket says so: it then
        calls :meth:`connect`."""
        self.exchange = self.connection = None
        if self.ticket is None or self.ticket.may_connect(command):
            self.connect(command)

    def connect(self, command: Connecting) -> None:
        """The same, now."""
        pool = self.desk.engines.pool(command.endpoint)
        connection = pool.acquire_nowait()
        if connection is None:
            self.connecting = asyncio.get_running_loop().create_task(self._make_connection(command))
        else:
            self._connected(command, connection)

    async def _make_connection(self, command: Connecting) -> None:
        began_s = self.desk.clock()
        try:
            connection = await self.desk.engines.pool(command.endpoint).acquire()
        except ConnectFailed as error:
            self.connecting = None
            self.receipt.error = error.message
            self._engine_error(command.endpoint, "connect")
            self.tell(ConnectRefused(command.attempt, isinstance(error, OwnLimit)))
        else:
            self.connecting = None
            self.desk.metrics.connect_seconds.observe(self.desk.clock() - began_s)
            self._connected(command, connection)

    def _connected(self, command: Connecting, connection: HttpClientConnection) -> None:
        if type(command) is ConnectPrefill:
            self.connection = connection
            self.tell(Connected(command.attempt))
            self._send_prefill(command, connection)
        elif type(command) is ProbeDecode:
            self.desk.engines.pool(command.endpoint).give_back(connection)
            self.tell(Connected(command.attempt))
        else:
            self.connection = connection
            self.tell(Connected(command.attempt))

    def _send_prefill(self, command: ConnectPrefill, connection: HttpClientConnection) -> None:
        desk, receipt, endpoint = self.desk, self.receipt, command.endpoint
        receipt.prefill = address = endpoint.address
        request_id = engine_request_id(command.request_id, address, None, tagged=desk.is_tagged)
        pieces = self.api.handoff.prefill_body(self.body, PARAMS_OF[desk.handoff])
        buffers = buffers_of(self, endpoint, request_id, pieces)
        desk.metrics.engine_requests.count("prefill", address)
        self.sent_s = desk.clock()
        self.exchange = exchange = WholeAnswer(self, connection)
        exchange.start(buffers)

    def _send_decode(self, command: SendDecode) -> None:
        connection, handle, receipt = self.connection, command.handle, self.receipt
        assert connection is not None
        if handle is not None:
            params = handle.value
            assert isinstance(params, bytes)
            pieces, cached_tokens = decode_body(self.body, params), receipt.cached_tokens
        else:
            pieces, cached_tokens = [self.request.body], _FROM_THE_ENGINE
            if receipt.path != "local" and self.life.path == "local":
                receipt.path, receipt.reason = "local", "prefill_fallback"
                self.desk.metrics.paths.count("local", "prefill_fallback")
        request_id = decode_id(self, command.endpoint, command.request_id)
        receipt.engine_request_id = request_id
        self.exchange = self.relay = relay = Relay(self, connection, cached_tokens)
        self.desk.metrics.engine_requests.count("decode", command.endpoint.address)
        relay.start(buffers_of(self, command.endpoint, request_id, pieces))

    def _complete_handover(self, command: CompleteHandover) -> None:
        """Let a decode engine pull the KV, so that it is freed: nobody wants the answer."""
        connection = self.connection
        assert connection is not None
        self.desk.metrics.engine_requests.count("decode", command.endpoint.address)
        self.exchange = exchange = WholeAnswer(self, connection)
        exchange.start(drain_request(self, command))

    def _pass_on(self, command: PassOn) -> None:
        """An engine's own refusal of a request is the client's answer."""
        refusal, receipt = self.refusal, self.receipt
        assert refusal is not None
        receipt.status = refusal.status
        passed_on = [field for field in refusal.headers if field[0] in (b"content-type", b"retry-after")]
        lines = answer_lines(receipt) + field_lines(passed_on)
        self.responder.on_disconnect = None
        self.responder.send(refusal.status, lines, refusal.body)

    def _end_stream_with_error(self, command: EndStreamWithError) -> None:
        message = broken_off(command)
        self.receipt.error = self.receipt.error or message
        self.desk.metrics.truncations.inc()
        assert self.relay is not None
        self.responder.on_disconnect = None
        self.relay.break_off(message, command.status)

    def _finish(self, command: Finish) -> None:
        if self.left_before_first_byte and self.life.handle is not None and (self.is_pulled or self.relay is not None):
            self.desk.metrics.handovers_after_disconnect.inc()
        self._close(command.outcome)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _say_written(self) -> None:
        """Said before what makes a difference to it alone: an answer says so itself."""
        if self.exchange is not None:
            self.tell(BytesWritten(self.life.attempt))

    def _cancel_upstream(self) -> None:
        """Whatever is under way: a connection that is being made, an answer, or a connection with nothing sent."""
        connecting, exchange, connection = self.connecting, self.exchange, self.connection
        if connecting is not None:
            self.connecting = None
            connecting.cancel()
        elif exchange is not None:
            exchange.cancel()
        elif connection is not None:
            connection.give_back()
        self.exchange = self.connection = None

    def _refused(self, endpoint: Endpoint, response: HttpResponse) -> None:
        self.refusal = response
        self.receipt.error = f"the {endpoint.role} engine answered with {response.status}"
        if response.status >= 500:
            self._engine_error(endpoint, "status")

    def _engine_error(self, endpoint: Endpoint, kind: str) -> None:
        self.desk.metrics.engine_error(endpoint.role, endpoint.address, kind)

    def broken(self, error: Exception) -> None:
        """Let go of everything; whoever awaits the flight gets the error."""
        if self.is_resolved:
            raise error
        self._cancel_upstream()
        self.life.cut()
        self._close(Stage.FAILED, error)

    def _close(self, outcome: Stage, error: Exception | None = None) -> None:
        """The one place where a request ends."""
        desk, receipt = self.desk, self.receipt
        now_s = desk.clock()
        seconds = now_s - self.began_s
        desk.flights.discard(self)
        self.responder.on_disconnect = None
        receipt.outcome = _WORDS[outcome]
        receipt.total_ms = seconds * 1000
        if outcome is _CANCELLED:
            receipt.status = None
        if self.relay is not None:
            receipt.num_events = self.relay.num_pieces
        self.exchange = self.relay = None  # each knows the other: the collector is not to find them
        desk.metrics.request_ended(receipt, seconds, now_s - (self.handed_over_s or self.began_s))
        if desk.access_log is not None:
            desk.access_log.write(receipt)
        if self.trace is not None:
            self.trace.close(receipt, self.began_s, now_s)
        if self.ticket is not None:
            self.ticket.over()
            self.ticket = None
        if error is None:
            self.resolve(None)
        else:
            self.fail(error)
