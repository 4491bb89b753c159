"""The process around the simulated engine: its HTTP API, its side channel, its life.

Owns the routes and the two listening sockets. What it serves beside vLLM's API is under ``/simulated/``, for loopback
clients only: ``POST /simulated/fault``, ``GET /simulated/state``, ``GET /simulated/last``.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial

from antiphon.core.errors import RequestRefused, StartError
from antiphon.engine.simulated import responses
from antiphon.engine.simulated.cache_kv import CacheOptions, SimulatedCache
from antiphon.engine.simulated.driver import EngineDriver
from antiphon.engine.simulated.faults import Fault, FaultPlan
from antiphon.engine.simulated.further_requests import read_generate, read_message, read_response
from antiphon.engine.simulated.generation import Generation, GenerationHooks
from antiphon.engine.simulated.kv_events import KvEventsOptions, KvPublisher
from antiphon.engine.simulated.kv_log import KvLog
from antiphon.engine.simulated.machine import EngineOptions, SimulatedEngine
from antiphon.engine.simulated.metrics import CONTENT_TYPE
from antiphon.engine.simulated.requests import Body, GenerationRequest, RequestReader, parse_body, read_remote
from antiphon.engine.simulated.sequence import Sequence
from antiphon.engine.simulated.side_channel import ReaderIdentity, SideChannelClient, SideChannelServer
from antiphon.engine.simulated.tokenizer import SimulatedTokenizer, decode
from antiphon.protocol.json import encode
from antiphon.protocol.openai import JSON
from antiphon.transport.http.message import HttpLimits, HttpRequest
from antiphon.transport.http.server import HttpServer, Responder
from antiphon.transport.listening import cannot_listen

_JSON_HEADERS = [(b"content-type", JSON)]
_STATUS_FAULTS = {
    "respond_500": (500, "InternalServerError", "Internal server error"),
    "respond_503": (503, "ServiceUnavailableError", "The engine is not available"),
    "respond_429": (429, "TooManyRequestsError", "Too many requests"),
}
_STOP_TIMEOUT_S = 0.5
TRACEPARENT_CHARS_MAX = 128


@dataclass(frozen=True)
class ServerOptions:
    """One process.

    Args:
        engine: the engine in it.
        engine_id: names this life of it in a hand-over; new at each start.
        role: ``prefill`` or ``decode``; shown in its state, and nothing depends on it, as in vLLM.
        host, port: where the HTTP API listens; port 0 is any free one.
        side_channel_host: where decode engines find the side channel, and where it listens.
        side_channel_port: 0 is any free one.
        kv_events: where its KV events are published; None for nowhere.
        cache: its cache server; None without one.
    """

    engine: EngineOptions
    engine_id: str
    role: str = "decode"
    host: str = "127.0.0.1"
    port: int = 0
    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = 0
    kv_events: KvEventsOptions | None = None
    cache: CacheOptions | None = None


class SimulatedServer:
    """The routes of one engine. Made on the event loop that serves it."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        engine = SimulatedEngine(options.engine)
        identity = ReaderIdentity(options.engine.model_name, engine.kv.block_size_tokens)
        self.cache: SimulatedCache | None = None
        if options.cache is not None:
            names = (options.engine_id, options.engine.model_name, engine.kv.block_size_tokens)
            self.cache = SimulatedCache(options.cache, *names)
        self.driver = EngineDriver(engine, SideChannelClient(identity), self.cache)
        self.engine = engine
        self.publisher: KvPublisher | None = None
        if options.kv_events is not None:
            log = KvLog(secrets.token_bytes(16), engine.kv.block_size_tokens)
            self.publisher = KvPublisher(options.kv_events, log)
            engine.log_to(log)
            self.driver.after_step = self.publisher.flush
        self.faults = FaultPlan()
        self.http = HttpServer(self.handle, HttpLimits())
        self.side_channel = HttpServer(SideChannelServer(engine, options.engine_id, self.driver.perform).handle)
        self.side_channel_port = options.side_channel_port
        self.num_aborted_requests = 0
        self.num_requests = 0
        self._reader = RequestReader(
            options.engine.model_name, SimulatedTokenizer(options.engine.spec.bytes_per_token), engine.max_model_len
        )
        self._started_s = int(time.time())
        self._last: HttpRequest | None = None
        self._generations: set[Generation] = set()
        self._hooks = GenerationHooks(abort=self.driver.abort, handover=self._handover)
        self._routes: dict[tuple[str, str], Callable[[HttpRequest, Responder], Awaitable[None]]] = {
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/responses"): self._response,
            ("POST", "/v1/messages"): self._message,
            ("POST", "/inference/v1/generate"): self._tokens,
            ("POST", "/v1/embeddings"): self._embeddings,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/version"): self._version,
            ("GET", "/load"): self._load,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/simulated/fault"): self._arm_fault,
            ("GET", "/simulated/state"): self._state,
            ("GET", "/simulated/last"): self._last_request,
        }
        self._paths = {path for _, path in self._routes}

    async def handle(self, request: HttpRequest, responder: Responder) -> None:
        """Serve one request."""
        route = self._routes.get((request.method, request.path))
        if request.path.startswith("/simulated/") and not responder.peer_is_loopback:
            route = None
        if route is None:
            status, phrase = (405, "Method Not Allowed") if request.path in self._paths else (404, "Not Found")
            responder.send(status, _JSON_HEADERS, responses.error_body(phrase, kind=phrase, status=status))
            return
        try:
            await route(request, responder)
        except RequestRefused as error:
            body = responses.error_body(error.message, kind=error.kind, status=error.status, param=error.param)
            responder.send(error.status, _JSON_HEADERS, body)

    def close(self) -> None:
        """Stop at once."""
        self.http.close()
        self.side_channel.close()
        self.driver.close()
        if self.publisher is not None:
            self.publisher.close()

    # -- inference --------------------------------------------------------------------------------------------------

    async def _completions(self, request: HttpRequest, responder: Responder) -> None:
        await self._generate(request, responder, "cmpl", self._reader.completion)

    async def _chat(self, request: HttpRequest, responder: Responder) -> None:
        await self._generate(request, responder, "chatcmpl", self._reader.chat)

    async def _response(self, request: HttpRequest, responder: Responder) -> None:
        await self._generate(request, responder, "resp", partial(read_response, self._reader))

    async def _message(self, request: HttpRequest, responder: Responder) -> None:
        await self._generate(request, responder, "chatcmpl", partial(read_message, self._reader))

    async def _tokens(self, request: HttpRequest, responder: Responder) -> None:
        await self._generate(request, responder, "generate-tokens", partial(read_generate, self._reader))

    async def _generate(
        self, request: HttpRequest, responder: Responder, prefix: str, read: Callable[[Body], GenerationRequest]
    ) -> None:
        self._last = request
        self.num_requests += 1
        fault = self.faults.take_inference()
        if fault is not None and await self._fails_at_once(fault, responder):
            return
        body = parse_body(request.header(b"content-type"), request.body)
        try:
            asked = read(body)
        except RequestRefused:
            self._release_rejected(body)
            raise
        if asked.is_remote_unusable:
            responder.send(500, _JSON_HEADERS, responses.LOAD_FAILED)
            return
        names = self._names(request, prefix, asked.request_id)
        generation = Generation(asked, names, responder, self._hooks, fault)
        sequences = self._sequences(asked, names.response_id, fault)
        for sequence in sequences:
            sequence.traceparent = (request.header(b"traceparent") or b"").decode("latin-1")[:TRACEPARENT_CHARS_MAX]
        generation.start(sequences)
        self._generations.add(generation)
        try:
            if not generation.done.done():
                self.driver.submit(generation.sequences)
            await generation.done
        finally:
            self._generations.discard(generation)
            self.num_aborted_requests += generation.is_aborted

    def _sequences(self, asked: GenerationRequest, response_id: str, fault: Fault | None) -> list[Sequence]:
        sequences = []
        for prompt_index, prompt in enumerate(asked.prompts):
            # vLLM makes its internal id unique with a random suffix, so that a client's id may occur twice.
            base = f"{response_id}-{prompt_index}" if asked.kind == "completion" else response_id
            unique = f"{base}-{secrets.token_hex(4)}"
            for choice in range(asked.num_choices):
                sequence = Sequence(
                    request_id=unique if asked.num_choices == 1 else f"{choice}_{unique}",
                    prompt=prompt,
                    max_tokens=asked.max_tokens,
                    choice=choice,
                    namespace=asked.namespace,
                    stops_naturally=asked.stops_naturally,
                    hands_over=asked.hands_over,
                    remote=asked.remote,
                    stores=asked.stores,
                    handed_over=asked.handed_over,
                )
                if fault is not None and fault.kind == "slow":
                    sequence.slowdown = fault.factor
                elif fault is not None and fault.kind == "no_kv_params":
                    sequence.hands_over = sequence.stores = False
                sequences.append(sequence)
        return sequences

    def _release_rejected(self, body: Body) -> None:
        """A request that never reaches the engine still lets the prefill engine free its blocks."""
        params = body.get("kv_transfer_params")
        if isinstance(params, dict) and params.get("do_remote_prefill"):
            remote = read_remote(params)
            if remote is not None:
                self.driver.release(remote)

    def _handover(self, sequence: Sequence) -> responses.Json | None:
        if sequence.stores:
            return None if self.cache is None else self.cache.handoff_params(sequence)
        options = self.options
        return responses.handover_params(sequence, options.engine_id, options.side_channel_host, self.side_channel_port)

    def _names(self, request: HttpRequest, prefix: str, body_id: str | None = None) -> responses.ResponseNames:
        header = request.header(b"x-request-id")
        if prefix == "resp":  # named by its body alone, as in vLLM
            return responses.ResponseNames(
                body_id or f"resp_{secrets.token_hex(16)}", self._reader.model_name, int(time.time())
            )
        request_id = header.decode("latin-1") if header is not None else body_id or secrets.token_hex(16)
        return responses.ResponseNames(f"{prefix}-{request_id}", self._reader.model_name, int(time.time()))

    async def _fails_at_once(self, fault: Fault, responder: Responder) -> bool:
        """Carry out a fault that needs no request; False for the other ones."""
        answer = _STATUS_FAULTS.get(fault.kind)
        if answer is not None:
            status, kind, message = answer
            headers = [*_JSON_HEADERS, (b"retry-after", b"1")] if status in (429, 503) else _JSON_HEADERS
            responder.send(status, headers, responses.error_body(message, kind=kind, status=status))
        elif fault.kind == "garbage":
            responder.start_stream(200, [(b"\x00not a\x01header", b"\x7f")])
            responder.write(b"\x00")
            responder.abort()
        elif fault.kind == "hang":
            await self._until_disconnect(responder)
        else:
            return False
        return True

    async def _until_disconnect(self, responder: Responder) -> None:
        left = asyncio.Event()
        responder.on_disconnect = left.set
        if not responder.is_disconnected:
            await left.wait()
        self.num_aborted_requests += 1

    # -- the rest of vLLM's API -------------------------------------------------------------------------------------

    async def _embeddings(self, request: HttpRequest, responder: Responder) -> None:
        self._last = request
        self.num_requests += 1
        fault = self.faults.take_inference()
        if fault is not None and await self._fails_at_once(fault, responder):
            return
        prompts = self._reader.embedding(parse_body(request.header(b"content-type"), request.body))
        responder.send(200, _JSON_HEADERS, responses.embeddings_body(self._names(request, "embd"), prompts))

    async def _tokenize(self, request: HttpRequest, responder: Responder) -> None:
        body = parse_body(request.header(b"content-type"), request.body)
        tokens = self._reader.tokenize(body)
        with_strings = body.get("return_token_strs") is True
        reply = responses.tokenize_body(tokens, self.engine.max_model_len, with_strings=with_strings)
        responder.send(200, _JSON_HEADERS, reply)

    async def _detokenize(self, request: HttpRequest, responder: Responder) -> None:
        body = parse_body(request.header(b"content-type"), request.body)
        tokens = self._reader.detokenize(body)
        responder.send(200, _JSON_HEADERS, encode({"prompt": decode(tokens)}))

    async def _reset_prefix_cache(self, _request: HttpRequest, responder: Responder) -> None:
        success = self.engine.kv.reset_cache()
        if self.publisher is not None:
            self.publisher.flush()
        responder.send(200, _JSON_HEADERS, encode({"success": success}))

    async def _health(self, _request: HttpRequest, responder: Responder) -> None:
        fault = self.faults.take_health()
        if fault is None:
            responder.send(200, [], b"")
        elif fault.kind == "health_503":
            responder.send(503, [], b"")
        else:
            await self._until_disconnect(responder)

    async def _models(self, _request: HttpRequest, responder: Responder) -> None:
        body = responses.models_body(self._reader.model_name, self.engine.max_model_len, self._started_s)
        responder.send(200, _JSON_HEADERS, body)

    async def _version(self, _request: HttpRequest, responder: Responder) -> None:
        responder.send(200, _JSON_HEADERS, encode({"version": f"{responses.VLLM_VERSION}+simulated"}))

    async def _load(self, _request: HttpRequest, responder: Responder) -> None:
        responder.send(200, _JSON_HEADERS, encode({"server_load": len(self._generations)}))

    async def _metrics(self, _request: HttpRequest, responder: Responder) -> None:
        responder.send(200, [(b"content-type", CONTENT_TYPE)], self.driver.metrics.render(self.engine))

    # -- for tests --------------------------------------------------------------------------------------------------

    async def _arm_fault(self, request: HttpRequest, responder: Responder) -> None:
        self.faults.arm(parse_body(b"application/json", request.body))
        responder.send(200, _JSON_HEADERS, encode({"armed": [asdict(fault) for fault in self.faults.armed]}))

    async def _state(self, _request: HttpRequest, responder: Responder) -> None:
        engine, kv = self.engine, self.engine.kv
        state: Body = {
            "engine_id": self.options.engine_id,
            "role": self.options.role,
            "requests": self.num_requests,
            "aborted_requests": self.num_aborted_requests,
            "in_flight": len(self._generations),
            "running": engine.num_running,
            "waiting": engine.num_waiting,
            "blocks_total": kv.num_blocks,
            "blocks_used": kv.num_used,
            "blocks_reserved": kv.num_reserved,
            "leases": len(engine.leases),
            "failed_notifications": self.driver.metrics.num_failed_notifications,
            "armed_faults": [asdict(fault) for fault in self.faults.armed],
        }
        responder.send(200, _JSON_HEADERS, encode(state | asdict(engine.counters)))

    async def _last_request(self, _request: HttpRequest, responder: Responder) -> None:
        last = self._last
        if last is None:
            raise RequestRefused("there was no inference request yet", status=404)
        headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in last.headers]
        answer = {"method": last.method, "path": last.path, "query": last.query, "headers": headers}
        responder.send(200, _JSON_HEADERS, encode(answer | {"body": base64.b64encode(last.body).decode()}))


