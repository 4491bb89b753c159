"""The books of KV on its way to decode engines: what is begun, what waits for which engine, and what each has free.

Owns the bytes in flight of each decode engine, the requests that are held for it, and the two budgets of the pool. What
is admitted before a prefill, and what becomes of an item, is decided in ``admission``.

Always true: the sums are those of the items; an engine that is not of the pool is forgotten with its last item.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import inf

from antiphon.routing.cold import AdmissionOptions, ColdItem, DecodeLoad
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.item_heap import ItemHeap
from antiphon.routing.links import Links, SharedTime


class DecodeBooks:
    """One decode engine. ``Transfers`` alone writes them."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.is_member = False
        """Whether it can be used now."""
        self.in_flight_bytes = 0
        self.num_in_flight = 0
        self.num_large = 0
        """Transfers in flight that had to ask for room."""
        self.free_bytes: int | None = None
        """As last told, less what was begun since, and not below 0."""
        self.held: OrderedDict[ColdItem, None] = OrderedDict()
        """They wait for room, in the order in which their prefills have answered."""
        self.share = SharedTime()
        """Of those transfers that are long enough to be measured."""


class Transfers:
    """The books of a decode pool.

    Args:
        options: what is large, how long a request is held, what a rate is without a measurement.
    """

    def __init__(self, options: AdmissionOptions) -> None:
        self._warm_bytes = options.warm_bytes
        self._sample_min_bytes = options.sample_min_bytes
        self._hold_s = options.hold_s
        self.links = Links(options.rate_bytes_s, options.rate_min_bytes_s, options.sample_min_bytes)
        self._books: dict[Endpoint, DecodeBooks] = {}
        self._num_members = -1
        """-1: the pool is not known yet, and has no budget."""
        self._num_unknown = 0
        """Members whose free KV is not known."""
        self._free_bytes = 0
        """Free KV of the other members together."""
        self._holding: dict[DecodeBooks, None] = {}
        self.holds = ItemHeap()
        """Held items by the end of their wait."""

    # -- the pool ---------------------------------------------------------------------------------------------------

    def set_members(self, endpoints: Iterable[Endpoint]) -> None:
        """The decode engines that can be used now."""
        members = dict.fromkeys(endpoints)
        for endpoint in members:
            self._books_of(endpoint).is_member = True
        for books in list(self._books.values()):
            if books.endpoint not in members:
                books.is_member = False
                books.free_bytes = None
                self._forget_if_idle(books)
        known = [one.free_bytes for one in self._books.values() if one.is_member and one.free_bytes is not None]
        self._num_members = len(members)
        self._num_unknown = len(members) - len(known)
        self._free_bytes = sum(known)

    def set_free(self, endpoint: Endpoint, num_bytes: int | None) -> None:
        """What a decode engine of the pool has free."""
        books = self._books.get(endpoint)
        if books is None or not books.is_member:
            return
        if books.free_bytes is None:
            self._num_unknown -= 1
        else:
            self._free_bytes -= books.free_bytes
        books.free_bytes = num_bytes
        if num_bytes is None:
            self._num_unknown += 1
        else:
            self._free_bytes += num_bytes

    @property
    def rate_budget_bytes(self) -> float:
        """What the pool takes in a third of a lease; infinite where the pool is not known."""
        return inf if self._num_members < 0 else self.links.pool_bytes_s * self._hold_s * self._num_members

    @property
    def free_budget_bytes(self) -> float:
        """What the pool has free; infinite where that is not known of every engine."""
        return inf if self._num_unknown or self._num_members <= 0 else float(self._free_bytes)

    # -- one transfer -----------------------------------------------------------------------------------------------

    def must_wait(self, item: ColdItem, decode: Endpoint) -> bool:
        """Whether a transfer that comes now has to be held: it is large, and others are held or there is no room."""
        if item.pull_bytes < self._warm_bytes:
            return False
        books = self._books_of(decode)
        return bool(books.held) or not self._fits(item, books)

    def hold(self, item: ColdItem, decode: Endpoint) -> None:
        """The item waits for room."""
        books = self._books_of(decode)
        item.decode = decode
        books.held[item] = None
        self._holding[books] = None
        self.holds.push(item, item.held_until_s)

    def unhold(self, item: ColdItem) -> None:
        """It waits no more."""
        assert item.decode is not None
        books = self._books[item.decode]
        del books.held[item]
        if not books.held:
            del self._holding[books]
        self.holds.remove(item)
        self._forget_if_idle(books)

    def released(self) -> ColdItem | None:
        """A held item that there is room for now, or None; of one engine, those that have waited longest."""
        for books in self._holding:
            item = next(iter(books.held))
            if self._fits(item, books):
                return item
        return None

    def begin(self, item: ColdItem, decode: Endpoint, now_s: float) -> None:
        """Its transfer may begin."""
        books = self._books_of(decode)
        item.decode = decode
        item.pull_began_s = now_s
        books.in_flight_bytes += item.pull_bytes
        books.num_in_flight += 1
        books.num_large += item.pull_bytes >= self._warm_bytes
        if item.pull_bytes >= self._sample_min_bytes:
            item.share_began_s = books.share.begin(now_s)
        if books.free_bytes is not None:
            left = max(0, books.free_bytes - item.pull_bytes)
            self._free_bytes -= books.free_bytes - left
            books.free_bytes = left

    def expected_s(self, item: ColdItem) -> float:
        """How long one that begins now takes: all that is in flight there, at the rate of its pair."""
        assert item.decode is not None
        books = self._books[item.decode]
        return books.in_flight_bytes / self.links.bytes_s(item.prefill, item.decode)

    def end(self, item: ColdItem, now_s: float) -> None:
        """It is over, well or not."""
        assert item.decode is not None
        books = self._books[item.decode]
        books.in_flight_bytes -= item.pull_bytes
        books.num_in_flight -= 1
        books.num_large -= item.pull_bytes >= self._warm_bytes
        if item.pull_bytes >= self._sample_min_bytes:
            books.share.end(now_s)
        self._forget_if_idle(books)

    def measured(self, item: ColdItem, num_bytes: int, seconds: float, now_s: float) -> None:
        """A transfer that runs still has moved all its bytes: of its time counts what it had the engine for itself."""
        assert item.decode is not None
        if item.prefill is None:
            return
        wall_s = now_s - item.pull_began_s
        if item.pull_bytes >= self._sample_min_bytes and wall_s > 0:
            own_s = self._books[item.decode].share.advance(now_s) - item.share_began_s
            seconds *= min(1.0, own_s / wall_s)
        self.links.measured(item.prefill, item.decode, num_bytes, seconds)

    def room_bytes(self, prefill: Endpoint | None, decode: Endpoint) -> int:
        """What may be begun to a decode engine now."""
        budget = int(self.links.bytes_s(prefill, decode) * self._hold_s)
        books = self._books.get(decode)
        if books is None:
            return budget
        room = max(0, budget - books.in_flight_bytes)
        return room if books.free_bytes is None else min(room, books.free_bytes)

    # -- what is shown ----------------------------------------------------------------------------------------------

    def loads(self) -> list[DecodeLoad]:
        """One of each decode engine."""
        rows = []
        for endpoint, books in self._books.items():
            rate = self.links.bytes_s(None, endpoint)
            budget = int(rate * self._hold_s)
            rows.append(
                DecodeLoad(endpoint.url, books.in_flight_bytes, budget, len(books.held), books.free_bytes, rate)
            )
        return rows

    def validate(self, held: set[ColdItem], pulling: set[ColdItem]) -> None:
        """Assert the invariants, given the items of either stage."""
        self.links.validate()
        self.holds.validate()
        assert set(self.holds.items()) == held
        members = [books for books in self._books.values() if books.is_member]
        known = [books.free_bytes for books in members if books.free_bytes is not None]
        assert self._free_bytes == sum(known)
        if self._num_members >= 0:
            assert (self._num_members, self._num_unknown) == (len(members), len(members) - len(known))
        assert set(self._holding) == {books for books in self._books.values() if books.held}
        assert {item.decode for item in held | pulling} <= self._books.keys()
        for endpoint, books in self._books.items():
            own = [item for item in pulling if item.decode is endpoint]
            assert books.in_flight_bytes == sum(item.pull_bytes for item in own)
            assert books.num_in_flight == len(own)
            assert books.num_large == sum(item.pull_bytes >= self._warm_bytes for item in own)
            assert books.share.num == sum(item.pull_bytes >= self._sample_min_bytes for item in own)
            assert set(books.held) == {item for item in held if item.decode is endpoint}
            assert all(item.pull_bytes >= self._warm_bytes for item in books.held)
            assert books.free_bytes is None or (books.free_bytes >= 0 and books.is_member)
            assert books.is_member or own or books.held, "an engine that is gone is kept"

    # -- inside -----------------------------------------------------------------------------------------------------

    def _books_of(self, endpoint: Endpoint) -> DecodeBooks:
        books = self._books.get(endpoint)
        if books is None:
            self._books[endpoint] = books = DecodeBooks(endpoint)
        return books

    def _fits(self, item: ColdItem, books: DecodeBooks) -> bool:
        if books.free_bytes is not None and item.pull_bytes > books.free_bytes:
            return False
        if not books.num_large:
            return True
        budget = self.links.bytes_s(item.prefill, books.endpoint) * self._hold_s
        return books.in_flight_bytes + item.pull_bytes <= budget

    def _forget_if_idle(self, books: DecodeBooks) -> None:
        if not books.is_member and not books.num_in_flight and not books.held:
            del self._books[books.endpoint]
