"""The path of a request by what is where: what decode engines and their cache servers hold, and how long the prompt is.

    cached  held_by_engine     a ready decode engine holds all but ``local_max_tokens`` of the prompt
            held_by_server     the cache server of one does
    local   short              the whole prompt is no longer than that
    local   prefill_fallback   no prefill engine can answer, none is due to be tried, and the options allow it
    pd                         everything else

The first that applies is taken. A request whose form binds it to one engine stays as it is (``path.reason_alone``).

Always true: an engine is preferred only if it is ready, has less than its share of the load, and holds some of the
prompt. Nothing is reserved: if what was held is gone by then, the decode engine computes it, and the receipt's tokens
by source say so.

It does not pick: of the engines that would do it names one, and the pool's own choice may still differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from antiphon.routing.ask import Prompt
from antiphon.routing.endpoint import TIER_DOWN, TIER_READY, Endpoint
from antiphon.routing.fleet import Fleet
from antiphon.routing.path import HELD_BY_ENGINE, HELD_BY_SERVER, PathChoice, served_alone

_SHORT: Final = served_alone("short")
_PREFILL_FALLBACK: Final = served_alone("prefill_fallback")
NOTHING_HELD: Final[dict[str, int]] = {}


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """When a decode engine computes a prompt's rest itself.

    Args:
        local_max_tokens: tokens that a decode engine may be given to compute. 0: none, so that every request that can
            be split is. Off unless said otherwise, since the figure depends on model and machine: where computing so
            many tokens takes a decode engine less time than a hand-over. Less than a chunk of the cache server is
            seldom reached, as the tail of a prompt that is no whole chunk is not stored.
        load_factor: an engine with this many times the mean load is not preferred.
        prefill_fallback: as in ``LifeOptions``.
    """

    local_max_tokens: int = 0
    load_factor: float = 1.25
    prefill_fallback: Literal["fail", "local"] = "fail"

    def __post_init__(self) -> None:
        if self.local_max_tokens < 0 or self.load_factor < 1:
            raise ValueError(f"local_max_tokens is at least 0 and load_factor at least 1: {self}")


class Placement:
    """What was decided of one request. Not changed once made.

    Args:
        choice: its path and the reason.
        preferred: the decode engine that is to have it; None where any will do.
        num_held_tokens: tokens that ``preferred`` is expected to find, 0 without one.
    """

    choice: PathChoice
    preferred: Endpoint | None
    num_held_tokens: int

    def __init__(self, choice: PathChoice, preferred: Endpoint | None = None, num_held_tokens: int = 0) -> None:
        self.choice = choice
        self.preferred = preferred
        self.num_held_tokens = num_held_tokens


class Placer:
    """Decides for each request. It has no state of its own.

    Args:
        fleet: whose engines it reads.
        options: its thresholds.
    """

    def __init__(self, fleet: Fleet, options: PlacementOptions) -> None:
        self._fleet = fleet
        self._local_max_tokens = options.local_max_tokens
        self._load_factor = options.load_factor
        self._has_fallback = options.prefill_fallback == "local"

    @property
    def uses_prompts(self) -> bool:
        """Whether a prompt's length, and what is held of it, make any difference."""
        return self._local_max_tokens > 0

    def place(
        self,
        prompt: Prompt | None,
        choice: PathChoice,
        now_s: float,
        by_engine: Mapping[str, int] = NOTHING_HELD,
        by_server: Mapping[str, int] = NOTHING_HELD,
    ) -> Placement:
        """The path of a request. In proportion to the ready decode engines where anything is held, else O(1).

        Args:
            prompt: None, or of 0 tokens, where its length is not known: it is never short, and nothing is held.
            choice: what its form allows (``path.choose_path``).
            now_s: by the clock of the fleet.
            by_engine: by ``host:port`` of decode engines, tokens of the prompt from the first on that they hold
                themselves.
            by_server: the same, that their cache servers hold.
        """
        if choice.path != "pd":
            return Placement(choice)
        if prompt is not None and prompt.num_tokens > 0 and self._local_max_tokens > 0:
            if by_engine or by_server:
                held = self._held(prompt.num_tokens, by_engine, by_server)
                if held is not None:
                    return held
            if prompt.num_tokens <= self._local_max_tokens:
                return Placement(_SHORT)
        if self._has_fallback and not self._fleet.prefill.can_answer and not self._is_trial_due(now_s):
            return Placement(_PREFILL_FALLBACK)
        return Placement(choice)

    def _held(self, num_tokens: int, by_engine: Mapping[str, int], by_server: Mapping[str, int]) -> Placement | None:
        """The decode engine that would have least to compute; of equals the one with the fewest requests."""
        ready = self._fleet.decode.ready
        total = 0
        for endpoint in ready:
            total += endpoint.num_active
        # As ``pickers.load_bound``: times the mean, this request counted.
        bound = self._load_factor * (total + 1) / max(1, len(ready))
        enough = max(1, num_tokens - self._local_max_tokens)
        best: Endpoint | None = None
        best_held = 0
        for endpoint in ready:
            address = endpoint.address
            num_held = max(by_engine.get(address, 0), by_server.get(address, 0))
            if num_held < enough or endpoint.num_active >= bound:
                continue
            num_held = min(num_held, num_tokens)
            if best is None or (num_held, -endpoint.num_active) > (best_held, -best.num_active):
                best, best_held = endpoint, num_held
        if best is None:
            return None
        assert best.tier == TIER_READY and best_held > 0
        is_own = by_engine.get(best.address, 0) >= by_server.get(best.address, 0)
        return Placement(HELD_BY_ENGINE if is_own else HELD_BY_SERVER, best, best_held)

    def _is_trial_due(self, now_s: float) -> bool:
        """Whether a prefill engine that is down wants a request to be tried with: else it might never be back."""
        for endpoint in self._fleet.prefill.endpoints:
            if endpoint.tier == TIER_DOWN and not endpoint.trial and now_s >= endpoint.retry_at_s:
                return True
        return False
