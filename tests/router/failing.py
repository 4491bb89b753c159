"""Engines that fail as they are told, a pool of each role before a router, and a ledger of what every engine was sent.

The ledger is read when a :func:`fleet` ends: whatever else a test is about, no handle may have reached two decode
engines, and no request id two engines of a role, or one of them twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from antiphon.router.app import Router
from tests.router.scripted import DONE, WAIT_S, Client, Reply, ScriptedEngine, Wire, connected, routing
from tests.router.stack import quiet_ports

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
}
COMPLETIONS, CHAT = BODIES
WORDS = ("one", " two", " three")


@dataclass
class Sight:
    """One request as an engine got it."""

    engine: FailingEngine
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value

    @property
    def request_id(self) -> str:
        return self.headers["x-request-id"]

    @property
    def token(self) -> str:
        """The id without the addresses that it may name: what tells two requests of one engine apart."""
        return self.request_id.rpartition("_")[2]

    @property
    def handle(self) -> str | None:
        """The name of the prefill whose KV it is to pull."""
        params = self.json.get("kv_transfer_params") or {}
        name: str | None = params.get("remote_request_id") if params.get("do_remote_prefill") else None
        return name


Script = Callable[[Sight, Wire], Awaitable[None]]


class FailingEngine:
    """An engine behind an address that stays its own: it serves, refuses connections, or takes none and refuses none.

    ``script`` is what it does with an inference request; the scripts in ``next`` go first, once each.
    """

    def __init__(self, role: str, number: int, script: Script) -> None:
        self.name = f"{role[0].upper()}{number}"
        self.script = script
        self.next: list[Script] = []
        self.port = quiet_ports(1)
        self._is_known = False
        self.life = 1
        self.is_healthy = True
        self.num_probes = 0
        self.sights: list[Sight] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._hole = contextlib.ExitStack()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    async def listen(self) -> None:
        """Serve, from here on. Before anybody knows its address, a port that is taken is replaced by another."""
        self._hole.close()
        for tries_left in range(0 if self._is_known else 4, -1, -1):
            try:
                self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not tries_left:
                    raise
                self.port = quiet_ports(1)
        self._is_known = True

    def refuse(self) -> None:
        """Be gone: connections are refused, and those that there are, cut."""
        self._hole.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()

    def swallow(self) -> None:
        """Neither take connections nor refuse them: a listener whose queue is full."""
        self.refuse()
        listener = self._hole.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(0)
        for _ in range(4):
            filler = self._hole.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())

    async def restart(self) -> None:
        """Another life of the engine behind the same address: its KV is gone, and its id is another."""
        self.refuse()
        self.life += 1
        await self.listen()

    def cut_idle(self) -> None:
        """Close every connection, as a server does with those that were idle for long."""
        for writer in self._writers:
            writer.close()

    async def close(self) -> None:
        self.refuse()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        self._writers.add(writer)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._writers.discard(writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                path = head[0].split(" ")[1]
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if path == "/health":
                    self.num_probes += 1
                    wire.whole(b"", status=200 if self.is_healthy else 503)
                    continue
                sight = Sight(self, path, headers, body)
                self.sights.append(sight)
                await (self.next.pop(0) if self.next else self.script)(sight, wire)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the router or a script closed it
        finally:
            writer.close()


# ---- what an engine does with a request ------------------------------------------------------------------------------


def handle_of(sight: Sight) -> dict[str, Any]:
    """What a prefill engine answers in ``kv_transfer_params``."""
    engine = sight.engine
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"{engine.name}-life-{engine.life}",
        "remote_request_id": f"{engine.name}-life-{engine.life}-{sight.request_id}",
        "remote_block_ids": [[len(engine.sights)]],
        "remote_host": "127.0.0.1",
        "remote_port": engine.port,
    }


USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


async def prefills(sight: Sight, wire: Wire) -> None:
    """A prefill engine: a handle at once."""
    details = {"prompt_tokens_details": {"cached_tokens": 2}}
    wire.whole(json.dumps({"id": "p", "kv_transfer_params": handle_of(sight), "usage": USAGE | details}).encode())


async def prefills_without_a_handle(_: Sight, wire: Wire) -> None:
    wire.whole(json.dumps({"id": "p", "kv_transfer_params": None, "usage": USAGE}).encode())


def event(path: str, word: str) -> bytes:
    """One event of a stream."""
    choice = {"index": 0, "text": word} if path == COMPLETIONS else {"index": 0, "delta": {"content": word}}
    return f"data: {json.dumps({'id': 'd', 'choices': [choice]})}\n\n".encode()


async def decodes(sight: Sight, wire: Wire) -> None:
    """A decode engine: the words, streamed if that is asked for."""
    if sight.json.get("stream"):
        wire.begin()
        for word in WORDS:
            wire.piece(event(sight.path, word))
        wire.piece(DONE)
        wire.end()
    else:
        text = "".join(WORDS)
        choice = {"text": text} if sight.path == COMPLETIONS else {"message": {"role": "assistant", "content": text}}
        wire.whole(json.dumps({"id": "d", "choices": [{"index": 0} | choice]}).encode())


def responds(status: int, *fields: str) -> Script:
    """Answer with an error as vLLM words it, and header ``fields``."""

    async def script(_: Sight, wire: Wire) -> None:
        error = {"message": f"said {status} by an engine", "type": "Word", "param": None, "code": status}
        body = json.dumps({"error": error}).encode()
        head = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}", *fields]
        wire.writer.write("\r\n".join([*head, "", ""]).encode() + body)

    return script


async def resets(_: Sight, wire: Wire) -> None:
    """Take the request, and reset the connection before a byte of the answer."""
    raw = wire.writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.writer.transport.abort()
    raise ConnectionResetError


async def cuts(_: Sight, wire: Wire) -> None:
    """Begin a whole answer, and close in the middle of it."""
    wire.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{")
    await wire.writer.drain()
    wire.cut()


async def babbles(_: Sight, wire: Wire) -> None:
    """Answer with something that is not HTTP."""
    wire.writer.write(b"\x00\x01 this is no HTTP \xff\r\n\r\n")
    await wire.writer.drain()
    wire.cut()


async def answers_no_json(_: Sight, wire: Wire) -> None:
    wire.whole(b'{"id": "p", "kv_transfer_params"')


async def hangs(_: Sight, wire: Wire) -> None:
    await wire.until_closed()


def streams_then(words: int, end: Script) -> Script:
    """Stream some words, then do something else with the connection."""

    async def script(sight: Sight, wire: Wire) -> None:
        wire.begin()
        for word in WORDS[:words]:
            wire.piece(event(sight.path, word))
        await wire.writer.drain()
        await end(sight, wire)

    return script


# ---- the fleet -------------------------------------------------------------------------------------------------------


@dataclass
class Fleet:
    """Engines and a router before them; what is asked here goes through the router only."""

    prefill: list[FailingEngine]
    decode: list[FailingEngine]
    router: Router
    asked: list[Reply] = field(default_factory=list)

    @property
    def engines(self) -> list[FailingEngine]:
        return [*self.prefill, *self.decode]

    def once(self, role: str, *scripts: Script) -> None:
        """The next requests to a pool suffer ``scripts``, whichever engines they go to."""
        left = list(scripts)

        def shared(normal: Script) -> Script:
            async def script(sight: Sight, wire: Wire) -> None:
                await (left.pop(0) if left else normal)(sight, wire)

            return script

        for engine in self.pool(role):
            engine.script = shared(engine.script)

    def always(self, role: str, script: Script) -> None:
        """Every request to a pool suffers ``script``."""
        for engine in self.pool(role):
            engine.script = script

    def pool(self, role: str) -> list[FailingEngine]:
        return self.prefill if role == "prefill" else self.decode

    def sights(self, role: str) -> list[Sight]:
        return [sight for engine in self.pool(role) for sight in engine.sights]

    def num_sights(self, role: str) -> int:
        return len(self.sights(role))

    async def ask(self, path: str = COMPLETIONS, **fields: Any) -> Reply:
        """One inference request on a connection of its own."""
        async with connected(self.router) as client:
            self.send(client, path, **fields)
            reply = await client.reply()
        self.asked.append(reply)
        return reply

    @staticmethod
    def send(client: Client, path: str = COMPLETIONS, **fields: Any) -> None:
        body = json.dumps(BODIES[path] | fields).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        client.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def get(self, path: str) -> Reply:
        async with connected(self.router) as client:
            client.writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
            return await client.reply()

    async def receipt(self, reply: Reply) -> dict[str, Any]:
        """The receipt that an answer names, once its request is over."""

        async def closed() -> dict[str, Any] | None:
            answer = await self.get(f"/receipts/{reply.headers['x-antiphon-receipt']}")
            receipt: dict[str, Any] = json.loads(answer.body)
            return receipt if receipt["outcome"] else None

        receipt: dict[str, Any] = await eventually(closed, "the receipt is closed")
        return receipt

    async def samples(self, name: str, *labels: str) -> float:
        """The sum of the router's samples called ``name`` that carry all ``labels`` (``role="decode"``)."""
        found = 0.0
        for line in (await self.get("/metrics")).body.decode().splitlines():
            series, _, value = line.rpartition(" ")
            given = series.partition("{")[2].rstrip("}").split(",")
            if series.partition("{")[0] == f"antiphon_router_{name}" and set(labels) <= set(given):
                found += float(value)
        return found

    async def states(self, role: str) -> dict[str, str]:
        """What the router believes of the engines of a role: name by name."""
        status = json.loads((await self.get("/status")).body)
        by_url = {each["url"]: each["state"] for each in status["engines"]}
        return {engine.name: by_url[engine.url] for engine in self.pool(role)}

    async def wait_idle(self) -> None:
        """Nothing is in progress, and no engine is thought to have anything."""

        async def is_idle() -> bool:
            return not (await self.samples("active_requests") or await self.samples("engine_active_requests"))

        await eventually(is_idle, "nothing is in progress")


