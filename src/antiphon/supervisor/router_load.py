"""What a router tells of itself: its engines, and the requests that wait in it, cold prompts and those of tenants.

It only asks, and takes no answer for granted: what is missing or of another shape is as if it were not told.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from antiphon.core.errors import UpstreamError
from antiphon.engine import vllm


@dataclass(frozen=True)
class ColdQueue:
    """Cold requests of a router. Bytes are of KV."""

    num_waiting: int
    """Before their prefill."""
    waiting_bytes: int
    oldest_wait_s: float
    num_held: int
    """After their prefill has answered."""
    in_flight_bytes: int
    """On their way to decode engines."""


@dataclass(frozen=True)
class TenantLoad:
    """Requests of one tenant."""

    name: str
    num_in_flight: int
    num_waiting: int


@dataclass(frozen=True)
class RoutedEngine:
    """An engine that a router knows, as it sees it."""

    role: str
    url: str
    state: str
    """``ready``, ``warming``, ``leaving``, or another word of the router's; with the reason where there is one."""
    num_in_flight: int


@dataclass(frozen=True)
class RouterLoad:
    """What a router has to do, and with which engines."""

    cold: ColdQueue | None
    """None where no request waits for its admission."""
    tenants: tuple[TenantLoad, ...]
    engines: tuple[RoutedEngine, ...] = ()
    """All of them, those that were added while it ran too."""


async def ask_router(base_url: str, *, timeout_s: float) -> RouterLoad | None:
    """Ask the router at ``base_url``; None where it does not tell within ``timeout_s``, or tells only who shows the
    admin key."""
    try:
        status, body = await vllm.http_get(f"{base_url}/status", timeout_s=timeout_s)
        return load_of(json.loads(body)) if status == 200 else None
    except (UpstreamError, ValueError):
        return None


def load_of(status: Any) -> RouterLoad | None:
    """What ``/status`` of a router says; None where it is not of that form."""
    try:
        cold, tenants = status["cold_admission"], status["tenants"] or []
        return RouterLoad(
            cold=_cold(cold) if cold["is_on"] else None,
            tenants=tuple(
                TenantLoad(str(each["name"]), int(each["num_in_flight"]), int(each["num_waiting"])) for each in tenants
            ),
            engines=tuple(_engine(each) for each in status.get("engines", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _engine(told: dict[str, Any]) -> RoutedEngine:
    state = str(told["state"])
    if told["is_warming"] or told["is_leaving"]:
        state = "warming" if told["is_warming"] else "leaving"
    elif told["cause"]:
        state = f"{state} ({told['cause']})"
    return RoutedEngine(str(told["role"]), str(told["url"]), state, int(told["active_requests"]))


def _cold(told: dict[str, Any]) -> ColdQueue:
    return ColdQueue(
        num_waiting=int(told["num_waiting"]),
        waiting_bytes=int(told["waiting_bytes"]),
        oldest_wait_s=float(told["oldest_wait_s"]),
        num_held=int(told["num_held"]),
        in_flight_bytes=sum(int(each["in_flight_bytes"]) for each in told["decodes"]),
    )
