"""The KV events that vLLM publishes, as the router reads them.

A message is three frames: the topic, the number of the batch (8 bytes, big-endian, from 0 in each life of the engine),
and the batch in msgpack, ``[time, [event, ...], data_parallel_rank]``. An event is a map with its kind in ``type``;
engines that send it as an array, with its kind first, are understood too. Fields that are not known here are ignored,
and further fields of an array likewise.

Always true: an event that cannot be read costs that event, never the batch; it is counted. What is read has the types
and the limits that are written here.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from antiphon.core.errors import ProtocolError

BATCH_BYTES_MAX: Final = 16_777_216
"""A prompt of a million tokens, announced at once, takes some 6 MB."""
EVENTS_MAX: Final = 100_000
BLOCK_TOKENS_MAX: Final = 1_048_576
NAME_CHARS_MAX: Final = 1_000

SEQUENCE_BYTES: Final = 8
END_OF_REPLAY: Final = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)

_Hash = int | Annotated[bytes, msgspec.Meta(max_length=256)]
_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
_Token = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_BlockSize = Annotated[int, msgspec.Meta(ge=1, le=BLOCK_TOKENS_MAX)]
_Group = Annotated[int, msgspec.Meta(ge=0, le=1_000)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=65_535)]


class BlockStored(msgspec.Struct, tag="BlockStored", gc=False):
    """The engine has cached full blocks; ``token_ids`` are those of all of them."""

    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[_Token]
    block_size: _BlockSize
    lora_id: int | None = None
    medium: _Name | None = None
    lora_name: _Name | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: _Group | None = None
    kv_cache_spec_kind: _Name | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", gc=False):
    """The engine has given blocks to something else."""

    block_hashes: list[_Hash]
    medium: _Name | None = None
    group_idx: _Group | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """The engine has forgotten every block."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[_Token]
    block_size: _BlockSize
    lora_id: int | None = None
    medium: _Name | None = None
    lora_name: _Name | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: _Group | None = None
    kv_cache_spec_kind: _Name | None = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: list[_Hash]
    medium: _Name | None = None
    group_idx: _Group | None = None


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    """One batch.

    Args:
        stamp_s: the engine's clock when it made the batch.
        events: in the order in which they happened.
        rank: the data-parallel rank that it comes from.
    """

    stamp_s: Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
    events: Annotated[list[Event], msgspec.Meta(max_length=EVENTS_MAX)]
    rank: _Rank | None = None


class _RawBatch(msgspec.Struct, array_like=True):
    stamp_s: Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_MAX)]
    rank: _Rank | None = None


_batches = msgspec.msgpack.Decoder(EventBatch)
_raw_batches = msgspec.msgpack.Decoder(_RawBatch)
_maps: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_arrays: msgspec.msgpack.Decoder[_StoredArray | _RemovedArray | _ClearedArray] = msgspec.msgpack.Decoder(
    _StoredArray | _RemovedArray | _ClearedArray
)
_encoder = msgspec.msgpack.Encoder()

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_batch(data: bytes | memoryview) -> tuple[EventBatch, int]:
    """The batch in ``data``, and how many of its events were left out because they are not known or cannot be read.

    Raises:
        ProtocolError: it is no batch, or larger than the limits.
    """
    if len(data) > BATCH_BYTES_MAX:
        raise ProtocolError(f"a batch of KV events has {len(data)} bytes, more than {BATCH_BYTES_MAX}")
    try:
        return _batches.decode(data), 0
    except _UNREADABLE:
        pass  # find out whether the batch or an event is wrong
    try:
        raw = _raw_batches.decode(data)
    except _UNREADABLE as error:
        raise ProtocolError(f"this is no batch of KV events: {error}") from error
    events = [event for event in map(_event, raw.events) if event is not None]
    return EventBatch(raw.stamp_s, events, raw.rank), len(raw.events) - len(events)


def encode_batch(batch: EventBatch) -> bytes:
    """``batch`` as an engine sends it."""
    return _encoder.encode(batch)


def decode_sequence(frame: bytes) -> int:
    """The number of a batch.

    Raises:
        ProtocolError: it is none.
    """
    if len(frame) != SEQUENCE_BYTES or frame >= b"\x80":
        raise ProtocolError("the number of a batch of KV events must have 8 bytes, and be less than 2**63")
    return int.from_bytes(frame, "big")


def _event(raw: msgspec.Raw) -> Event | None:
    try:
        return _maps.decode(raw)
    except _UNREADABLE:
        pass
    try:
        found = _arrays.decode(raw)
    except _UNREADABLE:
        return None
    if isinstance(found, _ClearedArray):
        return AllBlocksCleared()
    if isinstance(found, _RemovedArray):
        return BlockRemoved(found.block_hashes, found.medium, found.group_idx)
    return BlockStored(
        found.block_hashes,
        found.parent_block_hash,
        found.token_ids,
        found.block_size,
        found.lora_id,
        found.medium,
        found.lora_name,
        found.extra_keys,
        found.group_idx,
        found.kv_cache_spec_kind,
    )