async def eventually(holds: Callable[[], Awaitable[Any]], what: str, timeout_s: float = WAIT_S) -> Any:
    """Ask again and again until the answer is true; returns it."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while not (answer := await holds()):
        assert asyncio.get_running_loop().time() < deadline_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.01)
    return answer


def check_ledger(engines: list[FailingEngine]) -> None:
    """No handle reached two engines, none was sent twice, and no two requests to engines of a role had one id."""
    sights = [sight for engine in engines for sight in engine.sights]
    pulls = Counter(sight.handle for sight in sights if sight.handle)
    freed = {sight.handle for sight in sights if str(sight.json.get("cache_salt", "")).startswith("antiphon-free-")}
    # A decode engine that refused a request has pulled nothing: its KV is freed by one more request, of one token.
    assert all(number == 1 or (number == 2 and handle in freed) for handle, number in pulls.items()), pulls
    ids = Counter((sight.engine.name[0], sight.token) for sight in sights if "x-request-id" in sight.headers)
    assert not [key for key, number in ids.items() if number > 1], ids


def check_answered(reply: Reply, path: str, *, stream: bool) -> None:
    """The words of the decode engine, whole."""
    assert reply.status == 200, (reply.status, reply.body)
    assert not reply.is_cut
    if stream:
        assert reply.body == b"".join(event(path, word) for word in WORDS) + DONE
    else:
        (choice,) = json.loads(reply.body)["choices"]
        assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == "".join(WORDS)


ERROR_TYPES = {429: "rate_limit_error", 502: "upstream_error", 503: "service_unavailable", 504: "timeout_error"}


def check_refused(reply: Reply, status: int, code: str) -> None:
    """An error of the router's own: OpenAI-shaped, and it names no engine."""
    assert reply.status == status, (reply.status, reply.body)
    error = json.loads(reply.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert (error["type"], error["code"]) == (ERROR_TYPES[status], code)
    assert error["message"]
    assert b"127.0.0.1" not in reply.body
    assert reply.headers["content-type"] == "application/json"
    assert ("retry-after" in reply.headers) == (status in (429, 503))


def check_ended_with_error(reply: Reply, path: str, words: int, status: int) -> None:
    """A stream that had begun: whole events, an error event, [DONE]."""
    assert (reply.status, reply.is_cut) == (200, False)
    *events, error, done, rest = reply.body.split(b"\n\n")
    assert (done + b"\n\n", rest) == (DONE, b"")
    assert b"".join(each + b"\n\n" for each in events) == b"".join(event(path, word) for word in WORDS[:words])
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == status


@contextlib.asynccontextmanager
async def fleet(num_prefill: int = 2, num_decode: int = 2, **knobs: object) -> AsyncIterator[Fleet]:
    """Engines that work, and a router that has found them healthy; its ledger is checked at the end."""
    prefill = [FailingEngine("prefill", number, prefills) for number in range(1, num_prefill + 1)]
    decode = [FailingEngine("decode", number, decodes) for number in range(1, num_decode + 1)]
    engines = [*prefill, *decode]
    try:
        for engine in engines:
            await engine.listen()
        async with routing(as_scripted(prefill), as_scripted(decode), **knobs) as router:
            made = Fleet(prefill, decode, router)
            yield made
            await made.wait_idle()
        check_ledger(engines)
    finally:
        for engine in engines:
            await engine.close()


def as_scripted(engines: list[FailingEngine]) -> list[ScriptedEngine]:
    """What :func:`routing` takes: it reads their URLs only."""
    return [ScriptedEngine(_unused, engine.port) for engine in engines]


async def _unused(*_: object) -> None:
    raise AssertionError("the engine behind this address is another one")
