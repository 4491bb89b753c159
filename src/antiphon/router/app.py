"""The router process: the route table, the life of the server, signals.

Routes that are not in the table are refused here; nothing is proxied by accident.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from antiphon.config.router_spec import RouterSpec
from antiphon.core.errors import ConfigError, RequestRefused
from antiphon.observe.fleet_metrics import EngineView, FleetMetrics
from antiphon.observe.receipt import ReceiptRing
from antiphon.observe.router_metrics import RouterMetrics
from antiphon.router.admin import Admin
from antiphon.router.engines import Engines
from antiphon.router.inference import Inference
from antiphon.router.refusals import send_refusal
from antiphon.router.token_reports import TokenReports
from antiphon.routing.fleet import Fleet
from antiphon.routing.options import FleetOptions
from antiphon.transport.http.message import HttpLimits, HttpRequest
from antiphon.transport.http.server import HttpServer, Responder

log = logging.getLogger("antiphon.router")

SPLIT_ROUTES = frozenset(("/v1/completions", "/v1/chat/completions"))
"""Routes that go through prefill and decode."""

SINGLE_STAGE_ROUTES = frozenset(
    (
        "/v1/embeddings",
        "/v2/embed",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
    )
)
"""Routes that one decode engine serves alone."""

_OPEN_GETS = frozenset(("/health", "/liveness", "/readiness", "/v1/models"))
_ADMIN_GETS = frozenset(("/metrics", "/status", "/receipts"))


class Router:
    """One router.

    Args:
        spec: its knobs; ``prefill`` and ``decode`` name the engines.

    Raises:
        ConfigError: no decode engine is given, or the admin key cannot be read.
    """

    def __init__(self, spec: RouterSpec) -> None:
        if not spec.decode:
            raise ConfigError(
                "no decode engine is given", field="router.decode", remedy="add --decode http://HOST:PORT"
            )
        self.spec = spec
        self.fleet = Fleet(dict.fromkeys(spec.prefill), dict.fromkeys(spec.decode), fleet_options(spec))
        self.metrics = RouterMetrics()
        FleetMetrics(self.metrics.registry, self.fleet.counts, self._engine_views)
        self.receipts = ReceiptRing(spec.receipts_max)
        self.engines = Engines(spec, self.fleet)
        self.reports = TokenReports(spec.cache_servers, spec.connect_timeout_s, self.receipts, self.metrics)
        self.admin = Admin(spec, self.fleet, self.engines, self.metrics, self.receipts, self.reports)
        self.inference = Inference(spec, self.fleet, self.engines, self.metrics, self.receipts)
        limits = HttpLimits(
            header_max_bytes=spec.header_max_bytes,
            body_max_bytes=spec.body_max_bytes,
            body_read_timeout_s=spec.body_read_timeout_s,
            keepalive_timeout_s=spec.keepalive_timeout_s,
            write_stall_timeout_s=spec.idle_timeout_s,
            connections_max=spec.connections_max,
        )
        self.server = HttpServer(self.handle, limits, in_strands=True)
        self._watch: asyncio.Task[None] | None = None

    async def start(self, sock: socket.socket | None = None) -> int:
        """Probe every engine once, listen, and go on probing; returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        await asyncio.gather(*(self.engines.probe(endpoint) for endpoint in self.fleet.all()))
        port = await self.server.listen(self.spec.host, self.spec.port, sock=sock)
        self._watch = asyncio.create_task(self.engines.watch())
        self.reports.start()
        return port

    async def stop(self, drain_timeout_s: float | None = None) -> int:
        """Stop accepting, let requests finish, close; returns how many requests were cut."""
        self.admin.is_draining = True
        self.reports.release_readers()
        timeout_s = self.spec.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        cut = await self.server.drain(timeout_s)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        await self.reports.stop()
        self.inference.close()
        self.engines.close()
        return cut

    def _engine_views(self) -> Iterator[EngineView]:
        for endpoint in self.fleet.all():
            yield EngineView(
                endpoint.role,
                endpoint.address,
                endpoint.state.value,
                endpoint.is_usable,
                endpoint.num_active,
                endpoint.num_ejections,
            )

    def handle(self, request: HttpRequest, responder: Responder) -> Coroutine[Any, Any, None]:
        """Serve one request; returns the work to be run."""
        if request.method == "POST":
            path = request.path
            if path in SPLIT_ROUTES:
                return self.inference.serve(request, responder, may_split=True)
            if path in SINGLE_STAGE_ROUTES:
                return self.inference.serve(request, responder, may_split=False)
        return self._serve_own(request, responder)

    async def _serve_own(self, request: HttpRequest, responder: Responder) -> None:
        try:
            await asyncio.create_task(self._handle_own(request, responder))  # it may use time-outs, which need a task
        except RequestRefused as refusal:
            send_refusal(responder, refusal)

    async def _handle_own(self, request: HttpRequest, responder: Responder) -> None:
        path = request.path
        is_admin = path in _ADMIN_GETS or path.startswith("/receipts/")
        known = is_admin or path in _OPEN_GETS or path in SPLIT_ROUTES or path in SINGLE_STAGE_ROUTES
        if not known:
            raise RequestRefused(f"{path[:200]} is not a route of this router", status=404, code="route_not_found")
        if request.method not in ("GET", "HEAD") or path in SPLIT_ROUTES or path in SINGLE_STAGE_ROUTES:
            raise RequestRefused(f"{path} does not take {request.method}", status=405, code="method_not_allowed")
        if path in ("/health", "/liveness"):
            self.admin.health(responder)
        elif path == "/readiness":
            self.admin.readiness(responder)
        elif path == "/v1/models":
            await self.admin.models(request, responder)
        else:
            self.admin.check_access(request, responder)
            await self._handle_admin(request, responder)

    async def _handle_admin(self, request: HttpRequest, responder: Responder) -> None:
        gauges = {"active": self.inference.num_active, "connections": self.server.statistics()["connections"]}
        if request.path == "/metrics":
            self.admin.metrics(responder, gauges)
        elif request.path == "/status":
            self.admin.status(responder, gauges)
        else:
            await self.admin.receipt(request, responder)


def fleet_options(spec: RouterSpec) -> FleetOptions:
    """What the spec says of how engines are picked and judged."""
    return FleetOptions(
        prefill_policy=spec.prefill_policy or spec.policy,
        decode_policy=spec.decode_policy or spec.policy,
        failed_probes_max=spec.health_failures_max,
        failures_max=spec.request_failures_max,
        open_min_s=spec.probe_wait_min_s,
        open_max_s=max(spec.probe_wait_min_s, spec.probe_wait_max_s),
        retry_share=spec.retry_share,
        retry_floor=spec.retry_floor,
    )


async def serve(spec: RouterSpec, announce: Callable[[int], None]) -> int:
    """Run a router until SIGTERM or SIGINT; returns how many requests were cut at the end.

    A second signal ends the draining.

    Args:
        announce: called with the port once the router listens.
    """
    loop = asyncio.get_running_loop()
    router = Router(spec)
    # What exists now lives as long as the process, and requests leave little to collect: look less often.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            router.server.hurry()
        stopping.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal)
    announce(await router.start())
    await stopping.wait()
    log.info("stopping: %d requests in progress", router.inference.num_active)
    return await router.stop()
