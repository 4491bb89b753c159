"""The messages between cache servers and their coordinator, and between two cache servers.

A frame is a length (4 bytes, little-endian, of what follows) and one msgpack value, ``Envelope``. Every call gets one
answer with its id. A connection begins with a proof of the cluster secret by both sides (``Hello``, ``Challenge``,
``Proof``, ``Accepted``); nothing else is said before it, and the secret itself is never sent.

Always true: a frame is at most ``FRAME_BYTES_MAX`` long, and every list in a message has a limit; what a server holds
is named by tier keys (``antiphon.cache.tier_key``), into which tenant, model, namespace and layout enter. KV bytes are
in no frame: after ``ReadBegins`` they follow as they are, as many as it says.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from antiphon.core import errors
from antiphon.core.errors import AntiphonError, PeerError, ProtocolError
from antiphon.protocol.cache import FRAME_BYTES_MAX, LENGTH_BYTES

PROTOCOL_VERSION: Final = 1
"""Two sides of different versions part before anything else is said: there is one version at a time."""

KEY_BYTES: Final = 32
DIGEST_BYTES: Final = 16
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32

KEYS_PER_CALL_MAX: Final = 8_192
"""Keys of one listing page or question, 256 KiB."""
EVENTS_PER_CALL_MAX: Final = 4_096
HOLDERS_PER_KEY_MAX: Final = 3
"""Holders that an answer names for a key: a reader needs one, and others where that one does not answer."""
LEND_KEYS_MAX: Final = 256
HELD_KEYS_MAX: Final = 512
HELD_STATES: Final = ("unseen", "reserved", "readable", "refused")
"""Of a chunk that was handed over: nobody stores it yet, it is being stored, it can be lent, there was no room."""
METADATA_BYTES_MAX: Final = 65_536

PEER: Final = "peer"
COORDINATOR: Final = "coordinator"

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Url = Annotated[str, msgspec.Meta(max_length=300)]
_Text = Annotated[str, msgspec.Meta(max_length=2_000)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Proof = Annotated[bytes, msgspec.Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Keys = Annotated[bytes, msgspec.Meta(max_length=KEYS_PER_CALL_MAX * KEY_BYTES)]
_Traceparent = Annotated[str, msgspec.Meta(max_length=128)]
"""The span that a call is part of; empty where it is not traced."""


class Body(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the messages."""


# ---- the proof -------------------------------------------------------------------------------------------------------


class Hello(Body, frozen=True):
    """Who is calling.

    Args:
        version: ``PROTOCOL_VERSION`` of the caller.
        purpose: ``peer`` or ``coordinator``: what the caller takes the other side for.
        instance: name of the caller.
        incarnation: of this start of the caller.
        nonce: random, new for each connection.
    """

    version: _Number
    purpose: _Name
    instance: _Name
    incarnation: _Name
    nonce: _Nonce


class Challenge(Body, frozen=True):
    """The answer to ``Hello``: who answers, and its proof that it has the secret."""

    instance: _Name
    incarnation: _Name
    nonce: _Nonce
    proof: _Proof


class Proof(Body, frozen=True):
    """The caller's proof that it has the secret."""

    proof: _Proof


class Accepted(Body, frozen=True):
    """The answer to ``Proof``: calls are answered from here on."""


# ---- a cache server to the coordinator -------------------------------------------------------------------------------


class Join(Body, frozen=True):
    """The caller is a member from here on, with no chunks, until its connection ends or its heartbeat stays away.

    Args:
        url: where its peers reach it, ``HOST:PORT``.
        tier_format: version of what tier keys and digests mean; members of different versions share nothing.
    """

    url: _Url
    tier_format: _Number


class Joined(Body, frozen=True):
    """The answer to ``Join``. ``heartbeat_s``: how often the coordinator wants to hear of the member."""

    heartbeat_s: float


class Listing(Body, frozen=True):
    """A page of the chunks that the caller holds.

    Args:
        is_first: what was told before is forgotten.
        is_last: events follow.
        next_sequence: number of the first event that came after the first page.
        keys: tier keys, joined.
    """

    is_first: bool
    is_last: bool
    next_sequence: _Number
    keys: _Keys


