"""One life of a coordinator in the simulation: the real ``Directory``, driven by messages.

What it must know of each member is kept besides, by replaying what came over that member's own connection, and compared
after every message: what another life of a server says must never be taken for it.
"""

from __future__ import annotations

from antiphon.coordinator.directory import Directory, DirectoryOptions
from antiphon.core.errors import AntiphonError
from antiphon.protocol import peers as wire
from antiphon.sim.network import Process
from antiphon.sim.peers_net import Network, Pipe
from antiphon.sim.timeline import CheckFailed

EXPIRE_S = 0.25
HOST = "coordinator"
CHANGING = (wire.Join, wire.Listing, wire.Events)
"""Messages that change the directory."""

Call = tuple[int, wire.Message]


class SimCoordinator:
    """One life.

    Args:
        network: of the simulation.
        name: of this life.
        options: of its directory.
    """

    def __init__(self, network: Network, name: str, options: DirectoryOptions) -> None:
        self._network = network
        self._timeline = network.timeline
        self.process = Process(network.timeline, name)
        self.directory = Directory(options)
        self._heartbeat_s = options.heartbeat_timeout_s / 3
        self._told: dict[int, set[bytes]] = {}
        self.process.after(EXPIRE_S, self._expire)

    def accept(self, client: Process, host: str, who: tuple[str, str]) -> tuple[Pipe, Pipe]:
        """A connection of a server that has shown the secret: the pipe to the coordinator, and the one from it."""
        to_here = Pipe(self._network, client, self.process, (host, HOST))
        from_here = Pipe(self._network, self.process, client, (HOST, host))
        connection = _Connection(self, who, from_here)
        to_here.on_message = connection.received
        to_here.on_end = connection.ended
        return to_here, from_here

    def _expire(self) -> None:
        for member in self.directory.expire(self._timeline.now_s):
            self._timeline.count("expired", member.instance)
        self.process.after(EXPIRE_S, self._expire)

    def check(self) -> None:
        """The directory is sound, and holds of each member what that member's connection told."""
        self.directory.validate()
        for member in self.directory.members():
            told = self._told.get(member.session, set())
            is_right = member.keys <= told if member.num_left_out else member.keys == told
            if not is_right:
                raise CheckFailed(
                    f"the directory has {len(member.keys)} chunks of {member.instance} ({member.incarnation}), whose "
                    f"own connection told of {len(told)}"
                )

    def answer(self, connection: _Connection, body: wire.Message) -> wire.Message:
        """The answer to a call."""
        directory, now_s = self.directory, self._timeline.now_s
        if isinstance(body, wire.Join):
            connection.session = directory.join(*connection.who, body.url, now_s)
            self._told[connection.session] = set()
            return wire.Joined(self._heartbeat_s)
        session = connection.session
        directory.heard(session, now_s)
        told = self._told[session]
        match body:
            case wire.Listing():
                keys = wire.split_keys(body.keys)
                is_kept = directory.listed(
                    session, keys, body.next_sequence, is_first=body.is_first, is_last=body.is_last
                )
                told = set() if body.is_first else told
                told |= set(keys)
            case wire.Events():
                is_kept = directory.changed(session, body.first_sequence, body.num_events, body.changes)
                for is_stored, key in body.changes:
                    (told.add if is_stored else told.discard)(key)
            case wire.Locate():
                return self._locate(session, wire.split_keys(body.keys))
            case _:
                return wire.Noted()
        self._told[session] = told if is_kept else set()
        self._timeline.count("listing" if isinstance(body, wire.Listing) else "events")
        return wire.Noted() if is_kept else wire.Resync()

    def _locate(self, session: int, keys: list[bytes]) -> wire.Located:
        found = self.directory.locate(session, keys)
        members = list(dict.fromkeys(member for holders in found for member in holders))
        named = tuple(wire.Holder(member.instance, member.incarnation, member.url) for member in members)
        return wire.Located(named, tuple(tuple(map(members.index, holders)) for holders in found))


class _Connection:
    """One connection of a server."""

    def __init__(self, coordinator: SimCoordinator, who: tuple[str, str], from_here: Pipe) -> None:
        self._coordinator = coordinator
        self._from_here = from_here
        self.who = who
        self.session = 0

    def received(self, call: Call) -> None:
        call_id, body = call
        try:
            answer = self._coordinator.answer(self, body)
        except AntiphonError as error:
            answer = wire.failure_of(error)
        self._from_here.send((call_id, answer))
        if isinstance(body, CHANGING):
            self._coordinator.check()

    def ended(self) -> None:
        self._coordinator.directory.leave(self.session)
        self._from_here.end()
        self._coordinator.check()
