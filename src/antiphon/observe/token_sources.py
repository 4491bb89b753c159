"""Where each prompt token of a request came from: the engines' reports, merged so that a token is counted once.

Arithmetic only. Always true: every prompt token has exactly one source, and what nobody has reported is ``unknown``.
It runs for every request, in the process that routes: values are not frozen, since that triples the cost to make one,
and nobody changes them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

Leg = Literal["prefill", "decode"]


@dataclass(slots=True)
class LegTokens:
    """What one engine reported of one request: how many prompt tokens it had from where.

    Along the prompt the sources lie in this order: the engine's own cache, the cache server, what came from a tier
    behind it and from another cache server (these two in any order), the hand-over from another engine, and what it
    computed.

    Args:
        device: tokens of the engine's own cache.
        l1: tokens loaded from the cache server, that had them.
        remote_prefill: tokens that a prefill engine handed over.
        computed: tokens computed; the last prompt token is always one of them.
        finish: ``finished``, or ``aborted`` before the prompt was complete.
        num_requests: requests of the engine that this is the sum of: several for a list of prompts, or ``n`` above 1.
        l2: tokens loaded from the cache server, that had them from a tier.
        peer: tokens loaded from the cache server, that had them from another one.
    """

    engine: str
    incarnation: str
    num_prompt_tokens: int
    device: int
    l1: int
    remote_prefill: int
    computed: int
    num_preemptions: int
    finish: str
    num_requests: int = 1
    l2: int = 0
    peer: int = 0

    @property
    def num_held(self) -> int:
        """Tokens that the engine had, or found in a cache."""
        return self.device + self.l1 + self.l2 + self.peer

    @property
    def total(self) -> int:
        """Tokens with a source."""
        return self.num_held + self.remote_prefill + self.computed

    @property
    def adds_up(self) -> bool:
        """Whether the sources are those of all prompt tokens; of an aborted request, of no more than these."""
        if self.finish == "aborted":
            return self.total <= self.num_prompt_tokens
        return self.total == self.num_prompt_tokens

    def plus(self, other: LegTokens) -> LegTokens:
        """Both together, as one engine's part in one HTTP request."""
        return replace(
            self,
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            device=self.device + other.device,
            l1=self.l1 + other.l1,
            remote_prefill=self.remote_prefill + other.remote_prefill,
            computed=self.computed + other.computed,
            num_preemptions=self.num_preemptions + other.num_preemptions,
            finish="aborted" if "aborted" in (self.finish, other.finish) else "finished",
            num_requests=self.num_requests + other.num_requests,
            l2=self.l2 + other.l2,
            peer=self.peer + other.peer,
        )


class ReportedTokens:
    """The reports of one request that have arrived, one sum for each leg."""

    __slots__ = ("decode", "is_settled", "is_wrong", "prefill")

    def __init__(self) -> None:
        self.prefill: LegTokens | None = None
        self.decode: LegTokens | None = None
        self.is_settled = False
        """No report is waited for any more, and the tokens were counted."""
        self.is_wrong = False
        """A sum that is wrong was counted."""

    def add(self, leg: Leg, tokens: LegTokens) -> None:
        """A report of ``leg`` has arrived."""
        before = self.prefill if leg == "prefill" else self.decode
        whole = tokens if before is None else before.plus(tokens)
        if leg == "prefill":
            self.prefill = whole
        else:
            self.decode = whole

    def leg(self, leg: Leg) -> LegTokens | None:
        """What ``leg`` reported."""
        return self.prefill if leg == "prefill" else self.decode


@dataclass(slots=True)
class TokenSources:
    """Prompt tokens by source.

    Args:
        num_prompt_tokens: None where nobody has said.
        by_source: ``device``, ``l1``, ``computed``, and ``l2``, ``peer`` and ``unknown`` if there are such; they add
            up to ``num_prompt_tokens``. Empty if that is not known.
        is_sum_ok: whether every report adds up and all agree on the length of the prompt; None without a report.
    """

    num_prompt_tokens: int | None
    by_source: dict[str, int]
    is_sum_ok: bool | None


