"""Pools changed at run time, with real processes: simulated engines that hand KV over, and a router under load."""

from __future__ import annotations

import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.router.stack import RouterProcess, Stack, address_of, raw_request, total, urls, wait_for

pytestmark = pytest.mark.process


@pytest.fixture
def small(stack: Stack, die_with_parent: Callable[[], None]) -> Iterator[RouterProcess]:
    """A router that knows the first engine of each pool."""
    pools = [*urls(stack.prefill[:1], "prefill"), *urls(stack.decode[:1], "decode")]
    router = RouterProcess.start(die_with_parent, *pools, "--health-interval-s", "0.2")
    yield router
    assert router.stop() == 0


def change(router: RouterProcess, method: str, role: str, address: str, **fields: bool) -> int:
    body = {"role": role, "url": f"http://{address}"} | fields
    return router.ask(method, "/endpoints", body).status


def wait_ready(router: RouterProcess, number: int) -> None:
    def ready() -> bool:
        rows = router.ask("GET", "/endpoints").json["endpoints"]
        return [row["state"] for row in rows] == ["ready"] * number

    wait_for(ready, f"{number} engines are ready")


def test_a_client_whose_address_is_not_known_is_not_this_machine(small: RouterProcess) -> None:
    """What is reset before it is accepted has no address any more, and what it sent is read all the same."""
    before = small.ask("GET", "/list_workers").json
    body = {"role": "decode", "url": "http://127.0.0.1:9"}
    request = raw_request("/endpoints", body).replace(b"Host: x", b"Host: 127.0.0.1")
    small.process.send_signal(signal.SIGSTOP)
    try:
        with socket.create_connection(("127.0.0.1", small.port), timeout=10) as client:
            client.sendall(request)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        small.process.send_signal(signal.SIGCONT)
    assert small.ask("GET", "/list_workers").json == before
    assert small.ask("POST", "/endpoints", body).status == 201, "the same with an address is this machine"
    assert small.ask("DELETE", "/endpoints", body | {"force": True}).status == 200


def test_added_engines_are_warm_before_their_first_request(stack: Stack, small: RouterProcess) -> None:
    before = stack.requests()
    first, second = (address_of(engine) for engine in stack.prefill)
    third, fourth = (address_of(engine) for engine in stack.decode)
    assert change(small, "POST", "decode", fourth) == 201
    wait_ready(small, 3)
    assert change(small, "POST", "prefill", second) == 201
    wait_ready(small, 4)
    seen = {address: number - before[address] for address, number in stack.requests().items()}
    assert seen == {first: 1, fourth: 2, second: 2, third: 1}, "three pairs were cold"
    stack.settle()
    samples = small.metrics()
    assert total(samples, "pair_warmups_total", "outcome=warmed") == 3
    assert total(samples, "requests_total") == total(samples, "engine_requests_total") == 0
    assert small.ask("GET", "/receipts").json["receipts"] == []

    pairs = set()
    for number in range(8):
        answer = small.complete(f"several engines of one host {number}")
        assert answer.status == 200
        pairs.add((answer.headers["x-antiphon-prefill"], answer.headers["x-antiphon-decode"]))
        assert small.receipt(answer)["path"] == "pd"
    assert {prefill for prefill, _ in pairs} == {first, second}
    assert {decode for _, decode in pairs} == {third, fourth}


def test_pools_change_under_load_without_an_error(stack: Stack, small: RouterProcess) -> None:
    second, fourth = address_of(stack.prefill[1]), address_of(stack.decode[1])
    over = threading.Event()
    statuses: list[int] = []
    texts: list[bool] = []

    def client(number: int) -> None:
        count = 0
        while not over.is_set():
            count += 1
            answer = small.complete(f"client {number} asks {count}", stream=count % 2 == 0)
            statuses.append(answer.status)
            texts.append(bool(answer.text) and not answer.is_cut)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(4):
            assert change(small, "POST", "decode", fourth) == 201
            assert change(small, "POST", "prefill", second) == 201
            wait_ready(small, 4)
            served = len(statuses)
            wait_for(lambda seen=served: len(statuses) > seen + 20, "requests are served")  # type: ignore[misc]
            force = {"force": True} if turn % 2 else {}
            assert change(small, "DELETE", "prefill", second, **force) in (200, 202)
            assert change(small, "DELETE", "decode", fourth) in (200, 202)
            wait_ready(small, 2)
    finally:
        over.set()
        for thread in threads:
            thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert len(statuses) > 80
    assert set(statuses) == {200}
    assert all(texts)
    rows = small.ask("GET", "/endpoints").json["endpoints"]
    assert [row["active_requests"] for row in rows] == [0, 0]
