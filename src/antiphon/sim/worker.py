"""A worker of the fake engine: one rank's KV blocks, and the loads and stores between them and the arena.

Its order of things is what the safety of reuse rests on: a load holds its session and goes through one that covers the
promise; a store reserves, copies, and commits after the copy has ended; every order is reported when its copy has ended
or will not happen, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from antiphon.cache.arena import RegionHandle
from antiphon.cache.effects import LeaseNoted, Reply, Reserved
from antiphon.cache.events import Attach, Commit, CopyBegan, CopyEnded, Reserve
from antiphon.core.chunks import ChunkKey
from antiphon.core.namespace import NamespaceDigest
from antiphon.engine.simulated.kv import BLOCK_BYTES
from antiphon.sim.client import UNKNOWN, Answer, CacheClient, Call, Promise, Session
from antiphon.sim.memory import Load, RankMemory, Store, Unit
from antiphon.sim.network import Channel, Process
from antiphon.sim.values import SLAB_BYTES

NUM_LATE_COMMITS_MAX = 3

Blocks = tuple[int, ...]

Report = Callable[[bool], None]
"""Tells the scheduler that an order has ended, and whether well. Done in the scheduler's process."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load a promise: chunk n into ``blocks[n]``.

    Args:
        announced: tells that the server has noted the copy, which begins.
    """

    promise: Promise
    blocks: tuple[Blocks, ...]
    report: Report
    announced: Callable[[], None]


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Store chunks: chunk n is in ``blocks[n]``."""

    namespace: NamespaceDigest
    tenant: str
    parent: ChunkKey | None
    keys: tuple[ChunkKey, ...]
    blocks: tuple[Blocks, ...]
    report: Report


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker behaves.

    Args:
        announces_copies: announces each load to the server and waits for its word; the lease is released when all ranks
            have it, or the request is aborted, while the loads run. Otherwise it is released after the loads.
        commits_late: a store whose connection has ended is committed on the next one, again and again, just when that
            one is given regions.
        num_blocks: KV blocks.
    """

    announces_copies: bool
    commits_late: bool
    num_blocks: int


class Worker:
    """One rank.

    Args:
        process: its process.
        connect, attach: for its client.
        reports: the channel to the scheduler.
    """

    def __init__(
        self,
        process: Process,
        options: WorkerOptions,
        connect: Callable[[Process], tuple[Channel[Call], Channel[Answer]] | None],
        attach: Attach,
        reports: Channel[Callable[[], None]],
    ) -> None:
        self.process = process
        self.memory = RankMemory(options.num_blocks, attach.slabs)
        self.client = CacheClient(process, connect, attach)
        self._options = options
        self._reports = reports
        self._late: list[tuple[RegionHandle, ...]] = []
        """Regions that were reserved on ended connections, copied, and not committed."""
        self._timeline = process.timeline

    def _report(self, order: LoadOrder | StoreOrder, is_ok: bool) -> None:
        self._reports.send(lambda: order.report(is_ok))

    # ---- loads -------------------------------------------------------------------------------------------------------

    def load(self, order: LoadOrder) -> None:
        """Begins a load."""
        if self._options.announces_copies:
            self._announce(order)
            return
        session = self.client.session_for(order.promise)
        if session is None:
            self._timeline.count("load without a session")
            self._report(order, False)
            return
        if not session.is_open:
            self._timeline.count("load from an ended session")
        self._copy_in(order, session, lambda: None)

    def _announce(self, order: LoadOrder) -> None:
        """Asks whether the lease still stands, and copies if so."""
        session, lease = self.client.usable, order.promise.lease
        if session is None or session.incarnation != order.promise.incarnation:
            self._report(order, False)
            return

        def answered(reply: Reply | None) -> None:
            if isinstance(reply, LeaseNoted):
                self._reports.send(order.announced)
                self._copy_in(order, session, ended)
            else:
                self._report(order, False)

        def ended() -> None:
            if session.is_open:
                self.client.submit(session, CopyEnded(UNKNOWN, lease), lambda reply: None)

        self.client.ask(session, CopyBegan(UNKNOWN, lease), answered)

    def _copy_in(self, order: LoadOrder, session: Session, on_end: Callable[[], None]) -> None:
        units = [
            unit
            for region, blocks in zip(order.promise.regions, order.blocks, strict=True)
            for unit in self._units(region, tuple(self.memory.slabs), blocks)
        ]
        self.client.hold(session)
        self._timeline.count("load begins", self.process.name)

        def ended() -> None:
            self.client.unhold(session)
            on_end()
            self._report(order, True)

        Load(self.process, session.mapping, self.memory, units, ended)

    # ---- stores ------------------------------------------------------------------------------------------------------

    def store(self, order: StoreOrder) -> None:
        """Begins a store."""
        session = self.client.usable
        if session is None:
            self._report(order, False)
            return

        def answered(reply: Reply | None) -> None:
            if isinstance(reply, Reserved) and reply.grants:
                self._copy_out(order, session, reply)
            else:
                self._report(order, False)

        event = Reserve(UNKNOWN, order.namespace, order.tenant, order.parent, order.keys)
        self.client.ask(session, event, answered)

    def _copy_out(self, order: StoreOrder, session: Session, reserved: Reserved) -> None:
        blocks_of = dict(zip(order.keys, order.blocks, strict=True))
        units = [
            unit for grant in reserved.grants for unit in self._units(grant.region, grant.slabs, blocks_of[grant.key])
        ]
        regions = tuple(grant.region for grant in reserved.grants)
        self.client.hold(session)
        self._timeline.count("store begins", self.process.name)
        if session.is_open:
            self._commit_late(session)

        def ended() -> None:
            self.client.unhold(session)
            self._commit(session, regions)
            self._report(order, True)

        Store(self.process, session.mapping, self.memory, units, ended)

    def _commit(self, session: Session, regions: tuple[RegionHandle, ...]) -> None:
        """The copies have ended."""
        if session.is_open:
            self.client.submit(session, Commit(UNKNOWN, regions), lambda reply: None)
        elif self._options.commits_late:
            self._late.append(regions)

    def _commit_late(self, session: Session) -> None:
        """What was reserved on ended connections is committed on this one, where it must be refused."""
        for regions in self._late[:NUM_LATE_COMMITS_MAX]:
            self._timeline.count("late commit")
            self.client.submit(session, Commit(UNKNOWN, regions), lambda reply: None)

    @staticmethod
    def _units(region: RegionHandle, slabs: Sequence[int], blocks: Blocks) -> list[Unit]:
        """What a chunk's copy consists of: the blocks of each slab."""
        return [
            (region.offset_bytes + slab * SLAB_BYTES + index * BLOCK_BYTES, slab, block)
            for slab in slabs
            for index, block in enumerate(blocks)
        ]
