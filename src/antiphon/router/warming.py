"""Warms new pairs: the first transfer between two engines needs a handshake, which may take seconds, so it is done with
a request of the router's own and not with a client's.

An endpoint that is added at run time is held: it gets no request until its pairs with every engine of the other role
that answers were tried, or until ``warm_timeout_s`` has passed; then it is opened in any case. It is opened before, and
warmed beside its traffic, while all its warm-ups wait for engines of the other role and none for itself: they are full,
and an engine more is what is needed. An engine that has come back in another life is warmed beside its traffic.

Owns the endpoints that wait for this, each at most once, and a handful of tasks that end when none waits. A warm-up is
no client's request: it has no receipt and counts in no metric but its own. Its prompt has a salt of its own, so that
its KV is never found again.

Invariant: every held endpoint is opened, drained or removed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from antiphon.config.router_spec import RouterSpec
from antiphon.core.errors import ProtocolError, UpstreamError
from antiphon.observe.router_metrics import RouterMetrics
from antiphon.protocol import json
from antiphon.protocol.handoff import PREFILL_PARAMS
from antiphon.protocol.openai import JSON
from antiphon.protocol.prefill_answer import read_prefill_answer
from antiphon.router.engines import Engines
from antiphon.routing.endpoint import Endpoint, Role
from antiphon.routing.fleet import Fleet
from antiphon.routing.states import EndpointState
from antiphon.transport.http.client import HttpPool, request_head
from antiphon.transport.http.message import HttpResponse

log = logging.getLogger("antiphon.router")

ENDPOINTS_AT_ONCE = 4
PARTNERS_AT_ONCE = 4
"""With each of those endpoints: a router of a thousand engines sends at most sixteen warm-ups at a time."""
TRIES_MAX = 2
"""Of a pair."""
ASK_INTERVAL_S = 0.25
"""Between two questions whether an added engine answers yet."""
PATIENCE_S = 5.0
"""With partners none of which lets a pair become warm: longer than any handshake takes."""
PROMPT_MAX_TOKENS = 144
"""More than a block of any engine (128 on a CPU), so that there is a block to pull."""
FIRST_TOKEN_ID = 100
NUM_TOKEN_IDS = 50
"""Token ids that every vocabulary has."""


class _WarmUpFailed(Exception):
    """One try to warm a pair has failed; the text says how. ``is_final``: another try would fail too."""

    def __init__(self, text: str, *, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class _Model:
    """What an engine serves."""

    name: str
    num_tokens: int
    """Length of the warm-up's prompt."""


