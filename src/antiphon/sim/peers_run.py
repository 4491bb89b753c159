"""Simulates cache servers that share through a coordinator: seeds, faults, and what must hold after them.

Safety: faults and wants; whatever is readable has the right bytes, and the directory holds of each member what that
life of it told. Liveness: no more faults; the directory becomes what the servers hold, a chunk of one is pulled by
another, what is handed over arrives whole, and no loan or lookup that waits is left.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from antiphon.coordinator.directory import DirectoryOptions
from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.sim.peers_coordinator import HOST, SimCoordinator
from antiphon.sim.peers_handover import SimHandover
from antiphon.sim.peers_net import Network, Pipe
from antiphon.sim.peers_pulls import SimPull
from antiphon.sim.peers_server import CHUNK_BYTES, SimServer
from antiphon.sim.peers_tier import SimPeerTier
from antiphon.sim.seeds import SeedResult, run_consecutive
from antiphon.sim.timeline import CheckFailed, Timeline

SAFETY_S = 12.0
NUM_ACTIONS = (150, 300)
NUM_FAULTS = (6, 16)
NUM_KEYS = 24
NUM_HANDED_KEYS = 60
CALM_S = 12.0
"""Virtual seconds after the last fault within which all must be in step: many times the longest retry."""

HANDED_OVER_S = 1.0
"""Within so long two chunks are handed over where nothing is wrong."""

PLAIN = ChunkLayout(2, CHUNK_BYTES // 2)
PACKED = ChunkLayout(1, CHUNK_BYTES, "packed")


class PeersWorld:
    """The hosts of one seed."""

    def __init__(self, seed: int) -> None:
        self.timeline = Timeline(seed)
        chance = self.timeline.random
        self.network = Network(self.timeline)
        self.keys = [ChunkKey(hashlib.sha256(b"%d" % number).digest()) for number in range(NUM_KEYS)]
        self.handed_keys: list[ChunkKey] = []
        """Of the last hand-overs."""
        self._num_handovers = 0
        self._num_lives = 0
        self._options = DirectoryOptions(
            placements_max=chance.choice((12, 10_000)), heartbeat_timeout_s=1.5, holders_per_key_max=2
        )
        self.coordinator = self._new_coordinator()
        self.servers: dict[str, SimServer] = {}
        layouts = [PLAIN, PLAIN, chance.choice((PLAIN, PACKED)), PACKED]
        for name, layout in zip("abcd"[: chance.randint(3, 4)], layouts, strict=False):
            self.start_server(name, layout)

    @property
    def is_bounded(self) -> bool:
        """Whether the directory may have no room for all."""
        return self._options.placements_max < len(self.servers) * NUM_KEYS

    def _new_coordinator(self) -> SimCoordinator:
        self._num_lives += 1
        return SimCoordinator(self.network, f"coordinator#{self._num_lives}", self._options)

    def start_server(self, name: str, layout: ChunkLayout) -> None:
        """The next life of a server."""
        self._num_lives += 1
        server = SimServer(self.timeline, name, f"life{self._num_lives}", layout, self.timeline.random.randint(5, 12))
        self.servers[name] = server
        server.serve_tier(SimPeerTier(self.network, server, self.servers.get).run)
        server.join(lambda: self._connect(server))
        self.timeline.note(f"{server.process.name} starts")

    def _connect(self, server: SimServer) -> tuple[Pipe, Pipe] | None:
        coordinator = self.coordinator
        if not coordinator.process.is_alive:
            return None
        return coordinator.accept(server.process, server.host, (server.host, server.incarnation))

    # ---- what happens ------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """An engine stores or wants a chunk, or somebody clears."""
        chance = self.timeline.random
        server = self.servers[chance.choice(list(self.servers))]
        key = chance.choice(self.keys)
        roll = chance.random()
        if not server.process.is_running:
            return
        if roll < 0.12:
            self._hand_over_any(server)
        elif roll < 0.4:
            server.store(key)
        elif roll < 0.98:
            self.want(server, key)
        else:
            server.clear()

    def want(self, server: SimServer, key: ChunkKey) -> None:
        """Read it here, or pull it."""
        if server.read(key):
            self.timeline.count("hit", server.host)
            return
        region = server.reserve(key)
        if region is not None:

            def ended(*, is_here: bool) -> None:
                (server.commit if is_here else server.abort)(region)

            SimPull(self.network, server, self.servers.get, (server.tier_key_of(key), region), ended)

    def hand_over(self, names: tuple[str, str], num_chunks: int, *, is_clean: bool = False) -> SimHandover:
        """An engine of one server hands over to one of another, or of the same."""
        prefill, decode = (self.servers[name] for name in names)
        self._num_handovers += 1
        found = SimHandover(self.timeline, self._num_handovers, (prefill, decode), num_chunks, is_clean=is_clean)
        self.handed_keys = [*self.handed_keys, *found.keys][-NUM_HANDED_KEYS:]
        return found

    def _hand_over_any(self, prefill: SimServer) -> None:
        """To a server whose engines have the same layout: others would compute it all."""
        chance = self.timeline.random
        names = [name for name, each in self.servers.items() if each.layout == prefill.layout]
        decode = self.servers[chance.choice(names)]
        if decode.process.is_running:
            self.hand_over((prefill.host, decode.host), chance.choice((1, 2, 3, 6)))

    def fault(self) -> None:
        """Something goes wrong."""
        chance = self.timeline.random
        kind = chance.choice(
            ("part", "part", "kill", "kill", "stop", "coordinator", "stop coordinator", "storm", "storm")
        )
        server = self.servers[chance.choice(list(self.servers))]
        self.timeline.note(f"fault: {kind} {server.host}")
        self.timeline.count(f"fault {kind}")
        for_s = chance.choice((0.05, 0.4, 2.0))
        if kind in ("part", "storm"):
            is_from_coordinator = kind == "storm" or chance.random() < 0.5
            self.network.part(server.host, HOST if is_from_coordinator else chance.choice(list(self.servers)))
            self.timeline.after(for_s, self.network.join)
        if kind in ("kill", "storm"):
            self.timeline.after(0.5 * for_s * chance.random(), lambda: self._kill(server))
        if kind == "stop":
            server.stop()
            self.timeline.after(for_s, server.process.resume)
        if kind == "stop coordinator":
            process = self.coordinator.process
            process.stop()
            self.timeline.after(for_s, process.resume)
        if kind == "coordinator":
            self.coordinator.process.kill()
            self.timeline.after(for_s, self._restart_coordinator)

    def _kill(self, server: SimServer) -> None:
        if server.process.is_alive:
            server.process.kill()
            self.timeline.after(self.timeline.random.choice((0.01, 0.3)), lambda: self._restart(server))

    def _restart(self, server: SimServer) -> None:
        if self.servers[server.host] is server:
            self.start_server(server.host, server.layout)

    def _restart_coordinator(self) -> None:
        if not self.coordinator.process.is_alive:
            self.coordinator = self._new_coordinator()

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def check_all_bytes(self) -> None:
        """Every chunk that any server reports has the right bytes."""
        for server in self.servers.values():
            for key in [*self.keys, *self.handed_keys]:
                if server.is_readable(key):
                    server.read(key)

    def check_in_step(self) -> None:
        """The directory is what the servers hold."""
        members = {member.instance: member for member in self.coordinator.directory.members()}
        for name, server in self.servers.items():
            member = members.get(name)
            if member is None or member.incarnation != server.incarnation:
                raise CheckFailed(f"{server.process.name} is no member after all faults")
            server.shelf.follow()
            if member.keys != server.shelf.chunks.keys() and not self.is_bounded:
                raise CheckFailed(f"the directory is out of step with {server.process.name}")
            server.check_idle()
        if members.keys() != self.servers.keys():
            raise CheckFailed("a member is none of the servers")
        self.coordinator.check()


def run_peers_seed(seed: int) -> SeedResult:
    """Runs one seed to its end or its first failure."""
    world = PeersWorld(seed)
    failure = None
    try:
        _safety(world)
        _liveness(world)
    except Exception as error:  # supervised: whatever the simulated code raises is this seed's failure, told with it
        place = traceback.extract_tb(error.__traceback__)[-1]
        failure = f"{type(error).__name__}: {error} ({place.name}, line {place.lineno} of {Path(place.filename).name})"
    timeline = world.timeline
    return SeedResult(seed, timeline.digest(), tuple(timeline.trace), failure, timeline.seen)


def run_peers_seeds(first: int, num_seeds: int) -> Iterator[SeedResult]:
    """Runs consecutive seeds; the last result is the first failure, if one fails."""
    return run_consecutive(run_peers_seed, first, num_seeds)


def _safety(world: PeersWorld) -> None:
    timeline, chance = world.timeline, world.timeline.random
    for _ in range(chance.randint(*NUM_ACTIONS)):
        timeline.after(chance.uniform(0, SAFETY_S), world.act)
    for _ in range(chance.randint(*NUM_FAULTS)):
        timeline.after(chance.uniform(0.2, SAFETY_S), world.fault)
    timeline.run_until(SAFETY_S)
    world.check_all_bytes()


def _liveness(world: PeersWorld) -> None:
    timeline = world.timeline
    timeline.is_calm = True
    timeline.note("no more faults")
    timeline.run_until(timeline.now_s + CALM_S)
    world.check_all_bytes()
    world.check_in_step()
    for names in (("a", "b"), ("a", "a")):
        handover = world.hand_over(names, 2, is_clean=True)
        timeline.run_until(timeline.now_s + HANDED_OVER_S)
        if handover.num_found != 2:
            raise CheckFailed(f"{handover.num_found} of 2 chunks were handed over from {names[0]} to {names[1]}")
    if world.is_bounded:
        return
    one, other = world.servers["a"], world.servers["b"]
    key = ChunkKey(hashlib.sha256(b"last").digest())
    one.store(key)
    timeline.run_until(timeline.now_s + 1.0)
    world.want(other, key)
    timeline.run_until(timeline.now_s + 1.0)
    if not other.read(key):
        raise CheckFailed("a chunk of one server was not pulled by another, though nothing is wrong")
    world.check_in_step()
