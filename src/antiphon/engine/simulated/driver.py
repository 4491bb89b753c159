"""Drives the pure engine in real time: its clock, its timer, its pulls from other engines.

Owns the one timer and the tasks that talk to prefill engines. Hands tokens and failures to whoever owns the sequence.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from antiphon.core.errors import UpstreamError
from antiphon.engine.simulated.cache_kv import SimulatedCache
from antiphon.engine.simulated.machine import SimulatedEngine
from antiphon.engine.simulated.metrics import EngineMetrics
from antiphon.engine.simulated.sequence import (
    Effect,
    Failed,
    NotifyRemote,
    Produced,
    PullBlocks,
    RemoteKv,
    Sequence,
    StoreBlocks,
)
from antiphon.engine.simulated.side_channel import SideChannelClient
from antiphon.protocol.cache_handoff import HandoffKey

_HEARTBEATS_PER_LEASE = 6


class SequenceOwner(Protocol):
    """What the driver reports to."""

    def on_token(self, event: Produced) -> None:
        """A sequence has one more token."""

    def on_failed(self, sequence: Sequence) -> None:
        """A sequence ends without an answer."""


class EngineDriver:
    """One engine in real time. Everything happens on the event loop that it was made on."""

    def __init__(self, engine: SimulatedEngine, client: SideChannelClient, cache: SimulatedCache | None = None) -> None:
        self.engine = engine
        self.metrics = EngineMetrics()
        self.after_step: Callable[[], None] | None = None
        """Called whenever the engine may have done something."""
        self._client = client
        self._cache = cache
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._timer_due_ns = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._heartbeat_s = engine.options.spec.lease_s / _HEARTBEATS_PER_LEASE
        self._heartbeat: asyncio.TimerHandle | None = None

    def submit(self, sequences: list[Sequence]) -> None:
        """Give sequences to the engine; ``owner`` of each is a :class:`SequenceOwner`."""
        for sequence in sequences:
            if self._cache is not None and sequence.handed_over is not None and not sequence.is_aborted:
                self._spawn(self._load(self._cache, sequence, sequence.handed_over))
            else:
                self._submit(sequence)
        if self._heartbeat is None and any(sequence.remote is not None for sequence in sequences):
            self._heartbeat = self._loop.call_later(self._heartbeat_s, self._send_heartbeats)

    def _submit(self, sequence: Sequence) -> None:
        if not sequence.is_aborted:
            self.perform(self.engine.submit(sequence, time.monotonic_ns()))

    async def _load(self, cache: SimulatedCache, sequence: Sequence, key: HandoffKey) -> None:
        sequence.loaded = await cache.load(sequence, key)
        self._submit(sequence)

    def abort(self, sequences: list[Sequence]) -> None:
        """Stop sequences and free what they hold; one that was not submitted yet will not be."""
        now_ns = time.monotonic_ns()
        for sequence in sequences:
            if sequence.order:
                self.perform(self.engine.abort(sequence, now_ns))
            else:
                sequence.is_aborted = True

    def release(self, remote: RemoteKv) -> None:
        """Tell a prefill engine that a request which was never submitted will not pull."""
        self.perform([NotifyRemote(remote)])

    def perform(self, effects: list[Effect]) -> None:
        """Do what the engine asks for, and be called again when it has something to do."""
        if self.after_step is not None:
            self.after_step()
        for effect in effects:
            if isinstance(effect, Produced):
                self.metrics.observe_token(effect)
                if self._cache is not None and effect.finish_reason is not None:
                    self._cache.report(effect.sequence, is_aborted=False)
                _owner(effect.sequence).on_token(effect)
            elif isinstance(effect, PullBlocks):
                self._spawn(self._pull(effect))
            elif isinstance(effect, NotifyRemote):
                self.metrics.observe_release(effect)
                self._spawn(self._release(effect.remote))
            elif isinstance(effect, StoreBlocks):
                if self._cache is not None:
                    self._cache.store(effect.sequence, effect.contents)
            else:
                assert isinstance(effect, Failed)
                _owner(effect.sequence).on_failed(effect.sequence)
        self._schedule()

    def close(self) -> None:
        """Stop the timers and cancel the calls to other engines."""
        for handle in (self._timer, self._heartbeat):
            if handle is not None:
                handle.cancel()
        for task in self._tasks:
            task.cancel()
        self._client.close()
        if self._cache is not None:
            self._cache.close()

    def _schedule(self) -> None:
        """Arm the timer for the engine's next event. It may fire early after an abort, and then does nothing."""
        due_ns = self.engine.next_due_ns()
        if due_ns is None or (self._timer is not None and self._timer_due_ns <= due_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_ns = due_ns
        delay_s = (due_ns - time.monotonic_ns()) / 1e9
        self._timer = self._loop.call_later(delay_s, self._fire) if delay_s > 0 else self._loop.call_soon(self._fire)

    def _fire(self) -> None:
        self._timer = None
        self.perform(self.engine.advance(time.monotonic_ns()))

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pull(self, pull: PullBlocks) -> None:
        try:
            contents = await self._client.read(pull.remote, pull.block_ids)
        except UpstreamError:
            self.perform(self.engine.pull_failed(pull.sequence, time.monotonic_ns()))
        else:
            self.engine.pull_finished(pull.sequence, contents, time.monotonic_ns())
            self._schedule()

    async def _release(self, remote: RemoteKv) -> None:
        try:
            await self._client.release(remote)
        except UpstreamError:
            self.metrics.num_failed_notifications += 1

    def _send_heartbeats(self) -> None:
        waiting: dict[tuple[str, int, str], list[str]] = defaultdict(list)
        for sequence in self.engine.waiting_remotes():
            assert sequence.remote is not None
            remote = sequence.remote
            waiting[remote.host, remote.port, remote.engine_id].append(remote.request_id)
        for (host, port, engine_id), request_ids in waiting.items():
            self._spawn(self._beat(host, port, engine_id, request_ids))
        self._heartbeat = self._loop.call_later(self._heartbeat_s, self._send_heartbeats) if waiting else None

    async def _beat(self, host: str, port: int, engine_id: str, request_ids: list[str]) -> None:
        try:
            await self._client.heartbeat(host, port, engine_id, request_ids)
        except UpstreamError:
            self.metrics.num_failed_notifications += 1


def _owner(sequence: Sequence) -> SequenceOwner:
    owner: Any = sequence.owner
    return owner  # type: ignore[no-any-return]
