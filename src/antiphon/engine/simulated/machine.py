"""The simulated engine without its process: requests in, effects out; time is an argument, in nanoseconds.

Owns the queues, the schedule, the leases and the KV of one engine. Knows no socket, clock or task: the shell calls
:meth:`SimulatedEngine.advance` when :meth:`SimulatedEngine.next_due_ns` has come, and performs the effects.

The latency model, exact however late the shell calls (what was due at t happens at t):

- prefill of a prompt: ``prefill_overhead_ms + uncached_tokens / prefill_tokens_per_s``, then its first token. One
  prefill at a time, in order of arrival; it does not slow down decoding.
- decode: one token of each running sequence every ``decode_token_ms``.
- pull of KV: ``blocks * block_size_tokens * KV_BYTES_PER_TOKEN / transfer_gb_per_s``, or the real transfer where that
  took longer; then the first token after ``decode_token_ms``. Pulls run at the same time and do not slow each other
  down.
- at most ``max_num_seqs`` sequences prefill, pull or decode at once, and one starts only when all blocks that it can
  ever need are free; others wait. There is no preemption.

As in vLLM, blocks are freed at the end of a request, except those of a ``do_remote_decode`` request that ended well:
they stay under a lease until a decode engine says that it has pulled, or the lease expires. Then they are overwritten
at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from antiphon.config.simulated_spec import SimulatedSpec
from antiphon.engine.simulated.kv import KV_BYTES_PER_TOKEN, SimulatedKv, chain_keys, extend, pack, root_state
from antiphon.engine.simulated.kv_log import KvLog
from antiphon.engine.simulated.sequence import (
    Effect,
    EngineCounters,
    Failed,
    Lease,
    NotifyRemote,
    Produced,
    PullBlocks,
    Sequence,
    Stage,
    StoreBlocks,
)

_PREFILL_END, _LOAD_END, _FIRST_TOKEN, _DECODE, _LEASE_END = range(5)

_HEARTBEAT_EXTENDS = 2 / 3
"""A heartbeat leaves at least this share of a whole lease, as NIXL's connector does."""


@dataclass(frozen=True)
class EngineOptions:
    """What one simulated engine is.

    Args:
        spec: its latency model and sizes.
        model_name: part of what KV bytes depend on; must be equal on both sides of a hand-over.
        max_num_seqs: sequences that run at once.
        load_failure: what happens to a request whose KV cannot be pulled.
    """

    spec: SimulatedSpec
    model_name: str
    max_num_seqs: int = 256
    load_failure: Literal["fail", "recompute"] = "fail"


