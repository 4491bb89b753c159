"""Real vLLM on a real, local Ray: the seed's Python and its first YAML, one prefill engine and one decode engine.

Goal: through Serve's address and through the router's own port the official client gets what the decode engine alone
gives it; KV is handed over by NIXL, once a request; a receipt says what one without Ray says; nothing is left. Method:
the applications one after the other, so that two engines run at a time, in float32 on CPU. The YAML is the seed's but
for builder, model, port and the numbers of replicas.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from antiphon.engine.vllm import EngineMetrics, parse_metrics
from antiphon.ray.listeners import app_listeners
from tests.process.deployment import marked_pids
from tests.process.ray_cluster import RayCluster
from tests.real.deployment import wait_for
from tests.router.stack import ask, quiet_ports

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(900)]

SEED = Path(__file__).parents[1] / "ray" / "data" / "nixl.yaml"
START_TIMEOUT_S = 500.0
PROMPT = "The capital of France is"
CONVERSATION: Any = [{"role": "user", "content": "What is the capital of France?"}]
NUM_TOKENS = 12
RECEIPT = {"path": "pd", "outcome": "completed"}


@pytest.fixture(scope="module")
def cluster(die_with_parent: Callable[[], None]) -> Iterator[RayCluster]:
    """A Ray of its own: it ends with the module, before other engines start."""
    found = RayCluster(die_with_parent)
    found.call_timeout_s = START_TIMEOUT_S
    try:
        yield found
    finally:
        found.stop()


def llm_config(model: Path) -> dict[str, Any]:
    """The seed's, with a model that is here; a served name, since that is no hub id."""
    return {
        "model_loading_config": {"model_id": "smollm2", "model_source": str(model)},
        "engine_kwargs": {
            "dtype": "float32",
            "max_model_len": 4096,
            "max_num_seqs": 16,
            "generation_config": "vllm",
            "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        },
    }


def deploy_python(cluster: RayCluster, model: Path, folder: Path, port: int) -> None:
    configs = {"prefill_config": llm_config(model), "decode_config": llm_config(model)}
    cluster.call("run", pd_config=configs | {"antiphon": {"router": {"port": port}}}, name="real-ray")


def deploy_yaml(cluster: RayCluster, model: Path, folder: Path, port: int) -> None:
    values = yaml.safe_load(SEED.read_text())
    (application,) = values["applications"]
    application |= {"import_path": "antiphon.ray:build_pd_openai_app", "name": "real-ray"}
    args = application["args"]
    for name in ("prefill_config", "decode_config"):
        own = llm_config(model)
        args[name]["model_loading_config"] = own["model_loading_config"]
        args[name]["engine_kwargs"] = own["engine_kwargs"] | args[name]["engine_kwargs"]
        args[name]["deployment_config"]["autoscaling_config"] = {"min_replicas": 1, "max_replicas": 1}
    args["antiphon"] = {"router": {"port": port}}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(values))
    cluster.call("deploy", path=str(path))
    cluster.wait_running("real-ray", START_TIMEOUT_S)


class Deployed:
    """One application."""

    def __init__(self, cluster: RayCluster, port: int) -> None:
        self.cluster, self.port = cluster, port
        self.engines = {info["role"]: info for info in cluster.engines("real-ray").values()}

    @property
    def urls(self) -> dict[str, str]:
        """Ways to it."""
        return {"serve": f"http://127.0.0.1:{self.cluster.http_port}", "router": f"http://127.0.0.1:{self.port}"}

    def metrics(self, role: str) -> EngineMetrics:
        port = int(self.engines[role]["url"].rpartition(":")[2])
        return parse_metrics(ask(port, "GET", "/metrics").body.decode())

    def num_transfers(self) -> int:
        return self.metrics("decode").num_nixl_transfers or 0

    def receipt(self, receipt_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.ask("GET", f"/receipts/{receipt_id}?wait_s=5").json
        return found


@pytest.fixture(scope="module", params=[deploy_python, deploy_yaml], ids=["python", "yaml"])
def deployed(
    request: pytest.FixtureRequest, cluster: RayCluster, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployed]:
    port = quiet_ports(1)
    try:
        request.param(cluster, model, tmp_path_factory.mktemp("ray"), port)
        yield Deployed(cluster, port)
    finally:
        cluster.delete("real-ray")


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)


def completed(url: str) -> tuple[str, dict[str, str]]:
    with client(url) as one:
        raw = one.completions.with_raw_response.create(
            model="smollm2", prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0
        )
        return raw.parse().choices[0].text, dict(raw.headers)


def chatted(url: str) -> tuple[str, dict[str, str]]:
    """Streamed."""
    with client(url) as one:
        raw = one.chat.completions.with_raw_response.create(
            model="smollm2", messages=CONVERSATION, max_tokens=NUM_TOKENS, temperature=0, stream=True
        )
        events = list(raw.parse())
        return "".join(each.choices[0].delta.content or "" for each in events if each.choices), dict(raw.headers)


@pytest.mark.parametrize("asked", [completed, chatted])
def test_the_official_client_gets_what_the_decode_engine_gives(
    deployed: Deployed, asked: Callable[[str], tuple[str, dict[str, str]]]
) -> None:
    right, _ = asked(deployed.engines["decode"]["url"])
    assert right.strip()
    for url in deployed.urls.values():
        text, headers = asked(url)
        assert text == right
        assert headers["x-antiphon-path"] == "pd"
        receipt = deployed.receipt(headers["x-antiphon-receipt"])
        assert {name: receipt[name] for name in RECEIPT} == RECEIPT
        assert receipt["prefill"] == deployed.engines["prefill"]["url"].removeprefix("http://")
        assert sum(receipt["tokens"]["by_source"].values()) == receipt["tokens"]["prompt"]


def test_each_request_is_one_transfer(deployed: Deployed) -> None:
    before = deployed.num_transfers()
    with client(deployed.urls["serve"]) as one:
        for number in range(3):
            prompt = f"{number} " + "river stone bread cloud winter garden " * 30
            one.completions.create(model="smollm2", prompt=prompt, max_tokens=4, temperature=0)
    wait_for(lambda: deployed.num_transfers() == before + 3, "three NIXL transfers", 15)


def test_engine_ids_are_of_this_life_and_nothing_is_reached_from_outside(deployed: Deployed) -> None:
    ids = {info["engine_id"] for info in deployed.engines.values()}
    assert len(ids) == 2
    assert not ids & {"engine1", "engine2"}
    assert [each for each in app_listeners("real-ray") if each.owner == "process" and not each.is_loopback] == []


def test_a_killed_replica_leaves_no_process_of_its_engine(deployed: Deployed) -> None:
    """The last test of an application: its engine is not waited for again."""
    pid = deployed.engines["prefill"]["pid"]
    name = deployed.engines["prefill"]["name"]
    with open(f"/proc/{pid}/stat") as stat:
        replica = int(stat.read().rpartition(")")[2].split()[1])
    others = set(marked_pids("real-ray"))
    os.kill(replica, signal.SIGKILL)

    def is_gone() -> bool:
        left = [each for each in marked_pids("real-ray") if each in others and name.encode() in environment(each)]
        return not left

    wait_for(is_gone, "every process of the engine has ended", 15)


def environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
