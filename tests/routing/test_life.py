"""The life of a request, event by event: what is commanded, what the client is told, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from antiphon.routing.commands import (
    CancelUpstream,
    Command,
    CompleteHandover,
    ConnectDecode,
    ConnectPrefill,
    EndStreamWithError,
    Finish,
    PassOn,
    ProbeDecode,
    RespondError,
    SendDecode,
)
from antiphon.routing.endpoint import Endpoint, Verdict
from antiphon.routing.events import (
    BytesWritten,
    ClientLeft,
    Connected,
    ConnectRefused,
    Deadline,
    DecodeRefused,
    Event,
    FirstByte,
    PrefillAnswered,
    PrefillHead,
    Received,
    StreamEnded,
    UpstreamLost,
)
from antiphon.routing.fleet import Fleet
from antiphon.routing.life import Life
from antiphon.routing.machine import step
from antiphon.routing.options import FleetOptions, LifeOptions
from antiphon.routing.path import Path
from antiphon.routing.states import OUTCOMES, EndpointState, Stage

OPTIONS = LifeOptions(connect_s=1, prefill_s=30, handover_s=20, first_token_s=30, idle_s=10, abort_grace_s=1)
LOCAL = LifeOptions(prefill_fallback="local")


class Story:
    """One request, told event by event; the engine events are of the latest attempt."""

    def __init__(
        self,
        num_prefill: int = 2,
        num_decode: int = 2,
        *,
        path: Path = "pd",
        options: LifeOptions = OPTIONS,
        fleet_options: FleetOptions | None = None,
    ) -> None:
        self.fleet = Fleet(
            [f"http://p{index}:1" for index in range(num_prefill)],
            [f"http://d{index}:1" for index in range(num_decode)],
            fleet_options or FleetOptions(),
        )
        self.now_s = 100.0
        for endpoint in self.fleet.all():
            self.fleet.pool(endpoint.role).health_succeeded(endpoint, self.now_s)
        self.life = Life("r", self.fleet, options, path=path)
        self.told: list[RespondError | EndStreamWithError | PassOn] = []
        self.outcomes: list[Stage] = []

    def tell(self, event: Event) -> list[Command]:
        commands = step(self.life, event, self.now_s, 0.5)
        for command in commands:
            assert not self.outcomes, f"{command} after the end"
            if isinstance(command, RespondError | EndStreamWithError | PassOn):
                self.told.append(command)
            elif isinstance(command, Finish):
                self.outcomes.append(command.outcome)
        self.life.validate()
        self.fleet.validate()
        if self.life.is_over:
            assert len(self.outcomes) == 1
            assert all(endpoint.num_active == 0 for endpoint in self.fleet.all()), "a counter leaks"
        return [command for command in commands if not isinstance(command, Finish | RespondError)]

    def on(self, kind: Callable[..., Event], *args: object, **named: object) -> list[Command]:
        return self.tell(kind(self.life.attempt, *args, **named))

    def late(self) -> list[Command]:
        self.now_s = self.life.deadline_s
        return self.tell(Deadline())

    def prefilled(self, engine_id: str = "") -> list[Command]:
        """From the start to a prefill's answer, and the connection to a decode engine that follows."""
        self.tell(Received())
        self.on(Connected)
        self.on(BytesWritten)
        return self.answered(engine_id)

    def answered(self, engine_id: str = "") -> list[Command]:
        return self.on(PrefillAnswered, 200, b"{}", engine_id)

    def sent(self) -> SendDecode:
        """A decode request is sent, and a byte of it written."""
        (command,) = self.on(Connected)
        assert isinstance(command, SendDecode)
        self.on(BytesWritten)
        return command

    def error(self) -> tuple[int, str]:
        (told,) = self.told
        assert isinstance(told, RespondError)
        assert self.outcomes == [Stage.FAILED]
        return told.status, told.code

    def down(self, *endpoints: Endpoint) -> None:
        for endpoint in endpoints:
            self.fleet.pool(endpoint.role).judge(endpoint, Verdict.REFUSED, self.now_s, 0.5)


def endpoint_of(commands: list[Command]) -> Endpoint:
    (command,) = [one for one in commands if isinstance(one, ConnectPrefill | ConnectDecode | ProbeDecode)]
    return command.endpoint


