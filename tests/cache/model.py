"""A plain model of the cache, dicts and sets, that checks every answer, and a memory that checks every byte.

The model knows what was committed, leased and reserved, by namespace and prompt rather than by key, so that wrong keys
show too. It does not know which chunk is evicted next: it follows the notices, and holds each against the rules. The
memory has a content for each unit of the arena; writers write when they commit, dead writers when they like until
their quarantine is over, and what is leased must read right at all times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from antiphon.cache.arena import RegionHandle
from antiphon.cache.effects import ChunkRemoved, CommitOutcome, Grant, Removal, Reserved, Verdict
from antiphon.cache.events import ConnectionId, LeaseId
from antiphon.cache.tenants import OVERFLOW_TENANT
from antiphon.core.chunks import ChunkKey, chunk_keys
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import QuotaExceeded
from antiphon.core.namespace import ModelIdentity, Namespace, NamespaceDigest
from tests.cache.world import CHUNK_SIZE_TOKENS, FOUR_SLABS, TWO_SLABS, UNIT_BYTES

LAYOUTS: dict[str, ChunkLayout] = {"small": TWO_SLABS, "big": FOUR_SLABS}
QUARANTINE_S = 1.0
FOLDED = "(folded)"
"""Stands for the counts of tenants without an account."""

EngineKey = tuple[str, str]
"""Model, which is the engine's name too, and incarnation."""

Place = tuple[str, str, str]
"""Model, tenant, and the prompt up to and with the chunk, one letter a chunk."""


def digest_of(model: str, tenant: str) -> NamespaceDigest:
    identity = ModelIdentity(model, "rev", "bfloat16", "", "full", 2, LAYOUTS[model].num_slabs, 8)
    return Namespace(identity, CHUNK_SIZE_TOKENS, cache_salt=tenant).digest()


def keys_of(model: str, tenant: str, prompt: str) -> tuple[ChunkKey, ...]:
    tokens = [ord(letter) for letter in prompt for _ in range(CHUNK_SIZE_TOKENS)]
    return tuple(chunk_keys(digest_of(model, tenant), tokens, CHUNK_SIZE_TOKENS))


@dataclass
class ModelChunk:
    region: RegionHandle
    slabs: list[str]
    writers: dict[ConnectionId, tuple[int, ...]] = field(default_factory=dict)

    @property
    def is_readable(self) -> bool:
        return all(state == "committed" for state in self.slabs)


@dataclass
class ModelLease:
    engine: EngineKey
    connection: ConnectionId
    request: str
    places: list[Place]
    regions: tuple[RegionHandle, ...]
    copies: set[ConnectionId] = field(default_factory=set)
    is_released: bool = False
    is_doomed: bool = False
    quiet_at_s: float = 0.0

    def is_over(self, now_s: float) -> bool:
        return (self.is_doomed or (self.is_released and not self.copies)) and now_s >= self.quiet_at_s


@dataclass
class ModelReservation:
    place: Place
    region: RegionHandle
    slabs: tuple[int, ...]
    is_dropped: bool = False


@dataclass
class ModelPin:
    places: list[Place]
    until_s: float | None