class Warming:
    """The warm-ups of one router."""

    def __init__(self, spec: RouterSpec, fleet: Fleet, engines: Engines, metrics: RouterMetrics) -> None:
        # Engines that hand over through cache servers never meet: there is no handshake.
        self.is_on = spec.warm_pairs and spec.vllm_pd_disaggregation and spec.handoff == "nixl"
        self._warms_at_start = self.is_on and spec.warm_pairs_at_start
        self._timeout_s = spec.warm_timeout_s
        self._connect_timeout_s = spec.connect_timeout_s
        self._fleet = fleet
        self._engines = engines
        self._metrics = metrics
        self._waiting: dict[Endpoint, float] = {}
        """Endpoints to be warmed, in the order in which they came, and when each is given up."""
        self._lives: dict[Endpoint, int] = {}
        """The life in which an endpoint was last warmed, or seen at the start."""
        self._busy: dict[tuple[Endpoint, Endpoint], asyncio.Event] = {}
        """The pairs that are being warmed, and what tells the end of it."""
        self._asked: dict[tuple[Endpoint, Endpoint], Endpoint] = {}
        """By pair that is being warmed, which of the two has to answer now."""
        self._workers: set[asyncio.Task[None]] = set()
        if self.is_on:
            for pool in (fleet.prefill, fleet.decode):
                pool.when_gone(self._forget)
                pool.when_changed(self._changed)
                pool.when_restarted(self._restarted)

    def add(self, endpoint: Endpoint) -> None:
        """Warm its pairs; if it is held, open it then."""
        if endpoint in self._waiting:
            return
        self._lives[endpoint] = endpoint.life
        self._waiting[endpoint] = asyncio.get_running_loop().time() + self._timeout_s
        if len(self._workers) < ENDPOINTS_AT_ONCE:
            worker = asyncio.get_running_loop().create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    async def stop(self) -> None:
        """Warm no more."""
        self._waiting.clear()
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(list(self._workers))

    # -- which endpoints --------------------------------------------------------------------------------------------

    def _changed(self, endpoint: Endpoint, before: EndpointState) -> None:
        if endpoint.state is EndpointState.READY:
            self._restarted(endpoint)

    def _restarted(self, endpoint: Endpoint) -> None:
        """It answers: in another life than before?"""
        seen = self._lives.get(endpoint, -1 if self._warms_at_start else 0)
        if endpoint.life != seen and self._partners(endpoint):
            self.add(endpoint)

    def _forget(self, endpoint: Endpoint) -> None:
        self._waiting.pop(endpoint, None)
        self._lives.pop(endpoint, None)

    def _partners(self, endpoint: Endpoint) -> list[Endpoint]:
        """Those of the other role that answer and with which it is cold."""
        return [
            one
            for one in self._others(endpoint)
            if (one.is_usable or one.is_held) and one.url != endpoint.url and not self._is_warm(endpoint, one)
        ]

    def _others(self, endpoint: Endpoint) -> list[Endpoint]:
        other: Role = "decode" if endpoint.role == "prefill" else "prefill"
        return self._fleet.pool(other).endpoints

    def _is_warm(self, one: Endpoint, other: Endpoint) -> bool:
        return self._fleet.pairs.is_warm(*_pair(one, other))

    # -- the work ---------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while self._waiting:
            endpoint = next(iter(self._waiting))
            deadline_s = self._waiting.pop(endpoint)
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._warm(endpoint)
            except TimeoutError:
                log.warning("%s engine %s is not warm after %g s", endpoint.role, endpoint.address, self._timeout_s)
            except Exception:  # supervised: a bug here must not keep an endpoint closed for ever
                log.exception("warming %s engine %s failed", endpoint.role, endpoint.address)
            self._open(endpoint)

    def _open(self, endpoint: Endpoint) -> None:
        if not endpoint.is_held:
            return  # it never was, or an operator has drained or removed it meanwhile
        pool = self._fleet.pool(endpoint.role)
        pool.open(endpoint)
        if any(self._is_warm(endpoint, one) for one in self._others(endpoint)):
            pool.health_succeeded(endpoint, time.monotonic())  # it has served a request
        else:
            self._engines.hasten(endpoint)

    async def _warm(self, endpoint: Endpoint) -> None:
        """Warm its pairs, some at a time."""
        model = await self._model(endpoint)
        if model is None:
            return
        partners = self._partners(endpoint)
        if not partners:
            log.info("%s engine %s has no partner to be warmed with", endpoint.role, endpoint.address)
        rest = iter(partners)

        async def warm_some() -> None:
            for partner in rest:
                await self._warm_pair(*_pair(endpoint, partner), model)

        async with asyncio.TaskGroup() as group:
            waiting = {group.create_task(warm_some()) for _ in range(min(PARTNERS_AT_ONCE, len(partners)))}
            num_warm = 0
            while waiting:
                _, waiting = await asyncio.wait(waiting, timeout=PATIENCE_S)
                before, num_warm = num_warm, sum(self._is_warm(endpoint, one) for one in partners)
                if waiting and num_warm == before and self._waits_for(partners, endpoint):
                    log.info(
                        "%s engine %s takes requests before its pairs are warm: the others do not answer yet",
                        endpoint.role,
                        endpoint.address,
                    )
                    self._open(endpoint)

    def _waits_for(self, partners: list[Endpoint], endpoint: Endpoint) -> bool:
        """Whether all that is under way for it waits for its partners, and none for itself."""
        asked = [self._asked.get(_pair(endpoint, one)) for one in partners]
        return endpoint.is_held and any(asked) and endpoint not in asked

    async def _model(self, endpoint: Endpoint) -> _Model | None:
        """What it serves, as soon as it answers. An engine that is held may be starting still; any other has one try,
        and None if it does not answer."""
        while True:
            try:
                answer = await self._ask(endpoint, "GET", "/v1/models")
                return _model_of(answer)
            except (UpstreamError, _WarmUpFailed) as error:
                if not endpoint.is_held:
                    log.warning("%s engine %s cannot be warmed: %s", endpoint.role, endpoint.address, error)
                    return None
            await asyncio.sleep(ASK_INTERVAL_S)

    async def _warm_pair(self, prefill: Endpoint, decode: Endpoint, model: _Model) -> None:
        """Warm one pair. Where both are being warmed, one of them does it, and the other waits for it."""
        pair = prefill, decode
        busy = self._busy.get(pair)
        if busy is not None:
            await busy.wait()
            return
        done = self._busy[pair] = asyncio.Event()
        try:
            await self._try_pair(prefill, decode, model)
        finally:
            del self._busy[pair]
            self._asked.pop(pair, None)
            done.set()

    async def _try_pair(self, prefill: Endpoint, decode: Endpoint, model: _Model) -> None:
        """Warm one pair, or leave it cold after ``TRIES_MAX`` tries."""
        for _ in range(TRIES_MAX):
            if self._fleet.pairs.is_warm(prefill, decode):
                return
            lives = prefill.life, decode.life
            try:
                engine_id = await self._pull(prefill, decode, model)
            except (UpstreamError, ProtocolError, _WarmUpFailed) as error:
                self._asked.pop((prefill, decode), None)  # nobody's answer is waited for
                self._metrics.pair_warmups.labels("failed").inc()
                log.warning(
                    "warming prefill engine %s with decode engine %s failed: %s", prefill.address, decode.address, error
                )
                if isinstance(error, _WarmUpFailed) and error.is_final:
                    return
                await asyncio.sleep(ASK_INTERVAL_S)
                continue
            self._metrics.pair_warmups.labels("warmed").inc()
            if EndpointState.REMOVED not in (prefill.state, decode.state) and lives == (prefill.life, decode.life):
                self._fleet.prefill.saw_engine(prefill, engine_id)
                self._fleet.pairs.warm(prefill, decode)
                log.info("prefill engine %s and decode engine %s are warm", prefill.address, decode.address)
                return

    async def _pull(self, prefill: Endpoint, decode: Endpoint, model: _Model) -> str:
        """Let ``decode`` pull a prompt from ``prefill``; returns the engine id that the handle names.

        Raises:
            UpstreamError, ProtocolError, _WarmUpFailed: it did not.
        """
        token = secrets.token_hex(8)
        path, request_id = "/v1/completions", f"warm-{token}"
        pair = prefill, decode
        self._asked[pair] = prefill
        prefilled = await self._ask(prefill, "POST", path, _body(model, token, PREFILL_PARAMS), f"{request_id}-p")
        answer = read_prefill_answer(prefilled.body)
        if answer.kv_transfer_params is None:
            raise _WarmUpFailed(
                "the prefill engine returns no kv_transfer_params: it is not started for a hand-over", is_final=True
            )
        self._asked[pair] = decode
        await self._ask(decode, "POST", path, _body(model, token, answer.kv_transfer_params), f"{request_id}-d")
        return answer.engine_id

    async def _ask(
        self, endpoint: Endpoint, method: str, path: str, body: bytes | None = None, request_id: str = ""
    ) -> HttpResponse:
        """An answer of 200, over a connection of its own: a warm-up takes none from requests.

        Raises:
            UpstreamError: there is no answer.
            _WarmUpFailed: it is another one.
        """
        parts = urlsplit(endpoint.url)
        assert parts.hostname is not None and parts.port is not None
        fields: list[tuple[bytes, bytes]] = [(b"accept", b"*/*"), *self._engines.access.fields]
        if body is not None:
            fields += [(b"content-type", JSON), (b"x-request-id", request_id.encode())]
        head = request_head(method, path, endpoint.address, fields, length=None if body is None else len(body))
        pool = HttpPool(parts.hostname, parts.port, connections_max=1, connect_timeout_s=self._connect_timeout_s)
        try:
            response = await pool.fetch([head + (body or b"")], timeout_s=self._timeout_s)
        finally:
            pool.close()
        if response.status != 200:
            raise _WarmUpFailed(
                f"the {endpoint.role} engine answers {path} with {response.status}",
                is_final=400 <= response.status < 500 and response.status != 429,
            )
        return response


