"""Who tells the router of its KV blocks, where the router hears it, and what cannot work about that.

The router listens, and engines connect to it (``kv_events.py``). The port stands beside the router's own one, one for
each data-parallel rank; an engine repeats what was missed on ports of its own, counted like those of its side channel.

Pure. What an engine is told names an address, never a wildcard: at a wildcard, vLLM listens instead of connecting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from antiphon.config.hosts import WILDCARDS, http_url, is_loopback, is_same_host
from antiphon.config.kv_events import hears_kv_events, kv_events_config
from antiphon.config.problems import Notice, Problem
from antiphon.config.resolve import Engine
from antiphon.config.router_spec import RouterSpec

Finding = Problem | Notice
EVENTS_OFFSET = 100
"""From the router's port to that for KV events, where it is not given: routers of one host often count up by one."""
_LAST_PORT = 65535


def filled_kv_events(router: RouterSpec, engines: Iterable[Engine]) -> dict[str, Any]:
    """The fields of ``router`` that hearing events needs and that are not written."""
    if not hears_kv_events(router):
        return {}
    update: dict[str, Any] = {}
    if router.kv_events_port is None:
        above = router.port + EVENTS_OFFSET
        update["kv_events_port"] = above if above <= _LAST_PORT else router.port - EVENTS_OFFSET
    if "kv_events_ranks" not in router.model_fields_set:
        update["kv_events_ranks"] = max(engine.num_ranks for engine in engines)
    return update


def router_event_ports(router: RouterSpec) -> dict[str, int]:
    """The ports on which a router with these knobs, filled in, hears events."""
    if router.kv_events_port is None or not hears_kv_events(router):
        return {}
    return rank_ports("kv_events", router.kv_events_port, router.kv_events_ranks)


def rank_ports(use: str, port: int | None, num_ranks: int) -> dict[str, int]:
    """The ports of each rank, by use; vLLM adds the rank to the first."""
    if port is None:
        return {}
    return {f"{use}_{rank}" if rank else use: port + rank for rank in range(num_ranks)}


def events_of(engine: Engine, router: RouterSpec, router_host: str) -> dict[str, Any] | None:
    """What ``engine`` is told: the value of ``--kv-events-config``. None where nobody hears it, or it cannot connect.

    Args:
        router: its knobs, filled in.
        router_host: where it runs.
    """
    if not hears_kv_events(router):
        return None
    host = heard_at(engine, router, router_host)
    if ":" in host:
        return None
    url = http_url(engine.host, engine.port)
    return kv_events_config(url, f"tcp://{host}:{router.kv_events_port}", engine.kv_replay_port, engine.bind)


def heard_at(engine: Engine, router: RouterSpec, router_host: str) -> str:
    """The address at which ``engine`` reaches the router's port for events; one that is not reached, too."""
    if router.kv_events_host not in WILDCARDS:
        return router.kv_events_host
    return "127.0.0.1" if is_same_host(engine.host, router_host) else router_host


def kv_events_findings(router: RouterSpec, router_host: str, engines: Iterable[Engine]) -> Iterator[Finding]:
    """What cannot work, and what is worth knowing, about the events of ``engines`` at this ``router``."""
    if not hears_kv_events(router):
        if router.kv_events_port is not None:
            text = "is not used: neither router.policy kv_aware nor router.local_max_tokens asks what engines hold"
            yield Notice("router.kv_events_port", text)
        return
    listening = router.kv_events_host
    if _is_name(listening):
        fix = "write the address that the name stands for, or 0.0.0.0"
        yield Problem("router.kv_events_host", f"{listening} is a name, and events are heard at addresses only", fix)
    elif not is_loopback(listening):
        text = f"{listening}: whoever reaches it can make the router believe anything about what engines hold"
        yield Notice("router.kv_events_host", text)
    engines = list(engines)
    yield from _unreachable(engines, router, router_host)
    for engine in engines:
        if engine.spec.kind == "vllm":
            yield from _contradictions(engine)
        if engine.kv_replay_port is None:
            text = f"{engine.name} repeats no KV events at an IPv6 address: each one missed costs what is known of it"
            yield Notice(f"{engine.pool}.kv_replay_port", text)
        elif _is_name(engine.bind):
            message = f"{engine.bind} is a name, and KV events are repeated at addresses only"
            yield Problem(f"{engine.pool}.bind", message, "write the address that the name stands for, or 0.0.0.0")


def _unreachable(engines: list[Engine], router: RouterSpec, router_host: str) -> Iterator[Finding]:
    """The engines that cannot connect to the router's port for events; said once."""
    heard = {engine.host: heard_at(engine, router, router_host) for engine in engines}
    cut_off = [host for host, at in heard.items() if is_loopback(at) and not is_same_host(host, router_host)]
    if cut_off:
        at = heard[cut_off[0]]
        message = f"KV events are heard at {at}, which engines on {' and '.join(cut_off)} do not reach"
        fix = "write the address of the router's host that they reach"
        yield Problem("router.kv_events_host", message, f"{fix}, and router.host" if is_loopback(router_host) else fix)
    elif any(":" in at for at in heard.values()):
        message = f"{next(at for at in heard.values() if ':' in at)} is an IPv6 address, which vLLM does not connect to"
        yield Problem("router.kv_events_host", message, "write an IPv4 address")


def _contradictions(engine: Engine) -> Iterator[Finding]:
    """Arguments that take the events away."""
    args = engine.spec.args
    if "kv-events-config" in args:
        fix = "remove it, or choose another router.policy and router.local_max_tokens: 0"
        yield Problem(f"{engine.pool}.args.kv-events-config", "is set for the router, which hears the events", fix)
    if args.get("no-enable-prefix-caching", False) is not False:
        message = "without prefix caching an engine has no KV blocks to tell of"
        fix = "remove it, or choose another router.policy and router.local_max_tokens: 0"
        yield Problem(f"{engine.pool}.args.no-enable-prefix-caching", message, fix)


def _is_name(host: str) -> bool:
    """Whether ``host`` is neither an address nor one of the words that stand for one."""
    is_address = ":" in host or host.replace(".", "").isdigit()
    return not is_address and host != "localhost" and host not in WILDCARDS
