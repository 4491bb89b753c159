"""The pure simulated engine: its latency model to the nanosecond, its hand-over, its accounting under any events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from antiphon.engine.simulated.kv import KV_BYTES_PER_TOKEN
from antiphon.engine.simulated.sequence import RemoteKv, Sequence, Stage
from tests.engine.simulated_world import MS, World

LATENCY = {"prefill_tokens_per_s": 1000.0, "prefill_overhead_ms": 2.0, "decode_token_ms": 5.0}
prompts = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def finished_at(world: World, sequence: Sequence) -> int:
    (at_ns,) = [at for at, request_id, reason in world.log if request_id == sequence.request_id and reason]
    return at_ns


# ---- latency ---------------------------------------------------------------------------------------------------------


def test_prefill_is_overhead_plus_uncached_tokens_over_rate_then_a_token_every_decode_interval() -> None:
    world = World.of("L", **LATENCY)
    sequence = world.submit("L", list(range(10)), 3)
    world.run()
    assert [at for at, _, _ in world.log] == [12 * MS, 17 * MS, 22 * MS]
    assert (sequence.first_token_ns, sequence.finished_ns, sequence.finish_reason) == (12 * MS, 22 * MS, "length")


def test_cached_tokens_are_not_computed_again() -> None:
    world = World.of("L", **LATENCY)
    world.answer("L", list(range(10)), 1)
    start_ns = world.now_ns
    sequence = world.submit("L", [*range(8), 99, 98], 1)
    world.run()
    assert sequence.num_cached_tokens == 8
    assert finished_at(world, sequence) - start_ns == (2 + 2) * MS


def test_the_last_prompt_token_is_always_computed() -> None:
    world = World.of("L", **LATENCY)
    world.answer("L", list(range(8)), 1)
    sequence = world.submit("L", list(range(8)), 1)
    assert sequence.num_cached_tokens == 4


def test_one_prefill_at_a_time_in_order_of_arrival_and_decoding_goes_on() -> None:
    world = World.of("L", **LATENCY)
    first = world.submit("L", list(range(10)), 3)
    second = world.submit("L", list(range(20, 30)), 1)
    third = world.submit("L", list(range(40, 50)), 1)
    world.run()
    assert [finished_at(world, s) for s in (first, second, third)] == [22 * MS, 24 * MS, 36 * MS]


def test_the_model_is_exact_however_late_it_is_called() -> None:
    world = World.of("L", **LATENCY)
    for start in range(3):
        world.submit("L", list(range(10 * start, 10 * start + 10)), 3)
    engine = world.engines["L"]
    effects = engine.advance(10_000 * MS)
    assert max(effect.at_ns for effect in effects if hasattr(effect, "at_ns")) == 46 * MS
    assert engine.next_due_ns() is None


def test_advance_does_at_most_so_many_events() -> None:
    world = World.of("L", decode_token_ms=0.0, prefill_overhead_ms=0.0)
    world.submit("L", [1, 2], 50)
    world.submit("L", [3, 4], 50)
    engine = world.engines["L"]
    assert len(engine.advance(10**12, events_max=7)) == 7
    assert engine.next_due_ns() is not None


def test_at_most_max_num_seqs_run() -> None:
    world = World.of("L", max_num_seqs=2, **LATENCY)
    sequences = [world.submit("L", list(range(10 * n, 10 * n + 10)), 5) for n in range(4)]
    engine = world.engines["L"]
    seen = set()
    while engine.num_running or engine.num_waiting:
        seen.add(engine.num_running)
        world.run(world.now_ns + MS)
    assert max(seen) == 2
    assert [finished_at(world, s) for s in sequences] == [32 * MS, 44 * MS, 64 * MS, 76 * MS]


def test_pull_time_is_bytes_over_rate_and_then_one_decode_interval() -> None:
    world = World.of("P", "D", transfer_gb_per_s=1.0, **LATENCY)
    prompt = list(range(10))
    remote = world.prefill("P", prompt)
    start_ns = world.now_ns
    sequence = world.submit("D", prompt, 2, remote=remote)
    world.run()
    transfer_ns = 3 * 4 * KV_BYTES_PER_TOKEN  # 3 blocks of 4 tokens at one byte a nanosecond
    assert sequence.first_token_ns - start_ns == transfer_ns + 5 * MS
    assert sequence.finished_ns - start_ns == transfer_ns + 10 * MS


def test_a_transfer_that_really_took_longer_counts_as_long_as_it_took() -> None:
    world = World.of("P", "D", **LATENCY)
    remote = world.prefill("P", [1, 2, 3])
    world.held_pulls = []
    sequence = world.submit("D", [1, 2, 3], 1, remote=remote)
    world.run(world.now_ns + 500 * MS)
    world.carry_out(*world.held_pulls.pop())
    arrived_ns = world.now_ns
    world.run()
    assert sequence.first_token_ns == arrived_ns + 5 * MS


def test_slowdown_multiplies_prefill_and_decode() -> None:
    world = World.of("L", **LATENCY)
    sequence = world.submit("L", list(range(10)), 2, slowdown=3.0)
    world.run()
    assert (sequence.first_token_ns, sequence.finished_ns) == (36 * MS, 51 * MS)


def test_a_request_waits_until_its_blocks_are_free_and_nothing_overtakes_it() -> None:
    world = World.of("L", kv_blocks=8, max_num_seqs=9, **LATENCY)
    first = world.submit("L", list(range(20)), 2)  # 6 of 8 blocks
    world.run(world.now_ns + 22 * MS)
    big = world.submit("L", list(range(100, 112)), 1)  # 3 blocks: does not fit
    small = world.submit("L", [7], 1)  # would fit, and is younger
    assert (big.stage, small.stage) == (Stage.WAITING, Stage.WAITING)
    world.run()
    assert first.finished_ns < finished_at(world, big) < finished_at(world, small)


def test_idle_cached_blocks_are_not_counted_as_free_twice() -> None:
    world = World.of("L", kv_blocks=8, **LATENCY)
    world.answer("L", list(range(12)), 1)  # leaves 3 blocks in the prefix cache, free
    world.submit("L", list(range(100, 113)), 4)  # holds 4 of the other 5
    world.run(world.now_ns + 16 * MS)
    waiting = world.submit("L", list(range(20)), 1)  # 3 cached blocks and 2 more: one more than there are
    assert waiting.stage is Stage.WAITING
    world.run()
    assert waiting.num_cached_tokens == 12
    assert waiting.output == World.of("L").answer("L", list(range(20)), 1)


# ---- what a token depends on -----------------------------------------------------------------------------------------


@given(prompts, st.integers(1, 12))
@settings(max_examples=60)
def test_pd_text_is_the_text_of_a_lone_engine(prompt: list[int], max_tokens: int) -> None:
    world = World.of("L", "P", "D")
    lone = world.answer("L", prompt, max_tokens)
    sequence = world.submit("D", prompt, max_tokens, remote=world.prefill("P", prompt))
    world.run()
    assert sequence.output == lone
    assert sequence.num_pulled_tokens == len(prompt)
    assert world.engines["P"].kv.num_used == world.engines["D"].kv.num_used == 0


@given(st.lists(prompts, min_size=2, max_size=6))
@settings(max_examples=40)
def test_text_does_not_depend_on_what_is_cached(requests: list[list[int]]) -> None:
    world = World.of("warm", "P", "D")
    for prompt in requests:
        cold = World.of("L").answer("L", prompt, 6)
        assert world.answer("warm", prompt, 6) == cold
        assert world.answer("D", prompt, 6, remote=world.prefill("P", prompt)) == cold


@given(prompts, st.data())
@settings(max_examples=60)
def test_any_flipped_byte_of_any_block_changes_the_text(prompt: list[int], data: st.DataObject) -> None:
    world = World.of("L", "P", "D")
    lone = world.answer("L", prompt, 6)
    remote = world.prefill("P", prompt)
    kv = world.engines["P"].kv
    block = data.draw(st.sampled_from(remote.block_ids))
    content = bytearray(kv.read([block])[0])
    content[data.draw(st.integers(0, 31))] ^= data.draw(st.integers(1, 255))
    kv.write(block, bytes(content))
    assert world.answer("D", prompt, 6, remote=remote) != lone


def test_swapped_torn_and_stale_blocks_change_the_text() -> None:
    prompt = list(range(12))
    world = World.of("L", "P", "D1", "D2", "D3")
    lone = world.answer("L", prompt, 6)
    remote = world.prefill("P", prompt)
    kv = world.engines["P"].kv
    good = kv.read(list(remote.block_ids))
    swapped = remote._replace(block_ids=(remote.block_ids[1], remote.block_ids[0], remote.block_ids[2]))
    kv.write(remote.block_ids[2], good[2][:16] + good[1][16:])
    torn = world.answer("D2", prompt, 6, remote=remote)
    assert torn != lone
    remote = world.prefill("P", prompt)
    stale = world.answer("D3", prompt, 6, remote=swapped)  # the first handle was pulled: its blocks are others' by now
    assert stale not in (lone, torn)
    assert world.engines["P"].counters.num_stale_reads == 1
    assert world.answer("D1", prompt, 6, remote=remote) == lone


def test_a_second_pull_of_one_handle_reads_other_bytes_without_an_error() -> None:
    prompt = list(range(16))  # whole blocks only, which the prefix cache keeps
    world = World.of("L", "P", "D1", "D2")
    lone = world.answer("L", prompt, 6)
    remote = world.prefill("P", prompt)
    assert world.answer("D1", prompt, 6, remote=remote) == lone
    second = world.submit("D2", prompt, 6, remote=remote)
    world.run()
    assert second.finish_reason == "length"
    assert second.output != lone
    counters = world.engines["P"].counters
    assert (counters.num_reads, counters.num_stale_reads, counters.num_late_notifications) == (1, 1, 1)
    assert world.answer("P", prompt, 6) == lone, "the prefix cache still has the right bytes"
    assert world.engines["P"].counters.num_prefix_hits == 12


def test_namespaces_do_not_share_the_cache_and_answer_differently() -> None:
    world = World.of("L")
    plain = world.answer("L", list(range(9)), 6)
    sequence = world.submit("L", list(range(9)), 6, namespace="tenant")
    world.run()
    assert sequence.num_cached_tokens == 0
    assert sequence.output != plain


def test_choices_differ_and_share_the_prompt() -> None:
    world = World.of("L")
    answers = [world.submit("L", list(range(9)), 6, choice=choice) for choice in range(3)]
    world.run()
    assert len({tuple(sequence.output) for sequence in answers}) == 3
    assert [sequence.num_cached_tokens for sequence in answers] == [0, 8, 8]


def test_decoded_blocks_are_reused_by_the_next_turn() -> None:
    world = World.of("L")
    first = world.submit("L", list(range(6)), 7)
    world.run()
    following = [*range(6), *first.output, 5, 5]
    second = world.submit("L", following, 4)
    world.run()
    assert second.num_cached_tokens == 12
    assert second.output == World.of("L").answer("L", following, 4)


# ---- the hand-over ---------------------------------------------------------------------------------------------------


def test_blocks_stay_under_a_lease_until_they_were_pulled() -> None:
    world = World.of("P", "D", **LATENCY)
    prompt = list(range(10))
    remote = world.prefill("P", prompt)
    kv = world.engines["P"].kv
    assert kv.num_used == 3
    world.held_pulls = []
    world.submit("D", prompt, 1, remote=remote)
    world.run(world.now_ns + 1000 * MS)
    assert kv.num_used == 3
    world.carry_out(*world.held_pulls.pop())
    world.run()
    assert kv.num_used == 0
    assert not world.engines["P"].leases


def test_an_expired_lease_is_counted_and_its_blocks_are_overwritten() -> None:
    world = World.of("L", "P", "D", lease_s=2.0)
    prompt = list(range(10))
    lone = world.answer("L", prompt, 6)
    remote = world.prefill("P", prompt)
    before = world.engines["P"].kv.read(list(remote.block_ids))
    world.run(world.now_ns + 1999 * MS)
    assert world.engines["P"].kv.num_used == 3
    world.run(world.now_ns + 2 * MS)
    assert world.engines["P"].kv.num_used == 0
    assert world.engines["P"].counters.num_leases_expired == 1
    assert not set(before) & set(world.engines["P"].kv.read(list(remote.block_ids)))
    assert world.answer("D", prompt, 6, remote=remote) != lone
    assert world.engines["P"].counters.num_late_notifications == 1


def test_heartbeats_keep_a_lease_alive() -> None:
    world = World.of("P", lease_s=3.0)
    remote = world.prefill("P", [1, 2, 3])
    for _ in range(10):
        world.run(world.now_ns + 1500 * MS)
        world.engines["P"].extend_lease(remote.request_id, world.now_ns)
    assert world.engines["P"].leases
    world.run(world.now_ns + 2001 * MS)
    assert not world.engines["P"].leases
    world.engines["P"].extend_lease(remote.request_id, world.now_ns)
    assert not world.engines["P"].leases


def test_only_blocks_that_are_not_cached_are_pulled() -> None:
    world = World.of("P", "D")
    prompt = list(range(14))
    world.answer("D", prompt, 1)
    remote = world.prefill("P", prompt)
    world.held_pulls = []
    sequence = world.submit("D", prompt, 3, remote=remote)
    (_, pull) = world.held_pulls[0]
    assert sequence.num_cached_tokens == 12
    assert pull.block_ids == remote.block_ids[-1:]
    world.carry_out("D", pull)
    world.run()
    assert sequence.output == World.of("L").answer("L", prompt, 3)
    assert sequence.num_pulled_tokens == 2


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_dead_prefill_engine_fails_the_load_by_policy(policy: str) -> None:
    world = World.of("P", "D", load_failure=policy)
    prompt = list(range(10))
    remote = world.prefill("P", prompt)
    world.dead.add("P")
    sequence = world.submit("D", prompt, 4, remote=remote)
    world.run()
    counters = world.engines["D"].counters
    assert counters.num_failed_transfers == 1
    if policy == "fail":
        assert (sequence.finish_reason, sequence.output) == ("error", [])
        assert counters.finished["error"] == 1
    else:
        assert sequence.output == World.of("L").answer("L", prompt, 4)
    assert world.engines["D"].kv.num_used == 0
    world.validate()


def test_a_handle_with_fewer_blocks_than_the_prompt_needs_fails() -> None:
    world = World.of("P", "D")
    remote = world.prefill("P", list(range(4)))
    sequence = world.submit("D", list(range(10)), 4, remote=remote)
    assert sequence.finish_reason == "error"
    assert world.engines["D"].kv.num_used == 0


@pytest.mark.parametrize("stage", [Stage.WAITING, Stage.PREFILLING, Stage.DECODING])
def test_abort_frees_everything_at_every_local_stage(stage: Stage) -> None:
    world = World.of("L", **LATENCY)
    blocker = world.submit("L", list(range(50, 60)), 3)
    victim = world.submit("L", list(range(10)), 5)
    while victim.stage is not stage:
        world.run(world.now_ns + MS)
    world.abort("L", victim)
    world.validate()
    world.abort("L", victim)  # a second time does nothing
    world.run()
    assert victim.finish_reason == "abort"
    assert blocker.finish_reason == "length"
    assert world.engines["L"].kv.num_used == world.engines["L"].kv.num_reserved == 0
    assert world.engines["L"].counters.finished == {"stop": 0, "length": 1, "abort": 1, "error": 0}


def test_abort_of_a_running_prefill_lets_the_next_one_start_at_once() -> None:
    world = World.of("L", **LATENCY)
    victim = world.submit("L", list(range(1000, 1060)), 1)
    after = world.submit("L", list(range(10)), 1)
    world.run(world.now_ns + 20 * MS)
    world.abort("L", victim)
    world.run()
    assert finished_at(world, after) == 20 * MS + 12 * MS


def test_abort_before_the_pull_frees_the_prefill_engine_too() -> None:
    world = World.of("P", "D", max_num_seqs=1, **LATENCY)
    world.submit("D", list(range(60)), 1)
    victim = world.submit("D", [1, 2, 3], 4, remote=world.prefill("P", [1, 2, 3]))
    assert victim.stage is Stage.WAITING
    assert world.engines["P"].kv.num_used == 1
    world.abort("D", victim)
    assert world.engines["P"].kv.num_used == 0
    assert world.engines["P"].counters.num_late_notifications == 0


def test_abort_during_the_pull_frees_both_when_it_ends() -> None:
    world = World.of("P", "D", **LATENCY)
    remote = world.prefill("P", [1, 2, 3])
    world.held_pulls = []
    victim = world.submit("D", [1, 2, 3], 4, remote=remote)
    world.abort("D", victim)
    assert (world.engines["D"].kv.num_used, world.engines["P"].kv.num_used) == (1, 1)
    world.carry_out(*world.held_pulls.pop())
    world.run()
    assert (world.engines["D"].kv.num_used, world.engines["P"].kv.num_used) == (0, 0)
    assert (victim.finish_reason, victim.output) == ("abort", [])
    world.validate()


def test_abort_during_a_pull_that_fails_frees_the_blocks() -> None:
    world = World.of("P", "D", load_failure="recompute")
    remote = world.prefill("P", [1, 2, 3])
    world.held_pulls = []
    victim = world.submit("D", [1, 2, 3], 4, remote=remote)
    world.abort("D", victim)
    world.dead.add("P")
    world.carry_out(*world.held_pulls.pop())
    world.run()
    assert world.engines["D"].kv.num_used == 0
    assert victim.finish_reason == "abort"


def test_an_aborted_prefill_keeps_no_lease() -> None:
    world = World.of("P", **LATENCY)
    victim = world.submit("P", list(range(10)), 1, hands_over=True)
    world.run(world.now_ns + 5 * MS)
    world.abort("P", victim)
    assert not world.engines["P"].leases
    assert world.engines["P"].kv.num_used == 0


def test_waiting_pulls_are_those_whose_lease_must_live() -> None:
    world = World.of("P", "D", max_num_seqs=1, **LATENCY)
    world.held_pulls = []
    remotes = [world.prefill("P", [n, n, n]) for n in range(2)]
    sequences = [world.submit("D", [n, n, n], 1, remote=remotes[n]) for n in range(2)]
    assert {s.request_id for s in world.engines["D"].waiting_remotes()} == {s.request_id for s in sequences}
    assert (world.engines["D"].num_running, world.engines["D"].num_waiting) == (0, 2)


# ---- any sequence of events ------------------------------------------------------------------------------------------


class Events(RuleBasedStateMachine):
    """Free + used = total after any events, and no answer is wrong on an engine that read only under a lease."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World.of("P", "D", "late", kv_blocks=24, max_num_seqs=3, lease_s=0.2, **LATENCY)
        self.submitted: list[tuple[str, Sequence]] = []

    @rule(prompt=prompts, max_tokens=st.integers(1, 9), engine=st.sampled_from("PD"))
    def local(self, prompt: list[int], max_tokens: int, engine: str) -> None:
        self.submitted.append((engine, self.world.submit(engine, prompt, max_tokens)))

    @rule(prompt=prompts)
    def prefill(self, prompt: list[int]) -> None:
        self.submitted.append(("P", self.world.submit("P", prompt, 1, hands_over=True)))

    @rule(data=st.data(), max_tokens=st.integers(1, 9), again=st.booleans())
    def pull(self, data: st.DataObject, max_tokens: int, again: bool) -> None:
        leases = self.world.engines["P"].leases
        ready = [sequence for _, sequence in self.submitted if sequence.request_id in leases]
        if not ready:
            return
        chosen = data.draw(st.sampled_from(ready))
        remote = RemoteKv("P", chosen.request_id, "h", 1, tuple(chosen.block_ids))
        for engine in ("D", "late") if again else ("D",):
            self.submitted.append((engine, self.world.submit(engine, chosen.prompt, max_tokens, remote=remote)))

    @precondition(lambda self: bool(self.submitted))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(*data.draw(st.sampled_from(self.submitted)))

    @rule(step_ms=st.integers(1, 90))
    def time_passes(self, step_ms: int) -> None:
        self.world.run(self.world.now_ns + step_ms * MS)

    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        for request_id in list(self.world.engines["P"].leases):
            if data.draw(st.booleans()):
                self.world.engines["P"].extend_lease(request_id, self.world.now_ns)

    @invariant()
    def adds_up(self) -> None:
        self.world.validate()
        for engine in self.world.engines.values():
            assert engine.kv.num_free + engine.kv.num_used == 24

    def teardown(self) -> None:
        self.world.run()
        self.world.run(self.world.now_ns + 1000 * MS)
        self.world.validate()
        for name, sequence in self.submitted:
            assert sequence.stage is Stage.FINISHED, name
            if sequence.finish_reason == "length" and name not in self.world.tainted:
                assert sequence.output == World.of("L").answer("L", sequence.prompt, sequence.max_tokens)
        for engine in self.world.engines.values():
            assert engine.kv.num_used == engine.kv.num_reserved == 0
            assert engine.counters.num_requests == sum(engine.counters.finished.values())
            assert not engine.leases


TestEvents = Events.TestCase
TestEvents.settings = settings(max_examples=60, stateful_step_count=30)
