"""Hears what engines say about their KV blocks, and keeps the index of it right.

vLLM's publisher connects, so this binds: one SUB socket for each data-parallel rank, on ports that follow each other. A
topic names the engine (``config.kv_events``). Each topic and rank is a stream of its own (``routing.kv_stream``), whose
advice is carried out here: blocks go into ``routing.kv_index``, and what is missing is asked for at the engine's replay
port.

Owns the sockets, the streams, and at most one replay for each stream. Everything is bounded: what the sockets hold
(ZMQ's high-water mark; beyond it messages are lost, which the streams notice), the size of a message, the streams, the
replays at once and their length and time. A message that cannot be read is counted, and costs nothing else. Topics that
cannot be followed are counted, and the first of them logged with what to do. It decides nothing about engines, and
sends no engine anything but the number of a batch.

Always true: of an engine and rank one stream is followed at most. An engine that comes back with another topic, since
its replay port is another, has another life: what it said under the one before is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from antiphon.config.kv_events import parse_topic
from antiphon.core.errors import ProtocolError
from antiphon.protocol.kv_events import (
    BATCH_BYTES_MAX,
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    decode_sequence,
)
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.kv_chain import StoredBlocks
from antiphon.routing.kv_index import KvIndex
from antiphon.routing.kv_stream import NO_REPLAY, Advice, KvStream, StreamOptions
from antiphon.routing.states import EndpointState
from antiphon.transport.listening import cannot_listen

log = logging.getLogger("antiphon.router")

_SLICE: Final = 16
"""Messages that are taken in a row: others have their turn in between."""
_SWEEP: Final = 5_000
_TOPIC_BYTES_MAX: Final = 1_000
_SHOWN_MAX: Final = 200
_LOGGED_MAX: Final = 32
"""Topics that cannot be followed of which the log speaks, once of each; any number may come."""


@dataclass(frozen=True)
class KvEventsOptions:
    """How events are heard.

    Args:
        host: an address to listen on; whoever reaches it can make the router believe anything about its engines.
        port: of rank 0; the others follow. 0 is any free one, for one rank.
        num_ranks: data-parallel ranks of an engine: vLLM adds the rank to the port.
        queue_max: messages that wait in a socket, for each engine.
        tick_s: between two looks at what is late.
        replay_timeout_s: an engine has this long for a whole replay.
        replays_max: at once.
        replay_batches_max: of one replay.
        streams_max: engines times ranks.
        stream: how each is followed.
    """

    host: str = "127.0.0.1"
    port: int = 0
    num_ranks: int = 1
    queue_max: int = 10_000
    tick_s: float = 0.1
    replay_timeout_s: float = 0.45
    replays_max: int = 64
    replay_batches_max: int = 10_000
    streams_max: int = 4_096
    stream: StreamOptions = field(default_factory=StreamOptions)


@dataclass(frozen=True)
class KvSource:
    """Whom a topic stands for.

    Args:
        endpoint: the engine.
        replay_host, replay_port: where its rank 0 answers replays; port 0 is nowhere.
    """

    endpoint: Endpoint
    replay_host: str = ""
    replay_port: int = 0


class _Followed:
    """One stream, and what is done about it."""

    def __init__(self, source: KvSource, rank: int, stream: KvStream) -> None:
        self.source = source
        self.rank = rank
        self.stream = stream
        self.life = source.endpoint.life
        self.replay: asyncio.Task[None] | None = None
        self.num_events = 0

    def counts(self) -> dict[str, int]:
        """What has happened to it."""
        stream = self.stream
        return {
            "events": self.num_events,
            "gaps": stream.num_gaps,
            "restarts": stream.num_restarts,
            "forgotten": stream.num_forgotten,
            "dropped": stream.num_dropped,
        }


class KvEvents:
    """The events of all engines.

    Args:
        index: kept right by this alone.
        resolve_topic: whom a topic stands for now; None for nobody. See :func:`resolver`.
    """

    def __init__(
        self, index: KvIndex, resolve_topic: Callable[[str], KvSource | None], options: KvEventsOptions
    ) -> None:
        self.index = index
        self.ports: list[int] = []
        """Where it listens, by rank, once it has started."""
        self._resolve = resolve_topic
        self._options = options
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._followed: dict[tuple[bytes, int], _Followed] = {}
        self._past: Counter[str] = Counter()
        """Counts of streams that are followed no more."""
        self._loop = asyncio.get_running_loop()
        self._num_replaying = 0
        self._num_messages = 0
        self._num_unreadable = 0
        self._num_unknown_events = 0
        self._num_strangers = 0
        self._logged: set[tuple[bytes, int]] = set()
        self._num_replays = 0
        self._num_replays_failed = 0
        self._num_bugs = 0

    async def start(self) -> None:
        """Listen.

        Raises:
            StartError: a port cannot be bound.
        """
        options = self._options
        for rank in range(options.num_ranks):
            socket = self._context.socket(zmq.SUB)
            self._sockets.append(socket)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, options.queue_max)
            socket.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
            socket.setsockopt(zmq.IPV6, int(":" in options.host))
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            port = options.port + rank if options.port else 0
            host = f"[{options.host}]" if ":" in options.host else options.host
            try:
                socket.bind(f"tcp://{host}:{port or '*'}")
            except zmq.ZMQError as error:
                self.close()
                reason = OSError(error.errno, error.strerror)
                flags = {"port_flag": "--kv-events-port", "host_flag": "--kv-events-host"}
                raise cannot_listen(options.host, port, reason, what="for KV events ", **flags) from error
            endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(endpoint, bytes)
            self.ports.append(int(endpoint.rstrip(b"\0").rpartition(b":")[2]))
            self._tasks.append(self._loop.create_task(self._receive(socket)))
        self._tasks.append(self._loop.create_task(self._watch()))

    def close(self) -> None:
        """Hear no more."""
        for task in self._tasks:
            task.cancel()
        for followed in self._followed.values():
            if followed.replay is not None:
                followed.replay.cancel()
        self._context.destroy(linger=0)

    def statistics(self) -> dict[str, object]:
        """Counts since the start, and what is known of each engine, by address."""
        counts = Counter(self._past)
        for followed in self._followed.values():
            counts.update(followed.counts())
        return {
            "messages": self._num_messages,
            "events": counts["events"],
            "unreadable": self._num_unreadable,
            "unknown_events": self._num_unknown_events,
            "strangers": self._num_strangers,
            "gaps": counts["gaps"],
            "restarts": counts["restarts"],
            "forgotten": counts["forgotten"],
            "dropped": counts["dropped"],
            "replays": self._num_replays,
            "replays_failed": self._num_replays_failed,
            "bugs": self._num_bugs,
            "blocks": self.num_blocks(),
            "index": self.index.statistics(),
        }

    def num_blocks(self) -> dict[str, int]:
        """Blocks that each engine that has told anything is known to hold, by address."""
        known = {followed.source.endpoint for followed in self._followed.values()}
        blocks = {endpoint.address: 0 for endpoint in known}
        for endpoint in known:
            blocks[endpoint.address] += self.index.num_blocks(endpoint)
        return blocks

    # -- hearing ----------------------------------------------------------------------------------------------------

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        num = 0
        while True:
            try:
                frames = await socket.recv_multipart()
                self._take(frames)
            except zmq.ZMQError as error:
                if error.errno in (zmq.ENOTSOCK, zmq.ETERM):
                    return
                log.warning("hearing KV events failed: %s", error)
                await asyncio.sleep(self._options.tick_s)
            except Exception:  # supervised: a bug that one message meets must not end the hearing of all
                self._num_bugs += 1
                log.exception("a message about KV blocks could not be handled")
            num += 1
            if num % _SLICE == 0:
                await asyncio.sleep(0)

    def _take(self, frames: list[bytes]) -> None:
        self._num_messages += 1
        if len(frames) != 3 or len(frames[0]) > _TOPIC_BYTES_MAX:
            self._num_unreadable += 1
            return
        try:
            sequence, batch = self._read(frames[1], frames[2])
        except ProtocolError as error:
            self._num_unreadable += 1
            log.debug("%s", error)
            return
        followed = self._find(frames[0], batch)
        if followed is None:
            return
        self._obey(followed, followed.stream.take(sequence, batch.stamp_s, batch, self._loop.time()))

    def _read(self, sequence_frame: bytes, payload: bytes) -> tuple[int, EventBatch]:
        """The number of a batch, and the batch.

        Raises:
            ProtocolError: they cannot be read.
        """
        sequence = decode_sequence(sequence_frame)
        batch, num_unknown = decode_batch(payload)
        self._num_unknown_events += num_unknown
        return sequence, batch

    def _find(self, topic: bytes, batch: EventBatch) -> _Followed | None:
        """The stream that a batch belongs to; None for one that is not followed, which is then counted."""
        rank = batch.rank or 0
        followed = self._followed.get((topic, rank))
        if followed is not None:
            return followed
        name = topic.decode("utf-8", "backslashreplace")
        source = self._resolve(name)
        if source is None or rank >= self._options.num_ranks:
            self._refuse(topic, rank, _why_unknown(name) if source is None else self._why_no_rank(rank))
            return None
        if not self._outdo(source.endpoint, rank, batch.stamp_s):
            self._past["dropped"] += 1
            return None
        if len(self._followed) >= self._options.streams_max:
            self._refuse(topic, rank, f"{self._options.streams_max} streams are followed, and no more are")
            return None
        return self._follow(topic, rank, source)

    def _refuse(self, topic: bytes, rank: int, why: str) -> None:
        self._num_strangers += 1
        if (topic, rank) in self._logged or len(self._logged) >= _LOGGED_MAX:
            return
        self._logged.add((topic, rank))
        log.warning("KV events with the topic %r are not followed: %s", topic[:_SHOWN_MAX], why)
        if len(self._logged) == _LOGGED_MAX:
            log.warning("further topics of KV events that are not followed are counted only (strangers)")

    def _why_no_rank(self, rank: int) -> str:
        return (
            f"they are of rank {rank}, and router.kv_events_ranks is {self._options.num_ranks}: set it to the "
            "data-parallel size of the engines"
        )

    def _outdo(self, endpoint: Endpoint, rank: int, stamp_s: float) -> bool:
        """Make room for a stream with another topic than was followed for the same engine and rank; False if that one
        is newer, and this one what was on its way when the engine ended."""
        for place, other in self._followed.items():
            if other.source.endpoint is endpoint and other.rank == rank:
                if not other.stream.is_outdone(stamp_s, self._loop.time()):
                    return False
                self._past["restarts"] += 1
                self._unfollow(place)
                self.index.forget_rank(endpoint, rank)
                break
        return True

    def _follow(self, topic: bytes, rank: int, source: KvSource) -> _Followed:
        plain = self._options.stream
        options = replace(plain, has_replay=plain.has_replay and source.replay_port > 0)
        followed = self._followed[topic, rank] = _Followed(source, rank, KvStream(options))
        log.info("%s engine %s tells of its KV blocks", source.endpoint.role, source.endpoint.address)
        return followed

    # -- doing what streams advise ----------------------------------------------------------------------------------

    def _obey(self, followed: _Followed, advice: Advice) -> None:
        if advice.is_forget:
            self.index.forget_rank(followed.source.endpoint, followed.rank)
        for batch in advice.batches:
            assert isinstance(batch, EventBatch)
            self._apply(followed, batch)
        if advice.replay_from != NO_REPLAY:
            self._begin_replay(followed, advice.replay_from)

    def _apply(self, followed: _Followed, batch: EventBatch) -> None:
        index, endpoint, rank = self.index, followed.source.endpoint, followed.rank
        followed.num_events += len(batch.events)
        for event in batch.events:
            if isinstance(event, BlockStored):
                index.store(endpoint, rank, stored_blocks(event))
            elif isinstance(event, BlockRemoved):
                group = -1 if event.group_idx is None else event.group_idx
                index.remove(endpoint, rank, event.block_hashes, group, event.medium or "")
            else:
                assert isinstance(event, AllBlocksCleared)
                index.clear(endpoint, rank)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._options.tick_s)
            try:
                self._look()
            except Exception:  # supervised: a bug here must not leave claims standing for ever
                self._num_bugs += 1
                log.exception("looking after KV events failed")

    def _look(self) -> None:
        now_s = self._loop.time()
        for place, followed in list(self._followed.items()):
            endpoint = followed.source.endpoint
            if endpoint.state is EndpointState.REMOVED:
                self._unfollow(place)
                self.index.forget(endpoint)
                continue
            if followed.life != endpoint.life:
                followed.life = endpoint.life
                self._obey(followed, followed.stream.restart(now_s))
            self._obey(followed, followed.stream.tick(now_s))
        self.index.sweep(_SWEEP)

    def _unfollow(self, place: tuple[bytes, int]) -> None:
        """Its engine is gone, or speaks otherwise; what is known of it is for the caller to forget."""
        followed = self._followed.pop(place)
        self._past.update(followed.counts())
        if followed.replay is not None:
            followed.replay.cancel()

    # -- replays ----------------------------------------------------------------------------------------------------

    def _begin_replay(self, followed: _Followed, start: int) -> None:
        if followed.replay is not None:
            followed.replay.cancel()
        if self._num_replaying >= self._options.replays_max:
            self._num_replays_failed += 1
            followed.replay = None
            self._obey(followed, followed.stream.end_replay(is_whole=False))
            return
        self._num_replays += 1
        followed.replay = self._loop.create_task(self._replay(followed, start))

    async def _replay(self, followed: _Followed, start: int) -> None:
        source, own = followed.source, asyncio.current_task()
        host = f"[{source.replay_host}]" if ":" in source.replay_host else source.replay_host
        self._num_replaying += 1
        socket = self._context.socket(zmq.DEALER)
        is_whole = False
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, self._options.replay_batches_max)
            socket.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
            socket.setsockopt(zmq.IPV6, int(":" in source.replay_host))
            socket.connect(f"tcp://{host}:{source.replay_port + followed.rank}")
            async with asyncio.timeout(self._options.replay_timeout_s):
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
                is_whole = await self._take_replayed(followed, socket)
        except (TimeoutError, ProtocolError, zmq.ZMQError) as error:
            log.debug("the replay of %s failed: %s", source.endpoint.address, error)
        except Exception:  # supervised: a bug here must not leave a stream waiting
            self._num_bugs += 1
            log.exception("the replay of %s failed", source.endpoint.address)
        finally:
            self._num_replaying -= 1
            socket.close()
        if followed.replay is own:
            followed.replay = None
            self._num_replays_failed += not is_whole
            self._obey(followed, followed.stream.end_replay(is_whole=is_whole))

    async def _take_replayed(self, followed: _Followed, socket: zmq.asyncio.Socket) -> bool:
        """Take batches until the engine says that there are no more; False if there are too many.

        Raises:
            ProtocolError: one cannot be read.
            zmq.ZMQError: the socket fails.
        """
        for num in range(self._options.replay_batches_max):
            frames = await socket.recv_multipart()
            if len(frames) < 2 or frames[-2] == END_OF_REPLAY:
                return len(frames) >= 2
            sequence, batch = self._read(frames[-2], frames[-1])
            if (batch.rank or 0) == followed.rank:
                self._obey(followed, followed.stream.take_replayed(sequence, batch.stamp_s, batch))
            if num % _SLICE == 0:
                await asyncio.sleep(0)
        return False


def resolver(endpoints: Callable[[], Iterable[Endpoint]]) -> Callable[[str], KvSource | None]:
    """What topics of the form of ``config.kv_events`` stand for, among ``endpoints()``. Replays are asked for at the
    host that the router knows the engine by, whatever a topic says."""

    def resolve(topic: str) -> KvSource | None:
        parsed = parse_topic(topic)
        if parsed is None:
            return None
        url, replay_port = parsed
        for endpoint in endpoints():
            if endpoint.url == url:
                return KvSource(endpoint, urlsplit(url).hostname or "", replay_port or 0)
        return None

    return resolve


def _why_unknown(topic: str) -> str:
    parsed = parse_topic(topic)
    if parsed is None:
        return (
            "it names no engine. Start the engine with --kv-events-config as antiphon config render writes it: its "
            "topic is kv@ and the engine's URL (docs/kv-routing.md)"
        )
    return (
        f"{parsed[0][:_SHOWN_MAX]!r} is no engine of this router. Write the URL in the topic exactly as the router has "
        "it (antiphon endpoints list), or add the engine (antiphon endpoints add)"
    )


def stored_blocks(event: BlockStored) -> StoredBlocks:
    """``event`` as the index takes it."""
    stored = StoredBlocks(event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size)
    stored.adapter = event.lora_name or ("" if event.lora_id is None else f"#{event.lora_id}")
    stored.extras = event.extra_keys
    stored.group = event.group_idx or 0
    stored.medium = event.medium or ""
    stored.kind = event.kv_cache_spec_kind or ""
    return stored
