"""From the tiers of the command line to their stores, and to the options of the plan."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.cache.tier_options import TierOptions, TiersOptions
from antiphon.cache_server.probe import PROBE_NAME
from antiphon.config.tier_spec import TierSpec
from antiphon.core.errors import AntiphonError, ConfigError, TierError
from antiphon.protocol.cache import GATE_TENANT
from antiphon.storage.tier import TierStore
from antiphon.storage.tiers import open_tier

_GRACE_S = 0.5
"""A store ends its calls itself after its timeout; the plan waits a little longer for that."""
_START_S = {"mooncake": 15.0}
"""What a kind of store has to start in the background, where it does: Mooncake's client gives its own start 10 s."""
_FIRST_S = 2.0
"""What every other has: imports, and a connection, on a machine where much starts at once."""

_CANNOT_LIST = frozenset({"mooncake"})
"""Kinds of stores that have no call to go through what is in them."""


def open_stores(specs: Sequence[TierSpec]) -> list[TierStore]:
    """The stores, in the same order.

    Raises:
        ConfigError: one cannot be opened. Those opened before are closed.
    """
    stores: list[TierStore] = []
    try:
        stores.extend(map(open_tier, specs))
    except AntiphonError as error:
        for store in stores:
            store.close()
        if isinstance(error, TierError | ConfigError):
            name = specs[len(stores)].tier_name
            is_told = error.field in (None, "l2") or error.field in error.message
            option = "" if is_told else f"{error.field}: "  # of the tier's URL, and no flag of its own
            raise ConfigError(f"the tier {name}: {option}{error.message}", field="l2", remedy=error.remedy) from error
        raise
    return stores


def tiers_options(
    specs: Sequence[TierSpec], onboard_max_s: float, further: tuple[TierOptions, ...] = ()
) -> TiersOptions:
    """The options of the plan. What the server and the engines store to try themselves never leaves the arena.

    Args:
        further: tiers that no spec describes, behind the others.
    """
    tiers = tuple(
        TierOptions(
            name=spec.tier_name,
            store=spec.store,
            is_shared=spec.is_shared,
            can_list=spec.kind not in _CANNOT_LIST,
            fetches_max=spec.fetches_max,
            publishes_max=spec.publishes_max,
            timeout_s=spec.timeout_s + _GRACE_S,
            promotion_hits=spec.promotion_hits,
            first_probe_s=_START_S.get(spec.kind, _FIRST_S) + spec.timeout_s + _GRACE_S,
        )
        for spec in specs
    )
    private = frozenset({PROBE_NAME, GATE_TENANT})
    return TiersOptions((*tiers, *further), onboard_max_s=onboard_max_s, private_tenants=private)
