"""SIGKILL of one of two engines under load: what can be served is served, and no stream ends in silence. SIGTERM of the
router: it says so first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine.simulated_processes import EngineProcess
from tests.process.deployment import Load
from tests.router.stack import NOTHING_HELD, RouterProcess, quiet_ports, total, urls, wait_for

pytestmark = pytest.mark.process

LEASE_S = 3
ENGINE = {"prefill_overhead_ms": 2, "decode_token_ms": 8, "max_model_len": 20_000, "lease_s": LEASE_S}
NUM_CLIENTS = 16
BEFORE_S, DEAD_S, AFTER_S = 0.7, 1.0, 0.8


@dataclass
class Pools:
    """Two engines of each role and a router, of this test alone."""

    prefill: list[EngineProcess]
    decode: list[EngineProcess]
    router: RouterProcess
    start: Callable[..., EngineProcess]

    def pool(self, role: str) -> list[EngineProcess]:
        return self.prefill if role == "prefill" else self.decode


@pytest.fixture
def pools(die_with_parent: Callable[[], None]) -> Iterator[Pools]:
    running: list[EngineProcess] = []
    routers: list[RouterProcess] = []

    def start(role: str, port: int) -> EngineProcess:
        running.append(EngineProcess.start(die_with_parent, role=role, port=port, **ENGINE))
        return running[-1]

    try:
        made = {role: [start(role, quiet_ports(1)) for _ in range(2)] for role in ("prefill", "decode")}
        flags = [*urls(made["prefill"], "prefill"), *urls(made["decode"], "decode")]
        routers.append(RouterProcess.start(die_with_parent, *flags, "--handover-timeout-s", "1.5"))
        yield Pools(made["prefill"], made["decode"], routers[0], start)
    finally:
        codes = [router.stop() for router in routers]
        for each in running:
            each.stop()
    assert codes == [0]


def wait_for_load(load: Load, seconds: float, num: int) -> None:
    """Let the load run for a while, and until ``num`` more requests have ended."""
    until_s, goal = time.monotonic() + seconds, len(load.ended) + num
    wait_for(lambda: time.monotonic() > until_s and len(load.ended) >= goal, "the load goes on", 30.0)


def kinds_while_killing(pools: Pools, role: str, load: Load) -> Counter[str]:
    """How the requests ended while one engine of a role was killed, was away and came back."""
    dead = pools.pool(role)[0]
    with load:
        wait_for_load(load, BEFORE_S, 2 * NUM_CLIENTS)
        wait_for(lambda: dead.state()["in_flight"], "it has work to lose")
        dead.kill()
        wait_for_load(load, DEAD_S, 2 * NUM_CLIENTS)
        again = pools.start(role, dead.port)
        pools.pool(role)[0] = again
        wait_for_load(load, AFTER_S, 2 * NUM_CLIENTS)
        wait_for(lambda: again.state()["requests"], "it is used again", 15.0)
    return Counter(each.kind for each in load.ended)


def check_at_rest(pools: Pools) -> None:
    """Nothing is in progress anywhere, and no KV is held, a lease after the last request at the latest."""
    wait_for(lambda: total(pools.router.metrics(), "active_requests") == 0, "no request in progress")
    assert total(pools.router.metrics(), "engine_active_requests") == 0
    for engine in (*pools.prefill, *pools.decode):
        engine.wait_state(LEASE_S + 5.0, **NOTHING_HELD)


@pytest.mark.parametrize("num_signals", [1, 2])
def test_router_that_is_told_to_stop_says_so_before_it_refuses_anybody(
    die_with_parent: Callable[[], None], num_signals: int
) -> None:
    """A load balancer sees readiness fail and looks elsewhere; a second signal means that nobody waits for that."""
    notice_s = 1.0 if num_signals == 1 else 60.0
    engine = EngineProcess.start(die_with_parent, role="decode", **ENGINE)
    router = RouterProcess.start(die_with_parent, *urls([engine], "decode"), "--stop-notice-s", str(notice_s))
    try:
        assert router.ask("GET", "/readiness").status == 200
        began_s = time.monotonic()
        router.process.terminate()
        ready = wait_for(lambda: is_not_ready(router), "readiness says no")
        assert ready["reason"] == "the router is stopping"
        assert router.complete("new work", 3).status == 200
        if num_signals == 2:
            router.process.terminate()
        assert router.process.wait(10) == 0
        assert (time.monotonic() - began_s >= notice_s) == (num_signals == 1)
    finally:
        router.stop()
        engine.stop()


def is_not_ready(router: RouterProcess) -> Any:
    """What readiness says, if that is no."""
    answer = router.ask("GET", "/readiness")
    return answer.json if answer.status == 503 else None


def test_one_of_two_prefill_engines_is_killed(pools: Pools) -> None:
    load = Load(pools.router.port, NUM_CLIENTS)
    kinds = kinds_while_killing(pools, "prefill", load)
    failed = [each for each in load.ended if each.kind != "answer"]
    assert not failed, (kinds, failed[:5])
    assert kinds["answer"] > 6 * NUM_CLIENTS
    check_at_rest(pools)


def test_one_of_two_decode_engines_is_killed(pools: Pools) -> None:
    """A stream that had begun ends with an error event and [DONE]; every other request is answered."""
    load = Load(pools.router.port, NUM_CLIENTS)
    kinds = kinds_while_killing(pools, "decode", load)
    wrong = [each for each in load.ended if each.kind not in ("answer", "error_event")]
    assert not wrong, (kinds, wrong[:5])
    assert kinds["error_event"] <= NUM_CLIENTS  # at most what was in progress
    assert kinds["answer"] > 6 * NUM_CLIENTS
    assert total(pools.router.metrics(), "stream_truncations_total") == kinds["error_event"]
    check_at_rest(pools)
