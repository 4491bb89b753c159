"""The compiler: from a spec to the command line and environment of every process.

Pure but for the look at the machine and at whether ``model.path`` is a folder here. It starts nothing, and refuses only
what it cannot express; whether it will work on this host is asked in ``checks.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.config.cache_servers import CacheServer, cache_notices, cache_server_plan, place_cache_servers
from antiphon.config.hosts import WILDCARDS, http_url, is_same_host
from antiphon.config.kv_events_plan import (
    events_of,
    filled_kv_events,
    kv_events_findings,
    rank_ports,
    router_event_ports,
)
from antiphon.config.model_facts import ModelFacts, model_facts
from antiphon.config.peers_plan import coordinator_plans, peer_notices, with_peers
from antiphon.config.plan import ProcessPlan
from antiphon.config.problems import Notice, Problem, SpecError
from antiphon.config.resolve import Engine, Machine, default_notices, handing_over, place_engines, this_machine
from antiphon.config.router_spec import RouterSpec
from antiphon.config.simulated_spec import SimulatedSpec
from antiphon.config.spec import POOLS, Pool, Spec
from antiphon.config.transfer import Transfer, cache_port, handover_max_s, lease_s, transfer_of
from antiphon.config.vllm_args import API_KEY_ENV, engine_argv, engine_env, engine_unset_env
from antiphon.core.ids import INCARNATION_PLACEHOLDER

DRAIN_SHARE = 2 / 3
"""Of the grace period, for a router whose spec does not say how long it drains: the rest is for ending."""


@dataclass(frozen=True)
class Compiled:
    """What came out of a spec. With problems, the plans are the nearest that could be made."""

    spec: Spec
    engines: tuple[Engine, ...]
    plans: tuple[ProcessPlan, ...]
    transfers: dict[Pool, Transfer]
    """The transfer configuration of the first engine of each pool; the others differ in the port of their server."""
    servers: tuple[CacheServer, ...]
    router: RouterSpec
    """The router's knobs, filled in."""
    problems: tuple[Problem, ...]
    notices: tuple[Notice, ...]


def compile_spec(spec: Spec, machine: Machine | None = None) -> list[ProcessPlan]:
    """Every process of ``spec``: coordinator, cache servers, prefill engines, decode engines, router.

    Args:
        machine: stands for every host where defaults depend on one (default: this one).

    Raises:
        SpecError: where a pool's ``kv_transfer_config`` cannot be used.
    """
    compiled = compile_all(spec, machine)
    if compiled.problems:
        raise SpecError(compiled.problems)
    return list(compiled.plans)


def compile_all(spec: Spec, machine: Machine | None = None) -> Compiled:
    """As :func:`compile_spec`, with problems and notices as values."""
    machine = machine or this_machine()
    is_real = any(spec.pool(pool).kind == "vllm" for pool in POOLS)
    model = model_facts(spec.model.path) if is_real else ModelFacts()
    engines = place_engines(spec, machine)
    servers = place_cache_servers(spec, engines, machine)
    own = {engine.name: transfer_of(engine, spec.handoff, servers) for engine in engines}
    transfers: dict[Pool, Transfer] = {}
    for engine in engines:
        transfers.setdefault(engine.pool, own[engine.name])
    lease = lease_s(transfers["prefill"].config)
    server_plans = [with_peers(cache_server_plan(server, spec), server, spec, servers) for server in servers]
    router, router_notices = _filled_router(spec, engines, server_plans, lease)
    kv_bytes, kv_notices = _kv_bytes_per_token(spec, model)
    router = router.model_copy(update=kv_bytes)
    host = _router_host(router, engines[0].host)
    engine_plans = [_engine_plan(engine, spec, own[engine.name], events_of(engine, router, host)) for engine in engines]
    events_findings = list(kv_events_findings(router, host, engines))
    found = own.values()
    return Compiled(
        spec=spec,
        engines=tuple(engines),
        plans=(*coordinator_plans(spec, servers), *server_plans, *engine_plans, _router_plan(router, host)),
        transfers=transfers,
        servers=tuple(servers),
        router=router,
        # Engines of one pool have most of it in common; it is said once.
        problems=(
            *dict.fromkeys(problem for transfer in found for problem in transfer.problems),
            *dict.fromkeys(finding for finding in events_findings if isinstance(finding, Problem)),
        ),
        notices=(
            *default_notices(spec, engines),
            *cache_notices(spec, engines, servers),
            *peer_notices(spec, servers),
            *dict.fromkeys(notice for transfer in found for notice in transfer.notices),
            *_unused_servers(servers, engines, own),
            *router_notices,
            *kv_notices,
            *dict.fromkeys(finding for finding in events_findings if isinstance(finding, Notice)),
        ),
    )


