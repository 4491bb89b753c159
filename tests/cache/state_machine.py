"""The cache against the plain model, as a Hypothesis state machine. Rules are events, faults too."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from antiphon.cache.arena import RegionHandle
from antiphon.cache.effects import (
    Aborted,
    Attached,
    Cleared,
    CommitOutcome,
    Committed,
    Detached,
    Effect,
    Found,
    LeaseNoted,
    Pinned,
    QuotaSet,
    Refused,
    Removal,
    Reserved,
    Unpinned,
)
from antiphon.cache.events import (
    Abort,
    ArenaGrew,
    Attach,
    Clear,
    Commit,
    ConnectionId,
    CopyBegan,
    CopyEnded,
    Detach,
    EngineId,
    Event,
    LeaseId,
    Lookup,
    Pin,
    Release,
    Reserve,
    SetQuota,
    Tick,
    Unpin,
)
from antiphon.cache.machine import Cache
from antiphon.cache.options import CacheOptions
from antiphon.core.errors import (
    CapacityExceeded,
    ChunksPinned,
    ChunkUnknown,
    LeaseUnknown,
    NotOwner,
    ProtocolError,
    StaleHandle,
)
from tests.cache.model import FOLDED, LAYOUTS, CacheModel, EngineKey, ModelLease, ModelPin, digest_of, keys_of
from tests.cache.world import CHUNK_BYTES, CHUNK_SIZE_TOKENS, UNIT_BYTES

ARENA_BYTES = 16 * UNIT_BYTES
QUOTAS = {"capped": 3 * CHUNK_BYTES}
NUM_ACCOUNTS_MAX = 1
"""Fewer than there are tenants."""
NUM_GIVEN_MAX = 1
PINNED_BYTES_MAX = ARENA_BYTES // 2
NUM_PINS_MAX = 3
EVICTIONS = {Removal.EVICTED, Removal.EVICTED_FOR_QUOTA, Removal.EVICTED_IN_WINDOW}

models = st.sampled_from(["small", "small", "small", "big"])
tenants = st.sampled_from(["free", "free", "free", "free", "free", "capped", "other"])
prompts = st.sampled_from(["abc", "ab", "abcd", "abd", "a", "ba", "bab"])
seldom = st.integers(0, 3).map(lambda number: number == 0)
"""For what would otherwise end everything before anything can happen."""
incarnations = st.sampled_from(["1", "2"])
rank_slabs = {
    "small": st.sampled_from([(), (0,), (1,), (0, 1), (0, 1)]),
    "big": st.sampled_from([(0, 1), (0, 1, 2, 3)]),
}
pick = st.integers(0, 2**16)

R = TypeVar("R")


class CacheMachine(RuleBasedStateMachine):
    """Drives a cache and its model with the same events."""

    policy = "lru"
    checks_invariants = True
    """False leaves the search for planted bugs to the model and the memory alone."""

    @initialize(usable_units=st.sampled_from([8, 12, 16]), first_id=st.integers(1, 2**48))
    def start(self, usable_units: int, first_id: int) -> None:
        options = CacheOptions(
            arena_bytes=ARENA_BYTES,
            usable_bytes=usable_units * UNIT_BYTES,
            chunk_size_tokens=CHUNK_SIZE_TOKENS,
            alignment_bytes=UNIT_BYTES,
            eviction_policy=self.policy,
            leased_share_max=1.0,
            reserved_share_max=1.0,
            quota_bytes=QUOTAS,
            tenants_max=NUM_ACCOUNTS_MAX,
            quotas_max=NUM_GIVEN_MAX,
            pinned_share_max=PINNED_BYTES_MAX / ARENA_BYTES,
            pins_max=NUM_PINS_MAX,
        )
        self.cache = Cache(options, first_id)
        self.model = CacheModel(options.initial_usable_bytes, QUOTAS, NUM_ACCOUNTS_MAX, NUM_GIVEN_MAX)
        self.num_attached = 0
        self.ended_leases: list[tuple[LeaseId, ModelLease]] = []
        self.ended_regions: list[tuple[ConnectionId, RegionHandle]] = []
        for slabs in ((0, 1), (0,), (1,)):
            self.attach("small", "1", slabs)
        self.attach("big", "1", (0, 1, 2, 3))
        self.store(0, "free", "abcd")
        self.lookup(0, "free", "abc")

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def step(self, event: Event) -> list[Effect]:
        return self.cache.step(event, self.model.now_s)

    def call(self, event: Event, kind: type[R]) -> tuple[R, list[Effect]]:
        reply, *notices = self.step(event)
        assert isinstance(reply, kind), reply
        return reply, notices

    def refused(self, event: Event, *errors: type[Exception]) -> None:
        reply, *notices = self.step(event)
        assert isinstance(reply, Refused), reply
        assert isinstance(reply.error, errors), reply.error
        assert not notices

    def choose(self, number: int, *, writes: bool = False, engine: EngineKey | None = None) -> ConnectionId | None:
        """One of the attached connections: of an engine, or that write."""
        found = [
            connection
            for connection, (its_engine, slabs) in self.model.connections.items()
            if (slabs or not writes) and engine in (None, its_engine)
        ]
        return found[number % len(found)] if found else None

    def choose_lease(self, number: int) -> tuple[LeaseId, ModelLease]:
        lease_id = sorted(self.model.leases)[number % len(self.model.leases)]
        return lease_id, self.model.leases[lease_id]

    # ---- rules -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.model.connections) < 6)
    @rule(data=st.data(), model=models, incarnation=incarnations)
    def attach_one(self, data: st.DataObject, model: str, incarnation: str) -> None:
        self.attach(model, incarnation, data.draw(rank_slabs[model]))

    def attach(self, model: str, incarnation: str, slabs: tuple[int, ...]) -> None:
        self.num_attached += 1
        connection = ConnectionId(self.num_attached)
        engine = EngineId(model, incarnation)
        self.call(Attach(connection, engine, model, CHUNK_SIZE_TOKENS, LAYOUTS[model], slabs), Attached)
        self.model.connections[connection] = ((model, incarnation), slabs)

    @precondition(lambda self: self.model.connections)
    @rule(number=pick, is_due=seldom)
    def detach(self, number: int, is_due: bool) -> None:
        connection = self.choose(number)
        if connection is not None and is_due:
            self.end(connection)

    @precondition(lambda self: self.model.leases)
    @rule(number=pick, is_due=seldom)
    def engine_dies(self, number: int, is_due: bool) -> None:
        """All processes of an engine that holds a lease end, one after the other."""
        _, lease = self.choose_lease(number)
        while is_due and (connection := self.choose(number, engine=lease.engine)) is not None:
            self.end(connection)

    def end(self, connection: ConnectionId) -> None:
        _, notices = self.call(Detach(connection), Detached)
        for writer, generation in self.model.reservations:
            if writer == connection:
                self.ended_regions.append((writer, self.model.reservations[writer, generation].region))
        expected = self.model.detach(connection)
        gone = self.model.removed(notices, {Removal.ABANDONED})
        assert set(gone) == expected
        self.model.drop_reservations_of(gone)

    @precondition(lambda self: self.model.connections)
    @rule(number=pick, tenant=tenants, prompt=prompts)
    def lookup(self, number: int, tenant: str, prompt: str) -> None:
        connection = self.choose(number)
        assert connection is not None
        engine, _ = self.model.connections[connection]
        stored = sorted(
            place for place, chunk in self.model.chunks.items() if place[0] == engine[0] and chunk.is_readable
        )
        if stored and number % 4 != 1:  # most lookups ask for something that is there
            _, tenant, prompt = stored[number % len(stored)]
        request = f"r{number % 3}"
        keys = keys_of(engine[0], tenant, prompt)
        found, notices = self.call(Lookup(connection, request, digest_of(engine[0], tenant), tenant, keys), Found)
        assert not notices
        places = self.model.readable_prefix(engine[0], tenant, prompt)
        assert found.num_tokens == len(places) * CHUNK_SIZE_TOKENS, f"{found.num_tokens} tokens, right is {places}"
        assert (found.lease is None) == (not places)
        assert found.num_chunks_capped == 0
        self.model.check_bytes(places, found.regions)
        miss_tokens = (len(prompt) - len(places)) * CHUNK_SIZE_TOKENS
        self.model.count_lookup(tenant, found.num_tokens, miss_tokens)
        if found.lease is not None:
            assert found.lease not in self.model.leases
            self.model.leases[found.lease] = ModelLease(engine, connection, request, places, found.regions)

    @precondition(lambda self: self.model.leases)
    @rule(number=pick, other=pick)
    def release(self, number: int, other: int) -> None:
        lease_id, lease = self.choose_lease(number)
        connection = self.choose(other, engine=lease.engine)
        if connection is None:
            return
        event = Release(connection, lease.request, lease_id)
        if lease.is_doomed or lease.is_released:
            self.refused(event, LeaseUnknown)
            return
        self.call(event, LeaseNoted)
        lease.is_released = True
        if not lease.copies:
            lease.is_doomed = True
            self.ended_leases.append((lease_id, lease))

    @precondition(lambda self: self.orphans())
    @rule(number=pick, seconds=st.sampled_from([0.0, 5.0, 5.0]), is_copied=st.booleans())
    def finish_for_the_owner(self, number: int, seconds: float, is_copied: bool) -> None:
        """Another process of the engine ends a request whose owner is gone: rare, were it left to single rules."""
        orphans = self.orphans()
        lease_id, lease = orphans[number % len(orphans)]
        connection = self.choose(number, engine=lease.engine)
        assert connection is not None
        if seconds:
            self.time_passes(seconds)
        if is_copied:
            self.call(CopyBegan(connection, lease_id), LeaseNoted)
            lease.copies.add(connection)
        self.call(Release(connection, lease.request, lease_id), LeaseNoted)
        lease.is_released = True
        if not lease.copies:
            lease.is_doomed = True
            self.ended_leases.append((lease_id, lease))

    def orphans(self) -> list[tuple[LeaseId, ModelLease]]:
        """Leases that are held, whose owner is gone, and whose engine is not."""
        return [
            (lease_id, lease)
            for lease_id, lease in sorted(self.model.leases.items())
            if not (lease.is_doomed or lease.is_released)
            and lease.connection not in self.model.connections
            and self.choose(0, engine=lease.engine) is not None
        ]

    @precondition(lambda self: self.model.leases)
    @rule(number=pick, other=pick)
    def release_by_another(self, number: int, other: int) -> None:
        lease_id, lease = self.choose_lease(number)
        connection = self.choose(other)
        if connection is None:
            return
        is_same_engine = self.model.connections[connection][0] == lease.engine
        request = "someone else" if is_same_engine else lease.request
        self.refused(Release(connection, request, lease_id), NotOwner, LeaseUnknown)

    @precondition(lambda self: self.ended_leases)
    @rule(number=pick, other=pick)
    def release_again(self, number: int, other: int) -> None:
        lease_id, lease = self.ended_leases[number % len(self.ended_leases)]
        connection = self.choose(other, engine=lease.engine)
        if connection is not None:
            self.refused(Release(connection, lease.request, lease_id), LeaseUnknown)

    @precondition(lambda self: self.model.leases)
    @rule(number=pick, other=pick)
    def copy_began(self, number: int, other: int) -> None:
        lease_id, lease = self.choose_lease(number)
        connection = self.choose(other, engine=lease.engine)
        if connection is None:
            return
        if lease.is_doomed or lease.is_released:
            self.refused(CopyBegan(connection, lease_id), LeaseUnknown)
            return
        self.call(CopyBegan(connection, lease_id), LeaseNoted)
        lease.copies.add(connection)

    @precondition(lambda self: any(lease.copies for lease in self.model.leases.values()))
    @rule(number=pick)
    def copy_ended(self, number: int) -> None:
        copying = sorted(lease_id for lease_id, lease in self.model.leases.items() if lease.copies)
        lease_id = copying[number % len(copying)]
        lease = self.model.leases[lease_id]
        connection = min(lease.copies)
        self.call(CopyEnded(connection, lease_id), LeaseNoted)
        lease.copies.discard(connection)
        if lease.is_released and not lease.copies:
            lease.is_doomed = True
            self.ended_leases.append((lease_id, lease))

    @precondition(lambda self: self.choose(0, writes=True) is not None)
    @rule(number=pick, tenant=tenants, prompt=prompts, first=st.integers(0, 2))
    def reserve(self, number: int, tenant: str, prompt: str, first: int) -> None:
        connection = self.choose(number, writes=True)
        assert connection is not None
        model = self.model.connections[connection][0][0]
        keys = keys_of(model, tenant, prompt)
        first = min(first, len(prompt) - 1)
        parent = keys[first - 1] if first else None
        event = Reserve(connection, digest_of(model, tenant), tenant, parent, keys[first:])
        self.check_reserve(connection, event, prompt, first)

    @precondition(lambda self: self.choose(0, writes=True) is not None)
    @rule(number=pick, tenant=tenants, prompt=prompts)
    def store(self, number: int, tenant: str, prompt: str) -> None:
        """A whole store by one process: the usual case."""
        connection = self.choose(number, writes=True)
        assert connection is not None
        model = self.model.connections[connection][0][0]
        event = Reserve(connection, digest_of(model, tenant), tenant, None, keys_of(model, tenant, prompt))
        grants = self.check_reserve(connection, event, prompt, 0).grants
        self.check_commit(connection, [(connection, grant.region.generation) for grant in grants])

    @precondition(lambda self: self.model.connections)
    @rule(number=pick, tenant=tenants, prompt=prompts)
    def read(self, number: int, tenant: str, prompt: str) -> None:
        """A whole retrieval by one process: the usual case."""
        before = set(self.model.leases)
        self.lookup(number, tenant, prompt)
        for lease_id in set(self.model.leases) - before:
            lease = self.model.leases[lease_id]
            self.call(Release(lease.connection, lease.request, lease_id), LeaseNoted)
            lease.is_released = lease.is_doomed = True
            self.ended_leases.append((lease_id, lease))

    def check_reserve(self, connection: ConnectionId, event: Reserve, prompt: str, first: int) -> Reserved:
        model = self.model.connections[connection][0][0]
        tenant = event.tenant
        self.model.forget_ended()
        account = self.model.account_of_store(model, tenant)
        reply, notices = self.call(event, Reserved)
        places = [(model, tenant, prompt[: end + 1]) for end in range(first, len(prompt))]
        present = {place for place in places if place in self.model.chunks}
        gone = self.model.removed(notices, EVICTIONS)
        assert not present & set(gone), "the call evicted what it was asked about"
        self.model.check_reserved(connection, places, prompt[:first], reply, account)
        return reply

    @precondition(lambda self: self.model.reservations)
    @rule(number=pick, is_all=st.booleans())
    def commit(self, number: int, is_all: bool) -> None:
        pairs = sorted(self.model.reservations)
        connection, _ = pairs[number % len(pairs)]
        own = [pair for pair in pairs if pair[0] == connection] if is_all else [pairs[number % len(pairs)]]
        self.check_commit(connection, own)

    def check_commit(self, connection: ConnectionId, own: list[tuple[ConnectionId, int]]) -> None:
        regions = tuple(self.model.reservations[pair].region for pair in own)
        expected = tuple(self.model.commit(connection, region) for region in regions)
        reply, notices = self.call(Commit(connection, regions), Committed)
        assert reply.outcomes == expected
        assert len(notices) == sum(outcome is CommitOutcome.READABLE for outcome in expected)
        self.ended_regions += [(connection, region) for region in regions]

    @precondition(lambda self: self.model.reservations)
    @rule(number=pick)
    def abort(self, number: int) -> None:
        pairs = sorted(self.model.reservations)
        connection, generation = pairs[number % len(pairs)]
        region = self.model.reservations[connection, generation].region
        gone = self.model.abort(connection, region)
        _, notices = self.call(Abort(connection, (region,)), Aborted)
        assert self.model.removed(notices, {Removal.ABANDONED}) == ([] if gone is None else [gone])
        self.ended_regions.append((connection, region))

    @precondition(lambda self: self.ended_regions)
    @rule(number=pick, is_abort=st.booleans())
    def use_stale_handle(self, number: int, is_abort: bool) -> None:
        reserved = {
            (connection, reservation.region.offset_bytes)
            for (connection, _), reservation in self.model.reservations.items()
        }
        # Where the same process writes at the same place again, a handle differs by its generation alone.
        telling = [
            (connection, region)
            for connection, region in self.ended_regions
            if (connection, region.offset_bytes) in reserved
        ]
        found = telling if telling and number % 4 else self.ended_regions
        connection, region = found[number % len(found)]
        if connection in self.model.connections and (connection, region.generation) not in self.model.reservations:
            kind = Abort if is_abort else Commit
            self.refused(kind(connection, (region,)), StaleHandle)

    @precondition(lambda self: self.model.dying)
    @rule(number=pick)
    def dead_writer_writes(self, number: int) -> None:
        _, region = self.model.dying[number % len(self.model.dying)]
        self.model.write_garbage(region)

    @rule(seconds=st.sampled_from([0.3, 0.6, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.model.advance(seconds)
        self.step(Tick())

    @rule(
        tenant=st.sampled_from([None, "free", "capped", "other"]),
        model=st.sampled_from([None, "small", "big"]),
        is_due=seldom,
        spares_pinned=st.booleans(),
    )
    def clear(self, tenant: str | None, model: str | None, is_due: bool, spares_pinned: bool) -> None:
        if not is_due:
            return
        self.model.forget_ended()
        expected = {place for place in self.model.chunks if tenant in (None, place[1]) and model in (None, place[0])}
        pins = [name for name in self.model.pins if name in expected]
        if pins and spares_pinned:
            self.refused(Clear(tenant, model, spares_pinned), ChunksPinned)
            return
        for name in pins:
            del self.model.pins[name]
        reply, notices = self.call(Clear(tenant, model, spares_pinned), Cleared)
        gone = self.model.removed(notices, {Removal.CLEARED})
        assert set(gone) == expected
        assert (reply.num_chunks, reply.num_unpinned) == (len(expected), len(pins))
        self.model.drop_reservations_of(gone)

    @precondition(lambda self: self.model.chunks)
    @rule(number=pick, is_whole=st.booleans(), ttl_s=st.sampled_from([None, None, 0.6, 5.0]))
    def pin(self, number: int, is_whole: bool, ttl_s: float | None) -> None:
        """By the last key alone, or by all keys of a prompt that may go on behind what is there."""
        self.model.forget_ended()
        places = sorted(self.model.chunks)
        model, tenant, prompt = places[number % len(places)]
        prompt = prompt + "z" * (number % 2) if is_whole else prompt
        keys = keys_of(model, tenant, prompt)
        event = Pin(keys if is_whole else keys[-1:], ttl_s)
        piece = self.model.readable_prefix(model, tenant, prompt)
        if not piece or (not is_whole and len(piece) < len(prompt)):
            self.refused(event, ChunkUnknown)
            return
        name = piece[-1]
        pinned = self.model.pinned()
        is_full = self.model.bytes_of(pinned | set(piece)) > PINNED_BYTES_MAX
        if is_full or (name not in self.model.pins and len(self.model.pins) >= NUM_PINS_MAX):
            self.refused(event, CapacityExceeded)
            return
        reply, notices = self.call(event, Pinned)
        assert not notices
        assert (reply.num_chunks, reply.num_named) == (len(piece), len(prompt))
        self.model.pins[name] = ModelPin(piece, None if ttl_s is None else self.model.now_s + ttl_s)
        assert reply.pinned_bytes == self.model.bytes_of(self.model.pinned())
        assert reply.key == keys_of(*name)[-1]

    @precondition(lambda self: self.model.pins)
    @rule(number=pick, is_known=st.booleans())
    def unpin(self, number: int, is_known: bool) -> None:
        self.model.forget_ended()
        names = sorted(self.model.pins)
        if not names or not is_known:
            self.refused(Unpin(keys_of("small", "free", "zz")[-1]), ChunkUnknown)
            return
        name = names[number % len(names)]
        del self.model.pins[name]
        reply, _ = self.call(Unpin(keys_of(*name)[-1]), Unpinned)
        assert (reply.num_pins, reply.pinned_bytes) == (1, self.model.bytes_of(self.model.pinned()))

    @rule(
        tenant=st.sampled_from(["free", "capped", "other"]),
        num_units=st.sampled_from([None, None, 0, 2, 4, 8, 16]),
        is_due=seldom,
    )
    def set_quota(self, tenant: str, num_units: int | None, is_due: bool) -> None:
        if not is_due:
            return
        self.model.forget_ended()
        quota_bytes = None if num_units is None else num_units * UNIT_BYTES
        event = SetQuota(tenant, quota_bytes)
        if quota_bytes is None and tenant not in self.model.quotas:
            self.refused(event, ProtocolError)
            return
        if quota_bytes is not None and not self.model.give_quota(tenant):
            self.refused(event, CapacityExceeded)
            return
        self.model.take_over(tenant)
        self.model.quotas.pop(tenant, None)
        if quota_bytes is not None:
            self.model.quotas[tenant] = quota_bytes
        reply, notices = self.call(event, QuotaSet)
        gone = self.model.removed(notices, {Removal.EVICTED_FOR_QUOTA})
        assert all(place[1] == tenant for place in gone)
        used_bytes = self.model.used_bytes_of(tenant)
        assert (reply.quota_bytes, reply.used_bytes, reply.num_evicted) == (quota_bytes, used_bytes, len(gone))
        self.model.check_shrunk(tenant, gone)

    @precondition(lambda self: self.model.usable_bytes < ARENA_BYTES)
    @rule()
    def arena_grows(self) -> None:
        self.model.usable_bytes += 2 * UNIT_BYTES
        self.step(ArenaGrew(self.model.usable_bytes))

    # ---- after every step --------------------------------------------------------------------------------------------

    @invariant()
    def leased_bytes_read_right(self) -> None:
        self.model.forget_ended()
        for lease in self.model.leases.values():
            self.model.check_bytes(lease.places, lease.regions)

    @invariant()
    def numbers_agree(self) -> None:
        statistics = self.cache.statistics()
        assert sum(statistics.num_leases.values()) == len(self.model.leases)
        assert statistics.num_pins == len(self.model.pins)
        assert statistics.pinned_bytes == self.model.bytes_of(self.model.pinned())
        used_bytes = sum(region.size_bytes for region in self.model.occupied())
        assert statistics.free_bytes == self.model.usable_bytes - used_bytes
        assert set(statistics.tenants) == set(self.model.accounts)
        assert statistics.folded.hit_tokens == self.model.hit_tokens[FOLDED]
        assert statistics.folded.miss_tokens == self.model.miss_tokens[FOLDED]
        for name, tenant in statistics.tenants.items():
            assert tenant.used_bytes == self.model.used_bytes_of(name)
            assert tenant.quota_bytes == self.model.quotas.get(name)
            most_bytes = max(self.model.quotas.get(name, ARENA_BYTES), self.model.lowered.get(name, 0))
            assert tenant.used_bytes <= most_bytes, f"{name} is over its quota"
            assert tenant.tokens.hit_tokens == self.model.hit_tokens[name]
            assert tenant.tokens.miss_tokens == self.model.miss_tokens[name]

    @invariant()
    def invariants_hold(self) -> None:
        if self.checks_invariants:
            self.cache.validate()


class ArcMachine(CacheMachine):
    """The same under the other policy."""

    policy = "arc"
