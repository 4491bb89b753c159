"""A cache server as a process, on real sockets: every call answered, and no peer can hurt another.

In scope: the wire, the arena's descriptor, faults of peers, truth of answers under overload. Out of scope: what the
cache decides (``tests/cache``), the admin routes (``tests/cache_server``), death and restart
(``test_cache_server_life``).
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from antiphon.core.errors import CacheUnavailable
from antiphon.protocol import cache as wire
from antiphon.transport.frames_server import FrameLimits
from tests.cache_server.world import (
    Client,
    Refusal,
    ServerProcess,
    keys_of,
    namespace_of,
    resident_bytes,
    wait_for,
)

pytestmark = pytest.mark.process

Preexec = Callable[[], None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, die_with_parent: Preexec) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("cs"), die_with_parent, "--instance-id", "a-node") as made:
        yield made.wait_populated()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.connect() as made:
        yield made


REGION = wire.Region(0, 4096, 7)
REPORT = wire.Report("r", "e", "i", 300, 0, 256, 0, 44, 0, "finished")
EVERY_CALL: list[tuple[wire.Body, str, str]] = [
    # the call, its answer from a process that is attached, and from one that is not
    (wire.Hello(wire.PROTOCOL_VERSION, "again"), "protocol_error", "protocol_error"),
    (wire.Attach("e", "i", "worker-0", 1, "m", 256, 1, 65_536, None, (0,)), "protocol_error", "Attached"),
    (wire.Lookup("r", namespace_of("n"), "t", b"k" * 32), "Found", "connection_unknown"),
    (wire.Release("r", 1), "lease_unknown", "connection_unknown"),
    (wire.CopyBegan(1), "lease_unknown", "connection_unknown"),
    (wire.CopyEnded(1), "lease_unknown", "connection_unknown"),
    (wire.Reserve(namespace_of("n"), "t", None, b""), "Reserved", "connection_unknown"),
    (wire.Commit((REGION,)), "stale_handle", "connection_unknown"),
    (wire.Abort((REGION,)), "stale_handle", "connection_unknown"),
    (wire.Clear("nobody", "nothing"), "Cleared", "connection_unknown"),
    (REPORT, "Noted", "connection_unknown"),
    (wire.EngineNote("passed", "all bits equal"), "Noted", "connection_unknown"),
    (wire.AskProcesses(), "Processes", "connection_unknown"),
    (wire.Ping(), "Noted", "Noted"),
]


def name_of(answer: wire.Answered) -> str:
    return answer.code if isinstance(answer, wire.Failure) else type(answer).__name__


def test_the_table_has_every_call() -> None:
    assert {type(body) for body, _, _ in EVERY_CALL} == set(wire.Body.__args__)


@pytest.mark.parametrize(("body", "attached", "unattached"), EVERY_CALL, ids=[type(c[0]).__name__ for c in EVERY_CALL])
def test_every_call_is_answered(
    server: ServerProcess, client: Client, body: wire.Body, attached: str, unattached: str
) -> None:
    client.attach()
    assert name_of(client.ask(body)) == attached
    with server.connect() as near, Client(server.port).hello() as far:
        assert name_of(near.ask(body)) == unattached
        is_told = isinstance(body, wire.Hello | wire.Ping)
        assert name_of(far.ask(body)) == (unattached if is_told else "not_local"), "any user may connect over TCP"
        for client in (near, far):
            assert name_of(client.ask(wire.Ping())) == "Noted", "a refused call costs nothing but itself"


BAD_VALUES: list[tuple[wire.Body, str]] = [
    (wire.Lookup("r", b"short", "t", b""), "a namespace has 32 bytes"),
    (wire.Lookup("r", namespace_of("n"), "t", b"k" * 33), "keys are 32 bytes each"),
    (wire.Lookup("r" * 600, namespace_of("n"), "t", b""), "at most 512"),
    (wire.Lookup("r", namespace_of("n"), "t" * 600, b""), "at most 512"),
    (wire.Lookup("r", namespace_of("n"), "t", b"k" * 32 * 16_385), "at most 16384 are allowed"),
    (wire.Reserve(namespace_of("n"), "t", b"short", b"k" * 32), "as the parent"),
    (wire.Reserve(namespace_of("n"), "t", None, b"k" * 64), "named twice"),
    (wire.Reserve(namespace_of("n"), "t", b"k" * 32, b"k" * 32), "named twice"),
    (wire.Reserve(namespace_of("n"), "t", None, random.Random(1).randbytes(32 * 16_384)), "might not fit a frame"),
    (wire.Commit((wire.Region(-1, 4096, 1),)), "is no region"),
    (wire.Commit((wire.Region(0, 0, 1),)), "is no region"),
    (wire.EngineNote("perhaps", ""), "a gate is one of"),
    (wire.EngineNote("failed", "x" * 501), "at most 500"),
    (wire.Report("r", "e", "i", -1, 0, 0, 0, 0, 0, "finished"), "counts from 0"),
    (wire.Report("r", "e", "i", 1, 0, 0, 0, 1, 0, "sometime"), "finished or aborted"),
    (wire.Attach("e" * 600, "i", "w", 1, "m", 256, 1, 4096, None, ()), "at most 512"),
    (wire.Attach("e", "i", "w", 1, "m", 256, 0, 4096, None, ()), "from 1 to 4096 slabs"),
    (wire.Attach("e", "i", "w", 1, "m", 256, 1, 0, None, ()), "at least one byte"),
    (wire.Attach("x", "i", "w", 1, "m", 256, 1, 4096, None, (1,)), "not distinct slabs"),
]


def test_values_out_of_bounds_are_refused_by_name(server: ServerProcess) -> None:
    for body, reason in BAD_VALUES:
        with server.connect() as client:
            if not isinstance(body, wire.Attach):
                client.attach("bad-values")
            answer = client.ask(body)
            assert isinstance(answer, wire.Failure), body
            assert answer.code == "protocol_error"
            assert reason in answer.message
            assert name_of(client.ask(wire.Ping())) == "Noted"


def test_the_first_call_must_be_hello_of_this_version(server: ServerProcess) -> None:
    for body, code in ((wire.Ping(), "protocol_error"), (wire.Hello(99, "new"), "version_mismatch")):
        with Client(server.socket_path) as client:
            assert name_of(client.ask(body)) == code
            assert client.at_end() == b""


def test_attaching_over_tcp_names_the_socket(server: ServerProcess) -> None:
    with Client(server.port).hello() as far:
        with pytest.raises(Refusal) as refused:
            far.attach()
        assert refused.value.failure.code == "not_local"
        assert server.socket_path in (refused.value.failure.remedy or "")


def garbage_frames() -> dict[str, bytes]:
    chance = random.Random(7)
    payloads = {
        "random bytes": chance.randbytes(200),
        "an unknown call": msgspec.msgpack.encode([1, ["Explode", 1]]),
        "a map": msgspec.msgpack.encode({"id": 1}),
        "nothing but nil": b"\xc0",
        "text that is not UTF-8": b"\x92\x01\x93\xa5Hello\x01\xa4\xff\xfe\xfd\xfc",
        "deep nesting": b"\x91" * 100_000,
        "too few values": msgspec.msgpack.encode([1, ["Hello"]]),
        "a wrong type": msgspec.msgpack.encode([1, ["Hello", "one", "c"]]),
        "an id of 0": wire.frame(wire.Call(0, wire.Ping()))[4:],
        "bytes after the value": wire.frame(wire.Call(1, wire.Ping()))[4:] + b"\x00",
    }
    return {name: len(payload).to_bytes(4, "little") + payload for name, payload in payloads.items()}


@pytest.mark.parametrize("is_attached", [True, False])
def test_garbage_costs_one_connection(server: ServerProcess, client: Client, is_attached: bool) -> None:
    client.attach("good")
    streams = garbage_frames() | {
        "a frame of 100 MB": (100_000_000).to_bytes(4, "little") + b"x" * 65_536,
        "an empty frame": b"\0\0\0\0",
    }
    for name, stream in streams.items():
        with server.connect() as bad:
            if is_attached:
                bad.attach("bad", name)
            bad.sock.sendall(stream)
            answer = bad.receive()
            assert answer.id == 0, name
            assert isinstance(answer.body, wire.Failure), name
            assert answer.body.code == "protocol_error", name
            assert bad.at_end() == b"", name
            assert name_of(client.ask(wire.Ping())) == "Noted", name


def test_random_calls_never_end_the_server(server: ServerProcess) -> None:
    chance = random.Random(11)
    valid = [wire.frame(wire.Call(5, body))[4:] for body, _, _ in EVERY_CALL]
    for _ in range(300):
        payload = bytearray(chance.choice(valid))
        for _ in range(chance.randint(1, 4)):
            payload[chance.randrange(len(payload))] = chance.randrange(256)
        with server.connect() as client:
            if chance.random() < 0.5:
                client.attach("fuzz")
            client.sock.sendall(len(payload).to_bytes(4, "little") + payload)
            assert client.receive().id in range(1 << 63), "it was answered"
    assert server.process.poll() is None, server.log.read_text()


def test_half_frames_and_silence_cost_one_connection_each(server: ServerProcess, client: Client) -> None:
    halves = [Client(server.socket_path), Client(server.port), server.connect(), server.connect().attach("half")]
    halves[0].sock.sendall(b"\x10\0")
    halves[1].sock.sendall(b"\x10\0\0\0abc")
    halves[2].sock.sendall(wire.frame(wire.Call(1, wire.Ping()))[:-1])
    halves[3].sock.sendall(b"\x10\0\0\0abc")
    client.attach("good")
    idle = [Client(server.socket_path) for _ in range(200)]
    began_s = time.monotonic()
    while time.monotonic() - began_s < 4:
        asked_s = time.monotonic()
        assert name_of(client.ask(wire.Ping())) == "Noted"
        assert time.monotonic() - asked_s < 1
        time.sleep(0.05)
    for half in halves:
        assert isinstance(half.receive().body, wire.Failure)
        half.close()
    for silent in idle:
        answer = silent.receive().body
        assert isinstance(answer, wire.Failure)
        assert "the first frame did not come" in answer.message
        assert silent.at_end() == b""
        silent.close()


def test_a_full_port_does_not_keep_engines_out(server: ServerProcess, client: Client) -> None:
    """Any user of the machine can connect over TCP, and need not leave."""
    far = [Client(server.port) for _ in range(FrameLimits().tcp_connections_max + 20)]
    told = []
    for each in far:
        with contextlib.suppress(OSError, CacheUnavailable):
            told.append(each.hello())
    assert 0 < len(told) <= FrameLimits().tcp_connections_max
    client.attach("kept")
    with server.connect().attach("new"):
        assert name_of(client.ask(wire.Ping())) == "Noted"
    for each in far:
        each.close()
    wait_for(lambda: _is_answered(server.port), "there is room again")


def _is_answered(port: int) -> bool:
    with contextlib.suppress(OSError, CacheUnavailable), Client(port).hello():
        return True
    return False


def test_a_dropped_process_keeps_its_leases_until_it_hangs_up(server: ServerProcess) -> None:
    """It may still be copying: the server's own decision to drop it says nothing about that."""
    with server.connect().attach("dropped", "x") as bad:
        keys = keys_of("dropped", 2)
        bad.store("dropped", keys)
        found = bad.lookup("dropped", keys)
        bad.sock.sendall(b"\0\0\0\0")
        assert isinstance(bad.receive().body, wire.Failure)
        assert bad.at_end() == b""
        time.sleep(1.5)  # longer than a connection that is not attached is kept, and than the quarantine
        assert [lease["lease"] for lease in server.get("/leases")["leases"]] == [found.lease]
        assert "dropped" in {engine["engine"] for engine in server.get("/status")["engines"]}
        assert bad.read(found.regions[0]) == keys[0]
    wait_for(lambda: not server.get("/leases")["leases"], "the lease has ended")
    wait_for(
        lambda: "dropped" not in {e["engine"] for e in server.get("/status")["engines"]}, "the engine is forgotten"
    )


