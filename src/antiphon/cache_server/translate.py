"""Calls of the wire as events of the cache, and its replies as answers.

Every bound on what a call may carry, beyond the length of its frame, is checked here: what passes is safe to give to
the cache. Nothing here has state.
"""

from __future__ import annotations

from typing import Final

from antiphon.cache import effects, events
from antiphon.cache.arena import RegionHandle
from antiphon.cache.effects import Reply, Verdict
from antiphon.cache.events import ConnectionId, EngineId, Event, LeaseId
from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import ProtocolError
from antiphon.core.namespace import DIGEST_BYTES, NamespaceDigest
from antiphon.protocol import cache as wire

NAME_CHARS_MAX: Final = 512
"""Longest name of an engine, model, tenant or request: they are kept, a request's for as long as its lease."""
ROLE_CHARS_MAX: Final = 200
SLABS_MAX: Final = 4096
"""Slabs of a chunk: every chunk keeps a state for each. Models have at most some hundred KV heads."""

_SECONDS_MAX = 1e12
_REGION_VALUE_MAX = 1 << 62
_GRANT_BYTES = 64  # of one key in the answer to Reserve, without the numbers of the slabs
_SLAB_NUMBER_BYTES = 3
_ANSWER_BYTES_MAX = wire.FRAME_BYTES_MAX - 4096

CacheCall = (
    wire.Attach
    | wire.Lookup
    | wire.Release
    | wire.CopyBegan
    | wire.CopyEnded
    | wire.Reserve
    | wire.Commit
    | wire.Abort
    | wire.Clear
)
"""The calls that the cache answers; the server answers the others itself."""


def check_name(text: str, what: str, max_chars: int = NAME_CHARS_MAX) -> str:
    """``text``, if it is short enough.

    Raises:
        ProtocolError: it is longer.
    """
    if len(text) > max_chars:
        raise ProtocolError(f"{what} has {len(text)} characters, at most {max_chars} are allowed")
    return text


def event_of(body: CacheCall, connection: ConnectionId, num_slabs: int) -> Event:
    """The event that a call means.

    Args:
        connection: the caller's.
        num_slabs: slabs that the caller writes; 0 while it is not attached.

    Raises:
        ProtocolError: a value is out of bounds.
    """
    match body:
        case wire.Lookup():
            request = check_name(body.request, "the request id")
            tenant = check_name(body.tenant, "the tenant")
            waits = (_seconds(body.onboard_s), _seconds(body.prefill_tokens_per_s)) if body.onboard_s else ()
            return events.Lookup(connection, request, _namespace(body.namespace), tenant, _keys(body.keys), *waits)
        case wire.Release():
            return events.Release(connection, check_name(body.request, "the request id"), LeaseId(body.lease))
        case wire.CopyBegan():
            return events.CopyBegan(connection, LeaseId(body.lease))
        case wire.CopyEnded():
            return events.CopyEnded(connection, LeaseId(body.lease))
        case wire.Reserve():
            return _reserve(body, connection, num_slabs)
        case wire.Commit():
            return events.Commit(connection, _regions(body.regions))
        case wire.Abort():
            return events.Abort(connection, _regions(body.regions))
        case wire.Attach():
            return _attach(body, connection)
        case wire.Clear():
            return events.Clear(body.tenant, body.model)


def _seconds(value: float) -> float:
    if not 0 <= value < _SECONDS_MAX:
        raise ProtocolError(f"{value} is no time, and no rate")
    return value


def _keys(joined: bytes) -> tuple[ChunkKey, ...]:
    return tuple(map(ChunkKey, wire.split_keys(joined)))


def _namespace(digest: bytes) -> NamespaceDigest:
    if len(digest) != DIGEST_BYTES:
        raise ProtocolError(f"a namespace has {DIGEST_BYTES} bytes, {len(digest)} were sent")
    return NamespaceDigest(digest)


def _regions(regions: tuple[wire.Region, ...]) -> tuple[RegionHandle, ...]:
    for region in regions:
        if not (0 <= region.offset < _REGION_VALUE_MAX and 0 < region.size < _REGION_VALUE_MAX):
            raise ProtocolError(f"{region} is no region")
    return tuple(RegionHandle(region.offset, region.size, region.generation) for region in regions)


