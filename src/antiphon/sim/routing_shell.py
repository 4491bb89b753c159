"""A simulated shell of ``routing``: does what a life commands, over simulated connections, and tells it what happens.

It plays by the rules that ``routing.events`` and ``routing.commands`` state for a real shell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from antiphon.routing import machine
from antiphon.routing.commands import (
    CancelUpstream,
    Command,
    CompleteHandover,
    ConnectDecode,
    ConnectPrefill,
    EndStreamWithError,
    Finish,
    Handle,
    PassOn,
    ProbeDecode,
    RespondError,
    SendDecode,
)
from antiphon.routing.endpoint import Endpoint
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
from antiphon.routing.states import Stage
from antiphon.sim.network import DELAY_MEAN_S, Process
from antiphon.sim.routing_engine import Link, SimEngine
from antiphon.sim.routing_oracle import Client, Oracle
from antiphon.sim.routing_values import (
    Answer,
    Ask,
    Done,
    Garbage,
    Head,
    RoutingFault,
    Said,
    SimHandle,
    Token,
)
from antiphon.sim.timeline import CheckFailed, Timeline

_F = RoutingFault
CONNECT_AGAIN_S = 0.05
_LAST_EVENTS = (ConnectRefused, PrefillAnswered, DecodeRefused, StreamEnded, UpstreamLost)
"""After these nothing comes from the attempt."""
OWN_LIMIT_SHARE = 0.3
"""Of connections, while the router is short of them."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of a request at an engine."""

    number: int
    endpoint: Endpoint
    ask: Ask | None
    is_trial: bool
    link: Link | None = None
    is_stale: bool = False
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Ride:
    """A request and its client."""

    client: Client
    life: Life
    attempt: Attempt | None = None
    reserved: Attempt | None = None
    tried: set[Endpoint] = field(default_factory=set)
    armed_s: float = inf
    num_prefills: int = 0
    num_sent: int = 0

    @property
    def name(self) -> str:
        """For the trace."""
        return self.client.name

    @property
    def engines(self) -> list[str]:
        """The engines that it depends on at this moment."""
        names = [self.attempt.endpoint.address] if self.attempt is not None else []
        handle = self.life.handle
        return [*names, handle.prefill.address] if handle is not None else names


