"""No exception leaves a hook: vLLM ends the engine on the first one.

A hook that fails takes reuse out of service for the rest of the engine's life, loudly; serving goes on. What keeps
that safe is the caller's: a scheduler side that is out of service cannot hold blocks back, so that it tells the workers
to end their stores.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

log = logging.getLogger("antiphon.connector")

P = ParamSpec("P")
R = TypeVar("R")


class InService(Protocol):
    """Something whose hooks can fail."""

    out_of_service: str | None
    """Why reuse is off; None while it works."""


S = TypeVar("S", bound=InService)


def guarded(
    neutral: Callable[[], R], *, is_always_run: bool = False
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Makes a method answer ``neutral()`` once reuse is out of service, and when it raises.

    Args:
        neutral: makes the answer that means "no reuse".
        is_always_run: the method runs out of service too: it ends what was begun.
    """

    def decorate(hook: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(hook)
        def wrapper(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            if self.out_of_service is not None and not is_always_run:
                return neutral()
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:  # supervised: an exception in a hook ends the engine
                if self.out_of_service is None:
                    self.out_of_service = f"{hook.__name__} failed: {error!r}"
                    log.exception("reuse is off until this engine is restarted: %s", self.out_of_service)
                else:  # it may fail in every step
                    log.debug("%s failed out of service", hook.__name__, exc_info=True)
                return neutral()

        return cast("Callable[Concatenate[S, P], R]", wrapper)

    return decorate
