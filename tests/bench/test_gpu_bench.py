"""``bench/gpu`` without a GPU: what it starts dies with it, and what it compares shows one wrong request or head."""

from __future__ import annotations

import contextlib
import ctypes
import http.server
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

from antiphon.cache.options import CacheOptions
from antiphon.client import CacheClient, ClientOptions
from antiphon.connector import cuda_pinning
from antiphon.connector.cuda_layout import Span
from antiphon.core.chunks import ChunkChain
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.tenants import tenant_of
from antiphon.protocol import cache as calls
from antiphon.storage.arena import ArenaOwner
from tests.connector.fake_cuda import FakePinDriver

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench" / "gpu"
DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])


def load(name: str) -> ModuleType:
    """One of the scripts."""
    return importlib.import_module(name)


pytestmark = pytest.mark.process


def free_port() -> int:
    """It and the one after it are free: a cache server takes both."""
    while True:
        with socket.socket() as probe, socket.socket() as other:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                other.bind(("127.0.0.1", port + 1))
                return port


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < until_s, "it does not come about"
        threading.Event().wait(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def stack(tmp_path: Path) -> Any:
    processes = load("processes")
    return processes.Stack(processes.Paths(None, tmp_path, tmp_path, tmp_path))


# ---- processes -------------------------------------------------------------------------------------------------------

MEASUREMENT = """
import sys, threading
sys.path.insert(0, {bench!r})
from pathlib import Path
import processes
from processes import OutOfTime, Paths, Stack, client_processes, stop_at
processes.TERM_S = 0.3
out = Path({out!r})
stop_at({limit_s})
try:
    with Stack(Paths(None, out, out, out)) as stack:
        engine = stack.start("engine", {port}, ("family", str(out / "child")))
        folder = stack.folder("test")
        with client_processes(1) as clients:
            client = clients.submit(__import__("os").getpid).result()
            while not (out / "child").exists():
                engine.check()
            child = (out / "child").read_text()
            print(engine.child.pid, child, client, folder, flush=True)
            threading.Event().wait()
except OutOfTime as error:
    print(error, flush=True)
__import__("os")._exit(0)
"""
FAMILY = """
import os, signal, subprocess, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
with open(sys.argv[1] + "-", "w") as file:
    file.write(str(child.pid))
os.rename(sys.argv[1] + "-", sys.argv[1])
threading.Event().wait()
"""


@contextlib.contextmanager
def measurement(tmp_path: Path, limit_s: int = 60) -> Iterator[tuple[subprocess.Popen[str], list[int], Path]]:
    """A running one; the engine that it has started, that one's child, a client; a temporary folder."""
    (tmp_path / "family.py").write_text(FAMILY)
    code = MEASUREMENT.format(bench=str(BENCH), out=str(tmp_path), port=free_port(), limit_s=limit_s)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        *pids, folder = process.stdout.readline().split()
        try:
            yield process, [int(pid) for pid in pids], Path(folder)
        finally:
            process.kill()
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_what_was_started_dies_with_the_measurement(tmp_path: Path, number: int) -> None:
    """The engine and its child, which both ignore SIGTERM or know nothing of it, the clients and the folders."""
    with measurement(tmp_path) as (process, pids, folder):
        assert len(pids) == 3
        assert all(is_alive(pid) for pid in pids)
        assert folder.is_dir()
        os.kill(process.pid, number)
        wait_until(lambda: not any(is_alive(pid) for pid in pids) and not folder.exists())


def test_the_time_limit_ends_it(tmp_path: Path) -> None:
    with measurement(tmp_path, limit_s=3) as (process, pids, folder):
        assert process.stdout is not None
        assert process.stdout.readline() == "it took longer than 3 s\n"
        assert not any(is_alive(pid) for pid in pids[:2])
        assert not folder.exists()
        wait_until(lambda: not is_alive(pids[2]))


def test_an_error_does_not_wait_for_other_jobs() -> None:
    common = load("common")
    release, began = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        release.wait(DEADLINE_S)

    def fail() -> None:
        began.wait(DEADLINE_S)
        raise common.Failed("no")

    queued: list[int] = []
    try:
        with pytest.raises(common.Failed, match="no"):
            common.at_once([fail, hang, *[lambda: queued.append(1)] * 50], 2)
        assert not release.is_set()
    finally:
        release.set()
    assert common.at_once([lambda number=number: number for number in range(5)], 2) == [0, 1, 2, 3, 4]


class Answering(http.server.BaseHTTPRequestHandler):
    """Says yes to everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_unused: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def stale() -> Iterator[int]:
    """Something that answers on a port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_a_port_that_is_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = load("processes")
    monkeypatch.setattr(processes, "PORT_FREE_S", 0.0)
    with stale() as port, stack(tmp_path) as made:
        with pytest.raises(processes.Failed, match=f"port {port} of engine is in use"):
            made.start("engine", port, ("http.server",))
        with pytest.raises(processes.Failed, match=f"port {port} of engine is in use"):
            made.start("engine", free_port(), ("http.server",), port)
        assert made.processes == []


def test_a_process_that_has_ended_is_never_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = load("processes")
    monkeypatch.setattr(processes, "wait_free", lambda _port, _name: None)
    with stale() as port, stack(tmp_path) as made:
        process = made.start("engine", port, ("there_is_no_such_module",))
        process.child.wait(DEADLINE_S)
        with pytest.raises(processes.Failed, match="engine has failed"):
            made.wait_ready([process])


def test_a_process_that_answers_is_ready(tmp_path: Path) -> None:
    port = free_port()
    with stack(tmp_path) as made:
        process = made.start("pages", port, ("http.server", str(port), "--bind", "127.0.0.1"))
        made.wait_ready([process], "/")
        assert is_alive(process.child.pid)
    assert not is_alive(process.child.pid)


# ---- answers ---------------------------------------------------------------------------------------------------------


def answer(seed: int, moved: float = 0.0, swapped_at: int | None = None) -> Any:
    """16 tokens, the likeliest ones at each place; ``swapped_at``: where the two likeliest have changed places."""
    common = load("common")
    rows = [
        [(1_000 * seed + 10 * place + rank, -1.0 - 0.02 * rank + moved) for rank in range(5)] for place in range(16)
    ]
    tokens = [row[place == swapped_at][0] for place, row in enumerate(rows)]
    if swapped_at is not None:
        tokens[swapped_at + 1 :] = [7] * (15 - swapped_at)
    return common.Answer(tokens, [], top=[dict(row) for row in rows])


def test_one_wrong_request_of_sixteen_is_seen() -> None:
    answers = load("answers")
    wanted = [answer(seed) for seed in range(16)]
    found = [answer(seed, swapped_at=3 if seed == 5 else None) for seed in range(16)]
    assert answers.num_explained(found, wanted) == 16, "rounding exchanges neighbours"
    assert answers.num_equal(found, wanted) == 15
    found[9] = answer(99)
    assert answers.num_explained(found, wanted) == 15
    assert answers.num_same([answer(seed, moved=0.01) for seed in range(16)], wanted) == 16
    assert answers.num_same(found, wanted) == 14, "alone nothing is rounded in another way"


def test_other_kv_with_equal_tokens_is_seen() -> None:
    answers = load("answers")
    assert not answers.is_same(answer(1, moved=0.15), answer(1))
    assert answers.difference(answer(1, moved=0.15), answer(1)) == pytest.approx(0.15)
    short = answer(1)
    short.tokens = short.tokens[:8]
    assert not answers.is_explained(short.tokens, answer(1))
    assert not answers.is_same(short, answer(1))
    bare = answer(1)
    bare.top = []
    assert not answers.is_same(bare, bare)


# ---- the arena -------------------------------------------------------------------------------------------------------


def chunk(seed: int, num_layers: int = 2, noise: float = 0.0) -> Any:
    chance = numpy.random.default_rng(seed)
    values = chance.standard_normal((8, num_layers, 256, 256), dtype=numpy.float32)
    values += noise * numpy.random.default_rng(seed + 1_000).standard_normal(values.shape, dtype=numpy.float32)
    return (values.view(numpy.uint32) >> 16).astype(numpy.uint16)


@pytest.mark.parametrize("swap", [(2, 5), (0, 1)])
def test_swapped_heads_are_named(swap: tuple[int, int]) -> None:
    arena_bytes = load("arena_bytes")
    one, other = chunk(1), chunk(1, noise=0.02)
    assert arena_bytes.wrong_heads(one, other) == []
    assert arena_bytes.own_places(one, other)
    assert 0.01 < arena_bytes.distance(one, other) < 0.05
    spoiled = one.copy()
    spoiled[list(swap)] = one[list(reversed(swap))]
    assert arena_bytes.wrong_heads(spoiled, other) == list(swap)
    assert not arena_bytes.own_places(spoiled, other)
    spoiled = one.copy()
    spoiled[swap[0], 1, 0, 0] = 0x7FC0  # not a number
    assert arena_bytes.wrong_heads(spoiled, other) == [swap[0]]


def test_the_arena_is_read_and_spoiled_where_it_lies(tmp_path: Path) -> None:
    """A real cache server: a client stores, another one reads, swaps and swaps back."""
    arena_bytes, common, processes = load("arena_bytes"), load("common"), load("processes")
    ids, salt, port = common.prompt(800, 3), "some salt", free_port()
    options = ClientOptions(
        host="127.0.0.1", port=port, role="worker-0", engine="writer", incarnation="1", model="m",
        layout=ChunkLayout(8, 2 * 256 * 256 * 2), chunk_size_tokens=256, slabs=tuple(range(8)), needs_arena=True,
    )  # fmt: skip
    with processes.Stack(processes.Paths(None, ROOT / "src", tmp_path, tmp_path)) as made:
        cache = made.cache_server(port, 0.1)
        made.wait_ready([cache], "/status")
        client = CacheClient(options)
        client.start()
        assert client.wait_connected(DEADLINE_S)
        session = client.session
        assert session is not None
        chain = ChunkChain(b"n" * 32, 256)  # type: ignore[arg-type]
        chain.extend(ids[:768])
        reserved = session.call(calls.Reserve(b"n" * 32, tenant_of(salt), None, b"".join(chain.keys)))
        assert isinstance(reserved, calls.Reserved)
        stored = [chunk(seed) for seed in range(3)]
        for grant, one in zip(reserved.grants, stored, strict=True):
            ctypes.memmove(session.address_of(grant.region), one.tobytes(), one.nbytes)
        session.call(calls.Commit(tuple(grant.region for grant in reserved.grants)))
        assert common.wait_stored(cache, 3) == 3
        arena = arena_bytes.Arena(cache, 2)
        try:
            found = arena.chunks(ids, salt)
            assert all(numpy.array_equal(a, b) for a, b in zip(found, stored, strict=True))
            arena.swap_heads(ids, [1], (2, 5), salt)
            spoiled = arena.chunks(ids, salt)
            assert [arena_bytes.wrong_heads(a, b) for a, b in zip(spoiled, stored, strict=True)] == [[], [2, 5], []]
            arena.swap_heads(ids, [1], (2, 5), salt)
            assert numpy.array_equal(arena.chunks(ids, salt)[1], stored[1])
            with pytest.raises(processes.Failed, match="0 namespaces"):
                arena.chunks(ids, "another salt")
            with pytest.raises(processes.Failed, match="3 of 4 chunks"):
                arena.chunks(ids + common.prompt(300, 4), salt)
            assert common.metric(cache.port, "antiphon_cache_leases") == 0
        finally:
            arena.close()
            client.close()


# ---- what engines log ------------------------------------------------------------------------------------------------


def logged(tmp_path: Path, text: str) -> Any:
    """A process with that log."""
    path = tmp_path / "engine.log"
    path.write_text(text)
    return load("processes").Process("engine", 1, None, path)


@pytest.mark.parametrize("is_refused", [False, True])
def test_the_end_of_registering_is_seen_in_what_the_connector_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_refused: bool
) -> None:
    monkeypatch.setattr(cuda_pinning, "PAUSE_MIN_S", 0.001)
    monkeypatch.setattr(cuda_pinning, "RETRY_S", 0.001)
    caplog.set_level("INFO", "antiphon.connector")
    owner = ArenaOwner.create(4 << 20, "fake", "1")
    owner.populate(0, 2 << 20)
    driver = FakePinDriver()
    last = owner.mapping.address + (3 << 20)
    driver.refuses = lambda address: is_refused and address == last
    pinning = cuda_pinning.Pinning(driver, 1 << 20)
    pinning.add(owner.mapping)
    pinning.prepare([Span(0, owner.mapping.address, 2 << 20)])
    pinning.begin()
    assert not logged(tmp_path, caplog.text).is_registered()
    owner.populate(2 << 20, 2 << 20)
    wait_until(lambda: "are registered" in caplog.text)
    engine = logged(tmp_path, caplog.text)
    assert engine.is_registered() is not is_refused
    assert not engine.is_registered(num_workers=2)
    assert engine.num_waited() == 2
    owner.close()


