"""The life of one request: what is known of it, and the steps that its handlers are made of.

``machine.step`` is the way in; the handlers of each stage are in ``prefilling`` and ``decoding``. A life takes and
gives back its engines' counters itself, so that they are balanced however it ends.

The rules of trying again:

- A refused connection costs no engine anything: the next engine is tried, the same handle with it, while the lease has
  time left.
- A prefill that failed, was lost or timed out goes to another prefill engine, under a fresh request id and within the
  retry budget. Where there is no other, one that was lost is tried there again, once, after a wait.
- A handle is sent to a second decode engine only if no byte of the first request was written: the prefill engine frees
  its blocks once they are pulled, and a second pull reads other people's KV with no error. In every other case before
  the first byte of the answer, a fresh prefill makes a new handle, once.
- After the first byte of the answer nothing is tried again: the client is told in its stream.
- A handle of an engine that has restarted since is not sent.
- Where KV is kept by cache servers (``LifeOptions.is_kept``) the last two do not hold: nobody pulls from the engine, so
  that a handle goes to a second decode engine, once, also when the prefill engine is gone; and nothing is handed over
  for a client that has left.

Invariants: :meth:`Life.validate`. One ``Finish``, last.
"""

from __future__ import annotations

from math import inf
from typing import Final

from antiphon.routing.ask import Ask
from antiphon.routing.budget import backoff_s
from antiphon.routing.commands import (
    Command,
    ConnectDecode,
    ConnectPrefill,
    EndStreamWithError,
    FailureCode,
    Finish,
    Handle,
    ProbeDecode,
    RespondError,
)
from antiphon.routing.endpoint import TIER_OUT, TIER_READY, Endpoint, Verdict
from antiphon.routing.fleet import Fleet
from antiphon.routing.options import LifeOptions
from antiphon.routing.path import Path
from antiphon.routing.pool import Pool
from antiphon.routing.states import OUTCOMES, Stage, assert_listed

_BACKING_OFF: Final = Stage.BACKING_OFF
_CANCELLED: Final = Stage.CANCELLED
_COMPLETING: Final = Stage.COMPLETING
_CONNECTING_DECODE: Final = Stage.CONNECTING_DECODE
_CONNECTING_PREFILL: Final = Stage.CONNECTING_PREFILL
_FAILED: Final = Stage.FAILED
_PROBING: Final = Stage.PROBING
_RECEIVED: Final = Stage.RECEIVED
_STREAMING: Final = Stage.STREAMING
_V_FAILED: Final = Verdict.FAILED


