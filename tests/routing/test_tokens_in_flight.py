"""The prompt tokens that engines still have to compute: charged to whoever is to compute them, and given back once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from antiphon.routing.ask import Ask, Prompt
from antiphon.routing.commands import ConnectDecode, ConnectPrefill, ProbeDecode
from antiphon.routing.events import (
    ClientLeft,
    Connected,
    ConnectRefused,
    Deadline,
    Event,
    FirstByte,
    PrefillAnswered,
    Received,
    StreamEnded,
    UpstreamLost,
)
from antiphon.routing.fleet import Fleet
from antiphon.routing.life import Life
from antiphon.routing.machine import step
from antiphon.routing.options import FleetOptions, LifeOptions
from antiphon.routing.path import Path
from antiphon.routing.pool import Pool

DATA = bytes(range(256)) * 32
PREFIX_AWARE = FleetOptions(prefill_policy="prefix_aware", decode_policy="prefix_aware")


def fleet_of(num_prefill: int, num_decode: int, options: FleetOptions = PREFIX_AWARE) -> Fleet:
    fleet = Fleet(
        [f"http://p{index}:1" for index in range(num_prefill)],
        [f"http://d{index}:1" for index in range(num_decode)],
        options,
    )
    for endpoint in fleet.all():
        fleet.pool(endpoint.role).health_succeeded(endpoint, 0.0)
    return fleet


def life_of(fleet: Fleet, path: Path = "pd", data: bytes = DATA, options: LifeOptions | None = None) -> Life:
    ask = Ask(prompt=Prompt(b"model", data, len(data) // 4))
    life = Life("r", fleet, options or LifeOptions(), path=path, ask=ask)
    step(life, Received(), 1.0, 0.0)
    return life


def tell(life: Life, kind: Callable[..., Event], *args: object, now_s: float = 1.0) -> list[object]:
    commands = step(life, kind(life.attempt, *args), now_s, 0.0)
    life.validate()
    life.fleet.validate()
    return list(commands)


def tokens(pool: Pool) -> list[int]:
    return [endpoint.num_uncached_tokens for endpoint in pool.endpoints]


def test_a_prefill_is_charged_and_a_decode_with_a_handle_is_not() -> None:
    fleet = fleet_of(1, 1)
    life = life_of(fleet)
    assert (tokens(fleet.prefill), tokens(fleet.decode)) == ([2048], [0])
    tell(life, Connected)
    (command,) = tell(life, PrefillAnswered, 200, b"{}", "p#1")
    assert isinstance(command, ConnectDecode)
    assert (tokens(fleet.prefill), tokens(fleet.decode)) == ([0], [0])
    tell(life, Connected)
    tell(life, FirstByte)
    tell(life, StreamEnded)
    assert life.is_over


def test_what_the_engine_holds_is_not_charged() -> None:
    fleet = fleet_of(1, 1)
    life_of(fleet).cut()
    life_of(fleet, data=DATA + b"x" * 400)
    assert tokens(fleet.prefill) == [100]


def test_a_policy_that_knows_nothing_charges_the_whole_prompt() -> None:
    fleet = fleet_of(1, 1, FleetOptions(prefill_policy="prefix_aware", decode_policy="round_robin"))
    life_of(fleet).cut()
    life = life_of(fleet)
    assert tokens(fleet.prefill) == [0]
    tell(life, Connected)
    tell(life, PrefillAnswered, 200, None, "p#1")  # no handle: decode computes the prompt
    assert tokens(fleet.decode) == [2048], "not what the prefill engine held"


def test_an_ask_without_a_prompt_charges_nothing() -> None:
    fleet = fleet_of(1, 1)
    life = Life("r", fleet, LifeOptions(), path="pd", ask=Ask(5))
    step(life, Received(), 1.0, 0.0)
    assert (tokens(fleet.prefill), fleet.prefill.num_active) == ([0], 1)


def test_a_local_decode_is_charged_until_its_first_byte() -> None:
    fleet = fleet_of(1, 1)
    life = life_of(fleet, "local")
    tell(life, Connected)
    assert tokens(fleet.decode) == [2048]
    tell(life, FirstByte)
    assert tokens(fleet.decode) == [0]
    assert fleet.decode.num_active == 1
    tell(life, StreamEnded)
    assert tokens(fleet.decode) == [0]


@pytest.mark.parametrize("path", ["pd", "local"])
@pytest.mark.parametrize("is_connected", [False, True])
@pytest.mark.parametrize("how", ["cut", "leave", "refused", "late"])
def test_they_are_given_back_however_the_attempt_ends(how: str, is_connected: bool, path: Path) -> None:
    fleet = fleet_of(2, 2)
    life = life_of(fleet, path)
    pool = fleet.prefill if path == "pd" else fleet.decode
    if is_connected:
        tell(life, Connected)
    assert sorted(tokens(pool)) == [0, 2048]
    before = tokens(pool)
    if how == "cut":
        life.cut()
    elif how == "leave":
        step(life, ClientLeft(), 1.0, 0.0)
    elif how == "late":
        step(life, Deadline(), life.deadline_s, 0.0)
    elif is_connected:
        tell(life, UpstreamLost)
    else:
        tell(life, ConnectRefused)
    fleet.validate()
    has_moved = not life.is_over
    assert sorted(tokens(pool)) == ([0, 2048] if has_moved else [0, 0])
    if has_moved and not (how == "refused" and is_connected):  # one that is lost unsent may go to the same engine
        assert tokens(pool) == before[::-1]
    life.cut()
    assert not any(tokens(fleet.prefill) + tokens(fleet.decode))


def test_a_decode_engine_that_is_kept_for_a_request_is_not_charged() -> None:
    fleet = fleet_of(1, 1)
    fleet.decode.health_refused(fleet.decode.endpoints[0], 0.0, 0.0)
    life = Life("r", fleet, LifeOptions(), path="pd", ask=Ask(prompt=Prompt(b"", DATA, 2048)))
    (command,) = step(life, Received(), 1.0, 0.0)
    assert isinstance(command, ProbeDecode)
    assert (tokens(fleet.prefill), tokens(fleet.decode)) == ([0], [0])
    (command,) = tell(life, Connected)
    assert isinstance(command, ConnectPrefill)
    assert (tokens(fleet.prefill), tokens(fleet.decode), fleet.decode.num_active) == ([2048], [0], 1)
    life.cut()
    fleet.validate()
    assert (tokens(fleet.prefill), fleet.decode.num_active) == ([0], 0)


def test_no_more_is_given_back_than_was_charged() -> None:
    pool = fleet_of(1, 1).prefill
    trial = pool.begin(pool.endpoints[0], 10)
    with pytest.raises(AssertionError):
        pool.end(pool.endpoints[0], trial, 11)


def test_a_preferred_decode_engine_goes_before_the_policy_while_it_is_ready() -> None:
    fleet = fleet_of(1, 4)
    preferred = fleet.decode.endpoints[2]
    ask = Ask(prompt=Prompt(b"", DATA, 2048), preferred=preferred)
    ask.num_matched_tokens = 2000
    assert {fleet.pick_decode(0.0, number / 10, ask) for number in range(10)} == {preferred}
    assert ask.num_matched_tokens == 2000, "what its chooser found"
    assert fleet.pick_decode(0.0, 0.0, ask, [preferred]) is not preferred
    assert ask.num_matched_tokens == 0
    fleet.decode.drain(preferred)
    assert fleet.pick_decode(0.0, 0.0, ask) is not preferred


def test_a_warm_partner_that_the_policy_did_not_pick_is_expected_to_hold_nothing() -> None:
    options = FleetOptions(decode_policy="prefix_aware", prefers_warm_pairs=True)
    fleet = fleet_of(1, 2, options)
    prefill = fleet.prefill.endpoints[0]
    ask = Ask(prompt=Prompt(b"", DATA, 2048))
    cold = fleet.pick_decode(0.0, 0.0, ask)
    (warm,) = [one for one in fleet.decode.endpoints if one is not cold]
    ask = Ask(prompt=Prompt(b"", DATA, 2048))
    assert fleet.pick_decode(0.0, 0.0, ask) is cold
    assert ask.num_matched_tokens > 0
    fleet.pairs.warm(prefill, warm)
    assert fleet.pick_decode(0.0, 0.0, ask, partner=prefill) is warm
    assert ask.num_matched_tokens == 0
