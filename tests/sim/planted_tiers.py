"""Bugs to plant in the tier plan, as those of ``planted``: each replaces one decision by a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from antiphon.cache import publishing, storing, tier_key
from antiphon.cache.books import Books
from antiphon.cache.index import Chunk
from antiphon.cache.onboarding import Onboardings
from antiphon.cache.states import ChunkState
from antiphon.cache.tier import Running, Tier
from antiphon.cache.tier_jobs import Outcome
from antiphon.cache.tiers import Tiers
from antiphon.core.chunks import ChunkChain, ChunkKey
from antiphon.sim import tier as sim_tier

Plant = Callable[[pytest.MonkeyPatch], None]


def publication_comes_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    """A chunk is published once its room is reserved: what the tier gets is what lies there."""
    grant = storing._grant

    def granting(books: Books, connection: Any, chunk: Chunk, slabs: Any) -> Any:
        granted = grant(books, connection, chunk, slabs)
        if books.tiers is not None:
            chunk.state, state = ChunkState.READABLE, chunk.state
            publishing.stored(books.tiers, chunk)
            for each in books.tiers.tiers:
                publishing.pump(books.tiers, each)
                each.waiting.dirty.pop(chunk, None)
                if (left := each.waiting.publications.pop(chunk, None)) is not None:
                    each.queued_bytes -= chunk.num_bytes
                    chunk.num_holds -= left.is_held
            chunk.state = state
        return granted

    patch.setattr(storing, "_grant", granting)


def fetched_bytes_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    """Whatever a fetch has read counts."""
    fetched = Onboardings.fetched

    def trusting(self: Onboardings, tier: Tier, running: Running, outcome: Outcome) -> None:
        fetched(self, tier, running, Outcome.DONE if outcome is Outcome.CORRUPT else outcome)

    patch.setattr(Onboardings, "fetched", trusting)


def tier_key_is_without_its_namespace(patch: pytest.MonkeyPatch) -> None:
    """The key is that of the tokens alone, and the record does not say what it means."""
    bare: dict[ChunkKey, ChunkKey] = {}
    # By identity; a chain that is kept gives its own to no other.
    shadows: dict[int, tuple[ChunkChain, ChunkChain]] = {}
    extend = ChunkChain.extend

    def extending(self: ChunkChain, tokens: Any) -> list[ChunkKey]:
        tokens = list(tokens)
        if id(self) not in shadows:
            shadows[id(self)] = self, ChunkChain(type(self.namespace)(bytes(32)), self.chunk_size_tokens)
        shadow = shadows[id(self)][1]
        keys = extend(self, tokens)
        bare.update(zip(keys, extend(shadow, tokens), strict=True))
        return keys

    patch.setattr(ChunkChain, "extend", extending)
    patch.setattr(tier_key.Meaning, "key_of", lambda self, key: tier_key.TierKey(bytes(bare[key])))
    patch.setattr(sim_tier, "_meaning", lambda job: (job.num_bytes,))


def chunk_being_published_is_evicted(patch: pytest.MonkeyPatch) -> None:
    def is_idle(self: Chunk) -> bool:
        return self.is_indexed and not (self.num_leases or self.num_step_holds or self.writers)

    patch.setattr(Chunk, "is_idle", property(is_idle))

    def unhold(self: Books, chunk: Chunk) -> None:
        chunk.num_holds -= 1
        if chunk.state is not ChunkState.FREED:
            self.settle(chunk)

    patch.setattr(Books, "unhold", unhold)


def waiting_lookup_outlives_its_connection(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Onboardings, "cancel", lambda self, connection: None)


def breaker_never_probes(patch: pytest.MonkeyPatch) -> None:
    pump = Tiers._pump

    def without(self: Tiers, tier: Tier) -> None:
        if not tier.breaker.is_closed:
            tier.breaker.retry_at_s = float("inf")
        pump(self, tier)

    patch.setattr(Tiers, "_pump", without)


BUGS: tuple[Plant, ...] = (
    publication_comes_before_the_commit,
    fetched_bytes_are_not_checked,
    tier_key_is_without_its_namespace,
    chunk_being_published_is_evicted,
    waiting_lookup_outlives_its_connection,
    breaker_never_probes,
)
