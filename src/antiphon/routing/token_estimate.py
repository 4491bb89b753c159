"""How many tokens a prompt has, from its bytes: a running ratio for each model, corrected by what engines count.

Owns a ratio for each of at most ``MODELS_MAX`` models, the least recently corrected given up first. Always true: every
ratio is between ``RATIO_MIN`` and ``RATIO_MAX``, whatever is observed. It does not tokenize, and an image or any other
data that is no text does not teach it anything: what is too far from text is not learnt from, and one observation moves
a ratio by a bounded part of itself. Nor do short prompts: the template of a chat is most of their tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

RATIO_FIRST: Final = 4.0
"""Bytes of a token before anything is known: English, JSON around it counted."""
RATIO_MIN: Final = 1.0
RATIO_MAX: Final = 16.0
LEARNT_MIN_BYTES: Final = 1024
"""Prompts with less are not learnt from."""
WEIGHT_MAX_TOKENS: Final = 4096.0
"""One prompt counts as at most so many tokens."""
WINDOW_TOKENS: Final = 65536.0
"""A ratio is the mean over about so many."""
PRIOR_TOKENS: Final = 1024.0
"""What the first ratio counts as."""
STEP_MAX: Final = 0.5
"""An observation counts as at most so far from the ratio, as a part of it."""
MODELS_MAX: Final = 64


class _Ratio:
    """Bytes of a token of one model, and how many tokens that is known from."""

    def __init__(self) -> None:
        self.bytes_per_token = RATIO_FIRST
        self.num_tokens = PRIOR_TOKENS


class TokenEstimate:
    """The ratios of all models. Every call is O(1)."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[bytes, _Ratio] = OrderedDict()

    def num_tokens(self, model: bytes, num_bytes: int) -> int:
        """Of a prompt with ``num_bytes`` for ``model``; at least 1 if it has any. One that is not known is as text."""
        assert num_bytes >= 0
        ratio = self._ratios.get(model)
        return -int(-num_bytes // (ratio.bytes_per_token if ratio is not None else RATIO_FIRST))

    def observe(self, model: bytes, num_bytes: int, num_tokens: int) -> None:
        """An engine has counted the tokens of a prompt: ``usage.prompt_tokens``.

        Args:
            model: as in :meth:`num_tokens`; one that an engine has served, so that clients cannot make names up.
        """
        if num_bytes < LEARNT_MIN_BYTES or not RATIO_MIN * num_tokens <= num_bytes <= RATIO_MAX * num_tokens:
            return
        ratio = self._ratios.get(model)
        if ratio is None:
            if len(self._ratios) == MODELS_MAX:
                self._ratios.popitem(last=False)
            ratio = self._ratios[model] = _Ratio()
        else:
            self._ratios.move_to_end(model)
        weight = min(float(num_tokens), WEIGHT_MAX_TOKENS)
        ratio.num_tokens = min(ratio.num_tokens + weight, WINDOW_TOKENS)
        old = ratio.bytes_per_token
        step = (num_bytes / num_tokens) / old - 1.0
        step = min(STEP_MAX, max(-STEP_MAX, step))
        ratio.bytes_per_token = old * (1.0 + step * weight / ratio.num_tokens)

    def bytes_per_token(self, model: bytes) -> float:
        """The ratio of a model; that of text if it is not known."""
        ratio = self._ratios.get(model)
        return ratio.bytes_per_token if ratio is not None else RATIO_FIRST

    @property
    def num_models(self) -> int:
        """Models that are known."""
        return len(self._ratios)