def _pair(one: Endpoint, other: Endpoint) -> tuple[Endpoint, Endpoint]:
    """Prefill first."""
    return (one, other) if one.role == "prefill" else (other, one)


def _body(model: _Model, token: str, params: bytes) -> bytes:
    """A request of one token with these ``kv_transfer_params``."""
    prompt = [FIRST_TOKEN_ID + number % NUM_TOKEN_IDS for number in range(model.num_tokens)]
    fields: dict[str, object] = {"model": model.name, "prompt": prompt, "max_tokens": 1, "min_tokens": 1}
    fields |= {"stream": False, "temperature": 0, "cache_salt": f"antiphon-warm-{token}"}
    return json.encode(fields)[:-1] + b',"kv_transfer_params":%b}' % params


def _model_of(response: HttpResponse) -> _Model:
    """The first model of a list of models.

    Raises:
        _WarmUpFailed: there is none.
    """
    try:
        answer = json.decode(response.body)
    except ProtocolError:
        answer = None
    models = answer.get("data") if isinstance(answer, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("id") if isinstance(first, dict) else None
    if not isinstance(first, dict) or not isinstance(name, str):
        raise _WarmUpFailed("the engine names no model", is_final=True)
    room = first.get("max_model_len")
    num_tokens = min(PROMPT_MAX_TOKENS, room // 2) if isinstance(room, int) else PROMPT_MAX_TOKENS
    return _Model(name, max(1, num_tokens))
