"""The seed's second and third Serve files on a local Ray with simulated engines: KV handed over through the cache.

Goal: both files run with another builder and what this machine needs; each request is handed over through the cache
server of the node, and the receipt says so; answers are those of an engine that computes alone; what is in the file of
LMCache for a Mooncake store with etcd, a user and TLS is used: chunks are published to that store. Method: the files as
they stand in the seed, with names, ports, addresses and sizes of this machine.

Out of scope: real engines (tests/real/test_ray_cache_handoff.py); faults (test_handoff_cache.py).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine.simulated_processes import EngineProcess
from tests.process.handed_over import NUM_TOKENS, body_of, prompt_of, right_choices
from tests.process.ray_cluster import RayCluster, simulated
from tests.router.stack import Answer, ask, quiet_ports, wait_for
from tests.storage.secured_etcd import USER, Certificates, SecuredEtcd
from tests.storage.servers import Etcd, MooncakeMaster, Take

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

DATA = Path(__file__).parents[1] / "ray" / "data"
APP = f"handoff-{os.getpid()}"
START_WITHIN_S = 120.0
CHUNK = 256
NUM_HANDED = NUM_TOKENS // CHUNK * CHUNK
L1_GIB = 0.0625

Files = Callable[[Path], None]


class Deployed:
    """A file's application, and the HTTP of its node's cache server."""

    def __init__(self, cluster: RayCluster, folder: Path, name: str) -> None:
        self.cluster = cluster
        self.router_port = quiet_ports(2)
        ports = quiet_ports(2)
        self.cache_port = ports + 1
        self.runtime_dir = tempfile.TemporaryDirectory(prefix="ar-")  # the path of a socket is short
        values = yaml.safe_load((DATA / name).read_text())
        (application,) = values["applications"]
        application |= {"name": APP, "route_prefix": "/handoff", "import_path": "antiphon.ray:build_pd_openai_app"}
        args = application["args"]
        for pool in ("prefill_config", "decode_config"):
            args[pool]["model_loading_config"]["model_id"] = "m"
            variables = args[pool]["runtime_env"]["env_vars"]
            variables["LMCACHE_CONFIG_FILE"] = str(folder / variables["LMCACHE_CONFIG_FILE"])
        cache = {"port": ports, "http_port": ports + 1, "runtime_dir": self.runtime_dir.name}
        args["antiphon"] = simulated(self.router_port, kv_events_port=self.router_port + 1) | {"cache": cache}
        del args["antiphon"]["handoff"]
        path = folder / "serve.yaml"
        path.write_text(yaml.safe_dump(values))
        cluster.call("deploy", path=str(path))
        cluster.wait_running(APP, START_WITHIN_S)
        wait_for(self._is_followed, "the router reads the cache server's reports", 20.0)

    def _is_followed(self) -> bool:
        servers = ask(self.router_port, "GET", "/status").json["cache_servers"]
        return bool(servers) and all(server["is_up"] for server in servers)

    def roles(self) -> list[str]:
        return sorted(info["role"] for info in self.cluster.engines(APP).values())

    def complete(self, prompt: list[int]) -> Answer:
        return self.cluster.ask("POST", "/handoff/v1/completions", body_of(prompt))

    def receipt(self, answer: Answer) -> dict[str, Any]:
        found: dict[str, Any] = ask(
            self.router_port, "GET", f"/receipts/{answer.headers['x-antiphon-receipt']}?wait_s=5"
        ).json
        return found

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = ask(self.cache_port, "GET", "/status").json
        return found

    def close(self) -> None:
        try:
            self.cluster.delete(APP)
        finally:
            self.runtime_dir.cleanup()


def rewritten(folder: Path, name: str, **changes: Any) -> None:
    """A file of LMCache's in ``folder``, with what this machine needs."""
    values = yaml.safe_load((DATA / name).read_text())
    values["extra_config"] = values.get("extra_config", {}) | changes.pop("extra_config", {})
    (folder / name).write_text(yaml.safe_dump({k: v for k, v in (values | changes).items() if v != {}}))


