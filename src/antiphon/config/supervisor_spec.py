"""The supervisor's knobs: every one once, with its unit, range and reason. Imports pydantic only."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from antiphon.config.model import SpecModel


def default_state_dir() -> str:
    """``$XDG_STATE_HOME/antiphon``, or ``~/.local/state/antiphon`` where the variable is unset or relative."""
    root = Path(os.environ.get("XDG_STATE_HOME", ""))
    return str((root if root.is_absolute() else Path("~/.local/state").expanduser()) / "antiphon")


class RestartSpec(SpecModel):
    """When a process that ended by itself is started again."""

    enabled: bool = Field(default=True, description="Start a process again when it ended by itself.")
    backoff_first_s: float = Field(
        default=1.0, gt=0, le=3600, description="Seconds before the first restart, 0 to 3600; doubles each time."
    )
    backoff_max_s: float = Field(
        default=30.0, gt=0, le=3600, description="Longest wait before a restart in seconds, 0 to 3600."
    )
    max_in_window: int = Field(
        default=5,
        ge=0,
        le=1000,
        description="Restarts of one process within window_s before the supervisor gives up on it, 0 to 1000.",
    )
    window_s: float = Field(
        default=300.0, gt=0, le=86400, description="Seconds over which restarts are counted, 0 to 86400."
    )


class SupervisorSpec(SpecModel):
    """The ``supervisor:`` section: how ``antiphon up`` starts, watches and stops the processes."""

    start_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86400,
        description="Seconds an engine may take to become ready, 0 to 86400. vLLM imports torch in three processes: "
        "minutes on a busy CPU.",
    )
    stop_grace_s: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="Seconds between SIGTERM and SIGKILL when a process is stopped, 0 to 3600.",
    )
    restart: RestartSpec = Field(
        default=RestartSpec(), description="When a process that ended by itself is started again."
    )
    state_dir: str = Field(
        default_factory=default_state_dir,
        min_length=1,
        description="Folder of the supervisor's state files (default: $XDG_STATE_HOME/antiphon, or "
        "~/.local/state/antiphon).",
    )
    log_dir: str | None = Field(
        default=None, min_length=1, description="Folder of the log files, one a process (default: STATE_DIR/NAME/logs)."
    )

    def log_dir_of(self, name: str) -> str:
        """The log folder of the deployment ``name``."""
        return self.log_dir if self.log_dir is not None else str(Path(self.state_dir) / name / "logs")
