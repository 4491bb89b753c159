"""The worker side with the copier of a GPU.

Loads that a step begins, or a thread, are reported when their copies have ended; a preemption does not wait for stores;
ranks of different number share chunks.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch

from antiphon.client.options import ClientOptions
from antiphon.connector import cuda_copy, cuda_pinning
from antiphon.connector.cuda_copy import CudaCopier
from antiphon.connector.cuda_paged import PagedKv, PlainMover
from antiphon.connector.cuda_pinning import Pinning
from antiphon.connector.gate import run_gate
from antiphon.connector.plan import LoadPlan, StepPlan, StorePlan
from antiphon.connector.worker import WorkerSide
from antiphon.core.chunks_layout import ChunkLayout, slabs_of_rank
from antiphon.protocol import cache as calls
from tests.connector.fake_cuda import FakeDevice, FakePinDriver
from tests.connector.fakes import FakeClient, FakeClock, FakeServer
from tests.connector.test_worker import DEADLINE_S, wait_until

HEADS, TOKENS, WIDTH, LAYERS = 4, 4, 8, 2
PER_CHUNK = 2
NUM_BLOCKS = 48
CHUNK_SIZE = PER_CHUNK * TOKENS
LAYOUT = ChunkLayout(HEADS, LAYERS * CHUNK_SIZE * WIDTH * 4)
NAMESPACE = b"n" * 32


class Rank:
    """One rank of an engine: blocks on a fake GPU, the worker side, its connection."""

    def __init__(self, server: FakeServer, clock: FakeClock, rank: int = 0, num_ranks: int = 1) -> None:
        slabs = slabs_of_rank(HEADS, rank, num_ranks)
        writes = () if rank and slabs_of_rank(HEADS, rank - 1, num_ranks) == slabs else tuple(slabs)
        generator = torch.Generator().manual_seed(rank + 10 * num_ranks)
        self.tensors = [
            torch.randint(-99, 99, (NUM_BLOCKS, len(slabs), TOKENS, WIDTH), dtype=torch.int32, generator=generator)
            for _ in range(LAYERS)
        ]
        self.device = FakeDevice(random.Random(rank))
        paged = PagedKv(self.tensors)
        self.driver = FakePinDriver()
        self.copier = CudaCopier(paged, PER_CHUNK, PlainMover(paged), self.device, Pinning(self.driver, 8192))
        self.server, self.clock = server, clock
        self.client = FakeClient(
            ClientOptions(
                host="", port=1, role=f"worker-{rank}", engine=f"engine-{num_ranks}", incarnation="1", model="model",
                layout=LAYOUT, chunk_size_tokens=CHUNK_SIZE, slabs=writes, needs_arena=True,
            )
        )  # fmt: skip
        self.client.connect(server)
        self.slab = slabs.start // len(slabs)
        self.side = WorkerSide(self.client, self.copier, self.slab, clock, slabs=writes)  # type: ignore[arg-type]
        self.client.on_change = self.side.session_changed
        self.side.start("passed", "a test")

    def step(self, plan: StepPlan) -> None:
        plan.incarnation, plan.made_at_s = self.server.incarnation, self.clock()
        self.side.begin_step(plan)
        self.side.start_loads(plan)
        self.side.start_stores(plan)

    def store(self, job: int, letters: str, first_block: int) -> None:
        keys = tuple(letter.encode() * 32 for letter in letters)
        blocks = tuple(range(first_block, first_block + PER_CHUNK * len(keys)))
        self.step(StepPlan(stores=[StorePlan(job, "one", NAMESPACE, "tenant", None, keys, blocks)]))

    def load(self, found: calls.Found, blocks: tuple[int, ...], skip: int = 0) -> None:
        plan = LoadPlan("two", self.server.incarnation, found.regions, skip, blocks, self.clock())
        self.step(StepPlan(loads=[plan]))

    def received(self) -> Callable[[], bool]:
        found: set[str] = set()

        def look() -> bool:
            found.update(self.side.take_finished()[1])
            return bool(found)

        return look

    def blocks(self, *block_ids: int) -> torch.Tensor:
        """``[layer, block, head, token, element]``."""
        return torch.stack([tensor[list(block_ids)] for tensor in self.tensors])

    def close(self) -> None:
        self.side.close()
        self.client.close()


@pytest.fixture(autouse=True)
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copy, "STAGING_BYTES", LAYOUT.chunk_bytes)
    monkeypatch.setattr(cuda_pinning, "PAUSE_MIN_S", 0.001)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server(clock: FakeClock) -> FakeServer:
    made = FakeServer(LAYOUT, CHUNK_SIZE, 12, clock)
    made.owner.populate(0, made.owner.data_bytes)
    return made


@pytest.fixture
def looker(server: FakeServer) -> FakeClient:
    """The scheduler's connection."""
    options = ClientOptions(
        host="", port=1, role="scheduler", engine="engine-1", incarnation="1", model="model", layout=LAYOUT,
        chunk_size_tokens=CHUNK_SIZE, slabs=(), needs_arena=False,
    )  # fmt: skip
    client = FakeClient(options)
    client.connect(server)
    return client


