"""What a shell tells the life of a request. Each event of an engine names the attempt that it belongs to, as the
command that began the attempt did: what comes late, or twice, is recognised by it and changes nothing.

Constructors are written out: those that ``dataclass`` makes stay Python where this module is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(slots=True)
class Received:
    """The request is complete and valid: begin."""


@dataclass(slots=True)
class ClientLeft:
    """The client closed its connection before its answer was complete."""


@dataclass(slots=True)
class Deadline:
    """The time that ``Life.deadline_s`` said has come."""


@dataclass(init=False, slots=True)
class Connected:
    """There is a connection to the engine."""

    attempt: int

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt


@dataclass(init=False, slots=True)
class ConnectRefused:
    """No connection could be made. No byte was written.

    Args:
        is_own_limit: because of a limit of this process, which says nothing about the engine.
    """

    attempt: int
    is_own_limit: bool = False

    def __init__(self, attempt: int, is_own_limit: bool = False) -> None:
        self.attempt = attempt
        self.is_own_limit = is_own_limit


@dataclass(init=False, slots=True)
class BytesWritten:
    """The first byte of the request has been given to the connection: the engine may have it."""

    attempt: int

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt


@dataclass(init=False, slots=True)
class PrefillHead:
    """The head of a prefill engine's answer with status 200 is here: the prefill has ended and may hold blocks."""

    attempt: int

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt


@dataclass(init=False, slots=True)
class PrefillAnswered:
    """A prefill engine has answered.

    Args:
        status: of the HTTP answer.
        handle: what a decode engine needs to pull the KV, opaque; None if the answer holds none.
        engine_id: of the life of the engine that made the handle, empty if it does not say.
        retry_after_s: as the engine asks, with 429 and 503.
    """

    attempt: int
    status: int
    handle: Any = None
    engine_id: str = ""
    retry_after_s: int | None = None

    def __init__(
        self, attempt: int, status: int, handle: Any = None, engine_id: str = "", retry_after_s: int | None = None
    ) -> None:
        self.attempt = attempt
        self.status = status
        self.handle = handle
        self.engine_id = engine_id
        self.retry_after_s = retry_after_s


@dataclass(init=False, slots=True)
class DecodeRefused:
    """A decode engine answered with an error before any token: a status of 400 or more, or an error event.

    Args:
        status: of the HTTP answer; 500 for an error event that says no other.
    """

    attempt: int
    status: int
    retry_after_s: int | None = None

    def __init__(self, attempt: int, status: int, retry_after_s: int | None = None) -> None:
        self.attempt = attempt
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(init=False, slots=True)
class FirstByte:
    """The first byte of an answer that is passed on to the client."""

    attempt: int

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt


@dataclass(init=False, slots=True)
class StreamEnded:
    """The engine's answer has ended.

    Args:
        is_complete: whether it is whole: for a stream, whether ``[DONE]`` came.
        has_error: the engine itself said in its stream that it failed.
    """

    attempt: int
    is_complete: bool = True
    has_error: bool = False

    def __init__(self, attempt: int, is_complete: bool = True, has_error: bool = False) -> None:
        self.attempt = attempt
        self.is_complete = is_complete
        self.has_error = has_error


@dataclass(init=False, slots=True)
class UpstreamLost:
    """The connection ended before the answer was complete.

    Args:
        is_garbage: because what the engine sent cannot be used.
    """

    attempt: int
    is_garbage: bool = False

    def __init__(self, attempt: int, is_garbage: bool = False) -> None:
        self.attempt = attempt
        self.is_garbage = is_garbage


EngineEvent = (
    Connected
    | ConnectRefused
    | BytesWritten
    | PrefillHead
    | PrefillAnswered
    | DecodeRefused
    | FirstByte
    | StreamEnded
    | UpstreamLost
)
Event = Received | ClientLeft | Deadline | EngineEvent

ENGINE_EVENTS: Final = frozenset(
    {
        Connected,
        ConnectRefused,
        BytesWritten,
        PrefillHead,
        PrefillAnswered,
        DecodeRefused,
        FirstByte,
        StreamEnded,
        UpstreamLost,
    }
)
