"""KV events as engines of two versions send them, and as nobody should."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ProtocolError
from antiphon.protocol.kv_events import (
    BATCH_BYTES_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    decode_sequence,
    encode_batch,
)

STORED = {"block_hashes": [1], "parent_block_hash": None, "token_ids": [5, 6], "block_size": 2}
OLD = STORED | {"type": "BlockStored", "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None]}
NEW = OLD | {"group_idx": 0, "kv_cache_spec_kind": "full_attention", "locality": "LOCAL", "session_id": "s"}


def batch_of(*events: Any, rank: Any = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


@pytest.mark.parametrize(
    "event",
    [
        OLD,
        NEW,
        ["BlockStored", [1], None, [5, 6], 2, None, "GPU", None, [None], 0, "full_attention", None, None, None, "more"],
        ["BlockStored", [1], None, [5, 6], 2, None],
    ],
)
def test_a_stored_block_in_every_form(event: Any) -> None:
    batch, num_unknown = decode_batch(batch_of(event))
    assert num_unknown == 0
    assert batch.stamp_s == 1.5
    (stored,) = batch.events
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash, stored.token_ids, stored.block_size) == (
        [1],
        None,
        [5, 6],
        2,
    )


def test_removed_and_cleared_in_every_form() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [b"x" * 32, 2**64 - 1], "medium": "GPU", "ownership": "me"}
    array = ["BlockRemoved", [b"x" * 32, 2**64 - 1], "GPU", None, "LOCAL"]
    for events in ([removed, {"type": "AllBlocksCleared"}], [array, ["AllBlocksCleared"]]):
        batch, num_unknown = decode_batch(batch_of(*events))
        assert num_unknown == 0
        assert batch.events == [BlockRemoved([b"x" * 32, 2**64 - 1], "GPU"), AllBlocksCleared()]


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "SomethingElse"},
        {"type": "BlockStored"},
        ["SomethingElse"],
        STORED | {"type": "BlockStored", "block_size": 0},
        STORED | {"type": "BlockStored", "token_ids": [-1, 2]},
        STORED | {"type": "BlockStored", "token_ids": [2**63, 2]},
        STORED | {"type": "BlockStored", "block_hashes": [b"x" * 257]},
        STORED | {"type": "BlockStored", "lora_name": "x" * 1001},
        None,
        3,
    ],
)
def test_an_event_that_cannot_be_read_costs_itself_alone(bad: Any) -> None:
    batch, num_unknown = decode_batch(batch_of(OLD, bad, {"type": "AllBlocksCleared"}))
    assert num_unknown == 1
    assert [type(event) for event in batch.events] == [BlockStored, AllBlocksCleared]


def test_further_fields_of_a_batch_are_ignored_and_the_rank_may_be_missing() -> None:
    batch, _ = decode_batch(msgspec.msgpack.encode([1.5, [], 3, "more"]))
    assert batch.rank == 3
    assert decode_batch(msgspec.msgpack.encode([1.5, []]))[0].rank is None
    assert decode_batch(msgspec.msgpack.encode([1, []]))[0].stamp_s == 1.0


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", batch_of(rank=-1), msgspec.msgpack.encode([float("nan"), []])])
def test_what_is_no_batch_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_batch(data)


def test_a_batch_that_is_too_large_is_refused() -> None:
    with pytest.raises(ProtocolError, match="more than"):
        decode_batch(bytes(BATCH_BYTES_MAX + 1))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_batch_or_refused(data: bytes) -> None:
    try:
        batch, _ = decode_batch(data)
    except ProtocolError:
        return
    assert isinstance(batch, EventBatch)


def test_a_batch_survives_the_wire() -> None:
    batch = EventBatch(2.5, [BlockStored([1], None, [5, 6], 2, extra_keys=[["salt"]]), AllBlocksCleared()], 1)
    assert decode_batch(encode_batch(batch)) == (batch, 0)


def test_numbers_of_batches() -> None:
    assert decode_sequence((7).to_bytes(8, "big")) == 7
    for frame in (b"", b"1234567", b"\xff" * 8, bytes(9)):
        with pytest.raises(ProtocolError):
            decode_sequence(frame)
