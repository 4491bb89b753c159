"""What parts of routing owe each other: policies beside admission, engines that go, transfers whose end nobody sees."""

from __future__ import annotations

import pytest

from antiphon.routing.admission import ColdAdmission
from antiphon.routing.ask import Ask, Prompt
from antiphon.routing.cold import AdmissionOptions, Admit, ColdItem, ColdStage, Wait
from antiphon.routing.commands import ConnectDecode, ConnectPrefill, RespondError
from antiphon.routing.endpoint import Cause, Endpoint, Verdict
from antiphon.routing.events import ConnectRefused, Received
from antiphon.routing.fleet import Fleet
from antiphon.routing.kv_aware import KvAware
from antiphon.routing.life import Life
from antiphon.routing.machine import step
from antiphon.routing.options import FleetOptions, LifeOptions
from antiphon.routing.policies import POLICIES
from antiphon.routing.pool import Pool
from antiphon.routing.states import EndpointState
from antiphon.routing.tenants import ADMIT, WAIT, TenantOptions, Tenants

TEXT = b"x" * 4096
AWARE = ("prefix_aware", "kv_aware")


def made_pool(policy: str, num: int = 4) -> Pool:
    pool = Pool("prefill", policy, FleetOptions())
    for index in range(num):
        pool.health_succeeded(pool.add(f"http://p{index}:8000"), 0.0)
    pool.validate()
    return pool


def an_ask(*shunned: Endpoint, key: int | None = None) -> Ask:
    ask = Ask(key, Prompt(b"scope", TEXT, 1024))
    ask.shunned = shunned
    return ask


def picked(pool: Pool, ask: Ask, chance: float = 0.5) -> Endpoint:
    life = Life("r", Fleet((), (), FleetOptions()), LifeOptions(), path="pd", ask=ask)
    life.fleet.prefill = pool
    life.chance = chance
    endpoint = life._pick_prefill()
    assert endpoint is not None
    return endpoint


# ---- a policy beside cold prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", AWARE)
def test_a_prefix_stays_with_its_engine_while_cold_prompts_have_another(policy: str) -> None:
    pool = made_pool(policy)
    home = picked(pool, an_ask())
    other = next(each for each in pool.ready if each is not home)
    for chance in (0.0, 0.3, 0.6, 0.9):
        ask = an_ask(other)
        assert picked(pool, ask, chance) is home
        assert ask.num_matched_tokens == 1024


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_picks_a_shunned_engine_while_another_is_ready(policy: str) -> None:
    pool = made_pool(policy)
    for _ in range(3):  # the prefix is held by some
        picked(pool, an_ask(key=7))
    for shunned in ((0,), (1, 2), (0, 1, 3)):
        ask = an_ask(*(pool.ready[index] for index in shunned), key=7)
        for chance in (0.0, 0.26, 0.51, 0.99):
            assert picked(pool, ask, chance) not in ask.shunned
    everyone = an_ask(*pool.ready, key=7)
    assert picked(pool, everyone) in pool.ready


def test_a_doubtful_engine_is_tried_though_every_request_shuns_some() -> None:
    pool = made_pool("round_robin")
    doubtful = pool.ready[-1]
    pool.begin(doubtful)
    pool.judge(doubtful, Verdict.TIMED_OUT, 1.0, 0.0)
    pool.end(doubtful, 0)
    assert doubtful.state is EndpointState.SUSPECT
    assert doubtful.cause is Cause.REQUEST
    life = Life("r", Fleet((), (), FleetOptions()), LifeOptions(), path="pd", ask=an_ask(pool.ready[0]))
    life.fleet.prefill = pool
    life.now_s = doubtful.retry_at_s + 1
    assert life._pick_prefill() is doubtful


# ---- engines that go -------------------------------------------------------------------------------------------------


def test_what_an_engine_was_sent_is_forgotten_with_it() -> None:
    pool = made_pool("kv_aware", 2)
    picker = pool.picker
    assert isinstance(picker, KvAware)
    for number in range(50):
        url = f"http://new{number}:8000"
        pool.health_succeeded(pool.add(url), 0.0)
        endpoint = pool.find(url)
        assert endpoint is not None
        picker._sent.insert(endpoint, Prompt(b"s", TEXT, 1024))
        pool.remove(endpoint)
    assert len(picker._sent._holdings) <= 2
    picker.validate()


# ---- transfers whose end nobody sees ---------------------------------------------------------------------------------


def made_admission() -> tuple[ColdAdmission, Endpoint, Endpoint]:
    options = AdmissionOptions(
        kv_bytes_per_token=1,
        warm_bytes=100,
        rate_bytes_s=100.0,
        rate_min_bytes_s=1.0,
        sample_min_bytes=50,
        cold_per_engine=8,
    )
    admission = ColdAdmission(options)
    prefill, decode = Endpoint("http://p:1", "prefill"), Endpoint("http://d:1", "decode")
    admission.set_prefills([prefill])
    admission.set_decodes([decode])
    return admission, prefill, decode


def a_whole(num_tokens: int) -> ColdItem:
    item = ColdItem(num_tokens, num_tokens)
    item.is_told = False
    return item


