"""What the life of a request asks of the shell, in the order in which it is to be done.

Constructors are written out: those that ``dataclass`` makes stay Python where this module is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from antiphon.routing.endpoint import Endpoint
from antiphon.routing.states import Stage


@dataclass(init=False, slots=True)
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
    value: Any
    until_s: float
    is_spent: bool = False
    """A byte of a decode request with it was written: it is not sent to another engine."""

    def __init__(self, prefill: Endpoint, life: int, value: Any, until_s: float, is_spent: bool = False) -> None:
        self.prefill = prefill
        self.life = life
        self.value = value
        self.until_s = until_s
        self.is_spent = is_spent


@dataclass(init=False, slots=True)
class ProbeDecode:
    """Connect to a decode engine and give the connection back: nothing is sent."""

    attempt: int
    endpoint: Endpoint

    def __init__(self, attempt: int, endpoint: Endpoint) -> None:
        self.attempt = attempt
        self.endpoint = endpoint


@dataclass(init=False, slots=True)
class ConnectPrefill:
    """Connect to a prefill engine, and send it the prefill request once connected.

    Args:
        request_id: new in each attempt, so that the engine takes no two for one.
    """

    attempt: int
    endpoint: Endpoint
    request_id: str

    def __init__(self, attempt: int, endpoint: Endpoint, request_id: str) -> None:
        self.attempt = attempt
        self.endpoint = endpoint
        self.request_id = request_id


@dataclass(init=False, slots=True)
class ConnectDecode:
    """Connect to a decode engine; what to send is said when it is connected."""

    attempt: int
    endpoint: Endpoint

    def __init__(self, attempt: int, endpoint: Endpoint) -> None:
        self.attempt = attempt
        self.endpoint = endpoint


@dataclass(init=False, slots=True)
class SendDecode:
    """Send the client's request.

    Args:
        handle: of the prefill's KV; None where the engine is to compute the prompt itself.
    """

    attempt: int
    endpoint: Endpoint
    request_id: str
    handle: Handle | None

    def __init__(self, attempt: int, endpoint: Endpoint, request_id: str, handle: Handle | None) -> None:
        self.attempt = attempt
        self.endpoint = endpoint
        self.request_id = request_id
        self.handle = handle


@dataclass(init=False, slots=True)
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

    def __init__(self, attempt: int, endpoint: Endpoint, request_id: str, handle: Handle, is_salted: bool) -> None:
        self.attempt = attempt
        self.endpoint = endpoint
        self.request_id = request_id
        self.handle = handle
        self.is_salted = is_salted


@dataclass(init=False, slots=True)
class CancelUpstream:
    """End the attempt's connection, or give it back where nothing was sent; nothing more is wanted from it."""

    attempt: int

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt


@dataclass(init=False, slots=True)
class PassOn:
    """The engine's own refusal is the client's answer."""

    attempt: int

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt


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


@dataclass(init=False, slots=True)
class RespondError:
    """Tell the client, which has nothing of an answer yet.

    Args:
        status: 429, 502, 503 or 504.
        retry_after_s: whole seconds, with 429 and 503.
    """

    status: int
    code: FailureCode
    retry_after_s: int | None = None

    def __init__(self, status: int, code: FailureCode, retry_after_s: int | None = None) -> None:
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


@dataclass(init=False, slots=True)
class EndStreamWithError:
    """The client has a part of the answer: whole events so far, an error event, then ``[DONE]``; where the answer is no
    stream, cut the connection."""

    status: int
    code: FailureCode

    def __init__(self, status: int, code: FailureCode) -> None:
        self.status = status
        self.code = code


@dataclass(init=False, slots=True)
class Finish:
    """The request is over; the last command of each, once.

    Args:
        outcome: COMPLETED, FAILED or CANCELLED.
    """

    outcome: Stage

    def __init__(self, outcome: Stage) -> None:
        self.outcome = outcome


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