async def serve(options: ServerOptions, announce: Callable[[str], None]) -> None:
    """Run one engine until SIGTERM or SIGINT.

    Args:
        announce: called once, with one line that names the ports, when the engine is ready.

    Raises:
        StartError: a port cannot be bound.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    http_socket = _bind(options.host, options.port)
    try:
        side_socket = _bind(options.side_channel_host, options.side_channel_port, "side-channel-")
    except StartError:
        http_socket.close()
        raise
    server = SimulatedServer(options)
    try:
        # Until it is ready a real engine holds its port and refuses connections.
        async with asyncio.timeout(options.engine.spec.start_delay_s):
            await stopping.wait()
    except TimeoutError:
        server.side_channel_port = await server.side_channel.listen("", 0, sock=side_socket)
        port = await server.http.listen("", 0, sock=http_socket)
        announce(f"simulated engine ready: http={options.host}:{port} side_channel={server.side_channel_port}")
        await stopping.wait()
    server.close()
    await server.http.drain(_STOP_TIMEOUT_S)


def _bind(host: str, port: int, flag: str = "") -> socket.socket:
    """A socket for one of the two; ``flag`` is what its flags begin with."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise cannot_listen(host, port, error, port_flag=f"--{flag}port", host_flag=f"--{flag}host") from error
    sock.setblocking(False)
    return sock
