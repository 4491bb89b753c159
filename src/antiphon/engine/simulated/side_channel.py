"""The side channel: how one simulated engine reads another's KV, in place of NIXL.

Owns the messages and both ends. A decode engine reads the bytes of named blocks, keeps leases alive while its requests
wait, and says when blocks are not needed any more. The prefill engine answers any reader with what is in the blocks;
it refuses only what NIXL's handshake refuses: another engine id (an engine that has restarted), another model or block
size.

All calls are POST with a JSON object; ``/kv/read`` answers the bytes of the blocks, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from antiphon.core.errors import ProtocolError, RequestRefused, UpstreamError, UpstreamGarbage
from antiphon.engine.simulated.kv import BLOCK_BYTES
from antiphon.engine.simulated.machine import SimulatedEngine
from antiphon.engine.simulated.requests import Body
from antiphon.engine.simulated.sequence import Effect, RemoteKv
from antiphon.protocol.json import decode, encode
from antiphon.protocol.openai import JSON, error_body
from antiphon.transport.http.client import HttpPool, request_head
from antiphon.transport.http.message import HttpRequest
from antiphon.transport.http.server import Responder

CALL_TIMEOUT_S = 5.0
"""NIXL's handshake waits as long."""

_POOLS_MAX = 256
_Item = TypeVar("_Item", int, str)
_JSON_HEADERS = [(b"content-type", JSON)]


@dataclass(frozen=True)
class ReaderIdentity:
    """What must be equal on both sides, as NIXL's compatibility hash."""

    model_name: str
    block_size_tokens: int


class SideChannelServer:
    """The prefill engine's end.

    Args:
        engine: whose blocks are read.
        engine_id: the id that readers must name.
        perform: what to do with the engine's effects.
    """

    def __init__(self, engine: SimulatedEngine, engine_id: str, perform: Callable[[list[Effect]], None]) -> None:
        self._engine = engine
        self._engine_id = engine_id
        self._perform = perform
        self._identity = ReaderIdentity(engine.options.model_name, engine.kv.block_size_tokens)

    async def handle(self, request: HttpRequest, responder: Responder) -> None:
        """Serve one call; 409 when the reader means another engine, 400 when the call is malformed."""
        try:
            status, content_type, body = 200, *self._answer(request)
        except (ProtocolError, IndexError) as error:
            status = error.status if isinstance(error, RequestRefused) else 400
            content_type, body = JSON, error_body(str(error), status=status)
        responder.send(status, [(b"content-type", content_type)], body)

    def _answer(self, request: HttpRequest) -> tuple[bytes, bytes]:
        body = decode(request.body)
        if not isinstance(body, dict):
            raise ProtocolError("a side-channel call is a JSON object")
        if body.get("engine_id") != self._engine_id:
            raise RequestRefused("this engine has another id; it has restarted", status=409)
        now_ns = time.monotonic_ns()
        if request.path == "/kv/read":
            if ReaderIdentity(str(body.get("model")), _integer(body, "block_size_tokens")) != self._identity:
                raise RequestRefused("the model or the block size of this engine differs", status=409)
            block_ids = _list(body, "block_ids", int)
            return b"application/octet-stream", b"".join(self._engine.read_blocks(_string(body), block_ids))
        if request.path == "/kv/release":
            self._perform(self._engine.release_lease(_string(body), now_ns))
        elif request.path == "/kv/heartbeat":
            for request_id in _list(body, "request_ids", str):
                self._engine.extend_lease(request_id, now_ns)
        else:
            raise ProtocolError(f"there is no side-channel call {request.path}")
        return JSON, b"{}"


class SideChannelClient:
    """The decode engine's end."""

    def __init__(self, identity: ReaderIdentity) -> None:
        self._identity = identity
        self._pools: dict[tuple[str, int], HttpPool] = {}

    async def read(self, remote: RemoteKv, block_ids: tuple[int, ...]) -> list[bytes]:
        """The bytes of ``block_ids``, 32 each.

        Raises:
            UpstreamError: unreachable, late, another engine, or not the bytes that were asked for.
        """
        body: Body = {"engine_id": remote.engine_id, "request_id": remote.request_id, "block_ids": block_ids}
        body |= {"model": self._identity.model_name, "block_size_tokens": self._identity.block_size_tokens}
        data = await self._call(remote.host, remote.port, "/kv/read", body)
        if len(data) != BLOCK_BYTES * len(block_ids):
            raise UpstreamGarbage("the prefill engine sent another number of bytes than was asked for")
        return [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]

    async def release(self, remote: RemoteKv) -> None:
        """Say that the blocks are not needed any more. Raises UpstreamError when that cannot be said."""
        body: Body = {"engine_id": remote.engine_id, "request_id": remote.request_id}
        await self._call(remote.host, remote.port, "/kv/release", body)

    async def heartbeat(self, host: str, port: int, engine_id: str, request_ids: list[str]) -> None:
        """Say that the requests still wait for their KV. Raises UpstreamError when that cannot be said."""
        await self._call(host, port, "/kv/heartbeat", {"engine_id": engine_id, "request_ids": request_ids})

    def close(self) -> None:
        """Cut every connection."""
        for pool in self._pools.values():
            pool.close()

    async def _call(self, host: str, port: int, path: str, body: Body) -> bytes:
        pool = self._pool(host, port)
        data = encode(body)
        head = request_head("POST", path, pool.authority, _JSON_HEADERS, length=len(data))
        response = await pool.fetch([head + data], timeout_s=CALL_TIMEOUT_S)
        if response.status != 200:
            raise UpstreamError(f"the prefill engine refused with status {response.status}")
        return response.body

    def _pool(self, host: str, port: int) -> HttpPool:
        pool = self._pools.get((host, port))
        if pool is None:
            if len(self._pools) >= _POOLS_MAX:
                self._close_idle()
            pool = self._pools[host, port] = HttpPool(host, port)
        return pool

    def _close_idle(self) -> None:
        for address, pool in list(self._pools.items()):
            counts = pool.statistics()
            if counts["open"] == counts["idle"]:
                pool.close()
                del self._pools[address]


def _string(body: Body) -> str:
    value = body.get("request_id")
    if not isinstance(value, str):
        raise ProtocolError("request_id must be a string")
    return value


def _integer(body: Body, key: str) -> int:
    value = body.get(key)
    if type(value) is not int:
        raise ProtocolError(f"{key} must be an integer")
    return value


def _list(body: Body, key: str, kind: type[_Item]) -> list[_Item]:
    values = body.get(key)
    if not isinstance(values, list):
        raise ProtocolError(f"{key} must be a list")
    items = [value for value in values if type(value) is kind]
    if len(items) != len(values):
        raise ProtocolError(f"{key} must hold only values of one type")
    return items
