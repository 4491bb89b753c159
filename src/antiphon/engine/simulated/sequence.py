"""The records of the simulated engine: one sequence, one lease, what the engine asks its shell to do, its counters.

Data only. :class:`~antiphon.engine.simulated.machine.SimulatedEngine` is the one that changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from antiphon.protocol.cache_handoff import HandoffKey


class Stage(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    """In a queue; holds no block."""
    PREFILLING = "prefilling"
    PULLING = "pulling"
    """Its blocks are allocated and the bytes are on their way from a prefill engine."""
    DECODING = "decoding"
    FINISHED = "finished"


class RemoteKv(NamedTuple):
    """The handle of KV that another engine holds, from ``kv_transfer_params``."""

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...]
    num_cached_tokens: int | None = None
    """What the prefill engine found in its own prefix cache; reported in ``usage`` as vLLM does."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and one answer. A request with several prompts or ``n`` > 1 is several sequences."""

    request_id: str
    """Unique in this engine's life: vLLM's internal id, with its random suffix."""
    prompt: list[int]
    max_tokens: int
    owner: object = None
    """Whatever the shell wants to find again; never looked at."""
    choice: int = 0
    namespace: str = ""
    stops_naturally: bool = False
    """The limit is the model's own end, not the client's: the finish reason is ``stop``."""
    hands_over: bool = False
    """``do_remote_decode``: the KV is kept under a lease for a decode engine."""
    remote: RemoteKv | None = None
    stores: bool = False
    """``antiphon_handoff``: the KV is stored in the cache server for a decode engine."""
    handed_over: HandoffKey | None = None
    """What a prefill engine has stored of it."""
    loaded: list[bytes] = field(default_factory=list)
    """Bytes of its first blocks, as the cache server had them."""
    traceparent: str = ""
    """W3C trace context of its request; empty where it came with none."""
    slowdown: float = 1.0
    """Factor on prefill and decode times; a fault."""

    stage: Stage = Stage.WAITING
    order: int = 0
    """Its place in the order of arrival, from 1; 0 until it is submitted."""
    block_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Prompt tokens found in this engine's own prefix cache."""
    num_pulled_tokens: int = 0
    """Prompt tokens that were pulled from a prefill engine, or loaded from the cache server."""
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    is_aborted: bool = False
    arrival_ns: int = 0
    started_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    timer: int = -1
    """Number of the one timer that may still fire for this sequence."""
    root: int = 0
    packed: bytes = b""
    keys: list[int] = field(default_factory=list)
    key_state: int = 0
    pulled: list[bytes] = field(default_factory=list)
    num_reserved_blocks: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks kept for a decode engine after their prefill has finished."""

    request_id: str
    block_ids: list[int]
    expires_ns: int


class Produced(NamedTuple):
    """A sequence has one more token, ``output[position]``; with ``finish_reason`` it is the last one.

    By the time that this is read, the sequence may have further tokens.
    """

    sequence: Sequence
    position: int
    finish_reason: str | None
    at_ns: int


class Failed(NamedTuple):
    """A sequence ends without an answer: its KV could not be loaded."""

    sequence: Sequence


class PullBlocks(NamedTuple):
    """Get the bytes of ``block_ids`` from ``remote``, then call ``pull_finished`` or ``pull_failed``."""

    sequence: Sequence
    remote: RemoteKv
    block_ids: tuple[int, ...]


class NotifyRemote(NamedTuple):
    """Tell the prefill engine that its blocks are not needed any more; without bytes nothing was pulled."""

    remote: RemoteKv
    num_bytes: int = 0
    transfer_ns: int = 0


class StoreBlocks(NamedTuple):
    """Store the bytes of a prompt's full blocks in the cache server. Nothing is to be called when that is done."""

    sequence: Sequence
    contents: list[bytes]


Effect = Produced | Failed | PullBlocks | NotifyRemote | StoreBlocks


@dataclass(slots=True)
class EngineCounters:
    """What has happened since the start; every one only grows."""

    num_requests: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_external_queries: int = 0
    num_external_hits: int = 0
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))
    num_transfers: int = 0
    """Pulls that this engine completed as a decode engine."""
    num_failed_transfers: int = 0
    num_leases: int = 0
    num_leases_expired: int = 0
    num_late_notifications: int = 0
    """Notifications for a lease that was not held (any more)."""
    num_reads: int = 0
    """Reads by decode engines of blocks under a lease."""
    num_stale_reads: int = 0
    """Reads of blocks whose lease had ended: the reader got other bytes."""
