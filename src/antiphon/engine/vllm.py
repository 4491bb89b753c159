"""What a running engine says about itself: its phase and its failure (from its log), its load (from ``/metrics``).

Owns the texts that vLLM writes to its log, the reading of tracebacks, and a small HTTP GET. Texts are those of vLLM
0.32; a text that another version words differently costs a phase on the console or a few seconds of detection, never
correctness: the exit of the process and ``GET /health`` decide.

Invariants: a marker counts as fatal only where the shape of the line shows that the engine itself wrote it (log level,
or an exception line without any log header), so that a prompt printed in a log record cannot stop an engine.

It starts nothing, and it does not decide what to do about a failure: the supervisor does.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from antiphon.core.errors import ConnectFailed, UpstreamError, UpstreamGarbage, UpstreamLost, UpstreamTimeout

# --- the log: one line -----------------------------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SOURCE = re.compile(r"^\((?P<source>[\w.-]+ pid=\d+)\) ?")
_HEADER = re.compile(r"^(?P<header>(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]) ?")
_UVICORN = re.compile(r"^(?P<header>(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)):\s+")


class LogLine(NamedTuple):
    """A log line taken apart: who wrote it, its header (level, time, place), its level, and the rest."""

    source: str
    header: str
    level: str
    text: str


def split_line(line: str) -> LogLine:
    """Take a raw log line apart; missing parts are empty strings."""
    line = _ANSI.sub("", line.rstrip("\r\n"))
    source = header = level = ""
    if found := _SOURCE.match(line):
        source, line = found["source"], line[found.end() :]
    if found := _HEADER.match(line) or _UVICORN.match(line):
        header, level, line = found["header"], found["level"], line[found.end() :]
    return LogLine(source, header, level, line)


_PHASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), phase)
    for pattern, phase in (
        (r"non-default args:", "importing libraries"),
        (r"Resolved architecture|Using max model len", "checking the model"),
        (r"Initializing a V1 LLM engine", "starting the engine core"),
        (r"Starting to load model|Loading \w+ checkpoint shards", "loading weights"),
        (r"Loading weights took|Model loading took", "weights loaded"),
        (r"KV cache size:|Explicitly set .* for KV cache", "allocating the KV cache"),
        (r"Initializing NIXL (wrapper|worker)|Initialized NIXL agent", "initializing NIXL"),
        (r"Registering KV_Caches", "registering the KV cache with NIXL"),
        (r"Compiling a graph|torch\.compile takes|Start compiling", "compiling"),
        (r"Capturing CUDA graph", "capturing CUDA graphs"),
        (r"^init engine \(", "engine core initialized"),
        (r"Starting vLLM (API )?server on|^Started server process", "starting the HTTP server"),
        (r"^Application startup complete", "HTTP server started"),
    )
)


def phase_of(line: str) -> str | None:
    """The phase of starting that this log line announces, in plain words, or None."""
    text = split_line(line).text
    return next((phase for pattern, phase in _PHASES if pattern.search(text)), None)


@dataclass(frozen=True)
class _Fatal:
    pattern: re.Pattern[str]
    levels: frozenset[str]
    """Log levels of the line; the empty string is a line without a header."""
    reason: str
    is_fatal_when_ready: bool = True


_ERROR_LEVELS = frozenset(("ERROR", "CRITICAL"))
_RAISED = _ERROR_LEVELS | {""}

_FATAL: tuple[_Fatal, ...] = (
    _Fatal(re.compile(r"^EngineCore failed to start\."), _ERROR_LEVELS, "the engine core failed to start"),
    _Fatal(re.compile(r"^WorkerProc failed to start\."), _ERROR_LEVELS, "a worker failed to start"),
    _Fatal(re.compile(r"^RuntimeError: Engine core initialization failed"), _RAISED, "the engine core failed to start"),
    _Fatal(re.compile(r"^EngineCore encountered a fatal error\."), _ERROR_LEVELS, "the engine core failed"),
    _Fatal(re.compile(r"^Worker proc .* died unexpectedly"), _ERROR_LEVELS, "a worker died"),
    _Fatal(
        re.compile(r"^(\[shutdown\] )?MPClient: engine core exited unexpectedly"),
        _ERROR_LEVELS | {"WARNING"},
        "the engine core died",
    ),
    _Fatal(re.compile(r"^vllm\.v1\.engine\.exceptions\.EngineDeadError\b"), _RAISED, "the engine core is dead"),
    _Fatal(re.compile(r"^RuntimeError: NIXL is not available"), _RAISED, "NIXL is missing"),
    # After readiness these two concern one request or one connection, not the process.
    _Fatal(re.compile(r"^OSError: \[Errno 98\]"), _RAISED, "its address is already in use", is_fatal_when_ready=False),
    _Fatal(
        re.compile(r"^\[Errno 98\] error while attempting to bind"),
        _ERROR_LEVELS,
        "its address is already in use",
        is_fatal_when_ready=False,
    ),
)


def fatal_in(line: str, *, is_ready: bool) -> str | None:
    """Why this line means that the process cannot go on, or None. ``is_ready``: it has been ready before this line."""
    taken = split_line(line)
    for fatal in _FATAL:
        if taken.level in fatal.levels and fatal.pattern.match(taken.text):
            return None if is_ready and not fatal.is_fatal_when_ready else fatal.reason
    return None


# --- the log: what went wrong ----------------------------------------------------------------------------------------

_TRACEBACK = "Traceback (most recent call last):"
_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"
_RAISED_LINE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?::|$)")
_WRAPPER = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed due to|EngineCore encountered an issue"
    r"|Frontend process failed during engine core|Worker failed with error|^(SystemExit|KeyboardInterrupt)\b"
)
_ERROR_TEXT = re.compile(
    r"^[\w./-]+: error: |^antiphon: |^Fatal Python error|^Segmentation fault|^terminate called|^Killed\b"
    r"|^(?:\w+\.)*\w*(?:Error|Exception): "
)
_NOISE = re.compile(r"^Route: |DeprecationWarning|FutureWarning|^\s*warnings\.warn\(|^--- antiphon:|^\s*$")
_MESSAGE_LINES_MAX = 8
_LINE_CHARS_MAX = 1000


@dataclass
class _Raised:
    """One exception read from a traceback."""

    message: list[str]
    where: str
    is_cause_of_next: bool = False
    is_context_of_next: bool = False
    follows_fatal: bool = False
    is_ignored: bool = False

    @property
    def is_wrapper(self) -> bool:
        return bool(_WRAPPER.search(self.message[0]))

    def lines(self) -> list[str]:
        shown = [line[:_LINE_CHARS_MAX] for line in self.message[:_MESSAGE_LINES_MAX]]
        return shown + ([f"  at {self.where}"] if self.where else [])


def _chains(lines: list[LogLine]) -> list[list[_Raised]]:
    """The exceptions of one process in the order of its log, those of one traceback together, the root first."""
    chains: list[list[_Raised]] = []
    index = 0
    is_linked = False
    while index < len(lines):
        text = lines[index].text
        if text.strip() != _TRACEBACK:
            if chains and text in (_CAUSE, _CONTEXT):
                chains[-1][-1].is_cause_of_next = text == _CAUSE
                chains[-1][-1].is_context_of_next = text == _CONTEXT
                is_linked = True
            index += 1
            continue
        before = lines[index - 1] if index else LogLine("", "", "", "")
        raised, index = _read_traceback(lines, index + 1)
        if raised is None:
            continue
        raised.follows_fatal = bool(before.level) and any(f.pattern.match(before.text) for f in _FATAL)
        raised.is_ignored = before.text.startswith("Exception ignored in")
        if is_linked:
            chains[-1].append(raised)
        else:
            chains.append([raised])
        is_linked = False
    return chains


def _read_traceback(lines: list[LogLine], index: int) -> tuple[_Raised | None, int]:
    """The exception of the traceback whose frames begin at ``index``, and the index after it."""
    where = ""
    while index < len(lines) and (lines[index].text.startswith((" ", "\t")) or not lines[index].text):
        text = lines[index].text.strip()
        if text.startswith("File "):
            where = text
        index += 1
    if index >= len(lines) or not _RAISED_LINE.match(lines[index].text):
        return None, index
    header = lines[index].header
    message = [lines[index].text]
    index += 1
    # A message may have several lines: those that carry the same header, up to the first blank line.
    while index < len(lines) and lines[index].header == header and lines[index].text.strip():
        text = lines[index].text
        if text.strip() == _TRACEBACK or text in (_CAUSE, _CONTEXT) or len(message) > _MESSAGE_LINES_MAX:
            break
        message.append(text)
        index += 1
    return _Raised(message, where), index


def _root_lines(chain: list[_Raised]) -> list[str]:
    """The innermost cause of one traceback; also the last exception where it was raised while handling another."""
    telling = [raised for raised in chain if not raised.is_wrapper] or chain
    first, last = telling[0], telling[-1]
    lines = first.lines()
    if last is not first and any(raised.is_context_of_next for raised in telling[:-1]):
        lines += last.lines()
    return lines


def last_useful_lines(log: Iterable[str], *, lines_max: int = 12) -> list[str]:
    """What a reader needs from the log of a process that failed.

    The exception of the innermost cause and where it was raised, across the processes of the engine (the worker's,
    rather than the wrappers that the engine core and the API server raise about it). Without a traceback: the last
    error lines; without those, the last lines. Empty only for an empty log.

    Args:
        log: the lines of one run, in order.
        lines_max: most lines to return, at least 1.
    """
    assert lines_max >= 1, lines_max
    by_source: dict[str, list[LogLine]] = {}
    taken = [split_line(line) for line in log]
    for line in taken:
        by_source.setdefault(line.source, []).append(line)
    # Sources in the order of their first line are outermost first (API server, engine core, worker): reverse them.
    chains = [chain for lines in reversed(by_source.values()) for chain in _chains(lines)]
    chains = [chain for chain in chains if not chain[0].is_ignored]
    telling = [chain for chain in chains if not all(raised.is_wrapper for raised in chain)]
    after_marker = [chain for chain in telling if chain[0].follows_fatal]
    if after_marker:
        return _root_lines(after_marker[0])[:lines_max]
    if telling or chains:
        return _root_lines((telling or chains)[-1])[:lines_max]
    errors = [line.text for line in taken if line.level in _ERROR_LEVELS or _ERROR_TEXT.search(line.text)]
    rest = [line.text for line in taken if not _NOISE.search(line.text)]
    chosen = (errors or rest or [line.text for line in taken if line.text.strip()])[-min(lines_max, 8) :]
    return [text[:_LINE_CHARS_MAX] for text in chosen]


_REMEDIES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), remedy)
    for pattern, remedy in (
        (
            r"\[Errno 98\]|address already in use",
            "another process holds the port: stop it, or give this one another port",
        ),
        (r"NIXL is not available|No module named '(nixl|rixl)", "install the nixl package in the engine's environment"),
        (r"No module named 'vllm", "install vLLM in the environment of the engine's Python"),
        (
            r"No available memory for the cache blocks|larger than the available KV cache",
            "give the pool more KV memory, or lower --max-model-len",
        ),
        (
            r"CUDA out of memory|less than desired (CPU|GPU) memory|Free memory on device",
            "free the device's memory, or lower --gpu-memory-utilization or the KV memory",
        ),
        (
            r"Cannot allocate memory|\bMemoryError\b|\[Errno 12\]",
            "free host memory, or lower the KV memory of the pools",
        ),
        (r"No space left on device|\[Errno 28\]", "free space in /dev/shm and in the temporary folder"),
        (
            r"error: unrecognized arguments",
            "remove that flag from the pool's engine arguments, or use the vLLM version that has it",
        ),
        (r"Permission denied|\[Errno 13\]", "check the owner and the mode of the named path"),
    )
)


def remedy_for(lines: Iterable[str]) -> str | None:
    """What to do about a failure whose useful lines are ``lines``, or None when nothing is known."""
    text = "\n".join(lines)
    return next((remedy for pattern, remedy in _REMEDIES if pattern.search(text)), None)


# --- HTTP ------------------------------------------------------------------------------------------------------------

BODY_BYTES_MAX = 16 * 1024 * 1024
"""Longest answer read; vLLM's ``/metrics`` is well under 1 MiB."""


