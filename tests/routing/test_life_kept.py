"""The life of a request whose KV is kept by cache servers: nobody holds anything for it, and its handle can be sent
again."""

from __future__ import annotations

from dataclasses import replace

from antiphon.routing.commands import CancelUpstream, ConnectDecode, ConnectPrefill, PassOn, SendDecode
from antiphon.routing.events import (
    BytesWritten,
    ClientLeft,
    Connected,
    DecodeRefused,
    FirstByte,
    PrefillHead,
    Received,
    StreamEnded,
    UpstreamLost,
)
from antiphon.routing.states import Stage
from tests.routing.test_life import OPTIONS, Story

KEPT = replace(OPTIONS, is_kept=True)


def story(num_prefill: int = 2, num_decode: int = 2) -> Story:
    return Story(num_prefill, num_decode, options=KEPT)


def end(told: Story) -> None:
    told.on(FirstByte)
    told.on(StreamEnded)
    assert told.outcomes == [Stage.COMPLETED]


def test_the_death_of_the_prefill_engine_after_its_answer_changes_nothing() -> None:
    told = story(num_prefill=1)
    told.prefilled("engine-1")
    (prefill,) = told.fleet.prefill.endpoints
    told.down(prefill)
    told.fleet.prefill.saw_engine(prefill, "engine-2")  # and is back in another life
    assert told.sent().handle is not None
    end(told)


def test_a_lost_decode_engine_is_replaced_with_the_same_handle() -> None:
    told = story(num_prefill=1)
    told.prefilled()
    first = told.sent()
    (again,) = [command for command in told.on(UpstreamLost) if isinstance(command, ConnectDecode)]
    assert again.endpoint is not first.endpoint
    second = told.sent()
    assert second.handle is first.handle
    assert told.life.num_prefills == 1, "nothing is computed twice"
    end(told)


def test_it_is_sent_to_a_second_one_once() -> None:
    told = story(num_decode=3)
    told.prefilled()
    for _ in range(2):
        told.sent()
        told.on(DecodeRefused, 500)
    assert told.error() == (502, "decode_error")


def test_a_handle_that_is_too_old_is_made_anew() -> None:
    told = story()
    told.prefilled()
    told.sent()
    told.now_s += KEPT.handover_s + 1
    commands = told.on(UpstreamLost)
    assert any(isinstance(command, ConnectPrefill) for command in commands)


def test_a_client_that_leaves_is_let_go_of_at_once() -> None:
    told = story()
    told.tell(Received())
    told.on(Connected)
    told.on(BytesWritten)
    told.on(PrefillHead)
    assert [type(command) for command in told.tell(ClientLeft())] == [CancelUpstream]
    assert told.outcomes == [Stage.CANCELLED]

    told = story()
    told.prefilled()
    assert [type(command) for command in told.tell(ClientLeft())] == [CancelUpstream]
    assert told.outcomes == [Stage.CANCELLED]

    told = story()
    told.prefilled()
    told.sent()
    assert [type(command) for command in told.tell(ClientLeft())] == [CancelUpstream]
    assert told.outcomes == [Stage.CANCELLED]
    assert not any("handover" in name and number for name, number in told.fleet.counts.items())


def test_a_request_that_decode_refuses_is_over() -> None:
    told = story()
    told.prefilled()
    command = told.sent()
    assert isinstance(command, SendDecode)
    told.on(DecodeRefused, 400)
    assert [type(each) for each in told.told] == [PassOn]
    assert told.outcomes == [Stage.COMPLETED]
