"""Who is served next where several tenants share the engines: rate, concurrency, and fair shares under overload.

A request that finds no limit in its way is admitted at once. Else it waits in its tenant's own queue, in order, for a
bounded time; a queue that is full refuses. While as many are in flight as may be, each place that becomes free goes to
the waiting tenant whose virtual start is the least (start-time fair queueing): a request moves its tenant's start on by
its cost over the tenant's weight. So the work that is admitted is shared by weight among those who wait, what an idle
tenant leaves goes to the others, and whoever was idle is owed nothing. A tenant that its own limits hold back is passed
over, and is owed nothing for that time either.

A request in flight that has to wait for something else may step aside: then others have its place, of all tenants, and
it takes one past the limit when it goes on. So what waits there keeps nobody from engines that are idle.

Always true: no more are in flight than ``in_flight_max``, but for those that have stepped aside and in again, and than
each tenant's ``concurrent_max``, those that are aside among them; a tenant's requests
are admitted in the order in which they came; over any time, a tenant is admitted no more than its burst and its rate
allow. While two tenants wait and neither is held back by limits of its own, their admitted work over their weights
differs by at most one request of each. ``validate`` checks what can be checked at a moment.

Not here: who a tenant is, what is sent, and the clock. A choice is O(tenants that wait), all else is O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import ceil
from typing import Final

RATE: Final = "tenant_rate_limited"
TOKENS: Final = "tenant_token_rate_limited"
CONCURRENCY: Final = "tenant_concurrency_limited"
OVERLOADED: Final = "overloaded"

CODES: Final = (RATE, TOKENS, CONCURRENCY, OVERLOADED)
"""Why a request is refused. The first three are the tenant's own limits (429), the last is everybody's (503)."""

_NONE: Final = ""
_SLACK: Final = 1e-6
"""Of a request or a token: waiting as long as was said is enough, whatever the rounding."""
_REBASE_AT: Final = 1e12
"""Virtual time is set back before floating-point numbers get coarse."""
_UNBOUNDED: Final = 1 << 62


@dataclass(frozen=True)
class TenantOptions:
    """The limits of one tenant. None: no such limit.

    Args:
        name: unique.
        weight: its share under overload, relative to others, above 0.
        requests_per_s: requests admitted, in the long run, above 0.
        burst: requests admitted at once after a pause, 1 and up.
        tokens_per_s: the same in the unit of costs.
        tokens_burst: the same, 1 and up; a request that costs more needs all of it.
        concurrent_max: requests in flight, 1 and up.
        queue_max: requests that wait, 0 and up.
    """

    name: str
    weight: float = 1.0
    requests_per_s: float | None = None
    burst: int = 1
    tokens_per_s: float | None = None
    tokens_burst: int = 1
    concurrent_max: int | None = None
    queue_max: int = 64

    def __post_init__(self) -> None:
        assert self.weight > 0 and self.burst >= 1 and self.tokens_burst >= 1 and self.queue_max >= 0
        assert self.requests_per_s is None or self.requests_per_s > 0
        assert self.tokens_per_s is None or self.tokens_per_s > 0
        assert self.concurrent_max is None or self.concurrent_max >= 1


@dataclass
class TenantStatistics:
    """What one tenant has and got.

    Args:
        num_in_flight: now.
        num_waiting: now.
        num_admitted: ever.
        num_left_waiting: left before they were admitted: their clients went away.
        refused: by code, every code named.
        admitted_cost: of what was admitted, corrected by what it cost in the end.
        waited_s: of what was admitted, in all.
        ended_cost: of what was admitted and has ended: it never goes down.
    """

    name: str
    num_in_flight: int = 0
    num_waiting: int = 0
    num_admitted: int = 0
    num_left_waiting: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    admitted_cost: int = 0
    waited_s: float = 0.0
    ended_cost: int = 0


class Admit:
    """The request may begin, and is in flight."""


class Wait:
    """The request is in its tenant's queue: :meth:`Tenants.leave` or :meth:`Tenants.tick` tell how that ends."""


class Refuse:
    """The request may not be served now.

    Args:
        status: HTTP status, 429 or 503.
        code: one of ``CODES``.
        retry_after_s: whole seconds after which it is worth another try, 1 and up.
    """

    def __init__(self, status: int, code: str, retry_after_s: int) -> None:
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


Verdict = Admit | Wait | Refuse

ADMIT: Final = Admit()
WAIT: Final = Wait()


