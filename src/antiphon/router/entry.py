"""What a request passes before it begins, and what it takes part in until it ends, where the router is told to look
further than at its form: its tenant's limits, its tokens, what is where, the admission of large cold prompts.

In this order:

1. its tenant's rate, concurrency and share (``routing.tenants``): it may wait;
2. its tokens, where they are wanted (``whereabouts``): it waits some milliseconds at most;
3. its path (``routing.placement``);
4. cold-transfer admission (``routing.admission``), for the path ``pd``: it may wait;
5. it begins.

Owns the order in which requests that waited go on: one after the other, never from inside another request, however many
the end of one makes room for. Decides nothing.

Invariants: a ticket is over once, and leaves nothing behind at whatever step its client leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from antiphon.observe.router_metrics import RouterMetrics
from antiphon.router.prompts import Prompts
from antiphon.router.refusals import queue_refusal
from antiphon.routing.admission import ColdAdmission
from antiphon.routing.ask import Ask, Prompt
from antiphon.routing.cold import Admit, ColdItem, ColdStage, Refuse, Wait
from antiphon.routing.commands import ConnectDecode, ConnectPrefill, ProbeDecode
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.fleet import Fleet
from antiphon.routing.path import SINGLE_STAGE, PathChoice
from antiphon.routing.placement import Placer
from antiphon.routing.states import EndpointState
from antiphon.routing.tenants import Refuse as TenantRefuse
from antiphon.routing.tenants import Tenants
from antiphon.routing.tenants import Wait as TenantWait

if TYPE_CHECKING:
    from antiphon.router.flight import Flight
    from antiphon.router.whereabouts import Whereabouts

log = logging.getLogger("antiphon.router")

_OUTPUT_TOKENS: Final = 256
"""What an answer is taken to cost a tenant until it has ended, where the request sets no lower limit: limits are often
far beyond what is answered, and a tenant whose clients set them would wait for what it never gets."""


class Entry:
    """The way in of one router.

    Args:
        fleet: whose policies the requests go by.
        metrics: paths are counted here, once they are known.
        placer: decides paths.
        rooms: which of the steps are taken.
        clock: seconds, of the fleet too.
    """

    def __init__(
        self,
        fleet: Fleet,
        metrics: RouterMetrics,
        placer: Placer,
        rooms: Rooms,
        clock: Callable[[], float],
    ) -> None:
        self.fleet = fleet
        self.metrics = metrics
        self.placer = placer
        self.cold = rooms.cold
        self.tenants = rooms.tenants
        self.where = rooms.where
        self.clock = clock
        self.prompts = Prompts()
        self.reads_prompts = rooms.reads_prompts
        self._going: deque[tuple[Ticket, Callable[[], None]]] = deque()
        self._is_going = False
        self._is_closed = False
        if self.cold is not None:
            self._note_pools()
            for pool in (fleet.prefill, fleet.decode):
                pool.when_changed(self._changed)
                pool.when_gone(self._gone)
                pool.when_restarted(self._gone)

    def tick(self) -> None:
        """Time has passed; called some forty times a second while any request is in progress."""
        now_s = self.clock()
        if self.tenants is not None and self.tenants.num_waiting:
            changes = self.tenants.tick(now_s)
            for item in changes.admitted:
                assert isinstance(item, Ticket)
                self._going.append((item, item.admitted))
            for item, refusal in changes.refused:
                assert isinstance(item, Ticket)
                self.do(item, partial(item.refuse, refusal.status, refusal.code, refusal.retry_after_s))
        self.look_at_cold()
        self.run()

    def look_at_cold(self) -> None:
        """Something has changed that cold requests may wait for."""
        if self.cold is None:
            return
        refused: list[tuple[Ticket, Refuse]] = []
        for item in self.cold.tick(self.clock()):
            ticket = item.tag
            assert isinstance(ticket, Ticket)
            answer = item.answer
            if isinstance(answer, Refuse):
                refused.append((ticket, answer))
            elif item.stage is ColdStage.PREFILLING:
                self._going.append((ticket, ticket.begin))
            else:
                self._going.append((ticket, ticket.connect))
        for ticket, answer in refused:
            self.do(ticket, partial(ticket.refuse, answer.status, answer.code, answer.retry_after_s))

    def left(self, ticket: Ticket, num_tokens: int | None) -> None:
        """A ticket is over.

        Args:
            num_tokens: what it cost in the end; None where that is not known.
        """
        if self.tenants is not None:
            for item in self.tenants.leave(ticket, self.clock(), num_tokens):
                assert isinstance(item, Ticket)
                self._going.append((item, item.admitted))
        self.look_at_cold()
        self.run()

    def step_aside(self, ticket: Ticket) -> None:
        """It waits for its admission: that is no reason for others to wait for their tenants' limits."""
        if self.tenants is not None and ticket.flight is not None and ticket.flight.receipt.tenant is not None:
            for item in self.tenants.step_aside(ticket, self.clock()):
                assert isinstance(item, Ticket)
                self._going.append((item, item.admitted))

    def run(self) -> None:
        """Let those go on that may; from inside one of them it does nothing, since its turn is not over."""
        if self._is_going:
            return
        self._is_going = True
        going = self._going
        try:
            while going and not self._is_closed:
                ticket, action = going.popleft()
                self.do(ticket, action)
        finally:
            self._is_going = False

    def do(self, ticket: Ticket, action: Callable[[], None]) -> None:
        """Take one step of a request."""
        try:
            action()
        except Exception as error:  # supervised: a bug ends the request that meets it, and no other
            ticket.broken(error)

    def close(self) -> None:
        """The router stops: what waits does not begin any more, whatever ends."""
        self._is_closed = True
        self._going.clear()

    def _changed(self, endpoint: Endpoint, before: EndpointState) -> None:
        if endpoint.state is EndpointState.DOWN:  # it may come back in another life
            self._gone(endpoint)
        self._note_pools()

    def _note_pools(self) -> None:
        assert self.cold is not None
        self.cold.set_prefills(self.fleet.prefill.ready)
        self.cold.set_decodes(self.fleet.decode.ready)

    def _gone(self, endpoint: Endpoint) -> None:
        assert self.cold is not None
        self.cold.forget(endpoint)


