"""A world of one router, its engines, its operator and its clients, and the faults that come over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from antiphon.routing.ask import Ask, Prompt
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.fleet import Fleet
from antiphon.routing.life import Life
from antiphon.routing.options import FleetOptions, LifeOptions
from antiphon.routing.path import Path
from antiphon.routing.policies import POLICIES
from antiphon.routing.states import EndpointState, Stage
from antiphon.sim.routing_engine import SimEngine
from antiphon.sim.routing_oracle import Client, Oracle
from antiphon.sim.routing_shell import Shell
from antiphon.sim.routing_values import (
    ALL_ROUTING_FAULTS,
    HEALTH_INTERVAL_S,
    HEALTH_TIMEOUT_S,
    LIFE_OPTIONS,
    MODES,
    Invalid,
    RoutingFault,
)
from antiphon.sim.timeline import Timeline

_F = RoutingFault
POLICY_NAMES = tuple(POLICIES)
RESTART_S = (0.01, 1.2)
FLAPS = (2, 4)
FLAP_S = (0.05, 0.3)
STOP_S = ((0.02, 0.3), (0.5, 1.2), (1.2, 4.0))
"""Shorter and longer than stage deadlines and the lease."""
MODE_S = (0.2, 2.0)
PROMPT_BYTES = (20, 400, 4000)
"""Of each session: less than a block, a few blocks, many."""
STALE_S = (0.3, 1.2)
CALM_GRACE_S = 0.4
"""Longer than the slowest message and admission together."""


@dataclass(frozen=True, slots=True)
class RoutingSimulationOptions:
    """How a seed is run.

    Args:
        faults: kinds that may occur.
        validate_every: fleet and life are validated after each step of this many.
        num_prefill, num_decode: engines; None leaves it to chance.
        policy: of both pools; None leaves it to chance.
        retry_floor: of the budget; None leaves it to chance.
    """

    faults: tuple[RoutingFault, ...] = ALL_ROUTING_FAULTS
    validate_every: int = 1
    num_prefill: int | None = None
    num_decode: int | None = None
    policy: str | None = None
    retry_floor: float | None = None

    @property
    def is_calm(self) -> bool:
        """Whether nothing goes wrong but that clients leave: then every KV that is handed over is pulled."""
        return set(self.faults) <= {_F.CLIENTS_LEAVE}


class RoutingWorld:
    """Everything of one seed."""

    def __init__(self, seed: int, options: RoutingSimulationOptions) -> None:
        self.options = options
        timeline = self.timeline = Timeline(seed)
        chance = timeline.random
        num_prefill = options.num_prefill or chance.choice((1, 2, 2, 3, 4))
        num_decode = options.num_decode or chance.choice((1, 2, 2, 3, 4))
        names = [f"p{index}" for index in range(num_prefill)] + [f"d{index}" for index in range(num_decode)]
        self.engines = {name: SimEngine(timeline, name, self.find) for name in names}
        fleet_options = FleetOptions(
            prefill_policy=options.policy or chance.choice(POLICY_NAMES),
            decode_policy=options.policy or chance.choice(POLICY_NAMES),
            prefers_warm_pairs=chance.random() < 0.5,
            open_min_s=0.1,
            open_max_s=0.8,
            retry_floor=options.retry_floor if options.retry_floor is not None else chance.choice((1.0, 3.0, 20.0)),
            retry_floor_per_s=0.2,
            retries_saved_max=50.0,
        )
        self.life_options: LifeOptions = LIFE_OPTIONS
        if options.is_calm:
            self.life_options = replace(LIFE_OPTIONS, abort_grace_s=CALM_GRACE_S)
        self.has_fallback = chance.random() < 0.3
        urls = [f"http://{name}" for name in names]
        self.fleet = Fleet(urls[:num_prefill], urls[num_prefill:], fleet_options)
        self.oracle = Oracle(timeline, self.fleet)
        self.shell = Shell(timeline, self.fleet, self.oracle, self.find, options.validate_every)
        self.clients: list[Client] = []
        self._last_poll: dict[str, float] = {}
        for name in names:
            timeline.after(chance.uniform(0, HEALTH_INTERVAL_S), lambda name=name: self._poll(name))  # type: ignore[misc]

    def find(self, name: str) -> SimEngine:
        """The engine of a name, which is its address."""
        return self.engines[name]

    def endpoint(self, engine: SimEngine) -> Endpoint | None:
        """What the router knows of it; None if an operator has removed it."""
        return self.fleet.pool(engine.role).find(f"http://{engine.name}")

    # -- clients ----------------------------------------------------------------------------------------------------

    def ask(self, *, is_plain: bool = False) -> Client:
        """A client asks something; nothing out of the ordinary if ``is_plain``."""
        chance = self.timeline.random
        invalid = Invalid.NO
        if not (is_plain or self.options.is_calm) and chance.random() < 0.12:
            invalid = chance.choice((Invalid.FOR_PREFILL, Invalid.FOR_DECODE, Invalid.POISON))
        is_stream = is_plain or chance.random() < 0.8
        client = Client(f"c{len(self.clients)}", invalid, chance.randint(1, 6), is_stream=is_stream)
        self.clients.append(client)
        path: Path = "pd" if is_plain or chance.random() < 0.8 else "local"
        options = self.life_options
        if self.has_fallback and not is_plain:
            options = replace(options, prefill_fallback="local")
        ask = None if chance.random() < 0.2 else ask_of(chance.randrange(len(PROMPT_BYTES)))
        may_leave = _F.CLIENTS_LEAVE in self.options.faults and not self.timeline.is_calm
        is_gone = may_leave and chance.random() < 0.02
        self.shell.begin(client, Life(client.name, self.fleet, options, path=path, ask=ask), is_gone=is_gone)
        if may_leave and chance.random() < 0.15:
            self.timeline.after(chance.uniform(0, 0.5) ** 2, lambda: self.leave(client.name))
        return client

    def leave(self, name: str) -> None:
        """A client leaves."""
        self.timeline.count(f"fault {_F.CLIENTS_LEAVE.value}")
        self.shell.leave(name)

    def leave_at(self, stage: Stage, number: int) -> None:
        """A client leaves when a request enters ``stage`` for the given time, or soon after."""
        timeline = self.timeline

        def soon() -> None:
            name = timeline.subject
            timeline.after(timeline.random.choice((0.0, 0.0, 0.001, 0.02)), lambda: self.leave(name))

        timeline.when(f"stage {stage.value}", number, soon)

    # -- health -----------------------------------------------------------------------------------------------------

    def _poll(self, name: str) -> None:
        timeline, engine = self.timeline, self.engines[name]
        timeline.after(HEALTH_INTERVAL_S, lambda: self._poll(name))
        endpoint = self.endpoint(engine)
        if endpoint is None:
            return
        if not engine.process.is_alive:
            result, delay_s = "refused", 0.001
        elif engine.process.is_stopped or _F.UNREACHABLE in engine.modes:
            result, delay_s = "failed", HEALTH_TIMEOUT_S
        else:
            result, delay_s = ("failed" if _F.SICK in engine.modes else "succeeded"), 0.001
        if _F.STALE_HEALTH in engine.modes:
            delay_s += timeline.random.uniform(*STALE_S)
        timeline.after(delay_s, lambda: self._polled(endpoint, result))

    def _polled(self, endpoint: Endpoint, result: str) -> None:
        timeline = self.timeline
        pool = self.fleet.pool(endpoint.role)
        before = endpoint.state
        if result == "succeeded":
            pool.health_succeeded(endpoint, timeline.now_s)
        elif result == "failed":
            pool.health_failed(endpoint, timeline.now_s, timeline.random.random())
        else:
            self.oracle.refused(endpoint.address)
            pool.health_refused(endpoint, timeline.now_s, timeline.random.random())
        if endpoint.state is not before:
            timeline.note(f"{endpoint.address} health {result}: {before.value} to {endpoint.state.value}")
        self.oracle.look()

    # -- faults -----------------------------------------------------------------------------------------------------

    def inject(self, fault: RoutingFault, engine: SimEngine) -> None:
        """Brings one fault about; in vain where it does not apply."""
        timeline = self.timeline
        if timeline.is_calm:
            return
        timeline.note(f"fault {fault.value} {engine.name}")
        if fault in MODES:
            self._behave(engine, fault)
        elif fault is _F.OWN_LIMIT:
            self.shell.is_short = True
            timeline.after(timeline.random.uniform(*MODE_S), self._not_short)
        else:
            {
                _F.KILL: self._kill,
                _F.FLAP: self._flap,
                _F.HANG: self._hang,
                _F.DRAIN: self._drain,
                _F.REMOVE: self._remove,
            }[fault](engine)
        timeline.count(f"fault {fault.value}")

    def heal(self) -> None:
        """No more faults: the dead live, the stopped go on, the removed are back."""
        self.timeline.is_calm = True
        self.shell.is_short = False
        for engine in self.engines.values():
            engine.modes.clear()
            if not engine.process.is_alive:
                engine.start()
            elif engine.process.is_stopped:
                self._continue(engine)
            self._open(engine)

    def _behave(self, engine: SimEngine, fault: RoutingFault) -> None:
        modes = engine.modes
        modes[fault] = modes.get(fault, 0) + 1

        def no_more() -> None:
            if fault in modes:
                modes[fault] -= 1
                if not modes[fault]:
                    del modes[fault]

        self.timeline.after(self.timeline.random.uniform(*MODE_S), no_more)

    def _not_short(self) -> None:
        self.shell.is_short = False

    def _kill(self, engine: SimEngine) -> None:
        if engine.process.is_alive:
            engine.kill()
            self.timeline.after(self.timeline.random.uniform(*RESTART_S), lambda: self._start(engine))

    def _start(self, engine: SimEngine) -> None:
        if not engine.process.is_alive:
            self.timeline.note(f"{engine.name} starts again")
            engine.start()

    def _flap(self, engine: SimEngine) -> None:
        chance = self.timeline.random
        at_s = 0.0
        for _ in range(chance.randint(*FLAPS)):
            self.timeline.after(at_s, lambda: None if self.timeline.is_calm else engine.kill())
            at_s += chance.uniform(*FLAP_S)
            self.timeline.after(at_s, lambda: self._start(engine))
            at_s += chance.uniform(*FLAP_S)

    def _hang(self, engine: SimEngine) -> None:
        chance = self.timeline.random
        if engine.process.is_running:
            engine.process.stop()
            process = engine.process

            def go_on() -> None:
                if engine.process is process and process.is_stopped:
                    self._continue(engine)

            self.timeline.after(chance.uniform(*chance.choice(STOP_S)), go_on)

    def _continue(self, engine: SimEngine) -> None:
        engine.last_stopped_s = self.timeline.now_s
        engine.process.resume()

    def _drain(self, engine: SimEngine) -> None:
        endpoint = self.endpoint(engine)
        if endpoint is not None and endpoint.state is not EndpointState.DRAINING:
            self.fleet.pool(endpoint.role).drain(endpoint)
            self.oracle.drains(engine.name, is_drained=True)
            self.timeline.after(self.timeline.random.uniform(*MODE_S), lambda: self._open(engine))

    def _remove(self, engine: SimEngine) -> None:
        endpoint = self.endpoint(engine)
        if endpoint is not None:
            self.fleet.pool(endpoint.role).remove(endpoint)
            self.oracle.drains(engine.name, is_drained=True)
            self.timeline.after(self.timeline.random.uniform(*MODE_S), lambda: self._open(engine))

    def _open(self, engine: SimEngine) -> None:
        """As an operator does: closed at first, so that it could be warmed."""
        pool = self.fleet.pool(engine.role)
        endpoint = pool.add(f"http://{engine.name}", is_open=False)
        pool.open(endpoint)
        self.oracle.drains(engine.name, is_drained=False)


def ask_of(session: int) -> Ask:
    """What choices go by, of one of a few sessions; its prompt is always the same."""
    num_bytes = PROMPT_BYTES[session]
    return Ask(hash_of(session), Prompt(b"model", b"%d" % session * num_bytes, num_bytes // 4))


def hash_of(number: int) -> int:
    """A key, far from that of the next number."""
    return (number * 0x9E3779B97F4A7C15 + 1) % 2**64
