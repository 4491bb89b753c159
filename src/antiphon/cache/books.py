"""All the state of the cache, and the small moves that keep its accounts in step.

A chunk's life runs through here: ``add``, ``unlink`` (it leaves the index), ``free`` (its bytes are free). Bytes of a
chunk whose lease, writer or quarantine has not ended are never freed: ``settle`` is called whenever a protection ends,
and decides.

Always true (``invariants.validate`` asserts it): each region of the arena belongs to exactly one chunk, in the index,
retired or quarantined; counts by state, by tenant and by namespace add up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.cache.arena import Arena, RegionHandle
from antiphon.cache.connections import Connection, Connections, Reservation
from antiphon.cache.effects import ChunkRemoved, ChunkStored, LeaseAlarm, Notice, Removal, ReservationAlarm
from antiphon.cache.index import Binding, Chunk, Index
from antiphon.cache.leases import Lease, Leases
from antiphon.cache.log import EventLog
from antiphon.cache.options import CacheOptions
from antiphon.cache.pins import Pin, Pins
from antiphon.cache.policy import EvictionPolicy
from antiphon.cache.policy.choose import MakePolicy
from antiphon.cache.policy.heap import ColdestFirst
from antiphon.cache.states import ChunkState, SlabState
from antiphon.cache.tenants import Account, Tenants
from antiphon.core.chunks import ChunkKey
from antiphon.core.errors import LayoutMismatch, ProtocolError
from antiphon.core.namespace import NamespaceDigest

if TYPE_CHECKING:
    from antiphon.cache.tiers import Tiers


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    num_lookups: int = 0
    num_stored: int = 0
    stored_bytes: int = 0
    num_evicted: int = 0
    evicted_bytes: int = 0
    num_evicted_in_windows: int = 0
    num_cleared: int = 0
    num_abandoned: int = 0
    num_readable_removed: int = 0  # of all that were evicted, cleared or abandoned: those that lookups could report
    num_capped_lookups: int = 0
    num_refused_chunks: int = 0
    num_refused_calls: int = 0
    num_lease_alarms: int = 0
    num_reservation_alarms: int = 0


class Books:
    """The state.

    Args:
        options: the bounds.
        first_id: first generation and first lease id.
        make_policy: gives the eviction policy.
    """

    def __init__(self, options: CacheOptions, first_id: int, make_policy: MakePolicy) -> None:
        self.options = options
        self.arena = Arena(options.arena_bytes, options.initial_usable_bytes, options.alignment_bytes, first_id)
        self.index = Index()
        self.tenants = Tenants(options)
        self.connections = Connections(options.chunk_size_tokens)
        self.leases = Leases(first_id, options.quarantine_s)
        self.pins = Pins(options.pins_max, options.pinned_bytes_max)
        self.log = EventLog(options.event_log_max)
        self.policy: EvictionPolicy = make_policy(options, self.index.is_evictable)
        self.policy.resized(options.initial_usable_bytes)
        self.quota_orders: dict[Account, ColdestFirst] = {}
        """For each tenant with a quota and chunks: its chunks that may be evicted, coldest first."""
        self.counters = Counters()
        self.num_chunks = dict.fromkeys(ChunkState, 0)
        self.num_bytes = dict.fromkeys(ChunkState, 0)
        self.idle_bytes = 0
        """Bytes of the chunks that nothing protects: with the free bytes, the most that room can be made for."""
        self.chunk_at: dict[int, Chunk] = {}
        """Every chunk that has a region, by its offset."""
        self.unalarmed: dict[Reservation, None] = {}
        """Reservations that have raised no alarm, oldest first."""
        self._quarantined: list[tuple[float, int, Chunk]] = []  # a heap by the end of the quarantine
        self.now_s = float("-inf")
        self.step_number = 0
        self.notices: list[Notice] = []
        self.tiers: Tiers | None = None
        """None where no tier is configured."""

    # ---- checks that several calls share -----------------------------------------------------------------------------

    def check_keys(self, keys: tuple[ChunkKey, ...]) -> None:
        """Refuses a call with too many keys.

        Raises:
            ProtocolError: more than ``keys_per_call_max``.
        """
        if len(keys) > self.options.keys_per_call_max:
            raise ProtocolError(
                f"a call names {len(keys)} chunks, at most {self.options.keys_per_call_max} are allowed",
                remedy="ask for a shorter prefix",
            )

    def binding_of(self, namespace: NamespaceDigest, tenant: str, caller: Connection) -> Binding | None:
        """What the namespace is bound to; None where it has no chunks.

        Raises:
            LayoutMismatch: it is bound to another tenant, model or layout than the call's.
        """
        binding = self.index.bindings.get(namespace)
        if binding is None:
            return None
        bound = (binding.tenant, binding.model, binding.layout)
        called = (tenant, caller.engine.model, caller.engine.layout)
        if bound != called:
            raise LayoutMismatch(
                f"the namespace is used as (tenant, model, layout) = {bound}, and this call means {called}",
                remedy="what differs in meaning must differ in its namespace",
            )
        return binding

    def chunk_of(self, key: ChunkKey, namespace: NamespaceDigest) -> Chunk | None:
        """The chunk in the index.

        Raises:
            LayoutMismatch: the key was stored under another namespace, so that one of the two callers hashes wrongly.
        """
        chunk = self.index.chunks.get(key)
        if chunk is not None and chunk.binding.namespace != namespace:
            raise LayoutMismatch(
                "a chunk key belongs to another namespace than the call names",
                remedy="chain chunk keys from the digest of the namespace that the call names",
            )
        return chunk

    # ---- the life of a chunk -----------------------------------------------------------------------------------------

    def add(self, key: ChunkKey, parent: ChunkKey | None, binding: Binding, region: RegionHandle) -> Chunk:
        """A new chunk in ``region``, nothing written."""
        slabs = [SlabState.ABSENT] * binding.layout.num_slabs
        before = None if parent is None else self.index.chunks.get(parent)
        position = 0 if parent is None else None if before is None or before.position is None else before.position + 1
        chunk = Chunk(key, parent, binding, region, slabs, self.step_number, position)
        assert self.index.bindings.setdefault(binding.namespace, binding) is binding, "a namespace is bound twice"
        binding.num_chunks += 1
        binding.used_bytes += region.size_bytes
        binding.account.used_bytes += region.size_bytes
        self.chunk_at[region.offset_bytes] = chunk
        self._count(chunk, 1)
        self.index.add(chunk)
        self.policy.stored(chunk)
        if binding.account.quota_bytes is not None and binding.account not in self.quota_orders:
            self.quota_orders[binding.account] = ColdestFirst(self.index.is_evictable)
        return chunk

    def enter(self, chunk: Chunk, state: ChunkState) -> None:
        """Moves the chunk to ``state``, counted."""
        self._count(chunk, -1)
        chunk.enter(state)
        self._count(chunk, 1)
        self.recount(chunk)

    def recount(self, chunk: Chunk) -> None:
        """Counts the chunk as idle or not. To be called after every change of what protects it."""
        is_idle = chunk.is_idle
        if is_idle != chunk.is_counted_idle:
            chunk.is_counted_idle = is_idle
            self.idle_bytes += chunk.num_bytes if is_idle else -chunk.num_bytes

    def _count(self, chunk: Chunk, by: int) -> None:
        if chunk.state is not ChunkState.FREED:
            self.num_chunks[chunk.state] += by
            self.num_bytes[chunk.state] += by * chunk.num_bytes
        if chunk.state is ChunkState.READABLE:
            chunk.binding.num_readable += by
            chunk.binding.readable_bytes += by * chunk.num_bytes

    def make_readable(self, chunk: Chunk) -> None:
        """All slabs are committed."""
        assert chunk.is_complete, "a chunk is readable only when all its slabs are committed"
        self.enter(chunk, ChunkState.READABLE)
        chunk.stored_s = chunk.used_s = self.now_s
        binding = chunk.binding
        self.counters.num_stored += 1
        self.counters.stored_bytes += chunk.num_bytes
        binding.account.counts.stored_tokens += self.options.chunk_size_tokens
        names = (binding.model, binding.tenant)
        facts = (*names, binding.layout.chunk_bytes, self.now_s)
        self._publish(ChunkStored(self.log.next_sequence, binding.namespace, chunk.key, chunk.parent, *facts))

    def _publish(self, event: ChunkStored | ChunkRemoved) -> None:
        self.notices.append(event)
        if event.sequence is not None:
            self.log.append(event)

    def unlink(self, chunk: Chunk, removal: Removal) -> None:
        """Takes the chunk out of the index. The caller says what becomes of its bytes."""
        binding = chunk.binding
        sequence = self.log.next_sequence if chunk.state is ChunkState.READABLE else None
        facts = (binding.model, binding.tenant, binding.layout.chunk_bytes, removal, self.now_s)
        self._publish(ChunkRemoved(sequence, binding.namespace, chunk.key, *facts))
        self._count_removal(chunk, removal)
        parent = self.index.remove(chunk)
        self.policy.removed(chunk, is_evicted=removal not in (Removal.CLEARED, Removal.ABANDONED))
        if binding.account in self.quota_orders:
            self.quota_orders[binding.account].discard(chunk)
        if parent is not None:
            self.offer(parent)
        if self.tiers is not None:
            self.tiers.unlinked(chunk, removal)

    def _count_removal(self, chunk: Chunk, removal: Removal) -> None:
        counters = self.counters
        counters.num_readable_removed += chunk.state is ChunkState.READABLE
        if removal is Removal.CLEARED:
            counters.num_cleared += 1
        elif removal is Removal.ABANDONED:
            counters.num_abandoned += 1
        else:
            counters.num_evicted += 1
            counters.evicted_bytes += chunk.num_bytes
            counters.num_evicted_in_windows += removal is Removal.EVICTED_IN_WINDOW
            if chunk.state is ChunkState.READABLE:
                chunk.binding.account.counts.evicted_tokens += self.options.chunk_size_tokens

    def drop(self, chunk: Chunk, removal: Removal) -> None:
        """Takes an idle chunk out of the index and frees its bytes."""
        assert chunk.is_idle, "a chunk that is leased, held, pinned or being written does not go"
        self.unlink(chunk, removal)
        self.free(chunk)

    def retire(self, chunk: Chunk, removal: Removal) -> None:
        """Takes the chunk out of the index; its bytes follow when its protections have ended."""
        self.unlink(chunk, removal)
        self.enter(chunk, ChunkState.RETIRED)
        self.settle(chunk)

    def free(self, chunk: Chunk) -> None:
        """Gives the chunk's region back."""
        self.enter(chunk, ChunkState.FREED)
        self.arena.free(chunk.region)
        del self.chunk_at[chunk.region.offset_bytes]
        binding = chunk.binding
        binding.account.used_bytes -= chunk.num_bytes
        binding.used_bytes -= chunk.num_bytes
        binding.num_chunks -= 1
        if binding.num_chunks == 0:
            del self.index.bindings[binding.namespace]
        if binding.account.used_bytes == 0:
            self.quota_orders.pop(binding.account, None)

    def settle(self, chunk: Chunk) -> None:
        """A protection of the chunk has ended: offers it for eviction, or lets its bytes go if it was retired."""
        self.recount(chunk)
        if chunk.is_indexed:
            self.offer(chunk)
        elif chunk.state is ChunkState.RETIRED and not (
            chunk.num_leases or chunk.writers or chunk.num_step_holds or chunk.num_holds
        ):
            if chunk.quiet_at_s > self.now_s:
                self.enter(chunk, ChunkState.QUARANTINED)
                heapq.heappush(self._quarantined, (chunk.quiet_at_s, chunk.region.generation, chunk))
            else:
                self.free(chunk)

    def offer(self, chunk: Chunk) -> None:
        """Tells the policy that the chunk may be evicted, if it may."""
        if self.index.is_evictable(chunk):
            self.policy.offer(chunk)
            if chunk.binding.account in self.quota_orders:
                self.quota_orders[chunk.binding.account].offer(chunk)

    def hold(self, chunk: Chunk) -> None:
        """A job of a tier reads the chunk, or a lookup waits for what follows it."""
        chunk.num_holds += 1
        self.recount(chunk)

    def unhold(self, chunk: Chunk) -> None:
        """That has ended."""
        assert chunk.num_holds > 0, "a hold ended twice"
        chunk.num_holds -= 1
        self.settle(chunk)

    def lease(self, chunk: Chunk) -> None:
        """A lookup reports the chunk: it is used, and one lease more protects it."""
        chunk.last_used = self.step_number
        chunk.used_s = self.now_s
        if not chunk.num_leases:
            chunk.binding.num_leased += 1
        chunk.num_leases += 1
        self.recount(chunk)
        self.policy.used(chunk)

    def end_lease(self, lease: Lease) -> None:
        """The lease has ended: its chunks are protected by one lease less."""
        for chunk in reversed(lease.chunks):
            assert chunk.num_leases > 0, "a lease ended twice"
            chunk.num_leases -= 1
            if not chunk.num_leases:
                chunk.binding.num_leased -= 1
            self.settle(chunk)
        self.connections.forget_engine_if_gone(lease.engine)

    def end_pin(self, pin: Pin) -> None:
        """The pin has ended: its chunks are kept by one pin less."""
        self.pins.remove(pin)
        for chunk in reversed(pin.chunks):
            self.settle(chunk)

    def order_by_account(self, account: Account) -> None:
        """The account's quota or chunks are others than before: its chunks that may be evicted, coldest first."""
        self.quota_orders.pop(account, None)
        if account.quota_bytes is None or not account.used_bytes:
            return
        order = self.quota_orders[account] = ColdestFirst(self.index.is_evictable)
        for chunk in self.index.chunks.values():
            if chunk.binding.account is account and self.index.is_evictable(chunk):
                order.offer(chunk)

    # ---- time --------------------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Time is ``now_s``: quarantines that are over end, what is overdue raises its alarm."""
        assert now_s >= self.now_s, f"time went back from {self.now_s} to {now_s}"
        self.now_s = now_s
        for lease in self.leases.end_quarantines(now_s):
            self.end_lease(lease)
        while self._quarantined and self._quarantined[0][0] <= now_s:
            self.free(heapq.heappop(self._quarantined)[2])
        for pin in self.pins.overdue(now_s):
            self.end_pin(pin)
        for lease in self.leases.take_overdue(now_s, self.options.lease_alarm_s):
            self.counters.num_lease_alarms += 1
            age_s = now_s - lease.began_s
            self.notices.append(
                LeaseAlarm(lease.id, lease.engine.id, lease.request, lease.state, age_s, lease.num_bytes)
            )
        for reservation in self._overdue_reservations():
            self.counters.num_reservation_alarms += 1
            writer = reservation.writer
            age_s = now_s - reservation.began_s
            self.notices.append(
                ReservationAlarm(writer.id, writer.engine.id, reservation.chunk.key, age_s, reservation.num_bytes)
            )

    def _overdue_reservations(self) -> Iterator[Reservation]:
        while self.unalarmed:
            reservation = next(iter(self.unalarmed))
            if reservation.began_s + self.options.reservation_alarm_s > self.now_s:
                return
            del self.unalarmed[reservation]
            yield reservation

    @property
    def next_deadline_s(self) -> float | None:
        """When the next quarantine or pin ends, an alarm is due or a tier waits for time; None where nothing does."""
        times = [None if self.tiers is None else self.tiers.next_deadline_s]
        times += self.leases.next_quarantine_end_s, self.pins.next_end_s
        if self._quarantined:
            times.append(self._quarantined[0][0])
        for lease in self.leases.unalarmed.values():
            times.append(lease.began_s + self.options.lease_alarm_s)
            break
        for held in self.unalarmed:
            times.append(held.began_s + self.options.reservation_alarm_s)
            break
        return min([time_s for time_s in times if time_s is not None], default=None)
