"""The access log: one JSON object a line on standard output, for each request on an inference route.

A thread of its own writes, so that whoever reads slowly, or not at all, holds up no request. What it has not taken is
kept up to ``LINES_MAX`` lines; what comes then is dropped and counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from datetime import UTC, datetime

from antiphon.core.errors import RequestRefused
from antiphon.observe.receipt import Receipt
from antiphon.protocol import json

log = logging.getLogger("antiphon.router")

LINES_MAX = 10_000
_CLOSE_TIMEOUT_S = 1.0
_BATCH_MAX = 256
_ROUTE_MAX_LEN = 200

FIELDS: dict[str, str] = {
    "time": "when the whole request was here: UTC, RFC 3339",
    "id": "of the receipt, as in `x-antiphon-receipt`; empty where a key was refused",
    "client_request_id": "the client's `x-request-id`, or null; a longer one than 512 bytes is neither kept nor echoed",
    "trace_id": "the trace id of the client's `traceparent`, or of the router's own trace, or null",
    "route": "the path that was asked",
    "path": "`pd`, `local`, `cached`, or empty where none was chosen",
    "reason": "why that path",
    "tenant": "whose key was shown, or null",
    "stream": "whether the answer was to be streamed",
    "status": "the HTTP status that the client was sent; null where it left before",
    "outcome": "`completed`, `failed` or `cancelled`",
    "error": "what went wrong, in words, or null",
    "code": "the `code` of the router's own refusal, or null",
    "prefill": "`host:port` of the last prefill engine, or null",
    "decode": "`host:port` of the last decode engine, or null",
    "prompt_tokens": "tokens of the prompt, as the engine that had it first counts them, or null",
    "cached_tokens": "those of them that the own cache of that engine held, or null",
    "num_held_tokens": "tokens of the prompt that the engine that was picked was expected to hold, or null",
    "num_events": "pieces of the answer that were passed on",
    "prefill_ms": "from sending the prefill to its answer, or null",
    "handover_ms": "from that answer to the first piece of a stream, or null",
    "first_token_ms": "from the request to the first piece of a stream, or null",
    "total_ms": "from the request to its end",
}
"""Every field of a line, in order."""


def entry(receipt: Receipt) -> dict[str, object]:
    """One line as a value."""
    whole = receipt.as_dict()
    times = {f"{name}_ms": value for name, value in receipt.times_ms.items()}
    created = datetime.fromtimestamp(receipt.created_unix_s, UTC)
    whole |= times | {
        "time": created.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "prompt_tokens": receipt.prompt_tokens,
        "cached_tokens": receipt.cached_tokens,
    }
    return {name: whole[name] for name in FIELDS}


def refused_receipt(route: str, refusal: RequestRefused) -> Receipt:
    """What is logged of a request that was refused before it was read."""
    receipt = Receipt("", route[:_ROUTE_MAX_LEN], time.time())
    receipt.status, receipt.outcome = refusal.status, "failed"
    receipt.error, receipt.code = refusal.message, refusal.code
    return receipt


class AccessLog:
    """Writes to a file descriptor, until :meth:`close`.

    Args:
        fd: where to; it stays open.
    """

    def __init__(self, fd: int = 1) -> None:
        self._fd = fd
        self._lines: deque[bytes] = deque()
        self._work = threading.Event()
        self._is_closing = False
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, receipt: Receipt) -> None:
        """Say how a request ended."""
        if len(self._lines) >= LINES_MAX or not self._thread.is_alive():
            self.num_dropped += 1
            return
        self._lines.append(json.encode(entry(receipt)) + b"\n")
        if not self._work.is_set():
            self._work.set()

    def close(self) -> None:
        """Write what is left, for a second at most."""
        self._is_closing = True
        self._work.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        num_lost = self.num_dropped + len(self._lines)
        if num_lost:
            log.warning("%d lines of the access log were not written", num_lost)

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            is_last = self._is_closing
            while self._lines:
                batch = b"".join(self._lines.popleft() for _ in range(min(_BATCH_MAX, len(self._lines))))
                try:
                    self._write(batch)
                except OSError as error:
                    log.error("the access log cannot be written: %s; it ends here", error.strerror or error)
                    return
            if is_last:
                return

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]
