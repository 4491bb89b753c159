"""Both pools, the warm pairs between them, the retry budget, and counts of what was decided.

Prefill and decode are picked independently, each by its own policy and counters, so that pairs mix and a dead engine of
one pool wastes none of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final

from antiphon.routing.ask import Ask
from antiphon.routing.budget import RetryBudget
from antiphon.routing.endpoint import Endpoint, Role
from antiphon.routing.kv_index import IndexOptions, KvIndex
from antiphon.routing.options import FleetOptions
from antiphon.routing.pairs import WarmPairs
from antiphon.routing.pickers import load_bound
from antiphon.routing.pool import Pool, prefix_index_of
from antiphon.routing.states import EndpointState

_READY: Final = EndpointState.READY


class Fleet:
    """What a router knows of its engines.

    Args:
        prefill, decode: URLs, each at most once in its pool.
        options: how engines are picked and judged.
    """

    def __init__(self, prefill: Iterable[str], decode: Iterable[str], options: FleetOptions) -> None:
        self.options = options
        self.prefixes = prefix_index_of(options)
        """Which prompts the policies have sent where; empty where none of them looks at prompts."""
        self.kv_index = KvIndex(IndexOptions())
        """What engines say they hold; empty where nobody hears them."""
        self.prefill = Pool("prefill", options.prefill_policy, options, self.prefixes, self.kv_index)
        self.decode = Pool("decode", options.decode_policy, options, self.prefixes, self.kv_index)
        self.pairs = WarmPairs()
        self.budget = RetryBudget(
            options.retry_share, options.retry_floor, options.retry_floor_per_s, options.retries_saved_max
        )
        self.counts: Counter[str] = Counter()
        """What lives have decided, by name: retries by stage and reason, hand-overs abandoned, late events."""
        for pool, urls in ((self.prefill, prefill), (self.decode, decode)):
            pool.when_gone(self.pairs.forget)
            for url in urls:
                pool.add(url)

    @property
    def has_prefill_pool(self) -> bool:
        """Whether prefill engines take requests, or are awaited."""
        return self.prefill.is_open or self.options.is_prefill_awaited

    def pool(self, role: Role) -> Pool:
        """The pool of a role."""
        return self.prefill if role == "prefill" else self.decode

    def all(self) -> list[Endpoint]:
        """Every endpoint of both pools."""
        return [*self.prefill.endpoints, *self.decode.endpoints]

    def pick_decode(
        self,
        now_s: float,
        chance: float,
        ask: Ask | None = None,
        avoid: Collection[Endpoint] = (),
        partner: Endpoint | None = None,
    ) -> Endpoint | None:
        """As :meth:`Pool.pick`, but that ``ask.preferred`` goes before the policy while it is ready, with the
        ``num_matched_tokens`` that is set; and if the options say so, a ready engine that has pulled from ``partner``
        before goes first, unless it has ``load_factor`` times the mean load. O(n) only while the picked pair is cold.

        An engine cannot pull from itself: one that is in both pools is never the partner's partner.
        """
        if ask is not None and ask.preferred is not None:
            preferred = ask.preferred
            if preferred.state is _READY and preferred not in avoid:
                assert preferred.role == "decode"
                return preferred
        picked = self.decode.pick(now_s, chance, ask, avoid)
        if partner is not None and picked is not None and picked.address == partner.address:
            avoid = (*avoid, picked)
            picked = self.decode.pick(now_s, chance, ask, avoid)
        if partner is None or picked is None or not self.options.prefers_warm_pairs:
            return picked
        ready = self.decode.ready
        if picked.state is not _READY or self.pairs.is_warm(partner, picked):
            return picked
        bound = load_bound(sum(one.num_active for one in ready), len(ready), self.options.load_factor)
        warm = [
            one for one in ready if one not in avoid and one.num_active < bound and self.pairs.is_warm(partner, one)
        ]
        chosen = min(warm, key=lambda one: one.num_active, default=picked)
        if ask is not None and chosen is not picked:
            ask.num_matched_tokens = 0  # what the policy found is of another engine
        return chosen

    def validate(self) -> None:
        """Assert the invariants of all parts."""
        self.prefill.validate()
        self.decode.validate()
        self.pairs.validate(self.prefill.endpoints, self.decode.endpoints)
        self.budget.validate()
        self.prefixes.validate()
