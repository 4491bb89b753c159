"""A real OpenTelemetry collector on loopback, and what it was sent: a process that can be killed and stopped, with a
receiver in the test behind it.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from tests.router.stack import quiet_ports, wait_for

START_TIMEOUT_S = 15.0
HAS_ROTEL = importlib.util.find_spec("rotel") is not None


@dataclass(frozen=True)
class SeenSpan:
    """A span that came out of the collector. Times are seconds since 1970."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    error: str | None
    kind: int

    def __getitem__(self, name: str) -> Any:
        return self.attributes.get(f"antiphon.{name}")


def _values(pairs: Any) -> dict[str, Any]:
    def value_of(value: AnyValue) -> Any:
        return getattr(value, value.WhichOneof("value"))

    def item(pair: KeyValue) -> tuple[str, Any]:
        return pair.key, value_of(pair.value)

    return dict(item(pair) for pair in pairs)


class _Sink(ThreadingHTTPServer):
    """What stands behind the collector: takes OTLP over HTTP and keeps it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[SeenSpan] = []
        self.metrics: dict[tuple[str, str], Any] = {}
        """The last of each name, by service and name."""

    def take_spans(self, data: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            who = _values(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    seen = SeenSpan(
                        name=span.name,
                        service=who.get("service.name", ""),
                        instance=who.get("service.instance.id", ""),
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        start_s=span.start_time_unix_nano / 1e9,
                        end_s=span.end_time_unix_nano / 1e9,
                        attributes=_values(span.attributes),
                        error=span.status.message if span.status.code == 2 else None,
                        kind=span.kind,
                    )
                    self.spans.append(seen)

    def take_metrics(self, data: bytes) -> None:
        for resource in ExportMetricsServiceRequest.FromString(data).resource_metrics:
            who = _values(resource.resource.attributes)
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    self.metrics[who.get("service.name", ""), metric.name] = metric


class _Handler(BaseHTTPRequestHandler):
    server: _Sink

    def do_POST(self) -> None:
        data = self._body()
        if self.headers["content-encoding"] == "gzip":
            data = gzip.decompress(data)
        take = self.server.take_spans if self.path.endswith("traces") else self.server.take_metrics
        take(data)
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def _body(self) -> bytes:
        if self.headers["transfer-encoding"] != "chunked":
            return self.rfile.read(int(self.headers["content-length"]))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's
        pass


class Collector:
    """One collector. Its ports stay the same over its lives.

    Args:
        folder: for its log.
        preexec: runs in the child before the program.
    """

    def __init__(self, folder: Path, preexec: Callable[[], None]) -> None:
        self._folder = folder
        self._preexec = preexec
        self.grpc_port = quiet_ports(2)
        self.http_port = self.grpc_port + 1
        self._sink = _Sink()
        self._thread = threading.Thread(target=self._sink.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, protocol: str) -> str:
        return f"http://127.0.0.1:{self.grpc_port if protocol == 'grpc' else self.http_port}"

    def flags(self, protocol: str) -> dict[str, object]:
        """The flags of a process that sends here."""
        return {"otlp_endpoint": self.url(protocol), "otlp_protocol": protocol, "otlp_metrics_interval_s": 1}

    def start(self) -> None:
        spec = importlib.util.find_spec("rotel")
        assert spec is not None
        assert spec.origin is not None
        program = Path(spec.origin).with_name("rotel-agent")
        behind = f"http://127.0.0.1:{self._sink.server_address[1]}"
        argv = [str(program), "start", "--otlp-grpc-endpoint", f"127.0.0.1:{self.grpc_port}"]
        argv += ["--otlp-http-endpoint", f"127.0.0.1:{self.http_port}", "--exporter", "otlp"]
        argv += ["--otlp-exporter-protocol", "http", "--otlp-exporter-endpoint", behind]
        argv += ["--otlp-exporter-compression", "none", "--batch-timeout", "50ms"]
        argv += ["--pid-file", str(self._folder / "collector.pid"), "--log-file", str(self._folder / "collector.log")]
        with (self._folder / "collector.out").open("ab") as out:
            self._process = subprocess.Popen(argv, stdout=out, stderr=out, preexec_fn=self._preexec)
        for port in (self.grpc_port, self.http_port):
            wait_for(lambda port=port: _listens(port), "the collector listens", START_TIMEOUT_S)  # type: ignore[misc]

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)
                self._process.kill()
            self._process.wait(10)
            self._process = None

    def close(self) -> None:
        self.kill()
        self._sink.shutdown()
        self._sink.server_close()
        self._thread.join(5)

    # ---- what came out -----------------------------------------------------------------------------------------------

    @property
    def spans(self) -> list[SeenSpan]:
        return list(self._sink.spans)

    def trace(self, trace_id: str) -> list[SeenSpan]:
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start_s)

    def wait_trace(self, trace_id: str, names: set[str], timeout_s: float = 15.0) -> list[SeenSpan]:
        """The spans of a trace once there is one of each of these names."""

        def has_all() -> list[SeenSpan] | None:
            found = self.trace(trace_id)
            return found if names <= {span.name for span in found} else None

        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if (found := has_all()) is not None:
                return found
            time.sleep(0.02)
        raise AssertionError(
            f"missing: {names - {span.name for span in self.trace(trace_id)}}\n{tree(self.trace(trace_id))}"
        )

    def metric(self, service: str, name: str) -> Any:
        return self._sink.metrics.get((service, name))


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def tree(spans: list[SeenSpan]) -> str:
    """A trace as text: each span below what it is a part of."""
    ids = {span.span_id for span in spans}
    lines: list[str] = []

    def add(parent_id: str, depth: int) -> None:
        for span in spans:
            if span.parent_id == parent_id or (depth == 0 and span.parent_id not in ids):
                took_ms = (span.end_s - span.start_s) * 1000
                told = {name.removeprefix("antiphon."): value for name, value in span.attributes.items()}
                lines.append(f"{'  ' * depth}{span.name} [{span.instance}] {took_ms:.2f} ms {told} {span.error or ''}")
                add(span.span_id, depth + 1)

    add("none", 0)
    return "\n".join(lines)


@contextlib.contextmanager
def collector(folder: Path, preexec: Callable[[], None]) -> Iterator[Collector]:
    """A collector that listens."""
    made = Collector(folder, preexec)
    try:
        made.start()
        yield made
    finally:
        made.close()
