"""An engine with the real connector and a cache server, every thread's turn decided by the test.

``SteppedWorker`` has no threads: a test says when a queued load or store runs, and what happens while it waits for the
server or between two of its copies. With ``has_threads`` the connector's own threads run instead.
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from antiphon.client.options import ClientOptions
from antiphon.connector.requests import RequestIdentity
from antiphon.connector.scheduler import SchedulerSide
from antiphon.connector.worker import WorkerSide
from antiphon.core.chunks import chunk_keys
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.namespace import NamespaceDigest
from antiphon.protocol import cache as calls
from tests.connector.blocks import BLOCK_SIZE, CHUNK_SIZE, NUM_LAYERS, SLAB_BYTES, KvMemory, chunk_bytes
from tests.connector.engine import Engine, EngineOptions, EngineRequest, Status
from tests.connector.fakes import FakeClient, FakeClock, FakeServer, FakeSession

LAYER_NAMES = tuple(f"layer-{index}" for index in range(NUM_LAYERS))


def namespace_of(salt: int) -> NamespaceDigest:
    return NamespaceDigest(salt.to_bytes(32, "big"))


def identify(request: EngineRequest) -> RequestIdentity | str:
    if request.reads_no_cache:
        return "the request asks for no cached prefix"
    return RequestIdentity(namespace_of(request.salt), f"tenant-{request.salt}")


class SteppedWorker(WorkerSide):
    """A worker side whose queues a test empties."""

    def start(self, gate: str, detail: str) -> None:
        self._note = calls.EngineNote(gate, detail)
        self.session_changed()

    @property
    def has_turn(self) -> bool:
        return not (self._loads.empty() and self._stores.empty())

    def run_load(self, between: Callable[[], None] = lambda: None) -> bool:
        """Runs one queued load. Returns whether there was one."""
        try:
            load = self._loads.get_nowait()
        except queue.Empty:
            return False
        if load is not None:
            sessions: list[Any] = [held.session for held in self._sessions._held]
            for session in sessions:
                session.between_addresses = between
            self._run_load(load)
            for session in sessions:
                session.between_addresses = lambda: None
        return True

    def run_store(self) -> bool:
        """Runs one queued store. Returns whether there was one."""
        try:
            job = self._stores.get_nowait()
        except queue.Empty:
            return False
        if job is not None:
            self._run_store(job)
        return True

    def let_go(self) -> None:
        self._let_go()


class Faults(logging.Handler):
    """What was logged as an error: every failure that is caught, and none that is expected."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        self.records.append(f"{record.getMessage()}: {cause!r}")


