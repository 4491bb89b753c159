"""The truth about a deployment: the state file's claims, held against ``/proc`` and what the processes tell themselves.

A process counts as alive only when its pid has the start time that was recorded, in this boot. What cannot be learnt in
time is unknown, never down. It only reads: it signals nobody.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from antiphon.core.errors import UpstreamError
from antiphon.engine import vllm
from antiphon.protocol.state import DeploymentState, ProcessState
from antiphon.supervisor import procfs, store
from antiphon.supervisor.router_load import RouterLoad, ask_router

SCRAPE_TIMEOUT_S = 2.0
STATUS_TIMEOUT_S = 0.5
"""A cache server and a router answer from their books, without waiting for a step of a model."""
ShownState = Literal["starting", "ready", "restarting", "failed", "stopped", "dead"]


@dataclass(frozen=True)
class ProcessRow:
    """One process, as it is."""

    name: str
    role: str
    state: ShownState
    """``dead``: the supervisor believes, or believed when it ended, that it runs, and it does not."""
    pid: int | None
    port: int | None
    base_url: str
    kind: str
    uptime_s: float | None
    restarts: int
    last_exit: str | None
    log_path: str
    num_running: int | None = None
    """Requests in the running batch; None where unknown or not an engine."""
    num_waiting: int | None = None
    is_load_unknown: bool = False
    """The engine lives and did not tell its load in time; for a cache server or coordinator, what it holds or knows."""
    num_objects: int | None = None
    """Chunks that a cache server holds, or that a coordinator knows of; None where unknown or neither."""
    num_members: int | None = None
    """Cache servers that a coordinator knows; None where unknown or not a coordinator."""
    used_bytes: int | None = None
    """Bytes that they occupy."""
    total_bytes: int | None = None
    """Bytes of its memory for KV."""
    waiting: RouterLoad | None = None
    """What waits in a router; None where unknown or not a router."""
    lacks: tuple[str, ...] = ()
    """What a cache server should have and has not, for people: other servers to share with, tiers."""


@dataclass(frozen=True)
class DeploymentReport:
    """One deployment, as it is."""

    name: str
    supervisor_pid: int
    is_supervisor_alive: bool
    is_stopping: bool
    processes: tuple[ProcessRow, ...] = field(default=())
    orphan_pids: tuple[int, ...] = ()
    """Processes that still run although their supervisor, or the leader of their session, does not."""

    @property
    def is_up(self) -> bool:
        """Whether anything of it runs."""
        alive = any(row.state in ("starting", "ready", "restarting") for row in self.processes)
        return self.is_supervisor_alive or bool(self.orphan_pids) or alive

    @property
    def is_all_ready(self) -> bool:
        """Whether its supervisor lives and every process is ready."""
        rows = self.processes
        return self.is_supervisor_alive and bool(rows) and all(row.state == "ready" for row in rows)


def sessions_of(state: DeploymentState) -> list[procfs.Session]:
    """The sessions that the state file names; empty when it is of another boot."""
    if state.boot_id != procfs.boot_id():
        return []
    return [
        procfs.Session(record.pid, record.start_ticks, f"{state.name}/{record.name}/{record.incarnation}")
        for record in state.processes
        if record.pid is not None and record.start_ticks is not None
    ]


def is_supervisor_alive(state: DeploymentState) -> bool:
    """Whether the supervisor that wrote ``state`` is running, and has not stopped the deployment."""
    is_this_boot = state.boot_id == procfs.boot_id()
    return (
        is_this_boot
        and state.stopped_at is None
        and procfs.is_same_process(state.supervisor_pid, state.supervisor_start_ticks)
    )


def refuse_second(state_dir: str, name: str) -> None:
    """Raise StartError when the deployment ``name`` is already up on this host."""
    state = store.load_previous(store.deployment_dir(state_dir, name))
    if state is not None and is_supervisor_alive(state):
        raise store.already_up(name, str(state.supervisor_pid))


def running_ports(state_dir: str, name: str) -> dict[str, frozenset[int]]:
    """The ports of each process, by name, that a living supervisor of the deployment ``name`` keeps up on this host."""
    state = store.load_previous(store.deployment_dir(state_dir, name))
    if state is None or not is_supervisor_alive(state):
        return {}
    return {
        record.name: frozenset(record.ports.values())
        for record in state.processes
        if record.state in ("starting", "ready", "restarting")
    }


def _row(record: ProcessState, *, is_this_boot: bool, has_supervisor: bool, now: float) -> ProcessRow:
    is_alive = (
        is_this_boot
        and record.pid is not None
        and record.start_ticks is not None
        and procfs.is_same_process(record.pid, record.start_ticks)
    )
    shown: ShownState = record.state
    if (record.state == "ready" and not is_alive) or (
        record.state in ("starting", "restarting") and not has_supervisor
    ):
        shown = "dead"
    if record.state == "starting" and is_alive:
        shown = "starting"
    uptime_s = now - record.started_at if is_alive and record.started_at is not None else None
    return ProcessRow(
        name=record.name,
        role=record.role,
        state=shown,
        pid=record.pid if is_alive else None,
        port=record.ports.get("http"),
        base_url=record.base_url,
        kind=record.kind,
        uptime_s=uptime_s,
        restarts=record.restarts,
        last_exit=record.last_exit,
        log_path=record.log_path,
    )


def judge(state: DeploymentState) -> DeploymentReport:
    """Hold a state file against ``/proc``."""
    is_alive = is_supervisor_alive(state)
    is_this_boot = state.boot_id == procfs.boot_id()
    now = time.time()
    rows = tuple(_row(each, is_this_boot=is_this_boot, has_supervisor=is_alive, now=now) for each in state.processes)
    orphans: tuple[int, ...] = ()
    if not is_alive:
        orphans = tuple(stat.pid for stat in procfs.members(sessions_of(state)))
    return DeploymentReport(
        name=state.name,
        supervisor_pid=state.supervisor_pid,
        is_supervisor_alive=is_alive,
        is_stopping=state.is_stopping and is_alive,
        processes=rows,
        orphan_pids=orphans,
    )


async def _with_load(row: ProcessRow, timeout_s: float) -> ProcessRow:
    if row.state != "ready":
        return row
    if row.kind == "router":
        return replace(row, waiting=await ask_router(row.base_url, timeout_s=min(timeout_s, STATUS_TIMEOUT_S)))
    if row.kind == "cache_server":
        return await _with_cache(row, min(timeout_s, STATUS_TIMEOUT_S))
    if row.kind == "coordinator":
        return await _with_members(row, min(timeout_s, STATUS_TIMEOUT_S))
    try:
        metrics = await vllm.scrape_metrics(row.base_url, timeout_s=timeout_s)
    except UpstreamError:
        return replace(row, is_load_unknown=True)
    running, waiting = metrics.num_running, metrics.num_waiting
    return replace(row, num_running=running, num_waiting=waiting, is_load_unknown=running is None or waiting is None)


async def _with_cache(row: ProcessRow, timeout_s: float) -> ProcessRow:
    """``row`` with what the cache server says that it holds."""
    try:
        status, body = await vllm.http_get(f"{row.base_url}/status", timeout_s=timeout_s)
        if status != 200:
            return replace(row, is_load_unknown=True)
        told = json.loads(body)
        held = told["storage_manager"]["l1_manager"]
        lacks = tuple(_lacking(told))
        counts = [held.get(key) for key in ("total_object_count", "memory_used_bytes", "memory_total_bytes")]
    except (UpstreamError, ValueError, KeyError, TypeError, AttributeError):
        return replace(row, is_load_unknown=True)
    if not all(isinstance(count, int) for count in counts):
        return replace(row, is_load_unknown=True)
    return replace(row, num_objects=counts[0], used_bytes=counts[1], total_bytes=counts[2], lacks=lacks)


def _lacking(told: dict[str, Any]) -> Iterator[str]:
    """What a cache server's ``/status`` says that it should have and has not.

    Raises:
        KeyError, TypeError, AttributeError: it is none.
    """
    peers = told.get("peers")
    if peers is not None and not peers["is_member"]:
        yield f"shares nothing with other cache servers: {peers['reason']}"
    for tier in told["storage_manager"].get("l2_tiers", ()):
        if not tier["is_healthy"]:
            yield f"does without its tier {tier['name']}: {tier['reason']}"


async def _with_members(row: ProcessRow, timeout_s: float) -> ProcessRow:
    """``row`` with how many cache servers the coordinator says that it knows, and what they hold."""
    try:
        status, body = await vllm.http_get(f"{row.base_url}/status", timeout_s=timeout_s)
        told = json.loads(body) if status == 200 else {}
        return replace(row, num_members=len(told["members"]), num_objects=int(told["chunks"]))
    except (UpstreamError, ValueError, KeyError, TypeError, AttributeError):
        return replace(row, is_load_unknown=True)


async def with_load(report: DeploymentReport, *, timeout_s: float = SCRAPE_TIMEOUT_S) -> DeploymentReport:
    """The same report with what each ready process tells within ``timeout_s``; all are asked at once.

    A cache server and a router have 0.5 s at most.
    """
    rows = await asyncio.gather(*(_with_load(row, timeout_s) for row in report.processes))
    return replace(report, processes=tuple(rows))
