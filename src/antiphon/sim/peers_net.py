"""Connections between simulated hosts: ordered, delayed, cut and held up by partitions, with ends that may come late.

While two hosts are apart nothing that one sent reaches the other; what was under way arrives after they are joined
again, on connections that may have been given up meanwhile. That is what a network with retransmission does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from antiphon.sim.network import Process
from antiphon.sim.timeline import Action, Timeline

DELAY_MEAN_S = 0.000_3
SLOW_SHARE = 0.04
SLOW_S = (0.01, 0.6)
"""A message in this share takes so long: past some deadlines."""
CATCH_UP_S = (0.0, 0.3)
"""After a partition each connection goes on in so long: its sender tries again now and then."""


class Network:
    """Which hosts are apart.

    Args:
        timeline: virtual time.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._apart: dict[frozenset[str], list[tuple[Pipe, Action]]] = {}

    def part(self, one: str, other: str) -> None:
        """From now on nothing passes between the two hosts."""
        self._apart.setdefault(frozenset((one, other)), [])

    def join(self) -> None:
        """All hosts reach each other; what was held up arrives within a while, in its order on each connection only."""
        held = [each for actions in self._apart.values() for each in actions]
        self._apart.clear()
        for pipe, _ in held:
            if pipe.clear_s <= self.timeline.now_s:
                pipe.clear_s = self.timeline.now_s + self.timeline.random.uniform(*CATCH_UP_S)
        for pipe, action in held:
            self.pass_on(pipe, action)

    def pass_on(self, pipe: Pipe, action: Action) -> None:
        """Does ``action``, at once or when the two hosts are joined and what was before it has arrived."""
        waiting = self._apart.get(pipe.pair)
        if waiting is not None:
            waiting.append((pipe, action))
        elif pipe.clear_s > self.timeline.now_s:
            self.timeline.after(pipe.clear_s - self.timeline.now_s, action)
            pipe.clear_s += 1e-6
        else:
            action()


class Pipe:
    """One direction of a connection.

    Args:
        network: that it goes through.
        sender, receiver: processes; their hosts are ``hosts``.
        hosts: names of the two hosts.
    """

    def __init__(self, network: Network, sender: Process, receiver: Process, hosts: tuple[str, str]) -> None:
        self._network = network
        self._receiver = receiver
        self._last_s = 0.0
        self.pair = frozenset(hosts)
        self.clear_s = 0.0
        """Until then what comes waits behind what a partition held up."""
        self.is_ended = False
        self.on_message: Callable[[Any], None] = _drop
        self.on_end: Action = _nothing
        sender.on_death.append(self.end)

    def send(self, message: Any) -> None:
        """Sends; in vain after the end."""
        if not self.is_ended:
            self._deliver(lambda: self.on_message(message))

    def end(self) -> None:
        """The end, after all that was sent."""
        if not self.is_ended:
            self.is_ended = True
            self._deliver(lambda: self.on_end())

    def _deliver(self, action: Action) -> None:
        timeline = self._network.timeline
        chance = timeline.random
        delay_s = chance.expovariate(1 / DELAY_MEAN_S)
        if not timeline.is_calm and chance.random() < SLOW_SHARE:
            delay_s += chance.uniform(*SLOW_S)
        self._last_s = max(self._last_s, timeline.now_s + delay_s)
        arrive = lambda: self._network.pass_on(self, lambda: self._receiver.run(action))  # noqa: E731 - two words
        timeline.after(self._last_s - timeline.now_s, arrive)


def _drop(message: Any) -> None:
    """Nobody listens any more."""


def _nothing() -> None:
    """Nobody cares."""
