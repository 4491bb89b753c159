"""The builder: from a ``pd_config`` to an application of Ray Serve.

Four deployments: ``prefill`` and ``decode``, a replica of which runs one engine; ``router``, one replica; ``ingress``,
behind Serve's HTTP address. Nothing is started here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from antiphon.config.checks import check_handoff, check_owned, check_pools_agree, check_router
from antiphon.config.compile import compile_all
from antiphon.config.facts import HostFacts
from antiphon.config.hosts import WILDCARDS, is_loopback
from antiphon.config.problems import Notice, Problem, SpecError
from antiphon.config.resolve import Machine, this_machine
from antiphon.config.router_spec import RouterSpec
from antiphon.config.spec import POOLS
from antiphon.ray import inside
from antiphon.ray.engine_replica import LEAVE_MARGIN_S, EngineReplica
from antiphon.ray.ingress import Ingress
from antiphon.ray.mapping import Mapped, mapped
from antiphon.ray.peers import peers_notices, peers_problems
from antiphon.ray.plans import AppSettings
from antiphon.ray.router_replica import RouterReplica
from antiphon.ray.scaling import ReplicaSettings
from antiphon.ray.schema import parse
from antiphon.ray.serve_scaling import serve_autoscaling
from antiphon.ray.versions import version_of

INGRESS_ONGOING_MAX = 1_000_000
"""The router bounds what it takes (``router.connections_max``); Serve is not to refuse before it does."""
CONTROL_ONGOING_MAX = 100_000
STOP_MARGIN_S = 10.0
ROUTER_HEALTH_S = 1.0
SHUTDOWN_LOOK_S = 0.5
NO_ACCESS_LOG = {"enable_access_log": False}
"""Of Serve, which would have a line for each beat of an engine; requests are in the log of the router."""


def build(pd_config: object) -> Application:
    """The application that ``pd_config`` describes; see :func:`antiphon.ray.build_pd_openai_app`."""
    found = mapped(parse(pd_config), machine=_machine())
    notices, spec = list(found.notices), found.spec
    if spec.cache.enabled and "shared" not in spec.cache.model_fields_set:
        cache = spec.cache.model_copy(update={"shared": True})
        cache.model_fields_set.discard("shared")  # nobody has written it: where no server would start, none does
        spec = spec.model_copy(update={"cache": cache})
        if compile_all(spec, this_machine()).servers:
            notices.append(Notice("antiphon.cache.shared", "true: one cache server on each node, for both pools"))
        found = replace(found, spec=spec)
    notices += _checked(found)
    for notice in dict.fromkeys(notices):
        sys.stderr.write(f"antiphon: notice: {notice}\n")
    settings = AppSettings.of(spec, found.pools, time.time())
    if inside.is_built_from_file():
        settings = replace(settings, version=version_of(settings, found.pools))
    version = settings.version
    router: Application = _kept(_router(settings), version).bind(settings)
    pools = [_kept(_pool(settings, found.pools[pool]), version).bind(settings, pool, router) for pool in POOLS]
    ingress: Application = _kept(_ingress(found.ingress), version).bind(settings, router, *pools)
    return ingress


def _kept(deployment: Any, version: str) -> Any:
    """With a version, a deploy that does not change it keeps the replicas that run."""
    return inside.with_version(deployment, version) if version else deployment


def _machine() -> Machine:
    """This machine, with GPUs where any node of the cluster has some: engines are placed there."""
    machine = this_machine()
    if not machine.has_cuda and ray.is_initialized():
        cluster: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        machine = replace(machine, has_cuda=cluster.get("GPU", 0) > 0)
    return machine


def _checked(found: Mapped) -> list[Notice]:
    """The checks of the spec that do not concern this machine, which runs nothing of it.

    Raises:
        SpecError: with every problem found.
    """
    compiled = compile_all(found.spec, this_machine())
    nothing = HostFacts(mem_available_bytes=0, shm_free_bytes=0, cores=0, num_cuda_devices=0)
    findings: list[Problem | Notice] = []
    for check in (check_owned, check_handoff, check_pools_agree, check_router):
        findings += check(compiled, nothing)
    findings += _unreachable(found.spec.router)
    findings += peers_problems(found.spec, compiled.servers)
    problems = [each for each in findings if isinstance(each, Problem)]
    if problems:
        raise SpecError([replace(each, field=f"antiphon.{each.field}") for each in dict.fromkeys(problems)])
    notices = [each for each in findings if isinstance(each, Notice)]
    return [*notices, *peers_notices(found.spec, compiled.servers), *_open_engines(found.spec.router)]


def _unreachable(router: RouterSpec) -> Iterator[Problem]:
    """A router that does not listen on loopback is asked for its engines with a key, even on its own machine."""
    if not is_loopback(router.host) and router.host not in WILDCARDS and router.admin_key_file is None:
        message = f"is missing, and the router, on {router.host} alone, takes no engines without it"
        fix = "name a file with the key, which every node has; or write 0.0.0.0 as host"
        yield Problem("router.admin_key_file", message, fix)


def _open_engines(router: RouterSpec) -> Iterator[Notice]:
    """Engines listen beyond their nodes where the router does."""
    if not is_loopback(router.host) and router.worker_api_key_file is None:
        text = "is missing: engines listen at the addresses of their nodes, and answer whoever reaches them there"
        yield Notice("antiphon.router.worker_api_key_file", text)


def _router(settings: AppSettings) -> Any:
    stop_s = settings.spec.supervisor.stop_grace_s + STOP_MARGIN_S
    return serve.deployment(
        name="router",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=CONTROL_ONGOING_MAX,
        health_check_period_s=ROUTER_HEALTH_S,
        graceful_shutdown_timeout_s=stop_s,
        graceful_shutdown_wait_loop_s=SHUTDOWN_LOOK_S,
        logging_config=NO_ACCESS_LOG,
    )(RouterReplica)


def _pool(settings: AppSettings, own: ReplicaSettings) -> Any:
    stop_s = own.drain_timeout_s + LEAVE_MARGIN_S + settings.spec.supervisor.stop_grace_s + STOP_MARGIN_S
    return serve.deployment(
        name=own.role,
        ray_actor_options=_actor_options(own),
        max_ongoing_requests=CONTROL_ONGOING_MAX,
        health_check_period_s=own.health_interval_s,
        health_check_timeout_s=own.health_timeout_s,
        graceful_shutdown_timeout_s=stop_s,
        graceful_shutdown_wait_loop_s=SHUTDOWN_LOOK_S,
        logging_config=NO_ACCESS_LOG,
        **_number(own),
    )(EngineReplica)


def _ingress(own: ReplicaSettings) -> Any:
    return serve.deployment(
        name="ingress",
        ray_actor_options=_actor_options(own),
        max_ongoing_requests=INGRESS_ONGOING_MAX,
        health_check_period_s=own.health_interval_s,
        health_check_timeout_s=own.health_timeout_s,
        graceful_shutdown_timeout_s=own.drain_timeout_s,
        graceful_shutdown_wait_loop_s=SHUTDOWN_LOOK_S,
        logging_config=NO_ACCESS_LOG,
        **_number(own),
    )(serve.ingress()(Ingress))


def _number(own: ReplicaSettings) -> dict[str, Any]:
    """How many, or between what numbers."""
    scaling = serve_autoscaling(own)
    options: dict[str, Any] = {"num_replicas": own.initial_replicas}
    if scaling is not None:
        options = {"autoscaling_config": scaling}
    if own.max_replicas_per_node is not None:
        options["max_replicas_per_node"] = own.max_replicas_per_node
    return options


def _actor_options(own: ReplicaSettings) -> dict[str, Any]:
    """What one replica needs of a node, in Ray's words."""
    resources = dict(own.resources)
    options: dict[str, Any] = {"num_cpus": resources.pop("CPU", 0)}
    for name, option in (("GPU", "num_gpus"), ("memory", "memory")):
        if name in resources:
            options[option] = resources.pop(name)
    if resources:
        options["resources"] = resources
    if own.accelerator_type is not None:
        options["accelerator_type"] = own.accelerator_type
    if own.labels:
        options["label_selector"] = dict(own.labels)
    if own.runtime_env:
        options["runtime_env"] = dict(own.runtime_env)
    return options
