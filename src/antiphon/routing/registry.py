"""The endpoints of both pools, what is known of their health, and the picker.

    UNKNOWN ──probe ok──▶ READY ──refused, or several failed probes──▶ DOWN ──probe ok──▶ READY

An endpoint is usable unless it is DOWN. A refused connection takes it out at once: nothing listens there. A probe that
times out or answers with an error does so only after several in a row, since a busy engine is slow, not dead.

Prefill and decode are picked by counters of their own, so that pairs mix. Events come from the caller; nothing here
waits or looks at a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

Role = Literal["prefill", "decode"]

FAILED_PROBES_MAX = 3


class EndpointState(Enum):
    """What is known of an endpoint."""

    UNKNOWN = "unknown"
    READY = "ready"
    DOWN = "down"


_DOWN = EndpointState.DOWN  # to look up a member of an Enum takes longer than to pick an endpoint


@dataclass(slots=True, eq=False)
class Endpoint:
    """One engine as the router sees it."""

    url: str
    role: Role
    state: EndpointState = EndpointState.UNKNOWN
    num_failed_probes: int = 0
    num_active: int = 0
    """Requests that this router has in flight there."""
    address: str = field(init=False)
    """``host:port``."""

    def __post_init__(self) -> None:
        self.address = self.url.removeprefix("http://")

    @property
    def is_usable(self) -> bool:
        """Whether requests may be sent there."""
        return self.state is not EndpointState.DOWN


class EndpointRegistry:
    """Both pools.

    Args:
        prefill, decode: URLs, ``http://host:port``; each at most once in its pool.
    """

    def __init__(self, prefill: Iterable[str], decode: Iterable[str]) -> None:
        self.pools: dict[Role, list[Endpoint]] = {
            "prefill": [Endpoint(url, "prefill") for url in dict.fromkeys(prefill)],
            "decode": [Endpoint(url, "decode") for url in dict.fromkeys(decode)],
        }
        self._turns: dict[Role, int] = {"prefill": 0, "decode": 0}

    def pick(self, role: Role, avoid: frozenset[Endpoint] = frozenset()) -> Endpoint | None:
        """The next usable endpoint of a pool in turn, none of ``avoid``; None if there is none."""
        pool = self.pools[role]
        index = self._turns[role]
        for _ in pool:
            endpoint = pool[index]
            index = (index + 1) % len(pool)
            if endpoint.state is not _DOWN and endpoint not in avoid:
                self._turns[role] = index
                return endpoint
        return None

    def has_usable(self, role: Role) -> bool:
        """Whether any endpoint of a pool may be picked."""
        for endpoint in self.pools[role]:  # noqa: SIM110 - any() of a generator costs more than the answer
            if endpoint.state is not _DOWN:
                return True
        return False

    def acquire(self, endpoint: Endpoint) -> None:
        """A request is about to be sent to ``endpoint``."""
        endpoint.num_active += 1

    def release(self, endpoint: Endpoint) -> None:
        """It has ended there; once for each :meth:`acquire`."""
        assert endpoint.num_active > 0, f"{endpoint.url} released more often than acquired"
        endpoint.num_active -= 1

    def connection_refused(self, endpoint: Endpoint) -> None:
        """No connection could be made."""
        endpoint.state = EndpointState.DOWN

    def probe_succeeded(self, endpoint: Endpoint) -> None:
        """A health check was answered with 200."""
        endpoint.state = EndpointState.READY
        endpoint.num_failed_probes = 0

    def probe_failed(self, endpoint: Endpoint) -> None:
        """A health check timed out or was answered with an error."""
        endpoint.num_failed_probes += 1
        if endpoint.num_failed_probes >= FAILED_PROBES_MAX:
            endpoint.state = EndpointState.DOWN

    def num_usable(self, role: Role) -> int:
        """How many endpoints of a pool may be picked."""
        return sum(endpoint.is_usable for endpoint in self.pools[role])

    def num_ready(self, role: Role) -> int:
        """How many endpoints of a pool have answered their health check."""
        return sum(endpoint.state is EndpointState.READY for endpoint in self.pools[role])

    def all(self) -> list[Endpoint]:
        """Every endpoint, prefill first."""
        return [*self.pools["prefill"], *self.pools["decode"]]

    def validate(self) -> None:
        """Assert the invariants."""
        for role, pool in self.pools.items():
            assert len({endpoint.url for endpoint in pool}) == len(pool), f"a URL is twice in {role}"
            for endpoint in pool:
                assert endpoint.role == role
                assert endpoint.num_active >= 0
                assert endpoint.num_failed_probes >= 0
                if endpoint.state is EndpointState.READY:
                    assert endpoint.num_failed_probes < FAILED_PROBES_MAX