async def http_get(url: str, *, timeout_s: float) -> tuple[int, bytes]:
    """GET ``url`` (``http://`` only); returns the status and the body.

    Raises:
        ConnectFailed: nothing listens there.
        UpstreamTimeout: no complete answer within ``timeout_s``.
        UpstreamLost: the connection ended before the answer was complete.
        UpstreamGarbage: the answer is not HTTP, or longer than ``BODY_BYTES_MAX``.
    """
    return await _http("GET", url, timeout_s)


async def http_post(url: str, *, timeout_s: float) -> tuple[int, bytes]:
    """POST without a body; otherwise as ``http_get``."""
    return await _http("POST", url, timeout_s)


async def _http(method: str, url: str, timeout_s: float) -> tuple[int, bytes]:
    parts = urlsplit(url)
    assert parts.scheme == "http" and parts.hostname, url
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"{method} {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\nAccept: */*\r\n"
    head += "\r\n" if method == "GET" else "Content-Length: 0\r\n\r\n"
    try:
        async with asyncio.timeout(timeout_s):
            try:
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
            except OSError as error:
                raise ConnectFailed(f"no connection to {url}: {error}") from error
            try:
                writer.write(head.encode("ascii"))
                return await _read_response(reader, url)
            except ConnectionError as error:
                raise UpstreamLost(f"the connection of {method} {url} ended early: {error}") from error
            finally:
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()
    except TimeoutError as error:
        raise UpstreamTimeout(f"no complete answer to {method} {url} within {timeout_s:g} s") from error


