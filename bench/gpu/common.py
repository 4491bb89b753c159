"""Requests to engines and cache servers, medians, and the table and JSON at the end. Standard library only."""

from __future__ import annotations

import http.client
import json
import random
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import CAPTURE, Failed, Process, get, say

REQUEST_TIMEOUT_S = 180.0
REGISTER_TIMEOUT_S = 90.0
LIVELY = ("--worker-extension-cls", "lively_weights.LivelyWeights")
"""For an engine whose tokens depend on its KV."""
KV_BYTES_PER_TOKEN = 32 * 8 * 2 * 128 * 2
"""Of the 8B shape in bf16: layers, KV heads, K and V, elements of a head, bytes."""
CHUNK = 256
"""Tokens of a chunk of the cache server."""
TOP = 5
"""Tokens whose logarithms of probability are asked for at each place."""


# ---- requests --------------------------------------------------------------------------------------------------------


def metric(port: int, name: str, label: str = "") -> float:
    """The sum of a metric over its labels, of those that have ``label``."""
    lines = get(port, "/metrics")[1].splitlines()
    found = [line for line in lines if re.match(rf"{re.escape(name)}[{{ ]", line) and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def device_hits(port: int) -> float:
    """Tokens that came from the engine's own cache."""
    return metric(port, "vllm:prefix_cache_hits_total")


def external_hits(port: int) -> float:
    """Tokens that came from the connector."""
    return metric(port, "vllm:external_prefix_cache_hits_total")


def num_chunks(cache: Process) -> int:
    """Chunks in the cache server."""
    return int(json.loads(get(cache.port, "/status")[1])["storage_manager"]["l1_manager"]["total_object_count"])


def num_stored(cache: Process) -> int:
    """Chunks that were stored since the cache server began, also those that were evicted again."""
    return int(metric(cache.port, "antiphon_cache_stored_chunks_total"))


def wait_stored(cache: Process, at_least: int, quiet_s: float = 1.0) -> int:
    """Until ``num_stored`` is that high, or has not changed for a while; returns it."""
    number, since_s = num_stored(cache), time.monotonic()
    while number < at_least and time.monotonic() - since_s < quiet_s:
        time.sleep(0.05)
        now = num_stored(cache)
        if now != number:
            number, since_s = now, time.monotonic()
    return number


def wait_registered(report: Report, *engines: Process) -> float:
    """Until the drivers of engines that are ready know all of the arena, before which loads and stores are slower.

    Notes the seconds waited, and misses where it does not come about, or where CUDA graphs met an error.
    """
    began_s = time.monotonic()
    while not all(engine.is_registered() for engine in engines) and time.monotonic() - began_s < REGISTER_TIMEOUT_S:
        for engine in engines:
            engine.check()
        time.sleep(0.1)
    waited_s, is_met = time.monotonic() - began_s, all(engine.is_registered() for engine in engines)
    report.note("waited until the arena was registered, s", waited_s, f"{waited_s:.0f} s", is_met=is_met)
    note_capture_errors(report, *engines)
    return waited_s


def capture_errors(engine: Process) -> list[str]:
    """Lines of its log that tell of an error of a stream that is capturing."""
    return [line for line in engine.log.read_text(errors="replace").splitlines() if CAPTURE.search(line)]


def note_capture_errors(report: Report, *engines: Process) -> None:
    """There must be none in their logs."""
    errors = [line for engine in engines for line in capture_errors(engine)]
    report.note("errors of a stream that is capturing", errors[:20], str(len(errors)), "= 0", not errors)


def reset(port: int, query: str = "", timeout_s: float = 20.0) -> None:
    """Empties the engine's own prefix cache. Raises Failed where blocks stay in use."""
    until_s = time.monotonic() + timeout_s
    while True:
        status, text = get(port, f"/reset_prefix_cache{query}", "POST")
        if status == 200 and '"success":false' not in text.replace(" ", ""):
            return
        if time.monotonic() > until_s:
            raise Failed(f"the prefix cache of port {port} cannot be emptied, blocks are in use: {text}")
        time.sleep(0.05)


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Token ids; another seed shares no prefix."""
    chance = random.Random(seed * 1_000_003 + num_tokens)
    return [chance.randrange(100, 48_000) for _ in range(num_tokens)]


@dataclass
class Answer:
    """What a request gave.

    Args:
        tokens: their ids.
        times_s: of each event, from sending the request; a busy engine puts several tokens into one.
        num_tokens: of a stream.
        top: for each token, the likeliest ones there with the logarithm of their probability; where asked for.
        sent_s: when it was sent, by ``time.perf_counter``.
    """

    tokens: list[int]
    times_s: list[float]
    params: dict[str, Any] | None = None
    num_tokens: int = 0
    top: list[dict[int, float]] = field(default_factory=list)
    sent_s: float = 0.0


def ask(port: int, ids: list[int], max_tokens: int = 16, **fields: object) -> Answer:
    """A greedy completion in one piece, with its token ids."""
    body = {
        "model": "m", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise Failed(f"{answer.status}: {text[:500]!r}")
    found = json.loads(text)
    choice = found["choices"][0]
    rows = (choice.get("logprobs") or {}).get("top_logprobs") or []
    top = [{int(name.removeprefix("token_id:")): float(value) for name, value in row.items()} for row in rows]
    return Answer(list(choice["token_ids"]), [], found.get("kv_transfer_params"), top=top)


def ask_top(port: int, ids: list[int], max_tokens: int = 16, **fields: object) -> Answer:
    """As ``ask``, with the likeliest tokens at each place. Raises Failed where the engine does not say them."""
    found = ask(port, ids, max_tokens, logprobs=TOP, return_tokens_as_token_ids=True, **fields)
    if len(found.top) != len(found.tokens) or any(len(one) < TOP for one in found.top):
        raise Failed(f"{len(found.tokens)} tokens came with the likeliest ones of {[len(one) for one in found.top]}")
    return found


def stream_body(ids: list[int], max_tokens: int, **fields: object) -> bytes:
    """What ``stream`` sends."""
    return json.dumps(
        {"model": "m", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
         "stream_options": {"include_usage": True}, **fields}
    ).encode()  # fmt: skip


def stream(port: int, ids: list[int], max_tokens: int, **fields: object) -> Answer:
    """A greedy completion as a stream, with the time of each token."""
    return send(port, stream_body(ids, max_tokens, **fields))


def send(port: int, body: bytes, leave: threading.Event | None = None) -> Answer:
    """As ``stream``, of a body that is made; given up at the first token after ``leave`` is set."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    times_s: list[float] = []
    num_tokens = 0
    began_s = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise Failed(f"{answer.status}: {answer.read()[:500]!r}")
        while (leave is None or not leave.is_set()) and (line := answer.readline()):
            if not line.startswith(b"data: {"):
                continue
            now_s = time.perf_counter() - began_s
            if b'"choices":[]' in line:  # the last event has the usage
                num_tokens = int(json.loads(line[6:])["usage"]["completion_tokens"])
            else:
                times_s.append(now_s)
    finally:
        connection.close()
    return Answer([], times_s, num_tokens=num_tokens, sent_s=began_s)


def send_and_leave(port: int, body: bytes, request: str, is_time: Callable[[], bool]) -> None:
    """Sends a request under that id, and hangs up when it is time, before any answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    try:
        headers = {"content-type": "application/json", "x-request-id": request}
        connection.request("POST", "/v1/completions", body, headers)
        while not is_time():
            time.sleep(0.001)
    finally:
        connection.close()


def ttft_ms(port: int, ids: list[int]) -> float:
    """Milliseconds to the first token."""
    return stream(port, ids, 2).times_s[0] * 1e3


def at_once(jobs: Sequence[Callable[[], Any]], concurrency: int) -> list[Any]:
    """The results, in order; at most ``concurrency`` run at a time. After an error nothing is waited for."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        found = [one.result() for one in [pool.submit(job) for job in jobs]]
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    return found


# ---- figures ---------------------------------------------------------------------------------------------------------


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Report:
    """Figures, and what was asked of them. ``rows``: what, figure, limit, verdict."""

    point: str
    out: Path
    figures: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.figures |= {"good": False, "failure": "it has not ended"}
        self._write()  # figures of an earlier run are not taken for this one's

    def note(self, name: str, value: Any, shown: str = "", limit: str = "", is_met: bool | None = None) -> None:
        """One figure, with a line in the table where ``shown`` is given."""
        self.figures[name] = value
        if shown:
            verdict = "" if is_met is None else ("met" if is_met else "MISSED")
            self.rows.append((name, shown, limit, verdict))
            say(f"  {name}: {shown} {limit} {verdict}".rstrip())
            self._write()

    def _write(self) -> Path:
        """Whatever ends the measurement, the figures so far are there."""
        path = self.out / f"{self.point}.json"
        path.write_text(json.dumps(self.figures, indent=1, default=str) + "\n")
        return path

    def close(self, failure: str | None = None) -> bool:
        """Prints the table and writes ``POINT.json``. Returns whether nothing failed and nothing was missed."""
        self.figures["seconds"] = round(time.monotonic() - self.began_s, 1)
        self.figures["failure"] = failure
        is_good = failure is None and all(row[3] != "MISSED" for row in self.rows)
        self.figures["good"] = is_good
        path = self._write()
        widths = [max([len(row[column]) for row in self.rows] or [0]) for column in range(4)]
        for row in self.rows:
            say("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if failure is not None:
            say(f"FAILED: {failure}")
        say(f"{self.figures['seconds']} s, figures in {path}")
        return is_good
