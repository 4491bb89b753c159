"""One request in flight: from the engine's tokens to the bytes of its response.

Owns the response of one request. Follows vLLM in what the client sees: events as tokens come, a JSON error where KV
could not be loaded, nothing at all where the client has left. A client that reads too slowly is served from a queue
that holds at most the whole answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from antiphon.engine.simulated.faults import MID_STREAM_FAULTS, Fault
from antiphon.engine.simulated.further_responses import stream_of, whole_of
from antiphon.engine.simulated.requests import GenerationRequest
from antiphon.engine.simulated.responses import LOAD_FAILED, Json, ResponseNames
from antiphon.engine.simulated.sequence import Produced, Sequence
from antiphon.protocol.openai import EVENT_STREAM, JSON
from antiphon.transport.http.server import Responder

_FLUSH_S = 0.02
"""How long the loop gets to put the last events on the wire before the process kills itself."""


@dataclass(frozen=True, slots=True)
class GenerationHooks:
    """What a generation asks of the server."""

    abort: Callable[[list[Sequence]], None]
    handover: Callable[[Sequence], Json | None]


class Generation:
    """One request being answered. :attr:`done` is set when nothing more will be written."""

    def __init__(
        self,
        request: GenerationRequest,
        names: ResponseNames,
        responder: Responder,
        hooks: GenerationHooks,
        fault: Fault | None,
    ) -> None:
        self.sequences: list[Sequence] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_aborted = False
        self._request = request
        self._names = names
        self._responder = responder
        self._hooks = hooks
        self._fault = fault
        self._stream = stream_of(request, names) if request.stream else None
        self._held: deque[bytes] = deque()
        self._num_unfinished = 0
        self._num_events = 0
        self._is_cut = False
        responder.on_disconnect = self._on_disconnect
        responder.on_resume = self._flush

    def start(self, sequences: list[Sequence]) -> None:
        """The sequences that answer this request, in the order of its choices; called before they are submitted."""
        self.sequences = sequences
        self._num_unfinished = len(sequences)
        for sequence in sequences:
            sequence.owner = self
        if self._responder.is_disconnected:
            self._on_disconnect()
        if self._fault is not None and (self._stream is None or not self._fault.after_events):
            self._carry_out_fault()
        if self._stream is not None and self._stream.begins_at_once and not self.done.done() and not self._is_cut:
            self._begin_stream()

    def on_token(self, event: Produced) -> None:
        """One more token; the last one of the last sequence ends the response."""
        if event.finish_reason is not None:
            self._num_unfinished -= 1
        if self.done.done() or self._is_cut:
            return
        if self._stream is not None:
            if not self._responder.started:
                self._begin_stream()
            sequence = event.sequence
            self._write(self._stream.token(self._index(sequence), sequence, event.position, event.finish_reason))
        if self._num_unfinished:
            return
        if self._stream is not None:
            self._write(self._stream.closing(self.sequences), is_last=True)
        elif not self._is_cut:
            first = self.sequences[0]
            params = self._hooks.handover(first) if first.hands_over or first.stores else None
            body = whole_of(self._request, self._names, self.sequences, params)
            self._responder.send(200, [(b"content-type", JSON)], body)
            self._finish()

    def on_failed(self, sequence: Sequence) -> None:
        """A sequence could not load its KV: the whole request fails, as in vLLM."""
        self._num_unfinished -= 1
        if self.done.done() or self._is_cut:
            return
        self._hooks.abort([other for other in self.sequences if other is not sequence])
        if self._stream is not None:
            if not self._responder.started:
                self._begin_stream()
            end = self._stream.failure()
            if end:
                self._write(end, is_last=True)
            else:
                self._responder.abort()
                self._finish()
        else:
            self._responder.send(500, [(b"content-type", JSON)], LOAD_FAILED)
            self._finish()

    def _index(self, sequence: Sequence) -> int:
        return self.sequences.index(sequence) if len(self.sequences) > 1 else 0

    def _begin_stream(self) -> None:
        assert self._stream is not None
        self._responder.start_stream(200, [(b"content-type", EVENT_STREAM + b"; charset=utf-8")])
        for event in self._stream.opening():
            self._write(event)

    def _write(self, event: bytes, *, is_last: bool = False) -> None:
        if self._is_cut or self.done.done():
            return
        if self._responder.is_stalled or self._held:
            self._held.append(event)
        else:
            self._responder.write(event)
        self._num_events += 1
        if is_last:
            if not self._held:
                self._responder.end()
                self._finish()
            return
        if self._fault is not None and self._num_events >= self._fault.after_events:
            self._carry_out_fault()

    def _flush(self) -> None:
        held = self._held
        while held and not self._responder.is_stalled:
            self._responder.write(held.popleft())
        if not held and not self._num_unfinished and not self._is_cut and not self.done.done():
            self._responder.end()
            self._finish()

    def _carry_out_fault(self) -> None:
        """Do what a mid-stream fault says; the engine's part of the request ends here, unless it hangs."""
        fault = self._fault
        if fault is None or fault.kind not in MID_STREAM_FAULTS | {"reset"} or self._is_cut:
            return
        self._is_cut = True
        if fault.kind == "hang_mid_stream":
            return
        if fault.kind == "die_mid_stream":
            asyncio.get_running_loop().call_later(_FLUSH_S, os.kill, os.getpid(), signal.SIGKILL)
            return
        if fault.kind == "reset":
            self._responder.reset()
        else:
            self._responder.abort()
        self._hooks.abort(self.sequences)
        self._finish()

    def _on_disconnect(self) -> None:
        if self.done.done():
            return
        self.is_aborted = True
        self._hooks.abort(self.sequences)
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
