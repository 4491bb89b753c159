"""What must never be seen of a router, checked from the outside: on its commands, on what engines are sent, and on what
clients get. It shares no bookkeeping with ``routing``; where it asks the fleet for a state, it says so.
"""

from __future__ import annotations

from collections import Counter
from math import ceil

from antiphon.routing.commands import CompleteHandover, RespondError, SendDecode
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.fleet import Fleet
from antiphon.routing.states import EndpointState, Stage
from antiphon.sim.routing_values import LIFE_OPTIONS, Invalid, SimHandle, Token
from antiphon.sim.timeline import CheckFailed, Timeline

_E = EndpointState
HANDOVER_S_MAX = LIFE_OPTIONS.handover_s


class Client:
    """One client, what it asked and what it got.

    Args:
        name: unique.
        invalid: whether engines refuse its request.
        num_tokens: of the whole answer.
    """

    def __init__(self, name: str, invalid: Invalid, num_tokens: int, *, is_stream: bool) -> None:
        self.name = name
        self.invalid = invalid
        self.num_tokens = num_tokens
        self.is_stream = is_stream
        self.has_left = False
        self.num_received = 0
        self.ends: list[str] = []
        """How its answer ended: more than once is wrong."""

    def receive(self, token: Token) -> None:
        """A token of the answer."""
        if self.ends:
            raise CheckFailed(f"{self.name} got a token after the end of its answer")
        if not token.is_right:
            raise CheckFailed(f"{self.name} got a token that was computed from other people's KV")
        if token.index != self.num_received:
            raise CheckFailed(f"{self.name} got token {token.index} after {self.num_received} tokens")
        self.num_received += 1

    def end(self, how: str) -> None:
        """The end of the answer: complete, refused, an error, or an error in the stream."""
        if self.ends:
            raise CheckFailed(f"{self.name} got two ends: {self.ends[0]}, {how}")
        self.ends.append(how)
        if how == "complete" and self.is_stream and self.num_received != self.num_tokens:
            raise CheckFailed(f"{self.name} got {self.num_received} of {self.num_tokens} tokens and a complete end")
        if how.startswith("error") and self.num_received:
            raise CheckFailed(f"{self.name} got an error status after a part of its answer")
        if how.startswith("stream error") and not self.num_received:
            raise CheckFailed(f"{self.name} got the end of a stream that never began")


