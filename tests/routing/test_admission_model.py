"""Whatever is told in whatever order, admission decides as a plain model does that looks at everything each time."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from antiphon.routing.admission import ColdAdmission
from antiphon.routing.cold import AdmissionOptions, Admit, ColdItem, ColdStage, Refuse, Wait
from antiphon.routing.endpoint import Endpoint

WARM_BYTES = 100
HOLD_S = 10.0
QUEUE_S = 20.0
QUEUE_MAX = 5
BODIES_MAX = 60
AGEING_S = 6.0
AGEING_BYTES = 1000
PULLS = st.sampled_from([0, 50, 99, 100, 101, 400, 500, 600, 900, 1000, 1001, 4000])
OPTIONS = AdmissionOptions(
    kv_bytes_per_token=1,
    warm_bytes=WARM_BYTES,
    lease_s=3 * HOLD_S,
    queue_max=QUEUE_MAX,
    queue_max_bytes=BODIES_MAX,
    queue_s=QUEUE_S,
    ageing_s=AGEING_S,
    ageing_bytes=AGEING_BYTES,
    lane_window_s=8.0,
    rate_bytes_s=100.0,
    rate_min_bytes_s=10.0,
    sample_min_bytes=50,
)


@dataclass
class Row:
    """A request, as the model knows it."""

    item: ColdItem
    number: int
    offered_s: float
    order: float
    stage: str = "new"
    pull: int = 0
    decode: Endpoint | None = None
    prefill: Endpoint | None = None
    held_until_s: float = 0.0
    turn: int = 0
    """Of those held, which came first."""

    @property
    def is_cold(self) -> bool:
        return self.item.num_uncached_tokens >= WARM_BYTES


class AdmissionMachine(RuleBasedStateMachine):
    @initialize(prefills=st.integers(1, 6), decodes=st.integers(1, 2))
    def begin(self, prefills: int, decodes: int) -> None:
        self.prefills = [Endpoint(f"http://p{index}:1", "prefill") for index in range(prefills)]
        self.decodes = [Endpoint(f"http://d{index}:1", "decode") for index in range(decodes)]
        self.members = list(self.decodes)
        self.free: dict[Endpoint, int | None] = dict.fromkeys(self.decodes)
        self.admission = ColdAdmission(OPTIONS)
        self.admission.set_prefills(self.prefills)
        self.admission.set_decodes(self.members)
        self.rows: list[Row] = []
        self.now_s = 0.0
        self.turns = 0

    # -- the model ----------------------------------------------------------------------------------------------------

    def of(self, *stages: str) -> list[Row]:
        return [row for row in self.rows if row.stage in stages]

    def some(self, number: int, *stages: str) -> Row:
        rows = self.of(*stages)
        return rows[number % len(rows)]

    def rate(self, prefill: Endpoint | None, decode: Endpoint) -> float:
        return self.admission._transfers.links.bytes_s(prefill, decode)  # what it is, is tested by itself

    def has_room(self, row: Row) -> bool:
        if sum(one.is_cold for one in self.of("prefilling")) >= self.admission.statistics(self.now_s).cold_max:
            return False
        committed = [one for one in self.of("prefilling", "held", "pulling") if one.is_cold]
        if not committed:
            return True
        budget = self.admission._transfers.links.pool_bytes_s * HOLD_S * len(self.members)
        free = [self.free[one] for one in self.members]
        is_known = bool(free) and None not in free
        free_bytes = sum(one for one in free if one is not None) if is_known else inf
        unbegun = sum(one.pull for one in committed if one.stage != "pulling")
        return sum(one.pull for one in committed) + row.pull <= budget and unbegun + row.pull <= free_bytes

    def first(self) -> Row | None:
        return min(self.of("waiting"), key=lambda row: (row.order, row.number), default=None)

    def fits(self, row: Row, decode: Endpoint) -> bool:
        free = self.free[decode]
        if free is not None and row.pull > free:
            return False
        flying = [one.pull for one in self.of("pulling") if one.decode is decode]
        if not any(pull >= WARM_BYTES for pull in flying):
            return True
        return sum(flying) + row.pull <= self.rate(row.prefill, decode) * HOLD_S

    def held_for(self, decode: Endpoint) -> list[Row]:
        return sorted((row for row in self.of("held") if row.decode is decode), key=lambda row: row.turn)

    def pull_begins(self, row: Row) -> None:
        assert row.decode is not None
        row.stage = "pulling"
        free = self.free[row.decode]
        if free is not None:
            self.free[row.decode] = max(0, free - row.pull)

    # -- before the prefill -------------------------------------------------------------------------------------------

    @rule(
        uncached=st.sampled_from([0, 99, 100, 101, 300, 600, 999, 1000, 5000]),
        pull=PULLS,
        body=st.integers(0, 40),
    )
    def offer(self, uncached: int, pull: int, body: int) -> None:
        self._offer(uncached, pull, body)

    def _offer(self, uncached: int, pull: int, body: int) -> Row:
        item = ColdItem(uncached, pull, body)
        order = self.now_s + AGEING_S * min(1.0, uncached / AGEING_BYTES)
        row = Row(item, len(self.rows), self.now_s, order, pull=pull)
        self.admission._lane.look(self.now_s)  # as the offer does; the model asks how wide the lane is
        waiting, first = self.of("waiting"), self.first()
        is_first = first is None or order < first.order
        goes = not row.is_cold or (is_first and self.has_room(row))
        bodies = sum(one.item.num_body_bytes for one in waiting)
        answer = self.admission.offer(item, self.now_s)
        if goes:
            assert isinstance(answer, Admit)
            row.stage = "prefilling"
        elif len(waiting) >= QUEUE_MAX or bodies + body > BODIES_MAX:
            assert isinstance(answer, Refuse)
            assert answer.status == 429
            row.stage = "gone"
        else:
            assert isinstance(answer, Wait)
            assert answer.until_s == self.now_s + QUEUE_S
            row.stage = "waiting"
        self.rows.append(row)
        return row

    @rule(pull=PULLS, engine=st.integers(0, 2))
    def hand_over(self, pull: int, engine: int) -> None:
        """A warm request in one step, so that decode engines are often busy."""
        row = self._offer(0, pull, 0)
        self._answer(row, self.decodes[engine % len(self.decodes)], None)

    @rule(nums=st.lists(st.sampled_from([100, 400, 500, 600]), min_size=1, max_size=4))
    def flood(self, nums: list[int]) -> None:
        """Several cold ones at once."""
        for num in nums:
            self._offer(num, num, 1)

    @rule(quarters=st.integers(0, 30))
    def tick(self, quarters: int) -> None:
        self.now_s += quarters / 4
        decided = self.admission.tick(self.now_s)
        assert len(decided) == len(set(decided))
        wanted: list[ColdItem] = []
        for decode in list(dict.fromkeys(row.decode for row in self.of("held"))):
            assert decode is not None
            while (held := self.held_for(decode)) and self.fits(held[0], decode):
                self.pull_begins(held[0])
                wanted.append(held[0].item)
        for row in sorted(self.of("held"), key=lambda row: row.held_until_s):
            if self.now_s >= row.held_until_s:
                self.pull_begins(row)
                wanted.append(row.item)
                assert isinstance(row.item.answer, Admit)
                assert row.item.answer.is_overdue
        while (first := self.first()) is not None and self.has_room(first):
            first.stage = "prefilling"
            wanted.append(first.item)
        for row in self.of("waiting"):
            if self.now_s >= row.offered_s + QUEUE_S:
                row.stage = "gone"
                wanted.append(row.item)
                assert isinstance(row.item.answer, Refuse)
                assert row.item.answer.status == 503
        assert set(decided) == set(wanted)
        admitted = [item for item in decided if item.stage is ColdStage.PREFILLING]
        assert admitted == [item for item in wanted if item in admitted], "in the order of the queue"

    # -- prefill and decode -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.of("prefilling", "held", "pulling"))
    @rule(number=st.integers(0, 100), engine=st.integers(0, 5))
    def choose(self, number: int, engine: int) -> None:
        row = self.some(number, "prefilling", "held", "pulling")
        prefill = self.prefills[engine % len(self.prefills)]
        self.admission.prefill_chosen(row.item, prefill, self.now_s)
        row.stage, row.prefill, row.decode = "prefilling", prefill, None

    @precondition(lambda self: self.of("prefilling", "held", "pulling"))
    @rule(number=st.integers(0, 100), engine=st.integers(0, 2), better=st.none() | st.sampled_from([0, 60, 200, 1500]))
    def answer(self, number: int, engine: int, better: int | None) -> None:
        row = self.some(number, "prefilling", "held", "pulling")
        self._answer(row, self.decodes[engine % len(self.decodes)], better)

    def _answer(self, row: Row, decode: Endpoint, better: int | None) -> None:
        if row.stage == "prefilling":
            row.held_until_s = self.now_s + HOLD_S
        row.stage, row.decode = "between", None
        row.pull = row.pull if better is None else better
        answer = self.admission.prefill_answered(row.item, decode, self.now_s, better)
        self.turns += 1
        row.turn = self.turns
        must_wait = row.pull >= WARM_BYTES and (bool(self.held_for(decode)) or not self.fits(row, decode))
        row.decode = decode
        if must_wait and self.now_s < row.held_until_s:
            assert isinstance(answer, Wait)
            assert answer.until_s == row.held_until_s <= self.now_s + HOLD_S
            row.stage = "held"
        else:
            assert isinstance(answer, Admit)
            self.pull_begins(row)

    @precondition(lambda self: self.of("pulling"))
    @rule(number=st.integers(0, 100), num_bytes=st.integers(0, 2000), quarters=st.integers(0, 40))
    def pulled(self, number: int, num_bytes: int, quarters: int) -> None:
        row = self.some(number, "pulling")
        self.admission.pulled(row.item, num_bytes, quarters / 4, self.now_s)
        row.stage = "gone"

    @precondition(lambda self: self.rows)
    @rule(number=st.integers(0, 100))
    def leave(self, number: int) -> None:
        row = self.rows[number % len(self.rows)]
        self.admission.leave(row.item, self.now_s)
        row.stage = "gone"

    # -- the pools ----------------------------------------------------------------------------------------------------

    @rule(engine=st.integers(0, 2), free=st.none() | st.sampled_from([0, 99, 500, 1500, 10**6]))
    def tell_free(self, engine: int, free: int | None) -> None:
        decode = self.decodes[engine % len(self.decodes)]
        self.admission.free_kv(decode, free)
        if decode in self.members:
            self.free[decode] = free

    @rule(which=st.integers(0, 7))
    def change_decodes(self, which: int) -> None:
        members = [decode for index, decode in enumerate(self.decodes) if which >> index & 1]
        for decode in set(self.members) - set(members):
            self.free[decode] = None
        self.members = members
        self.admission.set_decodes(members)

    @rule(num=st.integers(0, 6))
    def change_prefills(self, num: int) -> None:
        self.admission.set_prefills(self.prefills[:num])

    @rule(engine=st.integers(0, 2))
    def restart(self, engine: int) -> None:
        decode = self.decodes[engine % len(self.decodes)]
        self.admission.forget(decode)
        self.free[decode] = None

    # -- always -------------------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "rows"):
            return
        self.admission.validate()
        assert [row.item.stage.value for row in self.rows] == [row.stage for row in self.rows]
        stats = self.admission.statistics(self.now_s)
        waiting, held = self.of("waiting"), self.of("held")
        assert (stats.num_waiting, stats.num_held) == (len(waiting), len(held))
        assert stats.waiting_bytes == sum(row.item.num_uncached_tokens for row in waiting)
        assert stats.oldest_wait_s == max((self.now_s - row.offered_s for row in waiting), default=0.0)
        due_s = min((row.offered_s + QUEUE_S for row in waiting), default=inf)
        assert self.admission.due_s == min(due_s, min((row.held_until_s for row in held), default=inf))
        for load in stats.decodes:
            flying = [row.pull for row in self.of("pulling") if row.decode is not None and row.decode.url == load.url]
            assert load.in_flight_bytes == sum(flying)

    def teardown(self) -> None:
        """When all that is admitted has ended, what waits goes, one after the other, and nothing is left."""
        if not hasattr(self, "rows"):
            return
        self.tick(0)
        while waiting := self.of("waiting"):
            for row in self.of("prefilling", "held", "pulling"):
                self.admission.leave(row.item, self.now_s)
                row.stage = "gone"
            self.tick(0)
            assert len(self.of("waiting")) < len(waiting), "the queue is stuck"
        for row in self.rows:
            self.admission.leave(row.item, self.now_s)
        stats = self.admission.statistics(self.now_s)
        assert (stats.num_cold, stats.num_warm, stats.committed_bytes, stats.waiting_body_bytes) == (0, 0, 0, 0)
        assert self.admission.due_s == inf
        self.admission.validate()


AdmissionMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAdmission = AdmissionMachine.TestCase