class Changes:
    """What time has brought: requests that waited and now are in flight, and those that waited too long."""

    def __init__(self, admitted: list[object], refused: list[tuple[object, Refuse]]) -> None:
        self.admitted = admitted
        self.refused = refused


class _Bucket:
    """A token bucket: ``per_s`` comes in, up to ``burst``. What costs more than that takes a full bucket into debt."""

    def __init__(self, per_s: float, burst: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self.level = burst
        self.then_s = -1.0

    def missing(self, cost: float, now_s: float) -> float:
        """How much is to come in before ``cost`` may be taken, 0 if it may be now."""
        if self.then_s < 0:
            self.then_s = now_s
        elif now_s > self.then_s:
            level = self.level + (now_s - self.then_s) * self.per_s
            self.level = level if level < self.burst else self.burst
            self.then_s = now_s
        missing = (cost if cost < self.burst else self.burst) - self.level
        return missing if missing > _SLACK else 0.0

    def wait_s(self, cost: float, now_s: float) -> float:
        """How long until so much will have come in, however much a bucket holds."""
        self.missing(0.0, now_s)
        missing = cost - self.level
        return missing / self.per_s if missing > 0 else 0.0

    def take(self, cost: float) -> None:
        """Take it; a negative cost gives back."""
        level = self.level - cost
        self.level = level if level < self.burst else self.burst


class _Account:
    """One tenant. ``start`` is the virtual time at which its next request begins."""

    def __init__(self, options: TenantOptions) -> None:
        self.name = options.name
        self.weight = options.weight
        self.requests = None if options.requests_per_s is None else _Bucket(options.requests_per_s, options.burst)
        self.tokens = None if options.tokens_per_s is None else _Bucket(options.tokens_per_s, options.tokens_burst)
        self.concurrent_max = _UNBOUNDED if options.concurrent_max is None else options.concurrent_max
        self.queue_max = options.queue_max
        self.start = 0.0
        self.is_held_back = False
        """By a limit of its own, when that was last looked at."""
        self.num_in_flight = 0
        self.num_aside = 0
        """Of those in flight."""
        self.waiting: OrderedDict[object, _Entry] = OrderedDict()
        self.waiting_cost = 0
        self.head_cost = 0
        """Of the first that waits: it is looked at more often than the queue changes."""
        self.num_admitted = 0
        self.num_left_waiting = 0
        self.admitted_cost = 0
        self.waited_s = 0.0
        self.ended_cost = 0
        self.refused: dict[str, int] = dict.fromkeys(CODES, 0)

    def limit(self, cost: int, now_s: float) -> str:
        """The limit of its own that a request of ``cost`` meets now; empty if none."""
        if self.num_in_flight >= self.concurrent_max:
            return CONCURRENCY
        if self.requests is not None and self.requests.missing(1.0, now_s) > 0:
            return RATE
        if self.tokens is not None and self.tokens.missing(cost, now_s) > 0:
            return TOKENS
        return _NONE

    def rate_wait_s(self, cost: int, now_s: float) -> tuple[float, str]:
        """The least time that the rates keep one more request waiting behind those that wait, and the rate's code."""
        wait_s, code = 0.0, RATE
        if self.requests is not None:
            wait_s = self.requests.wait_s(len(self.waiting) + 1, now_s)
        if self.tokens is not None:
            tokens_s = self.tokens.wait_s(self.waiting_cost + min(cost, self.tokens.burst), now_s)
            if tokens_s > wait_s:
                wait_s, code = tokens_s, TOKENS
        return wait_s, code


class _Entry:
    """One request that waits or is in flight."""

    is_aside = False
    has_been_aside = False

    def __init__(self, account: _Account, cost: int, now_s: float) -> None:
        self.account = account
        self.cost = cost
        self.since_s = now_s
        self.is_waiting = False


class Tenants:
    """The tenants of one router.

    Args:
        options: each tenant, with a name of its own.
        in_flight_max: requests in flight of all tenants together, 1 and up; None: no such limit.
        wait_max_s: how long a request may wait, above 0.
    """

    def __init__(self, options: list[TenantOptions], in_flight_max: int | None, wait_max_s: float) -> None:
        assert wait_max_s > 0 and (in_flight_max is None or in_flight_max >= 1)
        self._accounts = {each.name: _Account(each) for each in options}
        assert 0 < len(self._accounts) == len(options)
        self._in_flight_max = _UNBOUNDED if in_flight_max is None else in_flight_max
        self._wait_max_s = wait_max_s
        self._entries: dict[object, _Entry] = {}
        self._waiting: dict[_Account, None] = {}
        """The accounts with a queue that is not empty."""
        self._virtual = 0.0
        """The start of the request that was admitted last."""
        self.num_in_flight = 0
        """Of all tenants, without those that are aside."""
        self._num_aside = 0

    @property
    def num_waiting(self) -> int:
        """Requests of all tenants that wait."""
        return len(self._entries) - self.num_in_flight - self._num_aside

    def offer(self, item: object, tenant: str, cost: int, now_s: float) -> Verdict:
        """A request has come.

        Args:
            item: stands for it; not one that is waiting or in flight.
            tenant: name of a tenant.
            cost: the work that it is expected to be, in tokens, 1 and up.
            now_s: seconds of any clock that does not go back.
        """
        assert cost >= 1 and item not in self._entries
        account = self._accounts[tenant]
        waiting = account.waiting
        entry = _Entry(account, cost, now_s)
        if not waiting:
            code = account.limit(cost, now_s)
            if not code:
                if account.start < self._virtual:
                    account.start = self._virtual
                if self.num_in_flight < self._in_flight_max:
                    self._entries[item] = entry
                    self._begin(entry, now_s)
                    return ADMIT
                code = OVERLOADED
        else:
            code = self._cause(account, now_s)
        refusal = self._refusal(account, code, cost, now_s)
        if refusal is not None:
            return refusal
        if not waiting:
            self._waiting[account] = None
            account.head_cost = cost
            account.is_held_back = code != OVERLOADED
        entry.is_waiting = True
        self._entries[item] = waiting[item] = entry
        account.waiting_cost += cost
        return WAIT

    def step_aside(self, item: object, now_s: float) -> list[object]:
        """A request in flight has to wait for something else. Returns those that are admitted to its place, in order.
        It keeps its place where its tenant has ``queue_max`` requests aside already."""
        entry = self._entries[item]
        account = entry.account
        assert not entry.is_waiting and not entry.is_aside
        if account.num_aside >= account.queue_max:
            return []
        entry.is_aside = entry.has_been_aside = True
        account.num_aside += 1
        self._num_aside += 1
        self.num_in_flight -= 1
        return self._admit(now_s) if self._waiting else []

    def step_in(self, item: object) -> None:
        """It goes on. One that is not aside makes no difference."""
        entry = self._entries.get(item)
        if entry is not None and entry.is_aside:
            entry.is_aside = False
            entry.account.num_aside -= 1
            self._num_aside -= 1
            self.num_in_flight += 1

    def leave(self, item: object, now_s: float, cost: int | None = None) -> list[object]:
        """A request has ended, or its client has left while it waited. Returns those that are admitted instead, in
        order. One that was refused, or has left before, makes no difference.

        Args:
            cost: what it cost in the end, in tokens, 0 and up; None: what was expected. Shares and the token rate go by
                this.
        """
        self.step_in(item)
        entry = self._entries.pop(item, None)
        if entry is None:
            return []
        account = entry.account
        if entry.is_waiting:
            account.num_left_waiting += 1
            self._forget_waiting(account, item, entry)
        else:
            account.num_in_flight -= 1
            self.num_in_flight -= 1
            account.ended_cost += entry.cost if cost is None else cost
            if cost is not None and cost != entry.cost:
                more = cost - entry.cost
                account.admitted_cost += more
                account.start += more / account.weight
                if account.tokens is not None:
                    account.tokens.take(more)
        return self._admit(now_s) if self._waiting else []

    def tick(self, now_s: float) -> Changes:
        """Time has passed: look at rates and at what has waited too long. To be called some times a second while
        any request waits."""
        admitted = self._admit(now_s)
        refused: list[tuple[object, Refuse]] = []
        for account in list(self._waiting):
            while account.waiting:
                item = next(iter(account.waiting))
                entry = account.waiting[item]
                if now_s - entry.since_s < self._wait_max_s:
                    break
                refusal = self._refuse(account, self._cause(account, now_s), entry.cost, now_s)
                del self._entries[item]
                self._forget_waiting(account, item, entry)
                refused.append((item, refusal))
        if refused:  # what stands behind an expired request may be smaller
            admitted += self._admit(now_s)
        return Changes(admitted, refused)

    def statistics(self) -> list[TenantStatistics]:
        """Of each tenant, in the order in which they were given."""
        return [
            TenantStatistics(
                account.name,
                account.num_in_flight,
                len(account.waiting),
                account.num_admitted,
                account.num_left_waiting,
                dict(account.refused),
                account.admitted_cost,
                account.waited_s,
                account.ended_cost,
            )
            for account in self._accounts.values()
        ]

    def _cause(self, account: _Account, now_s: float) -> str:
        """Why the first that waits does."""
        code = account.limit(account.head_cost, now_s)
        if code:
            return code
        return OVERLOADED if self.num_in_flight >= self._in_flight_max else RATE

    def _refusal(self, account: _Account, code: str, cost: int, now_s: float) -> Refuse | None:
        """Why a request may not even wait; None if it may."""
        wait_s, rate = account.rate_wait_s(cost, now_s)
        if wait_s > self._wait_max_s:
            return self._refuse(account, rate, cost, now_s)
        return self._refuse(account, code, cost, now_s) if len(account.waiting) >= account.queue_max else None

    def _refuse(self, account: _Account, code: str, cost: int, now_s: float) -> Refuse:
        account.refused[code] += 1
        if code in (RATE, TOKENS):
            after_s = account.rate_wait_s(cost, now_s)[0]
        elif account.waiting:  # as long as others have waited by now
            after_s = now_s - account.waiting[next(iter(account.waiting))].since_s
        else:
            after_s = 1.0
        return Refuse(503 if code == OVERLOADED else 429, code, max(1, ceil(after_s)))

    def _admit(self, now_s: float) -> list[object]:
        admitted: list[object] = []
        while self.num_in_flight < self._in_flight_max:
            account = self._next(now_s)
            if account is None:
                break
            item = next(iter(account.waiting))
            entry = account.waiting[item]
            self._forget_waiting(account, item, entry)
            entry.is_waiting = False
            account.waited_s += max(0.0, now_s - entry.since_s)
            self._begin(entry, now_s)
            admitted.append(item)
        return admitted

    def _next(self, now_s: float) -> _Account | None:
        """The waiting tenant with the least start, of those that no limit of their own holds back."""
        chosen: _Account | None = None
        for account in self._waiting:
            if account.limit(account.head_cost, now_s):
                account.is_held_back = True
                continue
            if account.is_held_back:
                account.is_held_back = False
                if account.start < self._virtual:
                    account.start = self._virtual
            if chosen is None or account.start < chosen.start:
                chosen = account
        return chosen

    def _begin(self, entry: _Entry, now_s: float) -> None:
        account, cost = entry.account, entry.cost
        if account.start > self._virtual:
            self._virtual = account.start
        account.start += cost / account.weight
        account.num_in_flight += 1
        self.num_in_flight += 1
        account.num_admitted += 1
        account.admitted_cost += cost
        if account.requests is not None:
            account.requests.take(1.0)
        if account.tokens is not None:
            account.tokens.take(cost)
        if self._virtual > _REBASE_AT:
            self._rebase()

    def _forget_waiting(self, account: _Account, item: object, entry: _Entry) -> None:
        del account.waiting[item]
        account.waiting_cost -= entry.cost
        if account.waiting:
            account.head_cost = account.waiting[next(iter(account.waiting))].cost
        else:
            del self._waiting[account]

    def _rebase(self) -> None:
        for account in self._accounts.values():
            account.start -= self._virtual
        self._virtual = 0.0

    def validate(self, now_s: float | None = None) -> None:
        """Assert the invariants; with the time of the last :meth:`tick` or :meth:`leave`, also that none waits whom
        nothing holds back."""
        accounts = self._accounts.values()
        num_past = sum(entry.has_been_aside and not entry.is_aside for entry in self._entries.values())
        assert 0 <= self.num_in_flight <= self._in_flight_max + num_past
        assert self._num_aside == sum(account.num_aside for account in accounts)
        assert self.num_in_flight + self._num_aside == sum(account.num_in_flight for account in accounts)
        assert self.num_waiting == sum(len(account.waiting) for account in accounts)
        assert list(self._waiting) == [account for account in self._waiting if account.waiting]
        for account in accounts:
            assert (account in self._waiting) == bool(account.waiting)
            assert 0 <= account.num_aside <= account.num_in_flight <= account.concurrent_max
            assert account.num_aside <= account.queue_max
            assert len(account.waiting) <= account.queue_max
            assert account.waiting_cost == sum(entry.cost for entry in account.waiting.values())
            for item, entry in account.waiting.items():
                assert entry.is_waiting and entry.account is account and self._entries[item] is entry
            if account.waiting:
                assert account.head_cost == account.waiting[next(iter(account.waiting))].cost
                if now_s is not None and self.num_in_flight < self._in_flight_max:
                    assert account.limit(account.head_cost, now_s), f"{account.name} waits for nothing"
