"""What the life of a request asks of the shell, in the order in which it is to be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from antiphon.routing.endpoint import Endpoint
from antiphon.routing.states import Stage


@dataclass(slots=True)
class Handle:
    """A prefill's KV, to be pulled once.

    Args:
        prefill: the engine that holds it.
        life: of that engine, when it answered.
        value: opaque; what the decode engine is sent.
        until_s: it may be sent before this time.
    """

    prefill: Endpoint
    life: int
    value: object
    until_s: float
    is_spent: bool = False
    """A byte of a decode request with it was written: it is not sent to another engine."""


@dataclass(slots=True)
class ProbeDecode:
    """Connect to a decode engine and give the connection back: nothing is sent."""

    attempt: int
    endpoint: Endpoint


@dataclass(slots=True)
class ConnectPrefill:
    """Connect to a prefill engine, and send it the prefill request once connected.

    Args:
        request_id: new in each attempt, so that the engine takes no two for one.
    """

    attempt: int
    endpoint: Endpoint
    request_id: str


@dataclass(slots=True)
class ConnectDecode:
    """Connect to a decode engine; what to send is said when it is connected."""

    attempt: int
    endpoint: Endpoint


@dataclass(slots=True)
class SendDecode:
    """Send the client's request.

    Args:
        handle: of the prefill's KV; None where the engine is to compute the prompt itself.
    """

    attempt: int
    endpoint: Endpoint
    request_id: str
    handle: Handle | None


@dataclass(slots=True)
class CompleteHandover:
    """Send a decode request of one token whose answer nobody wants, so that the KV is pulled and freed.

    Args:
        is_salted: the engine may read other data, where the KV was pulled before: a ``cache_salt`` of its own must keep
            what it computes from ever being found again.
    """

    attempt: int
    endpoint: Endpoint
    request_id: str
    handle: Handle
    is_salted: bool


@dataclass(slots=True)
class CancelUpstream:
    """End the attempt's connection, or give it back where nothing was sent; nothing more is wanted from it."""

    attempt: int


@dataclass(slots=True)
class PassOn:
    """The engine's own refusal is the client's answer."""

    attempt: int


FailureCode = Literal[
    "no_prefill_engine",
    "no_decode_engine",
    "own_limit",
    "prefill_overloaded",
    "prefill_error",
    "prefill_lost",
    "prefill_bad_answer",
    "prefill_timeout",
    "decode_overloaded",
    "decode_error",
    "decode_lost",
    "decode_bad_answer",
    "decode_timeout",
    "handover_timeout",
]


@dataclass(slots=True)
class RespondError:
    """Tell the client, which has nothing of an answer yet.

    Args:
        status: 429, 502, 503 or 504.
        retry_after_s: whole seconds, with 429 and 503.
    """

    status: int
    code: FailureCode
    retry_after_s: int | None = None


@dataclass(slots=True)
class EndStreamWithError:
    """The client has a part of the answer: whole events so far, an error event, then ``[DONE]``; where the answer is no
    stream, cut the connection."""

    status: int
    code: FailureCode


@dataclass(slots=True)
class Finish:
    """The request is over; the last command of each, once.

    Args:
        outcome: COMPLETED, FAILED or CANCELLED.
    """

    outcome: Stage


Command = (
    ProbeDecode
    | ConnectPrefill
    | ConnectDecode
    | SendDecode
    | CompleteHandover
    | CancelUpstream
    | PassOn
    | RespondError
    | EndStreamWithError
    | Finish
)
