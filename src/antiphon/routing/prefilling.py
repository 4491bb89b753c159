"""The handlers of a request up to its prefill's answer: see ``life`` for the rules."""

from __future__ import annotations

from typing import Final

from antiphon.routing.commands import CancelUpstream, Handle, PassOn, RespondError
from antiphon.routing.endpoint import Endpoint, Verdict
from antiphon.routing.events import ConnectRefused, Event, PrefillAnswered, UpstreamLost
from antiphon.routing.life import Life
from antiphon.routing.states import Stage

_CANCELLED: Final = Stage.CANCELLED
_COMPLETED: Final = Stage.COMPLETED
_PREFILLING: Final = Stage.PREFILLING
_LOST: Final = Verdict.LOST
_REFUSED: Final = Verdict.REFUSED
_SUCCEEDED: Final = Verdict.SUCCEEDED
_TIMED_OUT: Final = Verdict.TIMED_OUT
_UNREACHABLE: Final = Verdict.UNREACHABLE


def received(life: Life, event: Event) -> None:
    """Begin: with the prefill, or with the decode engine that serves it alone."""
    life.fleet.budget.request()
    if life.path != "pd":
        life.connect_decode()
    else:
        life.connect_prefill()


def client_left(life: Life, event: Event) -> None:
    """Nothing is handed over yet: cancel, and finish."""
    life.client_left = True
    if life.endpoint is not None:
        life.out.append(CancelUpstream(life.attempt))
        life.leave(None)
    life.finish(_CANCELLED)


# ---- probing ---------------------------------------------------------------------------------------------------------


def probe_connected(life: Life, event: Event) -> None:
    """A decode engine can be reached: keep it for this request, and begin the prefill."""
    endpoint = life.endpoint
    assert endpoint is not None
    life.fleet.decode.connected(endpoint)
    life.reserved = (endpoint, life.trial)
    life.endpoint = None
    life.connect_prefill()


def probe_refused(life: Life, event: Event) -> None:
    """The next decode engine, or 503."""
    assert isinstance(event, ConnectRefused)
    life.avoid_decode += (_leave_refused(life, event),)
    life.probe_decode()


def probe_timed_out(life: Life, event: Event) -> None:
    """The next decode engine, or 503."""
    life.out.append(CancelUpstream(life.attempt))
    life.avoid_decode += (life.leave(_UNREACHABLE),)
    life.probe_decode()


# ---- prefill ---------------------------------------------------------------------------------------------------------


def connected(life: Life, event: Event) -> None:
    """The shell sends the prefill request."""
    life.num_prefills += 1
    life.has_written = False
    life.enter(_PREFILLING, life.options.prefill_s)


def refused(life: Life, event: Event) -> None:
    """Another prefill engine: no byte was written."""
    assert isinstance(event, ConnectRefused)
    life.avoid_prefill += (_leave_refused(life, event),)
    life.connect_prefill()


def connect_timed_out(life: Life, event: Event) -> None:
    """Another prefill engine: no byte was written."""
    life.out.append(CancelUpstream(life.attempt))
    life.avoid_prefill += (life.leave(_UNREACHABLE),)
    life.connect_prefill()


def bytes_written(life: Life, event: Event) -> None:
    """The engine may have the request: to send it again is a retry."""
    life.has_written = True


def head(life: Life, event: Event) -> None:
    """The prefill has ended: from here on a client that leaves does not cancel it."""
    life.has_prefill_head = life.has_written = True


def leaving(life: Life, event: Event) -> None:
    """Cancel the prefill, unless it has ended: then its KV is handed over first."""
    if life.has_prefill_head and not life.options.is_kept:
        life.client_left = True
    else:
        client_left(life, event)


def answered(life: Life, event: Event) -> None:
    """A handle goes to a decode engine; a refusal as invalid is the client's answer; anything else is retried."""
    assert isinstance(event, PrefillAnswered)
    status, pool = event.status, life.fleet.prefill
    if status == 200:
        _take_handle(life, event)
    elif status in (429, 503):
        life.avoid_prefill += (life.leave(None),)
        life.retry_prefill(life.overloaded(pool, status, event.retry_after_s))
    elif 400 <= status < 500:
        life.leave(_SUCCEEDED)
        life.out.append(PassOn(life.attempt))
        life.finish(_COMPLETED)
    elif status >= 500:
        life.avoid_prefill += (life.leave_with_status(),)
        life.retry_prefill(RespondError(502, "prefill_error"))
    else:
        life.avoid_prefill += (life.leave(_LOST),)
        life.retry_prefill(RespondError(502, "prefill_bad_answer"))


def lost(life: Life, event: Event) -> None:
    """Another prefill engine, or the only one again after a wait. If no byte was written, the connection may have been
    an old one: once, any engine counts, this one too."""
    assert isinstance(event, UpstreamLost)
    if not (life.has_written or life.has_reconnected):
        life.has_reconnected = True
        life.num_prefills -= 1
        life.leave(None)
        life.connect_prefill()
        return
    life.avoid_prefill += (life.leave(_LOST),)
    if event.is_garbage:
        life.retry_prefill(RespondError(502, "prefill_bad_answer"))
    else:
        life.retry_prefill(RespondError(502, "prefill_lost"), is_lost=True)


def timed_out(life: Life, event: Event) -> None:
    """Cancel it; another prefill engine, or 504."""
    life.out.append(CancelUpstream(life.attempt))
    life.avoid_prefill += (life.leave(_TIMED_OUT),)
    life.retry_prefill(RespondError(504, "prefill_timeout"))


def waited(life: Life, event: Event) -> None:
    """The wait is over: try again."""
    life.connect_prefill()


def _leave_refused(life: Life, event: ConnectRefused) -> Endpoint:
    if event.is_own_limit:
        life.failure = RespondError(503, "own_limit", 1)
        return life.leave(None)
    return life.leave(_REFUSED)


def _take_handle(life: Life, event: PrefillAnswered) -> None:
    endpoint = life.endpoint
    assert endpoint is not None
    pool = life.fleet.prefill
    pool.saw_engine(endpoint, event.engine_id)
    number = endpoint.life
    life.leave(_SUCCEEDED)
    life.failure = life.blamed = None
    life.has_reconnected = False
    if event.handle is not None:
        life.handle = Handle(endpoint, number, event.handle, life.now_s + life.options.handover_s)
    else:
        life.fleet.counts["no_handle"] += 1
        if life.client_left:
            life.finish(_CANCELLED)
            return
    life.connect_decode()