def look_up(looker: FakeClient, letters: str) -> calls.Found:
    assert looker.session is not None
    keys = b"".join(letter.encode() * 32 for letter in letters)
    found = looker.session.call(calls.Lookup("two", NAMESPACE, "tenant", keys))
    assert isinstance(found, calls.Found)
    return found


def begun_by(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that begin loads, as they do."""
    found: list[str] = []
    begin = rank.copier.begin_load

    def noted(*arguments: object) -> object:
        found.append(threading.current_thread().name)
        return begin(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rank.copier, "begin_load", noted)
    return found


@pytest.mark.parametrize("in_step", [True, False])
def test_chunks_go_out_and_come_back(
    server: FakeServer, clock: FakeClock, looker: FakeClient, monkeypatch: pytest.MonkeyPatch, in_step: bool
) -> None:
    rank = Rank(server, clock)
    rank.side.engine_started()
    wait_until(lambda: rank.copier.pinning.num_pinned_bytes == server.owner.data_bytes)
    threads = begun_by(rank, monkeypatch)
    if not in_step:
        monkeypatch.setattr(rank.copier, "num_batches_in_step", 1)
    rank.store(1, "ab", 1)
    wait_until(lambda: rank.side.take_news().stored == {1: 1})
    rank.load(look_up(looker, "ab"), (20, 22, 24), skip=1)
    assert rank.side.take_failed_blocks() == set()
    wait_until(rank.received())
    assert torch.equal(rank.blocks(20, 22, 24), rank.blocks(2, 3, 4))
    assert threads == [threading.current_thread().name if in_step else "antiphon-load"]
    session = rank.client.session
    assert session is not None
    assert session.num_holds == 1, "the hold of the load is given back"
    rank.close()
    assert session.num_holds == 0


def test_a_load_is_not_reported_before_its_copies_have_ended(
    server: FakeServer, clock: FakeClock, looker: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(server, clock)
    rank.store(1, "a", 1)
    wait_until(lambda: rank.side.take_news().stored == {1: 1})
    has_stopped = threading.Event()
    monkeypatch.setattr(rank.device, "run_some", lambda: False)
    rank.load(look_up(looker, "a"), (20, 21))
    wait_until(lambda: rank.side._loading[0].copying is not None)
    assert rank.side.take_finished() == (set(), set())
    assert rank.client.session is not None
    assert rank.client.session.num_holds == 2
    monkeypatch.undo()
    has_stopped.set()
    wait_until(rank.received())
    assert torch.equal(rank.blocks(20, 21), rank.blocks(1, 2))
    rank.close()


def test_closing_waits_for_the_copies_of_a_load(server: FakeServer, clock: FakeClock, looker: FakeClient) -> None:
    rank = Rank(server, clock)
    rank.store(1, "ab", 1)
    wait_until(lambda: rank.side.take_news().stored == {1: 1})
    rank.load(look_up(looker, "ab"), (20, 21, 22, 23))
    wait_until(lambda: rank.side._loading[0].copying is not None)
    rank.side.close()
    assert torch.equal(rank.blocks(20, 21, 22, 23), rank.blocks(1, 2, 3, 4))
    assert rank.client.session is not None
    assert rank.client.session.num_holds == 0


def test_a_preemption_does_not_wait_for_the_bus(
    server: FakeServer, clock: FakeClock, looker: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next compute overwrites the blocks: it waits on the GPU, and what is stored is what was there before."""
    rank = Rank(server, clock)
    before = rank.blocks(1, 2).clone()
    go = threading.Event()
    run_some = rank.device.run_some
    monkeypatch.setattr(rank.device, "run_some", lambda: run_some() if go.is_set() else bool(go.wait(0.001)) or True)
    rank.store(1, "a", 1)
    wait_until(lambda: rank.copier._all_read is not None)
    rank.side.begin_step(StepPlan(preempted=["one"]))  # returns, although nothing has run
    for tensor in rank.tensors:
        rank.device.run(rank.device.compute, tensor.zero_)
    go.set()
    wait_until(lambda: rank.side.take_news().stored == {1: 1})
    rank.device.run_all()
    assert not rank.blocks(1, 2).any()
    rank.load(look_up(looker, "a"), (5, 6))
    wait_until(rank.received())
    assert torch.equal(rank.blocks(5, 6), before)
    rank.close()


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 4), (1, 8), (8, 2)])
def test_engines_of_different_size_share_chunks(
    server: FakeServer, clock: FakeClock, looker: FakeClient, writers: int, readers: int
) -> None:
    sources = [Rank(server, clock, rank, writers) for rank in range(writers)]
    for rank in sources:
        assert run_gate(rank.copier, rank.client.session, rank.slab).has_passed  # type: ignore[arg-type]
    for number, rank in enumerate(sources):
        if writers > HEADS:  # ranks that repeat a head have the same KV
            twin = sources[number // 2 * 2]
            for tensor, other in zip(rank.tensors, twin.tensors, strict=True):
                tensor.copy_(other)
        rank.store(1, "ab", 1)
        wait_until(lambda rank=rank: rank.side.take_news().stored == {1: 1})  # type: ignore[misc]
    found = look_up(looker, "ab")
    assert len(found.regions) == 2
    whole = torch.cat([rank.blocks(1, 2, 3, 4) for rank in sources[:: max(1, writers // HEADS)]], dim=2)
    for number in range(readers):
        rank = Rank(server, clock, number, readers)
        rank.load(found, (20, 21, 22, 23))
        wait_until(rank.received())
        heads = slabs_of_rank(HEADS, number, readers)
        assert torch.equal(rank.blocks(20, 21, 22, 23), whole[:, :, heads.start : heads.stop])
        rank.close()
    for rank in sources:
        rank.close()


# ---- what a step does not wait for, and what does not end it ---------------------------------------------------------


def test_all_loads_of_a_step_share_its_budget(
    server: FakeServer, clock: FakeClock, looker: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(server, clock)
    rank.side.engine_started()
    wait_until(lambda: rank.copier.pinning.num_pinned_bytes == server.owner.data_bytes)
    rank.store(1, "a", 1)
    wait_until(lambda: rank.side.take_news().stored == {1: 1})
    found = look_up(looker, "a")
    threads = begun_by(rank, monkeypatch)
    plans = [
        LoadPlan(f"load-{number}", server.incarnation, found.regions, 0, (20 + 2 * number, 21 + 2 * number), clock())
        for number in range(6)
    ]
    rank.step(StepPlan(loads=plans))
    received: set[str] = set()
    wait_until(lambda: len(received.update(rank.side.take_finished()[1]) or received) == len(plans))  # type: ignore[func-returns-value]
    mine = threading.current_thread().name
    assert threads.count(mine) == cuda_copy.BATCHES_IN_STEP
    assert threads.count("antiphon-load") == len(plans) - cuda_copy.BATCHES_IN_STEP
    for plan in plans:
        assert torch.equal(rank.blocks(*plan.block_ids), rank.blocks(1, 2))
    rank.close()


def test_a_step_begins_no_load_from_memory_that_is_not_registered(
    server: FakeServer, clock: FakeClock, looker: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver would keep the host until such a copy is done."""
    rank = Rank(server, clock)
    rank.driver.refuses = lambda _address: True
    rank.store(1, "a", 1)
    wait_until(lambda: rank.side.take_news().stored == {1: 1})
    threads = begun_by(rank, monkeypatch)
    rank.load(look_up(looker, "a"), (20, 21))
    wait_until(rank.received())
    assert threads == ["antiphon-load"]
    assert torch.equal(rank.blocks(20, 21), rank.blocks(1, 2))
    rank.close()


def test_a_preemption_does_not_wait_for_memory_to_be_registered(server: FakeServer, clock: FakeClock) -> None:
    rank = Rank(server, clock)
    is_inside, may_go = threading.Event(), threading.Event()
    register = rank.driver.register

    def slow(address: int, num_bytes: int) -> str | None:
        is_inside.set()
        assert may_go.wait(DEADLINE_S)
        return register(address, num_bytes)

    rank.driver.register = slow  # type: ignore[method-assign]
    rank.store(1, "a", 1)
    assert is_inside.wait(DEADLINE_S)
    wait_until(lambda: any(one._wanted for one in rank.copier.pinning._arenas.values()))
    stepping = threading.Thread(target=rank.side.begin_step, args=(StepPlan(preempted=["one"]),), daemon=True)
    stepping.start()
    stepping.join(2)
    is_waiting = stepping.is_alive()
    may_go.set()
    stepping.join(DEADLINE_S)
    assert not is_waiting
    wait_until(lambda: rank.side.take_news().stored == {1: 1})
    assert rank.copier._all_read is None, "nothing was gathered after the preemption"
    rank.close()


@pytest.mark.parametrize("bug", ["plan", "mark", "query"])
def test_a_bug_in_a_load_of_a_step_is_reported(
    server: FakeServer, clock: FakeClock, looker: FakeClient, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    rank = Rank(server, clock)
    rank.side.engine_started()
    rank.store(1, "a", 1)
    wait_until(lambda: rank.side.take_news().stored == {1: 1})
    wait_until(lambda: rank.copier.pinning.num_pinned_bytes == server.owner.data_bytes)
    found = look_up(looker, "a")
    if bug == "mark":
        monkeypatch.setattr(rank.copier, "mark", lambda: 1 // 0)
    if bug == "query":
        monkeypatch.setattr(rank.device, "run_some", lambda: 1 // 0)
    blocks = (20, 21, 22, 23) if bug == "plan" else (20, 21)
    rank.load(found, blocks)  # more blocks than regions
    wait_until(rank.received())
    monkeypatch.undo()
    assert rank.side.take_failed_blocks() == set(blocks)
    assert rank.side.take_news().out_of_service is not None
    assert rank.client.session is not None
    assert rank.client.session.num_holds == 1
    rank.close()


def test_stores_whose_place_in_the_compute_is_not_known_end(
    server: FakeServer, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(server, clock)
    monkeypatch.setattr(rank.copier, "mark", lambda: 1 // 0)
    rank.store(1, "a", 1)
    assert rank.side.take_news().stored == {1: 1}
    rank.close()
