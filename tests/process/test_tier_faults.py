"""A cache server under traffic while what is behind its tier is killed, hung and filled up, and comes back.

Goal: no call fails, chunks in memory are found as fast as before, the breaker is seen to open, and 5 s after the
service is back chunks come from the tier again. A Mooncake store whose etcd fails goes on, until its client must start
again. Method: a real server, one real service of each kind, three clients in
processes of their own; latencies are compared within one run, with those before the fault and with those of a server
without a tier at the same time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cache_server.world import ServerProcess, wait_for
from tests.conftest import Ports
from tests.process import namespaces
from tests.process.measured import Latencies, Phase, TrafficProcess, populated, stay
from tests.process.tier_services import (
    DISK_BYTES,
    Backing,
    DiskBacking,
    EtcdBacking,
    MooncakeBacking,
    RedisBacking,
    S3Backing,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

KINDS: dict[str, Callable[..., Backing]] = {
    "redis": RedisBacking,
    "s3": S3Backing,
    "mooncake": MooncakeBacking,
    "etcd": partial(EtcdBacking, is_secured=False),
    "secured-etcd": partial(EtcdBacking, is_secured=True),
}
ROLES = ("hot", "cold", "new")
QUIET_S = 2.0
"""How long a state is measured; and after an open breaker was seen."""
OPEN_TIMEOUT_S = 10.0
RECOVERY_S = 5.0
FLAGS = ("--quota", "cold=0.001", "--quota", "new=0.001", "--instance-id", "faulty")


class World:
    """A server with one tier, and its traffic.

    Args:
        backing: what is behind the tier.
        server: with that tier alone.
        traffic: by role.
    """

    def __init__(self, backing: Backing, server: ServerProcess, traffic: dict[str, TrafficProcess]) -> None:
        self.backing = backing
        self.server = server
        self.traffic = traffic
        self.phases: list[Phase] = []
        self.recoveries_s: dict[str, float] = {}

    def tier(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get("/status")["storage_manager"]["l2_tiers"][0]
        return found

    def metric(self, name: str, **labels: str) -> float:
        """One series of ``/metrics``."""
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.server.http_port}/metrics", timeout=5).read().decode()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith(f"{name}{{") and all(each in line for each in wanted)
        ]
        assert len(values) == 1, (name, labels, values)
        return values[0]

    def is_open(self) -> bool:
        """Whether the breaker is seen to be open, in both places."""
        tier = self.tier()
        is_shown = self.metric("antiphon_cache_tier_breaker", tier=tier["name"], state="open") == 1
        return is_shown and tier["breaker"] == "open" and not tier["is_healthy"] and bool(tier["reason"])

    @property
    def outages(self) -> tuple[tuple[str, Callable[[], None], Callable[[], None]], ...]:
        """What may befall the service: the name, how it begins, how it ends."""
        backing = self.backing
        return ("killed", backing.begin_kill, backing.end_kill), ("hung", backing.begin_hang, backing.end_hang)

    def measure(self, name: str, is_reached: Callable[[], Any], begin: Callable[[], None]) -> None:
        """A phase: begins, waits until the state is seen, and stays in it."""
        began_s = time.monotonic()
        begin()
        wait_for(is_reached, f"{name} is seen: {self.tier()}", OPEN_TIMEOUT_S)
        stay(QUIET_S)
        self.phases.append(Phase(name, began_s, time.monotonic()))

    def recover(self, name: str, end: Callable[[], None]) -> None:
        """Brings the service back, and waits until chunks come from the tier and go into it."""
        end()
        began_s, is_used = time.monotonic(), self.uses_tier()
        wait_for(
            lambda: self.tier()["breaker"] == "closed" and is_used(),
            f"after {name} the tier is used again",
            4 * RECOVERY_S,
        )
        self.recoveries_s[name] = time.monotonic() - began_s
        stay(QUIET_S)

    def uses_tier(self) -> Callable[[], bool]:
        """Tells whether since now chunks came from the tier and went into it."""
        before = self.tier()

        def is_used() -> bool:
            tier = self.tier()
            has_hit = tier["fetches"]["hit"] > before["fetches"]["hit"]
            return has_hit and bool(tier["publications"]["published"] > before["publications"]["published"])

        return is_used

    def check(self) -> None:
        """Ends the traffic. No call has failed, what is in memory was found as fast as before, all recoveries were in
        time."""
        saw = {role: client.end() for role, client in self.traffic.items()}
        assert not {role: said["errors"] for role, said in saw.items() if said["errors"]}
        before, *others = self.phases
        usual = Latencies.of(saw["hot"]["samples"], before)
        print(usual)
        for phase in others:
            during, alone = (Latencies.of(saw[name]["samples"], phase) for name in ("hot", "alone"))
            print(f"{during}; a server without a tier: p50 {alone.p50:.2f} ms")
            during.check(usual, alone)
        for name, recovery_s in self.recoveries_s.items():
            print(f"{name}: back after {recovery_s:.2f} s")
            assert recovery_s <= RECOVERY_S, name
        print(self.tier()["failures"], self.tier()["publications"])


@pytest.fixture
def around(adopted: set[int], _ports: Ports) -> tuple[set[int], Callable[[int], list[int]]]:
    """What services are made with."""
    return adopted, _ports.take


@pytest.fixture
def alone(tmp_path: Path, die_with_parent: Callable[[], None]) -> Iterator[TrafficProcess]:
    """A client of a server without a tier: what else the machine does slows it down too."""
    with ServerProcess(tmp_path, die_with_parent, "--instance-id", "alone", size_gb=0.016) as server:
        client = TrafficProcess("hot", populated(server), die_with_parent)
        yield client
        client.kill()


@pytest.fixture
def make_world(
    tmp_path: Path,
    around: tuple[set[int], Callable[[int], list[int]]],
    alone: TrafficProcess,
    die_with_parent: Callable[[], None],
) -> Iterator[Callable[[str], World]]:
    """``make_world("redis")``: a server that is populated, and whose tier is in use."""
    with contextlib.ExitStack() as after:

        def make(kind: str) -> World:
            backing, preexec = make_backing(kind, tmp_path, around, die_with_parent)
            after.callback(backing.close)
            server = ServerProcess(tmp_path, preexec, "--l2", backing.url, *FLAGS, size_gb=0.016)
            after.callback(server.kill)
            populated(server)
            if isinstance(backing, DiskBacking):
                backing.show(server.process.pid)
            traffic = {"alone": alone}
            for role in ROLES:
                traffic[role] = TrafficProcess(role, server, die_with_parent)
                after.callback(traffic[role].kill)
            made = World(backing, server, traffic)
            wait_for(lambda: made.tier()["fetches"]["hit"] > 20, "chunks come from the tier", 20.0)
            return made

        yield make


def make_backing(
    kind: str, folder: Path, around: tuple[set[int], Callable[[int], list[int]]], preexec: Callable[[], None]
) -> tuple[Backing, Callable[[], None]]:
    """What is behind the tier, and what the server does before its start."""
    if kind != "disk":
        return KINDS[kind](folder / kind, *around), preexec
    namespaces.need(namespaces.CLONE_NEWNS)
    mount = folder / "disk"
    mount.mkdir()

    def begin() -> None:
        namespaces.unshare_user(namespaces.CLONE_NEWNS)
        namespaces.mount_tmpfs(str(mount), DISK_BYTES)
        namespaces.die_with_parent()

    return DiskBacking(mount), begin


@pytest.mark.parametrize("kind", ["redis", "s3", "mooncake", "disk"])
def test_faults_of_a_tier_cost_no_call_and_no_time_of_what_is_in_memory(
    make_world: Callable[[str], World], kind: str
) -> None:
    world = make_world(kind)
    world.measure("before", lambda: world.tier()["breaker"] == "closed", lambda: None)
    for name, begin, end in world.outages:
        world.measure(name, world.is_open, begin)
        world.recover(name, end)
    seen = num_without_room(world)
    world.measure("full", lambda: num_without_room(world) > seen, world.backing.begin_fill)
    world.recover("full", world.backing.end_fill)
    world.check()
    assert world.tier()["failures"]["opened"] >= 2


@pytest.mark.parametrize("kind", ["etcd", "secured-etcd"])
def test_an_etcd_that_fails_costs_nothing_until_the_client_of_the_store_starts_again(
    make_world: Callable[[str], World], kind: str
) -> None:
    world = make_world(kind)
    world.measure("before", lambda: world.tier()["breaker"] == "closed", lambda: None)
    for name, begin, end in world.outages:
        num_opened = world.tier()["failures"]["opened"]
        begin()
        world.measure(f"{name}, met", world.uses_tier(), lambda: None)
        assert world.tier()["failures"]["opened"] == num_opened
        assert world.tier()["breaker"] == "closed"
        world.measure(name, world.is_open, lambda: kill_client(world.server))
        world.recover(name, end)
    world.check()
    assert world.tier()["failures"]["opened"] >= 2


def kill_client(server: ServerProcess) -> None:
    """Kills the process that runs Mooncake's client; the tier starts another."""
    tasks = Path(f"/proc/{server.process.pid}/task")
    children = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    (child,) = [pid for pid in children if b"mooncake_child" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(child, signal.SIGKILL)


def num_without_room(world: World) -> int:
    """Publications that were refused for want of room, as the service says it."""
    tier = world.tier()
    return int(tier["publications"]["full"] if world.backing.full_counts == "full" else tier["failures"]["failed"])