def test_errors_of_a_capture_are_seen(tmp_path: Path) -> None:
    good = "Capturing CUDA graphs (FULL): 51/51\nGraph capturing finished in 6 secs\n'cudagraph_capture_sizes': [1]\n"
    bad = [
        "does not register memory of the arena, copies there are slow: CUDA error 900",
        "torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing",
        "CUDA error: operation failed due to a previous error during capture",
        "cudaErrorStreamCaptureInvalidated",
    ]
    engine = logged(tmp_path, good + "\n".join(bad) + "\nCUDA error 2\n")
    assert load("common").capture_errors(engine) == bad


def test_lines_of_a_log_have_their_times(tmp_path: Path) -> None:
    start = load("start")
    engine = logged(tmp_path, "INFO Model loading took 13.8 GiB\n")
    marks = start.Marks(engine)
    try:
        assert marks.came["loaded"].wait(DEADLINE_S)
        with engine.log.open("a") as log:
            for text in ("INFO KV lay", "out: cuda\nINFO KV reuse is on, gate passed\n"):  # a line comes in parts
                log.write(text)
                log.flush()
                wait_until(lambda: marks.looked_at(engine.log.stat().st_size))
        assert marks.came["gate passed"].wait(DEADLINE_S)
    finally:
        marks.close()
    assert marks.at_s["loaded"] < marks.at_s["gate begins"] <= marks.at_s["gate passed"]
    assert not marks.came["registered"].is_set()


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_taken_until_it_would_be_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that grows: what is free comes back after each piece."""
    memory = load("memory")
    monkeypatch.setattr(memory, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(memory, "free_bytes", lambda: memory.LOW_BYTES + (2 << 20))
    wanted = memory.LOW_BYTES - memory.MARGIN_BYTES + (7 << 20)
    assert memory.fill(wanted) == 5 << 20
    assert memory.fill(wanted - (5 << 20)) == 0


def test_a_machine_that_does_not_grow_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = load("memory")
    monkeypatch.setattr(memory, "GROW_S", 0.0)
    monkeypatch.setattr(memory, "free_bytes", lambda: memory.LOW_BYTES)
    assert memory.fill(1 << 40) == 0


# ---- points ----------------------------------------------------------------------------------------------------------


def test_storing_that_stops_in_silence_is_missed(tmp_path: Path) -> None:
    store_cost, common = load("store_cost"), load("common")
    for chunks, is_good in (([768] * 5, True), ([768] * 4 + [0], False), ([], False), ([776] * 5, False)):
        report = common.Report("store_cost", tmp_path)
        store_cost.judge_stored(report, chunks, [1e9])
        assert report.close() is is_good


def test_figures_of_an_earlier_run_do_not_stay(tmp_path: Path) -> None:
    common = load("common")
    (tmp_path / "point.json").write_text('{"good": true}')
    report = common.Report("point", tmp_path)
    found = json.loads((tmp_path / "point.json").read_text())
    assert found["good"] is False
    assert found["failure"] == "it has not ended"
    assert report.close()
    assert json.loads((tmp_path / "point.json").read_text())["good"] is True


def test_an_abort_hits_a_load_only_where_the_lease_outlives_the_client() -> None:
    watch = load("hardship").Watch(load("processes").Process("cache", 1, None, Path()))
    watch._seen = [(at_s, ("cmpl-leave-0-1-0-ab", "cmpl-leave-0-11-0-ab")) for at_s in (1.0, 1.02, 1.05, 1.08)]
    watch._seen += [(2.0, ("cmpl-leave-0-2-0-ab",)), (2.01, ())]
    watch._left_s = {"leave-0-1": 1.06, "leave-0-2": 1.9, "leave-0-3": 1.0, "leave-0-11": 1.08}
    names = ("leave-0-1", "leave-0-2", "leave-0-3", "leave-0-11", "leave-9-9")
    assert [name for name in names if watch.was_left_in_a_load(name)] == ["leave-0-1"]


def test_gaps_of_a_window() -> None:
    overlap, common = load("overlap"), load("common")
    answers = [common.Answer([], [0.5, 1.0, 1.25, 2.5], sent_s=10.0), common.Answer([], [0.5], sent_s=11.0)]
    assert overlap.gaps_ms(answers, (11.0, 12.0)) == [pytest.approx(250)]


@pytest.fixture
def machine(tmp_path: Path) -> list[str]:
    """Arguments that are right, of a machine where everything is there."""
    for package in ("site/vllm", "site/torch", "src/antiphon", "model"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "model" / "config.json").write_text((BENCH / "model-8b.json").read_text())
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "site" / "antiphon-1.dist-info").mkdir()
    plugin = "[vllm.general_plugins]\nantiphon = antiphon.connector.plugin:install\n"
    (tmp_path / "site" / "antiphon-1.dist-info" / "entry_points.txt").write_text(plugin)
    folders = {"--site": "site", "--source": "src", "--model": "model", "--out": "out"}
    return [text for name, folder in folders.items() for text in (name, str(tmp_path / folder))]


def test_arguments_that_are_right(machine: list[str]) -> None:
    run, pair = load("run"), load("pair")
    assert run.PARTS == pair.PARTS
    given = run.arguments(["pair", *machine, "--parts", "restart,pd"])
    assert given.parts == ("pd", "restart")
    assert given.time_limit_s == run.PAIR_TIME_LIMIT_S
    assert run.arguments(["pair", *machine, "--parts", "load"]).time_limit_s == run.TIME_LIMIT_S
    assert run.arguments(["pair", *machine]).parts == run.PARTS
    assert run.arguments(["rates", *machine]).parts == ()


@pytest.mark.parametrize(
    ("point", "more", "says"),
    [
        ("ttft", ["--parts", "pd"], "--parts is for pair, not for ttft"),
        ("pair", ["--parts", "pd,lod"], "each of pd, load, flood, restart at most once"),
        ("pair", ["--parts", "pd,pd"], "at most once"),
        ("rates", ["--time-limit-s", "0"], "above 0"),
        ("rates", ["--site", "/nowhere"], "there is no vllm in it"),
        ("rates", ["--source", "/nowhere"], "there is no antiphon in it"),
        ("rates", ["--model", "/nowhere"], "no config.json"),
        ("nothing", [], "invalid choice"),
    ],
)
def test_arguments_that_are_wrong(
    machine: list[str], capsys: pytest.CaptureFixture[str], point: str, more: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        load("run").arguments([point, *machine, *more])
    assert ended.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_plug_in_that_vllm_would_not_find_is_told_at_once(
    machine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines would start, and be without reuse and its log."""
    (tmp_path / "site" / "antiphon-1.dist-info" / "entry_points.txt").unlink()
    monkeypatch.setattr(sys, "path", [str(BENCH), str(tmp_path)])
    run = load("run")
    assert run.arguments(["rates", *machine]).point == "rates"
    with pytest.raises(SystemExit):
        run.arguments(["speed", *machine])
    assert "finds its plug-in" in capsys.readouterr().err


