"""The calls of a cache server: what its clients send, what it answers, and the frames that carry both.

A frame is a length (4 bytes, little-endian, of what follows) and one msgpack value: ``Call`` from the client,
``Answer`` from the server. Every call gets exactly one answer with its id: a value, or ``Failure`` with a code of
``ERROR_CODES``; before it, a ``Lookup`` that waits for tiers gets ``Onboarding``. Answers may come in another order
than the calls. The first call of a connection is ``Hello``; the arena's descriptor comes with its ``Welcome``, over the
unix socket only.

Always true: a frame is at most ``FRAME_BYTES_MAX`` long; nothing here holds KV bytes; a handle (lease, region) is valid
on the life of the server that gave it only.

The meaning of each call is that of the event of the same name in ``antiphon.cache.events``.
"""

from __future__ import annotations

from typing import Final

import msgspec

from antiphon.core import errors
from antiphon.core.errors import AntiphonError, CacheError, ProtocolError
from antiphon.protocol.cache_handoff import HandoffKey

PROTOCOL_VERSION: Final = 1
"""A server answers a client of another version with ``Failure`` and closes: there is one version at a time."""

FRAME_BYTES_MAX: Final = 1 << 20
"""Bytes of a frame without its length: 16384 keys of 32 bytes are half of it."""

LENGTH_BYTES: Final = 4

KEY_BYTES: Final = 32

PEER_SOURCE: Final = "peer"
"""Source of chunks that came from another cache server, in ``Found.fetched``; all other sources there are tiers."""

GATE_TENANT: Final = "antiphon.gate"
"""Tenant of the pattern by which an engine proves its copies: no user's, and left out of what is shown."""


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A span of the arena as given to one chunk: offset and size in bytes, and the generation of the allocation."""

    offset: int
    size: int
    generation: int


# ---- calls -----------------------------------------------------------------------------------------------------------


class CallBody(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the calls."""


class Hello(CallBody, frozen=True):
    """Who is calling.

    Args:
        version: ``PROTOCOL_VERSION`` of the client.
        client: free text for people: program and version, at most 200 characters.
    """

    version: int
    client: str


class Attach(CallBody, frozen=True):
    """A process of an engine registers; over the unix socket only.

    Args:
        engine: name of the engine, the same for all its processes.
        incarnation: of this start of the engine.
        role: what the process is, for people: ``scheduler``, ``worker-0``, ``probe``.
        pid: its process id on its own host.
        model: served model name.
        chunk_size_tokens: must be the server's.
        num_slabs: slabs of one chunk over all ranks.
        slab_bytes: bytes of one slab.
        fingerprint: names an opaque layout; None for head-major slabs.
        slabs: slabs that this process writes; empty for one that only looks up.
    """

    engine: str
    incarnation: str
    role: str
    pid: int
    model: str
    chunk_size_tokens: int
    num_slabs: int
    slab_bytes: int
    fingerprint: str | None
    slabs: tuple[int, ...]


class Lookup(CallBody, frozen=True):
    """How much of a prefix is readable; what is reported is leased to the request.

    Args:
        keys: 32 bytes each, joined.
        onboard_s: how long the answer may wait for chunks of tiers; 0: not at all.
        prefill_tokens_per_s: how fast the caller computes, so that it does not wait longer than that; 0: not known.
        handoff: what a prefill engine has stored of the prompt, or is storing: it is waited for.
        traceparent: the span that the lookup is part of; empty where it is not traced.
    """

    request: str
    namespace: bytes
    tenant: str
    keys: bytes
    onboard_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    handoff: HandoffKey | None = None
    traceparent: str = ""


class Release(CallBody, frozen=True):
    """The request needs the lease no more."""

    request: str
    lease: int


class CopyBegan(CallBody, frozen=True):
    """This process copies out of the leased regions."""

    lease: int


class CopyEnded(CallBody, frozen=True):
    """That copy has ended, well or not."""

    lease: int


class Reserve(CallBody, frozen=True):
    """Which of these chunks are resident, and which should this process write? ``keys``: 32 bytes each, joined."""

    namespace: bytes
    tenant: str
    parent: bytes | None
    keys: bytes
    traceparent: str = ""


class Commit(CallBody, frozen=True):
    """The copies into these reserved regions are complete."""

    regions: tuple[Region, ...]


class Abort(CallBody, frozen=True):
    """The writer gives these reservations up."""

    regions: tuple[Region, ...]


class Clear(CallBody, frozen=True):
    """Forget chunks: of one tenant, of one model, of both, or, with neither, all."""

    tenant: str | None = None
    model: str | None = None


