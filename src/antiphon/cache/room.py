"""Makes room for a chunk: within the tenant's quota, then in the arena. Nothing that is protected goes.

Room is made when it is asked for, by bytes, one chunk at a time: there is no watermark, and nothing that cannot fit in
the end is evicted for in the background.
"""

from __future__ import annotations

from collections import deque

from antiphon.cache.arena import RegionHandle, Span
from antiphon.cache.books import Books
from antiphon.cache.effects import Removal
from antiphon.cache.index import Chunk
from antiphon.cache.tenants import Account
from antiphon.core.errors import CapacityExceeded, QuotaExceeded


def allocate(books: Books, size_bytes: int, account: Account) -> RegionHandle:
    """A region for ``account``, evicting as needed.

    Raises:
        QuotaExceeded: the tenant's own chunks that may go are not enough.
        CapacityExceeded: no contiguous stretch of the arena of that size is free or may be freed.
    """
    size_bytes = books.arena.region_bytes(size_bytes)
    _keep_quota(books, size_bytes, account)
    region = books.arena.allocate(size_bytes)
    if region is None and _evict_coldest(books, size_bytes):
        region = books.arena.allocate(size_bytes)
        assert region is not None, "the evicted chunk left too small a hole"
    if region is None:
        # The search takes time in proportion to the arena: not where the sum already says no.
        is_enough = books.arena.free_bytes + books.idle_bytes >= size_bytes
        window = coldest_window(books, size_bytes) if is_enough else None
        if window is None:
            arena = books.arena
            raise CapacityExceeded(
                f"no room for {size_bytes} bytes: {arena.free_bytes} of {arena.usable_bytes} usable bytes are free, "
                "and leases, pins, writers and quarantines leave no stretch of that size",
                remedy="make the arena larger, end a pin, or wait until requests have ended",
            )
        for chunk in window:
            books.drop(chunk, Removal.EVICTED_IN_WINDOW)
        region = books.arena.allocate(size_bytes)
        assert region is not None, "the evicted window left too small a hole"
    return region


def _keep_quota(books: Books, size_bytes: int, account: Account) -> None:
    """Evicts the tenant's coldest chunks until ``size_bytes`` more fit in its quota."""
    quota_bytes = account.quota_bytes
    if quota_bytes is None:
        return
    if size_bytes <= quota_bytes:
        evict_own(books, account, quota_bytes - size_bytes)
    if account.used_bytes + size_bytes > quota_bytes:
        raise QuotaExceeded(
            f"tenant {account.name!r} holds {account.used_bytes} of its {quota_bytes} bytes, and {size_bytes} more do "
            "not fit",
            remedy="raise the tenant's quota, end a pin of its chunks, or wait until its requests have ended",
        )


def evict_own(books: Books, account: Account, left_bytes: int) -> None:
    """Evicts the coldest chunks of an account with a quota until it holds at most ``left_bytes``, as far as they may
    go."""
    while account.used_bytes > left_bytes:
        order = books.quota_orders.get(account)
        chunk = None if order is None else order.take()
        if chunk is None:
            return
        books.drop(chunk, Removal.EVICTED_FOR_QUOTA)


def _evict_coldest(books: Books, size_bytes: int) -> bool:
    """Evicts the first of the policy's coldest few whose going leaves a large enough hole. Returns whether one did."""
    passed_over: list[Chunk] = []
    found = None
    for _ in range(books.options.victims_tried_max):
        chunk = books.policy.take()
        if chunk is None:
            break
        if books.tiers is not None and books.tiers.saves(chunk):
            continue
        if books.arena.span_if_freed_bytes(chunk.region) >= size_bytes:
            found = chunk
            break
        passed_over.append(chunk)
    for chunk in passed_over:
        books.offer(chunk)
    if found is not None:
        books.drop(found, Removal.EVICTED)
    return found is not None


def coldest_window(books: Books, size_bytes: int) -> list[Chunk] | None:
    """The idle chunks of the stretch of at least ``size_bytes`` whose newest chunk is oldest; None if there is none.

    One pass over the arena. A parent may go before its child here; the child is then out of reach, and ages.
    """
    best: list[Chunk] | None = None
    best_newest = -1
    window: deque[tuple[Span, Chunk | None]] = deque()
    newest: deque[Chunk] = deque()  # chunks of the window, each newer than all after it: the first is the newest
    window_bytes = 0
    for span in books.arena.spans():
        chunk = books.chunk_at[span.offset_bytes] if span.region is not None else None
        if chunk is not None and not chunk.is_idle:
            window.clear()
            newest.clear()
            window_bytes = 0
            continue
        window.append((span, chunk))
        window_bytes += span.size_bytes
        if chunk is not None:
            while newest and newest[-1].last_used <= chunk.last_used:
                newest.pop()
            newest.append(chunk)
        while window_bytes - window[0][0].size_bytes >= size_bytes:
            first_span, first = window.popleft()
            window_bytes -= first_span.size_bytes
            if first is not None and newest[0] is first:
                newest.popleft()
        if window_bytes >= size_bytes:
            assert newest, "a hole of that size would have been allocated"
            if best is None or newest[0].last_used < best_newest:
                best = [member for _, member in window if member is not None]
                best_newest = newest[0].last_used
    return best