async def _read_response(reader: asyncio.StreamReader, url: str) -> tuple[int, bytes]:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        raise UpstreamLost(f"the connection of {url} ended before the answer") from error
    except asyncio.LimitOverrunError as error:
        raise UpstreamGarbage(f"GET {url} answered with an endless header") from error
    status_line, *header_lines = raw.decode("latin-1").split("\r\n")
    found = re.match(r"HTTP/1\.[01] (\d{3})\b", status_line)
    if not found:
        raise UpstreamGarbage(f"GET {url} did not answer in HTTP: {status_line[:80]!r}")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (h.partition(":") for h in header_lines) if name
    }
    length = headers.get("content-length", "")
    # The request asks for the connection to be closed, so that without a length the end of file ends the body.
    body = await _read_up_to(reader, int(length) if length.isdigit() else None, url)
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = _join_chunks(body, url)
    return int(found[1]), body


async def _read_up_to(reader: asyncio.StreamReader, length: int | None, url: str) -> bytes:
    parts: list[bytes] = []
    num_read = 0
    while length is None or num_read < length:
        part = await reader.read(65536 if length is None else min(65536, length - num_read))
        if not part:
            if length is not None:
                raise UpstreamLost(f"the connection of {url} ended in the middle of the answer")
            break
        num_read += len(part)
        if num_read > BODY_BYTES_MAX:
            raise UpstreamGarbage(f"the answer to GET {url} is longer than {BODY_BYTES_MAX} bytes")
        parts.append(part)
    return b"".join(parts)


