"""Real vLLM on a real, local Ray: the seed's second and third YAML, KV handed over through the cache.

Goal: through Serve's address and through the router's own port the official client gets what the decode engine alone
gives it; the prompt is handed over through the cache server of the node, and the receipt says so; the decode engine
computes less than a chunk; with the third file the chunks are in a Mooncake store whose metadata is in etcd.

Method: the files one after the other, one prefill engine and one decode engine each, in float32 on CPU. The files are
the seed's but for builder, model, numbers of replicas, addresses and ports, and the sizes of memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.process.ray_cluster import RayCluster
from tests.real.deployment import wait_for
from tests.real.reuse import CHUNK, tokens
from tests.router.stack import ask, quiet_ports
from tests.storage.servers import Etcd, MooncakeMaster, Service, Take

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(900)]

DATA = Path(__file__).parents[1] / "ray" / "data"
APP = "real-ray-cache"
START_TIMEOUT_S = 500.0
NUM_OUTPUT_TOKENS = 12
TAIL = 19
MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster(die_with_parent: Callable[[], None]) -> Iterator[RayCluster]:
    """A Ray of its own: it ends with the module, before other engines start."""
    found = RayCluster(die_with_parent)
    found.call_timeout_s = START_TIMEOUT_S
    try:
        yield found
    finally:
        found.stop()


def write_lmcache(folder: Path, name: str, changes: dict[str, Any]) -> None:
    """A file of LMCache's with what this machine needs; ``extra_config`` is merged."""
    values = yaml.safe_load((DATA / name).read_text())
    if "extra_config" in changes:
        changes = changes | {"extra_config": values["extra_config"] | changes["extra_config"]}
    (folder / name).write_text(yaml.safe_dump(values | changes))


class SecondFile:
    """Sender and receiver of LMCache."""

    serve_file = "lmcache_nixl.yaml"
    has_store = False
    services: tuple[Service, ...] = ()

    def __init__(self, folder: Path, adopted: set[int], take: Take) -> None:
        port = quiet_ports(10)
        for name in ("lmcache_prefiller.yaml", "lmcache_decoder.yaml"):
            write_lmcache(folder, name, {"nixl_receiver_port": port})


class ThirdFile:
    """A Mooncake store, with its metadata in etcd."""

    serve_file = "lmcache_mooncake.yaml"
    has_store = True

    def __init__(self, folder: Path, adopted: set[int], take: Take) -> None:
        self.etcd = Etcd(folder / "etcd", adopted, take)
        self.master = MooncakeMaster(folder / "master", adopted, take, has_http_metadata=False)
        self.services: tuple[Service, ...] = (self.etcd, self.master)
        extra = {
            "local_hostname": "127.0.0.1",
            "metadata_server": f"etcd://127.0.0.1:{self.etcd.port}",
            "protocol": "tcp",
            "device_name": "",
            "master_server_address": self.master.address,
            "global_segment_size": 512 * MIB,
        }
        changes = {"remote_url": f"mooncakestore://{self.master.address}/", "max_local_cpu_size": 1}
        write_lmcache(folder, "lmcache_mooncake_store.yaml", changes | {"extra_config": extra})


class Deployed:
    """One application."""

    def __init__(self, cluster: RayCluster, made: SecondFile | ThirdFile, ports: tuple[int, int]) -> None:
        self.cluster, self.made = cluster, made
        self.port, self._cache_http = ports
        self.engines = {info["role"]: info for info in cluster.engines(APP).values()}
        wait_for(self._is_followed, "the router reads the cache server's reports", 30.0)

    def _is_followed(self) -> bool:
        servers = ask(self.port, "GET", "/status").json["cache_servers"]
        return bool(servers) and all(server["is_up"] for server in servers)

    @property
    def urls(self) -> dict[str, str]:
        """Ways to it."""
        return {"serve": f"http://127.0.0.1:{self.cluster.http_port}", "router": f"http://127.0.0.1:{self.port}"}

    def receipt(self, receipt_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.ask("GET", f"/receipts/{receipt_id}?wait_s=5").json
        return found

    def tier(self) -> dict[str, Any]:
        (found,) = ask(self._cache_http, "GET", "/status").json["storage_manager"]["l2_tiers"]
        tier: dict[str, Any] = found
        return tier


def deploy(cluster: RayCluster, made: SecondFile | ThirdFile, model: Path, folder: Path, runtime_dir: str) -> Deployed:
    values = yaml.safe_load((DATA / made.serve_file).read_text())
    (application,) = values["applications"]
    application |= {"import_path": "antiphon.ray:build_pd_openai_app", "name": APP}
    args = application["args"]
    own = {"dtype": "float32", "max_model_len": 4096, "max_num_seqs": 16, "generation_config": "vllm"}
    for name in ("prefill_config", "decode_config"):
        args[name]["model_loading_config"] = {"model_id": "smollm2", "model_source": str(model)}
        args[name]["engine_kwargs"] = own | args[name]["engine_kwargs"]
        args[name]["deployment_config"]["autoscaling_config"] = {"min_replicas": 1, "max_replicas": 1}
        variables = args[name]["runtime_env"]["env_vars"]
        if not Path(variables["LMCACHE_CONFIG_FILE"]).is_absolute():  # the third file's two pools share theirs
            variables["LMCACHE_CONFIG_FILE"] = str(folder / variables["LMCACHE_CONFIG_FILE"])
    port = quiet_ports(4)
    cache = {"port": port + 2, "http_port": port + 3, "runtime_dir": runtime_dir}
    args["antiphon"] = {"router": {"port": port, "kv_events_port": port + 1}, "cache": cache}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(values))
    cluster.call("deploy", path=str(path))
    cluster.wait_running(APP, START_TIMEOUT_S)
    return Deployed(cluster, made, (port, port + 3))


