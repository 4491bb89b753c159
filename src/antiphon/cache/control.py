"""What an operator asks of the cache: forget chunks, keep a prefix, set a tenant's quota.

Each call is whole: it is refused with a typed error and changes nothing, or does what its answer says. None of them is
on the way of a lookup; a clear and a tenant's first quota look at every chunk once.
"""

from __future__ import annotations

import math

from antiphon.cache import room
from antiphon.cache.books import Books
from antiphon.cache.effects import Cleared, Pinned, QuotaSet, Removal, Unpinned
from antiphon.cache.events import Clear, Pin, SetQuota, Unpin
from antiphon.cache.index import Chunk
from antiphon.cache.states import ChunkState
from antiphon.cache.tenants import OVERFLOW_TENANT, Account
from antiphon.core.chunks import ChunkKey
from antiphon.core.errors import CapacityExceeded, ChunksPinned, ChunkUnknown, ProtocolError


def clear(books: Books, event: Clear) -> Cleared:
    """Answers ``Clear``.

    Raises:
        ChunksPinned: a chunk of the selection is pinned, and pinned ones are to be spared.
    """
    # A pin is of one namespace, so that a selection has all of its chunks or none.
    pins = [
        pin
        for pin in books.pins.pins.values()
        if event.tenant in (None, pin.chunks[0].binding.tenant) and event.model in (None, pin.chunks[0].binding.model)
    ]
    if pins and event.spares_pinned:
        num_bytes = sum({chunk: chunk.num_bytes for pin in pins for chunk in pin.chunks}.values())
        raise ChunksPinned(
            f"{len(pins)} pins keep {num_bytes} bytes of what would be cleared",
            remedy="unpin them, or clear with --pinned",
        )
    for pin in pins:
        books.end_pin(pin)
    if books.tiers is not None:
        books.tiers.clear(event.tenant, event.model)
    free_before = books.arena.free_bytes
    num_chunks = num_bytes = 0
    for chunk in books.index.selected(event.tenant, event.model):
        num_chunks += 1
        num_bytes += chunk.num_bytes
        if chunk.is_idle:
            books.drop(chunk, Removal.CLEARED)
        else:
            books.retire(chunk, Removal.CLEARED)
    freed_bytes = books.arena.free_bytes - free_before
    return Cleared(num_chunks, freed_bytes, num_bytes - freed_bytes, len(pins))


# ---- pins ------------------------------------------------------------------------------------------------------------


def pin(books: Books, event: Pin) -> Pinned:
    """Answers ``Pin``. The same piece pinned again is one pin, with the new time.

    Raises:
        ProtocolError: no key, too many, keys that do not follow each other, or a time that is none.
        ChunkUnknown: no piece of the prefix from its first chunk on is in the arena.
        CapacityExceeded: there are as many pins, or pinned bytes, as there may be.
    """
    books.check_keys(event.keys)
    if not event.keys:
        raise ProtocolError("a pin names at least one chunk")
    if event.ttl_s is not None and not (math.isfinite(event.ttl_s) and event.ttl_s > 0):
        raise ProtocolError("the time of a pin is a number of seconds above 0")
    before = _before(books, event.keys[0])
    chunks = (*before, *_piece(books, event.keys))
    pins = books.pins
    earlier = pins.pins.get(chunks[-1].key)
    if earlier is None and len(pins.pins) >= pins.num_pins_max:
        raise CapacityExceeded(
            f"there are {len(pins.pins)} pins, and no more may be", remedy="end one that is not needed"
        )
    added_bytes = pins.added_bytes(chunks)
    if pins.pinned_bytes + added_bytes > pins.num_bytes_max:
        raise CapacityExceeded(
            f"pins keep {pins.pinned_bytes} of the {pins.num_bytes_max} bytes that they may, and {added_bytes} more do "
            "not fit",
            remedy="end a pin that is not needed, pin a shorter prefix, or make the arena larger",
        )
    if earlier is not None:
        pins.remove(earlier)
    made = pins.add(chunks, books.now_s, None if event.ttl_s is None else books.now_s + event.ttl_s)
    for chunk in chunks:
        books.recount(chunk)
    num_named = len(before) + len(event.keys)
    return Pinned(made.key, len(chunks), num_named, made.num_bytes, pins.pinned_bytes, pins.num_bytes_max)