# ---- all is well -----------------------------------------------------------------------------------------------------


def test_prefill_hand_over_stream() -> None:
    story = Story()
    (connect,) = story.tell(Received())
    assert isinstance(connect, ConnectPrefill)
    assert connect.request_id == "r"
    assert story.on(Connected) == story.on(BytesWritten) == story.on(PrefillHead) == []
    (to_decode,) = story.answered("p#1")
    assert isinstance(to_decode, ConnectDecode)
    send = story.sent()
    assert send.handle is not None
    assert send.handle.value == b"{}"
    assert story.on(FirstByte) == []
    story.on(StreamEnded)
    assert story.outcomes == [Stage.COMPLETED]
    assert story.told == []
    assert story.fleet.pairs.is_warm(connect.endpoint, to_decode.endpoint)
    assert story.fleet.counts == {}


def test_local_goes_to_a_decode_engine_alone() -> None:
    story = Story(path="local")
    assert endpoint_of(story.tell(Received())).role == "decode"
    assert story.sent().handle is None
    story.on(StreamEnded)
    assert story.outcomes == [Stage.COMPLETED]


def test_an_answer_without_a_handle_is_decoded_without() -> None:
    story = Story()
    story.tell(Received())
    story.on(Connected)
    story.on(PrefillAnswered, 200, None)
    assert story.sent().handle is None
    assert story.fleet.counts["no_handle"] == 1


def test_late_and_double_events_change_nothing() -> None:
    story = Story()
    story.prefilled()
    stage = story.life.stage
    assert story.tell(PrefillAnswered(1, 200, b"other")) == []
    assert story.tell(ConnectRefused(1)) == story.tell(UpstreamLost(1)) == story.tell(Received()) == []
    assert story.life.stage is stage
    assert story.fleet.counts == {"late_handle": 1, "late_event": 3}
    story.sent()
    story.on(StreamEnded)
    assert story.on(StreamEnded) == story.tell(ClientLeft()) == story.tell(Deadline()) == []


def test_a_deadline_that_has_moved_is_no_deadline() -> None:
    story = Story()
    story.tell(Received())
    assert story.tell(Deadline()) == []
    assert story.life.stage is Stage.CONNECTING_PREFILL


# ---- prefill fails ---------------------------------------------------------------------------------------------------


def test_a_refused_prefill_goes_to_another_engine_and_costs_no_retry() -> None:
    story = Story()
    first = endpoint_of(story.tell(Received()))
    (again,) = story.on(ConnectRefused)
    assert isinstance(again, ConnectPrefill)
    assert again.endpoint is not first
    assert again.request_id == "r-2"
    assert first.state is EndpointState.DOWN
    assert story.fleet.budget.num_retries == 0
    story.on(ConnectRefused)
    assert story.error() == (503, "no_prefill_engine")
    assert story.told[0].retry_after_s == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ((UpstreamLost,), (502, "prefill_lost")),
        ((UpstreamLost, True), (502, "prefill_bad_answer")),
        ((PrefillAnswered, 500), (502, "prefill_error")),
        ((PrefillAnswered, 302), (502, "prefill_bad_answer")),
        ((PrefillAnswered, 503, None, "", 7), (503, "prefill_overloaded")),
        ((PrefillAnswered, 429, None, "", 7), (429, "prefill_overloaded")),
        (None, (504, "prefill_timeout")),
    ],
)
def test_a_failed_prefill_goes_to_another_engine_under_a_fresh_id(
    event: tuple[Callable[..., Event], ...] | None, error: tuple[int, str]
) -> None:
    story = Story()
    first = endpoint_of(story.tell(Received()))
    story.on(Connected)
    story.on(BytesWritten)
    commands = story.late() if event is None else story.on(*event)
    again = commands[-1]
    assert isinstance(again, ConnectPrefill)
    assert again.endpoint is not first
    assert again.request_id == "r-2"
    assert (commands[0] == CancelUpstream(1)) == (event is None)
    assert story.fleet.budget.num_retries == 1
    story.on(Connected)
    story.on(BytesWritten)
    if event is None:
        story.late()
    else:
        commands = story.on(*event)
        if story.life.stage is Stage.BACKING_OFF:
            (again,) = story.late()
            assert isinstance(again, ConnectPrefill)
            story.on(Connected)
            story.on(BytesWritten)
            story.on(*event)
    assert story.error() == error
    if error[1] == "prefill_overloaded":
        assert story.told[0].retry_after_s == 7  # type: ignore[union-attr]


