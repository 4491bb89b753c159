"""What loads do to requests that run: time between tokens of eight that decode, while long prompts come from L1.

One request's load overlaps the others' compute: with the prompts in HBM, so that they are asked for and nothing is
loaded, against all of them from L1, in turn, so that each has left HBM when it comes again. Limit: running requests go
on, their p99 between tokens is at most half of what one load of 32k tokens takes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common import (
    CHUNK,
    Answer,
    Report,
    ask,
    external_hits,
    median,
    num_stored,
    percentile,
    prompt,
    reset,
    send,
    stream_body,
    wait_stored,
)
from processes import Failed, Process

RUNNING, RUNNING_TOKENS, RUNNING_NEW_TOKENS = 8, 1_040, 4_000
LONG, SHORT = 32_768, 8_192
"""Tokens of the prompts that are loaded, in pairs."""
PAIRS, REPEATS = 4, 10
"""Different pairs, more than fit into HBM beside the running requests; and pairs asked for in each window."""
QUIET_S = 2.0
STALL_SHARE = 0.5


def measure(report: Report, cache: Process, port: int) -> None:
    """With an engine there whose HBM holds between one and three pairs."""
    pairs = [(prompt(LONG, 7_000 + seed), prompt(SHORT, 7_000 + seed)) for seed in range(PAIRS)]
    before = num_stored(cache)
    for pair in pairs:
        for ids in pair:
            ask(port, ids, 1)
    wait_stored(cache, before + PAIRS * (LONG + SHORT) // CHUNK)
    reset(port)
    bodies = [tuple(stream_body(ids, 2) for ids in pair) for pair in pairs]
    with running(port, RUNNING_NEW_TOKENS) as answers:
        windows = {"nothing": timed(lambda: time.sleep(QUIET_S))}
        for body in bodies[0]:
            send(port, body)
        firsts: dict[str, list[float]] = {"HBM": [], "L1": []}
        hits = external_hits(port)
        windows["HBM"] = timed(lambda: _ask(port, [bodies[0]] * REPEATS, firsts["HBM"]))
        from_hbm, hits = external_hits(port) - hits, external_hits(port)
        windows["L1"] = timed(lambda: _ask(port, [bodies[(1 + n) % PAIRS] for n in range(REPEATS)], firsts["L1"]))
        from_l1 = external_hits(port) - hits
    judge(report, answers, windows, firsts)
    share = from_l1 / (REPEATS * (LONG + SHORT))
    report.note("of the loaded prompts came from L1", [from_l1, from_hbm], f"{share:.2f}, of the others {from_hbm:.0f}")


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """When it began and ended, by ``time.perf_counter``."""
    began_s = time.perf_counter()
    work()
    return began_s, time.perf_counter()


@contextmanager
def running(port: int, num_new_tokens: int) -> Iterator[list[Answer]]:
    """Requests that run while the block does, and leave with it; their answers are there afterwards.

    Raises:
        Failed: one did not end well.
    """
    leave = threading.Event()
    answers: list[Answer] = []
    bodies = [stream_body(prompt(RUNNING_TOKENS, 7_500 + seed), num_new_tokens) for seed in range(RUNNING)]
    threads = [threading.Thread(target=_run, args=(port, body, leave, answers), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1.0)
        yield answers
    finally:
        leave.set()
    for thread in threads:
        thread.join()
    if len(answers) < RUNNING:
        raise Failed(f"{len(answers)} of {RUNNING} running requests ended well")


def _run(port: int, body: bytes, leave: threading.Event, answers: list[Answer]) -> None:
    """One that runs until it is told to leave; in ``answers`` if it ended well."""
    try:
        answers.append(send(port, body, leave))
    except (OSError, Failed):
        pass  # missed by who counts them


def _ask(port: int, bodies: list[tuple[bytes, ...]], firsts: list[float]) -> None:
    for pair in bodies:
        for place, body in enumerate(pair):
            first_s = send(port, body).times_s[0]
            if place == 0:
                firsts.append(first_s * 1e3)


def gaps_ms(answers: list[Answer], window: tuple[float, float]) -> list[float]:
    """Between tokens of all answers that came within the window."""
    began_s, ended_s = window
    return [
        (b - a) * 1e3
        for answer in answers
        for a, b in itertools.pairwise(answer.sent_s + at_s for at_s in answer.times_s)
        if began_s <= a and b <= ended_s
    ]


def judge(
    report: Report,
    answers: list[Answer],
    windows: dict[str, tuple[float, float]],
    firsts: dict[str, list[float]],
) -> None:
    """A line a window."""
    p99s = {}
    for name, window in windows.items():
        gaps = gaps_ms(answers, window)
        if not gaps:
            raise Failed(f"running requests got no token while {name} was asked for")
        p99s[name] = percentile(gaps, 0.99)
        figures = {"p50": median(gaps), "p99": p99s[name], "max": max(gaps), "tokens": len(gaps)}
        shown = f"p50 {figures['p50']:.1f}, p99 {figures['p99']:.1f}, at most {figures['max']:.1f} ms"
        if name in firsts:
            figures["first_token_32k_ms"] = median(firsts[name])
            shown += f"; first token of 32k {figures['first_token_32k_ms']:.0f} ms"
        report.note(f"between tokens of others, {name} asked for", figures, shown)
    limit = STALL_SHARE * median(firsts["L1"])
    report.note("p99 between tokens of others in loads, ms", [p99s["L1"], p99s["HBM"], limit], f"{p99s['L1']:.1f}",
                f"<= {limit:.1f}", p99s["L1"] <= limit)  # fmt: skip