def _unused_servers(servers: list[CacheServer], engines: list[Engine], own: dict[str, Transfer]) -> Iterator[Notice]:
    """The servers that no engine speaks to, because a ``kv_transfer_config`` names another port."""
    if any(transfer.problems for transfer in own.values()):
        return
    used = {(engine.host, cache_port(own[engine.name].config)) for engine in engines}
    unused = [server.name for server in servers if (server.host, server.port) not in used]
    if unused:
        text = f"no engine uses {' or '.join(unused)}: kv_transfer_config names other ports, and the memory lies idle"
        yield Notice("cache.enabled", text)


def _engine_plan(engine: Engine, spec: Spec, transfer: Transfer, kv_events: dict[str, Any] | None) -> ProcessPlan:
    replays = rank_ports("kv_replay", engine.kv_replay_port, engine.num_ranks) if kv_events is not None else {}
    common: dict[str, Any] = {
        "name": engine.name,
        "role": engine.pool,
        "host": engine.host,
        "ports": {"http": engine.port, "side_channel": engine.side_channel_port, **replays},
        "base_url": http_url(engine.host, engine.port),
        "model_name": spec.model.served,
    }
    if engine.spec.kind == "simulated":
        argv = _simulated_argv(engine, spec, transfer.config, kv_events)
        return ProcessPlan(kind="simulated", argv=argv, env=dict(engine.spec.env), **common)
    return ProcessPlan(
        kind="vllm",
        argv=engine_argv(engine, spec.model, transfer.of_engine(engine.name), kv_events, spec.tracing),
        env=engine_env(engine, spec.model, spec.tracing),
        env_files=_key_of_engine(engine, spec),
        unset_env=engine_unset_env(engine),
        **common,
    )


def _key_of_engine(engine: Engine, spec: Spec) -> dict[str, str]:
    """An engine of the deployment asks for the key that its router shows, unless its ``env`` names one."""
    path = spec.router.worker_api_key_file
    if path is None or API_KEY_ENV in engine.spec.env:
        return {}
    return {API_KEY_ENV: str(Path(path).expanduser())}


def _simulated_argv(
    engine: Engine, spec: Spec, transfer: dict[str, Any], kv_events: dict[str, Any] | None
) -> tuple[str, ...]:
    argv = [sys.executable, "-m", "antiphon", "sim-engine", "--host", engine.bind, "--port", str(engine.port)]
    argv += ["--role", engine.pool, "--model-name", spec.model.served]
    argv += ["--engine-id", f"{engine.name}-{INCARNATION_PLACEHOLDER}"]
    if engine.bind != engine.host:
        argv += ["--side-channel-host", engine.host]
    argv += ["--side-channel-port", str(engine.side_channel_port)]
    if engine.spec.max_num_seqs is not None:
        argv += ["--max-num-seqs", str(engine.spec.max_num_seqs)]
    if transfer["kv_load_failure_policy"] != "fail":
        argv += ["--kv-load-failure-policy", transfer["kv_load_failure_policy"]]
    port = cache_port(transfer) if spec.handoff.kind == "cache" else None
    if port is not None:  # it speaks to a cache server only to hand over through it
        argv += ["--cache-port", str(port), "--cache-chunk-size", str(spec.cache.chunk_size_tokens)]
    for key in ("endpoint", "topic", "replay_endpoint"):
        if kv_events is not None and key in kv_events:
            argv += [f"--kv-events-{key.replace('_', '-')}", kv_events[key]]
    knobs = simulated_knobs(engine, spec)
    for name, field in SimulatedSpec.model_fields.items():
        if getattr(knobs, name) != field.default:
            argv += [f"--{name.replace('_', '-')}", str(getattr(knobs, name))]
    return tuple(argv)


def simulated_knobs(engine: Engine, spec: Spec) -> SimulatedSpec:
    """The latency model of ``engine``: what ``simulated`` leaves open is what the real engine would be told."""
    own = engine.spec.simulated
    shared = {
        "block_size_tokens": engine.spec.block_size_tokens,
        "max_model_len": spec.model.max_model_len,
        "lease_s": float(spec.handoff.lease_s),
    }
    update = {name: value for name, value in shared.items() if value is not None and name not in own.model_fields_set}
    return own.model_copy(update=update)


