"""Loans from peers, for all threads that pull: one call asks for what several of them want.

Owns, for each life of a peer, a connection for loans, the wishes of the threads that wait for one, and the leases that
are to be given back. There is no thread of its own: whoever finds the connection free asks, for all who wait.

Always true:

- A chunk is lent only to a thread that waits for it, and each loan that a thread was given is given back, with others.
- While more than ``LOANS_LOW`` loans of a peer are out, none is asked for: those have their reads before them, and what
  is wished for meanwhile goes in one call.
- One call to a peer is under way at a time. When it fails, or anything else to that life of the peer, whoever waits for
  a loan of it is told so at once.
- A wish has an end, which its thread names: it is late then, which says nothing of the peer. A call under way is waited
  for a moment longer.
- A loan is held as long as the connection that it was given on lives, and it has not been given back.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from antiphon.cache.lending import Wanted
from antiphon.cache_server.peer_links import PeerLinks
from antiphon.cache_server.peer_pull import LendFrom, NoTime
from antiphon.core.errors import AntiphonError, PeerUnavailable, ProtocolError
from antiphon.protocol import peers as wire
from antiphon.transport.peer_tcp import PeerSocket

__all__ = ["LEND_TIMEOUT_S", "PeerLoans"]

LEND_TIMEOUT_S: Final = 0.25
"""From the call to the loan: connection and proof included. A peer takes some milliseconds."""
RETURN_TIMEOUT_S: Final = 0.25
LOANS_LOW: Final = 8
"""Loans that are out when more are asked for: a call takes less time than the reads of so many."""
RETURNS_AT_ONCE: Final = 4
"""Leases that wait to be given back while others are out; a call for loans takes them along."""
HELD_BACK_PAUSE_S: Final = 0.003
HELD_BACK_MAX_S: Final = 0.5
"""A chunk that is there, and is held back for so long, counts as absent."""
HELD_WAIT_S: Final = 2 * LEND_TIMEOUT_S + RETURN_TIMEOUT_S
"""Who asks whether a loan is held waits so long for the call under way, which tells: as long as one takes."""
_LOOK_S: Final = 0.05
"""A thread that waits looks so often whether it is its turn, though it is told."""
_PEERS_MAX: Final = 256


@dataclass(eq=False, slots=True)
class _Wish:
    """A thread waits for a chunk. Under the account's lock."""

    key: bytes
    wanted: Wanted
    traceparent: str
    end_s: float
    turn: threading.Event = field(default_factory=threading.Event)
    not_before_s: float = 0.0
    held_back_until_s: float = 0.0
    """0: it was not held back yet."""
    is_over: bool = False
    loan: wire.LentChunk | NoTime | None = None
    error: AntiphonError | None = None

    @property
    def kind(self) -> tuple[Wanted, str]:
        """Those of one kind go in one call: of one meaning, and of one trace."""
        return self.wanted, self.traceparent[:36]

    def end(self, loan: wire.LentChunk | NoTime | None, error: AntiphonError | None = None) -> None:
        self.loan, self.error, self.is_over = loan, error, True
        self.turn.set()


