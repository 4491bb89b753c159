"""One life of a connection: calls are matched with answers, and the arena is mapped as long as someone may use it.

Always true:

- A call that was submitted is done at the latest when the session ends: with its answer or with ``CacheUnavailable``.
- What an abandoned call was granted is given back: a lease is owed to the client's next session too (``releases``), a
  reservation ends with the connection.
- A session that is given up says so to the server (end of file), and is read on to the server's: nothing that a lookup
  found meanwhile is lost, as a server takes up no lookup of a peer that has hung up. Only without an arena, for the end
  of file means "this process touches the arena no more"; who maps one looks nothing up.
- Once ended, a session never opens again. Its socket and its mapping stay until ``is_disposable``: the server takes the
  end of file as "this process touches the arena no more".

Any thread may call anything here; nothing but ``call`` and ``Pending.wait`` waits. The client's thread drives it
(``receive``, ``flush``, ``dispose``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from antiphon.client.answers import check_answer, undo_of
from antiphon.client.handshake import Connected
from antiphon.client.options import ClientOptions
from antiphon.client.pending import OnLate, Pending
from antiphon.client.releases import Releases
from antiphon.core.errors import CacheUnavailable, CallTimeout, ProtocolError
from antiphon.core.quiet_log import QuietLog
from antiphon.protocol.cache import (
    Answer,
    Answered,
    Body,
    Call,
    Failure,
    Lookup,
    Onboarding,
    Region,
    Release,
    decode_answer,
    frame,
)

_ID_MAX: Final = (1 << 63) - 1
_UNMAP_AGAIN_S: Final = 1.0
_Late = tuple[Pending, Answered]


class Session:
    """A connection that is attached.

    Args:
        made: the connection, which belongs to the session from here on; its arena is None where none is needed.
        options: of the client.
        releases: what the client owes, this session and others.
        wake: wakes the client's thread: bytes wait to be sent, the session has ended, or it can be disposed of.
        log: for faults.
    """

    def __init__(
        self,
        made: Connected,
        options: ClientOptions,
        releases: Releases,
        wake: Callable[[], None],
        log: QuietLog,
    ) -> None:
        self.instance = made.welcome.instance
        self.incarnation = made.welcome.incarnation
        self.peer_address = made.welcome.peer_address
        self.chunk_size_tokens = made.welcome.chunk_size_tokens
        self.arena = made.arena
        self.is_open = True
        self.end_reason: str | None = None
        self.ended_at_s: float | None = None
        self.opened_at_s = time.monotonic()
        self._wire = made.wire
        self._options = options
        self._releases = releases
        self._wake = wake
        self._log = log
        self._lock = threading.Lock()  # everything below, and sending
        self._receiving = threading.Lock()  # receiving; taken before _lock, never after it
        self._calls: dict[int, Pending] = {}  # by id, the oldest first
        self._onboarding: dict[int, Pending] = {}  # lookups of which the server has said that they wait for tiers
        self._unheard: dict[int, Pending] = {}  # of a session that was given up, while it is read on
        self._read_on_until_s: float | None = None
        self._next_id = 1
        self._answered_at_s = self.opened_at_s
        self._num_holds = 0
        self._is_retired = False
        self._is_disposed = False
        self._not_disposable_before_s = self.opened_at_s
        self._is_client_closed = False

    # ---- calls ---------------------------------------------------------------------------------------------------

    def submit(self, body: Body, on_late: OnLate | None = None) -> Pending:
        """Sends ``body``, now or when the socket takes it. Never waits and never raises: what fails is the pending.

        Args:
            on_late: told of an answer that comes after the pending was abandoned, from whichever thread took it in; not
                called where none comes. It must not wait.
        """
        return self._submit(body, on_late, is_undo=False)

    def call(self, body: Body, timeout_s: float | None = None) -> Answered:
        """Sends ``body`` and waits for its answer, at most ``timeout_s`` (default: ``call_timeout_s``).

        Raises:
            CallTimeout: no answer in time; what a later one grants is given back.
            CacheUnavailable: it was not sent, or the connection ended before the answer.
            CacheError: the server refused it; another class of the tree as the server says.
        """
        timeout_s = self._options.call_timeout_s if timeout_s is None else timeout_s
        pending = self.submit(body)
        if not pending.wait(timeout_s):
            pending.abandon()
            raise CallTimeout(f"the cache server did not answer {type(body).__name__} within {timeout_s:g} s")
        return pending.result()

    @property
    def is_responsive(self) -> bool:
        """Whether the server answers: False while its oldest unanswered call is too old, until any answer comes."""
        if not self._is_overdue():
            return True
        self.poll()  # the answer may be here, and the client's thread not yet awake
        return not self._is_overdue()

    def _is_overdue(self) -> bool:
        with self._lock:
            if not self._calls:
                return False
            since_s = max(next(iter(self._calls.values())).sent_at_s, self._answered_at_s)
        return time.monotonic() - since_s > self._options.unresponsive_after_s

    @property
    def num_unanswered(self) -> int:
        """Calls sent and not answered, abandoned ones too."""
        return len(self._calls) + len(self._onboarding)

    @property
    def oldest_unanswered_s(self) -> float:
        """Age of the oldest call without an answer, in seconds; 0 where there is none."""
        with self._lock:
            return time.monotonic() - next(iter(self._calls.values())).sent_at_s if self._calls else 0.0

    def _submit(self, body: Body, on_late: OnLate | None, *, is_undo: bool) -> Pending:
        pending = Pending(self, body, time.monotonic(), on_late)
        with self._lock:
            call_id = self._next_id
            self._next_id = call_id + 1 if call_id < _ID_MAX else 1
            try:
                data = frame(Call(call_id, body))
            except ProtocolError as error:
                pending.complete(None, error)
                return pending
            refusal = self._refusal(len(data), is_undo)
            if refusal is not None:
                pending.complete(None, CacheUnavailable(refusal))
                return pending
            self._calls[call_id] = pending
            self._wire.send(data)
            must_wake = self._wire.num_unsent_bytes > 0
        if self._wire.end_reason is not None:
            self.poll()  # what the server still answered
            self.end(self._wire.end_reason)
        elif must_wake:
            self._wake()
        return pending

    def _refusal(self, num_bytes: int, is_undo: bool) -> str | None:
        """Why the call is not taken. Undoing has a share of its own: full limits must not keep it from being sent."""
        if not self.is_open:
            return f"the connection to the cache server has ended: {self.end_reason}"
        share = 2 if is_undo else 1
        if self.num_unanswered >= share * self._options.unanswered_calls_max:
            return f"{self.num_unanswered} calls to the cache server are unanswered"
        unsent = self._wire.num_unsent_bytes
        if unsent and unsent + num_bytes > share * self._options.send_buffer_bytes:
            return f"{unsent} bytes wait to be sent to the cache server, which takes none"
        return None

    # ---- answers -------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Takes in the answers that have arrived, unless another thread is doing so."""
        if self._receiving.acquire(blocking=False):
            self._take_in()

    def receive(self) -> None:
        """Takes in the answers that have arrived."""
        self._receiving.acquire()
        self._take_in()

    def _take_in(self) -> None:
        """The rest of ``poll`` and ``receive``; releases their lock."""
        late: list[_Late] = []
        reason: str | None = None
        try:
            if not (self.is_open or self.is_read_on):
                return
            for payload in self._wire.receive():
                self._take(payload, late)
            reason = self._wire.end_reason
        except ProtocolError as error:
            reason = f"garbage was received: {error.message}"
        except Exception as error:  # supervised: a bug here must cost this session, not the thread that found it
            self._log.error("receive", "an answer of the cache server could not be handled", error)
            reason = f"an answer could not be handled: {error!r}"
        finally:
            self._receiving.release()
        for pending, answer in late:
            self._give_back(pending, answer)
        if reason is not None:
            self._all_heard()
            self.end(reason)

    def _take(self, payload: bytes, late: list[_Late]) -> None:
        """One answer. Raises ProtocolError where it is none of ours."""
        message: Answer = decode_answer(payload)
        answer = message.body
        with self._lock:
            unheard = None if isinstance(answer, Onboarding) else self._unheard.pop(message.id, None)
            if unheard is not None:
                check_answer(unheard.body, answer)
                late.append((unheard, answer))
            if not self.is_open:
                return
            pending = self._calls.get(message.id) or self._onboarding.get(message.id)
            if isinstance(answer, Onboarding):
                self._note_onboarding(message.id, answer)
                return
            if pending is None:
                said = f", which says: {answer.message}" if isinstance(answer, Failure) else ""
                raise ProtocolError(f"an answer to call {message.id}, which waits for none{said}")
            check_answer(pending.body, answer)
            if self._calls.pop(message.id, None) is None:
                del self._onboarding[message.id]
            self._answered_at_s = time.monotonic()
            pending.complete(answer)
            if pending.is_abandoned:
                late.append((pending, answer))

    def _note_onboarding(self, call_id: int, answer: Onboarding) -> None:
        """Under the lock. The first answer to a lookup; the second may take long, which says nothing of the server."""
        pending = self._calls.get(call_id)
        if pending is None or not isinstance(pending.body, Lookup) or pending.body.onboard_s <= 0:
            raise ProtocolError(f"call {call_id} is said to wait for tiers, and is no lookup that may")
        self._onboarding[call_id] = self._calls.pop(call_id)
        self._answered_at_s = time.monotonic()
        pending.onboarding = (answer, self._answered_at_s)

    def abandon(self, pending: Pending) -> None:
        """For ``Pending.abandon``."""
        with self._lock:
            if pending.is_abandoned or pending.is_read:
                return
            pending.is_abandoned = True
            answer = pending.answer
        if answer is not None:
            self._give_back(pending, answer)

    def _give_back(self, pending: Pending, answer: Answered) -> None:
        """Undoes what nobody waits for, then tells ``on_late``."""
        undo = undo_of(pending.body, answer)
        if isinstance(undo, Release):
            self._releases.owe(self.incarnation, undo.request, undo.lease)
        elif undo is not None and self.is_open:
            self.give_back(undo).abandon()
        if pending.on_late is not None and pending.is_abandoned:
            try:
                pending.on_late(answer)
            except Exception as error:  # supervised: a caller's mistake must not end the thread that serves all
                self._log.error("on_late", "the handler of a late answer failed", error)

    def give_back(self, body: Body, on_late: OnLate | None = None) -> Pending:
        """As ``submit``, with a share of the limits of its own. Where even that is full, the session is given up."""
        pending = self._submit(body, on_late, is_undo=True)
        if pending.has_failed:
            self.give_up("what was granted could not be given back")
        return pending

    # ---- the arena -----------------------------------------------------------------------------------------------

    def address_of(self, region: Region) -> int:
        """Where a chunk lies in this process. Valid while the session is held or open.

        Raises:
            ProtocolError: the region is not inside the arena, or smaller than a chunk: copying there is not safe.
        """
        assert self.arena is not None, "this session maps no arena"
        needed = self._options.layout.chunk_bytes
        if region.offset < 0 or region.size < needed or region.size > self.arena.data_bytes - region.offset:
            raise ProtocolError(f"{region} is no place for a chunk of {needed} bytes")
        return self.arena.address + region.offset

    def hold(self) -> bool:
        """Keeps the socket and the mapping beyond the end of the session, until as many ``unhold``.

        Returns False where they are gone already: nothing is held then, and the arena must not be touched.
        """
        with self._lock:
            if self._is_disposed:
                return False
            self._num_holds += 1
            return True

    def unhold(self) -> None:
        """Gives one hold back."""
        with self._lock:
            assert self._num_holds > 0, "unhold without hold"
            self._num_holds -= 1
            is_last = self._num_holds == 0
        if is_last and self._is_client_closed:
            self.dispose()
        elif is_last and not self.is_open:
            self._wake()

    def retire(self) -> None:
        """This process touches the arena of this session no more, once nobody holds it. Ends it, if it is open."""
        self._is_retired = True
        self.end("it was retired")
        self._wake()

    # ---- the end -------------------------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """No call is sent or answered any more; those that wait fail. The first reason counts."""
        with self._lock:
            self._end(reason)
        self._wake()

    def give_up(self, reason: str) -> None:
        """As ``end``, of a server that may still answer: what its lookups find is given back."""
        with self._lock:
            unheard = self._end(reason)
            has_lookups = any(isinstance(pending.body, Lookup) for pending in unheard.values())
            if has_lookups and self.arena is None and self._wire.end_reason is None:
                self._unheard = unheard
                self._read_on_until_s = time.monotonic() + self._options.read_on_max_s
                self._wire.shut_down()
        self._wake()

    def _end(self, reason: str) -> dict[int, Pending]:
        """Under the lock. Returns the calls that were waiting; none where it has ended before."""
        if not self.is_open:
            return {}
        self.is_open = False
        self.end_reason = reason
        self.ended_at_s = time.monotonic()
        failed, self._calls, self._onboarding = self._onboarding | self._calls, {}, {}
        for pending in failed.values():
            pending.complete(None, CacheUnavailable(f"the connection to the cache server ended: {reason}"))
        return failed

    @property
    def is_read_on(self) -> bool:
        """Whether it was given up, and the server has not hung up yet."""
        return self._read_on_until_s is not None

    def _all_heard(self) -> None:
        """Nothing more comes."""
        with self._lock:
            self._unheard, self._read_on_until_s = {}, None

    def disposable_at_s(self) -> float | None:
        """When an ended session can be disposed of (monotonic clock); None while it is open or held, or once it is."""
        with self._lock:
            if self.ended_at_s is None or self._num_holds or self._is_disposed:
                return None
            # Without a mapping there is nothing that a copy could touch.
            has_quiet = self._is_retired or self.arena is None
            at_s = self.ended_at_s + (0.0 if has_quiet else self._options.drain_quiet_s)
            if self._read_on_until_s is not None:
                at_s = self._read_on_until_s
            return max(at_s, self._not_disposable_before_s)

    @property
    def is_disposed(self) -> bool:
        """Whether the socket and the mapping are gone."""
        return self._is_disposed

    def dispose(self) -> bool:
        """Closes the socket and the mapping of an ended session, unless it is held. Returns whether they are closed."""
        with self._receiving, self._lock:
            assert not self.is_open, "only an ended session is disposed of"
            if self._num_holds:
                return False
            if self._is_disposed:
                return True
            if self.arena is not None:
                try:
                    self.arena.close()
                except BufferError as error:
                    self._log.warning("views", f"the arena of an ended session cannot be unmapped yet: {error}")
                    self._not_disposable_before_s = time.monotonic() + _UNMAP_AGAIN_S
                    return False
            self._is_disposed = True
            self._unheard, self._read_on_until_s = {}, None
            self._wire.close()
            return True

    def close_with_client(self) -> None:
        """The client is closed: as ``dispose``, by the last ``unhold`` where it is held."""
        self._is_client_closed = True
        self.end("the client was closed")
        if not self.dispose():
            self._log.warning(
                "held", "a client of the cache was closed while a session is in use: it is kept until then"
            )

    # ---- for the client's thread ---------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Of the socket."""
        return self._wire.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for the socket."""
        return self._wire.num_unsent_bytes > 0

    def flush(self) -> None:
        """Sends what waits, as far as the socket takes it."""
        with self._lock:
            self._wire.flush()
        if self._wire.end_reason is not None:
            self.poll()
            self.end(self._wire.end_reason)

    def close_descriptor_in_child(self) -> None:
        """After a fork, in the child: the connection is the parent's. No lock is taken: its holder is not here."""
        self.is_open = False
        self.end_reason = "it belongs to the parent process"
        self._lock, self._receiving = threading.Lock(), threading.Lock()
        self._is_disposed = True
        self._wire.close()
