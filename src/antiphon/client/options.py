"""What a client is told, and what it says about itself. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from antiphon.core.chunks_layout import ChunkLayout


@dataclass(frozen=True)
class ClientOptions:
    """Who connects where, and every limit of the connection.

    Args:
        host: of the cache server: a name or an address. A name is looked up on each connect.
        port: of its call protocol.
        role: what this process is, for people: ``scheduler``, ``worker-0``, ``probe``.
        engine: name of the engine, the same for all its processes.
        incarnation: of this start of the engine.
        model: served model name.
        layout: the form of a chunk.
        chunk_size_tokens: tokens of a chunk; a server with another size is refused.
        slabs: slabs that this process writes; empty for one that only looks up.
        needs_arena: whether this process copies, so that the arena is mapped.
        connect_timeout_s: for a whole connect: both sockets, the handshake and the mapping.
        call_timeout_s: how long ``Session.call`` waits unless told otherwise.
        unresponsive_after_s: age of the oldest unanswered call from which on the session is not responsive. A server
            answers within a millisecond; 50 ms are what a scheduler may lose to one that hangs.
        give_up_after_s: age of the oldest unanswered call at which the session is ended and another begun.
        reconnect_min_s: first wait between two tries to connect; it doubles.
        reconnect_max_s: longest wait between two tries; a server that comes back is used after this, at the latest.
        refused_retry_s: wait after the server refused this client, which only a change of one of them can help.
        drain_quiet_s: how long the socket and the mapping of a session that ended are kept, for copies that run. The
            server takes the end of file as "touches the arena no more".
        send_buffer_bytes: calls that the socket does not take yet; more are refused. Four of the largest frames.
        unanswered_calls_max: calls sent and not answered; more are refused.
        owed_releases_max: leases given back, of which the server has not answered. A scheduler holds fewer promises.
        read_on_max_s: how long answers of a session that was given up are read, while the server has not hung up: it
            may be stopped in the middle of a lookup, which finds something when it goes on.
        ended_sessions_max: ended sessions that are kept, each with the memory of a dead server's arena; no new one is
            begun beyond it.
    """

    host: str
    port: int
    role: str
    engine: str
    incarnation: str
    model: str
    layout: ChunkLayout
    chunk_size_tokens: int
    slabs: tuple[int, ...]
    needs_arena: bool
    connect_timeout_s: float = 2.0
    call_timeout_s: float = 1.0
    unresponsive_after_s: float = 0.05
    give_up_after_s: float = 30.0
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 0.5
    refused_retry_s: float = 5.0
    drain_quiet_s: float = 2.0
    send_buffer_bytes: int = 4 << 20
    unanswered_calls_max: int = 16_384
    owed_releases_max: int = 4096
    read_on_max_s: float = 300.0
    ended_sessions_max: int = 4

    def __post_init__(self) -> None:
        if self.slabs and not self.needs_arena:
            raise ValueError("a process that writes slabs needs the arena")
        for name in ("connect_timeout_s", "call_timeout_s", "reconnect_min_s", "reconnect_max_s", "refused_retry_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0")
        if self.reconnect_min_s > self.reconnect_max_s:
            raise ValueError("reconnect_min_s must be at most reconnect_max_s")


@dataclass(frozen=True)
class ClientState:
    """What the client is doing, for people.

    Args:
        name: ``refused`` means that a server answered, and that only a change of it or of this client can help.
        detail: the server when connected, the last failure otherwise; may be empty.
    """

    name: Literal["connecting", "connected", "refused", "closed"]
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name
