"""The state file of a deployment: what the supervisor tells ``antiphon status`` and ``antiphon down``.

The file is a claim, written by a supervisor that may be dead since. A reader believes a pid only when ``boot_id`` is
this boot and the start time in ``/proc`` is equal (``antiphon.supervisor.report``).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from antiphon.core.errors import ProtocolError

STATE_VERSION = 1

ProcessPhase = Literal["starting", "ready", "restarting", "failed", "stopped"]


class ProcessState(msgspec.Struct, kw_only=True):
    """One process, as the supervisor knew it when it wrote the file. Times are Unix seconds."""

    name: str
    role: str
    kind: str
    state: ProcessPhase
    pid: int | None = None
    """The pid of the process and id of its session; None between two lives."""
    start_ticks: int | None = None
    """Start time from ``/proc/PID/stat``, clock ticks since boot."""
    incarnation: str = ""
    ports: dict[str, int] = {}
    base_url: str = ""
    started_at: float | None = None
    ready_at: float | None = None
    restarts: int = 0
    last_exit: str | None = None
    log_path: str = ""


class DeploymentState(msgspec.Struct, kw_only=True):
    """One deployment on one host."""

    version: int = STATE_VERSION
    name: str
    boot_id: str
    supervisor_pid: int
    supervisor_start_ticks: int
    started_at: float
    stop_grace_s: float
    """Longest that one step of a stop takes before SIGKILL; ``antiphon down`` derives its deadline from it."""
    is_stopping: bool = False
    stopped_at: float | None = None
    """Set once everything has been stopped: the supervisor's process may live on (the demo), its children do not."""
    processes: list[ProcessState] = []


def encode_state(state: DeploymentState) -> bytes:
    """The file's content: JSON, indented, so that a person can read it."""
    return msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n"


def decode_state(raw: bytes) -> DeploymentState:
    """Read the file's content. Raises ProtocolError when it is not a state file of this version."""
    try:
        state = msgspec.json.decode(raw, type=DeploymentState)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a state file of Antiphon: {error}") from error
    if state.version != STATE_VERSION:
        raise ProtocolError(
            f"the state file has version {state.version}; this Antiphon reads version {STATE_VERSION}",
            remedy="use the Antiphon that started the deployment",
        )
    return state


def to_builtins(value: object) -> object:
    """A state (or a part of one) as dicts and lists, for printing as JSON."""
    return msgspec.to_builtins(value)
