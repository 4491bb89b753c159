"""A Ray of two nodes whose cache servers share: KV that the prefill engine of one node has stored is handed over to the
decode engine of the other.

Goal: with ``cache.peers`` the server of each node is a member of the coordinator beside the router, at the address of
its node and with the secret of the cluster; each prompt is computed once, and its chunks are pulled from node to node;
a coordinator that is killed comes back, and so do its members. Method: two networks of the kernel, without root, with a
raylet in each; simulated engines, prefill on one and decode on the other by a resource of the nodes.

Out of scope: faults of the link (test_two_networks.py); one node (test_ray_cache_handoff.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cache_server.peer_world import secret_file
from tests.engine.simulated_processes import EngineProcess
from tests.process.deployment import marked_pids
from tests.process.handed_over import NUM_TOKENS, body_of, prompt_of, right_choices
from tests.process.ray_cluster import RayCallFailed, RayCluster, fixed, model_config, simulated
from tests.process.two_networks import Namespace, TwoNetworks, two_networks
from tests.router.stack import ask, quiet_ports, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

APP = f"nodes-{os.getpid()}"
CHUNK = 256
NUM_CHUNKS = NUM_TOKENS // CHUNK
L1_BYTES = 64 << 20
PORTS = {
    name: 18_100 + number for number, name in enumerate(("calls", "http", "peers", "coordinator", "coordinator_http"))
}
"""Of networks that have no others."""


class Nodes:
    """The application on both nodes, and the ways to it."""

    def __init__(self, cluster: RayCluster, networks: TwoNetworks, router_port: int) -> None:
        self.cluster = cluster
        self.networks = networks
        (router,) = cluster.call("replicas", app=APP)["router"]
        self.router_address = router["address"]
        beside = networks.p if router["address"] == networks.p.address else networks.d
        self.router_port = beside.outside(router_port)
        self.coordinator_port = beside.outside(PORTS["coordinator_http"])
        self.http_ports = {role: getattr(networks, role).outside(PORTS["http"]) for role in ("p", "d")}

    def members(self) -> dict[str, str]:
        """Of the coordinator: where each is, by name."""
        try:
            said = ask(self.coordinator_port, "GET", "/status").json
        except OSError:  # a relay, or the coordinator, is not there yet
            return {}
        return {each["instance"]: each["url"] for each in said["members"]}

    def counts(self, role: str) -> dict[str, int]:
        found: dict[str, int] = ask(self.http_ports[role], "GET", "/status").json["peers"]["counts"]
        return found

    def complete(self, prompt: list[int]) -> Any:
        return ask(self.router_port, "POST", "/v1/completions", body_of(prompt))


def config(secret: str, router_port: int, runtime_dir: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for role, resource in (("prefill", "p"), ("decode", "d")):
        pool = model_config(**fixed(1), ray_actor_options={"num_cpus": 0.1, "resources": {resource: 1}})
        del pool["engine_kwargs"]
        values[f"{role}_config"] = pool
    cache = {"peers": True, "cluster_secret_file": secret, "l1_size_bytes": L1_BYTES, "runtime_dir": runtime_dir}
    cache |= {"port": PORTS["calls"], "http_port": PORTS["http"], "peer_port": PORTS["peers"], "peer_transport": "tcp"}
    cache |= {"coordinator_port": PORTS["coordinator"], "coordinator_http_port": PORTS["coordinator_http"]}
    own = simulated(router_port, host="0.0.0.0", public_without_key=True, kv_events_host="0.0.0.0")
    values["antiphon"] = own | {"cache": cache, "handoff": {"kind": "cache"}}
    return values


@contextlib.contextmanager
def joined(cluster: RayCluster, network: Namespace, log: Path) -> Iterator[None]:
    """A second node of ``cluster``, in ``network``."""
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    argv += ["--address", cluster.call("gcs_address"), "--node-ip-address", network.address]
    argv += ["--num-cpus", "2", "--object-store-memory", str(80 << 20), "--resources", '{"d": 8}']
    env = cluster.env | {"RAY_AUTH_MODE": "token", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = network.popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:

        def has_started() -> bool:
            assert process.poll() is None, log.read_text()
            return "Ray runtime started" in log.read_text()

        wait_for(has_started, "the second node", 60.0)
        yield
    finally:
        process.kill()
        process.wait()
        for pid in pids_in(network):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def pids_in(network: Namespace) -> list[int]:
    """What runs in a network, but for what the test itself has started there."""
    own, found = os.readlink(f"/proc/{network.pid}/ns/net"), []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent != os.getpid() and os.readlink(path / "ns" / "net") == own:
                found.append(int(path.name))
    return found


@pytest.fixture
def nodes(adopted: set[int], tmp_path: Path) -> Iterator[Nodes]:
    with contextlib.ExitStack() as undo:
        networks = undo.enter_context(two_networks(adopted))
        runtime_dir = undo.enter_context(tempfile.TemporaryDirectory(prefix="ar-"))  # the path of a socket is short
        cluster = RayCluster(networks.p.preexec, address=networks.p.address, resources={"p": 8})
        undo.callback(cluster.stop)
        undo.enter_context(joined(cluster, networks.d, tmp_path / "node.log"))
        port = quiet_ports(1)
        undo.callback(cluster.delete, APP)
        secret = Path(secret_file(tmp_path))
        secret.chmod(0o600)
        try:
            cluster.call("run", pd_config=config(str(secret), port, runtime_dir), name=APP)
        except RayCallFailed as error:
            raise AssertionError(cluster.call("application", app=APP)["message"]) from error
        yield Nodes(cluster, networks, port)


def test_nodes_hand_over_through_their_cache_servers(nodes: Nodes, engine_alone: EngineProcess) -> None:
    addresses = [nodes.networks.p.address, nodes.networks.d.address]
    urls = sorted(f"{address}:{PORTS['peers']}" for address in addresses)
    wait_for(lambda: sorted(nodes.members().values()) == urls, "both are members", 30.0)
    check_handed_over(nodes, engine_alone, (1, 2, 3))
    before = nodes.members()
    for pid in coordinator_pids():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: nodes.members() == before, "the coordinator and its members are back", 60.0)
    wait_for(lambda: nodes.counts("p")["listings"] >= 2, "what the server of P holds is told again", 20.0)
    check_handed_over(nodes, engine_alone, (4, 5))


def check_handed_over(nodes: Nodes, alone: EngineProcess, numbers: tuple[int, ...]) -> None:
    """Each prompt once: right answers, all chunks pulled by D's server and none by P's."""
    pulled, lent = nodes.counts("d")["pulled"], nodes.counts("p")["lent"]
    for number in numbers:
        answer = nodes.complete(prompt_of(number))
        assert answer.status == 200, answer.body
        assert answer.json["choices"] == right_choices(alone, prompt_of(number))
    assert nodes.counts("d")["pulled"] - pulled == NUM_CHUNKS * len(numbers)
    assert nodes.counts("p")["lent"] - lent >= NUM_CHUNKS * len(numbers)
    assert nodes.counts("p")["pulled"] == 0


def coordinator_pids() -> list[int]:
    found = [pid for pid in marked_pids(APP) if b"\0coordinator\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert found
    return found
