"""What is where: the blocks that engines say they hold, the chunks that cache servers say they hold, and the tokens
that a prompt is turned into to be looked up in either.

Owns the two indexes, and what keeps them in step: the socket that hears engines' KV events, a follower of each cache
server, and the questions to engines' tokenizers. A claim that is wrong costs time, never a wrong answer: an engine that
does not hold what was claimed computes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from antiphon.config.router_spec import RouterSpec
from antiphon.observe.aware_metrics import WhereView
from antiphon.observe.receipt import Receipt
from antiphon.protocol import json
from antiphon.protocol.body import Body
from antiphon.protocol.tokenizing import known_tokens, tokenize_body
from antiphon.router.chunk_follower import ChunkFollower
from antiphon.router.kv_events import KvEvents, KvEventsOptions, resolver
from antiphon.router.tokenizing import Tokenizing, TokenizingOptions
from antiphon.routing.ask import Prompt
from antiphon.routing.chunk_index import ChunkIndex, scope_of
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.fleet import Fleet
from antiphon.routing.kv_aware import KvAware

if TYPE_CHECKING:
    from antiphon.observe.token_sources import Leg
    from antiphon.router.engines import Engines

_NOTHING: Final[dict[str, int]] = {}


class Whereabouts:
    """What one router knows of what its engines and cache servers hold.

    Args:
        spec: whether KV events are heard, which cache servers are followed, how long tokens are waited for.
        fleet: whose engines are asked; its ``kv_index`` is kept in step here.
        engines: the connections to them.
    """

    def __init__(self, spec: RouterSpec, fleet: Fleet, engines: Engines) -> None:
        self._fleet = fleet
        self._kv_index = fleet.kv_index
        self.events: KvEvents | None = None
        if spec.kv_events_port is not None:
            host = "127.0.0.1" if spec.kv_events_host == "localhost" else spec.kv_events_host  # ZMQ binds no names
            options = KvEventsOptions(host=host, port=spec.kv_events_port, num_ranks=spec.kv_events_ranks)
            self.events = KvEvents(self._kv_index, resolver(fleet.all), options)
        self.chunks = ChunkIndex()
        self._followers = [
            ChunkFollower(url, spec.connect_timeout_s, self.chunks) for url in dict.fromkeys(spec.cache_servers)
        ]
        tokenizing = TokenizingOptions(wait_s=spec.tokenize_timeout_s) if spec.tokenize_timeout_s else None
        self._tokenizing = (
            Tokenizing(engines.pool, tokenizing, engines.access.fields) if tokenizing is not None else None
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._turn = 0
        for pool in (fleet.prefill, fleet.decode):
            pool.when_gone(self._forget)
            pool.when_restarted(self._forget)

    async def start(self) -> None:
        """Listen, and follow.

        Raises:
            StartError: the port for KV events cannot be bound.
        """
        if self.events is not None:
            await self.events.start()
        self._tasks = [asyncio.create_task(follower.run()) for follower in self._followers]

    async def stop(self) -> None:
        """End everything."""
        if self.events is not None:
            self.events.close()
        if self._tokenizing is not None:
            self._tokenizing.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []

    # -- tokens -----------------------------------------------------------------------------------------------------

    def question(self, path: str, body: Body, prompt: Prompt) -> bytes | None:
        """What an engine is to be asked for the prompt's tokens; None where there is nothing to ask, or the prompt is
        tokens already."""
        tokens = known_tokens(path, body.values)
        if tokens is not None:
            prompt.token_ids = tokens
            prompt.num_tokens = len(tokens)
            return None
        return tokenize_body(path, body.values) if self._tokenizing is not None else None

    async def tokenize(self, question: bytes, prompt: Prompt) -> None:
        """Give the prompt its tokens, if they are known in time."""
        endpoint = self._tokenizer()
        if self._tokenizing is None or endpoint is None:
            return
        tokens = await self._tokenizing.token_ids(endpoint, question, prompt.scope)
        if tokens is not None:
            prompt.token_ids = tokens
            prompt.num_tokens = len(tokens)

    def _tokenizer(self) -> Endpoint | None:
        """An engine to ask, in turn: of the pool with fewer requests for each engine."""
        pools = [pool for pool in (self._fleet.prefill, self._fleet.decode) if pool.ready]
        if not pools:
            return None
        ready = min(pools, key=lambda pool: pool.num_active / len(pool.ready)).ready
        self._turn += 1
        return ready[self._turn % len(ready)]

    # -- what is held -----------------------------------------------------------------------------------------------

    def know(self, receipt: Receipt, body: Body, prompt: Prompt, salt: str) -> None:
        """A request with this prompt is to be placed.

        Args:
            salt: under which engines look for its KV; empty where there is none.
        """
        model = body.get("model") or b""
        name = json.text_in(model)
        self._kv_index.know_scope(prompt.scope, name if self._kv_index.is_adapter(name) else "", salt)
        receipt.chunk_scope = scope_of(model, salt.encode())

    def held(self, receipt: Receipt, prompt: Prompt) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Tokens of the prompt that each decode engine holds, and that its cache server does, by ``host:port``."""
        tokens = prompt.token_ids
        if tokens is None:
            return _NOTHING, _NOTHING
        ready = self._fleet.decode.ready
        held = self._kv_index.match_prompt(prompt, ready)
        by_engine = {endpoint.address: num for endpoint, num in zip(ready, held, strict=True) if num}
        try:
            by_server = self.chunks.held_by_engines(receipt.chunk_scope or b"", tokens)
        except ValueError:  # numbers that are no token ids: the engine is to say so
            by_server = {}
        return by_engine, by_server

    def most_held(self, prompt: Prompt) -> int | None:
        """Tokens of the prompt that the prefill engine with most of it holds; None where its tokens are not known, or
        no prefill engine says what it holds."""
        index, ready = self._kv_index, self._fleet.prefill.ready
        if not index.knows(prompt) or not any(index.hears(endpoint) for endpoint in ready):
            return None
        return max(index.match_prompt(prompt, ready))

    def learn(self, receipt: Receipt, leg: Leg, server: str, namespace: bytes) -> None:
        """An engine has reported under which namespace a request's chunks are kept."""
        engine = receipt.decode if leg == "decode" else receipt.prefill
        if engine is not None and receipt.chunk_scope is not None:
            self.chunks.learn(receipt.chunk_scope, engine, server, namespace)

    def statistics(self) -> dict[str, object]:
        """For people."""
        return {
            "kv_events": self.events.statistics() if self.events is not None else None,
            "cache_servers": [follower.status() for follower in self._followers],
            "tokenize": self._tokenizing.statistics() if self._tokenizing is not None else None,
            "kv_aware_picks": {f"{role}_{how}": number for (role, how), number in self._picks().items()},
        }

    def view(self) -> WhereView:
        """For metrics."""
        events = self.events.statistics() if self.events is not None else {}
        return WhereView(
            events={name: value for name, value in events.items() if isinstance(value, int)},
            blocks=self.events.num_blocks() if self.events is not None else {},
            tokenize=self._tokenizing.statistics() if self._tokenizing is not None else {},
            chunks={follower.url: self.chunks.num_chunks(follower.url) for follower in self._followers},
            picks=self._picks(),
        )

    def _picks(self) -> dict[tuple[str, str], int]:
        numbers: dict[tuple[str, str], int] = {}
        for pool in (self._fleet.prefill, self._fleet.decode):
            if isinstance(pool.picker, KvAware):
                numbers[pool.role, "precise"] = pool.picker.num_precise
                numbers[pool.role, "approximate"] = pool.picker.num_approximate
        return numbers

    def _forget(self, endpoint: Endpoint) -> None:
        self.chunks.forget_engine(endpoint.address)
