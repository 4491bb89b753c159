"""Several pure simulated engines in virtual time, joined by a side channel that is a method call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from antiphon.config.simulated_spec import SimulatedSpec
from antiphon.engine.simulated.machine import EngineOptions, SimulatedEngine
from antiphon.engine.simulated.sequence import (
    Effect,
    Failed,
    NotifyRemote,
    Produced,
    PullBlocks,
    RemoteKv,
    Sequence,
    Stage,
)

MS = 1_000_000


def options(
    *, max_num_seqs: int = 256, load_failure: Any = "fail", model_name: str = "m", **spec: Any
) -> EngineOptions:
    """Options of an engine with small blocks; ``spec`` are fields of SimulatedSpec."""
    defaults: dict[str, Any] = {"block_size_tokens": 4, "kv_blocks": 64}
    return EngineOptions(SimulatedSpec(**(defaults | spec)), model_name, max_num_seqs, load_failure)


@dataclass
class World:
    """Engines by id. Reads and notifications between them happen at once, or never for ids in ``dead``."""

    engines: dict[str, SimulatedEngine]
    now_ns: int = 0
    dead: set[str] = field(default_factory=set)
    held_pulls: list[tuple[str, PullBlocks]] | None = None
    """When a list, pulls wait here instead of being carried out."""
    tainted: set[str] = field(default_factory=set)
    """Engines that have read blocks without a lease: their answers, and what they cached, may be wrong."""
    log: list[tuple[int, str, str | None]] = field(default_factory=list)
    """(time, request id, finish reason) of every token."""
    _num_submitted: int = 0

    @classmethod
    def of(cls, *names: str, **settings: Any) -> World:
        """A world of equal engines."""
        return cls({name: SimulatedEngine(options(**settings)) for name in names})

    def submit(self, engine_id: str, prompt: list[int], max_tokens: int = 4, **fields: Any) -> Sequence:
        """Submit a sequence now."""
        self._num_submitted += 1
        sequence = Sequence(f"r{self._num_submitted}", prompt, max_tokens, **fields)
        self.perform(engine_id, self.engines[engine_id].submit(sequence, self.now_ns))
        return sequence

    def abort(self, engine_id: str, sequence: Sequence) -> None:
        """Abort a sequence now."""
        self.perform(engine_id, self.engines[engine_id].abort(sequence, self.now_ns))

    def perform(self, engine_id: str, effects: list[Effect]) -> None:
        """What a shell does."""
        for effect in effects:
            if isinstance(effect, Produced):
                self.log.append((effect.at_ns, effect.sequence.request_id, effect.finish_reason))
            elif isinstance(effect, NotifyRemote):
                if effect.remote.engine_id not in self.dead:
                    peer = self.engines[effect.remote.engine_id]
                    released = peer.release_lease(effect.remote.request_id, self.now_ns)
                    self.perform(effect.remote.engine_id, released)
            elif isinstance(effect, PullBlocks):
                if self.held_pulls is None:
                    self.carry_out(engine_id, effect)
                else:
                    self.held_pulls.append((engine_id, effect))
            else:
                assert isinstance(effect, Failed)
                self.log.append((self.now_ns, effect.sequence.request_id, "error"))

    def carry_out(self, engine_id: str, pull: PullBlocks) -> None:
        """Read the blocks of a pull, or let it fail when the other engine is dead."""
        engine = self.engines[engine_id]
        if pull.remote.engine_id in self.dead:
            self.perform(engine_id, engine.pull_failed(pull.sequence, self.now_ns))
            return
        if pull.remote.request_id not in self.engines[pull.remote.engine_id].leases:
            self.tainted.add(engine_id)
        contents = self.engines[pull.remote.engine_id].read_blocks(pull.remote.request_id, list(pull.block_ids))
        engine.pull_finished(pull.sequence, contents, self.now_ns)

    def run(self, until_ns: int | None = None) -> None:
        """Let time pass until ``until_ns``, or until nothing is under way except leases."""
        while True:
            due = {name: engine.next_due_ns() for name, engine in self.engines.items()}
            upcoming = [(at, name) for name, at in due.items() if at is not None]
            is_busy = any(engine.num_running or engine.num_waiting for engine in self.engines.values())
            if not upcoming or (until_ns is None and not is_busy):
                break
            at_ns, name = min(upcoming)
            if until_ns is not None and at_ns > until_ns:
                break
            self.now_ns = max(self.now_ns, at_ns)
            self.perform(name, self.engines[name].advance(self.now_ns))
        if until_ns is not None:
            self.now_ns = until_ns

    def prefill(self, engine_id: str, prompt: list[int], **fields: Any) -> RemoteKv:
        """Prefill on ``engine_id`` for a hand-over, and return the handle."""
        sequence = self.submit(engine_id, prompt, 1, hands_over=True, **fields)
        while sequence.stage is not Stage.FINISHED:
            due_ns = self.engines[engine_id].next_due_ns()
            assert due_ns is not None
            self.now_ns = max(self.now_ns, due_ns)
            self.perform(engine_id, self.engines[engine_id].advance(self.now_ns))
        return RemoteKv(engine_id, sequence.request_id, "h", 1, tuple(sequence.block_ids), sequence.num_cached_tokens)

    def answer(self, engine_id: str, prompt: list[int], max_tokens: int = 4, **fields: Any) -> list[int]:
        """Submit, run, and return the output tokens."""
        sequence = self.submit(engine_id, prompt, max_tokens, **fields)
        self.run()
        assert sequence.stage is Stage.FINISHED
        return sequence.output

    def validate(self) -> None:
        """Check every engine."""
        for engine in self.engines.values():
            engine.validate()
