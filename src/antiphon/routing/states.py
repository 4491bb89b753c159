"""The states of an endpoint and the stages of a request, and every transition between them, as tables.

The code changes a state only where ``assert_listed`` has said that the table lists the pair; ``docs/routing.md`` shows
these tables (``transition_tables``), and a test holds it in step.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from antiphon.core import transitions


class EndpointState(Enum):
    """What is known of an endpoint; at the same time the state of its breaker."""

    __hash__ = object.__hash__  # its members are single objects, and Enum's own hash is a call into Python

    UNKNOWN = "unknown"
    READY = "ready"
    SUSPECT = "suspect"
    DOWN = "down"
    DRAINING = "draining"
    REMOVED = "removed"


class Stage(Enum):
    """Where a request is. The last three are its outcome."""

    __hash__ = object.__hash__

    RECEIVED = "received"
    PROBING = "probing"
    CONNECTING_PREFILL = "connecting_prefill"
    PREFILLING = "prefilling"
    BACKING_OFF = "backing_off"
    CONNECTING_DECODE = "connecting_decode"
    AWAITING = "awaiting"
    STREAMING = "streaming"
    COMPLETING = "completing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


State = EndpointState | Stage

OUTCOMES = frozenset({Stage.COMPLETED, Stage.FAILED, Stage.CANCELLED})

_E, _S = EndpointState, Stage

MEANINGS: dict[State, str] = {
    _E.UNKNOWN: "has not answered yet: one request at a time while another is ready",
    _E.READY: "answers (breaker closed)",
    _E.SUSPECT: "has failed, or is coming back (breaker half open): one request at a time while another is ready",
    _E.DOWN: "does not answer (breaker open): one request at a time after its wait, or where nothing better is left",
    _E.DRAINING: "gets no new requests; those in flight go on",
    _E.REMOVED: "forgotten",
    _S.RECEIVED: "nothing is done",
    _S.PROBING: "every decode engine is down: a connection to the least bad is tried before any work",
    _S.CONNECTING_PREFILL: "a connection to a prefill engine is wanted",
    _S.PREFILLING: "a prefill engine has the request",
    _S.BACKING_OFF: "waits before the only prefill engine is tried again",
    _S.CONNECTING_DECODE: "a connection to a decode engine is wanted; with a handle, the prefill engine holds blocks",
    _S.AWAITING: "a decode engine has the request, the client nothing",
    _S.STREAMING: "the client has a part of the answer",
    _S.COMPLETING: "nobody waits for an answer: a decode request of one token pulls the KV, so that it is freed",
    _S.COMPLETED: "the client has an engine's answer",
    _S.FAILED: "the client was told of a failure",
    _S.CANCELLED: "the client left",
}

_DRAIN = "drained or removed by an operator"
_LEFT = "the client left"
_REFUSED = "a connection was refused or not made in time, or health checks failed"
_ALL_DOWN = "a prefill is to be sent again, and every decode engine is down"
_NO_PREFILL = "no prefill engine is left, and local prefill is allowed"

TRANSITIONS: dict[tuple[State, State], str] = {
    (_E.UNKNOWN, _E.READY): "a request or a health check succeeded",
    (_E.UNKNOWN, _E.SUSPECT): "a request was lost or timed out, or several failed",
    (_E.UNKNOWN, _E.DOWN): _REFUSED,
    (_E.UNKNOWN, _E.DRAINING): _DRAIN,
    (_E.READY, _E.SUSPECT): "a request timed out, or several failed",
    (_E.READY, _E.DOWN): _REFUSED,
    (_E.READY, _E.DRAINING): _DRAIN,
    (_E.SUSPECT, _E.READY): "a request succeeded; or health checks did, where no request was the cause",
    (_E.SUSPECT, _E.DOWN): f"a request was lost or timed out; {_REFUSED}",
    (_E.SUSPECT, _E.DRAINING): _DRAIN,
    (_E.DOWN, _E.SUSPECT): "a health check succeeded (after its wait, where a request was the cause), or a connection "
    "was made",
    (_E.DOWN, _E.READY): "the request that was sent to try it succeeded",
    (_E.DOWN, _E.DRAINING): _DRAIN,
    (_E.DRAINING, _E.UNKNOWN): "opened by an operator",
    (_E.DRAINING, _E.REMOVED): "it is to be removed, and its last request has ended",
    (_S.RECEIVED, _S.PROBING): "every decode engine is down",
    (_S.RECEIVED, _S.CONNECTING_PREFILL): "prefill and decode apart",
    (_S.RECEIVED, _S.CONNECTING_DECODE): f"a decode engine alone; or {_NO_PREFILL}",
    (_S.RECEIVED, _S.FAILED): "no engine of a pool can be tried: 503",
    (_S.RECEIVED, _S.CANCELLED): _LEFT,
    (_S.PROBING, _S.PROBING): "refused: the next one",
    (_S.PROBING, _S.CONNECTING_PREFILL): "connected",
    (_S.PROBING, _S.CONNECTING_DECODE): _NO_PREFILL,
    (_S.PROBING, _S.FAILED): "none connects: 503 before any work",
    (_S.PROBING, _S.CANCELLED): _LEFT,
    (_S.CONNECTING_PREFILL, _S.PROBING): _ALL_DOWN,
    (_S.CONNECTING_PREFILL, _S.CONNECTING_PREFILL): "refused: another prefill engine",
    (_S.CONNECTING_PREFILL, _S.PREFILLING): "connected",
    (_S.CONNECTING_PREFILL, _S.CONNECTING_DECODE): _NO_PREFILL,
    (_S.CONNECTING_PREFILL, _S.FAILED): "none connects: 503",
    (_S.CONNECTING_PREFILL, _S.CANCELLED): _LEFT,
    (_S.PREFILLING, _S.PROBING): _ALL_DOWN,
    (
        _S.PREFILLING,
        _S.CONNECTING_PREFILL,
    ): "failed, overloaded or timed out: another prefill engine, a fresh id; or lost before a byte was written",
    (_S.PREFILLING, _S.BACKING_OFF): "lost, and there is no other prefill engine",
    (_S.PREFILLING, _S.CONNECTING_DECODE): f"answered; or {_NO_PREFILL}",
    (_S.PREFILLING, _S.COMPLETED): "refused as invalid: the client's answer",
    (_S.PREFILLING, _S.FAILED): "failed, and no retry is allowed; or answered, and no decode engine is left",
    (_S.PREFILLING, _S.CANCELLED): _LEFT,
    (_S.BACKING_OFF, _S.PROBING): _ALL_DOWN,
    (_S.BACKING_OFF, _S.CONNECTING_PREFILL): "the wait is over",
    (_S.BACKING_OFF, _S.CONNECTING_DECODE): _NO_PREFILL,
    (_S.BACKING_OFF, _S.FAILED): "the engine drains or is down meanwhile",
    (_S.BACKING_OFF, _S.CANCELLED): _LEFT,
    (_S.CONNECTING_DECODE, _S.PROBING): _ALL_DOWN,
    (_S.CONNECTING_DECODE, _S.CONNECTING_DECODE): "refused: another decode engine, the same handle",
    (_S.CONNECTING_DECODE, _S.CONNECTING_PREFILL): "the lease is over or the prefill engine restarted: a fresh prefill",
    (_S.CONNECTING_DECODE, _S.AWAITING): "connected",
    (_S.CONNECTING_DECODE, _S.COMPLETING): "connected, and nobody waits for an answer",
    (_S.CONNECTING_DECODE, _S.COMPLETED): "the client has its answer; the KV cannot be pulled any more",
    (_S.CONNECTING_DECODE, _S.FAILED): "none connects: 503; or the lease is over: 504",
    (_S.CONNECTING_DECODE, _S.CANCELLED): _LEFT,
    (_S.AWAITING, _S.PROBING): _ALL_DOWN,
    (_S.AWAITING, _S.CONNECTING_DECODE): "lost before a byte was written: the same handle; or a request without a "
    "handle failed: again, once; or refused as invalid: the KV is still to be pulled",
    (_S.AWAITING, _S.CONNECTING_PREFILL): "failed after a byte was written: a fresh prefill, once",
    (_S.AWAITING, _S.STREAMING): "the first byte",
    (_S.AWAITING, _S.COMPLETED): "the whole answer at once",
    (_S.AWAITING, _S.FAILED): "failed, and no retry is allowed; or no first token in time: 504",
    (_S.AWAITING, _S.CANCELLED): "the client left, and the engine has had time to admit the request",
    (_S.STREAMING, _S.COMPLETED): "the stream is complete",
    (_S.STREAMING, _S.FAILED): "lost or silent: error event, then [DONE]",
    (_S.STREAMING, _S.CANCELLED): _LEFT,
    (_S.COMPLETING, _S.CONNECTING_DECODE): "lost before a byte was written: the same handle",
    (_S.COMPLETING, _S.COMPLETED): "ended, and the client had its answer",
    (_S.COMPLETING, _S.CANCELLED): "ended, and the client had left",
}


_FOLLOWING: Final = {old: frozenset(new for before, new in TRANSITIONS if before is old) for old, _ in TRANSITIONS}


def assert_listed(old: State, new: State) -> None:
    """Asserts that the tables list the transition."""
    assert new in _FOLLOWING.get(old, ()), f"{type(old).__name__}: no transition from {old.value} to {new.value}"


def transition_tables() -> str:
    """The tables as Markdown: for each machine its states, then its transitions."""
    return transitions.transition_tables((("Endpoint", EndpointState), ("Request", Stage)), MEANINGS, TRANSITIONS)
