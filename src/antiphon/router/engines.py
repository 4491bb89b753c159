"""The engines behind the router: their connections, and the health checks that tell the fleet what they see.

Owns two connection pools for each endpoint, one for requests and one for health checks, so that neither waits for the
other. Whether an endpoint is used is the fleet's decision; this module reports what it sees on the wire. A health check
that is slow says nothing about an engine that answers requests meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from antiphon.config.router_spec import RouterSpec
from antiphon.core.errors import ConnectFailed, ConnectTimeout, OwnLimit, UpstreamError, UpstreamTimeout
from antiphon.router.keys import engine_access
from antiphon.routing.endpoint import Endpoint, Verdict
from antiphon.routing.fleet import Fleet
from antiphon.routing.states import EndpointState
from antiphon.transport.http.client import HttpPool, request_head

log = logging.getLogger("antiphon.router")

PROBES_MAX = 16
"""Health checks at once: with many engines they must not take the loop from requests."""
_TICKS = 8
"""Looks for due health checks in an interval."""


@dataclass(slots=True)
class _Line:
    """What leads to one endpoint."""

    pool: HttpPool
    probes: HttpPool
    due_s: float = 0.0
    check: asyncio.Task[None] | None = None
    is_cut: bool = False


class Engines:
    """Connections and health of both pools."""

    def __init__(self, spec: RouterSpec, fleet: Fleet) -> None:
        self._spec = spec
        self._fleet = fleet
        self._lines: dict[Endpoint, _Line] = {}
        self._pools: dict[Endpoint, HttpPool] = {}
        self._places = asyncio.Semaphore(PROBES_MAX)
        self.access = engine_access(spec)
        """What engines are shown with each request."""
        for pool in (fleet.prefill, fleet.decode):
            pool.when_gone(self._forget)
            pool.when_changed(_log_change)
        for endpoint in fleet.all():
            self.add(endpoint)

    def add(self, endpoint: Endpoint) -> None:
        """Be ready to connect to ``endpoint``."""
        known = self._lines.get(endpoint)
        if known is not None and not known.is_cut:
            return
        parts = urlsplit(endpoint.url)
        assert parts.hostname is not None and parts.port is not None
        # A request's own deadline for a connection comes first; this one ends what nobody waits for.
        patience_s = self._spec.connect_timeout_s + 1.0
        connections_max = self._spec.upstream_connections_max
        pool = HttpPool(parts.hostname, parts.port, connections_max=connections_max, connect_timeout_s=patience_s)
        probes = HttpPool(parts.hostname, parts.port, connections_max=2, connect_timeout_s=self._spec.connect_timeout_s)
        self._pools[endpoint] = pool
        self._lines[endpoint] = _Line(pool, probes)

    def pool(self, endpoint: Endpoint) -> HttpPool:
        """The connections to ``endpoint``."""
        return self._pools[endpoint]

    def hasten(self, endpoint: Endpoint) -> None:
        """Check it at the next look."""
        line = self._lines.get(endpoint)
        if line is not None:
            line.due_s = 0.0

    def cut(self, endpoint: Endpoint) -> None:
        """Cut every connection to it: requests in flight there are lost, and go where their lives say."""
        line = self._lines.get(endpoint)
        if line is not None:
            line.is_cut = True
            _close(line)

    async def watch(self) -> None:
        """Check every engine about every ``health_interval_s``, with jitter, until cancelled."""
        interval_s = self._spec.health_interval_s
        loop = asyncio.get_running_loop()
        while True:
            now_s = loop.time()
            for endpoint, line in list(self._lines.items()):
                if line.check is None and line.due_s <= now_s and not line.is_cut:
                    line.due_s = now_s + interval_s * random.uniform(0.8, 1.2)
                    line.check = asyncio.create_task(self._check(endpoint, line))
            await asyncio.sleep(interval_s / _TICKS)

    async def _check(self, endpoint: Endpoint, line: _Line) -> None:
        try:
            async with self._places:
                await self.probe(endpoint)
        except Exception:  # supervised: a bug here must not leave an engine that is back unseen for ever
            log.exception("the health check of %s engine %s failed", endpoint.role, endpoint.address)
        finally:
            line.check = None

    async def probe(self, endpoint: Endpoint) -> None:
        """One health check; the fleet learns the result."""
        line = self._lines.get(endpoint)
        if line is None:
            return
        probes, pool = line.probes, self._fleet.pool(endpoint.role)
        head = request_head("GET", "/health", probes.authority, [(b"accept", b"*/*"), *self.access.fields], length=None)
        num_before = endpoint.num_succeeded
        try:
            response = await probes.fetch([head], timeout_s=self._spec.health_timeout_s)
        except OwnLimit as error:
            log.warning("%s engine %s could not be probed: %s", endpoint.role, endpoint.address, error.message)
            return
        except ConnectTimeout:
            if endpoint in self._lines:
                pool.judge(endpoint, Verdict.UNREACHABLE, time.monotonic(), random.random())
            return
        except ConnectFailed:
            if endpoint in self._lines:
                pool.health_refused(endpoint, time.monotonic(), random.random())
            return
        except UpstreamTimeout:
            is_good = False
            if endpoint.num_succeeded != num_before:
                return  # slow to answer this, and answers requests
        except UpstreamError:
            is_good = False
        else:
            is_good = response.status == 200
        if endpoint not in self._lines:
            return  # removed meanwhile
        if is_good:
            pool.health_succeeded(endpoint, time.monotonic())
        else:
            pool.health_failed(endpoint, time.monotonic(), random.random())

    def close(self) -> None:
        """Cut every connection."""
        for line in self._lines.values():
            _close(line)

    def _forget(self, endpoint: Endpoint) -> None:
        line = self._lines.pop(endpoint, None)
        self._pools.pop(endpoint, None)
        if line is not None:
            _close(line)


def _close(line: _Line) -> None:
    if line.check is not None:
        line.check.cancel()
    line.pool.close()
    line.probes.close()


def _log_change(endpoint: Endpoint, before: EndpointState) -> None:
    if endpoint.is_held:
        return  # whoever holds it says why
    level = logging.WARNING if endpoint.state in (EndpointState.DOWN, EndpointState.SUSPECT) else logging.INFO
    if before is EndpointState.DOWN and endpoint.state is EndpointState.SUSPECT:
        level = logging.INFO  # on its way back
    log.log(level, "%s engine %s is %s (was %s)", endpoint.role, endpoint.address, endpoint.state.value, before.value)