def _join_chunks(raw: bytes, url: str) -> bytes:
    body: list[bytes] = []
    at = 0
    while True:
        end = raw.find(b"\r\n", at)
        size_text = raw[at:end].split(b";")[0].strip() if end >= 0 else b""
        try:
            size = int(size_text, 16)
        except ValueError as error:
            raise UpstreamGarbage(f"the answer to GET {url} is chunked wrongly") from error
        if size == 0:
            return b"".join(body)
        start = end + 2
        if size < 0 or start + size > len(raw):
            raise UpstreamLost(f"the connection of {url} ended in the middle of the answer")
        body.append(raw[start : start + size])
        at = start + size + 2


async def is_ready(base_url: str, ready_path: str, *, timeout_s: float) -> bool:
    """Whether a GET on ``ready_path`` answers 200 within ``timeout_s``."""
    try:
        status, _ = await http_get(base_url + ready_path, timeout_s=timeout_s)
    except UpstreamError:
        return False
    return status == 200


async def fetch_version(base_url: str, *, timeout_s: float) -> str:
    """The engine's version as ``GET /version`` gives it. Raises UpstreamError."""
    status, body = await http_get(base_url + "/version", timeout_s=timeout_s)
    try:
        version = json.loads(body)["version"] if status == 200 else None
    except (ValueError, KeyError, TypeError) as error:
        raise UpstreamGarbage(f"{base_url}/version did not answer with a version") from error
    if not isinstance(version, str):
        raise UpstreamGarbage(f"{base_url}/version answered with status {status} and no version")
    return version