def _filled_router(
    spec: Spec, engines: list[Engine], servers: list[ProcessPlan], lease: int
) -> tuple[RouterSpec, list[Notice]]:
    """The router's knobs with the engines' URLs, and deadlines that lie inside the lease and the grace period."""
    router = handing_over(spec)
    update: dict[str, Any] = {
        pool: [http_url(engine.host, engine.port) for engine in engines if engine.pool == pool] for pool in POOLS
    }
    traced = spec.tracing.router_knobs()
    update |= {name: value for name, value in traced.items() if name not in router.model_fields_set}
    notices = []
    if spec.handoff.kind == "cache" and "local_max_tokens" not in spec.router.model_fields_set:
        text = f"{router.local_max_tokens}: a prompt that fills no chunk cannot be handed over through cache servers"
        notices.append(Notice("router.local_max_tokens", text))
    update |= filled_kv_events(router.model_copy(update=update), engines)  # whether it hears any goes by those above
    host = _router_host(router, engines[0].host)
    near = [plan for plan in servers if is_same_host(plan.host, host)]
    update["cache_servers"] = list(dict.fromkeys([*router.cache_servers, *(plan.base_url for plan in near)]))
    if len(near) < len(servers):
        names = ", ".join(plan.name for plan in servers if plan not in near)
        text = f"not those of {names}: their reports are read on their own hosts only, so receipts lack their tokens"
        notices.append(Notice("router.cache_servers", text))
    longest_s = handover_max_s(lease)
    has_lease = spec.handoff.kind == "nixl"
    if has_lease and "handover_timeout_s" not in router.model_fields_set and router.handover_timeout_s > longest_s:
        update["handover_timeout_s"] = longest_s
        notices.append(Notice("router.handover_timeout_s", f"{longest_s:g} s, within the lease of the KV, {lease} s"))
    grace_s = spec.supervisor.stop_grace_s
    left_s = max(0.0, grace_s - router.stop_notice_s)
    if "drain_timeout_s" not in router.model_fields_set and router.drain_timeout_s >= left_s:
        update["drain_timeout_s"] = drain_s = round(left_s * DRAIN_SHARE, 3)
        notices.append(
            Notice("router.drain_timeout_s", f"{drain_s:g} s, within supervisor.stop_grace_s, {grace_s:g} s")
        )
    return router.model_copy(update=update), notices


def _kv_bytes_per_token(spec: Spec, model: ModelFacts) -> tuple[dict[str, int], list[Notice]]:
    """What the router is told of the KV of a token where the spec says nothing of it and the model does."""
    if "kv_bytes_per_token" in spec.router.model_fields_set:
        return {}, []
    num_bytes = model.kv_token_bytes(spec.model.dtype, spec.prefill.kv_cache_dtype)
    if num_bytes is None:
        return {}, []
    num_cold = -(-spec.router.cold_min_bytes // num_bytes)
    longest = spec.model.max_model_len or model.longest_request_tokens
    if longest is not None and num_cold >= longest:  # one token at least is for the answer
        text = f"no prompt waits for another: one would at {num_cold} tokens, and a request has at most {longest}"
    else:
        text = f"prompts of {num_cold} tokens or more to compute wait for each other; 0: none"
    text = f"{num_bytes}, from the model: {text}"
    return {"kv_bytes_per_token": num_bytes}, [Notice("router.kv_bytes_per_token", text)]


def _router_host(router: RouterSpec, default_host: str) -> str:
    """Where the router runs. Bound to a wildcard it names no host: it is taken to run on ``default_host``."""
    return default_host if router.host in WILDCARDS else router.host


def _router_plan(router: RouterSpec, host: str) -> ProcessPlan:
    """The process of the router, its knobs filled in."""
    events = router_event_ports(router)
    return ProcessPlan(
        name="router",
        role="router",
        kind="router",
        host=host,
        argv=router_argv(router),
        ports={"http": router.port, **events},
        addresses=dict.fromkeys(events, router.kv_events_host),
        base_url=http_url(host, router.port),
        ready_path="/readiness",
    )


def router_argv(router: RouterSpec) -> tuple[str, ...]:
    """The router's command line: the flags of a vllm-router command line, then every knob that is not its default."""
    argv = [sys.executable, "-m", "antiphon", "router", "--policy", router.policy]
    argv.append("--vllm-pd-disaggregation" if router.vllm_pd_disaggregation else "--no-vllm-pd-disaggregation")
    for role in ("prefill", "decode"):
        for url in getattr(router, role):
            argv += [f"--{role}", url]
    for url in router.cache_servers:
        argv += ["--cache-server", url]
    argv += ["--host", router.host, "--port", str(router.port)]
    written = {"policy", "vllm_pd_disaggregation", "prefill", "decode", "cache_servers", "host", "port"}
    for name, field in RouterSpec.model_fields.items():
        value = getattr(router, name)
        if name in written or value == field.default:
            continue
        flag = name.replace("_", "-")
        argv += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return tuple(argv)
