"""The engines behind the router: their connections, and the health poller that feeds the registry.

Owns one connection pool for each endpoint. Whether an endpoint is used is the registry's decision; this module reports
what it sees on the wire.
"""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import urlsplit

from antiphon.config.router_spec import RouterSpec
from antiphon.core.errors import ConnectFailed, OwnLimit, UpstreamError
from antiphon.observe.router_metrics import RouterMetrics
from antiphon.routing.registry import Endpoint, EndpointRegistry, EndpointState
from antiphon.transport.http.client import HttpClientConnection, HttpPool, request_head

log = logging.getLogger("antiphon.router")


class Engines:
    """Connections and health of both pools."""

    def __init__(self, spec: RouterSpec, registry: EndpointRegistry, metrics: RouterMetrics) -> None:
        self._spec = spec
        self._registry = registry
        self._metrics = metrics
        self._pools: dict[Endpoint, HttpPool] = {}
        self._probes: dict[Endpoint, HttpPool] = {}
        for endpoint in registry.all():
            parts = urlsplit(endpoint.url)
            assert parts.hostname is not None and parts.port is not None
            self._pools[endpoint] = HttpPool(
                parts.hostname,
                parts.port,
                connections_max=spec.upstream_connections_max,
                connect_timeout_s=spec.connect_timeout_s,
            )
            self._probes[endpoint] = HttpPool(
                parts.hostname, parts.port, connections_max=2, connect_timeout_s=spec.connect_timeout_s
            )

    def pool(self, endpoint: Endpoint) -> HttpPool:
        """The connections to ``endpoint``."""
        return self._pools[endpoint]

    async def connect(self, endpoint: Endpoint) -> HttpClientConnection:
        """A connection to ``endpoint``, idle or new; a failure takes it out of the pool at once.

        Raises:
            ConnectFailed: no byte was written.
        """
        try:
            return await self._pools[endpoint].acquire()
        except ConnectFailed as error:
            self._metrics.engine_error(endpoint.role, endpoint.address, "connect")
            if error.retryable:
                self._set_down(endpoint, error)
            raise

    async def watch(self) -> None:
        """Probe every engine every ``health_interval_s`` until cancelled."""
        async with asyncio.TaskGroup() as group:
            for endpoint in self._registry.all():
                group.create_task(self._watch_one(endpoint))

    async def probe(self, endpoint: Endpoint) -> None:
        """One health check; the registry learns the result."""
        pool = self._probes[endpoint]
        head = request_head("GET", "/health", pool.authority, [(b"accept", b"*/*")], length=None)
        before = endpoint.state
        try:
            response = await pool.fetch([head], timeout_s=self._spec.health_timeout_s)
        except OwnLimit as error:
            log.warning("%s engine %s could not be probed: %s", endpoint.role, endpoint.address, error.message)
        except ConnectFailed as error:
            self._set_down(endpoint, error)
        except UpstreamError:
            self._registry.probe_failed(endpoint)
        else:
            if response.status == 200:
                self._registry.probe_succeeded(endpoint)
            else:
                self._registry.probe_failed(endpoint)
        if endpoint.state is not before and endpoint.state is EndpointState.READY:
            log.info("%s engine %s is ready", endpoint.role, endpoint.address)

    def close(self) -> None:
        """Cut every connection."""
        for pool in (*self._pools.values(), *self._probes.values()):
            pool.close()

    async def _watch_one(self, endpoint: Endpoint) -> None:
        while True:
            try:
                await self.probe(endpoint)
            except Exception:  # supervised: a bug here must not leave an engine that is back unseen for ever
                log.exception("the health check of %s engine %s failed", endpoint.role, endpoint.address)
            await asyncio.sleep(self._spec.health_interval_s)

    def _set_down(self, endpoint: Endpoint, error: ConnectFailed) -> None:
        if endpoint.state is not EndpointState.DOWN:
            log.warning("%s engine %s is down: %s", endpoint.role, endpoint.address, error.message)
        self._registry.connection_refused(endpoint)