class SimulatedEngine:
    """One engine. Every method that changes it returns the effects to perform, in order."""

    def __init__(self, options: EngineOptions) -> None:
        spec = options.spec
        self.options = options
        self.kv = SimulatedKv(spec.kv_blocks, spec.block_size_tokens)
        self.counters = EngineCounters()
        self.max_model_len = min(spec.max_model_len, spec.kv_blocks * spec.block_size_tokens)
        self.leases: dict[str, Lease] = {}
        self._waiting_local: deque[Sequence] = deque()
        self._waiting_remote: deque[Sequence] = deque()
        self._prefilling: Sequence | None = None
        self._running: set[Sequence] = set()
        self._timers: list[tuple[int, int, int, Sequence | Lease]] = []
        self._order = 0
        self._effects: list[Effect] = []
        self._decode_ns = round(spec.decode_token_ms * 1e6)
        self._lease_ns = round(spec.lease_s * 1e9)
        self._log: KvLog | None = None

    def log_to(self, log: KvLog) -> None:
        """Tell ``log`` from now on what the prefix cache gains and loses."""
        self._log = self.kv.log = log

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence, now_ns: int) -> list[Effect]:
        """Accept a sequence: prompt of 1 token or more, prompt and answer within ``max_model_len``."""
        assert sequence.prompt and sequence.max_tokens > 0
        assert len(sequence.prompt) + sequence.max_tokens <= self.max_model_len, "the caller checks the length"
        sequence.root = root_state(self.options.model_name, sequence.namespace)
        sequence.packed = pack(sequence.prompt)
        sequence.keys = chain_keys(sequence.root, sequence.packed, self.kv.block_size_tokens)
        full = 8 * self.kv.block_size_tokens * len(sequence.keys)
        last_key = sequence.keys[-1] if sequence.keys else sequence.root
        sequence.key_state = extend(last_key, sequence.packed[full:])
        sequence.arrival_ns = now_ns
        sequence.order = self._next_order()
        self.counters.num_requests += 1
        (self._waiting_local if sequence.remote is None else self._waiting_remote).append(sequence)
        self._admit(now_ns)
        return self._take()

    def abort(self, sequence: Sequence, now_ns: int) -> list[Effect]:
        """Stop a sequence wherever it is and free what it holds; nothing happens to one that has finished.

        A pull cannot be stopped: its blocks are freed when it ends, and the prefill engine is told then. One that has
        not begun tells the prefill engine at once.
        """
        if sequence.stage is Stage.FINISHED or sequence.is_aborted:
            return []
        sequence.is_aborted = True
        if sequence.stage is Stage.PULLING:
            return []
        if sequence.stage is Stage.WAITING:
            (self._waiting_local if sequence.remote is None else self._waiting_remote).remove(sequence)
            if sequence.remote is not None:
                self._effects.append(NotifyRemote(sequence.remote))
        self._finish(sequence, "abort", now_ns)
        self._admit(now_ns)
        return self._take()

    def pull_finished(self, sequence: Sequence, contents: list[bytes], now_ns: int) -> None:
        """The bytes that :class:`PullBlocks` asked for are here; they are loaded when the model says so."""
        assert sequence.stage is Stage.PULLING and len(contents) == len(self._blocks_to_pull(sequence))
        sequence.pulled = contents
        transfer_ns = round(self._transfer_bytes(len(contents)) / self.options.spec.transfer_gb_per_s)
        self._set_timer(_LOAD_END, max(now_ns, sequence.started_ns + transfer_ns), sequence)

    def pull_failed(self, sequence: Sequence, now_ns: int) -> list[Effect]:
        """The bytes that :class:`PullBlocks` asked for will not arrive."""
        assert sequence.stage is Stage.PULLING
        self._load_failed(sequence, now_ns)
        self._admit(now_ns)
        return self._take()

    # -- the other side of a hand-over ------------------------------------------------------------------------------

    def read_blocks(self, request_id: str, block_ids: list[int]) -> list[bytes]:
        """What a decode engine reads: the bytes that are in the blocks at this moment, lease or none.

        Raises:
            IndexError: a number that is no block of this engine.
        """
        contents = self.kv.read(block_ids)
        if request_id in self.leases:
            self.counters.num_reads += 1
        else:
            self.counters.num_stale_reads += 1
        return contents

    def release_lease(self, request_id: str, now_ns: int) -> list[Effect]:
        """A decode engine has pulled, or will never: free the blocks and overwrite them."""
        lease = self.leases.pop(request_id, None)
        if lease is None:
            self.counters.num_late_notifications += 1
            return []
        self.kv.free_and_overwrite(lease.block_ids)
        self._admit(now_ns)
        return self._take()

    def extend_lease(self, request_id: str, now_ns: int) -> None:
        """A decode engine has this request in its queue; an unknown one is ignored."""
        lease = self.leases.get(request_id)
        if lease is not None:
            lease.expires_ns = max(lease.expires_ns, now_ns + round(self._lease_ns * _HEARTBEAT_EXTENDS))

    # -- time -------------------------------------------------------------------------------------------------------

    def next_due_ns(self) -> int | None:
        """When :meth:`advance` has something to do; None while nothing is under way."""
        while self._timers and not self._is_live(self._timers[0]):
            heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def advance(self, now_ns: int, events_max: int = 64) -> list[Effect]:
        """Do what is due by ``now_ns``, at most ``events_max`` events, so that the shell can serve others in
        between."""
        for _ in range(events_max):
            due_ns = self.next_due_ns()
            if due_ns is None or due_ns > now_ns:
                break
            _, _, kind, subject = heappop(self._timers)
            if isinstance(subject, Lease):
                self._lease_ended(subject, due_ns)
            elif kind == _DECODE:
                self._decode(subject, due_ns)
            elif kind == _PREFILL_END:
                self._prefilled(subject, due_ns)
            elif kind == _LOAD_END:
                self._loaded(subject, due_ns)
            else:
                self._produce(subject, due_ns)
        return self._take()

    def _set_timer(self, kind: int, due_ns: int, subject: Sequence | Lease) -> None:
        order = self._next_order()
        if isinstance(subject, Sequence):
            subject.timer = order
        heappush(self._timers, (due_ns, order, kind, subject))

    def _is_live(self, timer: tuple[int, int, int, Sequence | Lease]) -> bool:
        _, order, _, subject = timer
        if isinstance(subject, Sequence):
            return subject.timer == order
        return self.leases.get(subject.request_id) is subject

    # -- the schedule -----------------------------------------------------------------------------------------------

    def _admit(self, now_ns: int) -> None:
        """Start whatever can start, oldest first; only a prefill that waits for another is overtaken by a pull."""
        while len(self._running) < self.options.max_num_seqs:
            heads = [queue for queue in (self._waiting_local, self._waiting_remote) if queue]
            if self._prefilling is not None:
                heads = [queue for queue in heads if queue is self._waiting_remote]
            if not heads:
                return
            queue = min(heads, key=lambda waiting: waiting[0].order)
            if not self._place(queue[0]):
                return
            self._start(queue.popleft(), now_ns)

    def _place(self, sequence: Sequence) -> bool:
        """Give a sequence its prompt's blocks, cached ones first, and reserve those for its answer; False: no room."""
        kv, num_prompt = self.kv, len(sequence.prompt)
        # The last prompt token is computed even when it is cached: its answer is what the first token comes from.
        cached = kv.lookup(sequence.keys[: (num_prompt - 1) // kv.block_size_tokens])
        num_prompt_blocks = kv.num_blocks_for(num_prompt)
        num_blocks = kv.num_blocks_for(num_prompt + sequence.max_tokens - 1)
        if kv.num_available < num_blocks - len(cached) + kv.num_idle(cached):
            return False
        kv.acquire(cached)
        sequence.block_ids = cached + kv.allocate(num_prompt_blocks - len(cached))
        sequence.num_reserved_blocks = num_blocks - num_prompt_blocks
        kv.num_reserved += sequence.num_reserved_blocks
        sequence.num_cached_tokens = len(cached) * kv.block_size_tokens
        return True

    def _start(self, sequence: Sequence, now_ns: int) -> None:
        num_prompt, num_cached = len(sequence.prompt), sequence.num_cached_tokens
        self._running.add(sequence)
        sequence.started_ns = now_ns
        self.counters.num_prefix_queries += num_prompt
        self.counters.num_prefix_hits += num_cached
        if sequence.remote is None:
            sequence.stage = Stage.PREFILLING
            self._prefilling = sequence
            self._take_loaded(sequence)
            spec, num_there = self.options.spec, num_cached + sequence.num_pulled_tokens
            seconds = spec.prefill_overhead_ms / 1e3 + (num_prompt - num_there) / spec.prefill_tokens_per_s
            self._set_timer(_PREFILL_END, now_ns + round(seconds * sequence.slowdown * 1e9), sequence)
            return
        sequence.stage = Stage.PULLING
        self.counters.num_external_queries += num_prompt - num_cached
        num_blocks = len(self._blocks_to_pull(sequence))
        if len(sequence.remote.block_ids) < num_blocks:
            self._load_failed(sequence, now_ns)
        else:
            block_ids = sequence.remote.block_ids[-num_blocks:]
            self._effects.append(PullBlocks(sequence, sequence.remote, block_ids))

    def _take_loaded(self, sequence: Sequence) -> None:
        """What the cache server had goes into the blocks behind the engine's own hit; the last token is computed."""
        size = self.kv.block_size_tokens
        first, last = sequence.num_cached_tokens // size, min(len(sequence.loaded), (len(sequence.prompt) - 1) // size)
        if sequence.handed_over is not None:
            self.counters.num_external_queries += len(sequence.prompt) - sequence.num_cached_tokens
        if last > first:
            for index in range(first, last):
                self.kv.write(sequence.block_ids[index], sequence.loaded[index])
            sequence.num_pulled_tokens = (last - first) * size
            self.counters.num_external_hits += sequence.num_pulled_tokens
        sequence.loaded = []

    def _blocks_to_pull(self, sequence: Sequence) -> list[int]:
        return sequence.block_ids[sequence.num_cached_tokens // self.kv.block_size_tokens :]

    def _transfer_bytes(self, num_blocks: int) -> int:
        return num_blocks * self.kv.block_size_tokens * KV_BYTES_PER_TOKEN

    def _prefilled(self, sequence: Sequence, now_ns: int) -> None:
        num_there = sequence.num_cached_tokens + sequence.num_pulled_tokens
        self.kv.compute(sequence.root, sequence.block_ids, num_there, sequence.packed[8 * num_there :])
        self.counters.num_computed_tokens += len(sequence.prompt) - num_there
        self._publish_prompt(sequence)
        if sequence.stores:
            contents = self.kv.read(sequence.block_ids[: len(sequence.keys)])
            self._effects.append(StoreBlocks(sequence, contents))
        self._prefilling = None
        sequence.stage = Stage.DECODING
        self._produce(sequence, now_ns)
        self._admit(now_ns)

    def _loaded(self, sequence: Sequence, now_ns: int) -> None:
        assert sequence.remote is not None
        counters, block_ids = self.counters, self._blocks_to_pull(sequence)
        counters.num_transfers += 1
        num_bytes = self._transfer_bytes(len(block_ids))
        self._effects.append(NotifyRemote(sequence.remote, num_bytes, now_ns - sequence.started_ns))
        if sequence.is_aborted:
            self._finish(sequence, "abort", now_ns)
            self._admit(now_ns)
            return
        for block, content in zip(block_ids, sequence.pulled, strict=True):
            self.kv.write(block, content)
        sequence.pulled = []
        sequence.num_pulled_tokens = len(sequence.prompt) - sequence.num_cached_tokens
        counters.num_external_hits += sequence.num_pulled_tokens
        self._publish_prompt(sequence)
        sequence.stage = Stage.DECODING
        self._set_timer(_FIRST_TOKEN, now_ns + round(self._decode_ns * sequence.slowdown), sequence)

    def _load_failed(self, sequence: Sequence, now_ns: int) -> None:
        self.counters.num_failed_transfers += 1
        if sequence.is_aborted:
            self._finish(sequence, "abort", now_ns)
        elif self.options.load_failure == "fail":
            self._finish(sequence, "error", now_ns)
            self._effects.append(Failed(sequence))
        else:
            self._give_up_blocks(sequence)
            sequence.stage, sequence.remote, sequence.num_cached_tokens = Stage.WAITING, None, 0
            self._waiting_local.appendleft(sequence)

    def _publish_prompt(self, sequence: Sequence) -> None:
        for index in range(sequence.num_cached_tokens // self.kv.block_size_tokens, len(sequence.keys)):
            if self._log is not None:
                self._log.describe(sequence, index, sequence.keys[index])
            self.kv.publish(sequence.block_ids[index], sequence.keys[index])

    def _decode(self, sequence: Sequence, now_ns: int) -> None:
        """Compute the KV of the newest token, then produce the one that follows it."""
        kv = self.kv
        position = len(sequence.prompt) + len(sequence.output) - 1
        if position % kv.block_size_tokens == 0:
            sequence.num_reserved_blocks -= 1
            kv.num_reserved -= 1
            sequence.block_ids += kv.allocate(1)
        packed = pack(sequence.output[-1:])
        kv.compute(sequence.root, sequence.block_ids, position, packed)
        sequence.key_state = extend(sequence.key_state, packed)
        if (position + 1) % kv.block_size_tokens == 0:
            sequence.keys.append(sequence.key_state)
            if self._log is not None:
                self._log.describe(sequence, len(sequence.keys) - 1, sequence.key_state)
            kv.publish(sequence.block_ids[-1], sequence.key_state)
        self._produce(sequence, now_ns)

    def _produce(self, sequence: Sequence, now_ns: int) -> None:
        output = sequence.output
        output.append(self.kv.next_token(sequence.block_ids, sequence.choice))
        if len(output) == 1:
            sequence.first_token_ns = now_ns
            self.counters.num_prompt_tokens += len(sequence.prompt)
        self.counters.num_generated_tokens += 1
        if len(output) < sequence.max_tokens:
            self._effects.append(Produced(sequence, len(output) - 1, None, now_ns))
            self._set_timer(_DECODE, now_ns + round(self._decode_ns * sequence.slowdown), sequence)
            return
        reason = "stop" if sequence.stops_naturally else "length"
        self._finish(sequence, reason, now_ns)
        self._effects.append(Produced(sequence, len(output) - 1, reason, now_ns))
        self._admit(now_ns)

    def _finish(self, sequence: Sequence, reason: str, now_ns: int) -> None:
        if sequence is self._prefilling:
            self._prefilling = None
        sequence.finish_reason, sequence.finished_ns = reason, now_ns
        self.counters.finished[reason] += 1
        if sequence.hands_over and reason in ("stop", "length"):
            lease = Lease(sequence.request_id, sequence.block_ids, now_ns + self._lease_ns)
            self.leases[lease.request_id] = lease
            self.counters.num_leases += 1
            self._set_timer(_LEASE_END, lease.expires_ns, lease)
            self.kv.num_reserved -= sequence.num_reserved_blocks
            self._running.discard(sequence)
        else:
            self._give_up_blocks(sequence)
        sequence.stage, sequence.timer = Stage.FINISHED, -1

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self._running.discard(sequence)
        self.kv.num_reserved -= sequence.num_reserved_blocks
        self.kv.free(sequence.block_ids)
        sequence.block_ids, sequence.num_reserved_blocks = [], 0

    def _lease_ended(self, lease: Lease, now_ns: int) -> None:
        if lease.expires_ns > now_ns:
            self._set_timer(_LEASE_END, lease.expires_ns, lease)
            return
        del self.leases[lease.request_id]
        self.counters.num_leases_expired += 1
        self.kv.free_and_overwrite(lease.block_ids)
        self._admit(now_ns)

    # -- looking at it ----------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that prefill or decode."""
        return sum(sequence.stage is not Stage.PULLING for sequence in self._running)

    @property
    def num_pulling(self) -> int:
        """Sequences whose KV is on its way; vLLM counts them as waiting."""
        return len(self._running) - self.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that have not started, or whose KV is on its way."""
        return len(self._waiting_local) + len(self._waiting_remote) + self.num_pulling

    def waiting_remotes(self) -> list[Sequence]:
        """Sequences whose lease on a prefill engine must be kept alive."""
        pulling = [sequence for sequence in self._running if sequence.stage is Stage.PULLING]
        return [*self._waiting_remote, *pulling]

    def validate(self) -> None:
        """Check the invariants; for tests and simulation.

        Raises:
            AssertionError: one does not hold.
        """
        self.kv.validate()
        held = {block for sequence in self._running for block in sequence.block_ids}
        held.update(block for lease in self.leases.values() for block in lease.block_ids)
        assert len(held) == self.kv.num_used, "blocks are held by nobody"
        assert sum(sequence.num_reserved_blocks for sequence in self._running) == self.kv.num_reserved
        assert len(self._running) <= self.options.max_num_seqs
        for waiting in (*self._waiting_local, *self._waiting_remote):
            assert waiting.stage is Stage.WAITING and not waiting.block_ids

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def _take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
