"""Connections to the peers that are pulled from, shared by the threads that pull.

Owns up to ``LINKS_PER_PEER_MAX`` idle connections to each life of a peer, and what is known of its NIXL agent. A link
belongs to one thread from ``take`` to ``give_back``.

Always true: after any error of a call its link is closed, and the peer's idle links with it; a link leads to the life
of the peer that was asked for. A peer that has no NIXL agent is not asked for it with each call.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from antiphon.cache_server.peer_serving import PeerSelf
from antiphon.core.errors import PeerUnavailable
from antiphon.protocol import peers as wire
from antiphon.protocol.cluster_proof import Asker
from antiphon.transport.nixl_agent import START_TIMEOUT_S, NixlAgent, RemoteMemory
from antiphon.transport.peer_tcp import PeerSocket

LINKS_PER_PEER_MAX: Final = 16
PEERS_MAX: Final = 256
"""Peers whose links are kept; those not used longest go."""
NIXL_FAILURES_MAX: Final = 2
"""After so many failures over NIXL in a row a life of a peer is read over TCP."""

NIXL_AGAIN_S: Final = 1.0
"""A peer that has no NIXL agent is asked again after this, and after twice as long each time, until an agent that was
being started has started or never will."""


@dataclass(slots=True)
class _Peer:
    """One life of a peer."""

    idle: list[PeerSocket] = field(default_factory=list)
    memory: RemoteMemory | None = None
    num_nixl_failures: int = 0
    first_asked_s: float | None = None
    """When it was asked first how it is read over NIXL, on the monotonic clock."""
    ask_again_s: float = 0.0


class PeerLinks:
    """Links to peers.

    Args:
        myself: who connects.
        now_s: the monotonic clock.
    """

    def __init__(self, myself: PeerSelf, now_s: Callable[[], float] = time.monotonic) -> None:
        self._myself = myself
        self._now_s = now_s
        self._peers: OrderedDict[tuple[str, str], _Peer] = OrderedDict()
        self._lock = threading.Lock()
        self.agent: NixlAgent | None = None
        """Over which peers are read; None until it has started, or where there is none."""

    def take(self, holder: wire.Holder, timeout_s: float) -> PeerSocket:
        """A link to that life of the peer.

        Raises:
            PeerUnavailable, PeerTimeout, PeerRefused, ProtocolError: there is none.
        """
        with self._lock:
            peer = self._peer(holder)
            idle, peer.idle = peer.idle, []
        link: PeerSocket | None = None
        while idle and link is None:
            link = idle.pop()
            if link.has_hung_up:
                link.close()
                link = None
        with self._lock:
            peer.idle.extend(idle)
        if link is None:
            myself = self._myself
            asker = Asker(myself.secret, wire.PEER, myself.instance, myself.incarnation)
            link = PeerSocket.connect(holder.url, asker, timeout_s)
            if link.incarnation != holder.incarnation:
                link.close()
                raise PeerUnavailable(f"{holder.instance} has begun a new life")
        return link

    def _peer(self, holder: wire.Holder) -> _Peer:
        name = holder.life
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _Peer()
            while len(self._peers) > PEERS_MAX:
                former, gone = self._peers.popitem(last=False)
                self._close(former, gone)
        self._peers.move_to_end(name)
        return peer

    def _close(self, name: tuple[str, str], peer: _Peer) -> None:
        for link in peer.idle:
            link.close()
        peer.idle.clear()
        if peer.memory is not None and self.agent is not None:
            try:
                self.agent.forget(peer.memory.name)
            except PeerUnavailable:
                pass  # it is closed, and has forgotten all

    def give_back(self, holder: wire.Holder, link: PeerSocket) -> None:
        """The thread needs it no more."""
        if link.is_closed:
            return
        with self._lock:
            idle = self._peer(holder).idle
            if len(idle) < LINKS_PER_PEER_MAX:
                idle.append(link)
                return
        link.close()

    def failed(self, holder: wire.Holder) -> None:
        """A call to the peer failed: what is idle is not trusted either."""
        with self._lock:
            peer = self._peers.get(holder.life)
            if peer is not None:
                for link in peer.idle:
                    link.close()
                peer.idle.clear()

    def learn_memory(self, holder: wire.Holder, link: PeerSocket, timeout_s: float) -> None:
        """Asks how the peer's arena is read over NIXL, where that is not known and this server can: once in a life of
        the peer, and some times again while its agent may be starting.

        Raises:
            PeerTimeout, PeerUnavailable, ProtocolError: the peer did not say.
        """
        if self.agent is None:
            return
        now_s = self._now_s()
        with self._lock:
            peer = self._peer(holder)
            if peer.memory is not None or now_s < peer.ask_again_s:
                return
            if peer.first_asked_s is None:
                peer.first_asked_s = now_s
            asked_for_s = now_s - peer.first_asked_s
            is_last = asked_for_s >= START_TIMEOUT_S
            peer.ask_again_s = float("inf") if is_last else now_s + max(NIXL_AGAIN_S, asked_for_s)
        info = link.call(wire.AskNixl(), timeout_s)
        if not isinstance(info, wire.NixlInfo) or info.metadata is None:
            return
        memory = RemoteMemory(f"{holder.instance}/{holder.incarnation}", info.metadata, info.base_address)
        with self._lock:
            self._peer(holder).memory = memory

    def memory_of(self, holder: wire.Holder) -> RemoteMemory | None:
        """How the peer's arena is read over NIXL; None where it is read over TCP."""
        with self._lock:
            peer = self._peer(holder)
            has_failed = peer.num_nixl_failures >= NIXL_FAILURES_MAX
            return None if has_failed or self.agent is None else peer.memory

    def needs_polls(self, holder: wire.Holder) -> bool:
        """Whether reads from the peer move only while it polls its NIXL agent."""
        agent, memory = self.agent, self.memory_of(holder)
        return agent is None or memory is None or agent.needs_polls(memory.name)

    def nixl_ended(self, holder: wire.Holder, *, is_ok: bool) -> None:
        """A read over NIXL has ended."""
        with self._lock:
            peer = self._peer(holder)
            peer.num_nixl_failures = 0 if is_ok else peer.num_nixl_failures + 1

    def close(self) -> None:
        """Closes all idle links."""
        with self._lock:
            for name, peer in self._peers.items():
                self._close(name, peer)
            self._peers.clear()
