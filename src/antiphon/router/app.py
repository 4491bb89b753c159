"""The router process: the route table, the life of the server, signals.

Routes that are not in the table are refused here; nothing is proxied by accident.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from antiphon.config.kv_events import hears_kv_events
from antiphon.config.router_spec import RouterSpec
from antiphon.config.tenant_files import read_tenants, refuse_both
from antiphon.config.tracing_spec import otlp_of
from antiphon.core.errors import ConfigError, RequestRefused
from antiphon.observe.fleet_metrics import EngineView, FleetMetrics, StageMetrics
from antiphon.observe.process_tracing import page_of, process_name, traced
from antiphon.observe.receipt import ReceiptRing
from antiphon.observe.router_metrics import RouterMetrics
from antiphon.observe.span_metrics import SpanMetrics
from antiphon.observe.tracing import Tracing, options_of
from antiphon.protocol.apis import COMPLETIONS
from antiphon.router.access_log import refused_receipt
from antiphon.router.admin import Admin
from antiphon.router.endpoints import METHODS, Endpoints
from antiphon.router.engines import Engines
from antiphon.router.entry import Entry, Rooms
from antiphon.router.free_kv import FreeKv
from antiphon.router.inference import Inference
from antiphon.router.insight import Insight
from antiphon.router.keys import CHALLENGE, client_keys, unknown_key
from antiphon.router.refusals import send_refusal
from antiphon.router.routes import HEALTH_GETS, ROUTES, allowed, check_route, is_admin
from antiphon.router.tenants import Tenant, TenantKeys, admission
from antiphon.router.token_reports import TokenReports
from antiphon.router.traces import RouterTraces
from antiphon.router.warming import Warming
from antiphon.router.whereabouts import Whereabouts
from antiphon.routing.admission import ColdAdmission
from antiphon.routing.cold import AdmissionOptions
from antiphon.routing.fleet import Fleet
from antiphon.routing.options import FleetOptions
from antiphon.routing.placement import PlacementOptions, Placer
from antiphon.transport.http.message import HttpLimits, HttpRequest
from antiphon.transport.http.server import HttpServer, Responder
from antiphon.transport.http.strand import Activity
from antiphon.transport.listening import cannot_listen

log = logging.getLogger("antiphon.router")


class Router:
    """One router.

    Args:
        spec: its knobs; ``prefill`` and ``decode`` name the engines.
        tracing: where spans go; None where nothing is traced.

    Raises:
        ConfigError: no decode engine is given where one must be, or a key cannot be read.
    """

    def __init__(self, spec: RouterSpec, tracing: Tracing | None = None) -> None:
        if not spec.decode and not spec.allow_empty:
            raise ConfigError(
                "no decode engine is given",
                field="router.decode",
                remedy="add --decode http://HOST:PORT, or --allow-empty if engines come later by POST /endpoints",
            )
        refuse_both(spec)
        self.spec = spec
        self.fleet = Fleet(dict.fromkeys(spec.prefill), dict.fromkeys(spec.decode), fleet_options(spec))
        self.metrics = RouterMetrics()
        FleetMetrics(self.metrics.registry, self.fleet.counts, self._engine_views)
        for pool in (self.fleet.prefill, self.fleet.decode):
            pool.when_gone(lambda endpoint: self.metrics.forget_engine(endpoint.role, endpoint.address))
        self.receipts = ReceiptRing(spec.receipts_max)
        self.engines = Engines(spec, self.fleet)
        self.warming = Warming(spec, self.fleet, self.engines, self.metrics)
        self.endpoints = Endpoints(self.fleet, self.engines, self.warming)
        self.where = Whereabouts(spec, self.fleet, self.engines) if hears_kv_events(spec) else None
        self.reports = TokenReports(
            spec.cache_servers,
            spec.connect_timeout_s,
            self.receipts,
            self.metrics,
            self.where.learn if self.where is not None else None,
        )
        tenants = read_tenants(spec.tenants_file) if spec.tenants_file is not None else None
        for text in tenants.open_files() if tenants is not None else ():
            log.warning("--tenants-file: %s", text)
        self.cold = ColdAdmission(admission_options(spec)) if spec.kv_bytes_per_token else None
        self.free_kv = self._free_kv()
        self.tenants = admission(tenants) if tenants is not None else None
        self.entry = self._entry()
        insight = Insight(self.cold, self.tenants, self.where, time.monotonic)
        insight.register(self.metrics)
        self.admin = Admin(spec, self.fleet, self.engines, self.metrics, self.receipts, self.reports)
        self.admin.sections = insight.sections
        self.inference = Inference(spec, self.fleet, self.engines, self.metrics, self.receipts, self.entry)
        self._trace(tracing)
        limits = HttpLimits(
            header_max_bytes=spec.header_max_bytes,
            header_count_max=spec.header_count_max,
            head_timeout_s=spec.head_read_timeout_s,
            body_max_bytes=spec.body_max_bytes,
            body_read_timeout_s=spec.body_read_timeout_s,
            keepalive_timeout_s=spec.keepalive_timeout_s,
            write_stall_timeout_s=spec.idle_timeout_s,
            connections_max=spec.connections_max,
        )
        self._keys = client_keys(spec) if tenants is None else TenantKeys(tenants)
        handler = self.handle if self._keys is None else self._handle_keyed
        self.server = HttpServer(handler, limits, in_strands=True)
        if self._keys is not None:
            self.server.may_send = self._may_send
        StageMetrics(self.metrics.registry, self.inference.num_by_stage, self.server.num_refused)
        self._watch: asyncio.Task[None] | None = None

    async def start(self, sock: socket.socket | None = None) -> int:
        """Probe every engine once, listen, and go on probing; returns the port.

        Raises:
            StartError: an address cannot be bound.
        """
        await asyncio.gather(*(self.engines.probe(endpoint) for endpoint in self.fleet.all()))
        try:
            port = await self.server.listen(self.spec.host, self.spec.port, sock=sock)
        except OSError as error:
            raise cannot_listen(self.spec.host, self.spec.port, error) from error
        self._watch = asyncio.create_task(self.engines.watch())
        self.reports.start()
        if self.free_kv is not None:
            self.free_kv.start()
        if self.where is not None:
            await self.where.start()
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
        await self.warming.stop()
        await self.reports.stop()
        if self.free_kv is not None:
            await self.free_kv.stop()
        if self.where is not None:
            await self.where.stop()
        self.inference.close()
        self.engines.close()
        return cut

    def _engine_views(self) -> Iterator[EngineView]:
        for endpoint in self.fleet.all():
            yield EngineView(
                endpoint.role,
                endpoint.address,
                endpoint.shown_state.value,
                endpoint.is_usable,
                endpoint.num_active,
                endpoint.num_ejections,
            )

    def _trace(self, tracing: Tracing | None) -> None:
        SpanMetrics(self.metrics.registry, lambda: tracing.counts if tracing is not None else {"sent": 0, "dropped": 0})
        if tracing is None:
            return
        self.engines.access.trace()
        share, show = self.spec.trace_sample_share, self.reports.show
        self.inference.traces = RouterTraces(tracing, share, random.random, show)
        tracing.measure(page_of(asyncio.get_running_loop(), self.page))

    def _free_kv(self) -> FreeKv | None:
        """What asks decode engines for their free KV, where somebody goes by it."""
        if self.cold is None:
            return None
        return FreeKv(self.fleet, self.cold, self.spec.kv_bytes_per_token, self.engines.access.fields)

    def _entry(self) -> Entry | None:
        """What requests pass before they begin; None where a request's form is all that is looked at."""
        spec = self.spec
        placing = PlacementOptions(spec.local_max_tokens, prefill_fallback=spec.prefill_fallback)
        placer = Placer(self.fleet, placing)
        is_aware = not {"prefix_aware", "kv_aware"}.isdisjoint(spec.policies)
        reads_prompts = is_aware or placer.uses_prompts or self.cold is not None
        if not reads_prompts and self.tenants is None:
            return None
        rooms = Rooms(self.tenants, self.cold, self.where, reads_prompts=reads_prompts)
        return Entry(self.fleet, self.metrics, placer, rooms, time.monotonic)

    def handle(
        self, request: HttpRequest, responder: Responder, tenant: Tenant | None = None
    ) -> Coroutine[Any, Any, None] | Activity:
        """Serve one request; returns the work to be run, or what has begun."""
        if request.method == "POST":
            route = ROUTES.get(request.path)
            if route is not None:
                return self.inference.serve(request, responder, route, tenant)
        return self._serve_own(request, responder)

    def _handle_keyed(self, request: HttpRequest, responder: Responder) -> Coroutine[Any, Any, None] | Activity:
        """The same, where clients need a key. Health is for everybody, and the admin routes have a key of their own."""
        keys, path = self._keys, request.path
        assert keys is not None
        if path in HEALTH_GETS or path in METHODS or is_admin(path):
            return self.handle(request, responder)
        if isinstance(keys, TenantKeys):
            tenant = keys.find(request)
            if tenant is not None:
                return self.handle(request, responder, tenant)
            return self._refuse_key(request, responder, unknown_key(request))
        refusal = keys.refusal(request)
        return self.handle(request, responder) if refusal is None else self._refuse_key(request, responder, refusal)

    def _may_send(self, request: HttpRequest) -> bool:
        """Whether a large body is worth its memory."""
        return self._keys is None or self._keys.refusal(request) is None

    async def _refuse_key(self, request: HttpRequest, responder: Responder, refusal: RequestRefused) -> None:
        self.metrics.key_refusals.count(refusal.code or "")
        if self.inference.access_log is not None:
            self.inference.access_log.write(refused_receipt(request.path, refusal))
        route = ROUTES.get(request.path)
        send_refusal(responder, refusal, CHALLENGE, api=COMPLETIONS if route is None else route.api)

    async def _serve_own(self, request: HttpRequest, responder: Responder) -> None:
        try:
            await asyncio.create_task(self._handle_own(request, responder))  # it may use time-outs, which need a task
        except RequestRefused as refusal:
            lines = CHALLENGE if refusal.status == 401 else b""
            if refusal.status == 405:
                lines = b"allow: %b\r\n" % ", ".join(_methods(request.path)).encode()
            send_refusal(responder, refusal, lines)

    async def _handle_own(self, request: HttpRequest, responder: Responder) -> None:
        path = request.path
        if path in METHODS and request.method in METHODS[path]:
            self.admin.check_access(request, responder)
            self.endpoints.serve(request, responder)
            return
        check_route(request.method, path, _methods(path))
        if path in ("/health", "/liveness"):
            self.admin.health(responder)
        elif path == "/readiness":
            self.admin.readiness(responder)
        elif path == "/v1/models":
            await self.admin.models(request, responder)
        else:
            self.admin.check_access(request, responder)
            await self._handle_admin(request, responder)

    def _gauges(self) -> dict[str, int]:
        return {"active": self.inference.num_active, "connections": self.server.statistics()["connections"]}

    def page(self) -> bytes:
        """The metrics, in Prometheus' text format."""
        return self.admin.page(self._gauges())

    async def _handle_admin(self, request: HttpRequest, responder: Responder) -> None:
        gauges = self._gauges()
        if request.path == "/metrics":
            self.admin.metrics(responder, gauges)
        elif request.path == "/status":
            self.admin.status(responder, gauges)
        else:
            await self.admin.receipt(request, responder)


