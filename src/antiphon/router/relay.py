"""Passes a decode engine's answer on to the client, byte for byte.

A stream goes through event by event, each costing one call; the head is held back until the first whole event, so that
an engine that fails before it can still be answered with a truthful status, or another engine tried. Only whole events
are passed on, so that what follows a lost engine is an error event that the client can read, then ``[DONE]``. An answer
that is not a stream is passed on when it is complete. Where vLLM itself ends a stream with an error event, the client
gets it as it is, and the request counts as failed.

Invariant: the owner hears of one end, unless it cancels; it decides what that means.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from antiphon.core.errors import ProtocolError, UpstreamError, UpstreamGarbage
from antiphon.protocol import json
from antiphon.protocol.body import Buffer
from antiphon.protocol.openai import EVENT_STREAM
from antiphon.protocol.prefill_answer import prompt_counts
from antiphon.protocol.usage import USAGE_MAX_BYTES, output_tokens
from antiphon.router.headers import answer_lines, returned_lines
from antiphon.transport.http.client import BODY_MAX_BYTES
from antiphon.transport.http.client_connection import HttpClientConnection
from antiphon.transport.http.message import HttpResponse
from antiphon.transport.http.server import Responder

if TYPE_CHECKING:
    from antiphon.observe.receipt import Receipt
    from antiphon.protocol.apis import Api
    from antiphon.routing.life import Life

_EVENT_MAX_BYTES: Final = 8_388_608
"""An event larger than this is passed on in pieces."""

_JSON_BEGINS: Final = (b"{", b"[")
"""A whole answer begins with one of these; no more of it is looked at."""

_END_OF_EVENT: Final = b"\n\n"
# ``find`` rather than ``in``, here and below: that looks first whether it was given a number, at twice the cost.
_NAME_MAX_BYTES: Final = 64
"""The name of an event is shorter."""


class RelayOwner(Protocol):
    """The request that an answer belongs to."""

    responder: Responder
    receipt: Receipt
    life: Life
    api: Api

    def first_byte(self) -> None:
        """The first part of the answer is here: from now on the client gets it."""

    def declined(self, response: HttpResponse, status: int) -> None:
        """The engine answered with an error before any part of an answer."""

    def ended(self, *, is_complete: bool, has_error: bool, is_json: bool = True) -> None:
        """The answer has ended; has_error: the engine says so itself, in its stream; is_json: false for a whole answer
        that is none, which the client has got as it is."""

    def lost(self, error: UpstreamError) -> None:
        """The connection ended before the answer was complete."""


class Relay:
    """One answer on its way. A :class:`~antiphon.transport.http.client.ResponseSink`.

    Args:
        owner: hears of what comes.
        connection: to the decode engine.
        cached_tokens: what is to stand in ``usage.prompt_tokens_details.cached_tokens`` where the prompt's KV came from
            another engine; -1 leaves what the engine says.
    """

    status = 0
    is_stream = False
    num_pieces = 0
    is_paused = False
    is_over = False
    has_error_first = False
    """The stream begins with an error event: it is kept, since another engine may do better."""

    def __init__(self, owner: RelayOwner, connection: HttpClientConnection, cached_tokens: int | None) -> None:
        self._owner = owner
        self._responder = owner.responder
        self._life = owner.life
        self._api = api = owner.api
        self._end = api.end
        self._cached_tokens_key = api.cached_tokens_key
        self._connection = connection
        self._cached_tokens = cached_tokens
        self._headers: list[tuple[bytes, bytes]] = []
        self._whole: bytes | bytearray = b""
        self._pending: list[bytes] = []
        self._tail = b""
        self._last = self._last_but_one = b""
        self._large_event = b""

    def start(self, buffers: Sequence[Buffer]) -> None:
        """Send the request."""
        responder = self._responder
        responder.on_stall, responder.on_resume = self._pause, self._resume
        self._connection.start(buffers, self)

    def cancel(self) -> None:
        """Cut the connection: nothing more is wanted."""
        if not self.is_over:
            self._let_go()
            self._connection.abort()

    def break_off(self, message: str, status: int) -> None:
        """End an answer that is under way: a stream with an error event after the whole events that have arrived; cut
        what cannot have one after it."""
        self._let_go()
        rest = self._whole_events() if self.is_stream else b""
        if not self.is_stream or not self._last.endswith(_END_OF_EVENT):  # inside an event that is passed on in pieces
            self._responder.abort()
            return
        self._responder.end(rest if self._is_over else rest + self._api.error_events(message, status, self._last))

    # -- ResponseSink -----------------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self._headers = headers
        if status == 200:
            for name, value in headers:
                if name == b"content-type":
                    self.is_stream = value.startswith(EVENT_STREAM)

    def on_body(self, data: bytes) -> None:
        life = self._life
        life.last_byte_s = time.monotonic()
        if life.client_left and self.status == 200 and not (self.is_stream and self._api.preamble):
            self._owner.first_byte()  # it has admitted the request: nothing more is wanted
        elif self.is_stream:
            self.num_pieces += 1
            self._pending.append(data)
        else:
            self._keep(data)

    def on_read_end(self) -> None:
        if not self._pending:
            return
        whole = self._whole_events()
        if not whole:
            return
        if not self._responder.started:
            whole = self._start(whole)
            if not whole:
                return
        if self._is_done:
            # What may still come is the end of the framing, which the client need not wait for.
            connection = self._connection
            self._finish(whole)
            connection.finish_alone()
            self._report_end()
        else:
            self._responder.write(whole)

    def on_chunk(self, raw: bytes, begin: int) -> None:
        piece = raw[begin:-2]
        end = self._end
        life = self._life
        if (
            end is None
            or life.client_left
            or self._tail
            or not self._responder.takes_chunks
            or not piece.endswith(_END_OF_EVENT)
            or piece.endswith(end)
            or (self._cached_tokens != -1 and piece.find(self._cached_tokens_key) >= 0)
        ):
            self.on_body(piece)
            self.on_read_end()
            return
        # A token in the middle of a stream: the client gets it in the engine's own framing.
        life.last_byte_s = time.monotonic()
        self.num_pieces += 1
        self._last_but_one, self._last = self._last, piece
        self._responder.write_chunk(raw)

    def on_end(self) -> None:
        if self.is_stream:
            self._end_stream()
        elif self.status >= 400:
            response = HttpResponse(self.status, self._headers, bytes(self._whole))
            self._let_go()
            self._owner.declined(response, self.status)
        else:
            self._end_whole()

    def on_lost(self, error: UpstreamError) -> None:
        if self.is_stream and self._responder.started and not self._life.client_left:
            rest = self._whole_events()
            if self._is_over:  # what is missing is the end of the framing
                self._finish(rest)
                self._report_end()
                return
            if rest:
                self._responder.write(rest)
        self._let_go()
        self._owner.lost(error)

    def on_timeout(self) -> None:
        raise AssertionError("no time is given to the exchange: the owner watches it")

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _is_done(self) -> bool:
        """Whether the stream has come to its end, as its API marks it."""
        end = self._end
        if end is not None:
            return self._last.endswith(end) and not self._tail
        return self._last_event_is(self._api.end_names)

    @property
    def _is_over(self) -> bool:
        """The same, where nothing more can come: an error event that no mark follows is an end too."""
        return self._is_done or (self._end is None and self._last_event_is((self._api.first_error,)))

    def _last_event_is(self, names: tuple[bytes, ...]) -> bool:
        """Whether the last whole event begins with one of ``names``, and nothing follows it."""
        last = self._last
        if self._tail or not last.endswith(_END_OF_EVENT):
            return False
        start = last.rfind(_END_OF_EVENT, 0, -2)
        if start < 0 and self._large_event:
            return self._large_event.startswith(names)
        return last.startswith(names, start + 2 if start >= 0 else 0)

    def _start(self, whole: bytes) -> bytes:
        """Begin the stream with its first whole events; what is to be written, nothing if it is not to begin yet."""
        api = self._api
        if self.has_error_first or whole.startswith(api.first_error):
            self._whole = whole if not self.has_error_first else self._whole + whole
            self.has_error_first = True
            return b""
        if api.preamble:
            whole = bytes(self._whole) + whole
            if self._last_event_is(api.preamble) and len(whole) <= BODY_MAX_BYTES:
                self._whole = whole
                return b""
            self._whole = b""
        return whole if self._begin() else b""

    def _begin(self) -> bool:
        self._owner.first_byte()
        if self.is_over:  # the owner has cancelled
            return False
        lines = returned_lines(self._headers) + answer_lines(self._owner.receipt)
        self._responder.start_stream(self.status, lines)
        if self._responder.is_stalled:  # with what was written before this request: not earlier, since an engine whose
            self._pause()  # first byte is not read would pass for one that is late
        return True

    def _end_stream(self) -> None:
        rest = self._whole_events()
        if rest and not self._responder.started:
            rest = self._start(rest)
        if not self._responder.started:
            if self.has_error_first:
                self._decline_stream()
            elif not self.is_over:
                self._let_go()
                self._owner.ended(is_complete=False, has_error=False)
        elif self._is_over:
            self._finish(rest)
            self._report_end()
        else:
            if rest:
                self._responder.write(rest)
            self._let_go()
            self._owner.ended(is_complete=False, has_error=False)

    def _finish(self, rest: bytes) -> None:
        self._let_go()
        self._responder.end(rest)

    def _report_end(self) -> None:
        """The stream is complete. vLLM writes an error event just before its end, or as the last one."""
        receipt = self._owner.receipt
        if receipt.path == "cached":
            receipt.prompt_tokens, receipt.cached_tokens = prompt_counts(self._last_but_one + self._last)
        has_error = _END_OF_EVENT + self._api.first_error in _END_OF_EVENT + self._last_but_one + self._last
        self._owner.ended(is_complete=True, has_error=has_error)

    def _decline_stream(self) -> None:
        """The whole stream is an error event: as an answer with the status that it names."""
        event, _, _ = bytes(self._whole).partition(_END_OF_EVENT)
        _, _, text = event.partition(b"data: ")
        status = _status_in(text)
        self._let_go()
        self._owner.declined(HttpResponse(status, [(b"content-type", b"application/json")], text), status)

    def _end_whole(self) -> None:
        """A whole answer is here, or the last piece of one that is too large to keep."""
        self._let_go()
        responder = self._responder
        is_json = True
        if responder.started:
            responder.end(self._tail)
        elif not self._life.client_left:
            self.num_pieces = 1
            body = self._whole
            is_json = body[:1] in _JSON_BEGINS or not self._api.answers_json
            if self._cached_tokens != -1 and body.find(self._cached_tokens_key) >= 0:
                body = self._api.set_cached_tokens(body, self._cached_tokens)
            receipt = self._owner.receipt
            receipt.status = self.status
            if receipt.tenant is not None:
                receipt.output_tokens = output_tokens(body)
            if receipt.path == "cached":
                receipt.prompt_tokens, receipt.cached_tokens = prompt_counts(body)
            responder.send(self.status, returned_lines(self._headers) + answer_lines(receipt), body)
        self._owner.ended(is_complete=True, has_error=False, is_json=is_json)

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
            elif not self._large_event:
                self._large_event = data[:_NAME_MAX_BYTES]
        if data:
            if self._cached_tokens != -1 and data.find(self._cached_tokens_key) >= 0:
                data = self._api.set_cached_tokens(data, self._cached_tokens)
            self._last_but_one, self._last = self._last, data
        return data

    def _keep(self, data: bytes) -> None:
        """Keep a piece of an answer that is not a stream; one too large to keep is passed on as it comes."""
        if self._responder.started:
            self._write_large(data)
            return
        if not self._whole:
            self._whole = data
        elif isinstance(self._whole, bytearray):
            self._whole += data
        else:
            self._whole = bytearray(self._whole) + data
        if len(self._whole) > BODY_MAX_BYTES:
            self._pass_on_large()

    def _pass_on_large(self) -> None:
        if self.status >= 400:
            self._let_go()
            self._connection.abort()
            self._owner.lost(UpstreamGarbage(f"the engine's refusal is larger than {BODY_MAX_BYTES} bytes"))
        elif self._begin():
            whole, self._whole = bytes(self._whole), b""
            self._write_large(whole)

    def _write_large(self, data: bytes) -> None:
        """Pass a piece of a large answer on; as much is held back as may be the beginning of a usage object."""
        if self._cached_tokens != -1:
            data = self._tail + data
            if self._cached_tokens_key in data:
                data = self._api.set_cached_tokens(data, self._cached_tokens)
            cut = max(len(data) - USAGE_MAX_BYTES, 0)
            data, self._tail = data[:cut], data[cut:]
        if data:
            self._responder.write(data)

    def _pause(self) -> None:
        self.is_paused = True
        self._connection.pause()

    def _resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            self._life.last_byte_s = time.monotonic()
            self._connection.resume()

    def _let_go(self) -> None:
        """The connection may serve other requests from here on: how slowly this client reads does not concern it."""
        self.is_over = True
        self._responder.on_stall = self._responder.on_resume = None


class WholeAnswer:
    """One answer that is wanted whole, and never passed on. A :class:`~antiphon.transport.http.client.ResponseSink`.

    Args:
        owner: hears of its end.
    """

    is_over = False
    has_head = False
    status = 0

    def __init__(self, owner: WholeAnswerOwner, connection: HttpClientConnection) -> None:
        self._owner = owner
        self._connection = connection
        self._body: bytes | bytearray = b""

    def start(self, buffers: Sequence[Buffer]) -> None:
        """Send the request."""
        self._connection.start(buffers, self)

    def cancel(self) -> None:
        """Cut the connection: nothing more is wanted."""
        if not self.is_over:
            self.is_over = True
            self._connection.abort()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_head = True
        self.status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        body = self._body
        if not body:
            self._body = data
        elif isinstance(body, bytearray):
            body += data
        else:
            self._body = bytearray(body) + data
        if len(self._body) > BODY_MAX_BYTES:
            self.cancel()
            self._owner.lost(UpstreamGarbage(f"the engine's answer is larger than {BODY_MAX_BYTES} bytes"))

    def on_read_end(self) -> None:
        pass

    def on_chunk(self, raw: bytes, begin: int) -> None:
        self.on_body(raw[begin:-2])

    def on_end(self) -> None:
        self.is_over = True
        body = self._body
        whole = body if isinstance(body, bytes) else bytes(body)
        self._owner.answered(HttpResponse(self.status, self._headers, whole))

    def on_lost(self, error: UpstreamError) -> None:
        self.is_over = True
        self._owner.lost(error)

    def on_timeout(self) -> None:
        raise AssertionError("no time is given to the exchange: the owner watches it")


class WholeAnswerOwner(Protocol):
    """The request that an answer belongs to."""

    def answered(self, response: HttpResponse) -> None:
        """The answer is complete."""

    def lost(self, error: UpstreamError) -> None:
        """The connection ended before the answer was complete."""


def _status_in(text: bytes) -> int:
    """The status that an error event names; 500 where it names none."""
    try:
        value = json.decode(text)
    except ProtocolError:
        return 500
    error = value.get("error") if isinstance(value, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and not isinstance(code, bool) and 400 <= code <= 599 else 500
