"""Cold-transfer admission: how many large cold prompts are computed at once, and how many bytes of KV are under way to
each decode engine. The rest waits here, before anything is sent, where it costs no engine anything.

Owns the queue before the prefill, and where each request is in what follows; ``lane`` has the prefill engines,
``transfers`` the books of bytes, ``links`` the rates. It sends nothing and picks no engine: it says which prefill
engines to pass over (:meth:`ColdAdmission.avoid_for`).

What is decided:

- A request with fewer than ``warm_bytes`` uncached bytes is **warm** and never waits before its prefill.
- The others are **cold**. They are kept to a **lane** of the prefill engines, ``cold_per_engine`` on each at once.
- A cold request is admitted only if the KV of all cold ones, admitted and not pulled yet, is no more than the decode
  pool takes in a third of a lease at its measured rate, and what is not begun yet fits its free KV. Where no cold
  request is admitted, the next one is, whatever the budget says: so the queue always moves.
- The queue goes by ``order``: the time of the offer plus a penalty of 0 to ``ageing_s`` that grows with the uncached
  bytes. So nearly-warm requests go first, and **no request is passed by one that was offered ``ageing_s`` or more after
  it**: the later one's order is at least its offer, and the earlier one's is no more than that. Nothing passes the
  first of the queue because the first is large and does not fit.
- A request that has waited ``queue_s`` is refused with 503; one that finds ``queue_max`` requests or
  ``queue_max_bytes`` of bodies waiting, with 429. Both say when to come back: what waits, over the rate at which the
  queue drains.
- When its prefill has answered, a transfer of at least ``warm_bytes`` begins only while the bytes in flight to its
  decode engine, with it, are at most the rate of the pair times a third of the lease (or no other such transfer is in
  flight there), and it fits the free KV of that engine. It waits in turn, at most a third of the lease: then it goes
  all the same, since its blocks would be lost. The rest of the lease is for the transfer.

How a shell drives it, by the events and commands of ``life``; an item is made for each request of the path ``pd``:

- Before ``Received``: :meth:`offer`. ``Admit``: the event ``Received``, now. ``Wait``: the request is in a stage
  *waiting* before *received*, where it holds its body and no engine; a client that leaves ends it. ``Refuse``: the
  answer.
- After every call that ends something (``prefill_answered``, ``pulled``, ``leave``, ``free_kv``, a change of a pool)
  and when the clock reaches ``due_s``: :meth:`tick`. For each item of its result, ``item.answer`` says what now: one
  that was waiting begins or is refused, one that was held is sent on.
- Before a prefill engine is picked: :meth:`avoid_for`. If nothing else can be used, these can: they are a wish.
- At each ``ConnectPrefill``: :meth:`prefill_chosen`, on a retry or a fresh prefill too.
- ``PrefillAnswered`` with a handle, and at each ``ConnectDecode`` with one: :meth:`prefill_answered`. ``Admit``:
  connect. ``Wait``: the request is in a stage *holding* between *prefilling* and *connecting_decode*, until
  :meth:`tick` names it, at the latest at ``until_s``. A client that leaves changes nothing there: the KV is pulled, and
  freed, when its turn has come.
- ``FirstByte`` of the decode engine, or ``StreamEnded`` without one: :meth:`pulled`, with the seconds since the decode
  request was sent. The item is gone then: the answer itself is of no concern here. The end of an answer that is no
  stream says nothing of its transfer: such an item is not ``is_told``, and goes when what was in flight as it began
  should have been moved.
- ``Finish``, and when the path turns ``local``: :meth:`leave`, on every way out; again does no harm.
- A pool has changed: :meth:`set_prefills`, :meth:`set_decodes`. An engine has restarted or is gone: :meth:`forget`. An
  engine's metrics have been read: :meth:`free_kv`; with None where they could not be.

Where the KV bytes of a token are not known, every request is admitted at once, and the statistics say so. With a spec
they are ``ModelFacts.kv_token_bytes(dtype, kv_cache_dtype)`` (``config.facts``); else they come from an option.

With n requests waiting, a call takes O(log n). ``tick`` adds O(1) for each decode engine that requests are held for;
``avoid_for`` of a cold request, and a change of a pool or of the lane, take O(engines). Times come from one clock that
does not go back.

Invariants: :meth:`ColdAdmission.validate`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from math import ceil, inf
from typing import Final

from antiphon.routing.cold import (
    AdmissionOptions,
    AdmissionStatistics,
    Admit,
    Answer,
    ColdItem,
    ColdStage,
    RefusalCode,
    Refuse,
    Wait,
)
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.item_heap import ItemHeap
from antiphon.routing.lane import PrefillLane
from antiphon.routing.links import Rate
from antiphon.routing.transfers import Transfers

RETRY_AFTER_MAX_S: Final = 120
"""A client that is told more does not come back."""

_GONE: Final = ColdStage.GONE
_HELD: Final = ColdStage.HELD
_NEW: Final = ColdStage.NEW
_PREFILLING: Final = ColdStage.PREFILLING
_PULLING: Final = ColdStage.PULLING
_WAITING: Final = ColdStage.WAITING


class ColdAdmission:
    """The queue of one router.

    Args:
        options: bounds.
    """

    def __init__(self, options: AdmissionOptions) -> None:
        self._options = options
        self._token_bytes = options.kv_bytes_per_token
        self._warm_bytes = options.warm_bytes
        self._admit_answer = Admit()
        self._lane = PrefillLane(options)
        self._transfers = Transfers(options)
        self.counts: Counter[str] = Counter()
        """What was decided, by name: see ``AdmissionStatistics``."""
        self._items: set[ColdItem] = set()
        """Every item that is neither new nor gone."""
        self._queue = ItemHeap()
        self._untold = ItemHeap()
        """Transfers whose end is not told, by when it is expected."""
        self._waiting: OrderedDict[ColdItem, None] = OrderedDict()
        """The items of the queue in the order of their offers, which is that of their deadlines."""
        self._waiting_bytes = 0
        self._body_bytes = 0
        self._drain = Rate()
        self._moved_s = 0.0
        """When the queue last moved, or began."""
        self._num_cold = 0
        """Cold requests in the stage PREFILLING."""
        self._num_committed = 0
        """Cold requests that are admitted and not pulled yet."""
        self._committed_bytes = 0
        self._unbegun_bytes = 0
        """The part of it that is not begun."""

    # -- the pools --------------------------------------------------------------------------------------------------

    def set_prefills(self, endpoints: Iterable[Endpoint]) -> None:
        """The prefill engines that can be used now, in an order that stays the same while they do. O(engines)."""
        self._lane.set_members(endpoints)

    def set_decodes(self, endpoints: Iterable[Endpoint]) -> None:
        """The decode engines that can be used now; until it is called, the pool has no budget. O(engines)."""
        self._transfers.set_members(endpoints)

    def forget(self, endpoint: Endpoint) -> None:
        """The engine has restarted or is gone: its rates and its free KV are not known any more. O(pairs)."""
        self._transfers.links.forget(endpoint)
        self._transfers.set_free(endpoint, None)

    def free_kv(self, endpoint: Endpoint, num_bytes: int | None) -> None:
        """KV memory that a decode engine says is free; what is begun after that is taken off it. None: not known, or
        not any more. Of an engine that is not of the pool it is of no concern."""
        assert num_bytes is None or num_bytes >= 0
        self._transfers.set_free(endpoint, num_bytes)

    # -- before the prefill -----------------------------------------------------------------------------------------

    def offer(self, item: ColdItem, now_s: float) -> Answer:
        """A request has come. Once for each item."""
        assert item.stage is _NEW, "an item is offered twice"
        item.offered_s = now_s
        item.uncached_bytes = item.num_uncached_tokens * self._token_bytes
        item.pull_bytes = item.num_pull_tokens * self._token_bytes
        item.is_cold = item.uncached_bytes >= self._warm_bytes
        if not item.is_cold:
            return self._admit(item, "admitted_warm" if self._token_bytes else "admitted_off", now_s)
        options = self._options
        self._lane.look(now_s)
        item.order = now_s + options.ageing_s * min(1.0, item.uncached_bytes / options.ageing_bytes)
        first = self._queue.first()
        if (first is None or item.order < first.order) and self._has_room(item):
            return self._admit(item, "admitted_at_once", now_s)
        body_bytes = self._body_bytes + item.num_body_bytes
        if len(self._waiting) >= options.queue_max or body_bytes > options.queue_max_bytes:
            return self._refuse(item, 429, "cold_queue_full", now_s)
        if not self._waiting:
            self._moved_s = now_s
        self._items.add(item)
        item.stage = _WAITING
        self._queue.push(item, item.order)
        self._waiting[item] = None
        self._waiting_bytes += item.uncached_bytes
        self._body_bytes = body_bytes
        item.answer = answer = Wait(now_s + options.queue_s)
        return answer

    def tick(self, now_s: float) -> list[ColdItem]:
        """What may go on now, and what has waited too long: ``item.answer`` is ``Admit`` or ``Refuse``, never ``Wait``.

        One in the stage PULLING was held, one in PREFILLING was waiting, one that is GONE is refused.
        """
        decided: list[ColdItem] = []
        self._lane.look(now_s)
        while (item := self._untold.first()) is not None and now_s >= item.pulled_by_s:
            self.leave(item, now_s)
        if len(self._transfers.holds):
            self._tick_held(decided, now_s)
        while (item := self._queue.first()) is not None and self._has_room(item):
            self._unqueue(item)
            self._drain.add(item.uncached_bytes, max(0.0, now_s - self._moved_s))
            self._moved_s = now_s
            self._admit(item, "admitted_from_queue", now_s)
            decided.append(item)
        while self._waiting:
            item = next(iter(self._waiting))
            if now_s < item.offered_s + self._options.queue_s:
                break
            self._unqueue(item)
            self._refuse(item, 503, "cold_queue_timeout", now_s)
            decided.append(item)
        return decided

    @property
    def due_s(self) -> float:
        """When :meth:`tick` has something to do though nothing happens; infinite if nothing waits."""
        due_s = inf
        if self._waiting:
            due_s = next(iter(self._waiting)).offered_s + self._options.queue_s
        held, untold = self._transfers.holds.first(), self._untold.first()
        if held is not None:
            due_s = min(due_s, held.held_until_s)
        return due_s if untold is None else min(due_s, untold.pulled_by_s)

    def avoid_for(self, item: ColdItem) -> tuple[Endpoint, ...]:
        """The prefill engines that this request passes over while another can be used; never all of them. O(1), of a
        cold request O(engines)."""
        return self._lane.avoided_by_cold() if item.is_cold else self._lane.busy

    def prefill_chosen(self, item: ColdItem, prefill: Endpoint, now_s: float) -> None:
        """The prefill is sent to this engine: for the first time, or again. One that has been through its hand-over
        takes its place back without a wait, over the bounds if need be."""
        if item.stage is _GONE:
            return
        assert item.stage is not _NEW and item.stage is not _WAITING, "a prefill that was not admitted"
        if item.stage is _PREFILLING:
            self._leave_engine(item)
        else:
            self._leave_decode(item, now_s)
            self._enter_prefill(item, now_s)
        item.prefill = prefill
        if item.is_cold:
            item.is_on_lane = True
            self._lane.take(prefill)

    # -- after the prefill ------------------------------------------------------------------------------------------

    def prefill_answered(
        self, item: ColdItem, decode: Endpoint, now_s: float, num_pull_tokens: int | None = None
    ) -> Answer:
        """The prefill engine holds the KV, and this decode engine is to pull it. Again, where another one is.

        Args:
            num_pull_tokens: what it will pull, where that is known better by now.
        """
        if item.stage is _GONE:
            return self._admit_answer
        assert item.stage is not _NEW and item.stage is not _WAITING, "a prefill that was not admitted"
        if item.stage is _PREFILLING:
            self._leave_prefill(item)
            item.held_until_s = now_s + self._options.hold_s
        else:
            self._leave_decode(item, now_s)
        if num_pull_tokens is not None:
            self._correct(item, num_pull_tokens * self._token_bytes)
        if now_s < item.held_until_s and self._transfers.must_wait(item, decode):
            item.stage = _HELD
            self._transfers.hold(item, decode)
            self.counts["held"] += 1
            item.answer = answer = Wait(item.held_until_s)
            return answer
        self._begin(item, decode, now_s)
        item.answer = self._admit_answer
        return self._admit_answer

    def room_bytes(self, prefill: Endpoint | None, decode: Endpoint) -> int:
        """What may be begun to a decode engine now; for its picker, so that a request need not wait for one."""
        return self._transfers.room_bytes(prefill, decode)

    def pulled(self, item: ColdItem, num_bytes: int, seconds: float, now_s: float) -> None:
        """The decode engine has the KV: its transfer is over, and so is the item.

        Args:
            num_bytes: that were moved; ``item.pull_bytes`` where nothing better is known.
            seconds: it took, by the shell's clock or the engine's own.
        """
        if item.stage is _PULLING:
            assert num_bytes >= 0 and seconds >= 0
            self._transfers.measured(item, num_bytes, seconds, now_s)
            self.leave(item, now_s)

    def leave(self, item: ColdItem, now_s: float) -> None:
        """The request is over, however. Again it does nothing."""
        stage = item.stage
        if stage is _WAITING:
            self._unqueue(item)
            self.counts["left_waiting"] += 1
        elif stage is _PREFILLING:
            self._leave_prefill(item)
            self._uncommit(item)
        elif stage is _HELD or stage is _PULLING:
            self._leave_decode(item, now_s)
            self._uncommit(item)
        self._end(item)
        item.tag = None

    # -- what is shown ----------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether anything is ever made to wait."""
        return self._token_bytes > 0

    def retry_after_s(self, now_s: float, more_bytes: int = 0) -> int:
        """When to come back, in whole seconds: when what waits, and ``more_bytes``, will have left the queue at the
        rate at which it drains; where that is not known, after the longest wait."""
        drain_bytes_s = self._drain_bytes_s(now_s)
        wait_s = (self._waiting_bytes + more_bytes) / drain_bytes_s if drain_bytes_s > 0 else self._options.queue_s
        return max(1, ceil(min(wait_s, RETRY_AFTER_MAX_S)))

    def statistics(self, now_s: float) -> AdmissionStatistics:
        """Everything that is shown. Takes O(engines + pairs)."""
        transfers, waiting = self._transfers, self._waiting
        budget = min(transfers.rate_budget_bytes, transfers.free_budget_bytes)
        return AdmissionStatistics(
            is_on=self.is_on,
            why_off="" if self.is_on else "the KV bytes of a token are not known",
            num_waiting=len(waiting),
            waiting_bytes=self._waiting_bytes,
            waiting_body_bytes=self._body_bytes,
            oldest_wait_s=max(0.0, now_s - next(iter(waiting)).offered_s) if waiting else 0.0,
            num_held=len(transfers.holds),
            num_cold=self._num_cold,
            cold_max=self._lane.cold_max,
            num_warm=self._lane.num_warm,
            committed_bytes=self._committed_bytes,
            budget_bytes=None if budget == inf else int(budget),
            counts=dict(self.counts),
            drain_bytes_s=self._drain_bytes_s(now_s),
            retry_after_s=self.retry_after_s(now_s),
            lane=[endpoint.url for endpoint in self._lane.engines],
            decodes=transfers.loads(),
            rates=transfers.links.pairs(),
        )

    def validate(self) -> None:
        """Assert the invariants. Takes time in proportion to the items and engines."""
        by_stage: dict[ColdStage, set[ColdItem]] = {stage: set() for stage in ColdStage}
        for item in self._items:
            by_stage[item.stage].add(item)
        assert not by_stage[_NEW] and not by_stage[_GONE]
        waiting = by_stage[_WAITING]
        self._queue.validate()
        assert set(self._queue.items()) == set(self._waiting) == waiting
        assert len(waiting) <= self._options.queue_max and self._body_bytes <= self._options.queue_max_bytes
        assert self._waiting_bytes == sum(item.uncached_bytes for item in waiting)
        assert self._body_bytes == sum(item.num_body_bytes for item in waiting)
        assert all(item.is_cold for item in waiting)
        for item in waiting:
            assert 0 <= item.order - item.offered_s <= self._options.ageing_s + 1e-6
        prefilling = {item for item in by_stage[_PREFILLING] if item.is_cold}
        assert self._num_cold == len(prefilling)
        assert self._lane.num_warm == len(by_stage[_PREFILLING]) - len(prefilling)
        self._lane.validate()
        on_engines = Counter(item.prefill for item in prefilling if item.is_on_lane)
        assert all(endpoint is not None and self._lane.num_on(endpoint) == num for endpoint, num in on_engines.items())
        assert self._lane.num_cold == on_engines.total()
        committed = {item for item in self._items - waiting if item.is_cold}
        assert self._num_committed == len(committed)
        assert self._committed_bytes == sum(item.pull_bytes for item in committed)
        assert self._unbegun_bytes == sum(item.pull_bytes for item in committed - by_stage[_PULLING])
        self._untold.validate()
        assert set(self._untold.items()) == {item for item in by_stage[_PULLING] if not item.is_told}
        self._transfers.validate(by_stage[_HELD], by_stage[_PULLING])

    # -- inside -----------------------------------------------------------------------------------------------------

    def _has_room(self, item: ColdItem) -> bool:
        if self._num_cold >= self._lane.cold_max:
            return False
        if not self._num_committed:
            return True
        transfers = self._transfers
        return (
            self._committed_bytes + item.pull_bytes <= transfers.rate_budget_bytes
            and self._unbegun_bytes + item.pull_bytes <= transfers.free_budget_bytes
        )

    def _admit(self, item: ColdItem, reason: str, now_s: float) -> Answer:
        self._items.add(item)
        self._enter_prefill(item, now_s)
        if item.is_cold:
            self._num_committed += 1
            self._committed_bytes += item.pull_bytes
            self._unbegun_bytes += item.pull_bytes
        self.counts[reason] += 1
        item.answer = self._admit_answer
        return self._admit_answer

    def _refuse(self, item: ColdItem, status: int, code: RefusalCode, now_s: float) -> Answer:
        self.counts["refused_" + code] += 1
        self._end(item)
        item.answer = answer = Refuse(status, self.retry_after_s(now_s, item.uncached_bytes), code)
        return answer

    def _unqueue(self, item: ColdItem) -> None:
        self._queue.remove(item)
        del self._waiting[item]
        self._waiting_bytes -= item.uncached_bytes
        self._body_bytes -= item.num_body_bytes

    def _tick_held(self, decided: list[ColdItem], now_s: float) -> None:
        transfers = self._transfers
        while (item := transfers.released()) is not None:
            self._release(item, Admit(), now_s)
            decided.append(item)
        while (item := transfers.holds.first()) is not None and now_s >= item.held_until_s:
            self._release(item, Admit(is_overdue=True), now_s)
            self.counts["held_overdue"] += 1
            decided.append(item)

    def _release(self, item: ColdItem, answer: Admit, now_s: float) -> None:
        decode = item.decode
        assert decode is not None
        self._transfers.unhold(item)
        self._begin(item, decode, now_s)
        item.answer = answer

    def _begin(self, item: ColdItem, decode: Endpoint, now_s: float) -> None:
        self._transfers.begin(item, decode, now_s)
        item.stage = _PULLING
        if not item.is_told:
            item.pulled_by_s = now_s + self._transfers.expected_s(item)
            self._untold.push(item, item.pulled_by_s)
        if item.is_cold:
            self._unbegun_bytes -= item.pull_bytes

    def _enter_prefill(self, item: ColdItem, now_s: float) -> None:
        item.stage = _PREFILLING
        item.held_until_s = 0.0
        if item.is_cold:
            self._num_cold += 1
        else:
            self._lane.warm_began(now_s)

    def _leave_prefill(self, item: ColdItem) -> None:
        """The prefill is over; the caller says what the item is now."""
        self._leave_engine(item)
        if item.is_cold:
            self._num_cold -= 1
        else:
            self._lane.warm_ended()

    def _leave_engine(self, item: ColdItem) -> None:
        if item.is_on_lane:
            assert item.prefill is not None
            self._lane.give_back(item.prefill)
            item.is_on_lane = False

    def _leave_decode(self, item: ColdItem, now_s: float) -> None:
        """It is not held and not pulled any more; the caller says what it is now."""
        if item.stage is _HELD:
            self._transfers.unhold(item)
        else:
            self._transfers.end(item, now_s)
            if item in self._untold:
                self._untold.remove(item)
            if item.is_cold:
                self._unbegun_bytes += item.pull_bytes
        item.decode = None

    def _correct(self, item: ColdItem, pull_bytes: int) -> None:
        if item.is_cold:
            self._committed_bytes += pull_bytes - item.pull_bytes
            self._unbegun_bytes += pull_bytes - item.pull_bytes
        item.pull_bytes = pull_bytes

    def _uncommit(self, item: ColdItem) -> None:
        if item.is_cold:
            self._num_committed -= 1
            self._committed_bytes -= item.pull_bytes
            self._unbegun_bytes -= item.pull_bytes

    def _end(self, item: ColdItem) -> None:
        self._items.discard(item)
        item.stage = _GONE
        item.prefill = item.decode = None

    def _drain_bytes_s(self, now_s: float) -> float:
        open_s = max(0.0, now_s - self._moved_s) if self._waiting else 0.0
        return self._drain.bytes_s(open_s)
