"""What an engine is told so that the router hears which KV blocks it holds: ``--kv-events-config``.

vLLM's publisher connects and the router binds, so that many engines speak to one socket. An engine is told apart by its
topic, ``kv@URL`` or ``kv@URL@REPLAY_PORT``: the address that the router knows it by, and the port on the same host
where it answers with what it sent before.

Pure: it reads nothing and binds nothing.
"""

from __future__ import annotations

from typing import Any

from antiphon.config.hosts import WILDCARDS
from antiphon.config.router_spec import RouterSpec

TOPIC_PREFIX = "kv@"
TOPIC_CHARS_MAX = 500
BUFFER_STEPS = 10_000
"""Batches that an engine keeps for a replay: vLLM's default."""


def hears_kv_events(router: RouterSpec) -> bool:
    """Whether the router looks up prompts by their tokens, and so goes by what engines say that they hold."""
    return "kv_aware" in router.policies or router.local_max_tokens > 0


def kv_events_config(url: str, router_endpoint: str, replay_port: int | None, bind_host: str) -> dict[str, Any]:
    """The value of ``--kv-events-config``.

    Args:
        url: the engine as the router knows it, ``http://HOST:PORT``.
        router_endpoint: where the router listens for events, ``tcp://HOST:PORT``; no wildcard: the engine connects.
        replay_port: where the engine answers replays; None leaves them out, and a lost message costs all claims on it.
        bind_host: the address that the engine listens on for them; a wildcard or an address.
    """
    host = router_endpoint.partition("://")[2].rpartition(":")[0]
    assert router_endpoint.startswith("tcp://") and "*" not in host and "::" not in host, router_endpoint
    config: dict[str, Any] = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": router_endpoint,
        "topic": topic_of(url, replay_port),
    }
    if replay_port is not None:
        # ZMQ binds addresses and no names.
        host = "127.0.0.1" if bind_host == "localhost" else bind_host
        config["replay_endpoint"] = f"tcp://{'*' if host in WILDCARDS else host}:{replay_port}"
        config["buffer_steps"] = BUFFER_STEPS
    return config


def topic_of(url: str, replay_port: int | None) -> str:
    """The topic of the engine at ``url``."""
    return f"{TOPIC_PREFIX}{url}" if replay_port is None else f"{TOPIC_PREFIX}{url}@{replay_port}"


def parse_topic(topic: str) -> tuple[str, int | None] | None:
    """The URL and the replay port that a topic names; None if it is no topic of an engine."""
    if not topic.startswith(TOPIC_PREFIX) or len(topic) > TOPIC_CHARS_MAX:
        return None
    url, separator, port = topic.removeprefix(TOPIC_PREFIX).partition("@")
    if not separator:
        return (url, None) if url else None
    if not url or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        return None
    return url, int(port)
