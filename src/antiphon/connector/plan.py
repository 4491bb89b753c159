"""What the scheduler side tells the worker side each step, and what the worker side tells back. Values only.

They cross processes pickled by vLLM, so they hold plain data: no request, no tensor, no connection. vLLM's own base
classes are mixed in where vLLM is at hand (``vllm_connector``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon.protocol.cache import Region


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Blocks of one request to fill from the arena.

    Args:
        request: the engine's request id.
        incarnation: life of the cache server that leased the regions.
        regions: the chunks to read, in order.
        skip_blocks: blocks at the start of the first region that the engine has already.
        block_ids: the blocks to fill, in order; the last region may be used in part.
        promised_at_s: when the lease was known to be held, on the monotonic clock, which all processes of a host share.
            Only a connection that was there by then, and is since, protects the regions.
    """

    request: str
    incarnation: str
    regions: tuple[Region, ...]
    skip_blocks: int
    block_ids: tuple[int, ...]
    promised_at_s: float


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Full chunks of one request to offer to the cache server, complete when the forward of this step has run.

    Args:
        job: names the plan; given back when its copies have ended.
        request: the engine's request id.
        namespace: digest of the request's namespace.
        tenant: whose quota.
        parent: key of the chunk before the first; None where that is the first of the sequence.
        keys: consecutive chunk keys.
        block_ids: the blocks of these chunks, all of them, in order.
        traceparent: the span that the request is part of; empty where it is not traced.
    """

    job: int
    request: str
    namespace: bytes
    tenant: str
    parent: bytes | None
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    traceparent: str = ""


@dataclass(slots=True)
class StepPlan:
    """Everything for one step.

    Args:
        loads: begin after the compute of earlier steps.
        stores: begin after the forward of this step.
        preempted: requests whose blocks may be overwritten in this step: their copies end first.
        finished: requests that wait for the end of their stores; reported once each.
        incarnation: life of the cache server that promises are made on; None without a connection.
        made_at_s: when it was complete, on the monotonic clock: what later plans load is promised later. 0 where the
            scheduler side did not make it.
        cancel_stores: the scheduler side is out of order and cannot hold blocks back: all stores end first.
    """

    loads: list[LoadPlan] = field(default_factory=list)
    stores: list[StorePlan] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    incarnation: str | None = None
    made_at_s: float = 0.0
    cancel_stores: bool = False


@dataclass(slots=True)
class WorkerNews:
    """What the workers did since their last news.

    Args:
        stored: for each job, how many ranks have ended it.
        out_of_service: why a worker loads and stores nothing more; None where all do. Said in all later news too.
    """

    stored: dict[int, int] = field(default_factory=dict)
    out_of_service: str | None = None

    def merge(self, other: WorkerNews) -> None:
        """Adds the news of another rank."""
        for job, num_ranks in other.stored.items():
            self.stored[job] = self.stored.get(job, 0) + num_ranks
        self.out_of_service = self.out_of_service or other.out_of_service