def test_what_differs_in_meaning_never_hits(server: ServerProcess, client: Client) -> None:
    client.attach("meaning")
    keys = keys_of("bfloat16", 4)
    client.store("bfloat16", keys)
    assert client.lookup("bfloat16", keys).num_tokens == 1024
    # Another KV type or head count gives another namespace, and so other keys.
    assert client.lookup("float8", keys_of("float8", 4)).num_tokens == 0
    # Keys under a namespace that they do not belong to, a namespace under another tenant or layout: refused.
    with pytest.raises(Refusal, match="layout_mismatch"):
        client.lookup("float8", keys)
    with pytest.raises(Refusal, match="layout_mismatch"):
        client.lookup("bfloat16", keys, tenant="other")
    with server.connect().attach("other", num_slabs=2, slab_bytes=32_768, slabs=(0, 1)) as other:
        with pytest.raises(Refusal, match="layout_mismatch"):
            other.lookup("bfloat16", keys)
        with pytest.raises(Refusal, match="layout_mismatch"):
            other.reserve("bfloat16", keys)
    for changes in ({"num_slabs": 2}, {"slab_bytes": 4096}, {"fingerprint": "avx512"}, {"chunk_size_tokens": 128}):
        with server.connect() as second, pytest.raises(Refusal, match="layout_mismatch"):
            second.attach("meaning", **changes)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_under_overload_what_an_answer_says_is_there(tmp_path: Path, die_with_parent: Preexec, policy: str) -> None:
    """1,000 stores into an arena of 128 chunks while another engine fills it without a pause.

    Each lookup is sent together with the call before it, so that what the other engine evicts in between, as it may,
    is not taken for an untrue answer.
    """
    with ServerProcess(tmp_path, die_with_parent, "--eviction-policy", policy, size_gb=0.0084) as server:
        server.wait_populated()
        stop = threading.Event()
        noise = server.connect().attach("noise")
        num_noise = 0

        def make_noise() -> None:
            nonlocal num_noise
            while not stop.is_set():
                noise.store("noise", keys_of(f"noise-{num_noise}", 4))
                num_noise += 1

        thread = threading.Thread(target=make_noise)
        chance = random.Random(3)
        outcomes: Counter[str] = Counter()
        with server.connect().attach("judge") as client:
            thread.start()
            try:
                for number in range(1000):
                    name = f"judge-{chance.randrange(40) if number % 2 else number}"
                    outcomes.update(store_and_judge(client, keys_of(name, chance.randint(1, 6))))
            finally:
                stop.set()
                thread.join()
        noise.close()
        assert outcomes["true"] == 1000
        assert outcomes["resident"] > 50, "the mask was tried"
        assert num_noise > 100
        assert server.get("/leases")["leases"] == []


