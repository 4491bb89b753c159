"""The Ray Serve application on a local Ray with simulated engines.

Goal: what a client gets through Serve's address is what it gets without Ray; each thing that Ray's own P/D does wrong
is right here; what is killed comes back, no request hangs, and nothing is left. Method: the one application of the
session, from Python; the tests that kill come after those that ask. Times are printed, not judged, but for bounds.

Out of scope: the size of pools (test_ray_scaling.py); what is deployed beside it or again (test_ray_deploys.py); real
engines (tests/real/test_ray.py).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.ray.listeners import app_listeners
from tests.process.deployment import Load, marked_pids
from tests.process.ray_cluster import APP, App
from tests.router.stack import Answer, RouterProcess, ask, metrics_of, raw_request, sent, total, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(150)]

BACK_WITHIN_S = 60.0
PROMPT = "the quick brown fox jumps over the lazy dog"
COMPLETION = {"model": "m", "prompt": PROMPT, "max_tokens": 12}
CHAT = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12}
ROUTES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


def complete(app: App, **fields: Any) -> Answer:
    """Through Serve's address."""
    timeout_s = fields.pop("timeout_s", None)
    rest = {} if timeout_s is None else {"timeout_s": timeout_s}
    return app.post("/v1/completions", COMPLETION | fields, **rest)


def receipt_of(app: App, answer: Answer) -> dict[str, Any]:
    """Closed, and asked for at Serve's address."""
    path = f"/receipts/{answer.headers['x-antiphon-receipt']}?wait_s=5"
    found: dict[str, Any] = app.cluster.ask("GET", path).json
    assert found["outcome"], found
    return found


@pytest.fixture(scope="module")
def app(ray_app: App) -> App:
    return ray_app


@pytest.fixture(scope="module")
def plain(app: App, die_with_parent: Callable[[], None]) -> Iterator[RouterProcess]:
    """A router that knows nothing of Ray, before the same engines."""
    flags = [
        part for role in ("prefill", "decode") for each in app.engines(role) for part in (f"--{role}", each["url"])
    ]
    router = RouterProcess.start(die_with_parent, *flags)
    yield router
    router.stop()


# ---- as without Ray --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_is_that_of_a_router_without_ray(app: App, plain: RouterProcess, path: str, stream: bool) -> None:
    body = ROUTES[path] | {"stream": stream}
    right = plain.ask("POST", path, body)
    for way, port in app.ports.items():
        answer = ask(port, "POST", path, body)
        assert (answer.status, answer.text) == (200, right.text), way
        assert answer.headers["content-type"] == right.headers["content-type"]
        assert answer.headers["x-antiphon-path"] == "pd"
        if stream:
            assert answer.events[-1] == "[DONE]"
            assert len(answer.events) == len(right.events)


def test_a_receipt_through_serve_says_what_one_without_ray_says(app: App, plain: RouterProcess) -> None:
    ours, theirs = receipt_of(app, complete(app)), plain.receipt(plain.ask("POST", "/v1/completions", COMPLETION))
    assert set(ours) == set(theirs)
    same = ("path", "reason", "outcome", "status", "route", "method")
    assert {name: ours.get(name) for name in same} == {name: theirs.get(name) for name in same}
    assert ours["path"] == "pd"


def test_serves_address_has_the_routers_own_routes(app: App) -> None:
    assert app.cluster.ask("GET", "/health").json == {"status": "ok"}
    ready = app.cluster.ask("GET", "/readiness")
    assert (ready.status, ready.json["decode"]) == (200, {"usable": 2, "total": 2})
    before = total(metrics_of(app.cluster.http_port), "requests_total")
    complete(app)
    wait_for(lambda: total(metrics_of(app.cluster.http_port), "requests_total") == before + 1, "the request is counted")
    models = app.cluster.ask("GET", "/v1/models").json
    assert [model["id"] for model in models["data"]] == ["m"]


def test_a_query_and_an_error_pass_unchanged(app: App) -> None:
    for path in ("/receipts/nothing?wait_s=0", "/v1/nothing%20here?a=b%2Fc", "/receipts/x?wait_s=-1"):
        ours, theirs = app.cluster.ask("GET", path), ask(app.router_port, "GET", path)
        assert (ours.status, ours.body) == (theirs.status, theirs.body)
        assert ours.error


def test_clients_that_are_not_local_see_no_engines(app: App) -> None:
    answer = app.cluster.ask("GET", "/status", headers={"X-Forwarded-For": "192.0.2.7"})
    assert (answer.status, answer.error["code"]) == (403, "admin_only_on_loopback")


# ---- what Ray's own application gets wrong ---------------------------------------------------------------------------