def _before(books: Books, key: ChunkKey) -> list[Chunk]:
    """The chunks of the prefix before the one of ``key``, from the first on."""
    chunk = _readable(books, key)
    if chunk is None:
        raise ChunkUnknown(
            f"no chunk {key.hex()[:16]} is in memory",
            remedy="send a request with the prompt, which stores it, and pin it then",
        )
    before: list[Chunk] = []
    while chunk.parent is not None:
        chunk = _readable(books, chunk.parent)
        if chunk is None:
            raise ChunkUnknown(
                f"chunk {key.hex()[:16]} is in memory, and one before it in its prefix is not: no lookup finds it",
                remedy="send a request with the prompt, which stores what is missing, and pin it then",
            )
        if len(before) >= books.options.keys_per_call_max:
            raise ProtocolError(f"a pin keeps at most {books.options.keys_per_call_max} chunks")
        before.append(chunk)
    before.reverse()
    return before


def _piece(books: Books, keys: tuple[ChunkKey, ...]) -> list[Chunk]:
    """The readable chunks of ``keys`` in one piece from the first on."""
    piece: list[Chunk] = []
    for key in keys:
        chunk = _readable(books, key)
        if chunk is None:
            break
        if piece and chunk.parent != piece[-1].key:
            raise ProtocolError("the keys of a pin are consecutive chunks of one sequence, from the first to the last")
        piece.append(chunk)
    return piece


def _readable(books: Books, key: ChunkKey) -> Chunk | None:
    chunk = books.index.chunks.get(key)
    return chunk if chunk is not None and chunk.state is ChunkState.READABLE else None


def unpin(books: Books, event: Unpin) -> Unpinned:
    """Answers ``Unpin``.

    Raises:
        ChunkUnknown: there is no pin of that name.
    """
    if event.key is None:
        ended = list(books.pins.pins.values())
    else:
        named = books.pins.pins.get(event.key)
        if named is None:
            raise ChunkUnknown(
                f"no pin ends in chunk {event.key.hex()[:16]}", remedy="name a pin by its last chunk, as it is listed"
            )
        ended = [named]
    for each in ended:
        books.end_pin(each)
    return Unpinned(len(ended), books.pins.pinned_bytes)


# ---- quotas ----------------------------------------------------------------------------------------------------------


def set_quota(books: Books, event: SetQuota) -> QuotaSet:
    """Answers ``SetQuota``.

    Raises:
        ProtocolError: a negative quota, or none to take away.
        CapacityExceeded: as many other tenants as may were given a quota.
    """
    tenants = books.tenants
    if event.quota_bytes is not None and event.quota_bytes < 0:
        raise ProtocolError("a quota is a number of bytes, 0 or more")
    if event.tenant == OVERFLOW_TENANT:
        raise ProtocolError(f"{OVERFLOW_TENANT} is no tenant: it has the quota of tenants without one of their own")
    if event.quota_bytes is None and event.tenant not in tenants.quotas:
        raise ProtocolError(f"tenant {event.tenant!r} has no quota of its own", remedy="there is nothing to take away")
    account = tenants.set_quota(event.tenant, event.quota_bytes)
    changed = {account: None}
    for binding in books.index.bindings.values():
        if binding.tenant == event.tenant and binding.account is not account:
            # It was past the bound on accounts until now.
            changed[binding.account] = None
            binding.account.used_bytes -= binding.used_bytes
            account.used_bytes += binding.used_bytes
            binding.account = account
    for each in changed:
        if len(changed) > 1 or (each.quota_bytes is None) == (each in books.quota_orders):
            books.order_by_account(each)
    num_evicted = _shrink(books, account)
    return QuotaSet(account.name, account.quota_bytes, account.used_bytes, num_evicted)


def _shrink(books: Books, account: Account) -> int:
    """Evicts what the account holds beyond its quota, as far as it may go. Returns the number of chunks."""
    account.lowered_from_bytes = 0
    if account.quota_bytes is None:
        return 0
    num_before = books.counters.num_evicted
    room.evict_own(books, account, account.quota_bytes)
    if account.used_bytes > account.quota_bytes:
        account.lowered_from_bytes = account.used_bytes
    return books.counters.num_evicted - num_before