class Harness:
    """See above.

    Args:
        module: ``vllm_connector`` on stubs.
        options: of the engine.
        seed: of every chance here.
        num_chunks: that fit in the arena.
        has_server: whether the server is there when the engine starts.
        has_threads: the connector's own threads run.
        real_port: of a real cache server, with real clients, threads and time.
    """

    def __init__(
        self,
        module: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
        options: EngineOptions | None = None,
        *,
        seed: int = 0,
        num_chunks: int = 32,
        has_server: bool = True,
        has_threads: bool = False,
        real_port: int | None = None,
        can_store: bool = True,
        can_load: bool = True,
        store_jobs_max: int = 8,
        engine: str = "engine",
    ) -> None:
        self.faults = Faults()
        logging.getLogger("antiphon.connector").addHandler(self.faults)
        self.options = options or EngineOptions()
        self.chance = random.Random(seed)
        self.clock = FakeClock()
        self.num_chunks = num_chunks
        self.layout = ChunkLayout(self.options.num_ranks, SLAB_BYTES, "opaque")
        self.expected: dict[bytes, bytes] = {}
        self.requests: list[EngineRequest] = []
        self.clients: list[FakeClient] = []
        self.servers: list[FakeServer] = []
        self.prepare: Callable[[FakeSession], None] = lambda _session: None
        self._numbers = itertools.count(1)
        self.server: FakeServer | None = self.new_server() if has_server and real_port is None else None
        facts = SimpleNamespace(
            engine=engine,
            incarnation="1",
            model=SimpleNamespace(model_name="model"),
            layout=self.layout,
            block_size_tokens=BLOCK_SIZE,
            chunk_size_tokens=CHUNK_SIZE,
            num_ranks=self.options.num_ranks,
            kv=SimpleNamespace(layer_names=LAYER_NAMES),
            notices=(),
            identify=identify,
            rank_slab=lambda rank: rank,
            slabs_written_by=lambda rank: (rank,),
            check_kv_caches=lambda *_arguments: None,
        )
        monkeypatch.setattr(module, "engine_facts", lambda *_arguments: facts)
        if real_port is None:
            monkeypatch.setattr(module, "CacheClient", self._new_client)
            monkeypatch.setattr(module, "SchedulerSide", partial(SchedulerSide, now_s=self.clock))
            worker_class = WorkerSide if has_threads else SteppedWorker
            monkeypatch.setattr(module, "WorkerSide", partial(worker_class, now_s=self.clock))
        extra = {
            "antiphon.store": can_store,
            "antiphon.load": can_load,
            "antiphon.store_queue_max": store_jobs_max,
            "antiphon.lookup_timeout_ms": 50,
            "antiphon.port": real_port or 6555,
        }
        transfer = SimpleNamespace(kv_connector_extra_config=extra)
        kv_config = SimpleNamespace(num_blocks=self.options.num_blocks)
        memories = [KvMemory(self.options.num_blocks, rank, self.chance) for rank in range(self.options.num_ranks)]
        role = module.KVConnectorRole
        self.scheduler = module.AntiphonConnector(
            SimpleNamespace(kv_transfer_config=transfer), role.SCHEDULER, kv_config
        )
        self.workers = []
        for rank in range(self.options.num_ranks):
            config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=SimpleNamespace(rank=rank))
            self.workers.append(module.AntiphonConnector(config, role.WORKER, kv_config))
            by_name = zip(
                reversed(LAYER_NAMES), reversed(memories[rank].layers), strict=True
            )  # the order has no meaning
            self.workers[-1].register_kv_caches(dict(by_name))
        if self.server is not None:
            self.server.num_calls.clear()  # the gate's
        self.engine = Engine(self.options, self.scheduler, self.workers, memories, self.chance)

    def _new_client(self, options: ClientOptions, on_change: Callable[[], None]) -> FakeClient:
        client = FakeClient(options, on_change)
        client.server_to_find = self.server
        client.prepare = lambda session: self.prepare(session)
        self.clients.append(client)
        return client

    def new_server(self) -> FakeServer:
        server = FakeServer(self.layout, CHUNK_SIZE, self.num_chunks, self.clock)
        server.on_readable = self._check_chunk
        self.servers.append(server)
        return server

    def _check_chunk(self, key: bytes, content: bytes) -> None:
        expected = self.expected.get(key)
        if expected is not None:  # else the gate's
            assert content == expected, "a chunk was stored with other bytes than its tokens have"

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, tokens: list[int], max_new_tokens: int = 2, **fields: Any) -> EngineRequest:
        request = EngineRequest(f"request-{next(self._numbers)}", list(tokens), max_new_tokens, **fields)
        self.requests.append(request)
        self.engine.add(request)
        return request

    def know_chunks(self) -> None:
        """Notes what the chunks of all requests hold, so that what is stored can be checked."""
        for request in self.requests:
            keys = chunk_keys(namespace_of(request.salt), request.all_token_ids, CHUNK_SIZE)
            for index, key in enumerate(keys):
                if key not in self.expected:
                    states = request.states[index * CHUNK_SIZE : (index + 1) * CHUNK_SIZE]
                    self.expected[key] = chunk_bytes(states, self.options.num_ranks)

    # ---- turns -----------------------------------------------------------------------------------------------------

    @property
    def sides(self) -> list[SteppedWorker]:
        return [worker._worker for worker in self.workers if worker._worker is not None]

    @property
    def scheduler_side(self) -> SchedulerSide:
        side: SchedulerSide = self.scheduler._scheduler
        return side

    def step(self) -> None:
        self.know_chunks()
        self.engine.step()
        self.clock.advance(0.001)

    def run_copies(self) -> None:
        """Runs all that is queued."""
        for side in self.sides:
            while side.has_turn:
                side.run_load()
                side.run_store()

    def settle(self, max_steps: int = 400) -> None:
        """Steps until the engine has no work, then once more, so that the last news have come."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.deliver()
            self.step()
            self.run_copies()
            self.clock.advance(0.02)  # a lookup that nobody answers is given up
        else:
            waiting = {name: request.status.name for name, request in self.engine.requests.items()}
            raise AssertionError(f"requests are left after {max_steps} steps: {waiting}")
        self.run_copies()
        self.step()
        self.deliver()

    def deliver(self) -> None:
        for client in self.clients:
            if client.session is not None:
                client.session.deliver()

    def run(self, tokens: list[int], max_new_tokens: int = 2, **fields: Any) -> EngineRequest:
        """One request, to its end."""
        request = self.add(tokens, max_new_tokens, **fields)
        self.settle()
        return request

    # ---- the server ------------------------------------------------------------------------------------------------

    def lose_server(self) -> None:
        """The server dies."""
        if self.server is not None:
            self.server.is_alive = False
        self.server = None
        for client in self.clients:
            client.lose()

    def start_server(self) -> None:
        """A new life of the server; every client finds it."""
        assert self.server is None
        self.server = self.new_server()
        self.reconnect()

    def reconnect(self) -> None:
        """Clients without a session find the server."""
        if self.server is not None:
            for client in self.clients:
                if client.session is None:
                    client.connect(self.server)

    def dispose(self) -> None:
        for client in self.clients:
            for session in client.all:
                session.dispose_if_due()

    # ---- checks ----------------------------------------------------------------------------------------------------

    def assert_idle(self) -> None:
        """Nothing is left of any request: not in the engine, not in the connector, not in the server."""
        for connector in (self.scheduler, *self.workers):
            assert connector.out_of_service is None
        assert not self.faults.records, self.faults.records
        assert not any(server.num_bad_releases for server in self.servers), "a lease was released twice"
        assert not self.engine.has_work
        assert len(self.engine.pool.free) == self.engine.pool.num_usable, "blocks are left"
        side = self.scheduler_side
        assert side.num_tracked == 0
        assert not side._jobs
        assert not self.scheduler._held_back
        assert not self.scheduler._waiting
        if self.scheduler._client.session is not None:
            assert not self.clients[0].releases, "leases were given back and are not released"
        assert not len(side._pins)
        for worker in self.sides:
            assert not worker._jobs
            assert not worker._awaited
            assert not worker._loading
            assert not worker.has_turn
        if self.server is not None and self.scheduler._client.session is not None:
            assert not self.server.cache.leases(), "leases are left"
            assert self.server.reserved_bytes == 0, "reservations are left"
        for client in self.clients:
            for session in client.all:
                assert session.num_holds <= 1, "a session is held by a copy that has ended"
                assert session.num_holds == 0 or client.options.needs_arena

    def assert_reports_add_up(self) -> None:
        """Reports say where each token came from, and the sources of every completed prompt add up."""
        requests = {request.request_id: request for request in self.requests}
        for report in (one for server in self.servers for one in server.reports):
            request = requests[report.request]
            found = {name: getattr(report, name) for name in ("device", "l1", "remote_prefill", "computed")}
            assert found == {name: request.sources.count(name) for name in found}, report
            identity = identify(request)
            assert report.namespace == (b"" if isinstance(identity, str) else identity.namespace), report
            if request.status is Status.FINISHED_STOPPED:
                assert report.num_preemptions == request.num_preemptions
            if report.finish == "finished":
                assert sum(found.values()) == request.num_prompt_tokens, report
                assert report.computed >= 1, report

    def report_of(self, request: EngineRequest) -> calls.Report:
        found = [one for server in self.servers for one in server.reports if one.request == request.request_id]
        assert len(found) == 1, found
        return found[0]

    def close(self) -> None:
        logging.getLogger("antiphon.connector").removeHandler(self.faults)
        for connector in (*self.workers, self.scheduler):
            connector.shutdown()
        for server in self.servers:
            server.close()
