"""The books of what is lent to peers: each of their connections is an engine without slabs to the cache.

Always true:

- A loan is a lease of the cache. It ends by ``give_back``, or, after the cache's quarantine, by ``detach`` when the
  peer's connection has ended.
- The loans of one peer, over all of its connections, stay within ``cap_bytes``; past it chunks are held back, and
  counted.

It does no input or output and knows no time but that of the cache, so that a simulation can drive it. One thread uses
it: that of the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from antiphon.cache.effects import Attached, Refused, Reply
from antiphon.cache.events import Attach, ConnectionId, Detach, EngineId, Event, LeaseId, Release
from antiphon.cache.lending import HeldState, Loan, Shelf, Wanted, held_state, lend
from antiphon.cache.tier_key import TierKey
from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import LeaseUnknown

PEER_PREFIX: Final = "antiphon.peer:"
"""Begins the names under which peers' connections are attached to the cache."""

FIRST_BORROWER: Final = 1 << 40
"""Connections of peers are numbered from here on, far from those of engines."""

_NO_SLABS: Final = ChunkLayout(1, 1)


@dataclass(slots=True)
class _Borrower:
    peer: str
    loans: dict[int, tuple[Loan, TierKey]] = field(default_factory=dict)


class Lender:
    """Lends the chunks of one cache.

    Args:
        step: gives the cache an event, and returns its reply.
        shelf: what can be lent.
        chunk_size_tokens: of the cache.
        cap_bytes: most bytes that one peer may have leased.
    """

    def __init__(self, step: Callable[[Event], Reply], shelf: Shelf, chunk_size_tokens: int, cap_bytes: int) -> None:
        self._step = step
        self._shelf = shelf
        self._chunk_size_tokens = chunk_size_tokens
        self._borrowers: dict[ConnectionId, _Borrower] = {}
        self._lent_bytes: Counter[str] = Counter()
        self.cap_bytes = cap_bytes
        self.num_lent = 0
        self.num_absent = 0
        self.num_capped = 0

    @property
    def num_loans(self) -> int:
        """Loans that have not been given back."""
        return sum(len(borrower.loans) for borrower in self._borrowers.values())

    def lent_bytes(self) -> dict[str, int]:
        """Bytes that are lent, by peer."""
        return {peer: num_bytes for peer, num_bytes in self._lent_bytes.items() if num_bytes}

    def attach(self, connection: ConnectionId, instance: str, incarnation: str) -> None:
        """A connection of a peer has shown the secret."""
        assert connection not in self._borrowers, "a connection twice"
        # A life of its own for each connection, so that its end ends its leases, whatever others of the peer do.
        engine = EngineId(f"{PEER_PREFIX}{instance}", f"{incarnation}/{connection}")
        reply = self._step(Attach(connection, engine, "", self._chunk_size_tokens, _NO_SLABS, ()))
        assert isinstance(reply, Attached), reply
        self._borrowers[connection] = _Borrower(f"{instance}/{incarnation}")

    def lend(
        self, connection: ConnectionId, keys: Sequence[TierKey], wanted: Wanted
    ) -> tuple[list[tuple[int, Loan]], int]:
        """Leases what is here of ``keys``: for each loan the index of its key, and how many were held back."""
        borrower = self._borrowers[connection]
        self._shelf.follow()
        loans: list[tuple[int, Loan]] = []
        num_capped = 0
        for index, key in enumerate(keys):
            if self._lent_bytes[borrower.peer] + wanted.num_bytes > self.cap_bytes:
                num_capped += key in self._shelf.chunks
                continue
            loan = lend(self._shelf, connection, key, wanted)
            if loan is None:
                self.num_absent += 1
                continue
            borrower.loans[loan.lease] = loan, key
            self._lent_bytes[borrower.peer] += loan.num_bytes
            loans.append((index, loan))
        self.num_lent += len(loans)
        self.num_capped += num_capped
        return loans, num_capped

    def held(self, keys: Sequence[tuple[TierKey, ChunkKey]]) -> list[HeldState]:
        """How far the store of each chunk is."""
        self._shelf.follow()
        return [held_state(self._shelf, tier_key, chunk_key) for tier_key, chunk_key in keys]

    def loan(self, connection: ConnectionId, lease: int) -> Loan:
        """A loan of the connection. Raises LeaseUnknown where it has none of that name."""
        found = self._borrowers[connection].loans.get(lease)
        if found is None:
            raise LeaseUnknown(f"the connection has no lease {lease}", remedy="lend again")
        return found[0]

    def give_back(self, connection: ConnectionId, leases: Sequence[int]) -> int:
        """Ends loans; those that are none are left out. Returns how many."""
        borrower = self._borrowers[connection]
        num_ended = 0
        for lease in leases:
            found = borrower.loans.pop(lease, None)
            if found is None:
                continue
            loan, key = found
            reply = self._step(Release(connection, key.hex(), LeaseId(lease)))
            assert not isinstance(reply, Refused), reply
            self._lent_bytes[borrower.peer] -= loan.num_bytes
            num_ended += 1
        return num_ended

    def detach(self, connection: ConnectionId) -> None:
        """The connection has ended; what was lent to it is free after the quarantine."""
        borrower = self._borrowers.pop(connection, None)
        if borrower is None:
            return
        self._step(Detach(connection))
        self._lent_bytes[borrower.peer] -= sum(loan.num_bytes for loan, _ in borrower.loans.values())
        if not self._lent_bytes[borrower.peer]:
            del self._lent_bytes[borrower.peer]