def test_each_prompt_of_a_list_has_its_own_answer(app: App) -> None:
    prompts = ["capital cities of", "one two three"]
    alone = [complete(app, prompt=prompt).text for prompt in prompts]
    together = complete(app, prompt=prompts).json["choices"]
    assert [choice["text"] for choice in together] == alone
    assert alone[0] != alone[1]


def test_n_answers_are_whole(app: App) -> None:
    alone = complete(app).text
    answer = complete(app, n=2)
    assert answer.status == 200
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1]
    assert answer.json["choices"][0]["text"] == alone


def test_min_tokens_reach_the_decode_engine_alone(app: App) -> None:
    answer = complete(app, min_tokens=8, max_tokens=16)
    assert (answer.status, answer.headers["x-antiphon-path"]) == (200, "pd")
    assert answer.json["usage"]["completion_tokens"] >= 8


def test_a_client_may_not_hand_over(app: App) -> None:
    answer = complete(app, kv_transfer_params={"do_remote_prefill": True})
    assert answer.status == 400
    assert "kv_transfer_params" in answer.error["message"]
    assert not any(word in answer.body.decode() for word in ("127.0.0.1", "actor", "pid"))


def test_an_unknown_model_is_said_in_the_shape_of_openai(app: App) -> None:
    answer = complete(app, model="nobody")
    assert (answer.status, answer.error["type"]) == (404, answer.error["type"])
    assert "nobody" in answer.error["message"]


def test_engine_ids_are_of_one_life_and_say_the_role(app: App) -> None:
    found = app.cluster.engines(APP).values()
    ids = [info["engine_id"] for info in found]
    assert len(set(ids)) == 3
    assert all(info["engine_id"] == f"{info['name']}-{info['incarnation']}" for info in found)
    assert all(info["engine_id"].startswith(info["role"]) for info in found)
    shown = {row["url"]: row["engine_id"] for row in ask(app.router_port, "GET", "/endpoints").json["endpoints"]}
    assert {info["url"]: info["engine_id"] for info in found if info["role"] == "prefill"}.items() <= shown.items()
    assert len({info["side_channel"]["port"] for info in found}) == 3


def test_replicas_tell_serve_what_they_are(app: App) -> None:
    asked = app.cluster.call("replicas", app=APP)
    assert asked["decode"][0]["shape"]["model"] == "m"
    assert {info["url"] for info in asked["decode"]} == {info["url"] for info in app.engines("decode")}
    assert asked["router"][0]["url"] == f"http://127.0.0.1:{app.router_port}"


def test_nothing_of_the_application_is_reached_from_other_machines(app: App) -> None:
    found = app_listeners(APP)
    assert {"prefill", "decode", "router", "ingress"} <= {each.name.partition("-")[0] for each in found}
    assert [each for each in found if not each.is_loopback and each.owner != "ray"] == []


def test_each_engine_has_the_gpus_that_ray_gave_it(app: App) -> None:
    """None where it asked for none: Ray would show it all of the node."""
    shown = {
        role: [
            dict(item.partition(b"=")[::2] for item in Path(f"/proc/{info['pid']}/environ").read_bytes().split(b"\0"))
            for info in app.engines(role)
        ]
        for role in ("prefill", "decode")
    }
    own = [variables[b"CUDA_VISIBLE_DEVICES"].decode() for variables in shown["decode"]]
    assert sorted(own) == sorted(info["devices"][0] for info in app.engines("decode"))
    assert len(set(own)) == 2
    assert [variables.get(b"CUDA_VISIBLE_DEVICES", b"") for variables in shown["prefill"]] == [b""]


def test_a_client_that_leaves_ends_its_request(app: App) -> None:
    body = COMPLETION | {"max_tokens": 60_000, "stream": True}
    with sent(app.cluster.http_port, raw_request("/v1/completions", body)) as client:
        assert client.recv(100)

    def running() -> float:
        return sum(
            value
            for info in app.engines("decode")
            for name, value in metrics_of(int(info["url"].rpartition(":")[2])).items()
            if name.startswith("vllm:num_requests_running")
        )

    wait_for(lambda: running() == 0, "the engine has stopped", 10.0)


# ---- what dies comes back --------------------------------------------------------------------------------------------


