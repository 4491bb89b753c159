"""The supervisor's side of the watchdog: starts it, tells it the sessions, replaces it when it dies.

Invariants: a session is told to the watchdog before its process is let go (``launch.py`` waits for that), and taken
back only when no member of it is left. A watchdog that is given up on is killed before its pipe is closed: one that
became ready later would take the end of file for the end of the supervisor.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
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
START_ATTEMPTS = 3
"""A watchdog that does not start so often refuses the start of the supervisor."""
RETRY_FIRST_S = 1.0
"""Before the second attempt; doubles with each further one."""
RETRY_MAX_S = 60.0
"""Longest wait between two attempts to replace a watchdog; one that lived longer begins again without a wait."""
KILLED_TIMEOUT_S = 10.0
"""A process in an uninterruptible wait can outlive SIGKILL; it runs no code of its own any more."""
STOP_TIMEOUT_S = watchdog.TERM_GRACE_S + watchdog.KILL_DEADLINE_S + 5.0
"""For a watchdog that has to end what is listed."""


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
        for attempt in range(START_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_delay_s(attempt))
            if await self._spawn():
                break
        else:
            raise StartError(f"the watchdog did not start: see {self._log_path}")
        self._watch = asyncio.create_task(self._replace_when_dead(), name="antiphon-guard")

    async def stop(self) -> None:
        """Close the pipe: the watchdog ends what is still listed, then itself. Waits for it, and kills one that does
        not end in time."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        process = self._process
        if process is not None:
            self._close_pipe()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await _ended(process)
                self._process = None
            except TimeoutError:
                self._on_notice(f"the watchdog did not end within {STOP_TIMEOUT_S:g} s, and is killed")
                await self._discard(process)

    def add(self, session: Session) -> None:
        """List a session. Returns when the kernel has the message, so that it survives the supervisor."""
        self._sessions[session.sid] = session
        self._tell(add_line(session))

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

    async def _spawn(self) -> bool:
        """Start a process and tell it every session; False when it was not ready in time, and has been killed.

        Raises StartError when it cannot be started at all.
        """
        try:
            log_fd = open_log(self._log_path)
        except OSError as error:
            raise StartError(
                f"the watchdog's log {self._log_path} cannot be written: {error.strerror}",
                field="supervisor.log_dir",
                remedy="choose a folder that this user can write",
            ) from error
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
            self._tell(add_line(session))
        assert self._process.stdout is not None
        line = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await self._process.stdout.readline()
        if line == watchdog.READY_LINE:
            return True
        await self._discard(self._process)
        return False

    async def _discard(self, process: Process) -> None:
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(KILLED_TIMEOUT_S):
                await _ended(process)
        self._close_pipe()
        self._process = None

    async def _replace_when_dead(self) -> None:
        """Until cancelled: wait for the end of the watchdog and start another, with ever longer waits in between."""
        num_failed = 0
        while True:
            assert self._process is not None
            started_s = time.monotonic()
            code = await self._process.wait()
            if time.monotonic() - started_s > RETRY_MAX_S:
                num_failed = 0
            why = f"the watchdog ended ({code})"
            while True:
                if num_failed:
                    delay_s = _delay_s(num_failed)
                    self._on_notice(
                        f"{why}; trying again in {delay_s:g} s: until one runs, processes may stay behind if this "
                        "supervisor is killed with SIGKILL"
                    )
                    await asyncio.sleep(delay_s)
                else:
                    self._on_notice(f"{why}; starting another")
                num_failed += 1
                try:
                    if await self._spawn():
                        break
                    why = f"the watchdog did not start (see {self._log_path})"
                except StartError as error:
                    why = error.message


async def _ended(process: Process) -> None:
    """Waits until it has ended, and its pipe with it: asyncio closes the rest only then, and complains of what is left
    when the loop ends."""
    await process.wait()
    assert process.stdout is not None
    with suppress(TimeoutError):
        async with asyncio.timeout(KILLED_TIMEOUT_S):
            await process.stdout.read()


def add_line(session: Session) -> str:
    """The line of the watchdog's pipe that lists ``session``."""
    return f"add {session.sid} {session.start_ticks} {session.marker}\n"


def _delay_s(num_failed: int) -> float:
    return min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(num_failed - 1, 16))
