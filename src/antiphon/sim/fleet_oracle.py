"""What a policy could know at best: an oracle, and a bound that ignores load.

``oracle`` decides by the rule of kv_aware with perfect knowledge: every block that an engine holds at this moment, and
those that the prompts already sent there will bring, with no delay and no limit.

``bound_hit_rate`` is what one cache would hit that is as large as all prefill engines' KV together, or without end, and
that every prompt goes to: no copy of a prefix is held twice, and no request goes elsewhere because of load.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from antiphon.routing.affinity import Affinity
from antiphon.routing.ask import Ask
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.pickers import PickerOptions
from antiphon.sim.fleet_blocks import Blocks
from antiphon.sim.fleet_trace import BLOCK_TOKENS, Arrival, block_keys

ORACLE = "oracle"


class Knowledge:
    """What is where, of all engines, without error.

    Args:
        blocks: of each engine; set once they are there.
        keys: of the prompt that an engine is picked for now.
        is_wanted: somebody goes by it.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.blocks: dict[Endpoint, Blocks] = {}
        self.keys: Sequence[int] = ()
        self._coming: dict[Endpoint, Counter[int]] = {}

    def submitted(self, endpoint: Endpoint, keys: Sequence[int]) -> None:
        """A prompt with these blocks was sent to a prefill engine."""
        if not self.is_wanted:
            return
        coming = self._coming.setdefault(endpoint, Counter())
        for key in keys:
            coming[key] += 1

    def computed(self, endpoint: Endpoint, keys: Sequence[int]) -> None:
        """It is computed: the engine holds them, as long as it does."""
        if not self.is_wanted:
            return
        coming = self._coming[endpoint]
        for key in keys:
            coming[key] -= 1
            if not coming[key]:
                del coming[key]

    def num_matched(self, endpoint: Endpoint) -> int:
        """Tokens of the prompt that the engine holds, or will when the prompt's turn comes."""
        blocks, coming = self.blocks[endpoint], self._coming.setdefault(endpoint, Counter())
        num = blocks.match(self.keys)
        while num < len(self.keys) and self.keys[num] in coming:
            num += 1
        return num * BLOCK_TOKENS


class Oracle:
    """The picker that knows: the rule of kv_aware, held tokens without error."""

    def __init__(self, options: PickerOptions, knowledge: Knowledge) -> None:
        self._affinity = Affinity(options)
        self._knowledge = knowledge

    def pick(self, candidates: list[Endpoint], chance: float, ask: Ask | None) -> Endpoint:
        """See ``pickers.Picker``."""
        assert ask is not None and ask.prompt is not None
        held = {one: num for one in candidates if (num := self._knowledge.num_matched(one))}
        endpoint = self._affinity.choose(candidates, chance, ask.prompt.num_tokens, held)
        ask.num_matched_tokens = held.get(endpoint, 0)
        return endpoint

    def set_members(self, endpoints: list[Endpoint]) -> None:
        """See ``pickers.Picker``."""
        self._affinity.set_members(endpoints)

    def set_ready(self, endpoint: Endpoint) -> None:
        """Of no concern."""

    def load_changed(self, endpoint: Endpoint, before: int) -> None:
        """Of no concern."""


def bound_hit_rate(arrivals: Sequence[Arrival], scale: int, num_blocks: int | None) -> float:
    """What one cache would hit that every prompt goes to, whatever its load: least recently used blocks go first.

    Args:
        num_blocks: that it holds, None: all there are.
    """
    recent: OrderedDict[int, None] = OrderedDict()
    num_hit = num_tokens = 0
    for arrival in arrivals:
        num_tokens += arrival.num_tokens
        keys = block_keys(arrival, scale)
        num = 0
        while num < len(keys) and keys[num] in recent:
            num += 1
        num_hit += min(num, (arrival.num_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        for key in reversed(keys):
            recent[key] = None
            recent.move_to_end(key)
        while num_blocks is not None and len(recent) > num_blocks:
            recent.popitem(last=False)
    return num_hit / num_tokens