def test_a_refusal_as_invalid_is_the_clients_answer() -> None:
    story = Story()
    story.tell(Received())
    story.on(Connected)
    story.on(PrefillAnswered, 404)
    assert story.told == [PassOn(1)]
    assert story.outcomes == [Stage.COMPLETED]


def test_no_retry_beyond_the_budget() -> None:
    story = Story(fleet_options=FleetOptions(retry_floor=0.5, retry_share=0.2))
    story.tell(Received())
    story.on(Connected)
    story.on(BytesWritten)
    story.on(UpstreamLost)
    assert story.error() == (502, "prefill_lost")
    assert story.fleet.counts["retry_denied"] == 1


def test_an_old_connection_is_no_failure_of_the_engine() -> None:
    story = Story(1, 1)
    endpoint = endpoint_of(story.tell(Received()))
    story.on(Connected)
    (again,) = story.on(UpstreamLost)
    assert isinstance(again, ConnectPrefill)
    assert again.endpoint is endpoint
    assert endpoint.num_failures == 0
    assert story.fleet.budget.num_retries == 0


def test_two_engines_that_fail_at_a_request_are_not_to_blame() -> None:
    story = Story(fleet_options=FleetOptions(failures_max=1))
    first = endpoint_of(story.tell(Received()))
    story.on(Connected)
    second = endpoint_of(story.on(PrefillAnswered, 500))
    story.on(Connected)
    story.on(PrefillAnswered, 500)
    assert story.error() == (502, "prefill_error")
    assert first.num_failures == second.num_failures == 0
    assert second.state is EndpointState.READY


def test_local_prefill_only_where_it_is_allowed() -> None:
    story = Story(1, 1, options=LOCAL)
    story.tell(Received())
    assert endpoint_of(story.on(ConnectRefused)).role == "decode"
    assert story.sent().handle is None
    assert story.fleet.counts["prefill_fallback"] == 1


def test_local_prefill_after_a_wait_in_which_the_engine_was_drained() -> None:
    story = Story(1, 1, options=LOCAL)
    endpoint = endpoint_of(story.tell(Received()))
    story.on(Connected)
    story.on(BytesWritten)
    story.on(UpstreamLost)
    assert story.life.stage is Stage.BACKING_OFF
    story.fleet.prefill.drain(endpoint)
    assert endpoint_of(story.late()).role == "decode"


# ---- no decode engine ------------------------------------------------------------------------------------------------


def test_nothing_is_prefilled_while_every_decode_engine_refuses() -> None:
    story = Story()
    story.down(*story.fleet.decode.endpoints)
    probes = [story.tell(Received()), story.on(ConnectRefused)]
    assert [type(command) for (command,) in probes] == [ProbeDecode, ProbeDecode]
    assert endpoint_of(probes[0]) is not endpoint_of(probes[1])
    story.on(ConnectRefused)
    assert story.error() == (503, "no_decode_engine")


def test_the_probed_decode_engine_is_kept_for_the_request() -> None:
    story = Story(1, 1)
    (decode,) = story.fleet.decode.endpoints
    for verdict in (Verdict.TIMED_OUT, Verdict.TIMED_OUT):
        story.fleet.decode.judge(decode, verdict, story.now_s, 0.5)
    assert decode.state is EndpointState.DOWN
    story.tell(Received())
    (prefill,) = story.on(Connected)
    assert isinstance(prefill, ConnectPrefill)
    assert story.fleet.decode.pick(story.now_s, 0.0) is None, "nobody else tries it meanwhile"
    story.on(Connected)
    assert endpoint_of(story.answered()) is decode
    story.sent()
    story.on(FirstByte)
    assert decode.state is EndpointState.READY
    story.on(StreamEnded)


def test_a_probed_decode_engine_is_let_go_when_the_client_leaves() -> None:
    story = Story(1, 1)
    story.down(*story.fleet.decode.endpoints)
    story.tell(Received())
    story.on(Connected)
    assert story.tell(ClientLeft()) == [CancelUpstream(2)]
    assert story.outcomes == [Stage.CANCELLED]


