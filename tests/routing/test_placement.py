"""The path by what is where: each rule, the order among them, and that affinity yields to load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.routing.ask import Prompt
from antiphon.routing.endpoint import Endpoint, Verdict
from antiphon.routing.fleet import Fleet
from antiphon.routing.options import FleetOptions
from antiphon.routing.path import PD, REASONS, SINGLE_STAGE, served_alone
from antiphon.routing.placement import Placement, PlacementOptions, Placer
from antiphon.routing.states import EndpointState

P = "p0:1"
ADDRESSES = ("d0:1", "d1:1", "d2:1")


def fleet_of(num_decode: int = 3, num_prefill: int = 1) -> Fleet:
    fleet = Fleet(
        [f"http://p{i}:1" for i in range(num_prefill)], [f"http://d{i}:1" for i in range(num_decode)], FleetOptions()
    )
    for endpoint in fleet.all():
        fleet.pool(endpoint.role).health_succeeded(endpoint, 0.0)
        assert endpoint.state is EndpointState.READY
    return fleet


def placer(fleet: Fleet, local_max_tokens: int = 256, **options: object) -> Placer:
    return Placer(fleet, PlacementOptions(local_max_tokens, **options))  # type: ignore[arg-type]


def prompt(num_tokens: int) -> Prompt:
    return Prompt(b"scope", b"", num_tokens)


def shown(placement: Placement) -> tuple[str, str, str | None, int]:
    preferred = placement.preferred
    return (
        placement.choice.path,
        placement.choice.reason,
        None if preferred is None else preferred.address,
        placement.num_held_tokens,
    )


def busy(fleet: Fleet, endpoint: Endpoint, num_requests: int) -> None:
    for _ in range(num_requests):
        fleet.decode.begin(endpoint)


def test_all_but_the_threshold_is_held() -> None:
    made = placer(fleet_of())
    assert shown(made.place(prompt(1000), PD, 0.0, {"d1:1": 744})) == ("cached", "held_by_engine", "d1:1", 744)
    assert shown(made.place(prompt(1000), PD, 0.0, {}, {"d1:1": 744})) == ("cached", "held_by_server", "d1:1", 744)
    assert shown(made.place(prompt(1000), PD, 0.0, {"d1:1": 743})) == ("pd", "default", None, 0)
    assert shown(made.place(prompt(1000), PD, 0.0, {"d0:1": 256}, {"d0:1": 800})) == (
        *("cached", "held_by_server", "d0:1"),
        800,
    )
    assert {"held_by_engine", "held_by_server", "short"} <= set(REASONS)


def test_the_engine_with_least_to_compute_is_preferred_and_of_equals_the_idlest() -> None:
    fleet = fleet_of()
    made = placer(fleet, load_factor=100.0)
    assert shown(made.place(prompt(1000), PD, 0.0, {"d0:1": 800, "d2:1": 900}))[2:] == ("d2:1", 900)
    busy(fleet, fleet.decode.endpoints[0], 1)
    assert shown(made.place(prompt(1000), PD, 0.0, {"d0:1": 900, "d1:1": 900}))[2:] == ("d1:1", 900)
    # More than the prompt has is no better than all of it.
    assert shown(made.place(prompt(1000), PD, 0.0, {"d0:1": 5000, "d1:1": 1000}))[2:] == ("d1:1", 1000)


def test_a_short_prompt_is_local_unless_some_of_it_is_held() -> None:
    made = placer(fleet_of())
    assert shown(made.place(prompt(256), PD, 0.0)) == ("local", "short", None, 0)
    assert shown(made.place(prompt(257), PD, 0.0)) == ("pd", "default", None, 0)
    assert shown(made.place(prompt(256), PD, 0.0, {"d1:1": 16})) == ("cached", "held_by_engine", "d1:1", 16)
    assert shown(made.place(prompt(256), PD, 0.0, {"d1:1": 0}, {"d1:1": 0})) == ("local", "short", None, 0)
    for held in ({}, {"d1:1": 16}):  # its length is not known
        assert shown(made.place(prompt(0), PD, 0.0, held)) == ("pd", "default", None, 0)


def test_a_loaded_engine_and_one_that_is_not_ready_are_not_preferred() -> None:
    fleet = fleet_of()
    made = placer(fleet)
    first = fleet.decode.endpoints[0]
    held = {"d0:1": 900, "d1:1": 800}
    busy(fleet, first, 2)  # 1.25 times the mean of (2 + 1) / 3
    assert shown(made.place(prompt(1000), PD, 0.0, held))[2:] == ("d1:1", 800)
    assert shown(made.place(prompt(1000), PD, 0.0, {"d0:1": 900})) == ("pd", "default", None, 0)
    for one in fleet.decode.endpoints[1:]:
        busy(fleet, one, 2)
    assert shown(made.place(prompt(1000), PD, 0.0, held))[2:] == ("d0:1", 900)
    fleet.decode.drain(first)
    assert shown(made.place(prompt(1000), PD, 0.0, held))[2:] == ("d1:1", 800)
    assert shown(made.place(prompt(1000), PD, 0.0, {"d0:1": 900, "gone:1": 900}))[0] == "pd"


def test_a_request_that_is_bound_stays_as_it_is() -> None:
    made = placer(fleet_of())
    for choice in (served_alone("n"), served_alone("disabled"), SINGLE_STAGE):
        placed = made.place(prompt(1000), choice, 0.0, {"d1:1": 1000})
        assert placed.choice is choice
        assert placed.preferred is None


def test_off_nothing_is_changed() -> None:
    made = placer(fleet_of(), 0)
    assert not made.uses_prompts
    assert placer(fleet_of()).uses_prompts
    assert made.place(prompt(1), PD, 0.0, {"d1:1": 1}).choice is PD
    assert placer(fleet_of()).place(None, PD, 0.0, {"d1:1": 1000}).choice is PD
    with pytest.raises(ValueError, match="at least"):
        PlacementOptions(-1)
    with pytest.raises(ValueError, match="at least"):
        PlacementOptions(load_factor=0.5)


def test_without_prefill_engines_that_answer() -> None:
    fleet = fleet_of()
    (prefill,) = fleet.prefill.endpoints
    local, fail = placer(fleet, 0, prefill_fallback="local"), placer(fleet, 0)
    assert local.place(None, PD, 0.0).choice is PD
    fleet.prefill.judge(prefill, Verdict.REFUSED, 0.0, 0.5)
    assert prefill.retry_at_s > 0.0
    assert shown(local.place(None, PD, 0.0)) == ("local", "prefill_fallback", None, 0)
    assert fail.place(None, PD, 0.0).choice is PD  # the client is told
    # Once its wait is over one request tries it: without that it would never be back.
    later_s = prefill.retry_at_s
    assert local.place(None, PD, later_s).choice is PD
    trial = fleet.prefill.begin(prefill)
    assert trial
    assert local.place(None, PD, later_s).choice.path == "local"
    fleet.prefill.end(prefill, trial)
    held = placer(fleet, 256, prefill_fallback="local").place(prompt(1000), PD, 0.0, {"d1:1": 900})
    assert shown(held)[:3] == ("cached", "held_by_engine", "d1:1")


@given(
    num_tokens=st.integers(0, 1000),
    local_max=st.integers(0, 300),
    own=st.dictionaries(st.sampled_from(ADDRESSES), st.integers(0, 1100)),
    served=st.dictionaries(st.sampled_from(ADDRESSES), st.integers(0, 1100)),
    loads=st.tuples(*(st.integers(0, 4) for _ in ADDRESSES)),
)
def test_against_the_rules_in_words(
    num_tokens: int, local_max: int, own: dict[str, int], served: dict[str, int], loads: tuple[int, ...]
) -> None:
    fleet = fleet_of()
    for endpoint, load in zip(fleet.decode.endpoints, loads, strict=True):
        busy(fleet, endpoint, load)
    placed = placer(fleet, local_max).place(prompt(num_tokens), PD, 0.0, own, served)
    share = 1.25 * (sum(loads) + 1) / 3
    fit = {}
    for address, load in zip(ADDRESSES, loads, strict=True):
        held = min(num_tokens, max(own.get(address, 0), served.get(address, 0)))
        if local_max and held and num_tokens - held <= local_max and load < share:
            fit[address] = (held, -load)
    if fit:
        assert placed.preferred is not None
        assert fit[placed.preferred.address] == max(fit.values())
        assert (placed.choice.path, placed.num_held_tokens) == ("cached", max(fit.values())[0])
        wins = own.get(placed.preferred.address, 0) >= served.get(placed.preferred.address, 0)
        assert placed.choice.reason == ("held_by_engine" if wins else "held_by_server")
    else:
        is_short = 0 < num_tokens <= local_max
        assert shown(placed) == (("local", "short", None, 0) if is_short else ("pd", "default", None, 0))
