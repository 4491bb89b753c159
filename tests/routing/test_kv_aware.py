"""kv_aware: where requests go by what engines announce, by what they were just sent, and where neither is known."""

from __future__ import annotations

from antiphon.routing.ask import Ask, Prompt
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.kv_aware import KvAware
from antiphon.routing.kv_chain import StoredBlocks
from antiphon.routing.kv_index import IndexOptions, KvIndex
from antiphon.routing.pickers import PickerOptions

TOKENS = list(range(4001))


class Fleet:
    """Some engines and a policy, as a pool drives it."""

    def __init__(self, num: int = 4) -> None:
        self.index = KvIndex(IndexOptions())
        self.index.know_scope(b"s")
        self.policy = KvAware(PickerOptions("prefill", 1.25, kv_index=self.index))
        self.engines = [Endpoint(f"http://e{number}:1", "prefill") for number in range(num)]
        self.policy.set_members(self.engines)
        for engine in self.engines:
            self.index.store(engine, 0, StoredBlocks([9], None, [-1 % 97] * 16, 16))

    def prompt(self, *, tokens: list[int] | None = TOKENS, data: bytes = b"word " * 3200) -> Prompt:
        return Prompt(b"s", data, 4001, tokens)

    def announce(self, engine: Endpoint, num_blocks: int) -> None:
        self.index.store(engine, 0, StoredBlocks(list(range(num_blocks)), None, TOKENS[: 16 * num_blocks], 16))

    def pick(self, prompt: Prompt | None, chance: float = 0.0) -> tuple[Endpoint, int]:
        ask = Ask(prompt=prompt)
        engine = self.policy.pick(self.engines, chance, ask)
        self.policy.validate()
        return engine, ask.num_matched_tokens

    def load(self, engine: Endpoint, num: int) -> None:
        before, engine.num_active = engine.num_active, num
        self.policy.load_changed(engine, before)


def test_the_engine_that_says_it_holds_most_gets_the_request() -> None:
    fleet = Fleet()
    fleet.announce(fleet.engines[1], 10)
    fleet.announce(fleet.engines[2], 200)
    assert fleet.pick(fleet.prompt()) == (fleet.engines[2], 3200)
    assert fleet.policy.num_precise == 1


def test_affinity_yields_to_load() -> None:
    fleet = Fleet()
    fleet.announce(fleet.engines[2], 200)
    fleet.load(fleet.engines[2], 8)
    engine, matched = fleet.pick(fleet.prompt())
    assert engine is not fleet.engines[2]
    assert matched == 0


def test_a_burst_goes_where_its_first_request_went_before_anything_is_announced() -> None:
    fleet = Fleet()
    first, matched = fleet.pick(fleet.prompt(), chance=0.6)
    assert matched == 0
    fleet.load(first, 1)
    for other in fleet.engines:
        if other is not first:
            fleet.load(other, 1)
    second, matched = fleet.pick(fleet.prompt(), chance=0.1)
    assert second is first
    assert matched > 3800


def test_what_was_sent_is_not_believed_once_the_engine_has_nothing_in_flight() -> None:
    fleet = Fleet()
    first, _ = fleet.pick(fleet.prompt(), chance=0.6)
    fleet.load(first, 1)
    fleet.load(first, 0)
    assert fleet.pick(fleet.prompt(), chance=0.1) == (fleet.engines[0], 0)


def test_without_tokens_it_is_prefix_aware() -> None:
    fleet = Fleet()
    first, _ = fleet.pick(fleet.prompt(tokens=None), chance=0.6)
    second, matched = fleet.pick(fleet.prompt(tokens=None), chance=0.1)
    assert second is first
    assert matched > 3800
    assert fleet.policy.num_approximate == 2


def test_engines_that_announce_nothing_are_taken_to_hold_what_they_were_sent() -> None:
    fleet = Fleet()
    silent = Endpoint("http://silent:1", "prefill")
    fleet.engines = [silent]
    fleet.pick(fleet.prompt())
    fleet.engines = [Endpoint("http://other:1", "prefill"), silent]
    engine, matched = fleet.pick(fleet.prompt())
    assert engine is silent
    assert matched > 3800


def test_a_request_without_a_prompt_goes_to_the_less_loaded_of_two() -> None:
    fleet = Fleet(2)
    fleet.load(fleet.engines[0], 3)
    assert fleet.pick(None) == (fleet.engines[1], 0)


def test_a_hot_prefix_is_spread_over_all_engines() -> None:
    fleet = Fleet()
    fleet.announce(fleet.engines[0], 200)
    counts = dict.fromkeys(fleet.engines, 0)
    for number in range(400):
        engine, _ = fleet.pick(fleet.prompt(), chance=(number * 0.37) % 1)
        counts[engine] += 1
        fleet.load(engine, engine.num_active + 1)
        if number >= 8:
            busiest = max(fleet.engines, key=lambda one: one.num_active)
            fleet.load(busiest, busiest.num_active - 1)
    assert max(counts.values()) <= 1.5 * 100, counts
