"""The engines of one role: their states, who moves them, and the choice among them.

    passive   a refused connection, requests that are lost, time out or fail, and requests that succeed
    active    health checks
    admin     ``drain``, ``open``, ``remove``
    restart   another ``engine_id``, or a refused connection: handles of the earlier life are not sent

The state of an endpoint is the state of its breaker: ready is closed, suspect half open, down open. A choice goes
through tiers: ready ones by policy; then unknown and suspect ones; then the least bad of those that are down. While a
better tier has endpoints, the others are tried by one request at a time, each failed try doubling the wait before the
next. So a pool in which every engine has failed is still tried, by one request at a time for each engine, and
no choice is made for the requests beyond that: they are told so at once.

Invariants: :meth:`Pool.validate`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from antiphon.routing.ask import Ask
from antiphon.routing.budget import backoff_s
from antiphon.routing.endpoint import (
    TIER_DOWN,
    TIER_OUT,
    TIER_READY,
    TIER_WAITING,
    TIERS,
    Cause,
    Endpoint,
    Role,
    Verdict,
)
from antiphon.routing.kv_index import IndexOptions, KvIndex
from antiphon.routing.options import ENDPOINTS_MAX, FleetOptions
from antiphon.routing.pickers import Picker, PickerOptions
from antiphon.routing.policies import POLICIES
from antiphon.routing.prefix_index import PrefixIndex
from antiphon.routing.states import EndpointState, assert_listed

_DOWN: Final = EndpointState.DOWN
_DRAINING: Final = EndpointState.DRAINING
_READY: Final = EndpointState.READY
_REMOVED: Final = EndpointState.REMOVED
_SUSPECT: Final = EndpointState.SUSPECT
_UNKNOWN: Final = EndpointState.UNKNOWN
_FAILED: Final = Verdict.FAILED
_REFUSED: Final = Verdict.REFUSED
_SUCCEEDED: Final = Verdict.SUCCEEDED
_TIMED_OUT: Final = Verdict.TIMED_OUT
_UNREACHABLE: Final = Verdict.UNREACHABLE
RETRY_AFTER_MAX_S: Final = 30


class Pool:
    """The endpoints of one role.

    Args:
        role: for all of them.
        policy: a name from ``policies.POLICIES``.
        options: how they are judged.
        prefixes: what engines have been sent; one of the pool's own without it.
    """

    def __init__(
        self,
        role: Role,
        policy: str,
        options: FleetOptions,
        prefixes: PrefixIndex | None = None,
        kv_index: KvIndex | None = None,
    ) -> None:
        self.role: Role = role
        self.policy = policy
        self.endpoints: list[Endpoint] = []
        """All, in the order in which they came; those that drain too."""
        self.ready: list[Endpoint] = []
        self.num_active = 0
        """Requests in flight at all of them."""
        self.prefixes = prefixes if prefixes is not None else prefix_index_of(options)
        self.kv_index = kv_index if kv_index is not None else KvIndex(IndexOptions())
        self.picker: Picker = POLICIES[policy](PickerOptions(role, options.load_factor, self.prefixes, self.kv_index))
        self._options = options
        self._tiers: tuple[list[Endpoint], ...] = (self.ready, [], [], [])
        self._imperfect = 0
        """Endpoints that are unknown, suspect or down: while there are none, picking asks the policy alone."""
        self._on_gone: list[Callable[[Endpoint], None]] = []
        self._on_changed: list[Callable[[Endpoint, EndpointState], None]] = []
        self._on_restarted: list[Callable[[Endpoint], None]] = []

    # -- members ----------------------------------------------------------------------------------------------------

    def find(self, url: str) -> Endpoint | None:
        """The endpoint with this URL, draining or not."""
        return next((endpoint for endpoint in self.endpoints if endpoint.url == url), None)

    def add(self, url: str, *, is_open: bool = True) -> Endpoint:
        """An endpoint with this URL: a new one, or the one that there is.

        Args:
            is_open: false begins in draining, so that the endpoint can be warmed before :meth:`open` lets requests in.
        """
        found = self.find(url)
        if found is not None:
            found.is_leaving = False
            if is_open:
                self.open(found)
            return found
        assert len(self.endpoints) < ENDPOINTS_MAX, f"a pool has at most {ENDPOINTS_MAX} endpoints"
        endpoint = Endpoint(url, self.role)
        self.endpoints.append(endpoint)
        self._tiers[TIER_WAITING].append(endpoint)
        self._imperfect += 1
        self.picker.set_members(self.endpoints)
        if not is_open:
            endpoint.is_held = True
            self._enter(endpoint, _DRAINING)
        return endpoint

    def drain(self, endpoint: Endpoint) -> None:
        """No new requests; those in flight go on."""
        endpoint.is_held = False
        if endpoint.state is not _DRAINING:
            self._enter(endpoint, _DRAINING)

    def open(self, endpoint: Endpoint) -> None:
        """Take a drained endpoint back, as an unknown one."""
        if endpoint.state is _DRAINING:
            endpoint.is_leaving = endpoint.is_held = False
            endpoint.num_opened = endpoint.num_failures = endpoint.num_failed_probes = 0
            endpoint.cause = Cause.NONE
            endpoint.retry_at_s = 0.0
            self._enter(endpoint, _UNKNOWN)

    def remove(self, endpoint: Endpoint) -> None:
        """Drain it, and forget it once its last request has ended."""
        self.drain(endpoint)
        endpoint.is_leaving = True
        if not endpoint.num_active:
            self._forget(endpoint)

    def when_gone(self, action: Callable[[Endpoint], None]) -> None:
        """``action`` is done for each endpoint that is forgotten."""
        self._on_gone.append(action)

    def when_changed(self, action: Callable[[Endpoint, EndpointState], None]) -> None:
        """``action`` is done for each endpoint whose state has changed, with the state before."""
        self._on_changed.append(action)

    def when_restarted(self, action: Callable[[Endpoint], None]) -> None:
        """``action`` is done for each endpoint that has said that it is in another life than before."""
        self._on_restarted.append(action)

    # -- choice -----------------------------------------------------------------------------------------------------

    def pick(
        self, now_s: float, chance: float, ask: Ask | None = None, avoid: Collection[Endpoint] = ()
    ) -> Endpoint | None:
        """The endpoint for a request, none of ``avoid``; None if none may be tried now. :meth:`begin` follows.

        Args:
            chance: in [0, 1).
            ask: what policies go by; its ``num_matched_tokens`` is set.
            avoid: those that have failed this request.
        """
        if ask is not None:
            ask.num_matched_tokens = 0
        if self.ready and not self._imperfect and not avoid:
            return self.picker.pick(self.ready, chance, ask)
        return self._pick_carefully(now_s, chance, ask, avoid)

    def pick_sparing(self, now_s: float, chance: float, ask: Ask, avoid: Collection[Endpoint] = ()) -> Endpoint | None:
        """As :meth:`pick`, but that the engines of ``ask.shunned`` are passed over while another is ready: the policy
        chooses among the others. O(n)."""
        left_out = {*ask.shunned, *avoid}
        others = [endpoint for endpoint in self.ready if endpoint not in left_out]
        if not others:
            return self.pick(now_s, chance, ask, avoid)
        ask.num_matched_tokens = 0
        due = self._due(now_s) if self._imperfect and not avoid else None
        return due if due is not None else self.picker.pick(others, chance, ask)

    def begin(self, endpoint: Endpoint, num_tokens: int = 0) -> int:
        """A request goes there. Returns the number of the trial if it is one, else 0; :meth:`end` takes it back.

        Args:
            num_tokens: that it has to compute there: prompt tokens that the engine is not expected to hold.
        """
        before = endpoint.num_active
        endpoint.num_active = before + 1
        endpoint.num_uncached_tokens += num_tokens
        self.num_active += 1
        if endpoint.tier == TIER_READY:
            self.picker.load_changed(endpoint, before)
            return 0
        assert endpoint.tier != TIER_OUT, f"a request goes to {endpoint.url}, which is {endpoint.state.value}"
        if endpoint.trial:
            return 0
        endpoint.num_trials += 1
        endpoint.trial = endpoint.num_trials
        return endpoint.trial

    def computed(self, endpoint: Endpoint, num_tokens: int) -> None:
        """A request has computed so many of the tokens that it began with; :meth:`end` takes the rest."""
        endpoint.num_uncached_tokens -= num_tokens
        assert endpoint.num_uncached_tokens >= 0, f"{endpoint.url} computed more tokens than requests began with"

    def end(self, endpoint: Endpoint, trial: int, num_tokens: int = 0) -> None:
        """It has ended there; once for each :meth:`begin`, with what that returned.

        Args:
            num_tokens: those it began with, less those :meth:`computed`.
        """
        before = endpoint.num_active
        assert before > 0, f"{endpoint.url} ended more requests than it began"
        endpoint.num_active = before - 1
        if num_tokens:
            self.computed(endpoint, num_tokens)
        self.num_active -= 1
        if endpoint.tier == TIER_READY:
            self.picker.load_changed(endpoint, before)
        elif trial and endpoint.trial == trial:
            endpoint.trial = 0
        if endpoint.is_leaving and before == 1:
            self._forget(endpoint)

    @property
    def is_open(self) -> bool:
        """Whether any endpoint takes requests, however bad: not all drain, and there is one."""
        return bool(self.ready or self._imperfect)

    @property
    def can_answer(self) -> bool:
        """Whether any endpoint is taken to answer."""
        return bool(self.ready or self._tiers[TIER_WAITING])

    @property
    def num_usable(self) -> int:
        """How many are taken to answer."""
        return len(self.ready) + len(self._tiers[TIER_WAITING])

    def retry_after_s(self, now_s: float) -> int:
        """When to come back, in whole seconds, after a request that no endpoint could be picked for."""
        waits = [endpoint.retry_at_s - now_s for endpoint in self._tiers[TIER_DOWN]]
        return max(1, min(RETRY_AFTER_MAX_S, int(min(waits, default=0.0)) + 1))

    # -- passive ----------------------------------------------------------------------------------------------------

    def judge(self, endpoint: Endpoint, verdict: Verdict, now_s: float, jitter: float, *, trial: int = 0) -> None:
        """A request says something about the endpoint; at most once for each :meth:`begin`.

        Args:
            jitter: 0 to 1, for the wait.
            trial: what :meth:`begin` returned.
        """
        if verdict is _SUCCEEDED:
            self._succeeded(endpoint, trial)
        elif verdict is _REFUSED or verdict is _UNREACHABLE:
            if verdict is _REFUSED:
                self._restarted(endpoint)
            self._take_down(endpoint, Cause.CONNECTION, now_s, jitter)
        else:
            self._failed(endpoint, verdict, now_s, jitter, trial)

    def excuse(self, endpoint: Endpoint) -> None:
        """Its last failure was the fault of the request: another engine failed at it too."""
        if endpoint.num_failures:
            endpoint.num_failures -= 1
            self._count(endpoint, 0.0)

    def connected(self, endpoint: Endpoint) -> None:
        """A connection was made by which nothing was asked: something listens."""
        if endpoint.state is _DOWN and endpoint.cause is Cause.CONNECTION:
            self._enter(endpoint, _SUSPECT)

    def saw_engine(self, endpoint: Endpoint, engine_id: str) -> None:
        """The engine said which life it is in; empty says nothing."""
        if engine_id and engine_id != endpoint.engine_id:
            if endpoint.engine_id:
                self._restarted(endpoint)
                endpoint.engine_id = engine_id
                for action in self._on_restarted:
                    action(endpoint)
            endpoint.engine_id = engine_id

    # -- active -----------------------------------------------------------------------------------------------------

    def health_succeeded(self, endpoint: Endpoint, now_s: float) -> None:
        """A health check was answered with 200."""
        endpoint.num_failed_probes = 0
        endpoint.num_good_probes += 1
        state = endpoint.state
        if state is _UNKNOWN:
            self._close(endpoint)
        elif state is _DOWN:
            if endpoint.cause is not Cause.REQUEST or now_s >= endpoint.retry_at_s:
                self._enter(endpoint, _SUSPECT)
                endpoint.num_good_probes = 1
                endpoint.retry_at_s = now_s
        elif (
            state is _SUSPECT
            and endpoint.cause is not Cause.REQUEST
            and endpoint.num_good_probes >= self._options.good_probes_min
        ):
            self._close(endpoint)

    def health_failed(self, endpoint: Endpoint, now_s: float, jitter: float) -> None:
        """A health check timed out or was answered with an error."""
        endpoint.num_good_probes = 0
        endpoint.num_failed_probes += 1
        if endpoint.num_failed_probes >= self._options.failed_probes_max:
            self._take_down(endpoint, Cause.HEALTH, now_s, jitter)

    def health_refused(self, endpoint: Endpoint, now_s: float, jitter: float) -> None:
        """A health check could not connect: nothing listens."""
        endpoint.num_good_probes = 0
        self.judge(endpoint, _REFUSED, now_s, jitter)

    # -- checks -----------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Assert the invariants. Takes time in proportion to the endpoints."""
        assert len({endpoint.url for endpoint in self.endpoints}) == len(self.endpoints), "a URL is twice in a pool"
        assert self.num_active == sum(endpoint.num_active for endpoint in self.endpoints)
        assert sum(map(len, self._tiers)) == len(self.endpoints)
        assert self._imperfect == len(self._tiers[TIER_WAITING]) + len(self._tiers[TIER_DOWN])
        for tier, endpoints in enumerate(self._tiers):
            for endpoint in endpoints:
                assert endpoint in self.endpoints
                assert endpoint.tier == tier == TIERS[endpoint.state], f"{endpoint} stands in the wrong tier"
        for endpoint in self.endpoints:
            assert endpoint.role == self.role
            assert endpoint.num_active >= 0 and endpoint.num_failed_probes >= 0
            assert endpoint.num_uncached_tokens >= 0
            assert endpoint.num_active or not endpoint.num_uncached_tokens, "tokens to compute without a request"
            assert endpoint.state is not _REMOVED
            assert endpoint.trial <= endpoint.num_trials
            assert not endpoint.trial or endpoint.num_active, "a trial without a request"
            assert not endpoint.is_leaving or (endpoint.state is _DRAINING and endpoint.num_active)
            assert not endpoint.is_held or (endpoint.state is _DRAINING and not endpoint.num_active)
            assert 0 <= endpoint.error_share <= 1
            if endpoint.state is _READY:
                assert not endpoint.trial and not endpoint.num_opened
                assert endpoint.num_failures < self._options.failures_max
            if endpoint.state is _DOWN:
                assert endpoint.cause is not Cause.NONE and endpoint.num_opened

    # -- inside -----------------------------------------------------------------------------------------------------

    def _pick_carefully(
        self, now_s: float, chance: float, ask: Ask | None, avoid: Collection[Endpoint]
    ) -> Endpoint | None:
        ready, waiting, down = self.ready, self._tiers[TIER_WAITING], self._tiers[TIER_DOWN]
        if ready:
            if not avoid:  # a request that has failed once is not used to try another doubtful engine
                due = self._due(now_s)
                return due if due is not None else self.picker.pick(ready, chance, ask)
            others = [endpoint for endpoint in ready if endpoint not in avoid]
            others = others or [endpoint for endpoint in waiting if not endpoint.trial and endpoint not in avoid]
            if others:
                return min(others, key=_load)
        elif waiting:
            if not avoid:
                return self.picker.pick(waiting, chance, ask)
            others = [endpoint for endpoint in waiting if endpoint not in avoid]
            if others:
                return min(others, key=_load)
        untried = [endpoint for endpoint in down if not endpoint.trial and endpoint not in avoid]
        return min(untried, key=_badness, default=None)

    def _due(self, now_s: float) -> Endpoint | None:
        """A doubtful engine whose next try is due."""
        for endpoint in (*self._tiers[TIER_WAITING], *self._tiers[TIER_DOWN]):
            if not endpoint.trial and now_s >= endpoint.retry_at_s:
                return endpoint
        return None

    def _succeeded(self, endpoint: Endpoint, trial: int) -> None:
        endpoint.num_succeeded += 1
        if endpoint.num_failures or endpoint.error_share:
            endpoint.num_failures = 0
            self._count(endpoint, 0.0)
        state = endpoint.state
        # What was sent before an engine went down says nothing about its return.
        if state is not _READY and (state is _UNKNOWN or state is _SUSPECT or (state is _DOWN and trial)):
            self._close(endpoint)

    def _failed(self, endpoint: Endpoint, verdict: Verdict, now_s: float, jitter: float, trial: int) -> None:
        endpoint.num_failures += 1
        self._count(endpoint, 1.0)
        options, state = self._options, endpoint.state
        if state is _READY or state is _UNKNOWN:
            is_bad = endpoint.num_judged >= options.error_window // 2 and endpoint.error_share > options.error_share_max
            is_silent = verdict is _TIMED_OUT or state is _UNKNOWN
            if is_silent or is_bad or endpoint.num_failures >= options.failures_max:
                self._suspect(endpoint, now_s, jitter)
        elif state is _SUSPECT:
            if verdict is not _FAILED:
                self._take_down(endpoint, Cause.REQUEST, now_s, jitter)
            elif trial:
                self._wait(endpoint, now_s, jitter)  # it answers: it is the last choice, and never none
        elif state is _DOWN and trial:
            self._wait(endpoint, now_s, jitter)

    def _count(self, endpoint: Endpoint, failure: float) -> None:
        window = self._options.error_window
        if endpoint.num_judged < window:
            endpoint.num_judged += 1
        share = endpoint.error_share + (failure - endpoint.error_share) * 2 / (window + 1)
        endpoint.error_share = share if share > _ERROR_SHARE_MIN else 0.0

    def _close(self, endpoint: Endpoint) -> None:
        """It answers: the breaker closes."""
        endpoint.trial = 0
        endpoint.cause = Cause.NONE
        endpoint.num_failures = endpoint.num_opened = endpoint.num_judged = 0
        endpoint.error_share = endpoint.retry_at_s = 0.0
        self._enter(endpoint, _READY)

    def _suspect(self, endpoint: Endpoint, now_s: float, jitter: float) -> None:
        """It has failed as a whole or too often: the next tries are single ones."""
        endpoint.cause = Cause.REQUEST
        endpoint.num_good_probes = 0
        self._wait(endpoint, now_s, jitter)
        self._enter(endpoint, _SUSPECT)

    def _take_down(self, endpoint: Endpoint, cause: Cause, now_s: float, jitter: float) -> None:
        """It does not answer: the breaker opens."""
        if endpoint.tier == TIER_OUT:
            return
        endpoint.cause = cause
        endpoint.num_good_probes = 0
        self._wait(endpoint, now_s, jitter)
        if endpoint.state is not _DOWN:
            self._enter(endpoint, _DOWN)

    def _wait(self, endpoint: Endpoint, now_s: float, jitter: float) -> None:
        """Leave it alone for longer than the last time; failures of one time count once."""
        if now_s >= endpoint.retry_at_s:
            endpoint.num_opened += 1
            wait_s = backoff_s(endpoint.num_opened, self._options.open_min_s, self._options.open_max_s, jitter)
            endpoint.retry_at_s = now_s + wait_s

    def _restarted(self, endpoint: Endpoint) -> None:
        endpoint.life += 1
        endpoint.engine_id = ""

    def _enter(self, endpoint: Endpoint, state: EndpointState) -> None:
        before = endpoint.state
        assert_listed(before, state)
        endpoint.state = state
        if before is _READY and (state is _SUSPECT or state is _DOWN):
            endpoint.num_ejections += 1
        self._move(endpoint, state)
        for action in self._on_changed:
            action(endpoint, before)

    def _move(self, endpoint: Endpoint, state: EndpointState) -> None:
        """To the tier of its state."""
        old, new = endpoint.tier, TIERS[state]
        if old == new:
            return
        endpoint.tier = new
        self._tiers[old].remove(endpoint)
        self._tiers[new].append(endpoint)
        self._imperfect += (new in _IMPERFECT) - (old in _IMPERFECT)
        if TIER_READY in (old, new):
            self.picker.set_ready(endpoint)

    def _forget(self, endpoint: Endpoint) -> None:
        self._enter(endpoint, _REMOVED)
        self._tiers[TIER_OUT].remove(endpoint)
        self.endpoints.remove(endpoint)
        self.picker.set_members(self.endpoints)
        self.prefixes.forget(endpoint)
        for action in self._on_gone:
            action(endpoint)


_ERROR_SHARE_MIN: Final = 0.01
"""Less is none: then a success costs nothing to note."""

_IMPERFECT: Final = (TIER_WAITING, TIER_DOWN)


def prefix_index_of(options: FleetOptions) -> PrefixIndex:
    """An empty index with the bounds of the options."""
    return PrefixIndex(options.prefix_entries_max, options.prefix_bytes_max)


def _load(endpoint: Endpoint) -> int:
    return endpoint.num_active


def _badness(endpoint: Endpoint) -> tuple[int, float]:
    return endpoint.num_opened, endpoint.retry_at_s