class _Account:
    """Loans of one life of a peer. All is under ``lock``, but ``link`` while ``is_busy``, which is the caller's."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.freed = threading.Condition(self.lock)
        """Told when it is not busy any more."""
        self.link: PeerSocket | None = None
        self.is_busy = False
        self.has_failed = False
        """Since the call under way began."""
        self.wishes: list[_Wish] = []
        self.returns: list[int] = []
        self.num_loans = 0
        self.held: set[int] = set()
        """Leases of those that were given on ``link``."""

    @property
    def is_idle(self) -> bool:
        return not (self.is_busy or self.wishes or self.num_loans or self.returns)

    def take_batch(self, now_s: float) -> list[_Wish]:
        """What is to be asked for now, by the caller; nothing where it is nobody's turn."""
        if self.is_busy or self.num_loans > LOANS_LOW:
            return []
        due = [wish for wish in self.wishes if wish.not_before_s <= now_s]
        batch = [wish for wish in due if wish.kind == due[0].kind][: wire.LEND_KEYS_MAX]
        if batch:
            self.wishes = [wish for wish in self.wishes if wish not in batch]
            self.is_busy, self.has_failed = True, False
        return batch

    def take_returns(self) -> tuple[int, ...]:
        """Leases for one message."""
        returns = tuple(self.returns[: wire.LEND_KEYS_MAX])
        del self.returns[: len(returns)]
        return returns

    def answered(self, batch: list[_Wish], lent: wire.Lent, now_s: float) -> None:
        """The answer to ``batch``."""
        loans = {loan.index: loan for loan in lent.chunks}
        self.num_loans += len(loans)
        self.held.update(loan.lease for loan in loans.values())
        held_back = []
        for index, wish in enumerate(batch):
            loan = loans.pop(index, None)
            wish.held_back_until_s = wish.held_back_until_s or now_s + HELD_BACK_MAX_S
            if loan is None and lent.num_capped + lent.num_later and now_s < wish.held_back_until_s:
                wish.not_before_s = now_s + HELD_BACK_PAUSE_S
                held_back.append(wish)
            else:
                wish.end(loan)
        self.wishes[:0] = held_back
        assert not loans, "more was lent than was asked for"

    def fail(self, error: AntiphonError) -> None:
        """Nobody waits any more."""
        self.has_failed = True
        wishes, self.wishes = self.wishes, []
        for wish in wishes:
            wish.end(None, PeerUnavailable(f"another call to it failed: {error.message}"))
        if not self.is_busy:
            self.hang_up()

    def hang_up(self) -> None:
        """The leases of the connection end with it."""
        if self.link is not None:
            self.link.close()
        self.link = None
        self.returns.clear()
        self.held.clear()

    def wake(self) -> None:
        """Tells whose turn it is."""
        if not self.is_busy:
            self.freed.notify_all()
        if self.wishes and not self.is_busy and self.num_loans <= LOANS_LOW:
            min(self.wishes, key=lambda wish: wish.not_before_s).turn.set()