def check_handed_over(deployed: Deployed, alone: EngineProcess) -> None:
    """Each prompt once; the last one again, when a decode engine holds it already."""
    for number in (1, 2, 3):
        answer = deployed.complete(prompt_of(number))
        assert answer.status == 200, answer.body
        assert answer.json["choices"] == right_choices(alone, prompt_of(number))
        receipt = deployed.receipt(answer)
        assert (receipt["path"], receipt["handoff"]) == ("pd", "cache"), receipt
        assert receipt["tokens"]["decode"]["remote_prefill"] == NUM_HANDED
    again = deployed.complete(prompt_of(3))
    assert again.json["choices"] == answer.json["choices"]
    assert deployed.receipt(again)["path"] in ("pd", "cached")


def test_the_second_file_sender_and_receiver(
    ray_cluster: RayCluster, engine_alone: EngineProcess, tmp_path: Path
) -> None:
    port = quiet_ports(10)
    for name in ("lmcache_prefiller.yaml", "lmcache_decoder.yaml"):
        rewritten(tmp_path, name, nixl_buffer_size=int(L1_GIB * (1 << 30)), nixl_receiver_port=port)
    deployed = Deployed(ray_cluster, tmp_path, "lmcache_nixl.yaml")
    try:
        assert deployed.roles() == ["decode"] * 6 + ["prefill"] * 2
        check_handed_over(deployed, engine_alone)
    finally:
        deployed.close()


@pytest.mark.parametrize("is_secured", [False, True], ids=["etcd", "etcd with user and TLS"])
def test_the_third_file_a_mooncake_store_with_etcd(
    ray_cluster: RayCluster,
    engine_alone: EngineProcess,
    tmp_path: Path,
    adopted: set[int],
    free_ports: Take,
    is_secured: bool,
) -> None:
    master = MooncakeMaster(tmp_path / "master", adopted, free_ports, has_http_metadata=False)
    own: dict[str, Any] = {}
    if is_secured:
        pem = Certificates(tmp_path / "pem")
        etcd: Etcd = SecuredEtcd(tmp_path / "etcd", (adopted, free_ports), pem, wants_certificate=True)
        own = {"metadata_user": USER, "metadata_password_file": str(tmp_path / "etcd" / "password")}
        own |= {"metadata_ca_file": str(pem.authority)}
        own |= dict(zip(("metadata_cert_file", "metadata_key_file"), pem.files("client"), strict=True))
    else:
        etcd = Etcd(tmp_path / "etcd", adopted, free_ports)
    own |= {"metadata_server": f"{'etcds' if is_secured else 'etcd'}://127.0.0.1:{etcd.port}"}
    own |= {"local_hostname": "127.0.0.1", "protocol": "tcp", "device_name": "", "global_segment_size": 256 << 20}
    own |= {"master_server_address": master.address}
    rewritten(
        *(tmp_path, "lmcache_mooncake_store.yaml"),
        remote_url=f"mooncakestore://{master.address}/",
        max_local_cpu_size=L1_GIB,
        extra_config=own,
    )
    deployed = None
    try:
        etcd.start()
        master.start()
        deployed = Deployed(ray_cluster, tmp_path, "lmcache_mooncake.yaml")
        assert deployed.roles() == ["decode", "prefill", "prefill"]
        check_handed_over(deployed, engine_alone)
        wait_for(lambda: published(deployed) >= 3 * (NUM_TOKENS // CHUNK), "the chunks are published", 20.0)
    finally:
        if deployed is not None:
            deployed.close()
        for service in (master, etcd):
            service.kill()


def published(deployed: Deployed) -> int:
    (tier,) = deployed.status()["storage_manager"]["l2_tiers"]
    assert (tier["name"], tier["breaker"]) == ("mooncake", "closed"), tier
    return int(tier["publications"]["published"])
