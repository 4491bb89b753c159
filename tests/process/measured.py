"""Clients of cache servers in processes of their own, and what they measured, for tests that compare within one run."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.cache_server.world import ServerProcess, wait_for

POPULATED_TIMEOUT_S = 30.0
SLOW_MS = 50.0
"""A call in memory that takes longer may have waited for something outside: that takes a tenth of a second and more."""
SLOW_SHARE_MAX = 0.1


class TrafficProcess:
    """One client (``cache_traffic``)."""

    def __init__(self, role: str, server: ServerProcess, preexec: Callable[[], None]) -> None:
        argv = [sys.executable, "-m", "tests.process.cache_traffic", role, server.socket_path]
        argv.append(str(server.process.pid))
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=preexec)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def end(self) -> dict[str, Any]:
        """What it saw."""
        said, _ = self.process.communicate(timeout=20)
        found: dict[str, Any] = json.loads(said)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass(frozen=True)
class Phase:
    """One state of what is outside the server, by the clock of ``time.monotonic``."""

    name: str
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class Latencies:
    """Of the calls that began in one phase, in milliseconds, and the share of its time that went into slow ones, the
    slowest left out: the machine may have stopped one, a call that waits for something outside is not alone."""

    name: str
    p50: float
    p95: float
    longest: float
    slow_share: float

    @classmethod
    def of(cls, samples: list[tuple[float, float]], phase: Phase) -> Latencies:
        """``samples``: as of ``cache_traffic``."""
        took_ms = sorted(1e3 * took_s for began_s, took_s in samples if phase.began_s <= began_s < phase.ended_s)
        assert len(took_ms) > 50, f"{phase.name} has {len(took_ms)} samples"
        slow_s = sum(each for each in took_ms[:-1] if each > SLOW_MS) / 1e3
        p95 = statistics.quantiles(took_ms, n=20)[-1]
        share = slow_s / (phase.ended_s - phase.began_s)
        return cls(phase.name, statistics.median(took_ms), p95, took_ms[-1], share)

    def check(self, *usual: Latencies) -> None:
        """They are not far above the highest of ``usual``: those of another time, and those of a server at the same
        time that is alone."""
        p50, p95, share = (max(each) for each in zip(*((u.p50, u.p95, u.slow_share) for u in usual), strict=True))
        assert self.p50 <= 3 * p50 + 2, f"half of the lookups in memory are slower: {self}, usually {p50:.2f} ms"
        assert self.p95 <= 3 * p95 + 20, f"some lookups in memory are slower: {self}, usually {p95:.2f} ms"
        assert self.slow_share <= 3 * share + SLOW_SHARE_MAX, f"lookups in memory wait: {self}, usually {share:.0%}"

    def __str__(self) -> str:
        figures = f"p50 {self.p50:.2f}  p95 {self.p95:.2f}  longest {self.longest:.1f} ms"
        return f"{self.name:7} {figures}  {self.slow_share:.1%} of the time in slow calls"


def populated(server: ServerProcess) -> ServerProcess:
    """The server, once its whole arena is in memory; on a machine that does much else that takes a while."""
    wait_for(lambda: "the arena is populated" in server.log.read_text(), "the arena is populated", POPULATED_TIMEOUT_S)
    return server


def stay(seconds: float) -> None:
    """For as long as a state is measured."""
    end_s = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() > end_s, "the time passes", seconds + 5)
