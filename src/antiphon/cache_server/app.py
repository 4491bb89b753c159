"""The cache server process: its life from start to signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from typing import Any

from antiphon.cache_server.admin import AdminServer, start_admin
from antiphon.cache_server.server import CacheServer
from antiphon.config.cache_server_spec import CacheServerSpec
from antiphon.config.tracing_spec import otlp_of
from antiphon.observe.process_tracing import page_of, process_name, traced
from antiphon.observe.tracing import Tracing, options_of
from antiphon.transport.listening import cannot_listen

log = logging.getLogger("antiphon.cache_server")


async def serve(spec: CacheServerSpec, announce: Callable[[CacheServer, int], None]) -> bool:
    """Runs a cache server until SIGTERM or SIGINT; returns whether it ended because it was asked to.

    A bug in a callback ends it too: its books may be wrong, and a cache may always miss.

    Args:
        announce: called with the server and the port of its admin HTTP once both listen.

    Raises:
        ConfigError: the arena is larger than the free memory, or the runtime folder cannot be used.
        StartError: a port or the name is taken.
    """
    name = process_name(spec.instance_id)
    options = options_of("antiphon-cache-server", name, otlp_of(spec), spec.otlp_metrics_interval_s)
    with traced(options) as tracing:
        return await _serve(spec, announce, tracing)


async def _serve(spec: CacheServerSpec, announce: Callable[[CacheServer, int], None], tracing: Tracing | None) -> bool:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    faults: list[str] = []

    def on_fault(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        faults.append(str(context.get("message")))
        log.critical("a bug: %s", context.get("message"), exc_info=context.get("exception"))
        stopping.set()

    loop.set_exception_handler(on_fault)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopping.set)
    server = await CacheServer.start(spec, tracing=tracing)
    try:
        # What exists at the start lives as long as the process: look less often for what can be collected.
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        admin = await _listen_http(server)
        if tracing is not None:
            tracing.measure(page_of(loop, admin.page_to_send))
        try:
            announce(server, admin.port)
            await stopping.wait()
            log.info("stopping: %d connections", server.num_connections)
        finally:
            await admin.close()
    finally:
        await server.close()
    return not faults


async def _listen_http(server: CacheServer) -> AdminServer:
    spec = server.spec
    try:
        return await start_admin(server, spec.http_host, spec.http_port)
    except OSError as error:
        flags = {"port_flag": "--http-port", "host_flag": "--http-host"}
        raise cannot_listen(spec.http_host, spec.http_port, error, **flags) from error
