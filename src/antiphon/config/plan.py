"""What the compiler produces: one process, ready to be started or printed.

A plan is data: it does not start anything. ``argv`` and ``env`` may hold secrets (an API key, a hub token); what shows
a plan to people masks them first (``masking.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from antiphon.core.ids import INCARNATION_PLACEHOLDER

Role = Literal["prefill", "decode", "router", "cache_server", "coordinator"]
Kind = Literal["vllm", "simulated", "router", "cache_server", "coordinator"]
_PORT_FIELDS = {
    "http": "port",
    "side_channel": "side_channel_port",
    "kv_replay": "kv_replay_port",
    "kv_events": "kv_events_port",
}
_CACHE_PORT_FIELDS = {"calls": "port", "http": "http_port", "peers": "peer_port"}
_COORDINATOR_PORT_FIELDS = {"calls": "coordinator_port", "http": "coordinator_http_port"}
BEHIND_ENGINES: frozenset[str] = frozenset(("cache_server", "coordinator"))
"""The kinds that serve engines and no client: what they lose is computed, and their HTTP is for their own host."""


@dataclass(frozen=True)
class ProcessPlan:
    """One process of a deployment.

    ``argv`` and ``env`` may contain ``@INCARNATION@``; :meth:`born` fills it in, once for each start, so that an
    ``engine_id`` is never used twice.
    """

    name: str
    """Unique in the deployment: ``prefill-0``, ``decode-1``, ``cache-prefill``, ``router``."""
    role: Role
    kind: Kind
    host: str
    """The host that it runs on, as the spec names it (an address that its peers can reach)."""
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    """Variables added to the inherited environment."""
    env_files: dict[str, str] = field(default_factory=dict)
    """Variables whose value is the key that a file holds, by the file's path; read when the process is started, so that
    the plan holds no secret."""
    unset_env: tuple[str, ...] = ()
    """Variables removed from the inherited environment."""
    ports: dict[str, int] = field(default_factory=dict)
    """Every port that it listens on, by use: ``http``; of an engine ``side_channel`` and ``kv_replay``, of the router
    ``kv_events``, of a cache server ``calls`` and ``peers``, of a coordinator ``calls``. Of a further data-parallel
    rank, it ends in its number: ``kv_replay_1``.
    """
    base_url: str = ""
    """Where its HTTP API answers, ``http://host:port``."""
    ready_path: str = "/health"
    """A GET on this path answers 200 when the process is ready."""
    model_name: str = ""
    """The served model name, for engines."""
    bind: str = ""
    """The address that it listens on, where only that one tells whether its ports are free; else empty."""
    addresses: dict[str, str] = field(default_factory=dict)
    """The addresses of those ports that it listens on elsewhere, by use."""

    def listens_on(self, use: str) -> str:
        """The address at which the port for ``use`` is taken."""
        return self.addresses.get(use) or self.bind or self.host

    def port_field(self, use: str) -> str:
        """The dotted path of the spec field that gives the port for ``use``."""
        if self.role == "cache_server":
            return f"cache.{_CACHE_PORT_FIELDS[use]}"
        if self.role == "coordinator":
            return f"cache.{_COORDINATOR_PORT_FIELDS[use]}"
        return f"{self.role}.{_PORT_FIELDS[use.rstrip('_0123456789')]}"

    def born(self, incarnation: str) -> ProcessPlan:
        """The same plan with the placeholder replaced by ``incarnation``."""
        swap = {key: value.replace(INCARNATION_PLACEHOLDER, incarnation) for key, value in self.env.items()}
        argv = tuple(arg.replace(INCARNATION_PLACEHOLDER, incarnation) for arg in self.argv)
        return replace(self, argv=argv, env=swap)