def test_a_tokenizer_is_asked_for_where_engines_start(
    machine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert load("run").arguments(["rates", *machine]).point == "rates"
    with pytest.raises(SystemExit):
        load("run").arguments(["correct", *machine])
    assert "no tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize(("script", "given"), [("pack.sh", []), ("pack.sh", ["out", "/nowhere"]), ("unpack.sh", [])])
def test_scripts_say_what_they_need(tmp_path: Path, script: str, given: list[str]) -> None:
    done = subprocess.run(
        ["bash", str(BENCH / script), *given], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert re.search(r"usage:|without which vLLM does not start", done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_all_packages_are_pinned() -> None:
    lines = (BENCH / "requirements.txt").read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert len(packages) > 70
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line) for line in packages)


def test_what_many_requests_find_at_least_is_the_servers_cap_of_leases() -> None:
    correct = load("correct")
    options = CacheOptions(arena_bytes=int(correct.ARENA_GB * 1e9))
    assert options.leased_bytes_max == correct.LEASED_GB * 1e9
    chunk_bytes = correct.CHUNK * correct.KV_BYTES_PER_TOKEN
    assert (correct.leasable(16) // correct.CHUNK + 16) * chunk_bytes <= options.leased_bytes_max
    assert correct.leasable(16) > 300_000


class Engines:
    """A stack that starts nothing and remembers what was to be started."""

    def __init__(self) -> None:
        self.engines: list[tuple[str, tuple[str, ...], str]] = []

    def cache_server(self, port: int, size_gb: float) -> None:
        assert port > 0
        assert size_gb > 0

    def wait_ready(self, *_unused: object) -> None:
        pass

    def engine(self, name: str, _port: int, _transfer: object, *args: str, **environment: str) -> Engines:
        self.engines.append((name, args, environment["CUDA_VISIBLE_DEVICES"]))
        return self

    def check_reuse(self) -> None:
        pass


@pytest.mark.parametrize(("gpus", "places", "share"), [(1, "00", "0.4"), (2, "01", "0.6")])
def test_a_pair_shares_one_gpu_where_there_is_no_other(
    gpus: int, places: str, share: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, common, stack = load("pair"), load("common"), Engines()
    monkeypatch.setattr(pair, "need_gpus", lambda _number: None)
    monkeypatch.setattr(pair, "num_gpus", lambda: gpus)
    monkeypatch.setattr(pair, "measure", lambda *_unused: None)
    pair.run(stack, common.Report("pair-start", tmp_path), ("pd", "restart"))
    assert [(name, gpu) for name, _, gpu in stack.engines] == list(zip("PD", places, strict=True))
    assert all(args[args.index("--gpu-memory-utilization") + 1] == share for _, args, _ in stack.engines)


@pytest.mark.parametrize("part", ["load", "flood"])
def test_what_compares_gpus_needs_two(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, common, stack = load("pair"), load("common"), Engines()
    monkeypatch.setattr(pair, "need_gpus", lambda _number: None)
    monkeypatch.setattr(pair, "num_gpus", lambda: 1)
    with pytest.raises(load("processes").Failed, match=f"{part} needs 2 GPUs, there is 1: --parts pd,restart run here"):
        pair.run(stack, common.Report("pair-start", tmp_path), ("pd", part))
    assert stack.engines == []
