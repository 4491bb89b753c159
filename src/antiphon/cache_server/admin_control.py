"""What an operator asks over HTTP: list what is held, clear, pin and unpin, quotas.

Always true:

- Every answer is bounded; what is left out is counted, or asked for by a cursor.
- What cannot be done is refused whole, with a code, and says what to do. A tenant or model that nothing here has is
  404, not an answer of zero.
- Names of tenants are taken as a salt or as a tenant's name (``core.tenants``).

It decides nothing about chunks: the cache does (``cache.control``, ``cache.inspection``).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Final, TypeVar

from antiphon.cache.effects import Cleared, Pinned, QuotaSet, Unpinned
from antiphon.cache.events import Clear, Pin, SetQuota, Unpin
from antiphon.cache.inspection import PEER_SOURCE, ChunkFacts, NamespaceFacts, PinFacts, Selected
from antiphon.cache.tiers import TierStatistics
from antiphon.cache_server.admin_request import (
    ListQuery,
    clear_query,
    list_query,
    no_query,
    pin_query,
    quota_query,
    unpin_query,
)
from antiphon.cache_server.admin_view import ServerView
from antiphon.cache_server.probe import PROBE_NAME
from antiphon.core.errors import (
    AntiphonError,
    CapacityExceeded,
    ChunksPinned,
    ChunkUnknown,
    ProtocolError,
    RequestRefused,
)
from antiphon.core.tenants import tenant_named
from antiphon.protocol.cache import GATE_TENANT
from antiphon.transport.http.message import HttpRequest

log = logging.getLogger("antiphon.cache_server")

NAMESPACES_MAX: Final = 1_000
"""Namespaces of one answer, those of the most bytes first."""

FACTS_MAX: Final = 1_000
"""Chunks of one page with all that is known of them: 500 KB, made in some milliseconds."""

TENANTS_MAX: Final = 1_000
"""Tenants of one answer of ``/quota``, those of the most bytes first."""

OWN_TENANTS: Final = frozenset((PROBE_NAME, GATE_TENANT))

REFUSALS: Final[tuple[tuple[type[AntiphonError], int, str], ...]] = (
    (ChunkUnknown, 404, "chunk_unknown"),
    (ChunksPinned, 409, "chunks_pinned"),
    (CapacityExceeded, 409, "capacity_exceeded"),
    (ProtocolError, 400, "invalid_request"),
)
"""Status and code of what the cache refuses."""

Json = dict[str, object]
R = TypeVar("R")


class Control:
    """The routes. Each takes a request and returns the body of its answer, or raises ``RequestRefused``."""

    def __init__(self, server: ServerView) -> None:
        self._server = server
        self.routes: dict[str, dict[str, Callable[[HttpRequest], Json]]] = {
            "/namespaces": {"GET": self._namespaces},
            "/chunks/facts": {"GET": self._chunks},
            "/clear": {"POST": self._clear},
            "/pins": {"GET": self._pins},
            "/pin": {"POST": self._pin},
            "/unpin": {"POST": self._unpin},
            "/quota": {"GET": self._quotas, "PUT": self._set_quota},
        }

    def _step(self, event: Clear | Pin | Unpin | SetQuota, kind: type[R]) -> R:
        try:
            reply = self._server.control(event)
        except AntiphonError as error:
            status, code = next(
                ((status, code) for known, status, code in REFUSALS if isinstance(error, known)),
                (409, "refused"),
            )
            raise RequestRefused(str(error), status=status, code=code) from error
        assert isinstance(reply, kind), reply
        return reply

    def _selected(self, tenant: str | None, model: str | None) -> Selected:
        return Selected(None if tenant is None else tenant_named(tenant), model, OWN_TENANTS)

    def _check_known(self, select: Selected) -> tuple[str, ...]:
        """Refuses a tenant or model that nothing here has. Returns the tiers that may have it unseen, where only they
        may."""
        known = self._server.cache.known_of(select)
        if known.unknown and not known.unlisted:
            name = known.unknown[0]
            named = select.tenant if name == "tenant" else select.model
            raise RequestRefused(
                f"nothing here has the {name} {named!r}: no chunk, no tier, no engine, no quota",
                status=404,
                code=f"{name}_unknown",
                param=name,
            )
        return known.unlisted

    # ---- list --------------------------------------------------------------------------------------------------------

    def _listed(self, request: HttpRequest, limit_max: int) -> tuple[ListQuery, Selected]:
        query = list_query(request, limit_max)
        select = self._selected(query.tenant, query.model)
        self._check_known(select)
        return query, select

    def _namespaces(self, request: HttpRequest) -> Json:
        query, select = self._listed(request, NAMESPACES_MAX)
        found = self._server.cache.namespaces(select, query.limit)
        return {
            "incarnation": self._server.incarnation,
            "chunk_size_tokens": self._server.spec.chunk_size,
            "num_left_out": found.num_left_out,
            "in_tiers": dict(found.in_tiers),
            "namespaces": [_namespace_of(each) for each in found.namespaces],
        }

    def _chunks(self, request: HttpRequest) -> Json:
        query, select = self._listed(request, FACTS_MAX)
        page = self._server.cache.chunk_facts(select, query.after, query.limit)
        now_s = self._server.now_s
        return {
            "incarnation": self._server.incarnation,
            "chunk_size_tokens": self._server.spec.chunk_size,
            "after": page.after,
            "chunks": [_chunk_of(each, now_s) for each in page.chunks],
        }

    # ---- clear -------------------------------------------------------------------------------------------------------

    def _clear(self, request: HttpRequest) -> Json:
        query = clear_query(request)
        select = self._selected(query.tenant, query.model)
        unlisted = self._check_known(select)
        cleared = self._step(Clear(select.tenant, select.model, spares_pinned=not query.with_pinned), Cleared)
        log.info("cleared %d chunks (tenant %s, model %s)", cleared.num_chunks, select.tenant, select.model)
        tiers = [statistics for statistics, _ in self._server.tiers()]
        own = [_cleared_tier(each) for each in tiers if each.source != PEER_SOURCE]
        return dataclasses.asdict(cleared) | {
            "tiers": own,
            "is_known": not unlisted,
            "has_peers": len(own) < len(tiers),
        }

    # ---- pins --------------------------------------------------------------------------------------------------------

    def _pins(self, request: HttpRequest) -> Json:
        no_query(request)
        now_s, chunk_size = self._server.now_s, self._server.spec.chunk_size
        statistics = self._server.statistics()
        return {
            "incarnation": self._server.incarnation,
            "pinned_bytes": statistics.pinned_bytes,
            "pinned_bytes_max": statistics.pinned_bytes_max,
            "pins": [_pin_of(each, now_s, chunk_size) for each in self._server.cache.pins()],
        }

    def _pin(self, request: HttpRequest) -> Json:
        query = pin_query(request)
        pinned = self._step(Pin(query.keys, query.ttl_s), Pinned)
        log.info("pinned %d chunks up to %s", pinned.num_chunks, pinned.key.hex()[:16])
        return dataclasses.asdict(pinned) | {"key": pinned.key.hex()}

    def _unpin(self, request: HttpRequest) -> Json:
        key = unpin_query(request)
        unpinned = self._step(Unpin(key), Unpinned)
        log.info("ended %d pins", unpinned.num_pins)
        return dataclasses.asdict(unpinned)

    # ---- quotas ------------------------------------------------------------------------------------------------------

    def _quotas(self, request: HttpRequest) -> Json:
        no_query(request)
        given = self._server.cache.quotas()
        tenants = {name: each for name, each in self._server.statistics().tenants.items() if name not in OWN_TENANTS}
        rows = [(name, each.used_bytes, each.quota_bytes) for name, each in tenants.items()]
        rows += [(name, 0, quota_bytes) for name, quota_bytes in given.items() if name not in tenants]
        rows.sort(key=lambda row: (row[0] not in given, -row[1], row[0]))  # who has a quota of its own first
        return {
            "incarnation": self._server.incarnation,
            "default_quota_bytes": self._server.spec.default_quota_bytes,
            "num_left_out": max(0, len(rows) - TENANTS_MAX),
            "quotas": [
                {"tenant": name, "used_bytes": used_bytes, "quota_bytes": quota_bytes, "is_own": name in given}
                for name, used_bytes, quota_bytes in rows[:TENANTS_MAX]
            ],
        }

    def _set_quota(self, request: HttpRequest) -> Json:
        query = quota_query(request)
        tenant = tenant_named(query.tenant)
        if query.quota_bytes is None and tenant not in self._server.cache.quotas():
            raise RequestRefused(
                f"tenant {tenant!r} has no quota of its own: there is nothing to take away",
                status=404,
                code="quota_unknown",
                param="tenant",
            )
        answer = self._step(SetQuota(tenant, query.quota_bytes), QuotaSet)
        log.info("tenant %s: quota %s bytes, %d chunks evicted", answer.tenant, query.quota_bytes, answer.num_evicted)
        return dataclasses.asdict(answer)


def _cleared_tier(tier: TierStatistics) -> Json:
    """What a clear means there. It has only begun; ``/status`` has the later ``clears_pending``."""
    return {
        "name": tier.name,
        "is_shared": tier.is_shared,
        "can_list": tier.can_list,
        "clears_pending": tier.num_clears,
    }


def _namespace_of(facts: NamespaceFacts) -> Json:
    return dataclasses.asdict(facts) | {"namespace": facts.namespace.hex(), "in_tiers": dict(facts.in_tiers)}


def _chunk_of(facts: ChunkFacts, now_s: float) -> Json:
    return {
        "key": facts.key.hex(),
        "parent": None if facts.parent is None else facts.parent.hex(),
        "namespace": facts.namespace.hex(),
        "model": facts.model,
        "tenant": facts.tenant,
        "position": facts.position,
        "num_bytes": facts.num_bytes,
        "age_s": round(now_s - facts.stored_s, 3),
        "unused_s": round(now_s - facts.used_s, 3),
        "num_leases": facts.num_leases,
        "num_pins": facts.num_pins,
        "in_tiers": facts.in_tiers,
    }


def _pin_of(facts: PinFacts, now_s: float, chunk_size_tokens: int) -> Json:
    return {
        "key": facts.key.hex(),
        "namespace": facts.namespace.hex(),
        "model": facts.model,
        "tenant": facts.tenant,
        "num_chunks": facts.num_chunks,
        "num_tokens": facts.num_chunks * chunk_size_tokens,
        "num_bytes": facts.num_bytes,
        "age_s": round(now_s - facts.began_s, 3),
        "ends_in_s": None if facts.until_s is None else round(facts.until_s - now_s, 3),
    }
