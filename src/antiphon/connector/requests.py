"""What the scheduler side knows of a request: its chunk keys, its blocks, its promise, and where its tokens came from.

Values and arithmetic; the calls to the cache server are in ``scheduler``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon.client.pending import Pending
from antiphon.client.session import Session
from antiphon.connector.compat import RequestFields
from antiphon.core.chunks import ChunkChain, MultimodalItem
from antiphon.core.namespace import NamespaceDigest
from antiphon.protocol.cache import Region


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What the KV of a request means beyond its tokens.

    Args:
        namespace: digest of its namespace.
        tenant: whose quota and statistics.
        items: its multimodal items.
    """

    namespace: NamespaceDigest
    tenant: str
    items: tuple[MultimodalItem, ...] = ()


@dataclass(slots=True)
class LookupCall:
    """A question that was sent. ``sent_s``: when, in seconds of the monotonic clock."""

    session: Session
    pending: Pending
    sent_s: float


@dataclass(frozen=True, slots=True)
class Promise:
    """What a lookup found: leased, so that it can be loaded.

    Args:
        session: through which it was leased.
        lease: None where nothing was found.
        regions: one a chunk, from the first on.
        num_tokens: tokens of these chunks.
        found_s: when it was asked for, in seconds of the monotonic clock.
        is_capped: more was readable, and held back.
    """

    session: Session | None
    lease: int | None
    regions: tuple[Region, ...]
    num_tokens: int
    found_s: float
    is_capped: bool = False


@dataclass(slots=True)
class Sources:
    """Where the prompt tokens of a request came from: each is counted once, when it is first there.

    ``computed`` is added up from what was scheduled, never a difference, so that the sum over all is a check. What a
    preempted request does again is not counted.

    Args:
        num_known: tokens from the first on that have a source.
    """

    device: int = 0
    l1: int = 0
    remote_prefill: int = 0
    computed: int = 0
    num_preemptions: int = 0
    num_known: int = 0

    def step(self, num_computed: int, num_scheduled: int, *, local_tokens: int, is_from_l1: bool, prompt: int) -> None:
        """A step computes ``num_scheduled`` tokens from token ``num_computed`` on.

        Args:
            local_tokens: the engine's own hit at the last admission.
            is_from_l1: whether what was loaded at the last admission came from the cache server.
            prompt: tokens of the prompt; later ones have no source.
        """
        there, end = min(num_computed, prompt), min(num_computed + num_scheduled, prompt)
        if there > self.num_known:
            device = max(0, min(local_tokens, there) - self.num_known)
            loaded = there - self.num_known - device
            self.device += device
            if is_from_l1:
                self.l1 += loaded
            else:
                self.remote_prefill += loaded
            self.num_known = there
        if end > self.num_known:
            self.computed += end - max(there, self.num_known)
            self.num_known = end

    @property
    def total(self) -> int:
        """Tokens with a source."""
        return self.device + self.l1 + self.remote_prefill + self.computed


@dataclass(slots=True)
class TrackedRequest:
    """One request of the engine.

    Args:
        request: vLLM's object.
        identity: None where reuse is bypassed.
        chain: chunk keys of the tokens given so far; None where reuse is bypassed.
        block_ids: its block table.
        num_stored_chunks: chunks that need not be offered any more.
        lookup: sent and not yet used.
        promise: what the last lookup found, until it is loaded or given up.
        local_tokens: the engine's own hit, as told with the last question.
        loading: blocks being filled from the arena.
        no_load: a load of this request has failed: it is computed.
        jobs: stores that have not ended.
        is_finished: vLLM is done with it; kept while a load or store runs.
    """

    request: RequestFields
    identity: RequestIdentity | None
    chain: ChunkChain | None
    block_ids: list[int] = field(default_factory=list)
    num_stored_chunks: int = 0
    lookup: LookupCall | None = None
    promise: Promise | None = None
    local_tokens: int = 0
    loading: frozenset[int] = frozenset()
    no_load: bool = False
    is_from_l1: bool = False
    jobs: set[int] = field(default_factory=set)
    sources: Sources = field(default_factory=Sources)
    is_finished: bool = False

    def extend_chain(self, num_tokens: int) -> int:
        """Hashes the full chunks of the first ``num_tokens`` tokens that were not hashed before.

        Returns:
            The number of these chunks.
        """
        assert self.chain is not None
        num_chunks = num_tokens // self.chain.chunk_size_tokens
        known, end = self.chain.num_tokens, num_chunks * self.chain.chunk_size_tokens
        if end > known:
            self.chain.extend(self.request.all_token_ids[known:end])
        return num_chunks
