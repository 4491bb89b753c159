"""A random walk through everything that can happen to an engine with the connector, from one seed.

Prompts share prefixes, pools are small, and every thing that can go wrong does: aborts at any moment, preemption, lost
connections, new lives of the server, late answers, a server that hangs, resets. The engine model checks every byte that
is read, the server every byte that is stored; ``Harness.assert_idle`` what is left at the end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from antiphon.core.errors import ProtocolError
from antiphon.protocol import cache as calls
from tests.connector.blocks import BLOCK_SIZE, CHUNK_SIZE
from tests.connector.engine import EngineOptions, EngineRequest
from tests.connector.fakes import FakeSession
from tests.connector.harness import Harness

PROMPT_TOKENS_MAX = 9 * CHUNK_SIZE
NEW_TOKENS_MAX = 12
BLOCKS_MIN = -(-(PROMPT_TOKENS_MAX + NEW_TOKENS_MAX + 1) // BLOCK_SIZE) + 1


class Walk:
    """One walk."""

    def __init__(self, new_harness: Callable[..., Harness], seed: int) -> None:
        self.chance = chance = random.Random(seed)
        options = EngineOptions(
            num_blocks=chance.choice([BLOCKS_MIN, BLOCKS_MIN + 8, 60, 100]),
            num_ranks=chance.choice([1, 1, 2]),
            step_tokens_max=chance.choice([6, 16, 40]),
            running_max=chance.choice([2, 4, 8]),
            recomputes_failed_loads=chance.random() < 0.7,
            is_026=chance.random() < 0.4,
        )
        self.harness = new_harness(
            options,
            seed=seed,
            num_chunks=chance.choice([6, 20, 60]),
            has_server=chance.random() < 0.8,
            store_jobs_max=chance.choice([1, 4, 64]),
        )
        self.harness.prepare = self._prepare
        for client in self.harness.clients:
            for session in client.all:
                self._prepare(session)
        self.engine = self.harness.engine
        self.engine.pull_failure_chance = 0.2
        self.bases = [[chance.randrange(50) for _ in range(PROMPT_TOKENS_MAX)] for _ in range(3)]
        self.seen: Counter[str] = Counter()
        self.slow_chance = chance.choice([0.0, 0.3, 0.9])
        self.load_failure_chance = chance.choice([0.0, 0.2])
        self.fault_chance = chance.choice([0.0, 0.1, 0.5])
        self._is_between = False
        self._actions: list[tuple[int, Callable[[], None]]] = [
            (10, self.add),
            (30, self.step),
            (14, self.run_store),
            (14, self.run_load),
            (3, self.abort),
            (8, self.deliver),
            (3, self.let_time_pass),
            (1, self.lose_connection),
            (1, self.lose_server),
            (3, self.reconnect),
            (1, self.hang),
            (2, self.recover),
            (3, self.reset),
            (1, self.clear),
            (2, self.let_go),
        ]

    def run(self, num_actions: int) -> None:
        weights = [weight for weight, _ in self._actions]
        actions = [action for _, action in self._actions]
        for action in self.chance.choices(actions, weights, k=num_actions):
            self.seen[action.__name__] += 1
            action()
        self.finish()

    def finish(self) -> None:
        """Everything that was begun ends, and nothing is left."""
        self.slow_chance = self.fault_chance = 0.0
        self.recover()
        if self.harness.server is not None:
            self.harness.reconnect()
        self.harness.settle()
        self.harness.dispose()
        self.harness.step()
        self.harness.clock.advance(5.0)
        for side in self.harness.sides:
            side.let_go()
            side.let_go()
        self.harness.clock.advance(5.0)
        for side in self.harness.sides:
            side.let_go()
        self.harness.dispose()
        if self.harness.server is not None:
            self.harness.server.tick()
        for client in self.harness.clients:
            for session in client.all:
                assert session.is_open or session.is_disposed, "an ended session is kept for ever"
        self.harness.assert_idle()
        self.harness.assert_reports_add_up()
        for name, number in self.engine.loads_of.items():
            self.seen["loads"] += number
            assert number <= 1 + self._request(name).num_preemptions, "a load was promised again after it had failed"
        self.seen["failed loads"] += self.engine.num_failed_loads
        for request in self.harness.requests:
            self.seen[request.status.name] += 1
            self.seen["preemptions"] += request.num_preemptions
        self._compare_outputs()

    def _compare_outputs(self) -> None:
        """What an engine without any reuse would have answered."""
        for request in self.harness.requests:
            prompt = request.all_token_ids[: request.num_prompt_tokens]
            expected = EngineRequest("", prompt, 0, salt=request.salt)
            for token in request.all_token_ids[request.num_prompt_tokens :]:
                assert token == expected.states[-1] % 7
                expected.append(token)

    def _request(self, name: str) -> EngineRequest:
        return next(request for request in self.harness.requests if request.request_id == name)

    # ---- actions ---------------------------------------------------------------------------------------------------

    def add(self) -> None:
        if len(self.engine.requests) >= 12:
            return
        chance = self.chance
        base = chance.choice(self.bases)
        edges = [CHUNK_SIZE * chance.randrange(1, 10) + chance.choice([-1, 0, 0, 1])]
        length = max(1, min(chance.choice([*edges, chance.randrange(1, PROMPT_TOKENS_MAX)]), PROMPT_TOKENS_MAX))
        tokens = base[:length]
        if chance.random() < 0.4:
            own = chance.randrange(1, length + 1)
            tokens = tokens[:-own] + [chance.randrange(50, 99) for _ in range(own)]
        fields: dict[str, Any] = {}
        if chance.random() < 0.15:
            fields["kv_transfer_params"] = {"do_remote_prefill": True}
        if chance.random() < 0.05:
            fields["reads_no_cache"] = True
        salt = chance.choice([0, 0, 0, 1])
        self.harness.add(tokens, chance.randrange(1, NEW_TOKENS_MAX), salt=salt, **fields)

    def step(self) -> None:
        self.harness.step()

    def run_store(self) -> None:
        for side in self.chance.sample(self.harness.sides, self.chance.randint(0, len(self.harness.sides))):
            side.run_store()

    def run_load(self) -> None:
        for side in self.chance.sample(self.harness.sides, self.chance.randint(0, len(self.harness.sides))):
            side.run_load(self._between_copies)

    def abort(self) -> None:
        if self.engine.requests:
            name = self.chance.choice(sorted(self.engine.requests))
            self.seen[f"abort {self.engine.requests[name].status.name}"] += 1
            self.engine.abort(name)

    def deliver(self) -> None:
        for session in self._sessions():
            session.deliver(self.chance.randint(1, 4))

    def let_time_pass(self) -> None:
        self.harness.clock.advance(self.chance.choice([0.03, 0.2, 1.1, 3.0]))
        self.harness.dispose()
        if self.harness.server is not None:
            self.harness.server.tick()

    def lose_connection(self) -> None:
        if self.chance.random() < self.fault_chance:
            self.chance.choice(self.harness.clients).lose()

    def lose_server(self) -> None:
        if self.chance.random() < self.fault_chance:
            self.harness.lose_server()

    def reconnect(self) -> None:
        if self.harness.server is None:
            self.harness.start_server()
        elif self.chance.random() < 0.5:
            client = self.chance.choice(self.harness.clients)
            if client.session is None:
                client.connect(self.harness.server)
        else:
            self.harness.reconnect()

    def hang(self) -> None:
        if self.chance.random() > self.fault_chance:
            return
        for session in self._sessions():
            session.is_responsive = False
            session.is_full = session.arena is None and self.chance.random() < 0.6

    def recover(self) -> None:
        for session in self._sessions():
            session.is_responsive, session.is_full = True, False

    def reset(self) -> None:
        if self.chance.random() < 0.3:
            self.engine.reset_prefix_cache()
        else:
            self.engine.pool.reset()

    def clear(self) -> None:
        if self.chance.random() < 0.1:
            self.harness.scheduler.reset_cache()

    def let_go(self) -> None:
        for side in self.harness.sides:
            side.let_go()

    # ---- timing ----------------------------------------------------------------------------------------------------

    def _sessions(self) -> list[FakeSession]:
        return [client.session for client in self.harness.clients if client.session is not None]

    def _prepare(self, session: FakeSession) -> None:
        session.is_slow = self._is_slow
        session.between = self._between

    def _is_slow(self, body: calls.Body) -> bool:
        return isinstance(body, calls.Lookup | calls.AskProcesses) and self.chance.random() < self.slow_chance

    def _between_copies(self) -> None:
        if self.chance.random() < self.load_failure_chance:
            raise ProtocolError("a region is no place for a chunk")
        self._between()

    def _between(self) -> None:
        """A copying thread waits: other things happen meanwhile."""
        if self._is_between or self.chance.random() < 0.6:
            return
        self._is_between = True
        try:
            others = [
                self.step,
                self.step,
                self.step,
                self.abort,
                self.add,
                self.lose_connection,
                self.let_time_pass,
                self.hang,
            ]
            for action in self.chance.choices([*others, self.let_go, self.deliver], k=self.chance.randint(1, 4)):
                self.seen[f"between {action.__name__}"] += 1
                action()
        finally:
            self._is_between = False
