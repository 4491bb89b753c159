"""Clients that leave, at each stage: nothing is left at any engine, nothing runs on for nobody, and it is counted."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.router.stack import Stack, leases_of, raw_request, sent, total, wait_for

pytestmark = pytest.mark.process

LEASE_TIMEOUT_S = 15.0
"""More than a lease of the shared engines, on a busy machine."""


@pytest.fixture
def calm(stack: Stack) -> Iterator[Stack]:
    """The shared processes; at the end no lease may have run out, since each must have been given back."""
    expired = leases_of(stack)["expired"]
    yield stack
    stack.settle()
    assert leases_of(stack)["expired"] == expired


def prompt() -> str:
    """One that no engine has cached."""
    return f"{random.random()} and what follows from it " * 20


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": prompt(), "max_tokens": 400, "stream": True} | fields


def disconnects(stack: Stack, stage: str) -> float:
    return total(stack.router.metrics(), "client_disconnects_total", f"stage={stage}")


def running(stack: Stack, role: str) -> int:
    return sum(engine.state()["running"] for engine in stack.pool(role))


def check_cancelled(stack: Stack) -> dict[str, Any]:
    """The newest receipt says that the client left, and nothing is held anywhere a moment later."""
    receipt = stack.router.latest()
    assert (receipt["outcome"], receipt["status"]) == ("cancelled", None)
    stack.settle()
    wait_for(lambda: total(stack.router.metrics(), "active_requests") == 0, "no request in progress")
    assert total(stack.router.metrics(), "engine_active_requests") == 0
    return receipt


def read_for(sock: socket.socket, seconds: float) -> None:
    """Read what comes, for a while."""
    until_s = time.monotonic() + seconds
    with contextlib.suppress(TimeoutError):
        while (left_s := until_s - time.monotonic()) > 0:
            sock.settimeout(left_s)
            if not sock.recv(65536):
                break


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_while_the_prefill_runs(calm: Stack, stream: bool) -> None:
    before = disconnects(calm, "prefilling")
    decoded = [engine.state()["requests"] for engine in calm.decode]
    calm.fault("prefill", "slow", factor=10_000)  # 10 s
    with sent(calm.router.port, raw_request("/v1/completions", body(stream=stream))):
        wait_for(lambda: running(calm, "prefill") == 1, "the prefill runs")
    receipt = check_cancelled(calm)
    assert receipt["decode"] is None
    assert receipt["ms"]["total"] < 8000
    assert disconnects(calm, "prefilling") == before + 1
    assert [engine.state()["requests"] for engine in calm.decode] == decoded


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_before_the_first_token(calm: Stack, stream: bool) -> None:
    """The decode engine has pulled, or will within the grace period; then the request is cancelled there."""
    before, kept = disconnects(calm, "awaiting"), calm.router.metrics()
    calm.fault("decode", "slow", factor=3000)  # 3 s a token
    with sent(calm.router.port, raw_request("/v1/completions", body(stream=stream))):
        wait_for(lambda: running(calm, "decode") == 1, "the decode engine has it")
    receipt = check_cancelled(calm)
    assert receipt["decode"] is not None
    assert disconnects(calm, "awaiting") == before + 1
    name = "handovers_completed_after_disconnect_total"
    assert total(calm.router.metrics(), name) == total(kept, name) + 1


def test_in_the_middle_of_a_stream(calm: Stack) -> None:
    before, kept = disconnects(calm, "streaming"), calm.router.metrics()
    calm.fault("decode", "slow", factor=20)
    with sent(calm.router.port, raw_request("/v1/completions", body())) as sock:
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
    receipt = check_cancelled(calm)
    assert time.monotonic() - began < 5.0  # the whole answer takes 8 s
    assert receipt["num_events"] >= 1
    assert disconnects(calm, "streaming") == before + 1
    # The hand-over was over before the client left.
    name = "handovers_completed_after_disconnect_total"
    assert total(calm.router.metrics(), name) == total(kept, name)


def test_in_the_middle_of_an_answer_that_one_engine_serves_alone(calm: Stack) -> None:
    before = disconnects(calm, "streaming")
    calm.fault("decode", "slow", factor=20)
    with sent(calm.router.port, raw_request("/v1/completions", body(n=3))) as sock:
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
    assert check_cancelled(calm)["path"] == "local"
    assert disconnects(calm, "streaming") == before + 1


def test_with_a_reset_and_with_a_half_closed_connection(calm: Stack) -> None:
    calm.fault("decode", "slow", factor=20)
    with sent(calm.router.port, raw_request("/v1/completions", body())) as sock:
        assert sock.recv(65536)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    check_cancelled(calm)
    with sent(calm.router.port, raw_request("/v1/completions", body())) as sock:
        assert sock.recv(65536)
        sock.shutdown(socket.SHUT_WR)
        check_cancelled(calm)


def test_at_once_after_sending(calm: Stack) -> None:
    """The request and the end of the connection often arrive together: it must not run for nobody."""
    before = total(calm.router.metrics(), "requests_total", "outcome=cancelled")
    for role in ("prefill", "decode"):
        calm.fault(role, "slow", factor=10_000)
    for number in range(30):
        fields = {"n": 2} if number % 2 else {}
        with sent(calm.router.port, raw_request("/v1/completions", body(**fields))):
            pass
    wait_for(
        lambda: total(calm.router.metrics(), "requests_total", "outcome=cancelled") == before + 30,
        "all thirty are cancelled",
    )
    check_cancelled(calm)


def test_at_random_moments_while_others_stay(stack: Stack) -> None:
    """Forty that leave between zero and forty milliseconds after sending; what the others get is whole.

    A prefill that ends just as its cancellation arrives is held for its lease: nobody can tell the engine any more. How
    many those are depends on how busy the machine is; that the router never got their handles does not.
    """
    chance = random.Random(11)
    leases, before = leases_of(stack), stack.router.metrics()
    stack.fault("decode", "slow", factor=2)
    for number in range(40):
        request = raw_request("/v1/completions", body(max_tokens=60, stream=bool(number % 3)))
        with sent(stack.router.port, request) as sock:
            read_for(sock, chance.random() * 0.04)
        if number % 10 == 0:
            mine = prompt()
            assert stack.router.complete(mine, 5, stream=True).text == stack.decode[0].text(mine, 5)
    wait_for(lambda: total(stack.router.metrics(), "active_requests") == 0, "no request in progress")
    stack.settle(LEASE_TIMEOUT_S)
    leases, after = leases_of(stack) - leases, stack.router.metrics()

    def grown(name: str, *labels: str) -> float:
        return total(after, name, *labels) - total(before, name, *labels)

    assert grown("client_disconnects_total") >= 30
    assert grown("handovers_abandoned_total") == 0
    num_handles = grown("path_total", "path=pd", "reason=default")
    assert num_handles >= 4
    assert leases["expired"] <= leases["granted"] - num_handles


def test_while_reading_slowly(calm: Stack) -> None:
    """Nothing is read and then the connection closed: the answer, of some hundred kilobytes, was on its way."""
    with sent(calm.router.port, raw_request("/v1/completions", body(max_tokens=3000))):
        wait_for(lambda: running(calm, "decode") == 1, "the decode engine has it")
        wait_for(lambda: calm.router.ask("GET", "/receipts").json["receipts"][0]["decode"], "it is decoding")
    check_cancelled(calm)


def test_an_error_that_nobody_waits_for(calm: Stack) -> None:
    calm.fault("prefill", "hang")
    with sent(calm.quick.port, raw_request("/v1/completions", body())):
        wait_for(lambda: total(calm.quick.metrics(), "active_requests") == 1, "it is in progress")
    wait_for(lambda: total(calm.quick.metrics(), "active_requests") == 0, "it is not")
    assert calm.quick.latest()["outcome"] in ("cancelled", "failed")
