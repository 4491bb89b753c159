"""Bugs to plant in ``routing`` for the length of a test: each replaces one decision by a wrong one, where it is made.

``validate`` is off while they are tried, so that what catches them is a command, an answer, or what is left at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from antiphon.routing import decoding, machine, pickers, prefilling
from antiphon.routing.budget import RetryBudget
from antiphon.routing.commands import CancelUpstream, RespondError
from antiphon.routing.endpoint import TIER_DOWN, Endpoint, Verdict
from antiphon.routing.events import ClientLeft, Deadline, Event, StreamEnded, UpstreamLost
from antiphon.routing.fleet import Fleet
from antiphon.routing.life import Life
from antiphon.routing.pool import Pool
from antiphon.routing.states import EndpointState, Stage

Plant = Callable[[pytest.MonkeyPatch], None]


def no_validation(patch: pytest.MonkeyPatch) -> None:
    for kind in (Fleet, Life):
        patch.setattr(kind, "validate", lambda self: None)


def handler(patch: pytest.MonkeyPatch, stage: Stage, kind: type[Any], function: Callable[[Life, Any], None]) -> None:
    patch.setitem(machine.TABLE[stage], kind, function)


# ---- the ten of the plan ---------------------------------------------------------------------------------------------


def second_decode_engine_gets_a_pulled_handle(patch: pytest.MonkeyPatch) -> None:
    """Whatever went wrong, the same handle goes to another engine."""
    start_over = Life.start_over

    def keeping(self: Life, failure: RespondError, *, is_lost: bool = False) -> None:
        handle = self.handle
        if handle is not None and not self.is_closing:
            handle.is_spent = False
        if handle is not None and not self.is_closing and self.is_handle_good:
            self.connect_decode()
        else:
            start_over(self, failure, is_lost=is_lost)

    patch.setattr(Life, "start_over", keeping)


def counter_leaks_on_abort(patch: pytest.MonkeyPatch) -> None:
    leave = Life.leave

    def leaking(self: Life, verdict: Verdict | None) -> Endpoint:
        if self.client_left and self.stage is Stage.PREFILLING:
            assert self.endpoint is not None
            endpoint, self.endpoint = self.endpoint, None
            return endpoint
        return leave(self, verdict)

    patch.setattr(Life, "leave", leaking)


def ejected_pool_is_empty(patch: pytest.MonkeyPatch) -> None:
    pick = Pool._pick_carefully

    def giving_up(self: Pool, *args: Any) -> Endpoint | None:
        picked = pick(self, *args)
        return None if picked is None or picked.tier == TIER_DOWN else picked

    patch.setattr(Pool, "_pick_carefully", giving_up)


def written_bytes_are_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """So that a lost request is taken for one that never left."""
    patch.setattr(decoding, "bytes_written", lambda life, event: None)
    for stage in (Stage.AWAITING, Stage.COMPLETING):
        for kind, function in machine.TABLE[stage].items():
            if function.__name__ == "bytes_written":
                handler(patch, stage, kind, lambda life, event: None)


def failure_is_told_after_an_answer(patch: pytest.MonkeyPatch) -> None:
    """The client that has its answer is taken for one that waits."""
    patch.setattr(Life, "is_closing", property(lambda self: self.client_left))


def client_gets_two_ends(patch: pytest.MonkeyPatch) -> None:
    """A hand-over that cannot be completed is told to the client that has its answer."""
    fail = Life.fail

    def telling(self: Life, failure: RespondError) -> None:
        if self.outcome_due is not None:
            self.out.append(failure)
        fail(self, failure)

    patch.setattr(Life, "fail", telling)


def breaker_never_closes(patch: pytest.MonkeyPatch) -> None:
    close = Pool._close

    def stuck(self: Pool, endpoint: Endpoint) -> None:
        if endpoint.state is EndpointState.UNKNOWN:
            close(self, endpoint)

    patch.setattr(Pool, "_close", stuck)


def draining_endpoint_gets_requests(patch: pytest.MonkeyPatch) -> None:
    enter = Pool._enter

    def in_place(self: Pool, endpoint: Endpoint, state: EndpointState) -> None:
        if state is EndpointState.DRAINING:
            endpoint.state = state
        else:
            enter(self, endpoint, state)

    patch.setattr(Pool, "_enter", in_place)


def handle_of_an_old_life_is_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pool, "_restarted", lambda self, endpoint: None)


def retry_budget_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RetryBudget, "allow", lambda self, now_s: True)


def hash_pins_one_engine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pickers, "load_bound", lambda total, num, load_factor: inf)


# ---- more ------------------------------------------------------------------------------------------------------------


def suspect_gets_all_requests(patch: pytest.MonkeyPatch) -> None:
    begin = Pool.begin

    def without_trial(self: Pool, endpoint: Endpoint, num_tokens: int = 0) -> int:
        trial = begin(self, endpoint, num_tokens)
        if trial:
            endpoint.trial = 0
        return trial

    patch.setattr(Pool, "begin", without_trial)


def trial_is_never_over(patch: pytest.MonkeyPatch) -> None:
    end = Pool.end

    def without_trial(self: Pool, endpoint: Endpoint, trial: int, num_tokens: int = 0) -> None:
        end(self, endpoint, 0, num_tokens)

    patch.setattr(Pool, "end", without_trial)


def tokens_leak_where_a_prefill_fails(patch: pytest.MonkeyPatch) -> None:
    """The request is given back, and the tokens that it was to compute are not."""
    leave = Life.leave

    def leaking(self: Life, verdict: Verdict | None) -> Endpoint:
        if verdict is not None and verdict is not Verdict.SUCCEEDED:
            self.num_tokens = 0
        return leave(self, verdict)

    patch.setattr(Life, "leave", leaking)


def tokens_leak_on_abort(patch: pytest.MonkeyPatch) -> None:
    leave = Life.leave

    def leaking(self: Life, verdict: Verdict | None) -> Endpoint:
        if self.client_left:
            self.num_tokens = 0
        return leave(self, verdict)

    patch.setattr(Life, "leave", leaking)


def late_events_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "ENGINE_EVENTS", frozenset())


def handover_is_not_completed(patch: pytest.MonkeyPatch) -> None:
    def cancel(life: Life, event: Event) -> None:
        life.client_left = True
        life.out.append(CancelUpstream(life.attempt))
        life.leave(None)
        life.finish(Stage.CANCELLED)

    handler(patch, Stage.CONNECTING_DECODE, ClientLeft, cancel)


def decode_is_cancelled_before_it_is_admitted(patch: pytest.MonkeyPatch) -> None:
    handler(patch, Stage.AWAITING, ClientLeft, decoding.leaving_stream)


def expired_handle_is_sent(patch: pytest.MonkeyPatch) -> None:
    def good(self: Life) -> bool:
        return self.handle is not None and self.handle.life == self.handle.prefill.life

    patch.setattr(Life, "is_handle_good", property(good))
    connect_decode = Life.connect_decode

    def patient(self: Life) -> None:
        connect_decode(self)
        if self.stage is Stage.CONNECTING_DECODE:
            self.deadline_s = self.now_s + 3 * self.options.connect_s

    patch.setattr(Life, "connect_decode", patient)


def lost_stream_ends_in_silence(patch: pytest.MonkeyPatch) -> None:
    def silent(life: Life, event: Event) -> None:
        life.leave(Verdict.LOST)
        life.finish(Stage.FAILED)

    handler(patch, Stage.STREAMING, UpstreamLost, silent)
    patch.setattr(decoding, "stream_lost", silent)


def truncated_stream_is_complete(patch: pytest.MonkeyPatch) -> None:
    def believing(life: Life, event: StreamEnded) -> None:
        life.leave(None)
        life.finish(Stage.COMPLETED)

    handler(patch, Stage.STREAMING, StreamEnded, believing)


def silent_stream_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    def waiting(life: Life, event: Event) -> None:
        life.deadline_s = life.now_s + life.options.idle_s

    handler(patch, Stage.STREAMING, Deadline, waiting)


def retry_has_the_same_request_id(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Life, "engine_request_id", lambda self, num_tries: self.request_id)


def prefill_is_spent_without_a_decode_engine(patch: pytest.MonkeyPatch) -> None:
    can_answer = Pool.can_answer
    assert isinstance(can_answer, property)
    patch.setattr(Pool, "can_answer", property(lambda self: True))


def refused_prefill_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """No other engine is tried."""

    def giving_up(life: Life, event: Event) -> None:
        life.leave(Verdict.REFUSED)
        life.give_up_prefill()

    handler(patch, Stage.CONNECTING_PREFILL, prefilling.ConnectRefused, giving_up)


BUGS: tuple[Plant, ...] = (
    second_decode_engine_gets_a_pulled_handle,
    counter_leaks_on_abort,
    ejected_pool_is_empty,
    written_bytes_are_not_noticed,
    failure_is_told_after_an_answer,
    client_gets_two_ends,
    breaker_never_closes,
    draining_endpoint_gets_requests,
    handle_of_an_old_life_is_sent,
    retry_budget_is_ignored,
    hash_pins_one_engine,
    suspect_gets_all_requests,
    trial_is_never_over,
    tokens_leak_where_a_prefill_fails,
    tokens_leak_on_abort,
    late_events_count,
    expired_handle_is_sent,
    lost_stream_ends_in_silence,
    truncated_stream_is_complete,
    silent_stream_is_waited_for,
    retry_has_the_same_request_id,
    prefill_is_spent_without_a_decode_engine,
    refused_prefill_is_forgotten,
)

CALM_BUGS: tuple[Plant, ...] = (
    handover_is_not_completed,
    decode_is_cancelled_before_it_is_admitted,
    counter_leaks_on_abort,
    tokens_leak_on_abort,
)
"""Caught where nothing goes wrong but that clients leave."""
