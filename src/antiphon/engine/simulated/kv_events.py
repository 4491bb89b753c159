"""Publishes the KV events of a simulated engine over ZMQ, as vLLM's publisher does.

Owns a PUB socket that connects to whoever listens, a ROUTER socket that answers replays, and the last batches for them.
What nobody receives is lost, and a replay has it. Frames: see ``protocol.kv_events``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

import zmq
import zmq.asyncio

from antiphon.core.errors import StartError
from antiphon.engine.simulated.kv_log import KvLog
from antiphon.protocol.kv_events import END_OF_REPLAY, SEQUENCE_BYTES, EventBatch, encode_batch

_HIGH_WATER_MARK = 100_000


@dataclass(frozen=True)
class KvEventsOptions:
    """What ``--kv-events-config`` tells vLLM.

    Args:
        endpoint: where the listener is: ``tcp://HOST:PORT``.
        topic: the first frame of each message.
        replay_endpoint: where replays are answered; empty for nowhere.
        buffer_steps: batches kept for them.
    """

    endpoint: str
    topic: str = ""
    replay_endpoint: str = ""
    buffer_steps: int = 10_000


class KvPublisher:
    """The publisher of one life of one engine. Made on the event loop that serves it."""

    def __init__(self, options: KvEventsOptions, log: KvLog) -> None:
        self.replay_port = 0
        """Where replays are answered; 0 for nowhere."""
        self._log = log
        self._topic = options.topic.encode()
        self._next = 0
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=options.buffer_steps)
        context = zmq.Context()
        self._context = context
        self._pub = context.socket(zmq.PUB)
        self._replays: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        try:
            self._pub.setsockopt(zmq.LINGER, 0)
            self._pub.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
            self._pub.connect(options.endpoint)
            if options.replay_endpoint:
                self._replays = zmq.asyncio.Context(context).socket(zmq.ROUTER)
                self._replays.setsockopt(zmq.LINGER, 0)
                self._replays.bind(options.replay_endpoint)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise StartError(
                f"cannot publish KV events at {options.endpoint} and {options.replay_endpoint or 'nowhere'}: {error}",
                remedy="give addresses like tcp://127.0.0.1:5557, and a free port for the replay",
            ) from error
        if self._replays is not None:
            bound = self._replays.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(bound, bytes)
            self.replay_port = int(bound.rstrip(b"\0").rpartition(b":")[2])
            self._task = asyncio.get_running_loop().create_task(self._answer(self._replays))

    def flush(self) -> None:
        """Publish what the engine's cache has gained and lost; nothing if nothing."""
        events = self._log.take()
        if not events:
            return
        payload = encode_batch(EventBatch(time.time(), events, 0))
        number = self._next
        self._next += 1
        self._batches.append((number, payload))
        self._pub.send_multipart([self._topic, _frame(number), payload])

    def close(self) -> None:
        """Publish no more."""
        if self._task is not None:
            self._task.cancel()
        if self._replays is not None:
            self._replays.close()
        self._context.destroy(linger=0)

    async def _answer(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in list(self._batches):
                if number >= start:
                    await socket.send_multipart([client, b"", self._topic, _frame(number), payload])
            await socket.send_multipart([client, b"", b"", END_OF_REPLAY, b""])


def _frame(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")
