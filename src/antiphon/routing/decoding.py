"""The handlers of a request from its decode engine on: see ``life`` for the rules."""

from __future__ import annotations

from typing import Final

from antiphon.routing.commands import CancelUpstream, CompleteHandover, FailureCode, PassOn, RespondError, SendDecode
from antiphon.routing.endpoint import TIER_OUT, Endpoint, Verdict
from antiphon.routing.events import ConnectRefused, DecodeRefused, Event, StreamEnded, UpstreamLost
from antiphon.routing.life import Life
from antiphon.routing.states import EndpointState, Stage

_AWAITING: Final = Stage.AWAITING
_CANCELLED: Final = Stage.CANCELLED
_COMPLETED: Final = Stage.COMPLETED
_COMPLETING: Final = Stage.COMPLETING
_FAILED: Final = Stage.FAILED
_STREAMING: Final = Stage.STREAMING
_LOST: Final = Verdict.LOST
_REFUSED: Final = Verdict.REFUSED
_SUCCEEDED: Final = Verdict.SUCCEEDED
_TIMED_OUT: Final = Verdict.TIMED_OUT
_UNREACHABLE: Final = Verdict.UNREACHABLE

# ---- connecting ------------------------------------------------------------------------------------------------------


def connected(life: Life, event: Event) -> None:
    """Send the request; or, where nobody waits for an answer, one of a token, so that the KV is freed."""
    endpoint, handle = life.endpoint, life.handle
    assert endpoint is not None
    if handle is not None and not life.is_handle_good:
        _cancel(life, None)
        life.renew()
        return
    if endpoint.tier == TIER_OUT:  # an operator drained it meanwhile
        _cancel(life, None)
        life.connect_decode()
        return
    request_id = life.engine_request_id(life.num_decode_tries)
    life.has_written = False
    life.sent_at_s = life.now_s
    if life.is_closing:
        assert handle is not None
        is_salted = life.outcome_due is not None
        life.enter(_COMPLETING, life.options.handover_s)
        life.out.append(CompleteHandover(life.attempt, endpoint, request_id, handle, is_salted))
    else:
        life.enter(_AWAITING, life.options.first_token_s)
        life.out.append(SendDecode(life.attempt, endpoint, request_id, handle))


def refused(life: Life, event: Event) -> None:
    """Another decode engine, the same handle: no byte was written."""
    assert isinstance(event, ConnectRefused)
    if event.is_own_limit:
        life.failure = RespondError(503, "own_limit", 1)
    life.avoid_decode += (life.leave(None if event.is_own_limit else _REFUSED),)
    life.connect_decode()


def connect_timed_out(life: Life, event: Event) -> None:
    """Another decode engine, the same handle; a fresh prefill if the lease is over."""
    is_lease_over = life.handle is not None and life.now_s >= life.handle.until_s
    endpoint = _cancel(life, None if is_lease_over else _UNREACHABLE)
    life.avoid_decode += (endpoint,)
    life.connect_decode()


def leaving_early(life: Life, event: Event) -> None:
    """With a handle go on, so that the KV is pulled; else cancel."""
    life.client_left = True
    if not life.must_hand_over:
        _cancel(life, None)
        life.finish(_CANCELLED)


# ---- awaiting --------------------------------------------------------------------------------------------------------


def bytes_written(life: Life, event: Event) -> None:
    """The engine may pull the KV from here on: the handle is spent."""
    life.has_written = True
    if life.handle is not None:
        life.handle.is_spent = True


def lost(life: Life, event: Event) -> None:
    """The same handle to another engine if no byte was written; else a fresh prefill, once."""
    assert isinstance(event, UpstreamLost)
    _lost(life, "decode_bad_answer" if event.is_garbage else "decode_lost")


def declined(life: Life, event: Event) -> None:
    """A refusal as invalid is the client's answer, and the KV is freed; an error or an overload is retried, once."""
    assert isinstance(event, DecodeRefused)
    status = event.status
    bytes_written(life, event)
    if status in (429, 503):
        life.avoid_decode += (life.leave(None),)
        life.start_over(life.overloaded(life.fleet.decode, status, event.retry_after_s))
    elif status >= 500:
        _declined_with_error(life)
    else:
        life.leave(_SUCCEEDED)
        if life.client_left:
            life.finish(_CANCELLED)
            return
        life.out.append(PassOn(life.attempt))
        if not life.must_hand_over:
            life.finish(_COMPLETED)
        else:
            life.outcome_due = _COMPLETED
            life.avoid_decode = ()
            life.connect_decode()


def _declined_with_error(life: Life) -> None:
    """It may be that the prefill engine died before the KV was pulled: then a fresh prefill helps, with this engine
    too if there is no other."""
    handle = life.handle
    is_void = (
        life.must_hand_over
        and handle is not None
        and (handle.life != handle.prefill.life or not handle.prefill.is_usable)
    )
    life.avoid_decode += (life.leave(None) if is_void else life.leave_with_status(),)
    life.start_over(RespondError(502, "decode_error"), is_lost=handle is not None)


