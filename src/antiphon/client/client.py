"""The client of a cache server: one thread that connects, receives, and connects again.

Always true:

- A server that is absent, refuses, hangs, talks nonsense or comes back as another life never raises in the caller,
  except out of ``Session.call`` and ``Pending.result``, typed.
- At most one session is open. Ended ones are kept while they are held or may still be copied from
  (``Session.disposable_at_s``), at most ``ended_sessions_max`` of them.
- The thread ends only by ``close``: what goes wrong in it is logged and costs the session.

A process that forks keeps its connections to itself: the child has neither sockets nor mappings.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from antiphon.client.handshake import Refused, connect
from antiphon.client.options import ClientOptions, ClientState
from antiphon.client.releases import Releases
from antiphon.client.session import Session
from antiphon.core.errors import AntiphonError, CacheUnavailable
from antiphon.core.quiet_log import QuietLog

_TICK_S: Final = 5.0
"""How often an idle thread looks at calls that are never answered."""
_GOOD_LIFE_S: Final = 1.0
"""A session that lived as long resets the wait between two tries: a server that ends each at once is not hammered."""
_JOIN_TIMEOUT_S: Final = 10.0

_log = logging.getLogger("antiphon.client")


class _Closing(Exception):
    """The client is being closed."""


def _nothing() -> None:
    pass


class CacheClient:
    """Keeps a connection to one cache server.

    Args:
        options: where, who and every limit.
        on_change: called from the client's thread when a session opens or ends, or the state changes; it must not wait.
    """

    def __init__(self, options: ClientOptions, on_change: Callable[[], None] = _nothing) -> None:
        self.options = options
        self._on_change = on_change
        self._quiet = QuietLog(_log)
        self._wakeup = _Wakeup()
        self._changed = threading.Condition()
        self._state = ClientState("connecting")
        self._session: Session | None = None
        self._ended: list[Session] = []
        self._releases = Releases(lambda: self.session, options.owed_releases_max, self._quiet)
        self._num_refusals = 0  # in a row
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="antiphon-cache-client", daemon=True)
        _clients.add(self)

    # ---- for callers ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to connect. Returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and every session. Calls that wait fail with ``CacheUnavailable``. Does no harm twice.

        What a caller still holds is closed by its last ``unhold``.
        """
        assert threading.current_thread() is not self._thread, "the client's thread cannot close the client"
        if self._is_closing:
            return
        self._is_closing = True
        self._wakeup.wake()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                _log.error("the thread of a cache client does not end: it is left alone, with its sockets")
                return
        for session in filter(None, (self._session, *self._ended)):
            session.close_with_client()
        self._session, self._ended = None, []
        with self._changed:
            self._state = ClientState("closed")
            self._changed.notify_all()
        self._wakeup.close()
        _clients.discard(self)

    @property
    def session(self) -> Session | None:
        """The session that is attached and open, if there is one."""
        session = self._session
        return session if session is not None and session.is_open else None

    def release(self, incarnation: str, request: str, lease: int) -> None:
        """Gives a lease of that life of the server back: now, or on the next session with it. Never waits.

        It is owed until the server has answered, whatever that says: the lease ended at the latest then.
        """
        self._releases.owe(incarnation, request, lease)

    @property
    def num_owed_releases(self) -> int:
        """Leases that were given back, and of which the server has not answered."""
        return len(self._releases)

    @property
    def state(self) -> ClientState:
        """What the client is doing, for people."""
        state = self._state
        if state.name == "connected" and self.session is None:
            return ClientState("connecting", "the connection has ended")
        return state

    def wait_connected(self, timeout_s: float) -> bool:
        """Waits until there is a session, at most ``timeout_s``; whether there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self.session is not None or self._is_closing, timeout_s)
        return self.session is not None

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """The top of the thread: whatever goes wrong below costs the session, and the thread goes on."""
        while not self._is_closing:
            try:
                self._live()
            except _Closing:
                return
            except Exception as error:  # supervised: a bug must not leave an engine without reuse, nor in silence
                self._quiet.error("thread", "the thread of a cache client failed and begins again", error)
                self._give_up(f"the client failed: {error!r}")
                # Nothing that can fail for the same reason again stands here.
                time.sleep(self.options.reconnect_max_s)

    def _give_up(self, reason: str) -> None:
        session = self._session
        if session is not None:
            session.give_up(reason)
            self._session = None
            self._ended.append(session)
        self._state = ClientState("connecting", reason)

    def _live(self) -> None:
        """Connects and serves, again and again. Raises _Closing."""
        pause_s = 0.0
        next_pause_s = self.options.reconnect_min_s
        while True:
            self._pause(pause_s)
            while len(self._ended) >= self.options.ended_sessions_max:
                self._quiet.warning(
                    "ended", f"{len(self._ended)} ended sessions are in use: none is begun until one ends"
                )
                self._pause(self.options.reconnect_max_s)
            session = self._try_to_connect()
            if session is not None:
                self._serve(session)
                if time.monotonic() - session.opened_at_s >= _GOOD_LIFE_S:
                    pause_s, next_pause_s = 0.0, self.options.reconnect_min_s
                    continue
            pause_s = next_pause_s
            if self._num_refusals > 1:  # one may be a server that was just starting or ending
                pause_s = self.options.refused_retry_s
            next_pause_s = min(2 * next_pause_s, self.options.reconnect_max_s)

    def _try_to_connect(self) -> Session | None:
        where = f"{self.options.host}:{self.options.port}"
        try:
            made = connect(self.options, self._wait)
        except Refused as error:
            self._quiet.warning(f"refused {error}", f"the cache server at {where} refuses this engine: {error}")
            self._set_state(ClientState("refused", str(error)))
            self._num_refusals += 1
            return None
        except (AntiphonError, OSError) as error:  # the system's: no descriptors left, for example
            self._quiet.warning("connect", f"no cache server at {where}, going on without: {error}")
            self._set_state(ClientState("connecting", str(error)))
            self._num_refusals = 0
            return None
        self._num_refusals = 0
        session = Session(made, self.options, self._releases, self._wakeup.wake, self._quiet)
        self._session = session
        self._releases.pay(session)
        self._quiet.info(
            "connected", f"connected to cache server {session.instance} ({session.incarnation}) at {where}"
        )
        self._set_state(ClientState("connected", f"{session.instance} ({session.incarnation}) at {where}"))
        return session

    def _serve(self, session: Session) -> None:
        """Moves bytes until the session ends."""
        while session.is_open:
            events = self._poll(
                session.fileno(), select.POLLIN | (select.POLLOUT if session.has_unsent else 0), _TICK_S
            )
            if events & ~select.POLLOUT:
                session.receive()
            if events & select.POLLOUT:
                session.flush()
            if session.oldest_unanswered_s > self.options.give_up_after_s:
                session.give_up(f"a call was not answered for {self.options.give_up_after_s:g} s")
        self._session = None
        self._ended.append(session)
        self._quiet.warning("ended session", f"the connection to the cache server ended: {session.end_reason}")
        self._set_state(ClientState("connecting", f"the connection ended: {session.end_reason}"))

    # ---- waiting -------------------------------------------------------------------------------------------------

    def _wait(self, descriptor: int, events: int, deadline_s: float) -> None:
        """For the handshake: returns when the descriptor is ready. Raises CacheUnavailable at the deadline."""
        while not self._poll(descriptor, events, deadline_s - time.monotonic()):
            if time.monotonic() >= deadline_s:
                raise CacheUnavailable(f"the cache server said nothing for {self.options.connect_timeout_s:g} s")

    def _pause(self, pause_s: float) -> None:
        until_s = time.monotonic() + pause_s
        while (left_s := until_s - time.monotonic()) > 0:
            self._poll(-1, 0, left_s)

    def _poll(self, descriptor: int, events: int, timeout_s: float) -> int:
        """The events of ``descriptor`` (negative: none), at most ``timeout_s`` later; 0 for none. Raises _Closing.

        All waiting of the thread is here, so that ended sessions go on time and ``close`` is seen.
        """
        due_s = self._dispose_ended()
        if due_s is not None:
            timeout_s = min(timeout_s, due_s - time.monotonic())
        poller = select.poll()
        poller.register(self._wakeup.descriptor, select.POLLIN)
        if descriptor >= 0:
            poller.register(descriptor, events)
        read_on = {session.fileno(): session for session in self._ended if session.is_read_on}
        for ended in read_on:
            poller.register(ended, select.POLLIN)
        # Rounded up, so that a wait that is nearly over does not turn into a spin.
        found = dict(poller.poll(max(0, int(timeout_s * 1000) + 1)))
        if found.pop(self._wakeup.descriptor, 0):
            self._wakeup.clear()
        if self._is_closing:
            raise _Closing
        for ended, session in read_on.items():
            if found.pop(ended, 0):
                session.receive()
        return found.get(descriptor, 0)

    def _dispose_ended(self) -> float | None:
        """Lets go of the ended sessions that can; returns when the next one can (monotonic clock), if any."""
        if not self._ended:
            return None
        now_s = time.monotonic()
        due_s: float | None = None
        for session in tuple(self._ended):
            at_s = session.disposable_at_s()
            if at_s is not None and at_s <= now_s and session.dispose():
                self._ended.remove(session)
            elif at_s is not None:
                due_s = at_s if due_s is None else min(due_s, at_s)
        return due_s

    def _set_state(self, state: ClientState) -> None:
        with self._changed:
            is_new = state != self._state
            self._state = state
            self._changed.notify_all()
        if is_new:
            try:
                self._on_change()
            except Exception as error:  # supervised: a caller's mistake must not end the thread
                self._quiet.error("on_change", "the handler of a change of the cache client failed", error)

    def forget_in_child(self) -> None:
        """After a fork, in the child: everything here is the parent's. No lock is taken: its holder is not here."""
        self._is_closing = True
        for session in filter(None, (self._session, *self._ended)):
            session.close_descriptor_in_child()
        self._session, self._ended = None, []
        self._state = ClientState("closed", "the process was forked")
        self._releases.forget_in_child()
        self._wakeup.close_in_child()


class _Wakeup:
    """An event descriptor that ends a ``poll``. Waking is safe from any thread, also after the end."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    def wake(self) -> None:
        with self._lock:
            if self.descriptor >= 0:
                os.eventfd_write(self.descriptor, 1)  # a counter of 64 bits, read at every wake: it is never full

    def clear(self) -> None:
        os.eventfd_read(self.descriptor)

    def close(self) -> None:
        with self._lock:
            os.close(self.descriptor)
            self.descriptor = -1

    def close_in_child(self) -> None:
        self._lock = threading.Lock()
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_clients: weakref.WeakSet[CacheClient] = weakref.WeakSet()


def _forget_all_in_child() -> None:
    for client in tuple(_clients):
        client.forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
