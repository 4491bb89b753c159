"""prefix_aware: by what each engine was sent before, and by what it has to do (``affinity``).

What is picked is noted in the fleet's ``prefix_index``, and does not count for another pick of the same request. The
policy does not know what an engine has evicted, nor what others have sent it. A request without a prompt goes to the
less loaded of two.
"""

from __future__ import annotations

from antiphon.routing.affinity import Affinity
from antiphon.routing.ask import Ask
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.pickers import PickerOptions, less_loaded_of_two


class PrefixAware:
    """The policy of one pool. A pick costs O(engines + blocks of the prompt)."""

    def __init__(self, options: PickerOptions) -> None:
        self._affinity = Affinity(options)
        self._prefixes = options.prefixes

    def pick(self, candidates: list[Endpoint], chance: float, ask: Ask | None) -> Endpoint:
        """See ``Picker``: sets ``ask.num_matched_tokens``."""
        prompt = ask.prompt if ask is not None else None
        if ask is None or prompt is None:
            return less_loaded_of_two(candidates, chance)
        num_tokens, num_bytes = prompt.num_tokens, len(prompt.data)
        prefixes = self._prefixes
        held = prefixes.match(prompt, self._affinity.role)
        for endpoint, num_held_bytes in held.items():
            held[endpoint] = num_tokens * num_held_bytes // num_bytes
        noted = ask.noted
        if noted is None:
            noted = ask.noted = {}
        for endpoint, num_before in noted.items():  # an earlier pick for this request may have come to nothing
            if endpoint in held:
                held[endpoint] = min(held[endpoint], num_before)
        chosen = self._affinity.choose(candidates, chance, num_tokens, held)
        ask.num_matched_tokens = num_matched = held.get(chosen, 0)
        noted.setdefault(chosen, num_matched)
        prefixes.insert(chosen, prompt)
        return chosen

    def set_members(self, endpoints: list[Endpoint]) -> None:
        """The shares of those that are gone are nobody's."""
        self._affinity.set_members(endpoints)

    def set_ready(self, endpoint: Endpoint) -> None:
        """Of no concern: loads are read where they are."""

    def load_changed(self, endpoint: Endpoint, before: int) -> None:
        """Of no concern: loads are read where they are."""

    def validate(self) -> None:
        """Assert the invariants."""
        self._affinity.validate()