class Report(CallBody, frozen=True):
    """Where the prompt tokens of one request came from. Their counts add up to ``num_prompt_tokens``, or an alarm.

    Args:
        request: the engine's request id, which contains the ``x-request-id`` that the router sent.
        engine: as in ``Attach``.
        incarnation: as in ``Attach``.
        num_prompt_tokens: tokens of the prompt.
        device: tokens found in the engine's own cache.
        l1: tokens loaded from this server.
        remote_prefill: tokens that another connector brought: the hand-over from a prefill engine.
        computed: tokens computed, the last prompt token always among them.
        num_preemptions: times that the request was preempted; what is done again then is not counted.
        finish: ``finished``, or ``aborted`` before the prompt was complete (the counts then do not add up).
        namespace: digest of the request's namespace; empty where it goes without reuse.
        l2: tokens loaded from this server that came from a tier for this request; not among ``l1``.
        peer: tokens loaded from this server that came from another one for this request; not among ``l1``.
    """

    request: str
    engine: str
    incarnation: str
    num_prompt_tokens: int
    device: int
    l1: int
    remote_prefill: int
    computed: int
    num_preemptions: int
    finish: str
    namespace: bytes = b""
    l2: int = 0
    peer: int = 0


class EngineNote(CallBody, frozen=True):
    """What the caller found out about itself, for ``/status``: kept until it detaches.

    Args:
        gate: ``passed``, ``failed`` or ``not_run``.
        detail: a sentence for people, at most 500 characters.
    """

    gate: str
    detail: str


class AskProcesses(CallBody, frozen=True):
    """Which processes of the caller's engine are attached, and has each passed its gate? Of who is attached only."""


class Ping(CallBody, frozen=True):
    """Are you there? Answered by the same thread that answers every other call."""


Body = (
    Hello
    | Attach
    | Lookup
    | Release
    | CopyBegan
    | CopyEnded
    | Reserve
    | Commit
    | Abort
    | Clear
    | Report
    | EngineNote
    | AskProcesses
    | Ping
)


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One call. ``id``: chosen by the client, not in use by another call of the connection; from 1 to 2**63 - 1."""

    id: int
    body: Body


# ---- answers ---------------------------------------------------------------------------------------------------------


class AnswerBody(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the answers."""


class Welcome(AnswerBody, frozen=True):
    """The answer to ``Hello``. Over the unix socket the arena's descriptor comes with it.

    Args:
        version: ``PROTOCOL_VERSION`` of the server.
        instance: name of the server.
        incarnation: of this start of the server.
        socket_path: the unix socket, for who is on the same host.
        chunk_size_tokens: tokens of a chunk.
        arena_bytes: size of the mapping, its header page included.
        data_offset_bytes: where the arena proper begins in it; region offsets count from there.
        peer_address: where other cache servers reach this one; empty where it has no peers.
    """

    version: int
    instance: str
    incarnation: str
    socket_path: str
    chunk_size_tokens: int
    arena_bytes: int
    data_offset_bytes: int
    peer_address: str = ""


class Attached(AnswerBody, frozen=True):
    """The connection is attached; bytes populated so far."""

    usable_bytes: int


class Found(AnswerBody, frozen=True):
    """The answer to ``Lookup``: one region a chunk of the contiguous readable prefix, and the lease on them.

    Args:
        fetched: for each source beyond the arena, the indexes of the regions that came from there for this lookup.
    """

    lease: int | None
    regions: tuple[Region, ...]
    num_tokens: int
    num_chunks_capped: int
    fetched: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Onboarding(AnswerBody, frozen=True):
    """More of a lookup's prefix may come from a tier: ``Found`` follows under the same id, within ``wait_s``.

    Args:
        num_tokens: tokens that are readable now, and stay.
        num_tokens_max: tokens if all comes that may.
    """

    num_tokens: int
    num_tokens_max: int
    wait_s: float


class LeaseNoted(AnswerBody, frozen=True):
    """The answer to ``Release``, ``CopyBegan`` and ``CopyEnded``: the state that the lease is in."""

    lease: int
    state: str


class Grant(AnswerBody, frozen=True):
    """What the writer may write: these slabs of this region, for the key at ``index`` of the call."""

    index: int
    region: Region
    slabs: tuple[int, ...]


class Reserved(AnswerBody, frozen=True):
    """The answer to ``Reserve``.

    Args:
        verdicts: one a key: ``resident``, ``write``, ``being_written``, ``partial`` or ``refused``.
        grants: one for each ``write``, in the same order.
        refusal: why the first refused chunk has no room, as an error code and a sentence; None where none is refused.
    """

    verdicts: tuple[str, ...]
    grants: tuple[Grant, ...]
    refusal: tuple[str, str] | None