def store_and_judge(client: Client, keys: list[bytes]) -> list[str]:
    """Stores; ``true`` if lookups found what the answers said, before and after the commit. And the verdicts."""
    joined = b"".join(keys)
    lookup = wire.Lookup("r", namespace_of("judge"), "t", joined)
    reserved, found = client.ask_together(wire.Reserve(namespace_of("judge"), "t", None, joined), lookup)
    assert isinstance(reserved, wire.Reserved)
    assert isinstance(found, wire.Found)
    verdicts = [*reserved.verdicts, "end"]
    is_true = len(found.regions) == next(i for i, verdict in enumerate(verdicts) if verdict != "resident")
    client.release(found)
    for grant in reserved.grants:
        client.write(grant.region, keys[grant.index])
    regions = tuple(grant.region for grant in reserved.grants)
    committed, found = client.ask_together(wire.Commit(regions), lookup) if regions else (None, found)
    assert isinstance(found, wire.Found)
    if committed is not None:
        assert isinstance(committed, wire.Committed)
        assert set(committed.outcomes) == {"readable"}
        there = next(i for i, verdict in enumerate(verdicts) if verdict not in ("resident", "write"))
        is_true = is_true and len(found.regions) == there
        is_true = is_true and [client.read(region) for region in found.regions] == keys[:there]
        client.release(found)
    return [*reserved.verdicts, "true" if is_true else "untrue"]


