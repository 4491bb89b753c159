"""Requests that come at given times, however many are still open, from several client processes.

What is planned is the same for each run of a plan; the content of its prompts goes by another number, so that no run
finds the KV of one before it. Each request says how late it was sent, so that clients that are too slow are seen.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from common import metric, percentile, prompt, send, stream_body
from processes import Failed, Process

CLIENTS = 12
PREPARE_S, PREPARE_TOKEN_S = 0.5, 4e-6
"""Before the first request, prompts are made: so long, and so long for a token of a client."""
LATE_LIMIT_S = 0.1


@dataclass(frozen=True)
class Planned:
    """A request.

    Args:
        at_s: when, from the start.
        parts: length and seed of each part of the prompt, in order; equal beginnings are equal prefixes.
        max_tokens: tokens of the answer.
        kind: a word to tell it by.
    """

    at_s: float
    parts: tuple[tuple[int, int], ...]
    max_tokens: int
    kind: str = ""

    def body(self, content: int) -> bytes:
        """The request, in the run ``content``."""
        ids = [token for length, seed in self.parts for token in prompt(length, 100_000 * content + seed)]
        return stream_body(ids, self.max_tokens)


@dataclass
class Outcome:
    """What became of it: seconds from its sending, and ``end_s`` from the start of the run."""

    kind: str
    at_s: float
    late_s: float
    end_s: float
    times_s: list[float]
    num_tokens: int
    error: str = ""


@dataclass
class Run:
    """Outcomes of all requests, and processor time of the router over the time from the first to the last."""

    outcomes: list[Outcome]
    cpu_share: float = 0.0

    @property
    def errors(self) -> list[str]:
        """Of the requests that have one."""
        return [one.error for one in self.outcomes if one.error]

    def of(self, kind: str) -> Run:
        """Those of a kind."""
        return Run([one for one in self.outcomes if one.kind == kind], self.cpu_share)

    def figures(self) -> dict[str, float]:
        """In ms, and requests and tokens a second until the last one has ended."""
        good = [one for one in self.outcomes if not one.error]
        if not good:
            raise Failed(f"no request was answered: {self.errors[:2]}")
        firsts = [one.times_s[0] * 1e3 for one in good]
        gaps = [(b - a) * 1e3 for one in good for a, b in itertools.pairwise(one.times_s)] or [0.0]
        per_token = [
            (one.times_s[-1] - one.times_s[0]) * 1e3 / (one.num_tokens - 1) for one in good if one.num_tokens > 1
        ] or [0.0]
        took_s = max(one.end_s for one in good) - min(one.at_s for one in good)
        return {
            "requests": len(self.outcomes),
            "errors": len(self.errors),
            "ttft_p50_ms": percentile(firsts, 0.5),
            "ttft_p99_ms": percentile(firsts, 0.99),
            "gap_p50_ms": percentile(gaps, 0.5),
            "gap_p99_ms": percentile(gaps, 0.99),
            "per_token_p50_ms": percentile(per_token, 0.5),
            "per_token_p99_ms": percentile(per_token, 0.99),
            "requests_s": len(good) / took_s,
            "tokens_s": sum(one.num_tokens for one in good) / took_s,
            "late_p99_ms": percentile([one.late_s * 1e3 for one in self.outcomes], 0.99),
            "router_cpu": self.cpu_share,
        }


def arrivals(rate: float, window_s: float, seed: int) -> list[float]:
    """Times of a Poisson stream, given that there are exactly ``rate`` a second in the window."""
    chance = random.Random(seed)
    return sorted(chance.uniform(0.0, window_s) for _ in range(round(rate * window_s)))


def path_count(router: Process, path: str) -> float:
    """Requests that the router sent that way."""
    return metric(router.port, "antiphon_router_path_total", f'path="{path}"')


def run(clients: ProcessPoolExecutor, router: Process, plan: Sequence[Planned], content: int) -> Run:
    """Sends them all and waits for the last answer."""
    ordered = sorted(plan, key=lambda one: one.at_s)
    shares = [ordered[client::CLIENTS] for client in range(CLIENTS)]
    list(clients.map(len, shares))  # the processes are there
    tokens_max = max(sum(length for one in share for length, _ in one.parts) for share in shares)
    start_s = time.monotonic() + PREPARE_S + PREPARE_TOKEN_S * tokens_max
    cpu_s = router.cpu_s()
    outcomes = [one for found in clients.map(partial(_client, router.port, content, start_s), shares) for one in found]
    took_s = time.monotonic() - start_s
    return Run(outcomes, (router.cpu_s() - cpu_s) / took_s)


def _client(port: int, content: int, start_s: float, plan: Sequence[Planned]) -> list[Outcome]:
    """One client's share: a thread for each open request."""
    bodies = [one.body(content) for one in plan]
    outcomes: list[Outcome] = []
    threads = []
    for one, body in zip(plan, bodies, strict=True):
        time.sleep(max(0.0, start_s + one.at_s - time.monotonic()))
        threads.append(threading.Thread(target=_send, args=(port, start_s, one, body, outcomes)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return outcomes


def _send(port: int, start_s: float, one: Planned, body: bytes, outcomes: list[Outcome]) -> None:
    late_s = time.monotonic() - start_s - one.at_s
    try:
        answer = send(port, body)
        times_s, number = answer.times_s, answer.num_tokens
        error = "" if number == one.max_tokens and times_s else f"{number} of {one.max_tokens} tokens"
    except (Failed, OSError, ValueError) as failure:
        times_s, number, error = [], 0, f"{failure!r}"
    end_s = time.monotonic() - start_s
    outcomes.append(Outcome(one.kind, one.at_s, late_s, end_s, times_s, number, error))