def _reserve(body: wire.Reserve, connection: ConnectionId, num_slabs: int) -> events.Reserve:
    tenant = check_name(body.tenant, "the tenant")
    keys = _keys(body.keys)
    if len(keys) * (_GRANT_BYTES + _SLAB_NUMBER_BYTES * num_slabs) > _ANSWER_BYTES_MAX:
        raise ProtocolError(
            f"the answer for {len(keys)} chunks of {num_slabs} slabs might not fit a frame",
            remedy="reserve fewer chunks in one call",
        )
    if len(set(keys)) != len(keys) or body.parent in keys:
        raise ProtocolError("a chunk is named twice: the keys of one call are consecutive chunks of one sequence")
    parent = body.parent
    if parent is not None and len(parent) != wire.KEY_BYTES:
        raise ProtocolError(f"a chunk key has {wire.KEY_BYTES} bytes, {len(parent)} were sent as the parent")
    key = None if parent is None else ChunkKey(parent)
    return events.Reserve(connection, _namespace(body.namespace), tenant, key, keys)


def _attach(body: wire.Attach, connection: ConnectionId) -> events.Attach:
    engine = check_name(body.engine, "the engine's name")
    incarnation = check_name(body.incarnation, "the engine's incarnation")
    model = check_name(body.model, "the model's name")
    check_name(body.role, "the role", ROLE_CHARS_MAX)
    check_name(body.fingerprint or "", "the layout's fingerprint")
    if not 1 <= body.num_slabs <= SLABS_MAX:
        raise ProtocolError(f"a chunk has from 1 to {SLABS_MAX} slabs, not {body.num_slabs}")
    if not 1 <= body.slab_bytes < _REGION_VALUE_MAX // SLABS_MAX:
        raise ProtocolError(f"a slab has at least one byte, and less than {body.slab_bytes}")
    layout = ChunkLayout(body.num_slabs, body.slab_bytes, body.fingerprint)
    return events.Attach(
        connection, EngineId(engine, incarnation), model, body.chunk_size_tokens, layout, tuple(body.slabs)
    )


def answer_of(reply: Reply) -> wire.Answered:
    """The answer that carries a reply."""
    match reply:
        case effects.Refused():
            return wire.failure_of(reply.error)
        case effects.Found():
            return wire.Found(
                reply.lease,
                tuple(map(_region, reply.regions)),
                reply.num_tokens,
                reply.num_chunks_capped,
                reply.fetched,
            )
        case effects.Onboarding():
            return wire.Onboarding(reply.num_tokens, reply.num_tokens_max, reply.wait_s)
        case effects.LeaseNoted():
            return wire.LeaseNoted(reply.lease, reply.state.value)
        case effects.Reserved():
            return _reserved(reply)
        case effects.Committed():
            return wire.Committed(tuple(outcome.value for outcome in reply.outcomes))
        case effects.Aborted():
            return wire.Aborted(reply.num_regions)
        case effects.Attached():
            return wire.Attached(reply.usable_bytes)
        case effects.Cleared():
            return wire.Cleared(reply.num_chunks, reply.freed_bytes, reply.held_bytes)
        case effects.Pinned() | effects.Unpinned() | effects.QuotaSet():
            raise AssertionError(f"an operator's {type(reply).__name__} is the answer to no call")
        case effects.Detached() | effects.ArenaResized() | effects.Ticked() | effects.TierNoted():
            raise AssertionError(f"no call is answered by {type(reply).__name__}")


def _region(handle: RegionHandle) -> wire.Region:
    return wire.Region(handle.offset_bytes, handle.size_bytes, handle.generation)


def _reserved(reply: effects.Reserved) -> wire.Reserved:
    written = [index for index, verdict in enumerate(reply.verdicts) if verdict is Verdict.WRITE]
    assert len(written) == len(reply.grants), "one grant for each chunk to write"
    grants = tuple(
        wire.Grant(index, _region(grant.region), grant.slabs)
        for index, grant in zip(written, reply.grants, strict=True)
    )
    refusal = None
    if reply.refusal is not None:
        refusal = (wire.failure_of(reply.refusal).code, reply.refusal.message)
    return wire.Reserved(tuple(verdict.value for verdict in reply.verdicts), grants, refusal)
