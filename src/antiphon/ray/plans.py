"""What a replica starts, from the spec of the application and the place that Ray gave it: plans, and nothing started.

Pure but for the machine, which is an argument. One engine is compiled by the compiler that serves ``antiphon up``, as
the only one of its pool on its address.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from antiphon.config.cache_servers import server_of, with_local_hosts
from antiphon.config.compile import Compiled, compile_all
from antiphon.config.hosts import WILDCARDS, host_and_port, http_url, is_loopback
from antiphon.config.plan import ProcessPlan
from antiphon.config.problems import SpecError
from antiphon.config.resolve import Engine, Machine
from antiphon.config.spec import POOLS, Pool, Spec
from antiphon.core.ids import INCARNATION_PLACEHOLDER
from antiphon.ray.peers import at_node
from antiphon.ray.scaling import ReplicaSettings

LOOPBACK = "127.0.0.1"
NAME_MAX = 32


@dataclass(frozen=True)
class LifeSettings:
    """What one engine of a pool is told beside the spec."""

    drain_timeout_s: float
    """For its requests to end, when it leaves."""
    files: tuple[str, ...] = ()
    """As in :class:`ReplicaSettings`."""


@dataclass(frozen=True)
class AppSettings:
    """What every replica of one application is given: what it uses, and nothing of how many there are."""

    spec: Spec
    pools: dict[Pool, LifeSettings]
    built_s: float = 0.0
    """When it was built, by the wall clock: of two builds of one application the later one counts."""
    version: str = ""
    """Of what replicas are given, where Serve keeps those that run while it stays (``versions.py``); else empty."""

    @classmethod
    def of(cls, spec: Spec, pools: Mapping[Pool, ReplicaSettings], built_s: float = 0.0) -> Self:
        """Those of an application whose pools are ``pools``."""
        one: dict[str, Any] = {each: spec.pool(each).model_copy(update={"replicas": 1}) for each in POOLS}
        lives: dict[Pool, LifeSettings] = {
            name: LifeSettings(own.drain_timeout_s, own.files) for name, own in pools.items()
        }
        return cls(spec.model_copy(update=one), lives, built_s)

    def named(self, app_name: str) -> AppSettings:
        """As they are in ``app_name``: what is named by the spec on a node is that application's own there."""
        if "name" in self.spec.model_fields_set:
            return self
        return replace(self, spec=self.spec.model_copy(update={"name": spec_name(app_name)}))

    @property
    def is_published(self) -> bool:
        """Whether the router listens beyond its own machine, which is what lets the engines do so."""
        return not is_loopback(self.spec.router.host)


@dataclass(frozen=True)
class EnginePlace:
    """Where one engine runs."""

    replica: str
    """Short and unique in the application."""
    address: str
    """Listens there, and is reached there."""
    port: int
    side_channel_port: int
    kv_replay_port: int
    router_host: str
    """The address of the router, for engines that tell it of their KV."""
    devices: tuple[str, ...] = ()
    """The GPUs that Ray gave it, by Ray's names; empty: none."""
    coordinator_url: str | None = None
    """Of the cache servers, where they share."""


@dataclass(frozen=True)
class EnginePlan:
    """One engine, ready to be started, and what the router and people are told of it."""

    plan: ProcessPlan
    shape: dict[str, Any]
    """What must be equal for a hand-over, and what identifies the model."""
    server_plan: ProcessPlan | None
    """The cache server of its node; None: it uses none."""


def spec_name(app_name: str) -> str:
    """``app_name`` as a spec may be named: 1 to 32 of a-z, 0-9 and -."""
    return re.sub(r"[^a-z0-9-]+", "-", app_name.lower()).strip("-")[:NAME_MAX].strip("-") or "antiphon"


