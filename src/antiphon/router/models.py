"""``/v1/models``: which engine's list of models the client gets.

Owns the order and the number of those that are asked. Engines of one router serve the same models: the first list is
the answer, and lists are not merged. An engine that is slow gets company soon, so that one that hangs delays nobody.

Invariant: when an answer is chosen, nobody is being asked any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from antiphon.core.errors import UpstreamError
from antiphon.router.engines import Engines
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.states import EndpointState
from antiphon.transport.http.client import request_head
from antiphon.transport.http.message import HttpRequest, HttpResponse

ASKED_MAX = 4
"""Engines that are asked at once: with many engines, one request must not cost as many."""
HEAD_START_S = 0.05
"""How long the engines that are asked have before one more is."""

AskOne = Callable[[Endpoint], Coroutine[Any, Any, "HttpResponse | None"]]


async def first_answer(known: Iterable[Endpoint], ask: AskOne, timeout_s: float) -> HttpResponse | None:
    """The first 200; where there is none, the first answer that is no error of the engine's own (below 500); or None.

    Args:
        known: whom to ask, in this order.
        ask: returns the answer of one, or None where there is none; it is cancelled when another's is chosen.
        timeout_s: for all of them together.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    others, asked = deque(known), set[asyncio.Task[HttpResponse | None]]()
    second_best: HttpResponse | None = None
    try:
        while (others or asked) and (left_s := end_s - loop.time()) > 0:
            if others and len(asked) < ASKED_MAX:
                asked.add(loop.create_task(ask(others.popleft())))
            has_more = bool(others) and len(asked) < ASKED_MAX
            patience_s = min(left_s, HEAD_START_S) if has_more else left_s
            done, asked = await asyncio.wait(asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for response in filter(None, [task.result() for task in done]):
                if response.status == 200:
                    return response
                if response.status < 500:
                    second_best = second_best or response
        return second_best
    finally:
        for task in asked:
            task.cancel()
        if asked:
            await asyncio.wait(asked)


async def ask_for_models(
    engines: Engines, request: HttpRequest, timeout_s: float, endpoint: Endpoint
) -> HttpResponse | None:
    """One engine's answer to the client's request; None where it gives none."""
    if endpoint.state is EndpointState.REMOVED:
        return None  # while others were asked
    pool = engines.pool(endpoint)
    head = request_head("GET", request.target, pool.authority, engines.access.forwarded_lines(request), length=None)
    try:
        return await pool.fetch([head], timeout_s=timeout_s)
    except UpstreamError:
        return None