def test_a_stopped_client_does_not_hurt_others(server: ServerProcess, die_with_parent: Preexec) -> None:
    argv = [sys.executable, "-m", "tests.cache_server.holder", server.socket_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, preexec_fn=die_with_parent, text=True, **pipes) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == "holding\n"
        holder.send_signal(signal.SIGSTOP)
        try:
            with server.connect().attach("goes-on") as client:
                for number in range(50):
                    asked_s = time.monotonic()
                    keys = keys_of(f"goes-on-{number}", 2)
                    assert client.store("goes-on", keys) == ("write", "write")
                    client.release(client.lookup("goes-on", keys))
                    assert time.monotonic() - asked_s < 0.5
            assert "holder" in {engine["engine"] for engine in server.get("/status")["engines"]}, "it is not given up"
        finally:
            holder.kill()
    wait_for(lambda: not server.get("/leases")["leases"], "the lease has ended")


def test_a_slow_reader_costs_little_memory(server: ServerProcess) -> None:
    with server.connect().attach("writer") as client:
        keys = keys_of("long", 100)
        client.store("long", keys)
        before_bytes = resident_bytes(server.process.pid)
        slow = server.connect().attach("slow")
        body = wire.Lookup("r", namespace_of("long"), "t", b"".join(keys))
        frame = wire.frame(wire.Call(1, body))
        slow.sock.settimeout(0.3)
        num_sent = 0
        while num_sent < 20_000:  # 60 MB of answers
            try:
                slow.sock.send(frame)
            except TimeoutError:
                break
            num_sent += 1
        assert 0 < num_sent < 20_000, "the server took everything, and keeps the answers"
        for _ in range(20):
            assert name_of(client.ask(wire.Ping())) == "Noted"
        assert resident_bytes(server.process.pid) - before_bytes < 20 << 20
        slow.close()
    wait_for(lambda: not server.get("/leases")["leases"], "its leases have ended")