def test_probed_and_then_no_prefill_engine_is_left() -> None:
    story = Story(1, 1, options=LOCAL)
    story.down(*story.fleet.decode.endpoints)
    story.tell(Received())
    story.fleet.prefill.drain(story.fleet.prefill.endpoints[0])
    assert endpoint_of(story.on(Connected)).role == "decode"
    assert story.life.stage is Stage.CONNECTING_DECODE


def test_both_pools_empty() -> None:
    story = Story(0, 0)
    story.tell(Received())
    assert story.error() == (503, "no_prefill_engine")


# ---- the hand-over ---------------------------------------------------------------------------------------------------


def test_a_refused_decode_engine_is_passed_over_with_the_same_handle() -> None:
    story = Story()
    first = endpoint_of(story.prefilled())
    second = endpoint_of(story.on(ConnectRefused))
    assert second is not first
    send = story.sent()
    assert send.handle is not None
    assert send.request_id == "r-2"
    assert story.fleet.budget.num_retries == 0


def test_a_request_of_which_no_byte_was_written_keeps_its_handle() -> None:
    story = Story(1, 2)
    first = endpoint_of(story.prefilled())
    story.on(Connected)
    assert endpoint_of(story.on(UpstreamLost)).role == "decode"
    story.on(Connected)
    assert endpoint_of(story.on(UpstreamLost)).role == "decode"
    send = story.sent()
    assert send.handle is not None
    assert first.num_failures <= 1


FAILURES_AFTER_WRITING = [
    ((UpstreamLost,), (502, "decode_lost")),
    ((UpstreamLost, True), (502, "decode_bad_answer")),
    ((StreamEnded, False), (502, "decode_lost")),
    ((DecodeRefused, 500), (502, "decode_error")),
    ((DecodeRefused, 503, 4), (503, "decode_overloaded")),
    ((DecodeRefused, 429, 4), (429, "decode_overloaded")),
]


@pytest.mark.parametrize(("event", "error"), FAILURES_AFTER_WRITING)
def test_after_a_byte_was_written_a_fresh_prefill_once(
    event: tuple[Callable[..., Event], ...], error: tuple[int, str]
) -> None:
    story = Story(2, 3)
    first = endpoint_of(story.prefilled())
    old = story.sent().handle
    (again,) = story.on(*event)
    assert isinstance(again, ConnectPrefill)
    assert again.request_id == "r-2"
    story.on(Connected)
    second = endpoint_of(story.answered())
    assert second is not first
    assert story.sent().handle is not old
    story.on(*event)
    assert story.error() == error
    assert story.fleet.counts["retry_handover"] == 1


@pytest.mark.parametrize(("event", "error"), FAILURES_AFTER_WRITING)
def test_a_local_request_is_sent_again_once(event: tuple[Callable[..., Event], ...], error: tuple[int, str]) -> None:
    story = Story(0, 3, path="local")
    story.tell(Received())
    story.sent()
    (again,) = story.on(*event)
    assert isinstance(again, ConnectDecode)
    assert story.sent().request_id == "r-2"
    story.on(*event)
    assert story.error() == error


def test_the_only_decode_engine_gets_the_fresh_prefill_if_it_was_lost() -> None:
    story = Story(1, 1)
    story.prefilled()
    story.sent()
    assert endpoint_of(story.on(UpstreamLost)).role == "prefill"
    overloaded = Story(1, 1)
    overloaded.prefilled()
    overloaded.sent()
    overloaded.on(DecodeRefused, 503, 9)
    assert overloaded.error() == (503, "decode_overloaded")


def test_a_load_that_failed_gets_a_fresh_prefill_even_if_there_is_one_decode_engine() -> None:
    """The prefill engine died before the KV was pulled: the decode engine answers 500, and is not to blame."""
    story = Story(2, 1)
    decode = endpoint_of(story.prefilled())
    send = story.sent()
    assert send.handle is not None
    story.down(send.handle.prefill)
    again = endpoint_of(story.on(DecodeRefused, 500))
    assert again is not send.handle.prefill
    assert decode.num_failures == 0
    story.on(Connected)
    assert endpoint_of(story.answered()) is decode
    story.sent()
    story.on(StreamEnded)
    assert story.outcomes == [Stage.COMPLETED]