def _methods(path: str) -> tuple[str, ...]:
    """The methods that a path takes; none for one that is no route."""
    return tuple(sorted(METHODS[path])) if path in METHODS else allowed(path)


def fleet_options(spec: RouterSpec) -> FleetOptions:
    """What the spec says of how engines are picked and judged."""
    prefill_policy, decode_policy = spec.policies
    return FleetOptions(
        prefill_policy=prefill_policy,
        decode_policy=decode_policy,
        is_prefill_awaited=spec.allow_empty,
        failed_probes_max=spec.health_failures_max,
        failures_max=spec.request_failures_max,
        open_min_s=spec.probe_wait_min_s,
        open_max_s=max(spec.probe_wait_min_s, spec.probe_wait_max_s),
        retry_share=spec.retry_share,
        retry_floor=spec.retry_floor,
    )


def admission_options(spec: RouterSpec) -> AdmissionOptions:
    """What the spec says of cold requests. The hand-over's time stands for the lease, which is some seconds more."""
    return AdmissionOptions(
        kv_bytes_per_token=spec.kv_bytes_per_token,
        warm_bytes=spec.cold_min_bytes,
        lane_share=spec.cold_share,
        lane_share_max=max(0.75, spec.cold_share),
        cold_per_engine=spec.cold_per_engine,
        lease_s=spec.handover_timeout_s,
        queue_max=spec.cold_queue_max,
        queue_s=spec.cold_queue_timeout_s,
        rate_bytes_s=spec.transfer_bytes_per_s,
    )


async def serve(spec: RouterSpec, announce: Callable[[int], None]) -> int:
    """Run a router until SIGTERM or SIGINT; returns how many requests were cut at the end.

    Readiness says so for ``stop_notice_s`` before connections are refused. A second signal ends the notice and the
    draining.

    Args:
        announce: called with the port once the router listens.
    """
    options = options_of("antiphon-router", process_name(), otlp_of(spec), spec.otlp_metrics_interval_s)
    with traced(options) as tracing:
        return await _serve(spec, announce, tracing)


async def _serve(spec: RouterSpec, announce: Callable[[int], None], tracing: Tracing | None) -> int:
    loop = asyncio.get_running_loop()
    router = Router(spec, tracing)
    # What exists now lives as long as the process, and requests leave little to collect: look less often.
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)
    stopping, hurrying = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            hurrying.set()
            router.server.hurry()
        stopping.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal)
    announce(await router.start())
    await stopping.wait()
    router.admin.is_draining = True
    if spec.stop_notice_s:
        log.info("stopping in %g s: readiness says so", spec.stop_notice_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(spec.stop_notice_s):
                await hurrying.wait()
    log.info("stopping: %d requests in progress", router.inference.num_active)
    return await router.stop()