class PeerLoans:
    """Loans from all peers.

    Args:
        links: where the connections come from.
    """

    def __init__(self, links: PeerLinks) -> None:
        self._links = links
        self._accounts: OrderedDict[tuple[str, str], _Account] = OrderedDict()
        self._lock = threading.Lock()

    def lend(self, action: LendFrom, end_s: float, traceparent: str = "") -> wire.LentChunk | NoTime | None:
        """A loan of the chunk, which is to be given back; None where the holder has none to give.

        Args:
            action: whose chunk, and which.
            end_s: until when it is waited for that the peer may be asked, on the monotonic clock: NoTime afterwards.
            traceparent: of the pull.

        Raises:
            PeerTimeout, PeerUnavailable, PeerRefused, ProtocolError: the holder did not say.
        """
        holder = action.holder
        wish = _Wish(action.key, action.wanted, traceparent, end_s)
        with self._lock:  # an account with a wish is not forgotten
            account = self._account(holder)
            with account.lock:
                account.wishes.append(wish)
        while True:
            with account.lock:
                now_s = time.monotonic()
                batch = [] if wish.is_over else account.take_batch(now_s)
                if now_s >= wish.end_s and wish in account.wishes:
                    account.wishes.remove(wish)
                    wish.end(NoTime())
                    account.wake()
            if batch:
                self._ask(holder, account, batch)
            elif wish.is_over:
                break
            else:
                pauses_s = (wish.not_before_s - now_s, wish.end_s - now_s, _LOOK_S)
                wish.turn.wait(min(pause_s for pause_s in pauses_s if pause_s > 0))
                wish.turn.clear()
        if wish.error is not None:
            raise wish.error
        return wish.loan

    def _ask(self, holder: wire.Holder, account: _Account, batch: list[_Wish]) -> None:
        """Has what is asked for lent, and tells the others. The account is this thread's until then."""
        answer: wire.Lent | AntiphonError = PeerUnavailable("the call was given up")  # what a bug leaves behind
        try:
            answer = self._call(holder, account, batch)
        except AntiphonError as error:
            answer = error
        finally:
            with account.lock:
                account.is_busy = False
                if isinstance(answer, AntiphonError):
                    for wish in batch:
                        wish.end(None, answer)
                    account.fail(answer)
                else:
                    account.answered(batch, answer, time.monotonic())
                    if account.has_failed:
                        account.hang_up()
                account.wake()
        self._post_returns(account)

    def _call(self, holder: wire.Holder, account: _Account, batch: list[_Wish]) -> wire.Lent:
        deadline_s = time.monotonic() + LEND_TIMEOUT_S
        with account.lock:
            if account.link is not None and account.link.has_hung_up:
                account.hang_up()
            returns = account.take_returns()
        link = account.link
        if link is None:
            link = account.link = self._links.take(holder, LEND_TIMEOUT_S)
        if returns:
            link.post(wire.Return(returns), max(0.001, deadline_s - time.monotonic()))
        wanted = batch[0].wanted
        meaning = (wanted.namespace, wanted.fingerprint, wanted.num_bytes, wanted.format_version)
        keys = b"".join(wish.key for wish in batch)
        body = wire.Lend(*meaning, keys, batch[0].traceparent, self._links.needs_polls(holder))
        lent = link.call(body, max(0.001, deadline_s - time.monotonic()))
        if not isinstance(lent, wire.Lent):
            raise ProtocolError(f"Lend is answered by Lent, not by {type(lent).__name__}")
        indexes = {loan.index for loan in lent.chunks}
        if len(indexes) != len(lent.chunks) or any(index >= len(batch) for index in indexes):
            raise ProtocolError("chunks were lent that nobody asked for")
        self._links.learn_memory(holder, link, LEND_TIMEOUT_S)
        return lent

    def give_back(self, holder: wire.Holder, loan: wire.LentChunk) -> None:
        """The thread needs the loan no more. Raises nothing: a loan also ends with its connection."""
        with self._lock:
            account = self._account(holder)
        with account.lock:
            account.num_loans -= 1
            assert account.num_loans >= 0, "a loan was given back twice"
            if loan.lease in account.held:
                account.held.remove(loan.lease)
                account.returns.append(loan.lease)
        self._post_returns(account)
        with account.lock:
            account.wake()

    def is_held(self, holder: wire.Holder, loan: wire.LentChunk) -> bool:
        """Whether the holder has kept the loan until now, as far as can be told here. Waits for a call under way."""
        with self._lock:
            account = self._account(holder)
        with account.lock:
            account.freed.wait_for(lambda: not account.is_busy, HELD_WAIT_S)
            if not account.is_busy and account.link is not None and account.link.has_hung_up:
                account.hang_up()
            return loan.lease in account.held

    def _post_returns(self, account: _Account) -> None:
        """Gives back what is due, as long as there is some and nobody else uses the connection."""
        while True:
            with account.lock:
                is_due = bool(account.returns) and (len(account.returns) >= RETURNS_AT_ONCE or not account.num_loans)
                if not is_due or account.is_busy or account.link is None:
                    return
                returns = account.take_returns()
                account.is_busy, account.has_failed = True, False
                link = account.link
            failure: AntiphonError | None = None
            try:
                link.post(wire.Return(returns), RETURN_TIMEOUT_S)
            except AntiphonError as error:
                failure = error
            with account.lock:
                account.is_busy = False
                if failure is not None:
                    account.fail(failure)
                elif account.has_failed:
                    account.hang_up()
                account.wake()

    def failed(self, holder: wire.Holder, error: AntiphonError) -> None:
        """Something else of that life of the peer failed: what is wished of it is not waited for."""
        with self._lock:
            account = self._accounts.get(holder.life)
        if account is not None:
            with account.lock:
                account.fail(error)

    def _account(self, holder: wire.Holder) -> _Account:
        """Under ``lock``."""
        name = holder.life
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account()
            self._forget_some()
        self._accounts.move_to_end(name)
        return account

    def _forget_some(self) -> None:
        """Those not used longest, as far as nothing is under way."""
        idle = [name for name, account in self._accounts.items() if account.is_idle][:-1]
        for name in idle[: max(0, len(self._accounts) - _PEERS_MAX)]:
            account = self._accounts.pop(name)
            with account.lock:
                account.fail(PeerUnavailable("it was not used for long"))

    def close(self) -> None:
        """Ends the connections."""
        with self._lock:
            accounts = list(self._accounts.values())
        for account in accounts:
            with account.lock:
                account.fail(PeerUnavailable("this server stops"))
