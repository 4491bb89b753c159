"""What the router shows of cold-transfer admission, of its tenants, and of what is where: sections of ``/status``, and
the values that metrics are made of.

Reads statistics when it is asked and keeps nothing. Keys and salts of tenants are in none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from antiphon.observe.aware_metrics import AwareMetrics, ColdView, TenantView, WhereView
from antiphon.observe.router_metrics import RouterMetrics
from antiphon.router.whereabouts import Whereabouts
from antiphon.routing.admission import ColdAdmission
from antiphon.routing.cold import AdmissionStatistics
from antiphon.routing.tenants import Tenants

WHY_OFF: Final = "the KV bytes of a token are not known (router.kv_bytes_per_token)"
_COLD_COUNTS: Final = (
    *("admitted_warm", "admitted_at_once", "admitted_from_queue", "refused_cold_queue_full"),
    *("refused_cold_queue_timeout", "left_waiting", "held", "held_overdue"),
)


class Insight:
    """What one router shows; None for what it is without.

    Args:
        clock: seconds, of the admission too.
    """

    def __init__(
        self,
        cold: ColdAdmission | None,
        tenants: Tenants | None,
        where: Whereabouts | None,
        clock: Callable[[], float],
    ) -> None:
        self._cold = cold
        self._tenants = tenants
        self._where = where
        self._clock = clock

    def register(self, metrics: RouterMetrics) -> None:
        """Make series of it."""
        AwareMetrics(metrics.registry, self._cold_view, self._tenant_views, self._where_view)

    def sections(self) -> dict[str, object]:
        """Those of ``/status``, as plain values for JSON: ``cold_admission``, ``tenants``, ``whereabouts``."""
        cold, tenants, where = self._cold, self._tenants, self._where
        off: dict[str, object] = {"is_on": False, "why_off": WHY_OFF}
        return {
            "cold_admission": off if cold is None else _cold_section(cold.statistics(self._clock())),
            "tenants": None if tenants is None else [asdict(each) for each in tenants.statistics()],
            "whereabouts": None if where is None else where.statistics(),
        }

    def _cold_view(self) -> ColdView | None:
        if self._cold is None:
            return None
        shown = self._cold.statistics(self._clock())
        return ColdView(
            num_waiting=shown.num_waiting,
            waiting_bytes=shown.waiting_bytes,
            oldest_wait_s=shown.oldest_wait_s,
            num_held=shown.num_held,
            num_cold=shown.num_cold,
            committed_bytes=shown.committed_bytes,
            budget_bytes=shown.budget_bytes,
            counts=dict.fromkeys(_COLD_COUNTS, 0) | shown.counts,
            in_flight_bytes={_address(load.url): load.in_flight_bytes for load in shown.decodes},
            free_kv_bytes={
                _address(load.url): load.free_kv_bytes for load in shown.decodes if load.free_kv_bytes is not None
            },
            rates={(_address(one), _address(other)): rate for (one, other), rate in shown.rates.items()},
        )

    def _tenant_views(self) -> list[TenantView]:
        if self._tenants is None:
            return []
        return [
            TenantView(
                each.name,
                each.num_in_flight,
                each.num_waiting,
                each.num_admitted,
                each.refused,
                each.ended_cost,
                each.waited_s,
            )
            for each in self._tenants.statistics()
        ]

    def _where_view(self) -> WhereView | None:
        return None if self._where is None else self._where.view()


def _address(url: str) -> str:
    return url.partition("://")[2]


def _cold_section(shown: AdmissionStatistics) -> dict[str, object]:
    """As it is, and the rates as a list: pairs are no keys of JSON."""
    rates = [
        {"prefill": prefill, "decode": decode, "bytes_s": round(rate)}
        for (prefill, decode), rate in shown.rates.items()
    ]
    return asdict(shown) | {"counts": dict.fromkeys(_COLD_COUNTS, 0) | shown.counts, "rates": rates}
