"""The policies by name, as specs give them."""

from __future__ import annotations

from collections.abc import Callable

from antiphon.routing.kv_aware import KvAware
from antiphon.routing.pickers import (
    ConsistentHash,
    LeastLoad,
    Picker,
    PickerOptions,
    PowerOfTwo,
    Random,
    RoundRobin,
)
from antiphon.routing.prefix_aware import PrefixAware

POLICIES: dict[str, Callable[[PickerOptions], Picker]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "least_load": LeastLoad,
    "power_of_two": PowerOfTwo,
    "consistent_hash": ConsistentHash,
    "prefix_aware": PrefixAware,
    "kv_aware": KvAware,
}