# --- metrics ---------------------------------------------------------------------------------------------------------

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class EngineMetrics:
    """One scrape of an engine's ``/metrics`` (Prometheus text format), summed over the engine's ranks."""

    samples: tuple[tuple[str, dict[str, str], float], ...]
    """Every sample: name, labels (values as escaped in the text), value."""

    def get(self, name: str, **labels: str) -> float | None:
        """The sum of the samples called ``name`` that carry all of ``labels``; None when there is none."""
        values = [v for n, has, v in self.samples if n == name and all(has.get(k) == w for k, w in labels.items())]
        return sum(values) if values else None

    def _count(self, name: str) -> int | None:
        value = self.get(name)
        return None if value is None else int(value)

    @property
    def num_running(self) -> int | None:
        """Requests in the running batch."""
        return self._count("vllm:num_requests_running")

    @property
    def num_waiting(self) -> int | None:
        """Requests that wait to be scheduled."""
        return self._count("vllm:num_requests_waiting")

    @property
    def kv_usage(self) -> float | None:
        """Share of the KV blocks in use, 0 to 1; the mean over data-parallel ranks."""
        values = [value for name, _, value in self.samples if name == "vllm:kv_cache_usage_perc"]
        return sum(values) / len(values) if values else None

    @property
    def num_nixl_transfers(self) -> int | None:
        """KV transfers that this engine pulled with NIXL and that succeeded; None without a NIXL connector."""
        return self._count("vllm:nixl_xfer_time_seconds_count")

    @property
    def nixl_bytes(self) -> int | None:
        """Bytes pulled with NIXL."""
        return self._count("vllm:nixl_bytes_transferred_sum")

    @property
    def num_nixl_failed(self) -> int | None:
        """NIXL transfers, handshakes and notifications that failed."""
        return self._count("vllm:nixl_num_failed_transfers_total")

    @property
    def num_nixl_expired(self) -> int | None:
        """Requests on a prefill engine whose KV was never pulled within the lease."""
        return self._count("vllm:nixl_num_kv_expired_reqs_total")


def parse_metrics(text: str) -> EngineMetrics:
    """Read the Prometheus text format; lines that are no sample are passed over."""
    samples: list[tuple[str, dict[str, str], float]] = []
    for line in text.splitlines():
        found = None if line.startswith("#") else _SAMPLE.match(line)
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        samples.append((found["name"], dict(_LABEL.findall(found["labels"] or "")), value))
    return EngineMetrics(tuple(samples))


async def scrape_metrics(base_url: str, *, timeout_s: float) -> EngineMetrics:
    """Scrape ``/metrics``. Raises UpstreamError (also when the status is not 200)."""
    status, body = await http_get(base_url + "/metrics", timeout_s=timeout_s)
    if status != 200:
        raise UpstreamGarbage(f"{base_url}/metrics answered with status {status}")
    return parse_metrics(body.decode("utf-8", errors="replace"))