def test_the_gate_and_the_processes_of_an_engine_are_shown(server: ServerProcess) -> None:
    with (
        server.connect().attach("two", role="scheduler", slabs=()) as first,
        server.connect().attach("two", role="worker-0") as second,
        server.connect().attach("two", "another life", role="worker-0"),
    ):
        second.call(wire.EngineNote("failed", "bit 7 of layer 3"), wire.Noted)
        processes = first.call(wire.AskProcesses(), wire.Processes).processes
        assert processes == (("scheduler", "not_run"), ("worker-0", "failed"))
        engines = [engine for engine in server.get("/status")["engines"] if engine["engine"] == "two"]
        assert [len(engine["processes"]) for engine in engines] == [2, 1]
        assert engines[0]["processes"][1]["detail"] == "bit 7 of layer 3"


def test_a_report_is_published_and_summed(server: ServerProcess, client: Client) -> None:
    client.attach()
    before = server.get("/status")["tokens"]["reported"]
    since = server.get("/reports?since=1&wait_s=0")["next"]
    client.call(REPORT, wire.Noted)
    page = server.get(f"/reports?since={since}&wait_s=5&incarnation={server.incarnation}")
    assert [(report["request"], report["l1"], report["computed"]) for report in page["events"]] == [("r", 256, 44)]
    after = server.get("/status")["tokens"]["reported"]
    assert {source: after[source] - before[source] for source in before} == {
        "device": 0,
        "l1": 256,
        "l2": 0,
        "peer": 0,
        "remote_prefill": 0,
        "computed": 44,
    }


def test_only_this_user_can_reach_the_socket(server: ServerProcess) -> None:
    path = Path(server.socket_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o077 == 0
    with socket.socket() as probe, pytest.raises(OSError, match="refused"):
        probe.connect(("127.0.0.2", server.port))
