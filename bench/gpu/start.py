"""The start of an engine beside a large arena: neither delays the other, and running requests bear it.

The cache server is started while the engine loads its weights, so that the arena is still being populated when the gate
runs and CUDA graphs are captured. Limits: the gate takes less than a second, the driver is told of all memory in the
end, and no error of a stream that is capturing is in the log. Told besides: when all was registered, and the time
between tokens of eight requests meanwhile and after.
"""

from __future__ import annotations

import threading
import time

from common import KV_BYTES_PER_TOKEN, Report, ask, median, metric, note_capture_errors, percentile, prompt
from overlap import gaps_ms, running
from processes import REGISTERED, Failed, Process, Stack, antiphon

CACHE_PORT, PORT = 16_650, 18_650
ARENA_GB = 96
KV_TOKENS = 160_000
LOADED = "Model loading took"
MARKS = {
    "loaded": LOADED, "gate begins": "KV layout:", "gate passed": "KV reuse is on",
    "captured": "Graph capturing finished", "registered": "MB of the arena are registered",
}  # fmt: skip
"""What an engine logs, in this order but for the last two."""
LOADED_TIMEOUT_S, REGISTER_TIMEOUT_S = 90.0, 150.0
LOOK_S = 0.005
GATE_LIMIT_S = 1.0
RUNNING_NEW_TOKENS = 15_000
AFTER_S = 5.0
CACHE_READY_S = 0.5
"""Before the gate at least: else the server was not there yet, and what is measured is how it came."""


class Marks:
    """When each line came into a log, by ``time.perf_counter``: looked at again and again by a thread."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.at_s: dict[str, float] = {}
        self.came = {name: threading.Event() for name in MARKS}
        self._num_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        text = b""
        with self._process.log.open("rb") as log:
            while not self._is_over.wait(LOOK_S):
                text += (new := log.read())
                now_s = time.perf_counter()
                for name, mark in MARKS.items():
                    if name not in self.at_s and mark.encode() in text:
                        self.at_s[name] = now_s
                        self.came[name].set()
                text = text[-200:]
                self._num_bytes += len(new)

    def looked_at(self, num_bytes: int) -> bool:
        """Whether so much of the log was."""
        return self._num_bytes >= num_bytes

    def wait(self, name: str, timeout_s: float) -> bool:
        """Whether the line came. Raises Failed where the engine has."""
        until_s = time.monotonic() + timeout_s
        while not self.came[name].wait(0.2):
            self._process.check()
            if time.monotonic() > until_s:
                return False
        return True

    def close(self) -> None:
        """Looks no more."""
        self._is_over.set()
        self._thread.join()


def run(stack: Stack, report: Report) -> None:
    """All of it."""
    stack.make_room(ARENA_GB)  # not while the engine loads
    args = ("--kv-cache-memory-bytes", str(KV_TOKENS * KV_BYTES_PER_TOKEN), "--gpu-memory-utilization", "0.4")
    engine = stack.engine("start", PORT, antiphon(CACHE_PORT), *args)
    marks = Marks(engine)
    try:
        if not marks.wait("loaded", LOADED_TIMEOUT_S):
            raise Failed(f"{engine.log} does not say {LOADED!r}")
        cache = stack.cache_server(CACHE_PORT, ARENA_GB)
        stack.wait_ready([cache], "/status")
        served_s = time.perf_counter()
        gate(report, marks, cache, served_s)
        stack.wait_ready([engine])
        engine.check_reuse()
        ready_s = time.perf_counter()
        report.note("engine ready after the gate, s", ready_s - marks.at_s["gate passed"],
                    f"{ready_s - marks.at_s['gate passed']:.1f} s")  # fmt: skip
        registering(report, marks, engine, ready_s)
    finally:
        marks.close()
    note_capture_errors(report, engine)
    engine.check()


def populated(cache: Process) -> float:
    """Share of the arena."""
    return metric(cache.port, "antiphon_cache_populated_ratio")


def gate(report: Report, marks: Marks, cache: Process, served_s: float) -> None:
    """How long it took, and whether the arena was still being populated then."""
    if not marks.wait("gate passed", LOADED_TIMEOUT_S * 2):
        raise Failed("the gate does not pass, see start.log")
    share = populated(cache)
    took_s = marks.at_s["gate passed"] - marks.at_s["gate begins"]
    is_fair = marks.at_s["gate begins"] - served_s > CACHE_READY_S and share < 1
    shown = f"{took_s:.2f} s, with {share:.2f} of {ARENA_GB} GB populated"
    report.note("gate, s", [took_s, share, is_fair], shown, f"<= {GATE_LIMIT_S:g} s, below 1.00",
                took_s <= GATE_LIMIT_S and is_fair)  # fmt: skip


def registering(report: Report, marks: Marks, engine: Process, ready_s: float) -> None:
    """Requests that run while the driver is told of the arena, and afterwards."""
    ask(PORT, prompt(300, 1), 4)
    with running(PORT, RUNNING_NEW_TOKENS) as answers:
        began_s = time.perf_counter()
        is_told = marks.wait("registered", REGISTER_TIMEOUT_S)
        ended_s = max(began_s, marks.at_s.get("registered", time.perf_counter()))
        time.sleep(AFTER_S)
        windows = {"while it is registered": (began_s, ended_s), "afterwards": (ended_s, time.perf_counter())}
    shown = f"{ended_s - marks.at_s['gate passed']:.1f} s after the gate, {ended_s - ready_s:.1f} s after ready"
    is_met = is_told and engine.is_registered()
    report.note("arena registered", [ended_s - marks.at_s["gate passed"], ended_s - ready_s], shown, is_met=is_met)
    found = REGISTERED.findall(engine.log.read_text(errors="replace"))
    report.note("MB refused, pieces that copies waited for", found, str(found))
    for name, window in windows.items():
        gaps = gaps_ms(answers, window)
        if not gaps:
            report.note(f"between tokens, {name}", [], "no token came")
            continue
        p99 = percentile(gaps, 0.99)
        figures = {"p50": median(gaps), "p99": p99, "max": max(gaps), "tokens": len(gaps)}
        report.note(f"between tokens, {name}", figures,
                    f"p50 {figures['p50']:.1f}, p99 {p99:.1f}, at most {figures['max']:.1f} ms")  # fmt: skip
