"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable

from antiphon.cache.options import CacheOptions
from antiphon.cache.policy import EvictionPolicy, IsEvictable
from antiphon.cache.policy.arc import Arc
from antiphon.cache.policy.lru import Lru
from antiphon.core.errors import ConfigError

MakePolicy = Callable[[CacheOptions, IsEvictable], EvictionPolicy]
"""Makes a policy for a new cache."""

POLICY_NAMES = ("lru", "arc")


def choose_policy(options: CacheOptions, is_evictable: IsEvictable) -> EvictionPolicy:
    """The policy that ``options.eviction_policy`` names.

    Raises:
        ConfigError: there is none of that name.
    """
    if options.eviction_policy == "lru":
        return Lru(is_evictable)
    if options.eviction_policy == "arc":
        return Arc(is_evictable, options.ghost_share_max)
    raise ConfigError(
        f"there is no eviction policy {options.eviction_policy!r}",
        field="eviction_policy",
        remedy=f"choose one of {', '.join(POLICY_NAMES)}",
    )
