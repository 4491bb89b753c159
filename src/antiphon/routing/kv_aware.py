"""kv_aware: by the blocks that each engine says it holds (``kv_index``), and by what it has to do (``affinity``).

An engine announces a block when it has computed it. Until then, what it was sent counts as held: the last prompts sent
to each engine are kept by their bytes, and are believed while the engine has a request of this router in flight, so
that a burst of one prefix goes where the first of it went. An engine that has nothing in flight has announced all it
holds, and what it was sent is forgotten.

A request whose tokens are not known, in time or at all, is placed as prefix_aware places it; so is one at engines that
announce nothing. A request without a prompt goes to the less loaded of two.

Owns what was sent of late. What engines hold is the index's to know, and is not changed here.
"""

from __future__ import annotations

from typing import Final

from antiphon.routing.affinity import Affinity
from antiphon.routing.ask import Ask, Prompt
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.kv_index import KvIndex
from antiphon.routing.pickers import PickerOptions, less_loaded_of_two
from antiphon.routing.prefix_index import PrefixIndex

SENT_ENTRIES_MAX: Final = 32_768
SENT_MAX_BYTES: Final = 524_288
"""Of prompts, for each engine: some hundred thousand tokens, more than an engine computes in the seconds that it is
behind."""


class KvAware:
    """The policy of one pool. A pick costs O(engines + blocks of the prompt).

    Args:
        options: as for prefix_aware, and what engines hold.
    """

    def __init__(self, options: PickerOptions) -> None:
        self._affinity = Affinity(options)
        self._prefixes = options.prefixes
        self._index: KvIndex = options.kv_index
        self._sent = PrefixIndex(SENT_ENTRIES_MAX, SENT_MAX_BYTES)
        self._members: list[Endpoint] = []
        self.num_precise = 0
        """Picks by what engines say."""
        self.num_approximate = 0
        """Picks as prefix_aware."""

    def pick(self, candidates: list[Endpoint], chance: float, ask: Ask | None) -> Endpoint:
        """See ``Picker``: sets ``ask.num_matched_tokens``."""
        prompt = ask.prompt if ask is not None else None
        if ask is None or prompt is None:
            return less_loaded_of_two(candidates, chance)
        if self._index.knows(prompt):
            self.num_precise += 1
            held = self._held(prompt, candidates)
        else:
            self.num_approximate += 1
            held = self._in_tokens(prompt, self._prefixes.match(prompt, self._affinity.role))
        endpoint = self._affinity.choose(candidates, chance, prompt.num_tokens, held)
        ask.num_matched_tokens = held.get(endpoint, 0)
        self._prefixes.insert(endpoint, prompt)
        self._sent.insert(endpoint, prompt)
        return endpoint

    def set_members(self, endpoints: list[Endpoint]) -> None:
        """The shares of those that are gone are nobody's, and what they were sent is of no concern."""
        self._affinity.set_members(endpoints)
        for endpoint in set(self._members).difference(endpoints):
            self._sent.forget(endpoint)
        self._members = list(endpoints)

    def set_ready(self, endpoint: Endpoint) -> None:
        """Of no concern: loads are read where they are."""

    def load_changed(self, endpoint: Endpoint, before: int) -> None:
        """An engine without a request has announced what it holds."""
        if not endpoint.num_active:
            self._sent.forget(endpoint)

    def validate(self) -> None:
        """Assert the invariants."""
        self._affinity.validate()
        self._sent.validate()

    def _held(self, prompt: Prompt, candidates: list[Endpoint]) -> dict[Endpoint, int]:
        """Tokens of the prompt that each engine holds or is about to, where there are any."""
        index = self._index
        held: dict[Endpoint, int] = {}
        found = index.match_prompt(prompt, candidates)
        for position, endpoint in enumerate(candidates):
            if found[position]:
                held[endpoint] = min(found[position], prompt.num_tokens)
        for endpoint, num_tokens in self._in_tokens(prompt, self._sent.match(prompt, self._affinity.role)).items():
            if endpoint.num_active and num_tokens > held.get(endpoint, 0):
                held[endpoint] = num_tokens
        silent = [endpoint for endpoint in candidates if not index.hears(endpoint)]
        if silent:
            before = self._in_tokens(prompt, self._prefixes.match(prompt, self._affinity.role))
            for endpoint in silent:
                if before.get(endpoint, 0) > held.get(endpoint, 0):
                    held[endpoint] = before[endpoint]
        return held

    def _in_tokens(self, prompt: Prompt, found: dict[Endpoint, int]) -> dict[Endpoint, int]:
        """Bytes of the prompt as its tokens."""
        num_bytes = max(1, len(prompt.data))
        for endpoint, num_held_bytes in found.items():
            found[endpoint] = prompt.num_tokens * num_held_bytes // num_bytes
        return found