class CacheModel:
    """What the cache should hold, and what its memory does hold."""

    def __init__(self, usable_bytes: int, quotas: dict[str, int], num_accounts_max: int, num_given_max: int) -> None:
        self.usable_bytes = usable_bytes
        self.quotas = dict(quotas)
        self.own = set(quotas)
        self.given: list[str] = []
        """Further tenants that have an account of their own, as they were given a quota; the oldest first."""
        self.lowered: dict[str, int] = {}
        """What a tenant held when its quota was lowered below it."""
        self.pins: dict[Place, ModelPin] = {}
        self.num_accounts_max = num_accounts_max
        self.num_given_max = num_given_max
        self.accounts: list[str] = []
        """Names of accounts, the one used longest ago first."""
        self.now_s = 0.0
        self.chunks: dict[Place, ModelChunk] = {}
        self.leases: dict[LeaseId, ModelLease] = {}
        self.reservations: dict[tuple[ConnectionId, int], ModelReservation] = {}
        self.connections: dict[ConnectionId, tuple[EngineKey, tuple[int, ...]]] = {}
        self.dying: list[tuple[float, RegionHandle]] = []
        self.memory: dict[int, tuple[Place, int] | str] = {}
        self.place_of_key: dict[ChunkKey, Place] = {}
        self.account_of: dict[RegionHandle, str] = {}
        self.namespace_of: dict[RegionHandle, tuple[str, str]] = {}
        self.hit_tokens: Counter[str] = Counter()
        """By account; of those without one under ``FOLDED``."""
        self.miss_tokens: Counter[str] = Counter()

    # ---- memory ------------------------------------------------------------------------------------------------------

    @staticmethod
    def unit_of(region: RegionHandle, slab: int) -> int:
        return region.offset_bytes // UNIT_BYTES + slab

    def write(self, place: Place, region: RegionHandle, slabs: Iterable[int]) -> None:
        for slab in slabs:
            self.memory[self.unit_of(region, slab)] = (place, slab)

    def write_garbage(self, region: RegionHandle) -> None:
        for unit in range(region.offset_bytes // UNIT_BYTES, region.end_bytes // UNIT_BYTES):
            self.memory[unit] = "garbage"

    def check_bytes(self, places: list[Place], regions: tuple[RegionHandle, ...]) -> None:
        assert len(places) == len(regions)
        for place, region in zip(places, regions, strict=True):
            for slab in range(LAYOUTS[place[0]].num_slabs):
                assert self.memory.get(self.unit_of(region, slab)) == (place, slab), (
                    f"{place} reads wrong in slab {slab}"
                )

    # ---- what holds bytes --------------------------------------------------------------------------------------------

    def protected(self) -> set[RegionHandle]:
        """Regions that must not be given to anything else."""
        regions = {region for lease in self.leases.values() for region in lease.regions}
        regions |= {reservation.region for reservation in self.reservations.values()}
        regions |= {self.chunks[place].region for place in self.pinned() if place in self.chunks}
        return regions | {region for _, region in self.dying}

    def occupied(self) -> set[RegionHandle]:
        return self.protected() | {chunk.region for chunk in self.chunks.values()}

    def used_bytes_of(self, account: str) -> int:
        return sum(region.size_bytes for region in self.occupied() if self.account_of[region] == account)

    # ---- pins --------------------------------------------------------------------------------------------------------

    def pinned(self) -> set[Place]:
        return {place for pin in self.pins.values() for place in pin.places}

    def bytes_of(self, places: Iterable[Place]) -> int:
        return sum(self.chunks[place].region.size_bytes for place in places)

    # ---- accounts ----------------------------------------------------------------------------------------------------

    def bounded_accounts(self) -> list[str]:
        return [name for name in self.accounts if name not in (OVERFLOW_TENANT, *self.own, *self.given)]

    def has_account_for(self, tenant: str) -> bool:
        is_free = len(self.bounded_accounts()) < self.num_accounts_max
        return is_free or tenant in (OVERFLOW_TENANT, *self.accounts, *self.own, *self.given)

    def open_account(self, tenant: str) -> str:
        """The account of a store: the tenant's own, else one that nobody needs, else the one that is shared."""
        if tenant not in self.accounts:
            if not self.has_account_for(tenant):
                idle = [name for name in self.bounded_accounts() if not self.used_bytes_of(name)]
                if not idle:
                    return self.open_account(OVERFLOW_TENANT)
                self.fold(idle[0])
        else:
            self.accounts.remove(tenant)
        self.accounts.append(tenant)
        return tenant

    def fold(self, name: str) -> None:
        self.accounts.remove(name)
        for tokens in (self.hit_tokens, self.miss_tokens):
            tokens[FOLDED] += tokens.pop(name, 0)

    def give_quota(self, tenant: str) -> bool:
        """Whether the tenant may have a quota; its account is its own from here on."""
        if tenant in (*self.own, *self.given):
            return True
        if len(self.given) >= self.num_given_max:
            idle = [name for name in self.given if name not in self.quotas and not self.used_bytes_of(name)]
            if not idle:
                return False
            self.given.remove(idle[0])
            if idle[0] in self.accounts:
                self.fold(idle[0])
        self.given.append(tenant)
        return True

    def take_over(self, tenant: str) -> None:
        """What the tenant's namespaces hold counts against its own account from here on."""
        self.open_account(tenant)
        for region in self.occupied():
            if self.namespace_of[region][1] == tenant:
                self.account_of[region] = tenant

    def account_of_store(self, model: str, tenant: str) -> str:
        """What a store counts against: where chunks of its namespace are, the account of those."""
        bound = {self.account_of[region] for region in self.occupied() if self.namespace_of[region] == (model, tenant)}
        assert len(bound) <= 1, "chunks of one namespace count against two accounts"
        return bound.pop() if bound else self.open_account(tenant)

    def count_lookup(self, tenant: str, hit_tokens: int, miss_tokens: int) -> None:
        account = self.open_account(tenant) if self.has_account_for(tenant) else FOLDED
        self.hit_tokens[account] += hit_tokens
        self.miss_tokens[account] += miss_tokens

    def has_window(self, size_bytes: int, kept: set[RegionHandle]) -> bool:
        """Whether the usable arena has a stretch of that size without protected bytes and without ``kept``."""
        blocked: set[int] = set()
        for region in self.protected() | kept:
            blocked |= set(range(region.offset_bytes // UNIT_BYTES, region.end_bytes // UNIT_BYTES))
        run = 0
        for unit in range(self.usable_bytes // UNIT_BYTES):
            run = 0 if unit in blocked else run + 1
            if run * UNIT_BYTES >= size_bytes:
                return True
        return False

    def children(self, place: Place) -> list[Place]:
        model, tenant, prompt = place
        return [
            other
            for other in self.chunks
            if other[:2] == (model, tenant) and len(other[2]) == len(prompt) + 1 and other[2].startswith(prompt)
        ]

    # ---- time --------------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.forget_ended()

    def forget_ended(self) -> None:
        self.leases = {key: lease for key, lease in self.leases.items() if not lease.is_over(self.now_s)}
        # A dead writer's quarantine counts from its death; a writer or lease on the same bytes may outlast it.
        self.dying = [(until_s, region) for until_s, region in self.dying if until_s > self.now_s]
        self.pins = {name: pin for name, pin in self.pins.items() if pin.until_s is None or pin.until_s > self.now_s}

    # ---- notices -----------------------------------------------------------------------------------------------------

    def removed(self, notices: Iterable[object], expected: set[Removal]) -> list[Place]:
        """Follows removals, each of an allowed kind and of a chunk that may go. Returns their places."""
        places = []
        for notice in notices:
            if not isinstance(notice, ChunkRemoved):
                continue
            assert notice.removal in expected, notice.removal
            place = self.place_of_key[notice.key]
            assert (notice.model, notice.tenant) == place[:2]
            chunk = self.chunks.pop(place, None)
            assert chunk is not None, f"{place} was removed, and was not there"
            assert (notice.sequence is not None) == chunk.is_readable, (
                "observers are told of readable chunks, all of them"
            )
            if notice.removal in (Removal.EVICTED, Removal.EVICTED_FOR_QUOTA):
                assert not self.children(place), f"{place} was evicted before {self.children(place)}"
            if notice.removal not in (Removal.CLEARED, Removal.ABANDONED):
                assert not chunk.writers, f"{place} was evicted while it was written"
                assert chunk.region not in self.protected(), f"{place} was evicted while its bytes were in use"
                assert place not in self.pinned(), f"{place} was evicted, and was pinned"
            places.append(place)
        return places

    # ---- calls -------------------------------------------------------------------------------------------------------

    def readable_prefix(self, model: str, tenant: str, prompt: str) -> list[Place]:
        places: list[Place] = []
        for end in range(1, len(prompt) + 1):
            chunk = self.chunks.get((model, tenant, prompt[:end]))
            if chunk is None or not chunk.is_readable:
                break
            places.append((model, tenant, prompt[:end]))
        return places

    def check_reserved(
        self, connection: ConnectionId, places: list[Place], parent: str, reply: Reserved, account: str
    ) -> None:
        """Holds each verdict against the model, and takes the grants over.

        Args:
            account: what the store counted against when it was asked for.
        """
        assert len(reply.verdicts) == len(places)
        grants = list(reply.grants)
        named = {*places, (*places[0][:2], parent)} if places else set()
        is_refused = False
        for place, verdict in zip(places, reply.verdicts, strict=True):
            chunk = self.chunks.get(place)
            if chunk is not None:
                expected = self.verdict_of(connection, chunk)
                assert verdict == expected, f"{place}: {verdict} where {expected} is true"
            else:
                assert verdict in (Verdict.WRITE, Verdict.REFUSED), f"{place}: {verdict} of a chunk that is not there"
                assert not (is_refused and verdict is Verdict.WRITE), "room was made behind a refused chunk"
            is_refused = is_refused or verdict is Verdict.REFUSED
            if verdict is Verdict.WRITE:
                self.take_grant(connection, place, grants.pop(0), account)
        assert not grants, "a grant without a verdict"
        assert (reply.refusal is not None) == is_refused
        if is_refused:
            self.check_refusal(places[0], named, reply, account)

    def verdict_of(self, connection: ConnectionId, chunk: ModelChunk) -> Verdict:
        if chunk.is_readable:
            return Verdict.RESIDENT
        if connection in chunk.writers:
            return Verdict.BEING_WRITTEN
        states = {chunk.slabs[slab] for slab in self.connections[connection][1]}
        if "absent" in states:
            return Verdict.WRITE
        return Verdict.BEING_WRITTEN if "reserved" in states else Verdict.PARTIAL

    def take_grant(self, connection: ConnectionId, place: Place, grant: Grant, account: str) -> None:
        own = self.connections[connection][1]
        chunk = self.chunks.get(place)
        if chunk is None:
            for other in self.occupied():
                is_apart = other.end_bytes <= grant.region.offset_bytes or grant.region.end_bytes <= other.offset_bytes
                assert is_apart, f"{place} was given bytes that are in use"
            assert grant.region.end_bytes <= self.usable_bytes
            assert grant.region.size_bytes == LAYOUTS[place[0]].chunk_bytes
            chunk = self.chunks[place] = ModelChunk(grant.region, ["absent"] * LAYOUTS[place[0]].num_slabs)
            self.account_of[grant.region] = account
            self.namespace_of[grant.region] = place[:2]
        assert grant.region == chunk.region
        assert grant.slabs == tuple(slab for slab in own if chunk.slabs[slab] == "absent")
        for slab in grant.slabs:
            chunk.slabs[slab] = "reserved"
        chunk.writers[connection] = grant.slabs
        self.place_of_key[grant.key] = place
        self.reservations[connection, grant.region.generation] = ModelReservation(place, grant.region, grant.slabs)

    def check_refusal(self, first: Place, named: set[Place], reply: Reserved, account: str) -> None:
        """A refusal is right only where nothing that may go would have made room."""
        size_bytes = LAYOUTS[first[0]].chunk_bytes
        kept = {self.chunks[place].region for place in named if place in self.chunks}
        if isinstance(reply.refusal, QuotaExceeded):
            quota_bytes = self.quotas[account]
            assert self.used_bytes_of(account) + size_bytes > quota_bytes
            protected = self.protected() | kept
            for place, chunk in self.chunks.items():
                may_go = chunk.region not in protected and not self.children(place)
                is_own = self.account_of[chunk.region] == account
                assert not (is_own and may_go) or size_bytes > quota_bytes, f"{place} could have gone"
        else:
            assert not self.has_window(size_bytes, kept), "refused, and there was room"

    def check_shrunk(self, tenant: str, gone: list[Place]) -> None:
        """A new quota has evicted as much as it had to, as far as it could, and no more."""
        quota_bytes = self.quotas.get(tenant)
        used_bytes = self.used_bytes_of(tenant)
        self.lowered[tenant] = 0
        if quota_bytes is None:
            assert not gone, "a quota that was taken away has evicted"
            return
        if gone:
            last_bytes = LAYOUTS[gone[-1][0]].chunk_bytes
            assert used_bytes + last_bytes > quota_bytes, f"{gone[-1]} went in vain"
        if used_bytes > quota_bytes:
            self.lowered[tenant] = used_bytes
            protected = self.protected()
            for place, chunk in self.chunks.items():
                may_go = chunk.region not in protected and not self.children(place)
                assert not (may_go and self.account_of[chunk.region] == tenant), f"{place} could have gone"

    def commit(self, connection: ConnectionId, region: RegionHandle) -> CommitOutcome:
        """The writer copies and commits. Returns the right outcome."""
        reservation = self.reservations.pop((connection, region.generation))
        self.write(reservation.place, region, reservation.slabs)
        if reservation.is_dropped:
            return CommitOutcome.DROPPED
        chunk = self.chunks[reservation.place]
        del chunk.writers[connection]
        for slab in reservation.slabs:
            chunk.slabs[slab] = "committed"
        return CommitOutcome.READABLE if chunk.is_readable else CommitOutcome.PARTIAL

    def abort(self, connection: ConnectionId, region: RegionHandle) -> Place | None:
        """The writer gives up. Returns the place of the chunk if nothing of it is left."""
        reservation = self.reservations.pop((connection, region.generation))
        if reservation.is_dropped:
            return None
        chunk = self.chunks[reservation.place]
        del chunk.writers[connection]
        for slab in reservation.slabs:
            chunk.slabs[slab] = "absent"
        is_left = chunk.writers or "committed" in chunk.slabs
        return None if is_left else reservation.place

    def detach(self, connection: ConnectionId) -> set[Place]:
        """The connection ends. Returns the places of the chunks that it takes along."""
        engine, _ = self.connections.pop(connection)
        until_s = self.now_s + QUARANTINE_S
        places = set()
        for (writer, generation), reservation in list(self.reservations.items()):
            if writer != connection:
                continue
            del self.reservations[writer, generation]
            self.dying.append((until_s, reservation.region))
            if not reservation.is_dropped:
                places.add(reservation.place)
        is_last = all(other != engine for other, _ in self.connections.values())
        for lease in self.leases.values():
            if lease.engine != engine or lease.is_doomed:
                continue
            if is_last or connection in lease.copies:
                lease.quiet_at_s = until_s
            lease.copies.discard(connection)
            lease.is_doomed = lease.is_doomed or is_last or (lease.is_released and not lease.copies)
        return places

    def drop_reservations_of(self, places: Iterable[Place]) -> None:
        """The chunks at ``places`` left the index: who writes them still holds the bytes, for nothing."""
        for reservation in self.reservations.values():
            reservation.is_dropped = reservation.is_dropped or reservation.place in places
