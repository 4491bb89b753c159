"""Passes a decode engine's answer on to the client, byte for byte.

A stream goes through event by event, each costing one call; the head is held back until the first event, so that an
engine that fails before it can still be answered with a truthful status. Only whole events are passed on, so that what
follows a lost engine is an error event that the client can read, then ``[DONE]``. An answer that is not a stream is
passed on when it is complete. Where vLLM itself ends a stream with an error event, the client gets it as it is, and the
request counts as failed.

Invariant: the relay ends once, with the engine's answer complete, an error, or the client gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from antiphon.config.router_spec import RouterSpec
from antiphon.core.errors import UpstreamError, UpstreamLost, UpstreamTimeout
from antiphon.observe.receipt import Receipt
from antiphon.protocol.body import Buffer
from antiphon.protocol.openai import DONE_EVENT, EVENT_STREAM, JSON, error_events
from antiphon.router.headers import answer_lines, returned_lines
from antiphon.transport.http.client import BODY_MAX_BYTES, HttpClientConnection
from antiphon.transport.http.server import Responder
from antiphon.transport.http.strand import Promise

_EVENT_MAX_BYTES = 8_388_608
"""An event larger than this is passed on in pieces."""

_END_OF_EVENT = b"\n\n"
_ERROR_EVENT = _END_OF_EVENT + b'data: {"error"'


class RelayTimes:
    """The deadlines of relays, in seconds, read from the spec once: its fields are slow to read."""

    def __init__(self, spec: RouterSpec) -> None:
        self.first_token_s = spec.first_token_timeout_s
        self.idle_s = spec.idle_timeout_s
        self.abort_grace_s = spec.abort_grace_s
        self.first_look_s = min(spec.first_token_timeout_s, spec.idle_timeout_s)


class Relay(Promise[None]):
    """One answer on its way. A :class:`~antiphon.transport.http.client.ResponseSink`.

    Args:
        has_handle: whether the decode request carries a prefill's KV, which must be pulled even if the client leaves.
    """

    def __init__(
        self,
        responder: Responder,
        connection: HttpClientConnection,
        times: RelayTimes,
        receipt: Receipt,
        *,
        has_handle: bool,
    ) -> None:
        super().__init__()
        self.status = 0
        self.is_stream = False
        self.first_byte_s: float | None = None
        self.num_pieces = 0
        self.client_left = False
        self.left_before_first_byte = False
        self.has_error_event = False
        """The engine's stream is complete and says that the answer is not."""
        self.error: UpstreamError | None = None
        self._responder = responder
        self._connection = connection
        self._times = times
        self._receipt = receipt
        self._has_handle = has_handle
        self._timer: asyncio.TimerHandle | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._whole: bytes | bytearray = b""
        self._pending: list[bytes] = []
        self._tail = b""
        self._last = self._last_but_one = b""
        self._is_paused = False
        self._began_s = self._last_byte_s = time.monotonic()

    def start(self, buffers: Sequence[Buffer]) -> None:
        """Send the request. Awaiting the relay then waits for its end, and never raises an engine's failure; whether it
        has come to its end or not, :meth:`close` follows."""
        responder = self._responder
        responder.on_stall, responder.on_resume = self._pause, self._resume
        self._connection.start(buffers, self, self._times.first_look_s)
        if responder.is_stalled:  # with what was written before this request
            self._pause()

    def close(self) -> None:
        """Let go of the client and the connection; a relay that has not ended is cut."""
        self._responder.on_stall = self._responder.on_resume = None
        if self._timer is not None:
            self._timer.cancel()
        if not self.is_resolved:
            self._connection.abort()

    def leave(self) -> None:
        """The client has left: stop, but not before the engine is sure to have admitted a request with a handle."""
        self.client_left = True
        self.left_before_first_byte = self.first_byte_s is None
        held_until = self._began_s + self._times.abort_grace_s
        if self._has_handle and self.first_byte_s is None and time.monotonic() < held_until:
            self._arm(held_until - time.monotonic())
        else:
            self._stop()

    def break_off(self, events: bytes) -> None:
        """End a stream that is under way with ``events``, after the whole events that have arrived."""
        self._responder.end(self._whole_events() + events)

    # -- ResponseSink -----------------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self._headers = headers
        for name, value in headers:
            if name == b"content-type":
                self.is_stream = status == 200 and value.startswith(EVENT_STREAM)

    def on_body(self, data: bytes) -> None:
        self._last_byte_s = time.monotonic()
        if self.first_byte_s is None:
            self.first_byte_s = self._last_byte_s
            if self.client_left:
                self._stop()
                return
            if self.is_stream:
                self._start_stream()
        if not self.is_stream:
            self._keep(data)
        else:
            self.num_pieces += 1
            self._pending.append(data)

    def on_read_end(self) -> None:
        if self._pending and not self.client_left:
            whole = self._whole_events()
            if whole:
                self._responder.write(whole)

    def on_end(self) -> None:
        # The connection serves other requests from here on: how slowly this client reads does not concern it.
        self._responder.on_stall = self._responder.on_resume = None
        if self.client_left:
            self._end(None)
        elif self.is_stream:
            rest = self._whole_events()
            if self._is_done:
                self._responder.end(rest)
                self._end_stream()
            else:
                if rest:
                    self._responder.write(rest)
                self.on_lost(UpstreamLost("the engine ended its stream without [DONE]"))
        elif self._responder.started:
            self._responder.end()
            self._end(None)
        elif self.status >= 500 and not self._is_json:
            self._end(None)  # the caller answers
        else:
            self.num_pieces = 1
            self._responder.send(self.status, self._lines(), self._whole)
            self._end(None)

    def on_lost(self, error: UpstreamError) -> None:
        if self._responder.started and not self.client_left:
            if not self.is_stream:
                self._responder.abort()
            else:
                rest = self._whole_events()
                if self._is_done:  # what is missing is the end of the framing
                    self._responder.end(rest)
                    self._end_stream()
                    return
                status = 504 if isinstance(error, UpstreamTimeout) else 502
                words = "the decode engine stopped answering" if status == 504 else "the decode engine failed"
                self._responder.end(rest + error_events(f"{words} before the answer was complete", status=status))
        self._end(error)

    def on_timeout(self) -> None:
        self._check()

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _is_done(self) -> bool:
        """Whether the stream has come to its ``[DONE]``."""
        return self._responder.started and not self._tail and self._last.endswith(DONE_EVENT)

    @property
    def _is_json(self) -> bool:
        return any(name == b"content-type" and value.startswith(JSON) for name, value in self._headers)

    def _end_stream(self) -> None:
        """The stream is complete. vLLM writes an error event just before ``[DONE]``."""
        self.has_error_event = _ERROR_EVENT in _END_OF_EVENT + self._last_but_one + self._last
        self._end(None)

    def _start_stream(self) -> None:
        self._responder.start_stream(self.status, self._lines())

    def _lines(self) -> bytes:
        """The header fields for the client."""
        return returned_lines(self._headers) + answer_lines(self._receipt)

    def _whole_events(self) -> bytes:
        """Take what has arrived, up to the end of the last whole event; the rest is kept for later."""
        data = b"".join(self._pending) if len(self._pending) != 1 else self._pending[0]
        self._pending.clear()
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if not data.endswith(_END_OF_EVENT):
            cut = data.rfind(_END_OF_EVENT) + len(_END_OF_EVENT)
            if cut >= len(_END_OF_EVENT):
                data, self._tail = data[:cut], data[cut:]
            elif len(data) <= _EVENT_MAX_BYTES:
                data, self._tail = b"", data
        if data:
            self._last_but_one, self._last = self._last, data
        return data

    def _keep(self, data: bytes) -> None:
        """Keep a piece of an answer that is not a stream; one too large to keep is passed on as it comes."""
        if self._responder.started:
            self._responder.write(data)
            return
        if not self._whole:
            self._whole = data
        elif isinstance(self._whole, bytearray):
            self._whole += data
        else:
            self._whole = bytearray(self._whole) + data
        if len(self._whole) > BODY_MAX_BYTES:
            self._start_stream()
            self._responder.write(bytes(self._whole))
            self._whole = b""

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._check)

    def _check(self) -> None:
        """A deadline may have passed: the grace after the client left, the first byte, or the gap between two bytes."""
        if self.is_resolved:
            return
        now = time.monotonic()
        if self.client_left:
            self._stop()
            return
        if self._is_paused:
            due = now + self._times.idle_s
        elif self.first_byte_s is None:
            due = self._began_s + self._times.first_token_s
        else:
            due = self._last_byte_s + self._times.idle_s
        if now < due:
            # The first byte may come at any time, and from then on the next one is due sooner.
            self._arm(min(due - now, self._times.idle_s))
            return
        self._connection.abort()
        stage = "first token" if self.first_byte_s is None else "next token"
        self.on_lost(UpstreamTimeout(f"no {stage} from the decode engine within its deadline"))

    def _pause(self) -> None:
        self._is_paused = True
        self._connection.pause()

    def _resume(self) -> None:
        self._is_paused = False
        self._last_byte_s = time.monotonic()
        self._connection.resume()

    def _stop(self) -> None:
        if not self.is_resolved:  # else the connection may be serving another request
            self._connection.abort()
            self._end(None)

    def _end(self, error: UpstreamError | None) -> None:
        if not self.is_resolved:
            self.error = error
            self.resolve(None)
