"""The gate: before an engine may load, random blocks are stored, loaded into other blocks, and compared bit for bit.

It runs once, when the KV blocks exist and nothing uses them. It goes the way that every store and load goes: reserve,
copy, commit, lookup, copy, release. Without a server, and where one fails on the way, it runs on memory of its own,
which proves the copies; what a server adds is proven by the server's own probe. The blocks get their former bytes back.

A region is read only while it is reserved or leased: at any other time another engine may be given it. Whatever happens
on the way, the reservation is given back where it was not committed, and the lease is released.

The pattern is random, so that no token, head or layer is like another. Where bytes are opaque that is all; where slabs
are head-major, what a store has written is also held against the order that the format asks for, as the engine's own
view of its blocks tells it: engines that share chunks must mean the same by them.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass

from antiphon.client.session import Session
from antiphon.connector.copier import Copier
from antiphon.connector.copy import read_bytes
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


def run_gate(copier: Copier, session: Session | None, slab: int) -> GateResult:
    """Runs the gate for a worker that writes ``slab`` of every chunk.

    Args:
        session: the connection to the server; None where there is none.
    """
    number = copier.blocks_per_chunk
    if copier.num_blocks < 2 * number + 1:
        return GateResult(False, f"{copier.num_blocks} KV blocks are too few to prove a copy of {number}")
    source = list(range(NULL_BLOCK + 1, number + 1))
    target = list(range(number + 1, 2 * number + 1))
    former = [copier.read_block(block) for block in (*source, *target)]
    try:
        for block in source:
            copier.write_block(block, [os.urandom(num_bytes) for num_bytes in copier.block_bytes])
        way = _through_server(copier, session, slab, source, target) if session is not None else None
        way = way or _through_own_memory(copier, source, target)
        for one, other in zip(source, target, strict=True):
            if copier.read_block(one) != copier.read_block(other):
                return GateResult(False, f"{way}: block {other} differs from block {one}, of which it is a copy")
    except _WrongOrder as error:
        return GateResult(False, str(error))
    except AntiphonError as error:
        return GateResult(False, f"it could not be run: {error}")
    finally:
        for block, content in zip((*source, *target), former, strict=True):
            copier.write_block(block, content)
    return GateResult(True, f"{way}: {number} blocks of {len(copier.block_bytes)} layers came back bit for bit")


class _WrongOrder(Exception):
    """A slab is not in the order of the format."""


def _store(copier: Copier, address: int, source: list[int]) -> None:
    copier.store(address, source)
    expected = copier.expected_slab(source)
    if expected is not None and read_bytes(address, copier.slab_bytes) != expected:
        raise _WrongOrder("a stored slab is not [kv_head][layer][token][k|v]")


def _through_own_memory(copier: Copier, source: list[int], target: list[int]) -> str:
    owner = ArenaOwner.create(copier.slab_bytes, "gate", "gate")
    try:
        _store(copier, owner.mapping.address, source)
        copier.load(owner.mapping.address, 0, target)
    finally:
        owner.close()
    return "without a server"


def _through_server(copier: Copier, session: Session, slab: int, source: list[int], target: list[int]) -> str | None:
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
    copier: Copier, session: Session, slab: int, region: calls.Region, source: list[int], target: list[int]
) -> None:
    address = session.address_of(region) + slab * copier.slab_bytes
    _store(copier, address, source)
    copier.load(address, 0, target)


def _through_lease(copier: Copier, session: Session, slab: int, lookup: calls.Lookup, target: list[int]) -> None:
    found = session.call(lookup)
    assert isinstance(found, calls.Found)
    if found.lease is None:
        return  # evicted or cleared by others since; the way through the reservation stands
    try:
        for block in target:
            copier.write_block(block, [bytes(num_bytes) for num_bytes in copier.block_bytes])
        copier.load(session.address_of(found.regions[0]) + slab * copier.slab_bytes, 0, target)
    finally:
        session.call(calls.Release(TENANT, found.lease))