def killed_and_back(app: App, role: str, victim: Callable[[dict[str, Any]], int], what: str) -> dict[str, int]:
    """Kill a process of one engine under load: the pool is whole again. Returns how its requests ended."""
    (first, *_), num = app.engines(role), app.num_ready(role)
    engine_pid, names = first["pid"], set(app.cluster.engines(APP))
    with Load(app.cluster.http_port, num_clients=4) as load:
        load.wait_answers(4, 0.0)
        began_s = time.monotonic()
        os.kill(victim(first), signal.SIGKILL)
        wait_for(
            lambda: not Path(f"/proc/{engine_pid}/environ").exists() or not is_alive(engine_pid),
            "its engine ends",
            10.0,
        )
        gone_s = time.monotonic() - began_s
        wait_for(
            lambda: set(app.cluster.engines(APP)) - names and app.num_ready(role) == num,
            f"{what} is back",
            BACK_WITHIN_S,
        )
        back_s = time.monotonic() - began_s
        load.wait_answers(8, time.monotonic())
    counts = load.check(may_lose_connection=False)
    print(f"{what}: its engine gone after {gone_s:.1f} s, the pool whole after {back_s:.1f} s; {dict(counts)}")
    wait_for(lambda: first["name"] not in app.cluster.engines(APP), "it is no longer known", 15.0)
    return dict(counts)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def replica_of(info: dict[str, Any]) -> int:
    """The process of the replica that an engine belongs to."""
    return int(Path(f"/proc/{info['pid']}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_killed_engine_is_replaced(app: App) -> None:
    counts = killed_and_back(app, "decode", lambda info: int(info["pid"]), "a decode engine")
    assert set(counts) <= {"answer", "error", "error_event"}, "every request ended truthfully"


def test_a_killed_replica_is_replaced_and_its_engine_ends(app: App) -> None:
    counts = killed_and_back(app, "decode", replica_of, "a decode replica")
    assert set(counts) <= {"answer", "error", "error_event"}, "every request ended truthfully"


def test_without_a_prefill_engine_a_request_fails_fast_and_none_hangs(app: App) -> None:
    (only,) = app.engines("prefill")
    os.kill(only["pid"], signal.SIGKILL)
    began_s = time.monotonic()
    slowest_s, statuses = 0.0, set()
    while app.num_ready("prefill") == 0 or time.monotonic() - began_s < 1.0:
        asked_s = time.monotonic()
        answer = complete(app, timeout_s=10.0)
        slowest_s = max(slowest_s, time.monotonic() - asked_s)
        statuses.add(answer.status)
        assert answer.status == 200 or answer.error["code"], answer.body
        assert time.monotonic() - began_s < BACK_WITHIN_S
    print(f"the only prefill engine: back after {time.monotonic() - began_s:.1f} s, slowest answer {slowest_s:.2f} s")
    assert 503 in statuses
    assert statuses <= {200, 502, 503}
    assert slowest_s < 5.0
    wait_for(lambda: complete(app).status == 200, "it answers again", 20.0)


@pytest.mark.parametrize("part", ["replica", "process"])
def test_a_killed_router_comes_back_with_every_engine(app: App, part: str) -> None:
    router = app.cluster.call("engines", app=APP)["router"]
    pid = replica_of(router) if part == "replica" else router["pid"]
    endless = raw_request("/v1/completions", COMPLETION | {"max_tokens": 60_000, "stream": True})
    with sent(app.cluster.http_port, endless) as client:
        assert b" 200 " in client.recv(100)
        os.kill(pid, signal.SIGKILL)
        began_s = time.monotonic()
        rest = b"".join(iter(lambda: received(client), b""))
    assert time.monotonic() - began_s < 10.0, "the stream hangs"
    assert b"[DONE]" not in rest
    assert not rest.endswith(b"0\r\n\r\n"), "a stream that was cut looks complete"
    first = wait_for(lambda: app_answers(app), "Serve's address answers", BACK_WITHIN_S)
    answered_s = time.monotonic() - began_s
    wait_for(lambda: app.num_ready("decode") == 2 and app.num_ready("prefill") == 1, "all engines", BACK_WITHIN_S)
    all_s = time.monotonic() - began_s
    print(f"the router's {part}: answers after {answered_s:.1f} s, knows all engines after {all_s:.1f} s")
    assert first.status == 200
    assert not is_alive(router["pid"])
    assert len(marked_pids(APP)) == 4, "one process for each engine, and the router"


def received(client: socket.socket) -> bytes:
    """What comes next; empty at the end, however the connection ends."""
    try:
        return client.recv(65536)
    except ConnectionError:
        return b""


def app_answers(app: App) -> Answer | None:
    """An answer of 200; anything else is one of those that a client may try again, and none hangs."""
    asked_s = time.monotonic()
    answer = complete(app, timeout_s=20.0)
    assert time.monotonic() - asked_s < 15.0
    assert answer.status in (200, 502, 503), answer.body
    return answer if answer.status == 200 else None
