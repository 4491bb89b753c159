"""Requests that lose their blocks, and clients that leave: the other answers stay right, and nothing is left behind.

Answers are held against the same requests without preemption or aborts, and must be explained by rounding
(``answers``).
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from answers import leading, num_equal, num_explained, num_same
from common import (
    CHUNK,
    Answer,
    Report,
    ask,
    ask_top,
    at_once,
    metric,
    num_stored,
    prompt,
    reset,
    send,
    send_and_leave,
    stream_body,
    wait_stored,
)
from processes import Failed, Process, get

NEW_TOKENS = 16
RESET_PROMPTS, RESET_TOKENS, RESET_NEW_TOKENS, RESET_EVERY_S = 8, 4_112, 96, 0.15
CROWD, CROWD_TOKENS, CROWD_NEW_TOKENS = 64, 2_064, 320
BALLAST, BALLAST_NEW_TOKENS = 13, 6_000
"""Prompts of 32k tokens that hold most of the engine's memory while the crowd is there; they came first, so that vLLM
takes blocks from the crowd."""
KEPT, LEFT, ROUNDS = 6, 6, 3
WATCH_S, LEAVE_WITHIN_S, LEAVE_AT_LATEST_S = 0.002, 0.06, 2.0
BEYOND_S, LEASED_FOR_S = 0.003, 0.03
"""How long a lease lasts after its client has hung up, and in all, where a load was hit: one of 32k tokens takes 0.08 s
at least, from a lookup to the load it is a step."""


def preemptions(port: int) -> float:
    """So far."""
    return metric(port, "vllm:num_preemptions_total")


def hit_tokens(cache: Process) -> float:
    """Tokens that lookups found and leased, in all."""
    return metric(cache.port, "antiphon_cache_hit_tokens_total")


class Reports:
    """What engines report to the cache server of each request, from here on."""

    def __init__(self, cache: Process) -> None:
        self._port = cache.port
        self._next = 1
        self.new()

    def new(self) -> list[dict[str, Any]]:
        """Those since the last call."""
        found = []
        while True:
            page = json.loads(get(self._port, f"/reports?since={self._next}")[1])
            self._next = page["next"]
            found += page["events"]
            if not page["events"]:
                return found


def preemption(report: Report, cache: Process, port: int, _long: list[list[int]]) -> None:
    """Requests that are running lose their blocks, again and again.

    vLLM empties its own cache besides where no step is under way, and with asynchronous scheduling one nearly always
    is; then the requests find their blocks again, without L1. What comes from L1 after a preemption is shown by
    ``pressure``.
    """
    prompts = [prompt(RESET_TOKENS, 2_000 + seed) for seed in range(RESET_PROMPTS)]
    new = RESET_NEW_TOKENS
    stored = num_stored(cache)
    wanted: list[Answer] = at_once([partial(ask_top, port, one, new) for one in prompts], len(prompts))
    wait_stored(cache, stored + len(prompts) * (RESET_TOKENS // CHUNK))
    reset(port)
    before, began_s = preemptions(port), time.monotonic()
    control: list[Answer] = at_once([partial(ask, port, one, new) for one in prompts], len(prompts))
    control_s, undisturbed = time.monotonic() - began_s, preemptions(port) - before
    reset(port)
    reports, before, hits = Reports(cache), preemptions(port), hit_tokens(cache)
    is_over = threading.Event()

    def disturb() -> None:
        while not is_over.wait(RESET_EVERY_S):
            get(port, "/reset_prefix_cache?reset_running_requests=true", "POST")

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    began_s = time.monotonic()
    try:
        found: list[Answer] = at_once([partial(ask, port, one, new) for one in prompts], len(prompts))
    finally:
        is_over.set()
    took_s = time.monotonic() - began_s
    thread.join()
    preempted = preemptions(port) - before
    first = len(prompts) * (RESET_TOKENS // CHUNK * CHUNK)
    again = hit_tokens(cache) - hits - first
    told = sum(one["num_preemptions"] for one in reports.new())
    explained = [num_explained(control, wanted), num_explained(found, wanted)]
    figures = {
        "explained": explained, "leading": [leading(control, wanted), leading(found, wanted)],
        "equal": [num_equal(control, wanted), num_equal(found, wanted)], "preemptions": preempted,
        "preemptions in the reports": told, "leased again after preemptions": again, "s": [control_s, took_s],
    }  # fmt: skip
    shown = f"{explained[1]} of {len(prompts)} explained, {explained[0]} without; {preempted:.0f} preemptions"
    is_met = explained == [len(prompts)] * 2 and preempted > 0 and undisturbed == 0
    report.note("preemption by reset", figures, shown, is_met=is_met)
    share = again / max(1.0, preempted * (RESET_TOKENS // CHUNK * CHUNK))
    shown = f"{again:.0f} tokens, {share:.2f} of what was lost; {took_s:.1f} s against {control_s:.1f} s"
    report.note("leased from L1 again after resets, told only", [again, share], shown)
    report.note("preemptions in the reports", [told, preempted], f"{told} of {preempted:.0f}", is_met=told == preempted)


def pressure(report: Report, cache: Process, port: int, long: list[list[int]]) -> None:
    """More than fits: vLLM preempts on its own. The same crowd without the long prompts is the control."""
    crowd = [prompt(CROWD_TOKENS, 3_000 + seed) for seed in range(CROWD)]
    reset(port)
    before, stored = preemptions(port), num_stored(cache)
    jobs = [partial(ask_top, port, one, CROWD_NEW_TOKENS) for one in crowd]
    wanted: list[Answer] = at_once(jobs, CROWD)
    undisturbed = preemptions(port) - before
    wait_stored(cache, stored + CROWD * (CROWD_TOKENS // CHUNK))
    reset(port)
    leave = threading.Event()
    bodies = [stream_body(one, BALLAST_NEW_TOKENS) for one in long[:BALLAST]]
    threads = [threading.Thread(target=_ballast, args=(port, one, leave), daemon=True) for one in bodies]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: metric(port, "vllm:num_requests_running") >= len(bodies), 60, "the long prompts do not run")
        before, hits = preemptions(port), hit_tokens(cache)
        found: list[Answer] = at_once([partial(ask, port, one, CROWD_NEW_TOKENS) for one in crowd], CROWD)
        preempted = preemptions(port) - before
    finally:
        leave.set()
    for thread in threads:
        thread.join()
    again = hit_tokens(cache) - hits - CROWD * (CROWD_TOKENS // CHUNK * CHUNK)
    explained, equal = num_explained(found, wanted), num_equal(found, wanted)
    figures = {
        "explained": explained, "equal": equal, "leading": leading(found, wanted), "preemptions": preempted,
        "leased again after preemptions": again, "control preemptions": undisturbed,
    }  # fmt: skip
    shown = f"{explained} of {CROWD} explained, {equal} equal; {preempted:.0f} preemptions"
    is_met = explained == CROWD and preempted > 0 and undisturbed == 0
    report.note("preemption by memory", figures, shown, is_met=is_met)
    report.note("leased from L1 again after preemptions", again, f"{again:.0f} tokens", is_met=again > 0)
    wait_idle(port)


def _ballast(port: int, body: bytes, leave: threading.Event) -> None:
    try:
        send(port, body, leave)
    except (OSError, Failed):
        pass  # seen by who waits for them to run


def aborts(report: Report, cache: Process, port: int, long: list[list[int]]) -> None:
    """Clients that leave while their prompt is loaded; the others get their answers, and nothing is left."""
    kept = [prompt(8_208, 4_000 + seed) for seed in range(KEPT)]
    stored = num_stored(cache)
    wanted = [[ask_top(port, one, NEW_TOKENS) for _ in range(2)][1] for one in kept]
    wait_stored(cache, stored + KEPT * (8_208 // CHUNK))
    reports, chance = Reports(cache), random.Random(5)
    found: list[Answer] = []
    names: list[str] = []
    with Watch(cache) as watch:
        for number in range(ROUNDS):
            reset(port)
            delays_s = [chance.uniform(0.0, LEAVE_WITHIN_S) for _ in range(LEFT)]
            names += (leaving := [f"leave-{number}-{place}" for place in range(LEFT)])
            found += at_once(_round(port, watch, kept, long[:LEFT], leaving, delays_s), KEPT + LEFT)[LEFT:]
            wait_idle(port)
        no_leases(cache)
    ran = [one["request"] for one in reports.new()]
    aborted = [name for name in names if not any(f"{name}-" in request for request in ran)]
    in_load = sum(watch.was_left_in_a_load(name) for name in aborted)
    again = [ask_top(port, one, NEW_TOKENS) for one in kept]
    reset(port)
    leases, used = metric(cache.port, "antiphon_cache_leases"), metric(port, "vllm:kv_cache_usage_perc")
    explained, same = num_explained(found, wanted * ROUNDS), num_same(again, wanted)
    figures = {
        "explained": explained, "equal": num_equal(found, wanted * ROUNDS), "same from the blocks": same,
        "aborted": len(aborted), "aborted in a load": in_load, "leases": leases, "blocks": used,
    }  # fmt: skip
    shown = f"{explained} of {KEPT * ROUNDS} others explained, {same} of {KEPT} blocks as from HBM; "
    shown += f"{leases:.0f} leases and {used:.3f} of the blocks left"
    is_met = explained == KEPT * ROUNDS and same == KEPT and leases == 0 and used == 0
    report.note("aborts", figures, shown, is_met=is_met)
    shown = f"{in_load} of {ROUNDS * LEFT} clients that left, {len(aborted)} of them before their request ran"
    report.note("aborted while chunks were loaded", [in_load, len(aborted)], shown, is_met=in_load > 0)


def _round(
    port: int, watch: Watch, kept: list[list[int]], left: list[list[int]], names: list[str], delays_s: list[float]
) -> list[Callable[[], Any]]:
    """Those that leave, then those that stay."""
    leaving = [
        partial(send_and_leave, port, stream_body(ids, 64), name, watch.soon_after(name, delay_s))
        for ids, name, delay_s in zip(left, names, delays_s, strict=True)
    ]
    return [*leaving, *(partial(ask, port, ids, NEW_TOKENS) for ids in kept)]


class Watch:
    """Which requests have leases, looked at again and again; and when clients left.

    A request that is aborted before its load begins gives its lease back at once; one that is aborted in its load keeps
    it until the copy has ended; and what an engine never ran it does not report. So a request that was not reported,
    whose lease lasted for some time and beyond the hanging up, was aborted while its chunks were loaded.
    """

    def __init__(self, cache: Process) -> None:
        self._port = cache.port
        self._seen: list[tuple[float, tuple[str, ...]]] = []
        self._left_s: dict[str, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_unused: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(WATCH_S):
            at_s = time.monotonic()
            try:
                found = json.loads(get(self._port, "/leases")[1])["leases"]
            except (OSError, ValueError):
                continue  # the end of the server is seen elsewhere
            self._seen.append((at_s, tuple(one["request"] for one in found)))

    def was_left_in_a_load(self, name: str) -> bool:
        """Of a client whose request never ran."""
        seen_s = [at_s for at_s, requests in self._seen if any(f"{name}-" in request for request in requests)]
        if not seen_s or name not in self._left_s:
            return False
        return seen_s[-1] >= self._left_s[name] + BEYOND_S and seen_s[-1] - seen_s[0] >= LEASED_FOR_S

    def soon_after(self, name: str, delay_s: float) -> Callable[[], bool]:
        """Becomes true so long after a request of that name had a lease, or after ``LEAVE_AT_LATEST_S``."""
        began_s: list[float] = []
        leased_s: list[float] = []

        def is_time() -> bool:
            now_s = time.monotonic()
            if not began_s:
                began_s.append(now_s)
            if not leased_s and self._seen and any(f"{name}-" in request for request in self._seen[-1][1]):
                leased_s.append(now_s)
            is_late = now_s - began_s[0] > LEAVE_AT_LATEST_S
            if is_late or (leased_s and now_s - leased_s[0] >= delay_s):
                self._left_s[name] = now_s
                return True
            return False

        return is_time


def wait_for(is_so: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    """Raises Failed where it does not come about."""
    until_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > until_s:
            raise Failed(otherwise)
        time.sleep(0.05)


def wait_idle(port: int, timeout_s: float = 20.0) -> None:
    """Until the engine has no request. Raises Failed where some stay."""
    until_s = time.monotonic() + timeout_s
    while metric(port, "vllm:num_requests_running") + metric(port, "vllm:num_requests_waiting") > 0:
        if time.monotonic() > until_s:
            raise Failed("requests of clients that left are still there")
        time.sleep(0.2)
        ask(port, prompt(8, 1), 1)  # an engine without work tells nothing new


def no_leases(cache: Process, timeout_s: float = 10.0) -> None:
    """Waits for the end of the last lease; what stays is seen by who counts."""
    until_s = time.monotonic() + timeout_s
    while metric(cache.port, "antiphon_cache_leases") and time.monotonic() < until_s:
        time.sleep(0.05)
