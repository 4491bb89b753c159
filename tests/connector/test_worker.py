"""The worker side with its own threads: copies run beside the step, end when they must, and are reported once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from antiphon.client.options import ClientOptions
from antiphon.connector.copy import BlockCopier, layer_blocks
from antiphon.connector.plan import LoadPlan, StepPlan, StorePlan, WorkerNews
from antiphon.connector.sessions import ENDED_MAX
from antiphon.connector.start_watch import StartWatch
from antiphon.connector.worker import NoReuse, WorkerSide
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.protocol import cache as calls
from tests.connector.blocks import BLOCK_BYTES, CHUNK_SIZE, SLAB_BYTES
from tests.connector.engine import EngineOptions, Status
from tests.connector.fakes import FakeClient, FakeClock, FakeServer, FakeTensor
from tests.connector.harness import Harness

PER_CHUNK = 2
NUM_BLOCKS = 20
NAMESPACE = b"n" * 32
DEADLINE_S = 10.0


def wait_until(is_so: Callable[[], bool]) -> None:
    """Polls; the test's threads have no event for what it waits for."""
    end_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.001)


class PausedCopier(BlockCopier):
    """Waits inside each copy while ``may_go`` is not set."""

    def __init__(self, layers: object, blocks_per_chunk: int) -> None:
        super().__init__(layers, blocks_per_chunk)  # type: ignore[arg-type]
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_inside = threading.Event()
        self.num_stores = 0

    def _pause(self) -> None:
        self.is_inside.set()
        assert self.may_go.wait(DEADLINE_S)
        self.is_inside.clear()

    def store(self, slab_address: int, block_ids: Sequence[int]) -> None:
        self._pause()
        self.num_stores += 1
        super().store(slab_address, block_ids)

    def load(self, slab_address: int, skip_blocks: int, block_ids: Sequence[int]) -> None:
        self._pause()
        super().load(slab_address, skip_blocks, block_ids)