def test_when_the_lease_is_over_a_fresh_prefill_once() -> None:
    story = Story(1, 1)
    story.prefilled()
    story.now_s += OPTIONS.handover_s
    commands = story.on(Connected)
    assert commands[0] == CancelUpstream(2)
    assert endpoint_of(commands).role == "prefill"
    story.on(Connected)
    story.answered()
    story.now_s += OPTIONS.handover_s
    story.on(Connected)
    assert story.error() == (504, "handover_timeout")
    assert story.fleet.counts["handover_abandoned"] == 2


@pytest.mark.parametrize("sign", ["engine_id", "refused"])
def test_a_handle_of_a_restarted_prefill_engine_is_not_sent(sign: str) -> None:
    story = Story(1, 1)
    story.prefilled("p#1")
    (prefill,) = story.fleet.prefill.endpoints
    if sign == "engine_id":
        story.fleet.prefill.saw_engine(prefill, "p#2")
    else:
        story.down(prefill)
    commands = story.on(Connected)
    assert endpoint_of(commands) is prefill
    assert not any(isinstance(command, SendDecode) for command in commands)


def test_a_decode_engine_drained_while_connecting_gets_nothing() -> None:
    story = Story(1, 2)
    drained = endpoint_of(story.prefilled())
    story.fleet.decode.drain(drained)
    commands = story.on(Connected)
    assert endpoint_of(commands) is not drained
    assert story.sent().handle is not None


def test_a_fresh_prefill_waits_for_a_decode_engine_that_can_be_reached() -> None:
    story = Story(1, 2)
    first = endpoint_of(story.prefilled())
    story.down(*(one for one in story.fleet.decode.endpoints if one is not first))
    story.now_s += OPTIONS.handover_s
    commands = story.tell(Deadline())
    assert isinstance(commands[-1], ConnectPrefill), "the connecting engine has not refused"
    story = Story(1, 2)
    story.prefilled()
    story.down(*story.fleet.decode.endpoints)
    story.now_s += OPTIONS.handover_s
    commands = story.tell(Deadline())
    assert isinstance(commands[-1], ProbeDecode)


def test_no_first_token_in_time() -> None:
    story = Story()
    decode = endpoint_of(story.prefilled())
    story.sent()
    assert story.late() == [CancelUpstream(2)]
    assert story.error() == (504, "decode_timeout")
    assert decode.state is EndpointState.SUSPECT


# ---- the stream ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [(UpstreamLost,), (UpstreamLost, True), (StreamEnded, False)])
def test_a_lost_stream_ends_with_an_error(event: tuple[Callable[..., Event], ...]) -> None:
    story = Story()
    story.prefilled()
    story.sent()
    story.on(FirstByte)
    story.on(*event)
    (told,) = story.told
    assert isinstance(told, EndStreamWithError)
    assert told.status == 502
    assert story.outcomes == [Stage.FAILED]


def test_a_silent_stream_ends_with_an_error_counted_from_its_last_byte() -> None:
    story = Story()
    story.prefilled()
    story.sent()
    story.on(FirstByte)
    story.now_s += 8
    story.life.last_byte_s = story.now_s
    assert story.late() == []
    assert story.late() == [CancelUpstream(2), EndStreamWithError(504, "decode_timeout")]
    assert story.outcomes == [Stage.FAILED]


def test_an_error_event_of_the_engine_is_its_end() -> None:
    story = Story()
    story.prefilled()
    story.sent()
    story.on(FirstByte)
    story.on(StreamEnded, True, True)
    assert story.told == []
    assert story.outcomes == [Stage.FAILED]


# ---- the client leaves -----------------------------------------------------------------------------------------------


def test_leaving_before_the_prefill_answered_cancels_it() -> None:
    for events in ([], [(Connected,)], [(Connected,), (BytesWritten,)]):
        story = Story()
        story.tell(Received())
        for event in events:
            story.on(*event)
        assert story.tell(ClientLeft()) == [CancelUpstream(1)]
        assert story.outcomes == [Stage.CANCELLED]
        assert story.told == []


