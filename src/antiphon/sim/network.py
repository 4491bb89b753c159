"""Processes, and the stream sockets between them.

A process runs, is stopped (SIGSTOP: what reaches it waits, in order), or is dead (``kill -9``: its sockets end after
what it had sent). A connection keeps the order of what it carries, as a stream socket does, and has a delay of its own
for each message, so that messages of different connections overtake each other. Nothing is lost but by the end of a
connection: the sender's end arrives after all that was sent; what a dead process was sent is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from antiphon.sim.timeline import Action, Timeline

M = TypeVar("M")

DELAY_MEAN_S = 0.000_1
HICCUP_SHARE = 0.03
"""Share of messages that a busy machine holds up, so long that some miss the deadline of 50 ms."""
HICCUP_S = (0.005, 0.120)


class Process:
    """A process of the simulated host.

    Args:
        timeline: the time that it lives in.
        name: unique, for the trace.
    """

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.timeline = timeline
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.died_at_s = float("inf")
        self.on_death: list[Action] = []
        """Done when it is killed, in order."""
        self._waiting: deque[Action] = deque()
        self._channels: list[Channel[object]] = []

    @property
    def is_running(self) -> bool:
        """Whether it is alive and not stopped."""
        return self.is_alive and not self.is_stopped

    def run(self, action: Action) -> None:
        """Does ``action`` in this process: now, when it is continued, or never if it is dead."""
        if not self.is_alive:
            return
        if self.is_stopped:
            self._waiting.append(action)
        else:
            action()

    def after(self, delay_s: float, action: Action) -> None:
        """As ``run``, in ``delay_s`` seconds."""
        self.timeline.after(delay_s, partial(self.run, action))

    def at(self, time_s: float, action: Action) -> None:
        """As ``run``, at that time."""
        self.timeline.at(time_s, partial(self.run, action))

    def stop(self) -> None:
        """SIGSTOP."""
        self.is_stopped = True

    def resume(self) -> None:
        """SIGCONT: what has waited is done in its order."""
        self.is_stopped = False
        while self._waiting and self.is_running:
            self._waiting.popleft()()

    def kill(self) -> None:
        """SIGKILL: the kernel ends its sockets."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.died_at_s = self.timeline.now_s
        self._waiting.clear()
        for channel in self._channels:
            channel.end()
        for action in self.on_death:
            action()

    def owns(self, channel: Channel[object]) -> None:
        """The kernel ends the channel when this process, its sender, dies."""
        self._channels.append(channel)


class Channel(Generic[M]):
    """One direction of a connection.

    Args:
        sender, receiver: the processes at its ends.
    """

    def __init__(self, sender: Process, receiver: Process) -> None:
        self._timeline = receiver.timeline
        self._receiver = receiver
        self._last_s = 0.0
        self.is_ended = False
        self.has_hiccups = True
        self.slowness = 1.0
        """Multiplies the delays."""
        self.on_message: Callable[[M], None] = _nobody_listens
        self.on_end: Action = _nothing
        sender.owns(self)  # type: ignore[arg-type]

    def send(self, message: M) -> None:
        """Sends; in vain after the end."""
        if not self.is_ended:
            self._deliver(lambda: self.on_message(message))

    def end(self) -> None:
        """Sends the end, once, after all that was sent."""
        if not self.is_ended:
            self.is_ended = True
            self._deliver(lambda: self.on_end())

    def _deliver(self, action: Action) -> None:
        chance = self._timeline.random
        delay_s = chance.expovariate(1 / DELAY_MEAN_S) * self.slowness
        if self.has_hiccups and not self._timeline.is_calm and chance.random() < HICCUP_SHARE:
            delay_s += chance.uniform(*HICCUP_S)
        self._last_s = max(self._last_s, self._timeline.now_s + delay_s)
        self._timeline.after(self._last_s - self._timeline.now_s, lambda: self._receiver.run(action))


def _nobody_listens(message: object) -> None:
    raise AssertionError(f"nobody listens for {message}")


def _nothing() -> None:
    """The end of a channel means nothing to who set no handler."""