class Bench:
    """A worker side with threads, its server, and the scheduler's connection."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.layout = ChunkLayout(1, SLAB_BYTES, "opaque")
        self.tensors = [FakeTensor(NUM_BLOCKS, BLOCK_BYTES) for _ in range(2)]
        for index, tensor in enumerate(self.tensors):
            tensor.view[:] = bytes((place * 7 + index) % 251 for place in range(len(tensor.view)))
        self.copier = PausedCopier(layer_blocks(self.tensors), PER_CHUNK)
        self.server = self.new_server()
        self.client = self._new_client("worker-0", (0,))
        self.scheduler = self._new_client("scheduler", ())
        self.side = WorkerSide(self.client, self.copier, 0, self.clock)  # type: ignore[arg-type]
        self.client.on_change = self.side.session_changed
        self.client.connect(self.server)
        self.scheduler.connect(self.server)
        self.side.start("passed", "a test")
        self.jobs = 0

    def _new_client(self, role: str, slabs: tuple[int, ...]) -> FakeClient:
        return FakeClient(
            ClientOptions(
                host="", port=1, role=role, engine="engine", incarnation="1", model="model", layout=self.layout,
                chunk_size_tokens=CHUNK_SIZE, slabs=slabs, needs_arena=bool(slabs),
            )
        )  # fmt: skip

    def new_server(self) -> FakeServer:
        return FakeServer(self.layout, CHUNK_SIZE, 8, self.clock)

    def store_plan(self, request: str, letters: str, first_block: int = 1) -> StorePlan:
        self.jobs += 1
        keys = tuple(letter.encode() * 32 for letter in letters)
        blocks = tuple(range(first_block, first_block + PER_CHUNK * len(keys)))
        return StorePlan(self.jobs, request, NAMESPACE, "tenant", None, keys, blocks)

    def look_up(self, request: str, letters: str) -> calls.Found:
        assert self.scheduler.session is not None
        keys = b"".join(letter.encode() * 32 for letter in letters)
        found = self.scheduler.session.call(calls.Lookup(request, NAMESPACE, "tenant", keys))
        assert isinstance(found, calls.Found)
        return found

    def load_plan(self, request: str, found: calls.Found, block_ids: tuple[int, ...], skip: int = 0) -> LoadPlan:
        return LoadPlan(request, self.server.incarnation, found.regions, skip, block_ids, self.clock())

    def step(self, plan: StepPlan | None = None, *, has_forward: bool = True) -> None:
        plan = plan or StepPlan()
        plan.incarnation, plan.made_at_s = self.server.incarnation, self.clock()
        self.side.begin_step(plan)
        self.side.start_loads(plan)
        if has_forward:
            self.side.start_stores(plan)

    def blocks(self, *block_ids: int) -> list[bytes]:
        return [bytes(tensor.block(block)) for block in block_ids for tensor in self.tensors]

    def close(self) -> None:
        self.copier.may_go.set()
        self.side.close()
        self.server.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def taken(bench: Bench, kind: str) -> Callable[[], bool]:
    """Gathers what is reported; true once something was."""
    found: set[str] = set()

    def look() -> bool:
        sent, received = bench.side.take_finished()
        found.update(sent if kind == "sent" else received)
        return bool(found)

    return look


def test_chunks_are_stored_and_loaded_elsewhere(bench: Bench) -> None:
    bench.step(StepPlan(stores=[bench.store_plan("one", "ab", 1)]))
    wait_until(lambda: bench.side.take_news().stored == {1: 1})
    found = bench.look_up("two", "ab")
    assert found.num_tokens == 2 * CHUNK_SIZE
    bench.step(StepPlan(loads=[bench.load_plan("two", found, (12, 10, 15), skip=1)]))
    wait_until(taken(bench, "received"))
    assert bench.blocks(12, 10, 15) == bench.blocks(2, 3, 4)
    assert bench.side.take_failed_blocks() == set()
    assert bench.side.take_finished() == (set(), set()), "a load is reported once"


def test_a_request_is_reported_as_stored_when_all_its_stores_have_ended(bench: Bench) -> None:
    bench.copier.may_go.clear()
    bench.step(StepPlan(stores=[bench.store_plan("one", "a"), bench.store_plan("one", "b", 3)]))
    bench.step(StepPlan(finished=["one", "other"]), has_forward=False)
    assert bench.side.take_finished() == ({"other"}, set())
    assert bench.copier.is_inside.wait(DEADLINE_S)
    assert bench.side.take_finished() == (set(), set())
    bench.copier.may_go.set()
    wait_until(taken(bench, "sent"))
    assert bench.side.take_finished() == (set(), set()), "vLLM asserts that it is reported once"
    assert bench.side.take_news().stored == {1: 1, 2: 1}, "a store is told of no later than its request"


def test_a_step_that_needs_the_blocks_waits_for_the_copy_at_hand_only(bench: Bench) -> None:
    bench.copier.may_go.clear()
    bench.step(StepPlan(stores=[bench.store_plan("one", "abc"), bench.store_plan("one", "d", 9)]))
    assert bench.copier.is_inside.wait(DEADLINE_S)
    began = threading.Thread(target=bench.side.begin_step, args=(StepPlan(preempted=["one"]),))
    began.start()
    began.join(0.05)
    assert began.is_alive(), "a block is overwritten while it is copied"
    bench.copier.may_go.set()
    began.join(DEADLINE_S)
    assert not began.is_alive()
    wait_until(lambda: not bench.side._jobs)
    assert bench.copier.num_stores == 1
    assert bench.look_up("two", "abcd").num_tokens == CHUNK_SIZE, "what was copied before is whole"
    assert bench.server.reserved_bytes == 0


def test_stores_of_others_go_on(bench: Bench) -> None:
    bench.copier.may_go.clear()
    bench.step(StepPlan(stores=[bench.store_plan("one", "a"), bench.store_plan("two", "b", 3)]))
    assert bench.copier.is_inside.wait(DEADLINE_S)
    bench.side.begin_step(StepPlan(preempted=["three"]))
    bench.copier.may_go.set()
    wait_until(lambda: not bench.side._jobs)
    assert bench.copier.num_stores == 2


def test_a_scheduler_out_of_order_cancels_all(bench: Bench) -> None:
    bench.copier.may_go.clear()
    bench.step(StepPlan(stores=[bench.store_plan("one", "ab"), bench.store_plan("two", "cd", 5)]))
    assert bench.copier.is_inside.wait(DEADLINE_S)
    cancelling = threading.Thread(target=bench.side.begin_step, args=(StepPlan(cancel_stores=True),))
    cancelling.start()
    wait_until(lambda: all(job.is_cancelled for jobs in list(bench.side._jobs.values()) for job in jobs))
    bench.copier.may_go.set()
    cancelling.join(DEADLINE_S)
    wait_until(lambda: not bench.side._jobs)
    assert bench.copier.num_stores == 1
    assert bench.side.take_news().stored == {1: 1, 2: 1}


def test_a_load_does_not_wait_for_a_store(bench: Bench) -> None:
    bench.step(StepPlan(stores=[bench.store_plan("one", "a")]))
    wait_until(lambda: not bench.side._jobs)
    found = bench.look_up("two", "a")
    session = bench.client.session
    assert session is not None
    waits, may_answer = threading.Event(), threading.Event()

    def between() -> None:
        waits.set()
        assert may_answer.wait(DEADLINE_S)

    session.between = between
    bench.step(StepPlan(stores=[bench.store_plan("three", "b")]))
    assert waits.wait(DEADLINE_S)
    bench.step(StepPlan(loads=[bench.load_plan("two", found, (10, 11))]))
    wait_until(taken(bench, "received"))
    may_answer.set()
    wait_until(lambda: not bench.side._jobs)


@pytest.mark.parametrize("failure", ["life", "region", "bug"])
def test_a_load_that_fails_is_reported_with_its_blocks_only(
    bench: Bench, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.step(StepPlan(stores=[bench.store_plan("one", "ab")]))
    wait_until(lambda: not bench.side._jobs)
    found = bench.look_up("two", "ab")
    plan = bench.load_plan("two", found, (10, 11, 12, 13))
    session = bench.client.session
    assert session is not None
    if failure == "life":
        plan = LoadPlan("two", "an earlier life", plan.regions, 0, plan.block_ids, plan.promised_at_s)
    elif failure == "region":
        monkeypatch.setattr(session, "address_of", lambda _region: (_ for _ in ()).throw(calls.ProtocolError("none")))
    else:
        plan = LoadPlan("two", plan.incarnation, plan.regions[:1], 0, plan.block_ids, plan.promised_at_s)
    bench.step(StepPlan(loads=[plan]))
    wait_until(taken(bench, "received"))
    assert bench.side.take_failed_blocks() == {10, 11, 12, 13}
    assert session.num_holds == 1, "the hold on the arena itself"
    monkeypatch.undo()
    bench.step(StepPlan(loads=[bench.load_plan("three", found, (10, 11))]))
    wait_until(taken(bench, "received"))
    assert bench.side.take_failed_blocks() == set()
    assert bench.blocks(10, 11) == bench.blocks(1, 2)


@pytest.mark.parametrize("failure", ["life", "region", "bug", "store"])
def test_what_fails_again_and_again_is_one_line(
    bench: Bench, failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "antiphon.connector")
    bench.step(StepPlan(stores=[bench.store_plan("one", "ab")]))
    wait_until(lambda: not bench.side._jobs)
    found = bench.look_up("two", "ab")
    session = bench.client.session
    assert session is not None
    if failure in ("region", "store"):
        monkeypatch.setattr(session, "address_of", lambda _region: (_ for _ in ()).throw(calls.ProtocolError("none")))
    caplog.clear()
    for number in range(4):
        plan = bench.load_plan(f"load-{number}", found, (10, 11, 12, 13))
        if failure == "life":
            plan = replace(plan, incarnation=f"life {number}")
        elif failure == "bug":
            plan = replace(plan, regions=plan.regions[:1])
        if failure == "store":
            bench.step(StepPlan(stores=[bench.store_plan(f"store-{number}", "xyzw"[number])]))
            wait_until(lambda: not bench.side._jobs)
        else:
            bench.step(StepPlan(loads=[plan]))
            wait_until(taken(bench, "received"))
    assert len([one for one in caplog.records if one.levelno >= logging.INFO]) == 1


def test_a_bug_in_a_load_is_told_to_the_scheduler_and_the_server(bench: Bench) -> None:
    bench.step(StepPlan(stores=[bench.store_plan("one", "ab")]))
    wait_until(lambda: not bench.side._jobs)
    assert bench.side.take_news().out_of_service is None
    plan = bench.load_plan("two", bench.look_up("two", "ab"), (10, 11, 12, 13))
    bench.step(StepPlan(loads=[replace(plan, regions=plan.regions[:1])]))
    wait_until(taken(bench, "received"))
    for _ in range(2):  # each news says it, so that none needs to arrive
        assert "more blocks than regions" in (bench.side.take_news().out_of_service or "")
    assert "failed" in bench.server.gates.values()
    bench.step(StepPlan(stores=[bench.store_plan("three", "c")]))
    wait_until(lambda: not bench.side._jobs)
    assert bench.look_up("four", "c").num_tokens == 0


def test_a_store_that_fails_in_the_middle_gives_everything_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    session = bench.client.session
    assert session is not None
    address_of = session.address_of
    asked: list[calls.Region] = []

    def second_fails(region: calls.Region) -> int:
        asked.append(region)
        if len(asked) == 2:
            raise calls.ProtocolError("that is no place for a chunk")
        return address_of(region)

    monkeypatch.setattr(session, "address_of", second_fails)
    bench.step(StepPlan(stores=[bench.store_plan("one", "abc")], finished=[]))
    wait_until(lambda: not bench.side._jobs)
    assert bench.server.reserved_bytes == 0
    assert bench.look_up("two", "abc").num_tokens == CHUNK_SIZE
    assert bench.side.take_news().stored == {1: 1}


def test_without_an_answering_server_a_store_ends_at_once(bench: Bench) -> None:
    session = bench.client.session
    assert session is not None
    session.is_responsive = False
    bench.step(StepPlan(stores=[bench.store_plan("one", "a")]))
    wait_until(lambda: not bench.side._jobs)
    assert "Reserve" not in bench.server.num_calls
    bench.client.lose()
    bench.step(StepPlan(stores=[bench.store_plan("one", "a")]))
    wait_until(lambda: not bench.side._jobs)
    assert bench.side.take_news().stored == {1: 1, 2: 1}


# ---- lives of the server ---------------------------------------------------------------------------------------------


def test_the_arena_of_a_lost_server_is_kept_for_promises_and_then_let_go(bench: Bench) -> None:
    bench.step(StepPlan(stores=[bench.store_plan("one", "a")]))
    wait_until(lambda: not bench.side._jobs)
    found, old = bench.look_up("two", "a"), bench.server
    first = bench.client.all[0]
    bench.client.lose()
    old.is_alive = False
    bench.side._let_go()
    assert first.num_holds == 1
    bench.step(StepPlan(loads=[bench.load_plan("two", found, (10, 11))]))
    wait_until(taken(bench, "received"))
    assert bench.blocks(10, 11) == bench.blocks(1, 2)
    wait_until(lambda: first.num_holds == 1)
    bench.clock.advance(2.1)
    bench.side._let_go()
    wait_until(lambda: first.num_holds == 0)
    assert first.is_retired
    bench.step(StepPlan(loads=[bench.load_plan("three", found, (12, 13))]))
    wait_until(taken(bench, "received"))
    assert bench.side.take_failed_blocks() == {12, 13}


def test_a_step_that_runs_keeps_the_arena_that_its_plan_may_name(bench: Bench) -> None:
    first = bench.client.all[0]
    bench.client.lose()
    bench.step()
    bench.side._let_go()
    bench.clock.advance(60.0)
    bench.side._let_go()
    assert first.num_holds == 1
    bench.side.take_finished()
    bench.side._let_go()
    assert first.num_holds == 0


def test_the_same_life_reached_again_is_another_connection_and_the_former_is_kept(bench: Bench) -> None:
    """The engine always had a connection: what was promised before the new one can be loaded through the former."""
    bench.step(StepPlan(stores=[bench.store_plan("one", "a")]))
    wait_until(lambda: not bench.side._jobs)
    found = bench.look_up("two", "a")
    early = bench.load_plan("two", found, (10, 11))
    first = bench.client.all[0]
    bench.client.lose()
    bench.side._let_go()
    bench.clock.advance(0.1)
    bench.client.connect(bench.server)
    second = bench.client.all[1]
    assert (first.num_holds, second.num_holds) == (1, 1)
    assert list(bench.server.gates.values())[-1] == "passed", "the gate is told on every connection"
    bench.clock.advance(60.0)
    bench.side._let_go()
    assert first.num_holds == 1, "a plan made before the second connection may be on its way"
    bench.copier.may_go.clear()
    bench.step(StepPlan(loads=[early, bench.load_plan("three", found, (12, 13))]))
    assert bench.copier.is_inside.wait(DEADLINE_S)
    assert (first.num_holds, second.num_holds) == (2, 1)
    bench.side._let_go()
    assert first.num_holds == 2, "a load that is queued may need it"
    bench.copier.may_go.set()
    wait_until(lambda: not bench.side._loading)
    assert bench.side.take_failed_blocks() == set()
    assert bench.blocks(10, 11) == bench.blocks(12, 13) == bench.blocks(1, 2)
    bench.side._let_go()
    assert (first.num_holds, second.num_holds) == (0, 1), "whatever comes was promised after the second connection"
    assert first.is_retired


def test_the_connections_that_are_kept_are_bounded(bench: Bench) -> None:
    for _ in range(ENDED_MAX + 3):
        bench.client.lose()
        bench.clock.advance(0.1)
        bench.client.connect(bench.server)
    holds = [session.num_holds for session in bench.client.all]
    assert holds == [0] * 3 + [1] * (ENDED_MAX + 1)
    assert [session.is_retired for session in bench.client.all] == [True] * 3 + [False] * (ENDED_MAX + 1)
    assert bench.client.options.ended_sessions_max > ENDED_MAX, "the client would not connect again"


def test_a_load_goes_through_a_session_that_was_there_before_the_promise(bench: Bench) -> None:
    """The engine had no connection for a moment: its lease ended, and the bytes are another's."""
    bench.step(StepPlan(stores=[bench.store_plan("one", "a")]))
    wait_until(lambda: not bench.side._jobs)
    found = bench.look_up("two", "a")
    plan = bench.load_plan("two", found, (10, 11))
    first = bench.client.all[0]
    bench.client.lose()
    bench.scheduler.lose()
    bench.side.take_finished()
    bench.side._let_go()
    bench.clock.advance(3.0)
    bench.side._let_go()  # no step runs: it is let go
    first.dispose_if_due()
    bench.scheduler.all[0].dispose_if_due()
    assert first.is_disposed
    bench.clock.advance(3.0)
    bench.server.tick()
    assert bench.server.num_leases == 0
    bench.client.connect(bench.server)
    before = bench.blocks(10, 11)
    bench.step(StepPlan(loads=[plan]))
    wait_until(taken(bench, "received"))
    assert bench.side.take_failed_blocks() == {10, 11}
    assert bench.blocks(10, 11) == before


