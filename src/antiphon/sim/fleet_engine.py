"""A model of an engine: how long prefill and decode take, what its KV holds, and what it says of that.

``H200_8B`` is what was measured of vLLM 0.26 with a model of 8 billion parameters (the shape of Llama 3.1 8B, bf16) on
one H200; what was not measured says so. Times to first token in ms, measured and by this model:

    prompt tokens     2,048      8,192      16,000     32,768
    prefill           54, 59     220, 218   483, 480   1,240, 1,257
    all of it held    20, 19     34, 32     48, 48     80, 81

Prefill is first come, first served, in steps of a limited number of tokens; a prompt's blocks are held from its first
step until the decode engine has pulled them. Decode is a batch whose sequences go on at one pace. A prompt that finds
no room for its blocks waits, and those behind it with it, as in vLLM.

It does not model: preemption, since room for the whole answer is held from the beginning; prompts that end early;
CUDA graphs, speculation, or the cost of sampling.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from antiphon.sim.fleet_blocks import Blocks
from antiphon.sim.fleet_link import Card, Links
from antiphon.sim.fleet_trace import BLOCK_TOKENS
from antiphon.sim.timeline import Timeline

MAX_SEQUENCES = 256
"""Requests that one engine computes at a time: vLLM's ``max_num_seqs``."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What an engine can do.

    Args:
        front_s, front_token_s: of each request, and of each token of its prompt: HTTP, tokenizer, scheduling. It adds
            to the time to first token and takes nothing from other requests.
        token_s, pair_s: of prefill, of each token, and of each pair of a token and one before it.
        step_s: of a step of prefill.
        step_tokens: tokens of a step: vLLM's ``max_num_batched_tokens``.
        decode_s, decode_sequence_s, decode_token_s: of a step of decode, of each sequence in it, and of each token that
            they hold.
        kv_bytes: of a token.
        kv_tokens: that the engine's KV holds.
        card_bytes_per_s: of its network card.
        transfer_s: of a transfer, before its first byte.
        event_s: from the end of a step until the router has its KV events.
        scale: tokens of a real engine that one token here stands for.
    """

    front_s: float
    front_token_s: float
    token_s: float
    pair_s: float
    step_s: float
    step_tokens: int
    decode_s: float
    decode_sequence_s: float
    decode_token_s: float
    kv_bytes: int
    kv_tokens: int
    card_bytes_per_s: float
    transfer_s: float
    event_s: float
    scale: int = 1

    def scaled(self, scale: int) -> EngineModel:
        """The same engine where a token stands for ``scale`` tokens."""
        return replace(
            self,
            scale=self.scale * scale,
            front_token_s=self.front_token_s * scale,
            token_s=self.token_s * scale,
            pair_s=self.pair_s * scale * scale,
            step_tokens=self.step_tokens // scale,
            decode_token_s=self.decode_token_s * scale,
            kv_bytes=self.kv_bytes * scale,
            kv_tokens=self.kv_tokens // scale,
        )

    def prefill_s(self, first: int, last: int) -> float:
        """Computing the tokens ``first`` up to ``last`` of a prompt."""
        return self.token_s * (last - first) + self.pair_s * (last * last - first * first)


H200_8B = EngineModel(
    front_s=0.011,
    front_token_s=2.0e-6,
    token_s=1.85e-5,
    pair_s=5.2e-10,
    step_s=0.004,  # assumed
    step_tokens=8192,
    decode_s=0.006,  # assumed: 16 GB of weights at about 3 TB/s
    decode_sequence_s=1.0e-5,  # assumed
    decode_token_s=3.7e-8,  # 128 KiB at 3.5 TB/s
    kv_bytes=131_072,
    kv_tokens=800_000,  # 105 GB: 0.9 of 141 GB without the weights and 6 GB of activations
    card_bytes_per_s=45e9,  # 400 Gb/s RDMA, of which 45 to 48 GB/s are usable
    transfer_s=0.002,  # assumed
    event_s=0.005,  # assumed
)


class Job:
    """One request at engines.

    Args:
        num_tokens, num_output: of prompt and answer.
        keys: of the full blocks of the prompt.
    """

    def __init__(self, number: int, num_tokens: int, num_output: int, keys: list[int]) -> None:
        self.number = number
        self.num_tokens = num_tokens
        self.num_output = num_output
        self.keys = keys
        self.num_hit = 0
        """Tokens that the prefill engine held."""
        self.num_computed = 0
        self.num_pulled = 0
        """Tokens that the decode engine pulled."""
        self.num_told = 0
        """Blocks whose events are out."""

    @property
    def num_private(self) -> int:
        """Blocks of the end of the prompt."""
        return -(-self.num_tokens // BLOCK_TOKENS) - len(self.keys)


class Publisher:
    """Says what an engine's KV holds, some time later, in order, all of a step at once.

    Args:
        listener: gets what is said; None where nobody listens.
    """

    def __init__(self, timeline: Timeline, delay_s: float, listener: KvListener | None) -> None:
        self._timeline = timeline
        self._delay_s = delay_s
        self._listener = listener
        self._batch: list[tuple[int | None, Sequence[int], bool]] = []
        self._removed: list[int] = []
        """The end of the batch, if that is blocks given away."""

    def stored(self, parent: int | None, keys: Sequence[int]) -> None:
        """Blocks are computed or pulled; the first of them follows ``parent``."""
        if self._listener is not None and keys:
            self._batch.append((parent, keys, True))
            self._removed = []

    def removed(self, key: int) -> None:
        """A block is given away."""
        if self._listener is None:
            return
        if not self._removed:
            self._batch.append((None, self._removed, False))
        self._removed.append(key)

    def flush(self) -> None:
        """The step has ended."""
        listener, batch = self._listener, self._batch
        if listener is not None and batch:
            self._batch, self._removed = [], []
            self._timeline.after(self._delay_s, lambda: listener(batch))


KvListener = Callable[[list[tuple[int | None, Sequence[int], bool]]], None]
"""Takes a batch: parent and keys, and whether they are stored or removed."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Who is told of a request's way through a decode engine.

    Args:
        on_first, on_done: its first token, and its last.
    """

    on_first: Callable[[], None]
    on_done: Callable[[], None]


class PrefillEngine:
    """Computes prompts in the order in which they came.

    Args:
        model: scaled as the requests are.
        on_computed: told of a prompt whose KV is complete.
    """

    def __init__(self, name: str, model: EngineModel, timeline: Timeline, listener: KvListener | None) -> None:
        self.name = name
        self.model = model
        self.card = Card(name, model.card_bytes_per_s)
        self.publisher = Publisher(timeline, model.event_s, listener)
        self.blocks = Blocks(model.kv_tokens // BLOCK_TOKENS, self.publisher.removed)
        self.waiting: deque[tuple[Job, Callable[[], None]]] = deque()
        self.running: list[tuple[Job, Callable[[], None]]] = []
        self.num_requests = 0
        self.num_computed = 0
        self.busy_s = 0.0
        self._timeline = timeline
        self._is_stepping = False

    def submit(self, job: Job, on_computed: Callable[[], None]) -> None:
        """A prompt comes; its KV stays until :meth:`release`."""
        self.num_requests += 1

        def enter() -> None:
            self.waiting.append((job, on_computed))
            self._wake()

        self._timeline.after(self.model.front_s + self.model.front_token_s * job.num_tokens, enter)

    def release(self, job: Job) -> None:
        """The decode engine has pulled the KV."""
        self.blocks.release(job.keys, job.num_private)
        self._wake()

    def _wake(self) -> None:
        if not self._is_stepping and (self.waiting or self.running):
            self._step()

    def _step(self) -> None:
        model, budget, duration_s = self.model, self.model.step_tokens, self.model.step_s
        while budget and self._has_next(budget):
            job = self.running[-1][0]
            num = min(budget, job.num_tokens - job.num_computed)
            duration_s += model.prefill_s(job.num_computed, job.num_computed + num)
            job.num_computed += num
            budget -= num
            self.num_computed += num
        if budget == model.step_tokens:
            self._is_stepping = False
            return
        self._is_stepping = True
        self.busy_s += duration_s
        self._timeline.after(duration_s, self._end_step)

    def _has_next(self, budget: int) -> bool:
        """Whether the last running prompt, or the next that waits and finds room, has something to compute."""
        if self.running and self.running[-1][0].num_computed < self.running[-1][0].num_tokens:
            return True
        if not self.waiting or len(self.running) >= MAX_SEQUENCES:
            return False
        job, _ = self.waiting[0]
        blocks = self.blocks
        num_hit = min(blocks.match(job.keys), (job.num_tokens - 1) // BLOCK_TOKENS)
        if not blocks.take(job.keys, job.num_private):
            return False
        job.num_told = len(job.keys) - len(blocks.found(job.keys))
        job.num_hit = job.num_computed = num_hit * BLOCK_TOKENS
        self.running.append(self.waiting.popleft())
        return True

    def _end_step(self) -> None:
        ended = [one for one in self.running if one[0].num_computed == one[0].num_tokens]
        for job, _ in self.running:
            num = job.num_computed // BLOCK_TOKENS
            if num > job.num_told:
                parent = job.keys[job.num_told - 1] if job.num_told else None
                self.publisher.stored(parent, job.keys[job.num_told : num])
                job.num_told = num
        self.publisher.flush()
        self.running = self.running[len(ended) :]
        self._is_stepping = False
        for _, on_computed in ended:
            on_computed()
        self._wake()

    def validate(self) -> None:
        """Assert the invariants."""
        self.blocks.validate()
        for job, _ in self.running:
            assert job.num_hit <= job.num_computed <= job.num_tokens


class DecodeEngine:
    """Pulls what it lacks of a prompt, then decodes in a batch of one pace.

    Between two changes of the batch every sequence gets equally many tokens, so that what counts is one number for all,
    ``_pace``: the tokens that a sequence would have that had been there from the beginning.
    """

    def __init__(
        self, name: str, model: EngineModel, timeline: Timeline, listener: KvListener | None, links: Links
    ) -> None:
        self.name = name
        self.model = model
        self.card = Card(name, model.card_bytes_per_s)
        self.publisher = Publisher(timeline, model.event_s, listener)
        self.blocks = Blocks(model.kv_tokens // BLOCK_TOKENS, self.publisher.removed)
        self.waiting: deque[tuple[Job, PrefillEngine, Stages]] = deque()
        self.num_requests = 0
        self.num_pulling = 0
        self.busy_s = 0.0
        self._timeline = timeline
        self._links = links
        self._batch: list[tuple[float, int, Job, Callable[[], None]]] = []
        self._num_held_tokens = 0
        self._pace = 0.0
        self._since_s = 0.0
        self._num_changes = 0

    @property
    def num_decoding(self) -> int:
        """Sequences in the batch."""
        return len(self._batch)

    @property
    def step_s(self) -> float:
        """A step of the batch as it is."""
        model = self.model
        return (
            model.decode_s + model.decode_sequence_s * len(self._batch) + model.decode_token_s * self._num_held_tokens
        )

    def submit(self, job: Job, source: PrefillEngine, stages: Stages) -> None:
        """A request with a handle of ``source``."""
        self.num_requests += 1

        def enter() -> None:
            self.waiting.append((job, source, stages))
            self._admit()

        self._timeline.after(self.model.front_s + self.model.front_token_s * job.num_tokens, enter)

    def _admit(self) -> None:
        while self.waiting and self.num_pulling + len(self._batch) < MAX_SEQUENCES:
            job, source, stages = self.waiting[0]
            num_held = self.blocks.match(job.keys)
            if not self.blocks.take(job.keys, _num_answer_blocks(job)):
                return
            self.waiting.popleft()
            job.num_pulled = job.num_tokens - num_held * BLOCK_TOKENS
            self._pull(job, source, stages)

    def _pull(self, job: Job, source: PrefillEngine, stages: Stages) -> None:
        self.num_pulling += 1

        def pulled() -> None:
            source.release(job)
            self.num_pulling -= 1
            new = self.blocks.found(job.keys)
            num_old = len(job.keys) - len(new)
            self.publisher.stored(job.keys[num_old - 1] if num_old else None, new)
            self.publisher.flush()
            self._change()
            self._num_held_tokens += job.num_tokens + job.num_output // 2
            heapq.heappush(self._batch, (self._pace + job.num_output, job.number, job, stages.on_done))
            self._timeline.after(self.step_s, stages.on_first)
            self._wait_for_next()

        self._links.send(source.card, self.card, job.num_pulled * self.model.kv_bytes, pulled)

    def _change(self) -> None:
        """Bring the pace up to now."""
        now_s = self._timeline.now_s
        if self._batch:
            self._pace += (now_s - self._since_s) / self._token_s
            self.busy_s += now_s - self._since_s
        self._since_s = now_s

    @property
    def _token_s(self) -> float:
        """Time for one token of the simulation, of each sequence."""
        return self.step_s * self.model.scale

    def _wait_for_next(self) -> None:
        self._num_changes += 1
        change = self._num_changes
        if self._batch:
            delay_s = max(0.0, self._batch[0][0] - self._pace) * self._token_s
            self._timeline.after(delay_s, lambda: self._end_first(change))

    def _end_first(self, change: int) -> None:
        if change != self._num_changes:
            return
        self._change()
        until, _, job, on_done = heapq.heappop(self._batch)
        self._pace = max(self._pace, until)
        self._num_held_tokens -= job.num_tokens + job.num_output // 2
        self.blocks.release(job.keys, _num_answer_blocks(job))
        self._wait_for_next()
        on_done()
        self._admit()

    def validate(self) -> None:
        """Assert the invariants."""
        self.blocks.validate()
        assert self.num_pulling + len(self._batch) <= MAX_SEQUENCES


def _num_answer_blocks(job: Job) -> int:
    """Private blocks on a decode engine: the end of the prompt, and the answer."""
    return -(-(job.num_tokens + job.num_output) // BLOCK_TOKENS) - len(job.keys)
