"""Which handler takes which event in which stage. An event that a stage does not list, or of an attempt that is over,
comes late or twice: it is counted and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getdoc
from typing import Final

from antiphon.routing import decoding, prefilling
from antiphon.routing.commands import Command
from antiphon.routing.events import (
    ENGINE_EVENTS,
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
from antiphon.routing.life import Life
from antiphon.routing.states import OUTCOMES, Stage

Handler = Callable[[Life, Event], None]

TABLE: Final[dict[Stage, dict[type[Event], Handler]]] = {
    Stage.RECEIVED: {Received: prefilling.received, ClientLeft: prefilling.client_left},
    Stage.PROBING: {
        Connected: prefilling.probe_connected,
        ConnectRefused: prefilling.probe_refused,
        Deadline: prefilling.probe_timed_out,
        ClientLeft: prefilling.client_left,
    },
    Stage.CONNECTING_PREFILL: {
        Connected: prefilling.connected,
        ConnectRefused: prefilling.refused,
        Deadline: prefilling.connect_timed_out,
        ClientLeft: prefilling.client_left,
    },
    Stage.PREFILLING: {
        BytesWritten: prefilling.bytes_written,
        PrefillHead: prefilling.head,
        PrefillAnswered: prefilling.answered,
        UpstreamLost: prefilling.lost,
        Deadline: prefilling.timed_out,
        ClientLeft: prefilling.leaving,
    },
    Stage.BACKING_OFF: {Deadline: prefilling.waited, ClientLeft: prefilling.client_left},
    Stage.CONNECTING_DECODE: {
        Connected: decoding.connected,
        ConnectRefused: decoding.refused,
        Deadline: decoding.connect_timed_out,
        ClientLeft: decoding.leaving_early,
    },
    Stage.AWAITING: {
        BytesWritten: decoding.bytes_written,
        UpstreamLost: decoding.lost,
        DecodeRefused: decoding.declined,
        FirstByte: decoding.first_byte,
        StreamEnded: decoding.ended_at_once,
        Deadline: decoding.first_token_late,
        ClientLeft: decoding.leaving,
    },
    Stage.STREAMING: {
        StreamEnded: decoding.ended,
        UpstreamLost: decoding.stream_lost,
        Deadline: decoding.idle,
        ClientLeft: decoding.leaving_stream,
    },
    Stage.COMPLETING: {
        BytesWritten: decoding.bytes_written,
        StreamEnded: decoding.completed,
        DecodeRefused: decoding.completing_declined,
        UpstreamLost: decoding.completing_lost,
        Deadline: decoding.completing_late,
        ClientLeft: decoding.left,
    },
    **{outcome: {} for outcome in OUTCOMES},
}


def step(life: Life, event: Event, now_s: float, chance: float) -> list[Command]:
    """What is to be done about ``event``, in order.

    Args:
        now_s: the time, on the clock of all calls of the fleet.
        chance: in [0, 1), new for each step.
    """
    kind = type(event)
    handler = TABLE[life.stage].get(kind)
    if handler is None or (kind in ENGINE_EVENTS and event.attempt != life.attempt):  # type: ignore[union-attr]
        _count_late(life, event)
        return []
    if kind is Deadline and now_s < life.deadline_s:
        return []  # the deadline has moved since it was set
    life.now_s = now_s
    life.chance = chance
    handler(life, event)
    commands = life.out
    life.out = []
    return commands


def event_table() -> str:
    """The table as Markdown."""
    lines = ["| stage | event | what is done |", "|---|---|---|"]
    for stage, row in TABLE.items():
        for kind, handler in row.items():
            lines.append(f"| {stage.value} | `{kind.__name__}` | {' '.join((getdoc(handler) or '').split())} |")
    return "\n".join(lines) + "\n"


def _count_late(life: Life, event: Event) -> None:
    counts = life.fleet.counts
    if isinstance(event, PrefillAnswered) and event.handle is not None:
        counts["late_handle"] += 1  # its blocks are held until the lease ends
    elif not isinstance(event, BytesWritten):
        counts["late_event"] += 1
