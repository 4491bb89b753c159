"""The order of one engine's events, against a plain engine and a wire that loses, repeats and reorders."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.routing.kv_stream import NO_REPLAY, Advice, KvStream, StreamOptions
from tests.routing.kv_world import PROMPTS, Follower, Message, PlainEngine

REPLAYING = StreamOptions()
DEAF = StreamOptions(has_replay=False)
OPERATIONS = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("remove"), st.integers(0, 2), st.integers(0, 3), st.just(0)),
    st.tuples(st.sampled_from(["clear", "restart", "tick", "late"]), st.just(0), st.just(0), st.just(0)),
)
FATES = st.sampled_from(["heard", "heard", "heard", "lost", "twice", "late"])
REPLAYS = st.sampled_from(["whole", "whole", "cut", "none"])


def do(engine: PlainEngine, operation: tuple[str, int, int, int], now_s: float) -> Message | None:
    kind, prompt, first, last = operation
    if kind == "store":
        return engine.store(prompt, first, max(first, last), now_s)
    if kind == "remove":
        return engine.remove(prompt, first, now_s)
    return engine.clear(now_s) if kind == "clear" else None


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(OPERATIONS, FATES, REPLAYS), max_size=40),
    st.booleans(),
    st.sampled_from([1, 3, 100]),
)
def test_whatever_is_lost_the_next_event_makes_it_right(
    script: list[tuple[tuple[str, int, int, int], str, str]], has_replay: bool, held_max: int
) -> None:
    engine = PlainEngine()
    follower = Follower(StreamOptions(has_replay=has_replay, held_max=held_max))
    late: list[Message] = []
    now_s = 100.0
    for operation, fate, replay in script:
        now_s += 0.01
        message = do(engine, operation, now_s)
        if operation[0] == "restart":
            engine.restart()
            now_s += 3.0  # no engine starts faster
            if not has_replay:  # the router sees that it went away, when the last byte of it has come
                late.clear()
                follower.obey(follower.stream.restart(now_s))
        elif operation[0] == "tick":
            now_s += 0.2
            follower.tick(now_s)
        elif operation[0] == "late":
            for one in reversed(late):
                follower.hear(one, now_s)
            late.clear()
        if message is not None and fate != "lost":
            if fate == "late":
                late.append(message)
            else:
                follower.hear(message, now_s)
                if fate == "twice":
                    follower.hear(message, now_s)
        if replay != "none":
            follower.replay(engine, is_whole=replay == "whole")
    now_s += 0.01
    follower.hear(engine.store(0, 0, 0, now_s), now_s)
    follower.replay(engine)
    follower.tick(now_s + 0.6)
    for prompt, claimed in enumerate(follower.claims()):
        assert claimed <= engine.num_held(prompt), f"claims {claimed} of {engine.num_held(prompt)} tokens"


@settings(max_examples=100, deadline=None)
@given(st.lists(OPERATIONS, max_size=60), st.data())
def test_with_a_replay_nothing_is_forgotten_for_what_was_lost_or_reordered(
    script: list[tuple[str, int, int, int]], data: st.DataObject
) -> None:
    engine = PlainEngine()
    follower = Follower(REPLAYING)
    now_s = 100.0
    for operation in script:
        now_s += 0.01
        message = do(engine, operation, now_s)
        if message is not None and data.draw(st.booleans()):
            follower.hear(message, now_s)
            follower.replay(engine)
    follower.hear(engine.store(0, 0, 0, now_s + 0.01), now_s)
    follower.replay(engine)
    assert follower.claims() == [engine.num_held(prompt) for prompt in range(len(PROMPTS))]


def advice_of(advice: Advice) -> tuple[bool, list[object], int]:
    return advice.is_forget, advice.batches, advice.replay_from


def begun(options: StreamOptions) -> KvStream:
    stream = KvStream(options)
    assert advice_of(stream.take(0, 1.0, "a", 0.0)) == (False, ["a"], NO_REPLAY)
    assert advice_of(stream.take(1, 1.1, "b", 0.0)) == (False, ["b"], NO_REPLAY)
    return stream


def test_a_gap_is_filled_by_a_replay_that_begins_with_the_last_one_taken() -> None:
    stream = begun(REPLAYING)
    assert advice_of(stream.take(3, 1.3, "d", 0.0)) == (False, [], 1)
    assert advice_of(stream.take_replayed(1, 1.1, "b")) == (False, [], NO_REPLAY)
    stream.take_replayed(2, 1.2, "c")
    stream.take_replayed(3, 1.3, "d")
    assert advice_of(stream.end_replay(is_whole=True)) == (False, ["c", "d"], NO_REPLAY)
    assert stream.num_gaps == 1
    assert stream.num_forgotten == 0


def test_a_gap_without_a_replay_forgets_at_once() -> None:
    stream = begun(DEAF)
    assert advice_of(stream.take(3, 1.3, "d", 0.0)) == (True, ["d"], NO_REPLAY)


def test_a_replay_that_does_not_come_is_waited_for_until_doubt_ends() -> None:
    stream = begun(REPLAYING)
    stream.take(3, 1.3, "d", 0.0)
    assert advice_of(stream.tick(0.49)) == (False, [], NO_REPLAY)
    assert advice_of(stream.tick(0.5)) == (True, ["d"], NO_REPLAY)


def test_a_late_one_fills_the_gap_before_the_replay_does() -> None:
    stream = begun(REPLAYING)
    stream.take(3, 1.3, "d", 0.0)
    assert advice_of(stream.take(2, 1.2, "c", 0.0)) == (False, ["c", "d"], NO_REPLAY)
    assert advice_of(stream.end_replay(is_whole=True)) == (False, [], NO_REPLAY)


def test_a_restart_is_seen_by_its_number() -> None:
    stream = begun(REPLAYING)
    assert advice_of(stream.take(0, 9.0, "A", 0.0)) == (True, ["A"], NO_REPLAY)
    assert stream.num_restarts == 1


def test_a_restart_whose_first_batches_were_lost_is_seen_though_the_number_is_the_expected_one() -> None:
    stream = begun(REPLAYING)
    assert advice_of(stream.take(2, 9.2, "C", 0.0)) == (False, [], 1)
    for number, stamp_s, batch in ((1, 9.1, "B"), (2, 9.2, "C")):
        stream.take_replayed(number, stamp_s, batch)
    assert advice_of(stream.end_replay(is_whole=True)) == (True, ["B", "C"], NO_REPLAY)


def test_a_batch_after_a_pause_is_taken_when_the_last_one_comes_again() -> None:
    stream = begun(REPLAYING)
    assert advice_of(stream.take(2, 9.2, "c", 0.0)) == (False, [], 1)
    stream.take_replayed(1, 1.1, "b")
    stream.take_replayed(2, 9.2, "c")
    assert advice_of(stream.end_replay(is_whole=True)) == (False, ["c"], NO_REPLAY)
    assert (stream.num_gaps, stream.num_forgotten) == (0, 0)


def test_a_clock_that_was_set_back_costs_what_is_claimed_and_no_more_than_half_a_second() -> None:
    stream = begun(DEAF)
    assert advice_of(stream.take(1, 0.5, "x", 0.0)) == (False, [], NO_REPLAY)
    assert advice_of(stream.tick(0.5)) == (True, [], NO_REPLAY)
    assert advice_of(stream.take(2, 0.6, "y", 0.5)) == (False, ["y"], NO_REPLAY)


def test_a_repeat_of_the_newest_is_dropped_and_means_nothing() -> None:
    stream = begun(REPLAYING)
    assert advice_of(stream.take(1, 1.1, "b", 0.0)) == (False, [], NO_REPLAY)
    assert advice_of(stream.tick(1.0)) == (False, [], NO_REPLAY)
    assert stream.num_dropped == 1


def test_a_quiet_engine_is_asked_whether_it_still_lives_and_forgotten_if_it_is_another() -> None:
    stream = begun(REPLAYING)
    assert advice_of(stream.tick(10.0)) == (False, [], 1)
    stream.take_replayed(1, 1.1, "b")
    assert advice_of(stream.end_replay(is_whole=True)) == (False, [], NO_REPLAY)
    assert advice_of(stream.tick(20.0)) == (False, [], 1)
    assert advice_of(stream.end_replay(is_whole=True)) == (True, [], NO_REPLAY)


def test_a_quiet_engine_that_cannot_be_asked_keeps_its_claims() -> None:
    stream = begun(REPLAYING)
    assert stream.tick(10.0).replay_from == 1
    assert advice_of(stream.end_replay(is_whole=False)) == (False, [], NO_REPLAY)


def test_a_router_that_comes_late_asks_for_everything() -> None:
    stream = KvStream(REPLAYING)
    assert advice_of(stream.take(7, 1.7, "h", 0.0)) == (False, [], 0)
    stream.take_replayed(6, 1.6, "g")
    stream.take_replayed(7, 1.7, "h")
    forget, batches, _ = advice_of(stream.end_replay(is_whole=True))
    assert (forget, batches) == (True, ["g", "h"])


def test_what_is_held_is_bounded() -> None:
    stream = begun(StreamOptions(held_max=2))
    stream.take(5, 1.5, "f", 0.0)
    assert advice_of(stream.take(6, 1.6, "g", 0.0)) == (True, ["f", "g"], NO_REPLAY)
    stream.validate()
