"""A task that is continued in place: a coroutine that goes on in the stack of whoever brings what it waits for.

An asyncio task is started, woken and ended by a turn of the event loop each. A proxied request waits twice, for two
engines, and for each of these turns the interpreter comes back to cold caches; here an engine's last byte continues the
request at once.

A :class:`Promise` is what it waits for; it may be awaited in an asyncio task too. An :class:`Activity` is work that
needs no coroutine at all: it goes on by the callbacks of others. A strand may await futures and tasks
of asyncio as well, but nothing that asks for the current task (``asyncio.timeout``, ``TaskGroup``): give that a task
of its own and await it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class Promise(Generic[T]):
    """One result, which one waiter awaits. The first of :meth:`resolve` and :meth:`fail` counts."""

    _value: T

    def __init__(self) -> None:
        self.is_resolved = False
        self.failure: BaseException | None = None
        """Why there is no result."""
        self._wake: Callable[[], None] | None = None

    def resolve(self, value: T) -> None:
        """The result is ``value``; whoever waits goes on before this returns, if it is a strand."""
        if not self.is_resolved:
            self.is_resolved = True
            self._value = value
            self._woken()

    def fail(self, error: BaseException) -> None:
        """There is no result: awaiting it raises ``error``."""
        if not self.is_resolved:
            self.is_resolved = True
            self.failure = error
            self._woken()

    def _woken(self) -> None:
        wake, self._wake = self._wake, None  # it may hold this: the collector is not to find them
        if wake is not None:
            wake()

    def then(self, action: Callable[[], None]) -> None:
        """Do ``action`` when this is resolved or has failed, at once if it is; in the place of awaiting it."""
        assert self._wake is None, "one waiter at a time"
        if self.is_resolved:
            action()
        else:
            self._wake = action

    def __await__(self) -> Generator[Any, None, T]:
        if not self.is_resolved:
            assert self._wake is None, "one waiter at a time"
            strand = _current
            try:
                if strand is not None:
                    self._wake = strand.step
                    yield self
                else:
                    yield from self._in_task()
            finally:
                self._wake = None
        if self.failure is not None:
            raise self.failure
        return self._value

    def _in_task(self) -> Generator[Any, None, None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        self._wake = wake
        yield from future


class Activity(Promise[None]):
    """Work under way, resolved when it has ended."""

    def cancel(self) -> None:
        """End it now; nothing if it has ended."""
        raise NotImplementedError


class Strand:
    """Runs ``coroutine``, from wait to wait. A subclass may be told of its end."""

    __slots__ = ("_awaited", "_coroutine", "is_done")

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self._awaited: object = None
        self.is_done = False

    def ended(self, error: Exception | None) -> None:
        """The coroutine has returned or was cancelled, or has raised ``error``."""
        if error is not None:
            raise error

    def step(self) -> None:
        """Begin, or go on now that what the coroutine waits for is there."""
        self._run(self._coroutine.send, None)

    def cancel(self) -> None:
        """Raise ``CancelledError`` in the coroutine, where it waits; nothing if it has ended."""
        if self.is_done:
            return
        assert _current is not self, "a strand does not cancel itself"
        if isinstance(self._awaited, asyncio.Future):
            self._awaited.cancel()
        self._run(self._coroutine.throw, asyncio.CancelledError())

    def _run(self, advance: Callable[[Any], object], argument: object) -> None:
        global _current
        before, _current = _current, self
        try:
            self._awaited = awaited = advance(argument)
        except (StopIteration, asyncio.CancelledError):
            self._end(None)
        except Exception as error:  # supervised: whoever made the strand is told by `ended`
            self._end(error)
        else:
            if not isinstance(awaited, Promise):
                self._attach(awaited)
        finally:
            _current = before

    def _end(self, error: Exception | None) -> None:
        self.is_done = True
        self.ended(error)

    def _attach(self, awaited: object) -> None:
        """Go on when a future is done, or at the loop's next turn for a bare yield (``asyncio.sleep(0)``)."""
        if awaited is None:
            asyncio.get_running_loop().call_soon(self._continue, None)
        else:
            future = cast("asyncio.Future[object]", awaited)
            future._asyncio_future_blocking = False  # the answer to what its __await__ asks of a task
            future.add_done_callback(self._continue)

    def _continue(self, awaited: object) -> None:
        if not self.is_done and awaited is self._awaited:
            self.step()


_current: Strand | None = None
"""The strand whose code runs now."""
