"""Token ids of prompts: asks an engine's ``/tokenize``, which has the tokenizer and the chat template.

Owns a bounded memory of answers by the digest of the question, and the questions under way: the same question is asked
once at a time. A request is held up for ``wait_s`` at most; an answer that comes later is remembered for the next one.
An engine that fails to answer is left alone for ``pause_s``.

Invariants: at most ``in_flight_max`` questions are under way, none for longer than ``timeout_s``; the memory has at
most ``cache_max_bytes``. Nothing here raises for want of an answer: a request whose tokens are not known is routed
without.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from antiphon.core.errors import ProtocolError, UpstreamError
from antiphon.protocol.openai import JSON
from antiphon.protocol.tokenizing import decode_tokens
from antiphon.routing.endpoint import Endpoint
from antiphon.transport.http.client import HttpPool, request_head
from antiphon.transport.http.deadlines import Deadlines

log = logging.getLogger("antiphon.router")

_ENTRY_BYTES: Final = 200
"""Of an answer, beside its tokens."""
_PAUSES_MAX: Final = 4_096
_NO_SUCH_ROUTE: Final = (404, 405, 501)


@dataclass(frozen=True)
class TokenizingOptions:
    """How engines are asked.

    Args:
        wait_s: a request waits this long for its tokens.
        timeout_s: an engine has this long to answer.
        pause_s: an engine that did not is not asked for so long.
        in_flight_max: questions at once; further requests do without.
        question_max_bytes: a longer one is not asked: it would take its time, and the engine's.
        cache_max_bytes: of answers, 8 bytes a token.
    """

    wait_s: float = 0.020
    timeout_s: float = 2.0
    pause_s: float = 1.0
    in_flight_max: int = 32
    question_max_bytes: int = 1_048_576
    cache_max_bytes: int = 67_108_864


class _Waiter:
    """One request that waits for an answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Sequence[int] | None] = loop.create_future()

    def expire(self) -> None:
        self.answer(None)

    def answer(self, tokens: Sequence[int] | None) -> None:
        if not self.future.done():
            self.future.set_result(tokens)


class Tokenizing:
    """Made on the event loop that it asks on.

    Args:
        pool_of: the connections to an engine; raises ``KeyError`` for one that is gone.
        fields: what engines are shown with each question, their key among it.
    """

    def __init__(
        self,
        pool_of: Callable[[Endpoint], HttpPool],
        options: TokenizingOptions,
        fields: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self._pool_of = pool_of
        self._options = options
        self._fields = [(b"accept", b"*/*"), (b"content-type", JSON), *fields]
        self._loop = asyncio.get_running_loop()
        self._patience = Deadlines(self._loop, options.wait_s)
        self._answers: OrderedDict[bytes, array[int] | None] = OrderedDict()
        self._num_bytes = 0
        self._asked: dict[bytes, list[_Waiter]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused: dict[Endpoint, float] = {}
        self._num_hits = self._num_asked = self._num_shared = 0
        self._num_late = self._num_failed = self._num_not_asked = 0

    async def token_ids(self, endpoint: Endpoint, question: bytes, scope: bytes = b"") -> Sequence[int] | None:
        """The tokens that ``endpoint`` makes of ``question`` (``protocol.tokenizing.tokenize_body``); None where they
        are not known within ``wait_s``.

        Args:
            scope: at most 64 bytes. Answers are remembered for askers of this scope alone: how fast one comes tells
                nobody what others have asked.
        """
        digest = blake2b(question, digest_size=16, key=scope).digest()
        if digest in self._answers:
            self._answers.move_to_end(digest)
            self._num_hits += 1
            return self._answers[digest]
        waiters = self._asked.get(digest)
        if waiters is None:
            if not self._may_ask(endpoint, question):
                self._num_not_asked += 1
                return None
            waiters = self._asked[digest] = []
            task = self._loop.create_task(self._ask(endpoint, question, digest))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._num_shared += 1
        waiter = _Waiter(self._loop)
        waiters.append(waiter)
        self._patience.add(waiter)
        try:
            tokens = await waiter.future
        finally:
            self._patience.remove(waiter)
            if waiter in waiters:
                waiters.remove(waiter)
        return tokens

    def statistics(self) -> dict[str, int]:
        """Counts since the start; ``bytes`` and ``in_flight`` are of now."""
        return {
            "hits": self._num_hits,
            "asked": self._num_asked,
            "shared": self._num_shared,
            "late": self._num_late,
            "failed": self._num_failed,
            "not_asked": self._num_not_asked,
            "bytes": self._num_bytes,
            "in_flight": len(self._asked),
        }

    def close(self) -> None:
        """Ask no more; whoever waits does without."""
        self._patience.close()
        for waiters in self._asked.values():
            for waiter in waiters:
                waiter.answer(None)
        for task in self._tasks:
            task.cancel()

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._num_bytes == sum(map(_size, self._answers.values())) <= self._options.cache_max_bytes
        assert len(self._asked) <= self._options.in_flight_max
        assert len(self._paused) <= _PAUSES_MAX

    def _may_ask(self, endpoint: Endpoint, question: bytes) -> bool:
        options = self._options
        if len(question) > options.question_max_bytes or len(self._asked) >= options.in_flight_max:
            return False
        until_s = self._paused.get(endpoint)
        if until_s is None:
            return True
        if self._loop.time() < until_s:
            return False
        del self._paused[endpoint]
        return True

    async def _ask(self, endpoint: Endpoint, question: bytes, digest: bytes) -> None:
        self._num_asked += 1
        tokens: array[int] | None = None
        try:
            tokens = await self._fetch(endpoint, question)
            self._remember(digest, tokens)
            self._num_late += all(waiter.future.done() for waiter in self._asked[digest])
        except (UpstreamError, ProtocolError, KeyError) as error:
            self._num_failed += 1
            self._pause(endpoint)
            log.info("%s engine %s does not tokenize: %s", endpoint.role, endpoint.address, error)
        finally:
            for waiter in self._asked.pop(digest, ()):
                waiter.answer(tokens)

    async def _fetch(self, endpoint: Endpoint, question: bytes) -> array[int] | None:
        """The tokens; None where the engine refuses this question, which it will do again.

        Raises:
            UpstreamError, ProtocolError: there is no answer that can be used.
            KeyError: the engine is gone.
        """
        pool = self._pool_of(endpoint)
        head = request_head("POST", "/tokenize", pool.authority, self._fields, length=len(question))
        response = await pool.fetch([head + question], timeout_s=self._options.timeout_s)
        if response.status == 200:
            return decode_tokens(response.body)
        if 400 <= response.status < 500 and response.status not in (*_NO_SUCH_ROUTE, 401, 403, 408, 429):
            return None
        raise ProtocolError(f"/tokenize answers with {response.status}")

    def _remember(self, digest: bytes, tokens: array[int] | None) -> None:
        answers, size = self._answers, _size(tokens)
        if size > self._options.cache_max_bytes:
            return
        answers[digest] = tokens
        self._num_bytes += size
        while self._num_bytes > self._options.cache_max_bytes:
            self._num_bytes -= _size(answers.popitem(last=False)[1])

    def _pause(self, endpoint: Endpoint) -> None:
        if len(self._paused) >= _PAUSES_MAX:
            self._paused.clear()
        self._paused[endpoint] = self._loop.time() + self._options.pause_s


def _size(tokens: array[int] | None) -> int:
    return _ENTRY_BYTES + (0 if tokens is None else 8 * len(tokens))
