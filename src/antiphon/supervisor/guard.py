"""The supervisor's side of the watchdog: starts it, tells it the sessions, replaces it when it dies.

Invariant: a session is told to the watchdog before its process is let go (``launch.py`` waits for that), and taken back
only when no member of it is left.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from antiphon.core.errors import StartError
from antiphon.supervisor import watchdog
from antiphon.supervisor.logs import open_log
from antiphon.supervisor.procfs import Session

START_TIMEOUT_S = 30.0
"""A Python process starts in 0.1 s; a starved host takes longer."""
REPLACEMENTS_MAX = 10
"""A watchdog that keeps dying is reported, not replaced for ever."""


class Guard:
    """One watchdog process for one supervisor."""

    def __init__(self, deployment: str, log_path: Path, on_notice: Callable[[str], None]) -> None:
        self._deployment = deployment
        self._log_path = log_path
        self._on_notice = on_notice
        self._sessions: dict[int, Session] = {}
        self._process: Process | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Pid of the watchdog, or None when it does not run."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the watchdog. Raises StartError."""
        await self._spawn()
        self._watch = asyncio.create_task(self._replace_when_dead(), name="antiphon-guard")

    async def stop(self) -> None:
        """Close the pipe: the watchdog ends what is still listed, then itself. Waits for it."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        if self._process is not None:
            self._close_pipe()
            await self._process.wait()
            self._process = None

    def add(self, session: Session) -> None:
        """List a session. Returns when the kernel has the message, so that it survives the supervisor."""
        self._sessions[session.sid] = session
        self._tell(f"add {session.sid} {session.start_ticks} {session.marker}\n")

    def drop(self, session: Session) -> None:
        """Take a session off the list: no member is left."""
        if self._sessions.pop(session.sid, None) is not None:
            self._tell(f"drop {session.sid}\n")

    def _tell(self, line: str) -> None:
        # A dead watchdog is told everything again when it is replaced.
        if self._process is not None and self._process.stdin is not None and self._process.returncode is None:
            self._process.stdin.write(line.encode())

    def _close_pipe(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def _spawn(self) -> None:
        log_fd = open_log(self._log_path)
        try:
            # fmt: off
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", watchdog.__name__,
                "--deployment", self._deployment, "--supervisor", str(os.getpid()),
                stdin=PIPE, stdout=PIPE, stderr=log_fd, start_new_session=True,
            )
            # fmt: on
        except OSError as error:
            raise StartError(f"the watchdog could not be started: {error}") from error
        finally:
            os.close(log_fd)
        for session in self._sessions.values():
            self._tell(f"add {session.sid} {session.start_ticks} {session.marker}\n")
        assert self._process.stdout is not None
        line = b""
        with suppress(TimeoutError):
            line = await asyncio.wait_for(self._process.stdout.readline(), START_TIMEOUT_S)
        if line != watchdog.READY_LINE:
            self._close_pipe()
            raise StartError(f"the watchdog did not start: see {self._log_path}")

    async def _replace_when_dead(self) -> None:
        for _ in range(REPLACEMENTS_MAX):
            assert self._process is not None
            code = await self._process.wait()
            self._on_notice(f"the watchdog ended ({code}); starting another")
            try:
                await self._spawn()
            except StartError as error:
                self._on_notice(str(error))
                return
        self._on_notice(
            "the watchdog keeps ending: if this supervisor is killed with SIGKILL, processes may stay behind"
        )