class Committed(AnswerBody, frozen=True):
    """The answer to ``Commit``: one of ``readable``, ``partial``, ``dropped`` a region."""

    outcomes: tuple[str, ...]


class Aborted(AnswerBody, frozen=True):
    """The answer to ``Abort``."""

    num_regions: int


class Cleared(AnswerBody, frozen=True):
    """The answer to ``Clear``."""

    num_chunks: int
    freed_bytes: int
    held_bytes: int


class Noted(AnswerBody, frozen=True):
    """The answer to ``Report``, ``EngineNote`` and ``Ping``."""


class Processes(AnswerBody, frozen=True):
    """The answer to ``AskProcesses``: role and gate of every attached process of the engine, the caller among them."""

    processes: tuple[tuple[str, str], ...]


class Failure(AnswerBody, frozen=True):
    """The call is refused and changed nothing. ``code``: a key of ``ERROR_CODES``."""

    code: str
    message: str
    remedy: str | None = None


Answered = (
    Welcome
    | Attached
    | Found
    | Onboarding
    | LeaseNoted
    | Reserved
    | Committed
    | Aborted
    | Cleared
    | Noted
    | Processes
    | Failure
)


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One answer. ``id``: of the call; 0 where the frame could not be read, after which the server closes."""

    id: int
    body: Answered


# ---- errors ----------------------------------------------------------------------------------------------------------

ERROR_CODES: Final[dict[str, type[AntiphonError]]] = {
    "capacity_exceeded": errors.CapacityExceeded,
    "quota_exceeded": errors.QuotaExceeded,
    "layout_mismatch": errors.LayoutMismatch,
    "connection_unknown": errors.ConnectionUnknown,
    "lease_unknown": errors.LeaseUnknown,
    "not_owner": errors.NotOwner,
    "stale_handle": errors.StaleHandle,
    "version_mismatch": errors.VersionMismatch,
    "not_local": errors.NotLocal,
    "protocol_error": ProtocolError,
    "cache_error": CacheError,
}
"""The errors that cross the wire. An error of another class travels as its nearest listed base."""


def failure_of(error: AntiphonError) -> Failure:
    """``error`` as an answer."""
    for kind in type(error).__mro__:
        for code, listed in ERROR_CODES.items():
            if listed is kind:
                return Failure(code, error.message, error.remedy)
    return Failure("cache_error", error.message, error.remedy)


def error_of(failure: Failure) -> AntiphonError:
    """The error that ``failure`` carries; a code that is not known here is a ``CacheError``."""
    return ERROR_CODES.get(failure.code, CacheError)(failure.message, remedy=failure.remedy)


# ---- codec -----------------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_calls = msgspec.msgpack.Decoder(Call)
_answers = msgspec.msgpack.Decoder(Answer)


def frame(message: Call | Answer) -> bytes:
    """``message`` as one frame, its length in front.

    Raises:
        ProtocolError: longer than ``FRAME_BYTES_MAX``.
    """
    payload = _encoder.encode(message)
    if len(payload) > FRAME_BYTES_MAX:
        raise ProtocolError(f"a message of {len(payload)} bytes exceeds the limit of {FRAME_BYTES_MAX}")
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def frame_length(prefix: bytes | bytearray | memoryview) -> int:
    """Length of the frame whose first ``LENGTH_BYTES`` bytes are ``prefix``.

    Raises:
        ProtocolError: more than ``FRAME_BYTES_MAX``, or 0.
    """
    length = int.from_bytes(prefix, "little")
    if not 0 < length <= FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {length} bytes was announced; the limit is {FRAME_BYTES_MAX}")
    return length


def decode_call(payload: bytes | bytearray | memoryview) -> Call:
    """The call in a frame.

    Raises:
        ProtocolError: not a call of this version.
    """
    try:
        return _calls.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame is no call of protocol version {PROTOCOL_VERSION}: {error}") from error


def decode_answer(payload: bytes | bytearray | memoryview) -> Answer:
    """The answer in a frame.

    Raises:
        ProtocolError: not an answer of this version.
    """
    try:
        return _answers.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame is no answer of protocol version {PROTOCOL_VERSION}: {error}") from error


def split_keys(joined: bytes) -> tuple[bytes, ...]:
    """The keys of ``joined``.

    Raises:
        ProtocolError: not a whole number of keys.
    """
    if len(joined) % KEY_BYTES:
        raise ProtocolError(f"keys are {KEY_BYTES} bytes each; {len(joined)} bytes were sent")
    return tuple(joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES))
