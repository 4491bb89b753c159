"""The policies of a simulated fleet: the real ones by name, and the oracles; with them what they learn by.

Owns the real pools, and the real index of KV events where a policy wants one. What engines say reaches the index as the
events of vLLM would: in batches, after their delay, blocks named by numbers that mean nothing to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from antiphon.routing.ask import Prompt
from antiphon.routing.endpoint import Endpoint, Role
from antiphon.routing.fleet import Fleet
from antiphon.routing.kv_index import StoredBlocks
from antiphon.routing.options import FleetOptions
from antiphon.routing.pickers import PickerOptions
from antiphon.sim.fleet_engine import KvListener
from antiphon.sim.fleet_oracle import ORACLE, Knowledge, Oracle
from antiphon.sim.fleet_trace import BLOCK_TOKENS, TOKEN_BYTES, block_tokens

KV_AWARE = "kv_aware"
NAMES = (
    "round_robin",
    "least_load",
    "power_of_two",
    "consistent_hash",
    "prefix_aware",
    KV_AWARE,
    ORACLE,
)
"""What can be simulated, in the order of the tables."""

SCOPE = b"one model, one tenant"
"""Of every prompt."""


class Policies:
    """The pools of a fleet with one policy for both.

    Args:
        name: one of ``NAMES``.
        load_factor: as in a spec.
        kv_tokens: what an engine holds, which prefix_aware goes by.
        knowledge: what the oracles go by.
    """

    def __init__(self, name: str, load_factor: float, kv_tokens: int, knowledge: Knowledge) -> None:
        policy = KV_AWARE if name == ORACLE else name
        options = FleetOptions(policy, policy, load_factor, prefix_bytes_max=kv_tokens * TOKEN_BYTES)
        self.fleet = Fleet((), (), options)
        self.prefill = self.fleet.prefill
        self.decode = self.fleet.decode
        self.index = self.fleet.kv_index if name == KV_AWARE else None
        if self.index is not None:
            self.index.know_scope(SCOPE)
        knowledge.is_wanted = name == ORACLE
        for pool in (self.prefill, self.decode) if name == ORACLE else ():
            pool.picker = Oracle(PickerOptions(pool.role, load_factor), knowledge)

    def add(self, role: Role, url: str) -> Endpoint:
        """An engine that is ready."""
        pool = self.fleet.pool(role)
        endpoint = pool.add(url)
        pool.health_succeeded(endpoint, 0.0)
        return endpoint

    def listener(self, endpoint: Endpoint) -> KvListener | None:
        """Takes the engine's KV events, where the policy listens to any."""
        index = self.index
        if index is None:
            return None

        def listen(batch: list[tuple[int | None, Sequence[int], bool]]) -> None:
            for parent, keys, is_stored in batch:
                if is_stored:
                    tokens = list(chain.from_iterable(map(block_tokens, keys)))
                    index.store(endpoint, 0, StoredBlocks(keys, parent, tokens, BLOCK_TOKENS))
                else:
                    index.remove(endpoint, 0, keys, 0, "GPU")

        return listen

    def num_held(self, role: Role, prompt: Prompt) -> int:
        """Tokens of a prompt that some engine is expected to hold, as far as the policy can tell before it picks."""
        if self.index is not None:
            return max(self.index.match_prompt(prompt, self.fleet.pool(role).ready), default=0)
        held = self.fleet.prefixes.match(prompt, role)
        return prompt.num_tokens * max(held.values(), default=0) // max(1, len(prompt.data))

    def validate(self) -> None:
        """Assert the invariants."""
        self.fleet.validate()
        if self.index is not None:
            self.index.validate()
