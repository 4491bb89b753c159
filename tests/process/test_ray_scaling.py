"""Pools that grow and shrink with their load, on a local Ray with simulated engines.

Goal: P goes from one engine to two and D from two to three under load, and back, and no request fails; a new engine
takes requests only when it is warm; one that leaves ends its streams first; what was killed before was no reason to
change a size. Method: the one application of the session, whose targets are the ones that are filled in; clients that
stream from the router, long prompts first and long answers then; every change is read from Serve's log, as an operator
would. Times are printed, not judged, but for bounds.

Out of scope: the rule itself (tests/ray/test_autoscaling.py); what is right in an answer (test_ray_app.py).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

from tests.process.deployment import REQUEST_BOUND_S, Load, marked_pids
from tests.process.ray_cluster import APP, App
from tests.router.stack import Answer, ask, text_of, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

GROWN_WITHIN_S, SHRUNK_WITHIN_S = 60.0, 60.0
NUM_CLIENTS = 36


class Streams(Load):
    """Clients with a prompt of its own for each request, so that no prefix cache helps. One pool has the load, however
    fast the other one and this machine are."""

    bound_s = 3 * REQUEST_BOUND_S  # overload is meant

    def __enter__(self) -> Streams:
        for client in self._clients:
            client.start()
        return self

    num_words, num_tokens = 6, 150

    def _body(self, number: int) -> dict[str, Any]:
        words = " ".join(f"{number:08}-{word:03}" for word in range(self.num_words))
        return {"model": "m", "prompt": words, "max_tokens": self.num_tokens, "stream": True}

    def _run(self, number: int) -> None:
        super()._run(number * 1_000_000)

    def _judge(self, body: dict[str, Any], answer: Answer) -> tuple[str, str]:
        events = answer.events if answer.status == 200 else []
        is_whole = len(events) > 1 and "error" not in events[-2]
        self._right[body["prompt"]] = text_of(events) if is_whole else ""
        return super()._judge(body, answer)


class Answers(Streams):
    """Short prompts, and answers of some seconds."""


class Prompts(Streams):
    """Long prompts, and answers of two tokens."""

    num_words, num_tokens = 100, 2


class Watch:
    """Looks at the router's engines until it is left."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.seen: list[tuple[float, str, int]] = []
        """By the wall clock, when a pool had how many engines that take requests: each change."""
        self.too_early: list[dict[str, Any]] = []
        """Engines that had a request while they were warmed."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(20)

    def ready_s(self, since_s: float, role: str, num: int) -> float:
        """Seconds until a pool had so many."""
        return next(at_s for at_s, *pool in self.seen if at_s >= since_s and pool == [role, num]) - since_s

    def _look(self) -> None:
        before: dict[str, int] = {}
        while not self._over.wait(0.05):
            rows = ask(self.app.router_port, "GET", "/endpoints").json["endpoints"]
            self.too_early += [row for row in rows if row["is_warming"] and row["active_requests"]]
            for role in ("prefill", "decode"):
                num = sum(row["role"] == role and row["state"] == "ready" and not row["is_warming"] for row in rows)
                if before.get(role) != num:
                    self.seen.append((time.time(), role, num))
                    before[role] = num


def test_pools_grow_and_shrink_without_a_failed_request(ray_app: App) -> None:
    app = ray_app
    wait_for(lambda: app.sizes() == (1, 2), "both pools at their least", 30.0)
    assert app.changes() == [], "an engine that is lost, or a small load, is no reason to change the size"
    with Watch(app) as watch:
        grown: Counter[str] = Counter()
        for kind, role, num in ((Prompts, "prefill", 2), (Answers, "decode", 3)):
            with kind(app.router_port, num_clients=NUM_CLIENTS) as load:
                app.wait_size(role, num, GROWN_WITHIN_S)
                load.wait_answers(40, time.monotonic())
                served = {row["url"]: row["answered"] for row in app.rows(role)}
            grown += load.check(may_lose_connection=False)
            assert all(served.values()), "an engine that came has taken no requests"
        assert set(grown) == {"answer"}, grown
        with Answers(app.router_port, num_clients=3) as load:
            wait_for(lambda: app.sizes() == (1, 2), "both pools have shrunk", SHRUNK_WITHIN_S)
            wait_for(lambda: len(marked_pids(APP)) == 4, "the engines that left have ended", SHRUNK_WITHIN_S)
            load.wait_answers(3, time.monotonic())
        shrunk = load.check(may_lose_connection=False)
        assert set(shrunk) == {"answer"}, shrunk
    assert watch.too_early == []
    changes = app.changes()
    assert [(name, size, after) for _, name, size, after, _ in changes if after > size] == [
        ("prefill", 1, 2),
        ("decode", 2, 3),
    ]
    assert sorted((name, size, after) for _, name, size, after, _ in changes if after < size) == [
        ("decode", 3, 2),
        ("prefill", 2, 1),
    ]
    for at_s, name, size, after, why in changes:
        print(f"{name} from {size} to {after}: {watch.ready_s(at_s, name, after):.1f} s from decision to ready; {why}")
    print(f"{grown['answer']} requests while the pools grew, {shrunk['answer']} while they shrank, none failed")