class Rooms:
    """What of the entry is used.

    Args:
        tenants: None where there are none.
        cold: None where nothing is admitted by bytes.
        where: None where nobody wants to know more than prefixes.
        reads_prompts: whether somebody goes by what stands in prompts, or by their length.
    """

    def __init__(
        self, tenants: Tenants | None, cold: ColdAdmission | None, where: Whereabouts | None, *, reads_prompts: bool
    ) -> None:
        self.tenants = tenants
        self.cold = cold
        self.where = where
        self.reads_prompts = reads_prompts


class Ticket:
    """What one request takes part in.

    Args:
        entry: shared.
        flight: the request, held.
        choice: the path that its form allows.
        key: for consistent_hash.
        salt: under which engines look for its KV; empty where there is none.
    """

    item: ColdItem | None = None
    prompt: Prompt | None = None
    asking: asyncio.Task[None] | None = None
    held: ConnectDecode | None = None
    """Not to be connected yet."""

    def __init__(self, entry: Entry, flight: Flight, choice: PathChoice, key: int | None, salt: str) -> None:
        self.entry = entry
        self.flight: Flight | None = flight
        self.choice = choice
        self.ask = Ask(key)
        self.salt = salt

    def enter(self) -> None:
        """The first step, and what follows."""
        self.entry.do(self, self._enter)
        self.entry.run()

    def broken(self, error: Exception) -> None:
        """A bug: the request ends with it."""
        flight = self.flight
        if flight is None:
            log.error("a request that is over met an internal error", exc_info=error)
        else:
            flight.broken(error)

    def stop(self) -> None:
        """The router stops."""
        self.entry.close()

    def _enter(self) -> None:
        entry, flight = self.entry, self.flight
        assert flight is not None
        tenant = flight.receipt.tenant
        if entry.reads_prompts and self.choice is not SINGLE_STAGE:
            self.prompt = self.ask.prompt = entry.prompts.read(flight.request.path, flight.body, self.salt)
        tenants = entry.tenants
        if tenants is not None and tenant is not None:
            verdict = tenants.offer(self, tenant, self._cost(), entry.clock())
            if isinstance(verdict, TenantRefuse):
                self.refuse(verdict.status, verdict.code, verdict.retry_after_s)
                return
            if isinstance(verdict, TenantWait):
                return
        self.admitted()

    def admitted(self) -> None:
        """Its tenant's limits let it go on."""
        flight, where, prompt = self.flight, self.entry.where, self.prompt
        if flight is None:
            return
        if where is not None and prompt is not None:
            where.know(flight.receipt, flight.body, prompt, self.salt)
            question = where.question(flight.request.path, flight.body, prompt)
            if question is not None:
                self.asking = asyncio.get_running_loop().create_task(self._ask(question))
                return
        self._place()

    def refuse(self, status: int, code: str, retry_after_s: int) -> None:
        """It is not served now."""
        flight = self.flight
        if flight is not None:
            flight.turn_away(queue_refusal(status, code), retry_after_s)

    def begin(self) -> None:
        """Nothing is in its way any more."""
        flight, item = self.flight, self.item
        if flight is None:
            return
        cold = self.entry.cold
        if cold is not None and item is not None:
            if self.entry.tenants is not None:
                self.entry.tenants.step_in(self)
            self.ask.shunned = cold.avoid_for(item)
        flight.go()

    # -- while it runs ----------------------------------------------------------------------------------------------

    def may_connect(self, command: ProbeDecode | ConnectPrefill | ConnectDecode) -> bool:
        """Whether the flight connects now; else :meth:`connect` follows."""
        cold, item, flight = self.entry.cold, self.item, self.flight
        if cold is None or item is None or flight is None:
            return True
        now_s = self.entry.clock()
        if type(command) is ConnectPrefill:
            cold.prefill_chosen(item, command.endpoint, now_s)
        elif type(command) is ConnectDecode:
            if flight.life.handle is None:  # it computes the prompt itself: nothing is moved
                cold.leave(item, now_s)
                self.item = None
                self._wake()
                return True
            answer = cold.prefill_answered(item, command.endpoint, now_s, self._num_to_pull())
            if isinstance(answer, Wait):
                self.held = command
                flight.life.connect_by(answer.until_s)
                return False
        return True

    def connect(self) -> None:
        """What was held goes on, if it is still wanted."""
        flight, command = self.flight, self.held
        self.held = None
        if flight is not None and command is not None and flight.life.attempt == command.attempt:
            flight.life.connect_by(self.entry.clock())
            flight.connect(command)

    def prefilled(self, num_cached_tokens: int | None) -> None:
        """The prefill engine has answered.

        Args:
            num_cached_tokens: of the prompt, that it did not compute; None: it does not say.
        """
        flight, num_held = self.flight, self.ask.num_matched_tokens
        if flight is None:
            return
        flight.receipt.num_held_tokens = num_held or None
        if num_held and num_cached_tokens is not None:
            self.entry.metrics.held("pd", num_held, num_cached_tokens)

    def pulled(self, now_s: float) -> None:
        """The decode engine has begun its answer: it has the KV. When it got it is known of a stream alone: an answer
        that is not streamed begins when it is complete."""
        cold, item, flight = self.entry.cold, self.item, self.flight
        if cold is None or item is None or flight is None or not item.pull_began_s:
            return
        if flight.receipt.stream:
            cold.pulled(item, item.pull_bytes, max(0.0, now_s - item.pull_began_s), now_s)
        else:
            cold.leave(item, now_s)
        self._wake()

    def over(self) -> None:
        """The request has ended, however."""
        flight = self.flight
        if flight is None:
            return
        self.flight = None
        entry, receipt = self.entry, flight.receipt
        if self.asking is not None:
            self.asking.cancel()
        if entry.cold is not None and self.item is not None:
            entry.cold.leave(self.item, entry.clock())
        if receipt.prompt_tokens is not None and self.prompt is not None:
            entry.prompts.learn(flight.body, self.prompt, receipt.prompt_tokens)
        if not flight.life.attempt:  # no engine was asked for anything
            entry.left(self, 0)
            return
        num_output = receipt.num_events if receipt.stream else receipt.output_tokens
        num_prompt = receipt.prompt_tokens if receipt.prompt_tokens is not None else self._num_prompt(flight)
        entry.left(self, num_prompt + num_output if num_output is not None else None)

    # -- parts ------------------------------------------------------------------------------------------------------

    async def _ask(self, question: bytes) -> None:
        where, prompt = self.entry.where, self.prompt
        assert where is not None and prompt is not None
        try:
            await where.tokenize(question, prompt)
        except Exception as error:  # supervised: a bug ends the request that meets it, and no other
            self.asking = None
            self.broken(error)
            return
        self.asking = None
        self.entry.do(self, self._place)
        self.entry.run()

    def _place(self) -> None:
        """Its path; then it begins, or waits for its admission."""
        entry, flight, prompt, where = self.entry, self.flight, self.prompt, self.entry.where
        if flight is None:
            return
        now_s = entry.clock()
        if where is not None and prompt is not None:
            by_engine, by_server = where.held(flight.receipt, prompt)
            placement = entry.placer.place(prompt, self.choice, now_s, by_engine, by_server)
        else:
            placement = entry.placer.place(prompt, self.choice, now_s)
        choice, receipt, life = placement.choice, flight.receipt, flight.life
        receipt.path, receipt.reason = choice.path, choice.reason
        life.path = choice.path
        life.ask = self.ask
        if choice.path != "pd":
            flight.has_path = True
            entry.metrics.paths.count(choice.path, choice.reason)
            self.ask.preferred = placement.preferred
            self.ask.num_matched_tokens = placement.num_held_tokens
            receipt.num_held_tokens = placement.num_held_tokens or None
            if choice.path == "cached" and prompt is not None:
                receipt.num_placed_tokens = prompt.num_tokens
            self.begin()
            return
        cold = entry.cold
        if cold is not None and prompt is not None:
            num_cached = where.most_held(prompt) if where is not None else None
            if num_cached is None:
                num_cached = self._guess()
            item = ColdItem(max(0, prompt.num_tokens - num_cached), prompt.num_tokens, len(flight.body.raw), tag=self)
            item.is_told = receipt.stream
            self.item = item
            answer = cold.offer(item, now_s)
            if isinstance(answer, Refuse):
                self.refuse(answer.status, answer.code, answer.retry_after_s)
                return
            if isinstance(answer, Wait):
                entry.step_aside(self)
                return
            assert isinstance(answer, Admit)
        self.begin()

    def _guess(self) -> int:
        """Tokens of the prompt that some prefill engine holds, by what was sent."""
        prompt = self.prompt
        assert prompt is not None
        held = self.entry.fleet.prefixes.match(prompt, "prefill")
        return prompt.num_tokens * max(held.values(), default=0) // max(1, len(prompt.data))

    def _num_to_pull(self) -> int | None:
        """Tokens of the prompt that the decode engine that was just picked does not hold yet, where they are known."""
        flight = self.flight
        assert flight is not None
        num_tokens = flight.receipt.prompt_tokens
        return None if num_tokens is None else max(0, num_tokens - self.ask.num_matched_tokens)

    def _wake(self) -> None:
        """Cold requests may go on for what this one has let go of."""
        self.entry.look_at_cold()
        self.entry.run()

    def _num_prompt(self, flight: Flight) -> int:
        """Tokens of the prompt, as far as they are known here."""
        return self.prompt.num_tokens if self.prompt is not None else len(flight.body.raw) // 4

    def _cost(self) -> int:
        """Tokens that the request is expected to be."""
        flight = self.flight
        assert flight is not None
        num_prompt = self._num_prompt(flight)
        num_output = _OUTPUT_TOKENS
        for key in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
            value = flight.body.get(key)
            if value is not None and value.isdigit() and len(value) < 10:
                num_output = min(int(value), _OUTPUT_TOKENS)
                break
        return max(1, num_prompt + num_output)