@pytest.fixture(scope="module", params=[SecondFile, ThirdFile])
def deployed(
    request: pytest.FixtureRequest,
    cluster: RayCluster,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    _ports: object,
    adopted: set[int],
) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("ray")
    made = request.param(folder, adopted, _ports.take)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="ar-") as runtime_dir:  # the path of a socket is short
        try:
            for service in made.services:
                service.start()
            yield deploy(cluster, made, model, folder, runtime_dir)
        finally:
            cluster.delete(APP)
            for service in made.services:
                service.kill()


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)


Asked = Callable[..., tuple[str, dict[str, str]]]


def completed(url: str, seed: int, **more: Any) -> tuple[str, dict[str, str]]:
    """Of token ids, which fill two chunks and a part of one."""
    prompt = tokens(2 * CHUNK + TAIL, seed)
    with client(url) as one:
        raw = one.completions.with_raw_response.create(
            model="smollm2", prompt=prompt, max_tokens=NUM_OUTPUT_TOKENS, temperature=0, extra_body=more
        )
        return raw.parse().choices[0].text, dict(raw.headers)


def chatted(url: str, seed: int, **more: Any) -> tuple[str, dict[str, str]]:
    """Streamed; longer than two chunks."""
    said = f"{seed}: " + "the river, the stone and the winter garden. " * 60 + "What is named first?"
    with client(url) as one:
        raw = one.chat.completions.with_raw_response.create(
            model="smollm2",
            messages=[{"role": "user", "content": said}],
            max_tokens=NUM_OUTPUT_TOKENS,
            temperature=0,
            stream=True,
            extra_body=more,
        )
        events = list(raw.parse())
        return "".join(each.choices[0].delta.content or "" for each in events if each.choices), dict(raw.headers)


@pytest.mark.parametrize("asked", [completed, chatted])
def test_the_official_client_gets_what_the_decode_engine_gives(deployed: Deployed, asked: Asked) -> None:
    for seed, url in enumerate(deployed.urls.values(), 100):
        text, headers = asked(url, seed)
        # Afterwards, so that the router does not find the prompt held by the decode engine.
        right, _ = asked(deployed.engines["decode"]["url"], seed, cache_salt="alone")
        assert right.strip()
        assert text == right
        receipt = deployed.receipt(headers["x-antiphon-receipt"])
        assert (receipt["path"], receipt["outcome"], receipt["handle"], receipt["handoff"]) == (
            *("pd", "completed"),
            *("cache", "cache"),
        )
        legs = receipt["tokens"]["decode"]
        assert legs["remote_prefill"] >= 2 * CHUNK
        assert 0 < legs["computed"] <= CHUNK
        assert legs["remote_prefill"] + legs["computed"] == receipt["tokens"]["prompt"]


def test_the_same_prompt_again_is_not_computed_again(deployed: Deployed) -> None:
    """By a decode engine that holds it, or handed over again: less than a chunk is computed."""
    first, _ = completed(deployed.urls["serve"], 200)
    again, headers = completed(deployed.urls["serve"], 200)
    assert again == first
    sources = deployed.receipt(headers["x-antiphon-receipt"])["tokens"]["by_source"]
    assert sum(sources.values()) == 2 * CHUNK + TAIL
    assert sources["computed"] < CHUNK


def test_the_chunks_of_the_third_file_are_in_the_mooncake_store(deployed: Deployed) -> None:
    if not deployed.made.has_store:
        status = ask(deployed._cache_http, "GET", "/status").json["storage_manager"]
        assert "l2_tiers" not in status, "the second file names no store"
        return
    completed(deployed.urls["router"], 300)
    wait_for(lambda: deployed.tier()["publications"]["published"] >= 2, "the chunks are published", 30.0)
    tier = deployed.tier()
    assert (tier["name"], tier["breaker"], tier["failures"]["failed"]) == ("mooncake", "closed", 0)