def test_an_answer_that_is_not_streamed_holds_the_budget_for_as_long_as_its_transfer_takes() -> None:
    admission, prefill, decode = made_admission()
    first, second = a_whole(900), a_whole(900)
    assert isinstance(admission.offer(first, 0.0), Admit)
    assert isinstance(admission.offer(second, 0.0), Wait)
    admission.prefill_chosen(first, prefill, 0.0)
    assert isinstance(admission.prefill_answered(first, decode, 1.0), Admit)
    assert admission.due_s == 10.0  # 900 bytes at 100 a second
    assert admission.tick(9.9) == []
    admission.validate()
    assert admission.tick(10.0) == [second]
    assert first.stage is ColdStage.GONE
    assert second.stage is ColdStage.PREFILLING
    admission.validate()
    admission.leave(first, 11.0)
    admission.leave(second, 11.0)
    admission.validate()
    shown = admission.statistics(11.0)
    assert (shown.committed_bytes, shown.decodes[0].in_flight_bytes) == (0, 0)
    assert admission.due_s == float("inf")


def test_a_transfer_that_is_begun_again_is_expected_anew() -> None:
    admission, prefill, decode = made_admission()
    item = a_whole(900)
    admission.offer(item, 0.0)
    admission.prefill_chosen(item, prefill, 0.0)
    admission.prefill_answered(item, decode, 0.0)
    admission.prefill_chosen(item, prefill, 5.0)
    admission.validate()
    assert admission.tick(9.5) == []
    assert item.stage is ColdStage.PREFILLING
    admission.prefill_answered(item, decode, 20.0)
    assert admission.tick(28.9) == []
    assert item.stage is ColdStage.PULLING
    admission.tick(29.0)
    assert item.stage is ColdStage.GONE
    admission.validate()


# ---- the path "cached" -----------------------------------------------------------------------------------------------


def made_fleet(num_prefills: int = 1, num_decodes: int = 2) -> Fleet:
    fleet = Fleet(
        [f"http://p{index}:1" for index in range(num_prefills)],
        [f"http://d{index}:1" for index in range(num_decodes)],
        FleetOptions(),
    )
    for endpoint in fleet.all():
        fleet.pool(endpoint.role).health_succeeded(endpoint, 0.0)
    return fleet


def a_cached(fleet: Fleet) -> Life:
    ask = an_ask()
    ask.preferred = fleet.decode.ready[0]
    ask.num_matched_tokens = 1000
    return Life("r", fleet, LifeOptions(), path="cached", ask=ask)


def test_a_cached_request_whose_engine_is_gone_is_prefilled() -> None:
    fleet = made_fleet()
    life = a_cached(fleet)
    command = step(life, Received(), 0.0, 0.5)[-1]
    assert isinstance(command, ConnectDecode)
    assert command.endpoint is fleet.decode.endpoints[0]
    command = step(life, ConnectRefused(command.attempt), 0.1, 0.5)[-1]
    assert isinstance(command, ConnectPrefill)
    assert life.path == "pd"
    life.validate()
    life.cut()
    fleet.validate()


def test_without_a_prefill_engine_another_decode_engine_computes_it() -> None:
    fleet = made_fleet(num_prefills=0)
    life = a_cached(fleet)
    command = step(life, Received(), 0.0, 0.5)[-1]
    assert isinstance(command, ConnectDecode)
    command = step(life, ConnectRefused(command.attempt), 0.1, 0.5)[-1]
    assert isinstance(command, ConnectDecode)
    assert command.endpoint is fleet.decode.endpoints[1]
    assert life.num_tokens == 1024, "it holds nothing"
    command = step(life, ConnectRefused(command.attempt), 0.1, 0.5)[0]
    assert isinstance(command, RespondError)
    life.validate()


# ---- tenants: a place that is not needed now -------------------------------------------------------------------------


def test_who_steps_aside_gives_its_place_to_others_and_has_one_again_when_it_goes_on() -> None:
    tenants = Tenants([TenantOptions("a", concurrent_max=2, queue_max=1), TenantOptions("b")], 2, 10.0)
    assert tenants.offer("a1", "a", 10, 0.0) is ADMIT
    assert tenants.offer("a2", "a", 10, 0.0) is ADMIT
    assert tenants.offer("b1", "b", 10, 0.0) is WAIT
    assert tenants.step_aside("a1", 1.0) == ["b1"]
    assert tenants.step_aside("a2", 1.0) == [], "one of them may be aside"
    tenants.validate(1.0)
    assert (tenants.num_in_flight, tenants.num_waiting) == (2, 0)
    assert tenants.offer("a3", "a", 10, 1.0) is WAIT, "those aside count for their own tenant"
    tenants.step_in("a1")
    tenants.step_in("a1")
    tenants.validate(1.0)
    assert tenants.num_in_flight == 3
    assert tenants.offer("b2", "b", 10, 1.0) is WAIT
    assert tenants.leave("a1", 2.0, 10) == [], "it was one too many"
    assert tenants.leave("a2", 2.0, 10) == ["a3"]
    assert tenants.leave("b1", 2.0, 10) == ["b2"]
    assert tenants.step_aside("a3", 2.0) == []
    for item in ("a3", "b2"):
        assert tenants.leave(item, 3.0, 10) == []
    tenants.validate(3.0)
    assert (tenants.num_in_flight, tenants.num_waiting) == (0, 0)