class Oracle:
    """Watches one router.

    Args:
        timeline: for the time.
        fleet: of the router: states are read, counters are not.
    """

    def __init__(self, timeline: Timeline, fleet: Fleet) -> None:
        self._timeline = timeline
        self._fleet = fleet
        self.open: Counter[Endpoint] = Counter()
        """Attempts under way, and reservations."""
        self.trials: Counter[Endpoint] = Counter()
        """Those of them that began while a better endpoint was there; forgotten when it becomes ready."""
        self.num_clients = 0
        self.num_retries = 0
        self.handed: dict[SimHandle, float] = {}
        """Handles that the router was given while it wanted them, and when."""
        self._void: set[SimHandle] = set()
        self._engine_ids: dict[str, str] = {}
        self._written: set[SimHandle] = set()
        self._drained: set[str] = set()
        self._finished: set[str] = set()

    # -- before a command is done -----------------------------------------------------------------------------------

    def attempt(self, endpoint: Endpoint, *, is_first_try: bool, has_key: bool) -> bool:
        """An attempt at an engine begins. Returns whether it is a trial, for :meth:`ended`."""
        name = endpoint.address
        if name in self._drained:
            raise CheckFailed(f"{name} drains and got a new request")
        pool = self._fleet.pool(endpoint.role)
        self.open[endpoint] += 1
        if pool.ready and endpoint.state is not _E.READY and is_first_try:
            self.trials[endpoint] += 1
            self._timeline.count("trial")
            if self.trials[endpoint] > 1:
                raise CheckFailed(f"{name} is {endpoint.state.value} and is tried by two requests at a time")
            return True
        all_ready = len(pool.ready) == len(pool.endpoints)
        if pool.policy == "consistent_hash" and has_key and is_first_try and all_ready:
            loads = [self.open[one] for one in pool.ready]
            if self.open[endpoint] > ceil(self._fleet.options.load_factor * sum(loads) / len(loads)):
                raise CheckFailed(f"{name} has {self.open[endpoint]} of {sum(loads)} requests: affinity yields to load")
        return False

    def ended(self, endpoint: Endpoint, *, is_trial: bool) -> None:
        """The attempt is over."""
        self.open[endpoint] -= 1
        if is_trial and self.trials[endpoint]:
            self.trials[endpoint] -= 1

    def look(self) -> None:
        """After each step: endpoints that are ready have no trials."""
        for endpoint in [one for one, number in self.trials.items() if number and one.state is _E.READY]:
            self.trials[endpoint] = 0

    def first_prefill(self, name: str) -> None:
        """A request begins with a prefill."""
        if all(endpoint.state in (_E.DOWN, _E.DRAINING) for endpoint in self._fleet.decode.endpoints):
            raise CheckFailed(f"{name} is prefilled although every decode engine is down")

    def retry(self) -> None:
        """A request is sent to a second engine of a role after the first had it."""
        self.num_retries += 1
        options = self._fleet.options
        allowed = options.retry_share * self.num_clients + options.retry_floor
        if self.num_retries > allowed + options.retry_floor_per_s * self._timeline.now_s:
            raise CheckFailed(f"{self.num_retries} retries for {self.num_clients} requests: out of budget")

    def sends(self, command: SendDecode | CompleteHandover) -> None:
        """A decode request goes out."""
        handle = command.handle
        if handle is None:
            return
        value = handle.value
        assert isinstance(value, SimHandle)
        seen = self._engine_ids.get(value.engine)
        if seen is not None and seen != value.engine_id:
            raise CheckFailed(f"a handle of {value.engine_id} is sent although {seen} was seen")
        if value in self._void:
            raise CheckFailed(f"a handle of {value.engine_id} is sent although it was seen to be dead")
        if self._timeline.now_s > self.handed[value] + HANDOVER_S_MAX:
            raise CheckFailed(f"a handle of {value.engine_id} is sent after its time")
        is_salted = isinstance(command, CompleteHandover) and command.is_salted
        if value in self._written and not is_salted:
            raise CheckFailed(f"a second decode engine is sent handle {value} after a byte of it was written")

    def unavailable(self, name: str, tried: set[Endpoint], command: RespondError) -> None:
        """A client is told that no engine is available: then each was tried by it, or is being tried."""
        pool = self._fleet.prefill if command.code == "no_prefill_engine" else self._fleet.decode
        for endpoint in pool.endpoints:
            is_out = endpoint.state is _E.DRAINING
            if not is_out and endpoint not in tried and not self.open[endpoint]:
                raise CheckFailed(f"{name} was told that there is no engine, and {endpoint.address} was not tried")

    def finishes(self, client: Client, outcome: Stage) -> None:
        """A request ends."""
        if client.name in self._finished:
            raise CheckFailed(f"{client.name} finishes twice")
        self._finished.add(client.name)
        if outcome is Stage.CANCELLED:
            if not client.has_left:
                raise CheckFailed(f"{client.name} is cancelled and has not left")
        elif not client.ends:
            raise CheckFailed(f"{client.name} finishes as {outcome.value} and got no end of its answer")
        elif (outcome is Stage.COMPLETED) != (client.ends[0] in ("complete", "refused")):
            raise CheckFailed(f"{client.name} finishes as {outcome.value} and got: {client.ends[0]}")

    # -- what the router learns and does ----------------------------------------------------------------------------

    def wrote(self, handle: SimHandle) -> None:
        """The first byte of a request with this handle was written."""
        self._written.add(handle)

    def saw(self, handle: SimHandle) -> None:
        """The router was given a handle, and so told which life its engine is in."""
        self.handed[handle] = self._timeline.now_s
        self._engine_ids[handle.engine] = handle.engine_id

    def refused(self, engine: str) -> None:
        """The router saw that nothing listens there: whoever made the handles it has is gone."""
        self._void.update(handle for handle in self.handed if handle.engine == engine)

    def drains(self, address: str, *, is_drained: bool) -> None:
        """An operator drained an engine, or opened it."""
        (self._drained.add if is_drained else self._drained.discard)(address)

    # -- at the end -------------------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Nothing is under way: every counter of the fleet is zero."""
        for endpoint in self._fleet.all():
            if endpoint.num_active or endpoint.trial or self.open[endpoint]:
                raise CheckFailed(f"{endpoint} is not idle: trial {endpoint.trial}, seen {self.open[endpoint]}")
            if endpoint.num_uncached_tokens:
                raise CheckFailed(f"{endpoint} is idle and has {endpoint.num_uncached_tokens} tokens to compute")
        if self._fleet.prefill.num_active or self._fleet.decode.num_active:
            raise CheckFailed("a pool counts requests that no endpoint has")

    def check_ready(self) -> None:
        """All that is open has come back."""
        for endpoint in self._fleet.all():
            if endpoint.state not in (_E.READY, _E.DRAINING):
                raise CheckFailed(f"{endpoint} does not come back: cause {endpoint.cause.value}")