def merge(num_told: int | None, prefill: LegTokens | None, last: LegTokens | None) -> TokenSources:
    """Count each prompt token once, by where the whole system had it from.

    The last engine's report says how it came by every token of the prompt: from its own cache, from the cache server
    (l1), from a tier behind it (l2), from another cache server (peer), by computing it, or handed over by the prefill
    engine. All but the last are sources of the system. The tokens handed over are those behind the last engine's own
    hit, from position ``device + l1 + l2 + peer`` on; they count as what they were for the prefill engine, whose
    sources lie in the order device, l1, l2 and peer, computed from position 0 on. So what both engines have counts as
    the last engine's, and the last prompt token, which both compute, counts once, as computed.

    Unknown are: the whole prompt without the last engine's report; the tokens handed over without the prefill engine's
    report, or behind what it reports; those of which some came from a tier and some from another server, where only a
    part was handed over; those where a preemption of the prefill engine has mixed that order, unless all
    its tokens were handed over; and what an aborted request never came to.

    Args:
        num_told: tokens of the prompt as another source tells, or None.
        prefill: report of the prefill engine, where another engine came after it.
        last: report of the engine that came last: the only one, or the decode engine.
    """
    if last is None:
        return _without_last(num_told, prefill)
    prompt = last.num_prompt_tokens
    is_sum_ok = last.adds_up and num_told in (None, prompt)
    if prefill is not None:
        is_sum_ok = is_sum_ok and prefill.adds_up and prefill.num_prompt_tokens == prompt
    begin = last.num_held
    device, l1, l2, peer, computed = _sources_of(prefill, begin, begin + last.remote_prefill)
    unknown = last.remote_prefill - device - l1 - l2 - peer - computed
    if last.total < prompt:
        unknown += prompt - last.total
    by_source = {"device": last.device + device, "l1": last.l1 + l1}
    if last.l2 + l2:
        by_source["l2"] = last.l2 + l2
    if last.peer + peer:
        by_source["peer"] = last.peer + peer
    by_source["computed"] = last.computed + computed
    if unknown:
        by_source["unknown"] = unknown
    return TokenSources(prompt, by_source, is_sum_ok)


def _without_last(num_told: int | None, prefill: LegTokens | None) -> TokenSources:
    if prefill is None:
        return TokenSources(num_told, {} if num_told is None else {"unknown": num_told}, None)
    prompt = prefill.num_prompt_tokens if num_told is None else num_told
    return TokenSources(prompt, {"unknown": prompt}, prefill.adds_up and prefill.num_prompt_tokens == prompt)


def _sources_of(prefill: LegTokens | None, begin: int, end: int) -> tuple[int, int, int, int, int]:
    """Of the tokens from ``begin`` to ``end``, those that ``prefill`` had from its own cache, from the cache server,
    from a tier behind it, from another server, and by computing."""
    if prefill is None or begin == end:
        return 0, 0, 0, 0, 0
    is_all = begin == 0 and end >= prefill.num_prompt_tokens - 1
    if prefill.num_preemptions and not is_all:
        kinds = (prefill.device, prefill.l1, prefill.l2, prefill.peer, prefill.remote_prefill, prefill.computed)
        if sum(count > 0 for count in kinds) > 1:
            return 0, 0, 0, 0, 0
    # Before each bound, how many of the tokens from `begin` to `end` there are.
    l1_at = prefill.device
    fetched_at = l1_at + prefill.l1
    remote_at = fetched_at + prefill.l2 + prefill.peer
    computed_at = remote_at + prefill.remote_prefill
    length = end - begin
    to_l1, to_fetched, to_remote, to_computed, to_end = (
        0 if bound <= begin else min(bound - begin, length)
        for bound in (l1_at, fetched_at, remote_at, computed_at, computed_at + prefill.computed)
    )
    fetched = to_remote - to_fetched
    if not prefill.peer:
        l2, peer = fetched, 0
    elif not prefill.l2:
        l2, peer = 0, fetched
    elif fetched == prefill.l2 + prefill.peer:
        l2, peer = prefill.l2, prefill.peer
    else:  # a part of both: how they lie is not told
        l2 = peer = 0
    return to_l1, to_fetched - to_l1, l2, peer, to_end - to_computed


def shown(leg: LegTokens | None) -> dict[str, object] | None:
    """A report as plain values for JSON."""
    return None if leg is None else asdict(leg)