def engine_plan(settings: AppSettings, pool: Pool, place: EnginePlace, machine: Machine) -> EnginePlan:
    """The engine of ``pool`` at ``place``.

    Raises:
        SpecError: it cannot be expressed.
    """
    spec = with_local_hosts(settings.spec, place.address)
    router = spec.router.model_copy(update={"host": place.router_host})
    update: dict[str, Any] = {"router": router}
    if place.coordinator_url is not None:
        update["cache"] = spec.cache.model_copy(update={"coordinator_url": place.coordinator_url})
    for each in POOLS:
        section = spec.pool(each)
        own: dict[str, Any] = {"replicas": 1, "hosts": [place.address], "bind": place.address}
        if "python" not in section.model_fields_set:
            own["python"] = sys.executable  # of this node: the application was built on another one
        if each == pool:
            own |= {
                "port": place.port,
                "side_channel_port": place.side_channel_port,
                "kv_replay_port": place.kv_replay_port,
                "devices": list(place.devices),
            }
        update[each] = section.model_copy(update=own)
    compiled = _compiled(spec.model_copy(update=update), machine)
    engine = next(each for each in compiled.engines if each.pool == pool)
    plan = next(each for each in compiled.plans if each.name == engine.name)
    server = server_of(engine, list(compiled.servers))
    servers = {each.name: at_node(each, place.address) for each in compiled.plans if each.role == "cache_server"}
    return EnginePlan(
        plan=_named(plan, f"{pool}-{place.replica}"),
        shape=_shape(compiled, engine),
        server_plan=None if server is None else servers[server.name],
    )


def router_plan(settings: AppSettings, address: str, machine: Machine) -> ProcessPlan:
    """The router, without engines: they are added as they come.

    Args:
        address: where it is reached; where its spec names a wildcard, not where it listens.

    Raises:
        SpecError: it cannot be expressed.
    """
    spec = settings.spec
    pools: dict[str, Any] = {
        each: spec.pool(each).model_copy(update={"replicas": 1, "hosts": [address]}) for each in POOLS
    }
    empty = {"router": spec.router.model_copy(update={"allow_empty": True})}
    compiled = _compiled(spec.model_copy(update=pools | empty), machine)
    plan = next(each for each in compiled.plans if each.role == "router")
    own_host = address if spec.router.host in WILDCARDS else spec.router.host
    return replace(
        plan,
        argv=tuple(_without_engines(plan.argv)),
        host=own_host,
        base_url=http_url(own_host, host_and_port(plan.base_url)[1]),
        ready_path="/health",
    )


def own_url(base_url: str, host: str) -> str:
    """Where the router is asked from its own machine, which needs no key where it listens on loopback too."""
    return http_url(LOOPBACK, host_and_port(base_url)[1]) if host in WILDCARDS else base_url


def _compiled(spec: Spec, machine: Machine) -> Compiled:
    compiled = compile_all(spec, machine)
    if compiled.problems:
        raise SpecError(compiled.problems)
    return compiled


def _without_engines(argv: Iterable[str]) -> Iterable[str]:
    words = iter(argv)
    for word in words:
        if word in ("--prefill", "--decode"):
            next(words)
        else:
            yield word


def _named(plan: ProcessPlan, name: str) -> ProcessPlan:
    """``plan`` under another name, which its engine id begins with."""
    old, new = f"{plan.name}-{INCARNATION_PLACEHOLDER}", f"{name}-{INCARNATION_PLACEHOLDER}"
    return replace(plan, name=name, argv=tuple(arg.replace(old, new) for arg in plan.argv))


def _shape(compiled: Compiled, engine: Engine) -> dict[str, Any]:
    model, pool = compiled.spec.model, engine.spec
    transfer = compiled.transfers[engine.pool].config
    return {
        "model": model.served,
        "model_path": model.path,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "engine": pool.kind,
        "device": engine.device,
        "block_size_tokens": engine.block_size_tokens,
        "kv_cache_dtype": pool.kv_cache_dtype,
        "tensor_parallel_size": pool.tensor_parallel_size,
        "kv_connector": transfer.get("kv_connector"),
    }


SHAPE_EQUAL = ("model", "model_path", "dtype", "engine", "block_size_tokens", "kv_cache_dtype")
"""What both engines of a hand-over must have in common."""