class Life:
    """One request.

    Args:
        request_id: unique; what engines are sent begins with it.
        fleet: shared by all lives of a router.
        options: deadlines and retries.
        path: ``pd``, or ``local`` for what a decode engine serves alone.
        ask: what the policies go by; None where they look at nothing.
    """

    # What never changes in most requests stays a value of the class, and costs a request nothing.
    attempt = 0
    last_byte_s = 0.0
    """Set by the shell at each byte of an answer, and at any time while it is the client that does not take them."""
    client_left = False
    endpoint: Endpoint | None = None
    """The engine of the attempt."""
    trial = 0
    num_tokens = 0
    """Prompt tokens that the attempt still has to compute, as its engine counts them."""
    handle: Handle | None = None
    outcome_due: Stage | None = None
    """The client has its answer; the request ends so once the KV is pulled."""
    reserved: tuple[Endpoint, int] | None = None
    """A decode engine that was down and that this request tries: kept for it while the prefill runs. It has no tokens
    to compute."""
    avoid_prefill: tuple[Endpoint, ...] = ()
    avoid_decode: tuple[Endpoint, ...] = ()
    """Engines that have failed this request."""
    blamed: Endpoint | None = None
    """The engine of the last stage that ended in an internal error."""
    is_excused = False
    failure: RespondError | None = None
    """What the client is told if nothing else can be tried."""
    num_prefill_tries = 0
    num_decode_tries = 0
    num_prefills = 0
    """Prefill requests sent, as far as a byte of them was."""
    has_prefill_head = False
    has_backed_off = False
    has_started_over = False
    has_reconnected = False
    has_written = False
    sent_at_s = 0.0
    now_s = 0.0
    chance = 0.0

    def __init__(
        self, request_id: str, fleet: Fleet, options: LifeOptions, *, path: Path, ask: Ask | None = None
    ) -> None:
        self.request_id = request_id
        self.stage = _RECEIVED
        self.deadline_s = inf
        """When the shell is to report ``Deadline``; it may change with each step."""
        self.fleet = fleet
        self.options = options
        self.path: Path = path
        self.ask = ask
        self.out: list[Command] = []

    @property
    def is_over(self) -> bool:
        """Whether the outcome is known and nothing is left to do."""
        return self.stage in OUTCOMES

    @property
    def is_closing(self) -> bool:
        """Whether nobody waits for an answer any more."""
        return self.client_left or self.outcome_due is not None

    @property
    def must_hand_over(self) -> bool:
        """Whether the prefill engine holds KV until it is pulled."""
        return self.handle is not None and not self.options.is_kept

    # -- connecting -------------------------------------------------------------------------------------------------

    def probe_decode(self) -> None:
        """Every decode engine is down: find out whether one can be reached before a prefill is spent on it."""
        pool = self.fleet.decode
        endpoint = pool.pick(self.now_s, self.chance, self.ask, self.avoid_decode)
        if endpoint is None:
            self.fail(self.failure or self._unavailable(pool, "no_decode_engine"))
            return
        self._take(pool, endpoint, has_prompt=False)
        self.enter(_PROBING, self.options.connect_s)
        self.out.append(ProbeDecode(self.attempt, endpoint))

    def connect_prefill(self) -> None:
        """Any prefill engine that has not failed this request."""
        endpoint = self._pick_prefill()
        if endpoint is None:
            self.give_up_prefill()
        else:
            self._connect_prefill(endpoint)

    def retry_prefill(self, failure: RespondError, *, is_lost: bool = False) -> None:
        """A prefill engine had the request and failed: another one, if that is allowed.

        Args:
            failure: what the client is told if it is not.
            is_lost: the only engine may be tried again after a wait.
        """
        self.failure = failure
        if self.client_left:
            self.finish(_CANCELLED)
            return
        endpoint = None
        if self.num_prefills < self.options.prefills_max:
            endpoint = self._pick_prefill()
            if endpoint is None and is_lost and not self.has_backed_off and self._may_retry("prefill_again"):
                self.has_backed_off = True
                self.avoid_prefill = ()
                options = self.options
                wait_s = backoff_s(self.num_prefills, options.backoff_min_s, options.backoff_max_s, self.chance)
                self.enter(_BACKING_OFF, wait_s)
                return
        if endpoint is None or not self._may_retry("prefill"):
            self.give_up_prefill()
        else:
            self._connect_prefill(endpoint)

    def give_up_prefill(self) -> None:
        """No prefill engine is left for this request."""
        if self.options.prefill_fallback == "local" and not self.client_left:
            self.path = "local"
            self.fleet.counts["prefill_fallback"] += 1
            self.connect_decode()
        else:
            self.fail(self.failure or self._unavailable(self.fleet.prefill, "no_prefill_engine"))

    def connect_decode(self) -> None:
        """Any decode engine that has not failed this request; with the handle, if there is one and it is good."""
        handle = self.handle
        if handle is not None and not self.is_handle_good:
            self.renew()
            return
        if self.path == "cached" and not self._has_preferred and self.fleet.prefill.can_answer:
            self.path = "pd"  # the engine that holds the prompt cannot have it: no other is to compute it
            if self.ask is not None:
                self.ask.preferred = None
            self.connect_prefill()
            return
        endpoint = self._reserved_decode()
        if endpoint is None:
            partner = handle.prefill if handle is not None else None
            endpoint = self.fleet.pick_decode(self.now_s, self.chance, self.ask, self.avoid_decode, partner)
            if endpoint is None:
                self.abandon()
                if partner is not None and self._is_decode_too(partner):
                    self.handle = None  # no other engine is left, and this one has the KV already
                    self.path = "local"
                    self.connect_decode()
                else:
                    self.fail(self.failure or self._unavailable(self.fleet.decode, "no_decode_engine"))
                return
            self._take(self.fleet.decode, endpoint, has_prompt=handle is None)
        self.num_decode_tries += 1
        self.enter(_CONNECTING_DECODE, self.options.connect_s)
        if handle is not None and handle.until_s < self.deadline_s:
            self.deadline_s = handle.until_s
        self.out.append(ConnectDecode(self.attempt, endpoint))

    def connect_by(self, until_s: float) -> None:
        """The shell connects to the decode engine by then, and not at once: its stage lasts as much longer, as far as
        the handle does."""
        assert self.stage is _CONNECTING_DECODE and self.handle is not None
        self.deadline_s = min(until_s + self.options.connect_s, self.handle.until_s)

    # -- the handle -------------------------------------------------------------------------------------------------

    @property
    def is_handle_good(self) -> bool:
        """Whether the handle may be sent: the lease has time left, and its engine has not restarted. One that is
        spent is sent only to free what it may still hold, when the client has its answer."""
        handle = self.handle
        assert handle is not None
        if self.options.is_kept:
            return self.now_s < handle.until_s
        if handle.is_spent and self.outcome_due is None:
            return False
        return self.now_s < handle.until_s and handle.life == handle.prefill.life

    def renew(self) -> None:
        """The handle may not be sent any more: a fresh prefill, once."""
        self.abandon()
        self.start_over(RespondError(504, "handover_timeout"))

    def start_over(self, failure: RespondError, *, is_lost: bool = False) -> None:
        """The client has nothing yet, and the handle is of no use: from the beginning, once.

        Args:
            failure: what the client is told if that is not allowed.
            is_lost: the only decode engine may be tried again.
        """
        keeps_handle = self.options.is_kept and self.handle is not None and self.is_handle_good
        if not keeps_handle:
            self.handle = None
        self.failure = failure
        is_allowed = not (self.is_closing or self.has_started_over)
        has_prefill = keeps_handle or self.num_prefills < self.options.prefills_max
        if not is_allowed or not has_prefill or not self._has_decode(is_lost=is_lost):
            self.fail(failure)
            return
        self.has_started_over = True
        self.has_reconnected = False
        if self.path != "pd" or keeps_handle:
            if self._may_retry("decode"):
                self.connect_decode()
            else:
                self.fail(failure)
            return
        endpoint = self._pick_prefill()
        if endpoint is None:
            self.give_up_prefill()
        elif self._may_retry("handover"):
            self._connect_prefill(endpoint)
        else:
            self.fail(failure)

    # -- ends -------------------------------------------------------------------------------------------------------

    def fail(self, failure: RespondError) -> None:
        """Tell the client, if it is there and has no answer, and finish."""
        if self.is_closing:
            self.finish(self.outcome_due or _CANCELLED)
            return
        if self.stage is _STREAMING:
            self.out.append(EndStreamWithError(failure.status, failure.code))
        else:
            self.out.append(failure)
        self.finish(_FAILED)

    def finish(self, outcome: Stage) -> None:
        """The one place where a request ends."""
        assert self.endpoint is None, "a request ends while an engine has it"
        if self.reserved is not None:
            endpoint, trial = self.reserved
            self.reserved = None
            self.fleet.decode.end(endpoint, trial)
        self.enter(outcome, inf)
        self.out.append(Finish(outcome))

    def cut(self) -> None:
        """The process gives the request up where it is: counters are given back, and nothing more is commanded."""
        if self.is_over:
            return
        if self.endpoint is not None:
            self.leave(None)
        self.finish(_CANCELLED)
        self.out = []

    # -- parts ------------------------------------------------------------------------------------------------------

    def enter(self, stage: Stage, limit_s: float) -> None:
        """Go on to ``stage``, which may take ``limit_s``."""
        assert_listed(self.stage, stage)
        self.stage = stage
        self.deadline_s = self.now_s + limit_s

    def judge(self, verdict: Verdict) -> None:
        """The attempt says something about its engine."""
        endpoint = self.endpoint
        assert endpoint is not None
        self.fleet.pool(endpoint.role).judge(endpoint, verdict, self.now_s, self.chance, trial=self.trial)

    def leave(self, verdict: Verdict | None) -> Endpoint:
        """The attempt is over; None says nothing about its engine."""
        endpoint = self.endpoint
        assert endpoint is not None
        if verdict is not None:
            self.judge(verdict)
        num_tokens = self.num_tokens
        self.endpoint = None
        self.num_tokens = 0
        self.fleet.pool(endpoint.role).end(endpoint, self.trial, num_tokens)
        return endpoint

    def computed(self) -> None:
        """The attempt has computed its prompt: others wait for it no longer."""
        if self.num_tokens:
            assert self.endpoint is not None
            self.fleet.pool(self.endpoint.role).computed(self.endpoint, self.num_tokens)
            self.num_tokens = 0

    def leave_with_status(self) -> Endpoint:
        """The attempt ended in an internal error. If two engines of a role say so of one request, it is the request."""
        assert self.endpoint is not None
        if self.blamed is None or self.blamed.role != self.endpoint.role:
            self.blamed = self.endpoint
            self.is_excused = False
            return self.leave(_V_FAILED)
        if not self.is_excused:
            self.is_excused = True
            self.fleet.pool(self.blamed.role).excuse(self.blamed)
        return self.leave(None)

    def abandon(self) -> None:
        """The handle was never sent: its blocks are held until the lease ends."""
        if self.handle is not None and not self.handle.is_spent and not self.options.is_kept:
            self.fleet.counts["handover_abandoned"] += 1

    def engine_request_id(self, num_tries: int) -> str:
        """What an engine of a role is sent at the given try, so that it never sees an id twice."""
        return self.request_id if num_tries == 1 else f"{self.request_id}-{num_tries}"

    def overloaded(self, pool: Pool, status: int, retry_after_s: int | None) -> RespondError:
        """What the client is told when an engine answered with 429 or 503."""
        code: FailureCode = "prefill_overloaded" if pool.role == "prefill" else "decode_overloaded"
        return RespondError(status, code, retry_after_s or pool.retry_after_s(self.now_s))

    def validate(self) -> None:
        """Assert the invariants between two steps."""
        has_engine = self.stage not in (OUTCOMES | {_RECEIVED, _BACKING_OFF})
        assert has_engine == (self.endpoint is not None), f"{self.stage.value}: {self.endpoint}"
        assert not self.out, "commands were not taken"
        assert (self.deadline_s == inf) == (self.is_over or self.stage is _RECEIVED), "a stage without a deadline"
        assert not (self.is_over and self.reserved), "an engine stays reserved"
        assert self.num_tokens >= 0
        assert self.endpoint is not None or not self.num_tokens, "tokens to compute without an attempt"
        if self.stage is _COMPLETING:
            assert self.handle is not None and self.is_closing and not self.options.is_kept

    @property
    def _has_preferred(self) -> bool:
        """Whether the decode engine that was chosen for what it holds can have the request."""
        preferred = self.ask.preferred if self.ask is not None else None
        return preferred is not None and preferred.tier == TIER_READY and preferred not in self.avoid_decode

    def _unavailable(self, pool: Pool, code: FailureCode) -> RespondError:
        return RespondError(503, code, pool.retry_after_s(self.now_s))

    def _may_retry(self, kind: str) -> bool:
        is_allowed = self.fleet.budget.allow(self.now_s)
        self.fleet.counts[f"retry_{kind}" if is_allowed else "retry_denied"] += 1
        return is_allowed

    def _pick_prefill(self) -> Endpoint | None:
        """An engine that has not failed this request; a ready one that it does not shun, if there is one."""
        pool, ask, avoid = self.fleet.prefill, self.ask, self.avoid_prefill
        if ask is not None and ask.shunned:
            return pool.pick_sparing(self.now_s, self.chance, ask, avoid)
        return pool.pick(self.now_s, self.chance, ask, avoid)

    def _is_decode_too(self, partner: Endpoint) -> bool:
        """Whether the prefill engine is a decode engine that this request may go to."""
        if self.is_closing:
            return False
        twin = self.fleet.decode.find(partner.url)
        return twin is not None and twin.is_usable and twin not in self.avoid_decode

    def _has_decode(self, *, is_lost: bool) -> bool:
        pool = self.fleet.decode
        if pool.pick(self.now_s, self.chance, self.ask, self.avoid_decode) is not None:
            return True
        if is_lost and pool.can_answer:
            self.avoid_decode = ()
            return True
        return False

    def _connect_prefill(self, endpoint: Endpoint) -> None:
        if self.reserved is None and not self.fleet.decode.can_answer:
            self.probe_decode()  # and pick a prefill engine again then
            return
        self._take(self.fleet.prefill, endpoint, has_prompt=True)
        self.num_prefill_tries += 1
        self.has_prefill_head = False
        self.enter(_CONNECTING_PREFILL, self.options.connect_s)
        request_id = self.engine_request_id(self.num_prefill_tries)
        self.out.append(ConnectPrefill(self.attempt, endpoint, request_id))

    def _reserved_decode(self) -> Endpoint | None:
        """Take the decode engine that was kept for this request, unless it drains by now."""
        if self.reserved is None:
            return None
        (endpoint, trial), self.reserved = self.reserved, None
        if endpoint.tier == TIER_OUT:
            self.fleet.decode.end(endpoint, trial)
            return None
        self.attempt += 1
        self.endpoint, self.trial = endpoint, trial
        if self.ask is not None:
            self.ask.num_matched_tokens = 0  # what the last choice found is of another engine
        return endpoint

    def _take(self, pool: Pool, endpoint: Endpoint, *, has_prompt: bool) -> None:
        """Begin an attempt; ``has_prompt`` if the engine is to compute the prompt."""
        assert self.endpoint is None, "an attempt begins while another is under way"
        ask = self.ask
        if has_prompt and ask is not None and ask.prompt is not None:
            self.num_tokens = max(0, ask.prompt.num_tokens - ask.num_matched_tokens)
        self.attempt += 1
        self.endpoint = endpoint
        self.trial = pool.begin(endpoint, self.num_tokens)