# ---- the start -------------------------------------------------------------------------------------------------------


def test_the_engine_has_started_when_its_scheduler_side_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known without a step, as nobody may use the engine for long."""
    bench = Bench()
    starts: list[str] = []
    monkeypatch.setattr(bench.copier, "engine_started", lambda: starts.append("started"))
    bench.scheduler.lose()
    bench.scheduler.all[0].dispose_if_due()
    for _ in range(2):
        bench.side._let_go()
    assert not starts
    bench.scheduler.connect(bench.server)
    for _ in range(3):
        bench.side._let_go()
    assert starts == ["started"]
    bench.step()
    bench.side.engine_started()
    assert starts == ["started"]
    bench.close()


def test_a_question_for_the_start_is_asked_once_and_may_fail(bench: Bench) -> None:
    watch = StartWatch()
    assert not watch.look(None)
    session = bench.scheduler.session
    assert session is not None
    session.is_slow = lambda body: isinstance(body, calls.AskProcesses)
    asked = bench.server.num_calls.get("AskProcesses", 0)
    assert not watch.look(session)  # type: ignore[arg-type]
    assert not watch.look(session)  # type: ignore[arg-type]
    bench.scheduler.lose()
    assert not watch.look(session)  # type: ignore[arg-type]
    bench.scheduler.connect(bench.server)
    assert watch.look(bench.scheduler.session)  # type: ignore[arg-type]
    assert bench.server.num_calls["AskProcesses"] <= asked + 2


@pytest.mark.parametrize("sign", ["step", "handshake"])
def test_the_connector_sees_that_the_engine_has_started(
    new_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    harness = new_harness()
    starts: list[str] = []
    for side in harness.sides:
        monkeypatch.setattr(side._copier, "engine_started", lambda: starts.append("started"))
    if sign == "step":
        harness.step()
    else:
        assert [worker.get_handshake_metadata() for worker in harness.workers] == [None]
    assert starts == ["started"]


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_closing_ends_the_copy_at_hand_and_drops_the_rest(bench: Bench) -> None:
    bench.step(StepPlan(stores=[bench.store_plan("one", "ab")]))
    wait_until(lambda: not bench.side._jobs)
    found = bench.look_up("two", "ab")
    bench.copier.may_go.clear()
    before = bench.blocks(14, 15)
    loads = [bench.load_plan("two", found, (10, 11)), bench.load_plan("three", found, (14, 15))]
    bench.step(StepPlan(loads=loads, stores=[bench.store_plan("four", "cd")]))
    assert bench.copier.is_inside.wait(DEADLINE_S)
    closing = threading.Thread(target=bench.side.close)
    closing.start()
    wait_until(lambda: bench.side._is_closing)
    bench.copier.may_go.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert not any(thread.is_alive() for thread in bench.side._threads)
    assert bench.blocks(14, 15) == before
    assert all(session.num_holds == 0 for session in bench.client.all)


def test_news_of_ranks_add_up() -> None:
    news = WorkerNews({1: 1, 2: 1})
    news.merge(WorkerNews({2: 1, 3: 2}))
    assert news.stored == {1: 1, 2: 2, 3: 2}
    assert news.out_of_service is None
    news.merge(WorkerNews(out_of_service="one"))
    news.merge(WorkerNews(out_of_service="other"))
    assert news.out_of_service == "one"


def test_a_worker_without_reuse_answers_everything_once() -> None:
    region = calls.Region(0, 1, 1)
    worker, plan = NoReuse(), StepPlan(loads=[LoadPlan("one", "life", (region,), 0, (4, 5), 1.0)], finished=["two"])
    plan.stores = [StorePlan(7, "three", NAMESPACE, "tenant", None, (b"k" * 32,), (1, 2))]
    worker.begin_step(plan)
    worker.start_loads(plan)
    worker.start_stores(plan)
    assert worker.take_finished() == ({"two"}, {"one"})
    assert worker.take_failed_blocks() == {4, 5}
    assert worker.take_news().stored == {7: 1}
    assert (worker.take_finished(), worker.take_failed_blocks(), worker.take_news().stored) == (
        (set(), set()),
        set(),
        {},
    )


# ---- a whole engine with threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_an_engine_with_threads_reads_what_it_should(new_harness: Callable[..., Harness], seed: int) -> None:
    """Preemption, aborts and blocks that are used again at once, against copies that really run beside the steps."""
    options = EngineOptions(num_blocks=30, running_max=6, num_ranks=1 + seed % 2, is_026=seed % 3 == 0)
    harness = new_harness(options, seed=seed, num_chunks=16, has_threads=True)
    chance, engine = harness.chance, harness.engine
    bases = [[chance.randrange(50) for _ in range(60)] for _ in range(3)]
    for number in range(40):
        harness.add(chance.choice(bases)[: chance.randrange(5, 60)], chance.randrange(1, 10))
        for _ in range(chance.randrange(1, 8)):
            harness.step()
            if chance.random() < 0.05 and engine.requests:
                engine.abort(chance.choice(sorted(engine.requests)))
        if number % 5 == 0:
            engine.pool.reset()
    end_s = time.monotonic() + DEADLINE_S
    while engine.has_work:
        assert time.monotonic() < end_s, "requests are left"
        harness.step()
    wait_until(lambda: not any(worker._worker._jobs for worker in harness.workers))
    harness.step()
    assert not harness.faults.records
    assert len(engine.pool.free) == engine.pool.num_usable
    assert harness.scheduler_side.num_tracked == 0
    assert harness.server is not None
    assert not harness.server.cache.leases()
    assert harness.server.reserved_bytes == 0
    harness.assert_reports_add_up()
    assert any(request.status is Status.FINISHED_STOPPED for request in harness.requests)
    assert engine.num_loads > 0
