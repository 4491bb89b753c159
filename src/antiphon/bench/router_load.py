"""Clients of the router bench, as a process of their own: ``python -m antiphon.bench.router_load PLAN``.

Each client is one connection that sends its next request when the answer to the last one is whole. It shares no code
with what it measures, and understands as much of HTTP as the answers of a router and of an engine need. It prints one
line of JSON: a :class:`LoadResult`.

Invariant: every request that was sent was answered whole, or is counted as failed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

from antiphon.bench.figures import percentile
from antiphon.transport.loop import run

_END_OF_HEAD: Final = b"\r\n\r\n"
_END_OF_STREAM: Final = b"data: [DONE]\n\n\r\n0\r\n\r\n"
_END_OF_EVENT: Final = b"\n\n"
_LENGTH: Final = b"content-length: "
_GRACE_S: Final = 30.0
"""How long answers may still take when the time is over."""


@dataclass(frozen=True)
class LoadPlan:
    """What the clients do.

    Args:
        port: on this machine.
        num_clients: connections, all at once.
        seconds: for which requests are sent.
        num_tokens: that each request asks for.
        is_stream: whether answers are streams.
    """

    port: int
    num_clients: int
    seconds: float
    num_tokens: int = 1
    is_stream: bool = False


@dataclass(frozen=True)
class LoadResult:
    """What became of the requests.

    Args:
        num_answered: whole answers.
        num_failed: anything else.
        num_events: of streams, the last one (``[DONE]``) included.
        p50_ms, p99_ms: from a request's write to the end of its answer; 0 where none was answered.
        failure: what the first one that failed got.
    """

    num_answered: int
    num_failed: int
    num_events: int
    p50_ms: float
    p99_ms: float
    failure: str = ""


class _Load:
    """What the clients share."""

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.end_s = time.perf_counter() + plan.seconds
        self.latencies_s: list[float] = []
        self.num_failed = self.num_events = self._num_sent = 0
        self.failure = ""
        self.num_at_work = plan.num_clients
        self.done = asyncio.Event()

    def request(self) -> bytes:
        """The next one; each has a prompt of its own."""
        self._num_sent += 1
        prompt = f"request {self._num_sent}: " + "the quick brown fox jumps over the lazy dog. " * 8
        fields = {"prompt": prompt, "max_tokens": self.plan.num_tokens, "stream": self.plan.is_stream}
        body = json.dumps(fields).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)

    def failed(self, got: str) -> None:
        self.num_failed += 1
        self.failure = self.failure or got[:500]

    def finished(self) -> None:
        """One client has ended."""
        self.num_at_work -= 1
        if not self.num_at_work:
            self.done.set()

    def result(self) -> LoadResult:
        latencies = self.latencies_s
        p50_s, p99_s = (percentile(latencies, p) for p in (50, 99)) if latencies else (0.0, 0.0)
        return LoadResult(
            len(latencies), self.num_failed, self.num_events, p50_s * 1000, p99_s * 1000, failure=self.failure
        )


class _Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._is_stream = load.plan.is_stream
        self._data = bytearray()
        self._sent_s = 0.0
        self._is_waiting = False
        self._has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's have its methods
        self._send()

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._data.endswith(_END_OF_STREAM) if self._is_stream else self._is_whole():
            self._answered()
        elif len(self._data) > 12 and not self._data.startswith(b"HTTP/1.1 200"):
            self._end(self._data.decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection ended: {exc or 'closed'}" if self._is_waiting else "")

    def _is_whole(self) -> bool:
        head, mark, body = self._data.partition(_END_OF_HEAD)
        start = head.lower().find(_LENGTH)
        if not mark or start < 0:
            return False
        return len(body) == int(head[start + len(_LENGTH) :].split(b"\r\n", 1)[0])

    def _answered(self) -> None:
        load = self._load
        load.latencies_s.append(time.perf_counter() - self._sent_s)
        self._is_waiting = False
        if not self._data.startswith(b"HTTP/1.1 200"):
            load.latencies_s.pop()
            self._end(self._data.decode(errors="replace"))
            return
        if self._is_stream:
            load.num_events += self._data.count(_END_OF_EVENT)
        self._send()

    def _send(self) -> None:
        if time.perf_counter() >= self._load.end_s:
            self._end("")
            return
        self._data.clear()
        self._is_waiting = True
        request = self._load.request()
        self._sent_s = time.perf_counter()
        self._transport.write(request)

    def _end(self, failure: str) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if failure:
            self._load.failed(failure)
        self._load.finished()
        self._transport.close()


async def generate(plan: LoadPlan) -> LoadResult:
    """Do as planned.

    Raises:
        OSError: nothing listens there.
    """
    load = _Load(plan)
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda: _Client(load), "127.0.0.1", plan.port) for _ in range(plan.num_clients)
    ]
    try:
        async with asyncio.timeout(plan.seconds + _GRACE_S):
            await load.done.wait()
    except TimeoutError:
        load.num_failed += load.num_at_work
        load.failure = load.failure or f"no whole answer within {_GRACE_S:g} s after the end"
    finally:
        for transport, _ in made:
            transport.abort()
    return load.result()


def main(arguments: list[str]) -> int:
    plan: dict[str, Any] = json.loads(arguments[0])
    sys.stdout.write(json.dumps(asdict(run(generate(LoadPlan(**plan))))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
