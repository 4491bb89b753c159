"""What a router says at its start of knobs that do less than they say without another one."""

from __future__ import annotations

from typing import Any

import pytest

from antiphon.config.router_notices import router_notices
from antiphon.config.router_spec import RouterSpec


def notices(**knobs: Any) -> list[str]:
    return [each.field.removeprefix("router.") for each in router_notices(RouterSpec(**knobs))]


@pytest.mark.parametrize("where", ["policy", "prefill_policy", "decode_policy"])
def test_kv_aware_hears_and_asks_engines(where: str) -> None:
    assert notices(**{where: "kv_aware"}) == ["policy"]
    heard = {where: "kv_aware", "kv_events_port": 5557}
    assert notices(**heard) == []
    assert notices(**heard, tokenize_timeout_s=0) == ["tokenize_timeout_s"]
    assert notices(**{where: "prefix_aware"}) == []


def test_a_policy_that_no_pool_has_is_nothing_to_speak_of() -> None:
    assert notices(policy="kv_aware", prefill_policy="random", decode_policy="least_load") == []


def test_what_is_held_is_told_by_engines_or_cache_servers() -> None:
    assert notices(local_max_tokens=256) == ["local_max_tokens"]
    assert notices(local_max_tokens=256, kv_events_port=5557) == []
    assert notices(local_max_tokens=256, cache_servers=["http://127.0.0.1:8090"]) == []


def test_cold_knobs_need_the_bytes_of_a_token() -> None:
    assert notices(cold_queue_max=5, cold_share=0.5) == ["cold_queue_max"]
    assert notices(cold_queue_max=5, kv_bytes_per_token=1) == []


def test_the_defaults_surprise_nobody() -> None:
    assert notices() == []
