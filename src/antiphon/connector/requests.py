"""What the scheduler side knows of a request: its chunk keys, its blocks, its promise, and where its tokens came from.

Values and arithmetic; the calls to the cache server are in ``scheduler``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from antiphon.client.pending import Pending
from antiphon.client.session import Session
from antiphon.connector.compat import RequestFields
from antiphon.core.chunks import ChunkChain, MultimodalItem
from antiphon.core.namespace import NamespaceDigest
from antiphon.protocol.cache import PEER_SOURCE, Region
from antiphon.protocol.cache_handoff import HandoffKey

PROMISES_AHEAD_MAX = 256
"""Requests that may hold a promise before the scheduler asks for them, and as many again that it has asked for and not
scheduled. A queue may be thousands deep; what it pins cannot be evicted, for other engines either."""


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
        held_at_s: when its session was last seen open, in seconds of the monotonic clock: the lease was held then.
        l2_chunks: which of the regions came from a tier for this lookup.
        peer_chunks: which of them came from another cache server.
    """

    session: Session | None
    lease: int | None
    regions: tuple[Region, ...]
    num_tokens: int
    found_s: float
    is_capped: bool = False
    held_at_s: float = 0.0
    l2_chunks: frozenset[int] = frozenset()
    peer_chunks: frozenset[int] = frozenset()

    def with_fetched(self, fetched: tuple[tuple[str, tuple[int, ...]], ...]) -> Promise:
        """The promise, with the sources of the chunks that came for this lookup (``Found.fetched``)."""
        if not fetched:
            return self
        peer = frozenset(place for source, places in fetched if source == PEER_SOURCE for place in places)
        l2 = frozenset(place for source, places in fetched if source != PEER_SOURCE for place in places)
        return replace(self, l2_chunks=l2, peer_chunks=peer)

    def num_fetched_tokens(self, start: int, end: int, chunk_size_tokens: int) -> tuple[int, int]:
        """Tokens from ``start`` to ``end`` that lie in chunks from a tier, and in chunks from another cache server."""

        def num_in(chunks: frozenset[int]) -> int:
            places = ((chunk * chunk_size_tokens, (chunk + 1) * chunk_size_tokens) for chunk in chunks)
            return sum(max(0, min(end, last) - max(start, first)) for first, last in places)

        return num_in(self.l2_chunks), num_in(self.peer_chunks)


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
    l2: int = 0
    peer: int = 0

    def step(
        self,
        num_computed: int,
        num_scheduled: int,
        *,
        local_tokens: int,
        is_from_l1: bool,
        prompt: int,
        fetched_tokens: tuple[int, int] = (0, 0),
    ) -> None:
        """A step computes ``num_scheduled`` tokens from token ``num_computed`` on.

        Args:
            local_tokens: the engine's own hit at the last admission.
            is_from_l1: whether what was loaded at the last admission was found by the cache server; else it was handed
                over by a prefill engine.
            prompt: tokens of the prompt; later ones have no source.
            fetched_tokens: of those loaded at the last admission, how many came from a tier behind the server, and how
                many from another cache server.
        """
        there, end = min(num_computed, prompt), min(num_computed + num_scheduled, prompt)
        if there > self.num_known:
            device = max(0, min(local_tokens, there) - self.num_known)
            loaded = there - self.num_known - device
            self.device += device
            if is_from_l1:
                from_l2 = min(loaded, fetched_tokens[0])
                from_peer = min(loaded - from_l2, fetched_tokens[1])
                self.l2 += from_l2
                self.peer += from_peer
                self.l1 += loaded - from_l2 - from_peer
            else:
                self.remote_prefill += loaded
            self.num_known = there
        if end > self.num_known:
            self.computed += end - max(there, self.num_known)
            self.num_known = end

    @property
    def total(self) -> int:
        """Tokens with a source."""
        return self.device + self.l1 + self.l2 + self.peer + self.remote_prefill + self.computed


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
        fetched_tokens: tokens of what was loaded at the last admission that came from a tier, and from another server.
        is_asked: the scheduler has asked for it since it came.
        handed_over: what a prefill engine has stored of it, by its own word; None where none has.
        no_room_since_s: when the scheduler asked for it first while too many others held promises.
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
    fetched_tokens: tuple[int, int] = (0, 0)
    jobs: set[int] = field(default_factory=set)
    sources: Sources = field(default_factory=Sources)
    is_asked: bool = False
    handed_over: HandoffKey | None = None
    no_room_since_s: float | None = None
    is_finished: bool = False

    @property
    def pins_chunks(self) -> bool:
        """Whether it holds a promise without being scheduled, or may be given one."""
        has_promise = self.promise is not None and self.promise.lease is not None
        return (has_promise or self.lookup is not None) and not self.loading and not self.is_finished

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


class Pins:
    """The requests that pin chunks without being scheduled: at most twice ``PROMISES_AHEAD_MAX``.

    Those that the scheduler has asked for have a number of their own: it may pass over the head of its queue (for an
    adapter that has no room, for example), and who is next must not miss what is stored because of that.
    """

    def __init__(self) -> None:
        self._ahead: set[str] = set()
        self._asked: set[str] = set()

    def __len__(self) -> int:
        return len(self._ahead) + len(self._asked)

    @property
    def has_room_ahead(self) -> bool:
        """Whether a request that has just come may be looked up."""
        return len(self._ahead) < PROMISES_AHEAD_MAX and len(self._asked) < PROMISES_AHEAD_MAX

    def has_room_for(self, tracked: TrackedRequest) -> bool:
        """Whether a request that the scheduler asks for may be looked up."""
        return tracked.request.request_id in self._asked or len(self._asked) < PROMISES_AHEAD_MAX

    def note(self, tracked: TrackedRequest) -> None:
        """To be called where a request may have begun or ended to pin chunks."""
        request_id = tracked.request.request_id
        self._ahead.discard(request_id)
        self._asked.discard(request_id)
        if tracked.pins_chunks:
            (self._asked if tracked.is_asked else self._ahead).add(request_id)
