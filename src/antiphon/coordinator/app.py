"""The coordinator process: its life from start to signal."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from antiphon.config.cluster import cluster_secret
from antiphon.config.coordinator_spec import CoordinatorSpec
from antiphon.config.tracing_spec import otlp_of
from antiphon.coordinator.admin import CoordinatorAdmin
from antiphon.coordinator.directory import DirectoryOptions
from antiphon.coordinator.server import Coordinator
from antiphon.observe.process_tracing import page_of, process_name, traced
from antiphon.observe.tracing import Tracing, options_of
from antiphon.transport.listening import cannot_listen, listen_tcp

log = logging.getLogger("antiphon.coordinator")


async def serve(spec: CoordinatorSpec, announce: Callable[[Coordinator, int], None]) -> None:
    """Runs a coordinator until SIGTERM or SIGINT.

    Args:
        announce: called with the coordinator and the port of its HTTP once both listen.

    Raises:
        ConfigError: an address that is not loopback and no secret, or one that cannot be used.
        StartError: a port is taken.
    """
    secret = cluster_secret(spec.cluster_secret_file, spec.runtime_dir, [spec.host])
    options = options_of("antiphon-coordinator", process_name(), otlp_of(spec), spec.otlp_metrics_interval_s)
    with traced(options) as tracing:
        await _serve(spec, announce, secret, tracing)


async def _serve(
    spec: CoordinatorSpec, announce: Callable[[Coordinator, int], None], secret: bytes, tracing: Tracing | None
) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopping.set)
    options = DirectoryOptions(
        members_max=spec.members_max,
        placements_max=spec.placements_max,
        heartbeat_timeout_s=spec.heartbeat_timeout_s,
    )
    coordinator = Coordinator(secret, options, tracing)
    coordinator.listen(listen_tcp(spec.host, spec.port))
    try:
        admin = CoordinatorAdmin(coordinator, spec.http_host)
        try:
            await admin.listen(spec.http_port)
        except OSError as error:
            flags = {"port_flag": "--http-port", "host_flag": "--http-host"}
            raise cannot_listen(spec.http_host, spec.http_port, error, **flags) from error
        if tracing is not None:
            tracing.measure(page_of(loop, admin.page))
        try:
            announce(coordinator, admin.port)
            await stopping.wait()
        finally:
            await admin.close()
    finally:
        await coordinator.close()
