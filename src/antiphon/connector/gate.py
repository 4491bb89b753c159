"""The gate: before an engine may load, random blocks are stored, loaded into other blocks, and compared bit for bit.

It runs once, when the KV blocks exist and nothing uses them. It goes the way that every store and load goes: reserve,
copy, commit, lookup, copy, release. Without a server, and where one fails on the way, it runs on memory of its own,
which proves the copies; what a server adds is proven by the server's own probe. The blocks get their former bytes back.

A region is read only while it is reserved or leased: at any other time another engine may be given it. Whatever happens
on the way, the reservation is given back where it was not committed, and the lease is released.

Here bytes are opaque, so the pattern is random; it cannot tell one token or head from another, and does not need to.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass

from antiphon.client.session import Session
from antiphon.connector.copy import BlockCopier, read_bytes, write_bytes
from antiphon.core.errors import AntiphonError
from antiphon.protocol import cache as calls
from antiphon.storage.arena import ArenaOwner

log = logging.getLogger("antiphon.connector")

TENANT = calls.GATE_TENANT

NULL_BLOCK = 0
"""vLLM keeps this block for padding; it is left alone."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """What the gate found. ``detail``: a sentence for people."""

    has_passed: bool
    detail: str


def run_gate(copier: BlockCopier, session: Session | None, slab: int) -> GateResult:
    """Runs the gate for a worker that writes ``slab`` of every chunk.

    Args:
        session: the connection to the server; None where there is none.
    """
    number = copier.blocks_per_chunk
    if copier.num_blocks < 2 * number + 1:
        return GateResult(False, f"{copier.num_blocks} KV blocks are too few to prove a copy of {number}")
    source = list(range(NULL_BLOCK + 1, number + 1))
    target = list(range(number + 1, 2 * number + 1))
    former = [_read(copier, block) for block in (*source, *target)]
    try:
        for block in source:
            _write(copier, block, [os.urandom(layer.block_bytes) for layer in copier.layers])
        way = _through_server(copier, session, slab, source, target) if session is not None else None
        way = way or _through_own_memory(copier, source, target)
        for one, other in zip(source, target, strict=True):
            if _read(copier, one) != _read(copier, other):
                return GateResult(False, f"{way}: block {other} differs from block {one}, of which it is a copy")
    except AntiphonError as error:
        return GateResult(False, f"it could not be run: {error}")
    finally:
        for block, content in zip((*source, *target), former, strict=True):
            _write(copier, block, content)
    return GateResult(True, f"{way}: {number} blocks of {len(copier.layers)} layers came back bit for bit")


def _through_own_memory(copier: BlockCopier, source: list[int], target: list[int]) -> str:
    owner = ArenaOwner.create(copier.slab_bytes, "gate", "gate")
    try:
        copier.store(owner.mapping.address, source)
        copier.load(owner.mapping.address, 0, target)
    finally:
        owner.close()
    return "without a server"


def _through_server(
    copier: BlockCopier, session: Session, slab: int, source: list[int], target: list[int]
) -> str | None:
    """Which way it went; None where the server could not be used: an engine starts without one too."""
    namespace = hashlib.sha256(b"antiphon.gate" + os.urandom(16)).digest()
    key = hashlib.sha256(namespace).digest()
    try:
        reserved = session.call(calls.Reserve(namespace, TENANT, None, key))
        assert isinstance(reserved, calls.Reserved)
        if not reserved.grants:
            log.info("the gate runs without the cache server, which has no room: %s", reserved.refusal)
            return None
        region = reserved.grants[0].region
        is_committed = False
        try:
            _through_reservation(copier, session, slab, region, source, target)
            committed = session.call(calls.Commit((region,)))
            is_committed = True
        finally:
            if not is_committed:  # a commit that was done and not answered makes this one fail, and nobody waits for it
                session.give_back(calls.Abort((region,)))
        assert isinstance(committed, calls.Committed)
        if committed.outcomes[0] == "readable":  # not with several ranks: each stores a slab of a chunk of its own
            _through_lease(copier, session, slab, calls.Lookup(TENANT, namespace, TENANT, key), target)
        session.call(calls.Clear(tenant=TENANT))
    except AntiphonError as error:
        log.warning("the gate runs without the cache server, which failed on the way: %s", error)
        return None
    return f"through {session.instance}"


def _through_reservation(
    copier: BlockCopier, session: Session, slab: int, region: calls.Region, source: list[int], target: list[int]
) -> None:
    address = session.address_of(region) + slab * copier.slab_bytes
    copier.store(address, source)
    copier.load(address, 0, target)


def _through_lease(copier: BlockCopier, session: Session, slab: int, lookup: calls.Lookup, target: list[int]) -> None:
    found = session.call(lookup)
    assert isinstance(found, calls.Found)
    if found.lease is None:
        return  # evicted or cleared by others since; the way through the reservation stands
    try:
        for block in target:
            _write(copier, block, [bytes(layer.block_bytes) for layer in copier.layers])
        copier.load(session.address_of(found.regions[0]) + slab * copier.slab_bytes, 0, target)
    finally:
        session.call(calls.Release(TENANT, found.lease))


def _read(copier: BlockCopier, block: int) -> list[bytes]:
    return [read_bytes(layer.address + block * layer.block_bytes, layer.block_bytes) for layer in copier.layers]


def _write(copier: BlockCopier, block: int, content: list[bytes]) -> None:
    for layer, data in zip(copier.layers, content, strict=True):
        write_bytes(layer.address + block * layer.block_bytes, data)