class Events(Body, frozen=True):
    """What was stored and evicted since, in order.

    Args:
        first_sequence: number of the first event.
        num_events: how many numbers this takes, at most ``EVENTS_PER_CALL_MAX``; those left out concern nobody else.
        changes: ``(is_stored, tier key)`` in the order in which they happened.
    """

    first_sequence: _Number
    num_events: Annotated[int, msgspec.Meta(ge=0, le=EVENTS_PER_CALL_MAX)]
    changes: Annotated[tuple[tuple[bool, bytes], ...], msgspec.Meta(max_length=EVENTS_PER_CALL_MAX)]


class Resync(Body, frozen=True):
    """The answer to ``Events`` that do not follow on what is known: list again."""


class Heartbeat(Body, frozen=True):
    """The caller is alive."""


class Locate(Body, frozen=True):
    """Which members hold these chunks? ``keys``: tier keys, joined."""

    keys: _Keys
    traceparent: _Traceparent = ""


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A member that holds something that was asked for."""

    instance: _Name
    incarnation: _Name
    url: _Url

    @property
    def life(self) -> tuple[str, str]:
        """By which one life of a member is told from the next."""
        return self.instance, self.incarnation


class Located(Body, frozen=True):
    """The answer to ``Locate``. ``holders``: for each key, indices into ``members``, at most
    ``HOLDERS_PER_KEY_MAX``, the caller not among them."""

    members: Annotated[tuple[Holder, ...], msgspec.Meta(max_length=1_024)]
    holders: Annotated[tuple[tuple[int, ...], ...], msgspec.Meta(max_length=KEYS_PER_CALL_MAX)]


# ---- a cache server to another ---------------------------------------------------------------------------------------


class AskNixl(Body, frozen=True):
    """How is your arena read over NIXL?"""


class NixlInfo(Body, frozen=True):
    """The answer to ``AskNixl``.

    Args:
        metadata: of the agent; None where there is none. Whoever has it can write to the whole arena.
        base_address: of the first data byte, in the holder's memory.
        arena_bytes: bytes of data.
    """

    metadata: Annotated[bytes, msgspec.Meta(max_length=METADATA_BYTES_MAX)] | None
    base_address: _Number
    arena_bytes: _Number


class Lend(Body, frozen=True):
    """Lease these chunks to the caller, as far as they are readable and mean what it says.

    Args:
        namespace: digest of the chunks' namespace, 32 bytes.
        fingerprint: of an opaque layout; None for head-major slabs.
        num_bytes: of one whole chunk.
        format_version: of the stored form of chunks.
        keys: tier keys, joined; at most ``LEND_KEYS_MAX``.
        traceparent: see ``_Traceparent``.
        needs_polls: whether the callee's NIXL agent must be polled for the caller's reads.
    """

    namespace: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    fingerprint: Annotated[str, msgspec.Meta(max_length=512)] | None
    num_bytes: _Number
    format_version: _Number
    keys: Annotated[bytes, msgspec.Meta(max_length=LEND_KEYS_MAX * KEY_BYTES)]
    traceparent: _Traceparent = ""
    needs_polls: bool = True


class LentChunk(msgspec.Struct, frozen=True, array_like=True):
    """One chunk that is leased.

    Args:
        index: of its key in the call.
        lease: names the lease, to read and to release it.
        offset: of its first byte in the holder's arena.
        digest: xxh3_128 of its bytes, by the holder.
    """

    index: _Number
    lease: _Number
    offset: _Number
    digest: _Digest


class Lent(Body, frozen=True):
    """The answer to ``Lend``.

    Args:
        chunks: what is leased.
        num_capped: chunks that are here and were not leased, as the caller has its share.
        num_later: chunks that are here and were not leased, as their digests are being taken.
    """

    chunks: Annotated[tuple[LentChunk, ...], msgspec.Meta(max_length=LEND_KEYS_MAX)]
    num_capped: _Number
    num_later: _Number = 0


class AskHeld(Body, frozen=True):
    """How far is the store of these chunks, which an engine of the callee has handed over?

    Args:
        tier_keys, chunk_keys: of the same chunks, joined; at most ``HELD_KEYS_MAX``.
    """

    tier_keys: Annotated[bytes, msgspec.Meta(max_length=HELD_KEYS_MAX * KEY_BYTES)]
    chunk_keys: Annotated[bytes, msgspec.Meta(max_length=HELD_KEYS_MAX * KEY_BYTES)]


class Held(Body, frozen=True):
    """The answer to ``AskHeld``. ``states``: one of ``HELD_STATES`` a chunk, as its number there."""

    states: Annotated[bytes, msgspec.Meta(max_length=HELD_KEYS_MAX)]


class Read(Body, frozen=True):
    """Send the bytes of a chunk over this connection; any connection of the same life of the caller leases it."""

    lease: _Number


class ReadBegins(Body, frozen=True):
    """The answer to ``Read``: so many bytes follow the frame."""

    num_bytes: _Number


class Return(Body, frozen=True):
    """The leases are needed no more. It has no answer."""

    leases: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=LEND_KEYS_MAX)]


class Noted(Body, frozen=True):
    """Done, and there is nothing to tell."""


class Failure(Body, frozen=True):
    """The call is refused and changed nothing. ``code``: a key of ``ERROR_CODES``."""

    code: _Name
    message: _Text
    remedy: _Text | None = None


Message = (
    Hello
    | Challenge
    | Proof
    | Accepted
    | Join
    | Joined
    | Listing
    | Events
    | Resync
    | Heartbeat
    | Locate
    | Located
    | AskNixl
    | NixlInfo
    | Lend
    | Lent
    | AskHeld
    | Held
    | Read
    | ReadBegins
    | Return
    | Noted
    | Failure
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """One message. ``id``: chosen by the caller; its answer carries the same."""

    id: _Number
    body: Message


# ---- errors ----------------------------------------------------------------------------------------------------------

ERROR_CODES: Final[dict[str, type[AntiphonError]]] = {
    "peer_refused": errors.PeerRefused,
    "peer_unavailable": errors.PeerUnavailable,
    "peer_timeout": errors.PeerTimeout,
    "stale_handle": errors.StaleHandle,
    "capacity_exceeded": errors.CapacityExceeded,
    "lease_unknown": errors.LeaseUnknown,
    "protocol_error": ProtocolError,
    "peer_error": PeerError,
}
"""The errors that cross the wire. An error of another class travels as ``peer_error``."""


def failure_of(error: AntiphonError) -> Failure:
    """``error`` as an answer."""
    codes = {kind: code for code, kind in ERROR_CODES.items()}
    code = next((codes[kind] for kind in type(error).__mro__ if kind in codes), "peer_error")
    return Failure(code, error.message[:2_000], None if error.remedy is None else error.remedy[:2_000])


def error_of(failure: Failure) -> AntiphonError:
    """The error that ``failure`` carries; a code that is not known here is a ``PeerError``."""
    return ERROR_CODES.get(failure.code, PeerError)(failure.message, remedy=failure.remedy)


# ---- codec -----------------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)


def frame(call_id: int, body: Message) -> bytes:
    """A message as one frame, its length in front.

    Raises:
        ProtocolError: longer than ``FRAME_BYTES_MAX``.
    """
    payload = _encoder.encode(Envelope(call_id, body))
    if len(payload) > FRAME_BYTES_MAX:
        raise ProtocolError(f"a message of {len(payload)} bytes exceeds the limit of {FRAME_BYTES_MAX}")
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def decode(payload: bytes | bytearray | memoryview) -> Envelope:
    """The message in a frame.

    Raises:
        ProtocolError: none of this version.
    """
    try:
        return _envelopes.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame is no message of peer protocol version {PROTOCOL_VERSION}: {error}") from error


def split_keys(joined: bytes) -> list[bytes]:
    """The keys of ``joined``.

    Raises:
        ProtocolError: not a whole number of keys.
    """
    if len(joined) % KEY_BYTES:
        raise ProtocolError(f"keys are {KEY_BYTES} bytes each; {len(joined)} bytes were sent")
    return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]
