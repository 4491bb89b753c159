"""When two answers to a prompt come from the same KV.

Two ways to compare. *The same*: both answers were computed in the same pieces, alone, so that the KV decides the last
bit: equal tokens, and the likeliest tokens at each place as likely. *Explained*: one of them was computed beside
others, or in other pieces, where sums of bf16 differ in the last bits and random weights turn that into another token
now and then. Then the first token that differs must be among the likeliest ones of the other answer at that place:
rounding exchanges neighbours, another prompt's KV gives one token out of all of them.

Values and arithmetic only.
"""

from __future__ import annotations

from collections.abc import Sequence

from common import TOP, Answer

SAME_LIMIT = 0.1
"""Of the logarithm of a probability: three units of a logit in bf16. The same KV gives the same numbers; ``correct``
tells how far they are apart where one chunk of a prompt is wrong."""
FAR = 99.0
"""Apart without a number."""


def difference(one: Answer, other: Answer) -> float:
    """The largest between logarithms of probabilities of tokens that are likely in both, over all places.

    ``FAR`` where tokens differ, or hardly any are likely in both.
    """
    if one.tokens != other.tokens or not len(one.top) == len(other.top) == len(one.tokens):
        return FAR
    largest = 0.0
    for a, b in zip(one.top, other.top, strict=True):
        common = a.keys() & b.keys()
        if len(common) < TOP - 2:
            return FAR
        largest = max([largest, *(abs(a[token] - b[token]) for token in common)])
    return largest


def is_same(one: Answer, other: Answer) -> bool:
    """Whether both come from the same KV, computed in the same pieces."""
    return difference(one, other) <= SAME_LIMIT


def is_explained(tokens: Sequence[int], wanted: Answer) -> bool:
    """Whether the tokens differ from the wanted ones by rounding at most; ``wanted`` has the likeliest ones."""
    assert len(wanted.top) == len(wanted.tokens), "the likeliest tokens were not asked for"
    if len(tokens) != len(wanted.tokens):
        return False
    for place, (a, b) in enumerate(zip(tokens, wanted.tokens, strict=True)):
        if a != b:
            return a in wanted.top[place]
    return True


def num_explained(found: Sequence[Answer], wanted: Sequence[Answer]) -> int:
    """How many are."""
    return sum(is_explained(a.tokens, b) for a, b in zip(found, wanted, strict=True))


def num_same(found: Sequence[Answer], wanted: Sequence[Answer]) -> int:
    """How many are."""
    return sum(is_same(a, b) for a, b in zip(found, wanted, strict=True))


def num_equal(found: Sequence[Answer], wanted: Sequence[Answer]) -> int:
    """How many have equal tokens."""
    return sum(a.tokens == b.tokens for a, b in zip(found, wanted, strict=True))


def leading(found: Sequence[Answer], wanted: Sequence[Answer]) -> float:
    """Share of tokens before the first that differs."""
    shares = []
    for a, b in zip(found, wanted, strict=True):
        pairs = zip(a.tokens, b.tokens, strict=False)
        number = next((place for place, (x, y) in enumerate(pairs) if x != y), len(b.tokens))
        shares.append(number / len(b.tokens))
    return sum(shares) / len(shares)