def test_leaving_while_the_prefill_answers_completes_the_hand_over() -> None:
    story = Story()
    story.tell(Received())
    story.on(Connected)
    story.on(PrefillHead)
    assert story.tell(ClientLeft()) == []
    story.answered()
    (command,) = story.on(Connected)
    assert isinstance(command, CompleteHandover)
    assert not command.is_salted
    story.on(StreamEnded)
    assert story.outcomes == [Stage.CANCELLED]
    assert story.fleet.counts == {"handover_completed": 1}


def test_leaving_while_a_decode_engine_connects_completes_the_hand_over_on_any() -> None:
    story = Story()
    story.prefilled()
    assert story.tell(ClientLeft()) == []
    story.on(ConnectRefused)
    (command,) = story.on(Connected)
    assert isinstance(command, CompleteHandover)
    assert isinstance(story.on(UpstreamLost)[0], ConnectDecode), "no byte was written"
    story.on(Connected)
    story.on(BytesWritten)
    story.on(UpstreamLost)
    assert story.outcomes == [Stage.CANCELLED]
    assert story.fleet.counts["handover_failed"] == 1


def test_leaving_while_awaiting_holds_the_request_until_it_is_admitted() -> None:
    story = Story()
    story.prefilled()
    story.sent()
    assert story.tell(ClientLeft()) == []
    assert story.life.deadline_s == story.now_s + OPTIONS.abort_grace_s
    assert story.late() == [CancelUpstream(2)]
    assert story.outcomes == [Stage.CANCELLED]
    early = Story()
    early.prefilled()
    early.sent()
    early.tell(ClientLeft())
    assert early.on(FirstByte) == [CancelUpstream(2)], "the first byte shows that it was admitted"
    local = Story(path="local")
    local.tell(Received())
    local.sent()
    assert local.tell(ClientLeft()) == [CancelUpstream(1)]


def test_leaving_a_stream_cancels_it() -> None:
    story = Story()
    story.prefilled()
    story.sent()
    story.on(FirstByte)
    assert story.tell(ClientLeft()) == [CancelUpstream(2)]
    assert story.outcomes == [Stage.CANCELLED]


def test_nothing_is_tried_again_for_a_client_that_left() -> None:
    story = Story()
    story.prefilled()
    story.sent()
    story.tell(ClientLeft())
    assert story.on(UpstreamLost) == []
    assert story.outcomes == [Stage.CANCELLED]
    assert story.fleet.budget.num_retries == 0


# ---- refused by the decode engine as invalid -------------------------------------------------------------------------


def test_a_refusal_by_decode_is_the_clients_answer_and_the_kv_is_freed() -> None:
    story = Story(1, 1)
    story.prefilled()
    old = story.sent().handle
    commands = story.on(DecodeRefused, 400)
    assert commands[0] == PassOn(2)
    (command,) = story.on(Connected)
    assert isinstance(command, CompleteHandover)
    assert command.handle is old
    assert command.is_salted, "the engine may have let the blocks go"
    assert story.tell(ClientLeft()) == []
    story.on(DecodeRefused, 400)
    assert story.told == [PassOn(2)]
    assert story.outcomes == [Stage.COMPLETED]


def test_a_refusal_by_decode_without_a_handle_ends_it() -> None:
    story = Story(path="local")
    story.tell(Received())
    story.sent()
    story.on(DecodeRefused, 422)
    assert story.outcomes == [Stage.COMPLETED]


# ---- always ----------------------------------------------------------------------------------------------------------


def test_own_limits_blame_no_engine() -> None:
    story = Story(2, 1)
    endpoints = [endpoint_of(story.tell(Received())), endpoint_of(story.on(ConnectRefused, True))]
    story.on(ConnectRefused, True)
    assert story.error() == (503, "own_limit")
    assert {endpoint.state for endpoint in endpoints} == {EndpointState.READY}


def test_every_stage_that_waits_ends_by_its_deadline_alone() -> None:
    """No event ever comes but connections: the request still ends."""
    for path in ("pd", "local"):
        story = Story(path=path)  # type: ignore[arg-type]
        story.tell(Received())
        for _ in range(20):
            if story.life.stage in OUTCOMES:
                break
            if story.life.stage in (Stage.CONNECTING_PREFILL, Stage.CONNECTING_DECODE):
                story.on(Connected)
            else:
                story.late()
        assert story.outcomes == [Stage.FAILED]
