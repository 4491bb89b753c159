"""What cold-transfer admission is told and what it answers: the item of a request, the answers, the options, the
statistics. ``admission.ColdAdmission`` alone changes an item."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from antiphon.routing.endpoint import Endpoint

RefusalCode = Literal["cold_queue_full", "cold_queue_timeout"]

REFUSALS: tuple[RefusalCode, ...] = ("cold_queue_full", "cold_queue_timeout")


class ColdStage(Enum):
    """Where an item is."""

    __hash__ = object.__hash__

    NEW = "new"
    """Not offered yet."""
    WAITING = "waiting"
    """In the queue before its prefill; nothing is sent."""
    PREFILLING = "prefilling"
    """Admitted: its prefill may be sent, or runs."""
    HELD = "held"
    """Its prefill has answered, and the transfers to its decode engine are as many as may be. The lease runs."""
    PULLING = "pulling"
    """Its decode request may be sent, or its KV is being pulled."""
    GONE = "gone"
    """Pulled, refused or left: nothing is counted for it any more."""


class Admit:
    """Go on.

    Args:
        is_overdue: only because a third of the lease is over; the budget was used up.
    """

    __slots__ = ("is_overdue",)

    def __init__(self, is_overdue: bool = False) -> None:
        self.is_overdue = is_overdue


class Wait:
    """Do nothing until :meth:`ColdAdmission.tick` names the item.

    Args:
        until_s: it does by this time.
    """

    __slots__ = ("until_s",)

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s


class Refuse:
    """Tell the client to come back.

    Args:
        status: 429 where the queue is full, 503 where the wait was in vain.
        retry_after_s: whole seconds, 1 and up.
        code: why.
    """

    __slots__ = ("code", "retry_after_s", "status")

    def __init__(self, status: int, retry_after_s: int, code: RefusalCode) -> None:
        self.status = status
        self.retry_after_s = retry_after_s
        self.code = code


Answer = Admit | Wait | Refuse


class ColdItem:
    """One request, as admission sees it.

    Args:
        num_uncached_tokens: of the prompt, that the prefill engine is expected to compute.
        num_pull_tokens: of the prompt, that the decode engine is expected to pull; those that it holds are not.
        num_body_bytes: of the request's body, which is kept while it waits.
        tag: of the shell, to find the request by; forgotten when the item is gone.
    """

    # What most items never change is a value of the class.
    answer: Answer | None
    """The last one that was given for it."""
    is_cold = False
    """Whether it is bounded: at least ``warm_bytes`` are to be computed."""
    is_on_lane = False
    """Whether a prefill engine is counted as having it."""
    is_told = True
    """Whether the shell will tell when its KV is pulled. It cannot where the answer is not a stream: the transfer is
    taken to be over when it should be."""
    uncached_bytes = 0
    pull_bytes = 0
    order = 0.0
    """Its place in the queue, in seconds on the clock of the calls: least first."""
    offered_s = 0.0
    prefill: Endpoint | None = None
    decode: Endpoint | None = None
    held_until_s = 0.0
    """A third of a lease after its prefill's answer; 0: it has not answered."""
    pull_began_s = 0.0
    pulled_by_s = 0.0
    """When its transfer should be over."""
    share_began_s = 0.0
    """What ``links.SharedTime`` of the decode engine was then."""

    def __init__(
        self, num_uncached_tokens: int, num_pull_tokens: int, num_body_bytes: int = 0, tag: object = None
    ) -> None:
        assert num_uncached_tokens >= 0 and num_pull_tokens >= 0 and num_body_bytes >= 0
        self.stage = ColdStage.NEW
        self.answer = None  # no default of the class: mypyc leaves one of a union of four unset
        self.num_uncached_tokens = num_uncached_tokens
        self.num_pull_tokens = num_pull_tokens
        self.num_body_bytes = num_body_bytes
        self.tag = tag


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """Bounds of cold-transfer admission.

    Args:
        kv_bytes_per_token: of the model, over all layers and all ranks; 0: not known, and admission is off.
        warm_bytes: a request with fewer uncached bytes is warm and never waits before its prefill; a transfer of fewer
            bytes never waits after it.
        lane_share: the part of the prefill engines that cold prompts may always have, one engine at least.
        lane_share_max: the part that they may have where warm requests do not need it.
        lane_window_s: for how long, up to twice, it is kept in mind what warm requests needed.
        cold_per_engine: cold prompts on an engine of the lane at once.
        lease_s: how long a prefill engine holds blocks for a decode engine.
        queue_max: requests that wait before their prefill.
        queue_max_bytes: of their bodies.
        queue_s: the longest wait before the prefill.
        ageing_s: the most that a request waits for others that came later and are nearer to warm.
        ageing_bytes: uncached bytes from which it is that much; less in proportion.
        rate_bytes_s: of a pair of which nothing is measured yet.
        rate_min_bytes_s: a pair is never taken to be slower.
        sample_min_bytes: a shorter transfer says nothing of the rate: it is mostly latency.
    """

    kv_bytes_per_token: int = 0
    warm_bytes: int = 256 << 20
    lane_share: float = 0.25
    lane_share_max: float = 0.75
    lane_window_s: float = 30.0
    cold_per_engine: int = 1
    lease_s: float = 30.0
    queue_max: int = 256
    queue_max_bytes: int = 256 << 20
    queue_s: float = 60.0
    ageing_s: float = 10.0
    ageing_bytes: int = 8 << 30
    rate_bytes_s: float = 1e9
    rate_min_bytes_s: float = 50e6
    sample_min_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        assert self.kv_bytes_per_token >= 0 and self.warm_bytes > 0 and self.ageing_bytes > 0
        assert 0 < self.lane_share <= self.lane_share_max <= 1 and self.lane_window_s > 0
        assert self.cold_per_engine >= 1 and self.lease_s > 0
        assert self.queue_max >= 0 and self.queue_max_bytes >= 0 and self.queue_s >= 0 and self.ageing_s >= 0
        assert self.rate_bytes_s >= self.rate_min_bytes_s > 0 and self.sample_min_bytes >= 1

    @property
    def hold_s(self) -> float:
        """How long a request waits at most after its prefill has answered, and what a budget is a rate of."""
        return self.lease_s / 3


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Transfers of one decode engine. Bytes, and bytes a second.

    Args:
        in_flight_bytes: being pulled, or about to be.
        budget_bytes: more than this is not begun for cold transfers.
        num_held: requests whose prefill has answered and which wait for it.
        free_kv_bytes: as last told, less what was begun since; None: not known.
    """

    url: str
    in_flight_bytes: int
    budget_bytes: int
    num_held: int
    free_kv_bytes: int | None
    rate_bytes_s: float


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """What ``/status``, ``/metrics`` and ``antiphon status`` show.

    Args:
        is_on: False where the KV bytes of a token are not known: every request is admitted at once.
        why_off: the reason in words, empty where it is on.
        num_waiting, waiting_bytes, waiting_body_bytes, oldest_wait_s: the queue before the prefill.
        num_held: requests that wait after their prefill has answered.
        num_cold, cold_max: cold prompts on the prefill engines now, and at most at present.
        num_warm: warm ones.
        committed_bytes: KV of cold requests that are admitted and not pulled yet.
        budget_bytes: of the decode pool as a whole; None: nothing is known of it.
        counts: decisions by reason, ever: ``admitted_warm``, ``admitted_at_once``, ``admitted_from_queue``,
            ``admitted_off``, ``refused_cold_queue_full``, ``refused_cold_queue_timeout``, ``left_waiting``, ``held``,
            ``held_overdue``.
        drain_bytes_s: uncached bytes a second that leave the queue; 0: not known yet.
        retry_after_s: what a request that is refused now would be told.
        lane: URLs of the prefill engines that cold prompts are kept to.
        decodes: one of each decode engine.
        rates: measured rate of each pair that has one, by URLs of the prefill and the decode engine.
    """

    is_on: bool
    why_off: str
    num_waiting: int
    waiting_bytes: int
    waiting_body_bytes: int
    oldest_wait_s: float
    num_held: int
    num_cold: int
    cold_max: int
    num_warm: int
    committed_bytes: int
    budget_bytes: int | None
    counts: dict[str, int]
    drain_bytes_s: float
    retry_after_s: int
    lane: list[str] = field(default_factory=list)
    decodes: list[DecodeLoad] = field(default_factory=list)
    rates: dict[tuple[str, str], float] = field(default_factory=dict)
