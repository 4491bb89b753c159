"""An engine that is in both pools: it cannot pull KV from itself."""

from __future__ import annotations

import pytest

from antiphon.routing.commands import ConnectDecode, ConnectPrefill, SendDecode
from antiphon.routing.events import Connected, PrefillAnswered, Received
from antiphon.routing.fleet import Fleet
from antiphon.routing.life import Life
from antiphon.routing.machine import step
from antiphon.routing.options import FleetOptions, LifeOptions
from antiphon.routing.policies import POLICIES


def fleet_of(prefill: list[str], decode: list[str], policy: str = "round_robin") -> Fleet:
    fleet = Fleet(prefill, decode, FleetOptions(prefill_policy=policy, decode_policy=policy))
    for endpoint in fleet.all():
        fleet.pool(endpoint.role).health_succeeded(endpoint, 0.0)
    return fleet


def served(fleet: Fleet, chance: float) -> tuple[str, str, bool]:
    """The prefill engine, the decode engine, and whether the handle is sent."""
    life = Life("r", fleet, LifeOptions(), path="pd")
    (connect,) = step(life, Received(), 1.0, chance)
    assert isinstance(connect, ConnectPrefill)
    step(life, Connected(life.attempt), 1.0, chance)
    (to_decode,) = step(life, PrefillAnswered(life.attempt, 200, b"{}", "id"), 1.0, chance)
    assert isinstance(to_decode, ConnectDecode)
    life.validate()
    (send,) = step(life, Connected(life.attempt), 1.0, chance)
    assert isinstance(send, SendDecode)
    life.cut()
    fleet.validate()
    return connect.endpoint.url, to_decode.endpoint.url, send.handle is not None


@pytest.mark.parametrize("policy", POLICIES)
def test_its_kv_goes_to_another(policy: str) -> None:
    urls = ["http://a:1", "http://b:1", "http://c:1"]
    fleet = fleet_of(urls, urls, policy)
    for number in range(30):
        prefill, decode, is_handed_over = served(fleet, number / 30)
        assert prefill != decode
        assert is_handed_over


def test_without_another_it_answers_alone() -> None:
    fleet = fleet_of(["http://a:1"], ["http://a:1"])
    assert served(fleet, 0.5) == ("http://a:1", "http://a:1", False)
    assert fleet.counts["handover_abandoned"] == 1


def test_it_is_no_pair_with_itself() -> None:
    urls = ["http://a:1", "http://b:1"]
    fleet = fleet_of(urls, urls)
    cold = fleet.pairs.cold(fleet.prefill.endpoints, fleet.decode.endpoints)
    assert sorted((prefill.url, decode.url) for prefill, decode in cold) == [tuple(urls), tuple(reversed(urls))]
