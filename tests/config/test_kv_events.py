"""What engines are told about KV events, and the topics by which they are known."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from antiphon.config.kv_events import hears_kv_events, kv_events_config, parse_topic, topic_of
from antiphon.config.router_spec import RouterSpec


@pytest.mark.parametrize(
    ("knobs", "policies", "hears"),
    [
        ({"policy": "round_robin"}, ("round_robin", "round_robin"), False),
        ({"policy": "kv_aware"}, ("kv_aware", "kv_aware"), True),
        ({"policy": "random", "prefill_policy": "kv_aware"}, ("kv_aware", "random"), True),
        ({"policy": "random", "decode_policy": "kv_aware"}, ("random", "kv_aware"), True),
        (
            {"policy": "kv_aware", "prefill_policy": "prefix_aware", "decode_policy": "least_load"},
            ("prefix_aware", "least_load"),
            False,
        ),
        ({"policy": "random", "local_max_tokens": 1}, ("random", "random"), True),
    ],
)
def test_who_goes_by_what_is_held(knobs: dict[str, Any], policies: tuple[str, str], hears: bool) -> None:
    router = RouterSpec(**knobs)
    assert (router.policies, hears_kv_events(router)) == (policies, hears)
    assert "policies" not in router.model_dump()
    with pytest.raises(ValidationError):
        RouterSpec(policies=("random", "random"))  # type: ignore[call-arg] - no knob


def test_the_configuration_of_an_engine() -> None:
    assert kv_events_config("http://10.0.0.5:8001", "tcp://10.0.0.1:5557", 5600, "0.0.0.0") == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://10.0.0.1:5557",
        "topic": "kv@http://10.0.0.5:8001@5600",
        "replay_endpoint": "tcp://*:5600",
        "buffer_steps": 10_000,
    }
    plain = kv_events_config("http://127.0.0.1:8001", "tcp://127.0.0.1:5557", None, "127.0.0.1")
    assert "replay_endpoint" not in plain
    loopback = kv_events_config("http://127.0.0.1:8001", "tcp://127.0.0.1:5557", 5600, "127.0.0.1")
    assert loopback["replay_endpoint"] == "tcp://127.0.0.1:5600"


def test_an_endpoint_that_vllm_would_bind_is_refused() -> None:
    for endpoint in ("tcp://*:5557", "tcp://[::1]:5557", "ipc://somewhere"):
        with pytest.raises(AssertionError):
            kv_events_config("http://e:1", endpoint, None, "127.0.0.1")


def test_topics_are_read_as_they_are_written() -> None:
    for url, port in (("http://10.0.0.5:8001", 5600), ("http://[::1]:8001", None), ("http://e:1", 65535)):
        assert parse_topic(topic_of(url, port)) == (url, port)


@pytest.mark.parametrize(
    "topic",
    [
        *("", "kv@", "kv@@5", "http://e:1", "kv@http://e:1@", "kv@http://e:1@0", "kv@http://e:1@65536"),
        *("kv@http://e:1@٣", "kv@http://e:1@5@6", "kv@" + "x" * 500),
    ],
)
def test_what_is_no_topic_of_an_engine(topic: str) -> None:
    assert parse_topic(topic) is None