def first_byte(life: Life, event: Event) -> None:
    """The client gets the answer from here on; one that has left lets the request be cancelled."""
    bytes_written(life, event)
    life.computed()
    life.judge(_SUCCEEDED)
    _warmed(life)
    if life.client_left:
        _cancel(life, None)
        life.finish(_CANCELLED)
        return
    life.enter(_STREAMING, life.options.idle_s)
    life.last_byte_s = life.now_s


def ended_at_once(life: Life, event: Event) -> None:
    """The whole answer; one that is not whole is lost."""
    assert isinstance(event, StreamEnded)
    bytes_written(life, event)
    if not event.is_complete:
        _lost(life, "decode_lost")
        return
    _warmed(life)
    life.leave(_SUCCEEDED)
    if life.client_left:
        life.finish(_CANCELLED)
    else:
        life.finish(_FAILED if event.has_error else _COMPLETED)


def first_token_late(life: Life, event: Event) -> None:
    """504; or, for a client that has left, the time to admit the request is over."""
    _cancel(life, None if life.client_left else _TIMED_OUT)
    life.abandon()
    life.fail(RespondError(504, "decode_timeout"))


def leaving(life: Life, event: Event) -> None:
    """Without a handle cancel; with one hold the request until the engine is sure to have admitted it: an engine that
    aborts an admitted request frees the prefill engine's blocks itself."""
    life.client_left = True
    held_until_s = life.sent_at_s + life.options.abort_grace_s
    if life.must_hand_over and life.now_s < held_until_s:
        life.deadline_s = min(life.deadline_s, held_until_s)
    else:
        _cancel(life, None)
        life.finish(_CANCELLED)


# ---- streaming -------------------------------------------------------------------------------------------------------


def ended(life: Life, event: Event) -> None:
    """Complete; one without its end is lost: error event, then [DONE]."""
    assert isinstance(event, StreamEnded)
    if event.is_complete:
        life.leave(None)
        life.finish(_FAILED if event.has_error else _COMPLETED)
    else:
        stream_lost(life, event)


def stream_lost(life: Life, event: Event) -> None:
    """Error event, then [DONE]."""
    is_garbage = isinstance(event, UpstreamLost) and event.is_garbage
    life.leave(_LOST)
    life.fail(RespondError(502, "decode_bad_answer" if is_garbage else "decode_lost"))


def idle(life: Life, event: Event) -> None:
    """Nothing came for too long: error event, then [DONE]. If something came meanwhile, wait on."""
    due_s = life.last_byte_s + life.options.idle_s
    if life.now_s < due_s:
        life.deadline_s = due_s
        return
    _cancel(life, _TIMED_OUT)
    life.fail(RespondError(504, "decode_timeout"))


def leaving_stream(life: Life, event: Event) -> None:
    """Cancel, and finish."""
    life.client_left = True
    _cancel(life, None)
    life.finish(_CANCELLED)


# ---- completing a hand-over that nobody waits for --------------------------------------------------------------------


def completed(life: Life, event: Event) -> None:
    """The KV was pulled, or is being: finish when the answer ends."""
    assert isinstance(event, StreamEnded)
    bytes_written(life, event)
    _warmed(life)
    life.leave(_SUCCEEDED if event.is_complete else _LOST)
    life.fleet.counts["handover_completed" if event.is_complete else "handover_failed"] += 1
    _finish_closing(life)


def completing_declined(life: Life, event: Event) -> None:
    """The engine refuses it: the blocks wait for the end of the lease."""
    life.leave(None)
    life.fleet.counts["handover_failed"] += 1
    _finish_closing(life)


def completing_lost(life: Life, event: Event) -> None:
    """The same handle to another engine if no byte was written; else finish."""
    if not life.has_written:
        _reconnect(life)
        return
    life.leave(_LOST)
    life.fleet.counts["handover_failed"] += 1
    _finish_closing(life)


def completing_late(life: Life, event: Event) -> None:
    """Cancel, and finish."""
    _cancel(life, _TIMED_OUT)
    life.fleet.counts["handover_failed"] += 1
    _finish_closing(life)


def left(life: Life, event: Event) -> None:
    """The client has left, or has its answer: go on."""


# ---- shared ----------------------------------------------------------------------------------------------------------


def _cancel(life: Life, verdict: Verdict | None) -> Endpoint:
    life.out.append(CancelUpstream(life.attempt))
    return life.leave(verdict)


def _lost(life: Life, code: FailureCode) -> None:
    if not life.has_written:
        _reconnect(life)
        return
    life.avoid_decode += (life.leave(_LOST),)
    life.start_over(RespondError(502, code), is_lost=True)


def _reconnect(life: Life) -> None:
    """The connection was lost before a byte was written: it may have been an old one, so the same engine counts too,
    once."""
    endpoint = life.leave(_LOST if life.has_reconnected else None)
    if life.has_reconnected:
        life.avoid_decode += (endpoint,)
    life.has_reconnected = True
    life.connect_decode()


def _warmed(life: Life) -> None:
    handle, endpoint = life.handle, life.endpoint
    life.blamed = None
    if handle is None or endpoint is None or handle.life != handle.prefill.life:
        return
    if EndpointState.REMOVED not in (handle.prefill.state, endpoint.state):
        life.fleet.pairs.warm(handle.prefill, endpoint)


def _finish_closing(life: Life) -> None:
    life.finish(life.outcome_due or _CANCELLED)