class Shell:
    """One router.

    Args:
        timeline: the time that it lives in.
        fleet: what it knows of its engines.
        oracle: watches it.
        find: the engine at an address.
        validate_every: the fleet and the life are validated after each step of this many.
    """

    def __init__(
        self,
        timeline: Timeline,
        fleet: Fleet,
        oracle: Oracle,
        find: Callable[[str], SimEngine],
        validate_every: int,
    ) -> None:
        self.timeline = timeline
        self.fleet = fleet
        self.oracle = oracle
        self.process = Process(timeline, "router")
        self.rides: dict[str, Ride] = {}
        """Requests that have not finished."""
        self.is_short = False
        """It has no connections left, now and then."""
        self._find = find
        self._validate_every = validate_every
        self._num_steps = 0

    def begin(self, client: Client, life: Life, *, is_gone: bool = False) -> None:
        """A request comes in, whose client may be gone already."""
        ride = Ride(client, life)
        self.rides[client.name] = ride
        self.oracle.num_clients += 1
        if is_gone:
            self.leave(client.name)
        else:
            self.step(ride, Received())

    def leave(self, name: str) -> None:
        """The client of a request that has not finished leaves; it may have its answer."""
        ride = self.rides.get(name)
        if ride is None or ride.client.has_left:
            return
        ride.client.has_left = not ride.client.ends
        self.timeline.count(f"left in {ride.life.stage.value}")
        self.step(ride, ClientLeft())

    def step(self, ride: Ride, event: Event) -> None:
        """Tells the life and does what it commands."""
        timeline, life = self.timeline, ride.life
        before = life.stage
        if isinstance(event, _LAST_EVENTS) and ride.attempt is not None and ride.attempt.number == event.attempt:
            self._drop(ride)
        timeline.note(f"{ride.name} {before.value} {type(event).__name__}")
        commands = machine.step(life, event, timeline.now_s, timeline.random.random())
        self._num_steps += 1
        if self._num_steps % self._validate_every == 0:
            self.fleet.validate()
            life.validate()
        timeline.count(f"event {type(event).__name__}")
        for command in commands:
            self._do(ride, command)
        self.oracle.look()
        if life.deadline_s != ride.armed_s:
            ride.armed_s = life.deadline_s
            if ride.armed_s < inf:
                self._arm(ride, ride.armed_s)
        if life.stage is not before:
            timeline.count(f"stage {life.stage.value}", ride.name)

    # -- commands ---------------------------------------------------------------------------------------------------

    def _do(self, ride: Ride, command: Command) -> None:
        self.timeline.count(f"command {type(command).__name__}")
        self.timeline.note(f"{ride.name}   {_describe(command)}")
        if isinstance(command, ProbeDecode | ConnectPrefill | ConnectDecode):
            self._connect(ride, command)
        elif isinstance(command, SendDecode | CompleteHandover):
            self._send_decode(ride, command)
        elif isinstance(command, CancelUpstream):
            self._cancel(ride, command)
        elif isinstance(command, RespondError):
            if command.code in ("no_prefill_engine", "no_decode_engine"):
                self.oracle.unavailable(ride.name, ride.tried, command)
            self.timeline.count(f"error {command.code}")
            self._end_client(ride, f"error {command.status} {command.code}")
        elif isinstance(command, PassOn):
            self._end_client(ride, "refused")
        elif isinstance(command, EndStreamWithError):
            self._end_client(ride, f"stream error {command.code}")
        else:
            self._finish(ride, command)

    def _end_client(self, ride: Ride, how: str) -> None:
        if not ride.client.has_left:
            ride.client.end(how)

    def _finish(self, ride: Ride, command: Finish) -> None:
        self.timeline.count(f"finish {command.outcome.value}")
        self._expect_no_attempt(ride)
        if ride.reserved is not None:
            self.oracle.ended(ride.reserved.endpoint, is_trial=ride.reserved.is_trial)
            ride.reserved = None
        self.oracle.finishes(ride.client, command.outcome)
        self.rides.pop(ride.name, None)

    def _connect(self, ride: Ride, command: ProbeDecode | ConnectPrefill | ConnectDecode) -> None:
        self._expect_no_attempt(ride)
        endpoint, ask = command.endpoint, None
        if isinstance(command, ConnectPrefill):
            if not ride.num_prefills and ride.reserved is None:
                self.oracle.first_prefill(ride.name)
            ask = Ask(command.request_id, ride.client.invalid, 1)
        if ride.reserved is not None and ride.reserved.endpoint is endpoint:
            is_trial, ride.reserved = ride.reserved.is_trial, None
        else:
            is_first_try = not any(one.role == endpoint.role for one in ride.tried)
            is_trial = self.oracle.attempt(endpoint, is_first_try=is_first_try, has_key=ride.life.ask is not None)
        ride.tried.add(endpoint)
        attempt = ride.attempt = Attempt(command.attempt, endpoint, ask, is_trial)
        engine = self._find(endpoint.address)
        chance = self.timeline.random
        delay_s = chance.expovariate(1 / DELAY_MEAN_S)
        if self.is_short and chance.random() < OWN_LIMIT_SHARE:
            self._later(ride, attempt, delay_s, ConnectRefused(attempt.number, is_own_limit=True))
        elif _F.UNREACHABLE not in engine.modes:
            self.timeline.after(
                delay_s, lambda: self._connected(ride, attempt, engine, isinstance(command, ProbeDecode))
            )

    def _connected(self, ride: Ride, attempt: Attempt, engine: SimEngine, is_probe: bool) -> None:
        if attempt.is_over:
            return
        if not engine.process.is_alive:
            self.oracle.refused(engine.name)
            self.step(ride, ConnectRefused(attempt.number))
            return
        if is_probe:
            attempt.is_over = True
            ride.attempt, ride.reserved = None, attempt
        else:
            self._open(ride, attempt, engine)
        self.step(ride, Connected(attempt.number))
        if attempt.ask is not None and not attempt.is_over:  # a prefill is sent as soon as it is connected
            self._write(ride, attempt, attempt.ask)

    def _open(self, ride: Ride, attempt: Attempt, engine: SimEngine) -> None:
        link = attempt.link = engine.accept(self.process)
        attempt.is_stale = _F.STALE_CONNECTION in engine.modes and self.timeline.random.random() < 0.7
        link.down.on_message = lambda said: self._heard(ride, attempt, said)
        link.down.on_end = lambda: self._lost(ride, attempt)

    def _send_decode(self, ride: Ride, command: SendDecode | CompleteHandover) -> None:
        attempt, client = ride.attempt, ride.client
        assert attempt is not None
        self.oracle.sends(command)
        handle = command.handle.value if isinstance(command.handle, Handle) else None
        assert handle is None or isinstance(handle, SimHandle)
        if isinstance(command, CompleteHandover):
            ask = Ask(command.request_id, client.invalid, 1, handle=handle, is_salted=command.is_salted)
        else:
            ask = Ask(command.request_id, client.invalid, client.num_tokens, client.is_stream, handle)
        self._write(ride, attempt, ask)

    def _write(self, ride: Ride, attempt: Attempt, ask: Ask) -> None:
        assert attempt.link is not None
        if attempt.is_stale:
            self.timeline.count("stale connection")
            self._later(ride, attempt, 0.0, UpstreamLost(attempt.number))
            return
        if attempt.endpoint.role == "prefill":
            ride.num_prefills += 1
            if ride.num_prefills > 1:
                self.oracle.retry()
        elif ask.handle is not None:
            self.oracle.wrote(ask.handle)
        else:
            ride.num_sent += 1
            if ride.num_sent > 1 and not ride.num_prefills:
                self.oracle.retry()
        attempt.link.up.send(ask)
        self._later(ride, attempt, 0.0, BytesWritten(attempt.number))

    def _cancel(self, ride: Ride, command: CancelUpstream) -> None:
        attempt = ride.attempt
        assert attempt is not None and attempt.number == command.attempt, "an attempt is cancelled that is not current"
        self._drop(ride)

    def _expect_no_attempt(self, ride: Ride) -> None:
        if ride.attempt is not None:
            raise CheckFailed(f"{ride.name} leaves attempt {ride.attempt.number} under way")

    def _drop(self, ride: Ride) -> None:
        """Lets go of the attempt."""
        attempt, ride.attempt = ride.attempt, None
        if attempt is None:
            return
        attempt.is_over = True
        self.oracle.ended(attempt.endpoint, is_trial=attempt.is_trial)
        if attempt.link is not None:
            attempt.link.close()

    def _later(self, ride: Ride, attempt: Attempt, delay_s: float, event: Event) -> None:
        self.timeline.after(delay_s, lambda: None if attempt.is_over else self.step(ride, event))

    def _arm(self, ride: Ride, at_s: float) -> None:
        def due() -> None:
            if ride.armed_s == at_s and not ride.life.is_over:
                ride.armed_s = inf
                self.step(ride, Deadline())

        self.timeline.after(max(0.0, at_s - self.timeline.now_s), due)

    # -- what engines say -------------------------------------------------------------------------------------------

    def _heard(self, ride: Ride, attempt: Attempt, said: Said) -> None:
        """Passed on even if the attempt is over, as from a connection whose end is under way."""
        number, role = attempt.number, attempt.endpoint.role
        if isinstance(said, Head):
            self.step(ride, PrefillHead(number))
        elif isinstance(said, Answer):
            self._heard_answer(ride, attempt, said)
        elif isinstance(said, Garbage):
            self.step(ride, UpstreamLost(number, is_garbage=True))
        elif role == "decode":
            self._heard_stream(ride, attempt, said)

    def _heard_answer(self, ride: Ride, attempt: Attempt, answer: Answer) -> None:
        if attempt.endpoint.role == "decode":
            self.step(ride, DecodeRefused(attempt.number, answer.status, answer.retry_after_s))
            return
        handle = answer.handle
        if handle is not None and not attempt.is_over:
            self.oracle.saw(handle)
        engine_id = handle.engine_id if handle is not None else ""
        self.step(ride, PrefillAnswered(attempt.number, answer.status, handle, engine_id, answer.retry_after_s))

    def _heard_stream(self, ride: Ride, attempt: Attempt, said: Token | Done) -> None:
        life, client = ride.life, ride.client
        if attempt.is_over or life.stage not in (Stage.AWAITING, Stage.STREAMING, Stage.COMPLETING):
            return
        if isinstance(said, Token):
            if life.stage is Stage.COMPLETING:
                return
            if life.stage is Stage.AWAITING:
                self.step(ride, FirstByte(attempt.number))
            if life.stage is Stage.STREAMING and said.index >= client.num_received:  # a byte stream has nothing twice
                life.last_byte_s = self.timeline.now_s
                client.receive(said)
        else:
            is_for_client = life.stage is not Stage.COMPLETING and not client.has_left
            if is_for_client:
                client.end("complete")
                if not said.is_right:
                    raise AssertionError(f"{client.name} got an answer from other people's KV")
            self.step(ride, StreamEnded(attempt.number))

    def _lost(self, ride: Ride, attempt: Attempt) -> None:
        if attempt.is_over:
            return
        if ride.life.stage is Stage.STREAMING and self.timeline.random.random() < 0.5:  # a clean end, or a broken one
            self.step(ride, StreamEnded(attempt.number, is_complete=False))
        else:
            self.step(ride, UpstreamLost(attempt.number))


def _describe(command: Command) -> str:
    parts = [type(command).__name__]
    for name in ("attempt", "request_id", "status", "code"):
        value = getattr(command, name, None)
        if value is not None:
            parts.append(str(value))
    endpoint = getattr(command, "endpoint", None)
    if endpoint is not None:
        parts.append(f"{endpoint.address}({endpoint.state.value})")
    if isinstance(command, Finish):
        parts.append(command.outcome.value)
    return " ".join(parts)
