"""A watchdog that is no child of the replica: Ray kills the children of a worker that it ends, watchdogs among them.

The program of this module forks once and ends; what it has forked is the supervisor's watchdog, with the replica's pipe
as its standard input. Invariants are those of ``Guard``: a session is told before its process runs, and taken back when
no member of it is left.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from antiphon.core.errors import StartError
from antiphon.supervisor import watchdog
from antiphon.supervisor.guard import START_TIMEOUT_S, Guard, add_line
from antiphon.supervisor.logs import open_log
from antiphon.supervisor.watchdog import KILL_DEADLINE_S


class DetachedGuard(Guard):
    """As :class:`Guard`, with a watchdog that does not die with the children of this process. One that dies all the
    same is replaced when a session is told."""

    def __init__(self, deployment: str, log_path: Path, on_notice: Callable[[str], None]) -> None:
        super().__init__(deployment, log_path, on_notice)
        self._write_fd: int | None = None
        self._read_fd: int | None = None

    @property
    def pid(self) -> int | None:
        """Not known here: it is no child."""
        return None

    async def start(self) -> None:
        """Start the watchdog. Raises StartError."""
        await asyncio.to_thread(self._start)

    async def stop(self) -> None:
        """Close the pipe: the watchdog ends what is still listed, then itself. Waits for it."""
        await asyncio.to_thread(self._stop)

    def _tell(self, line: str) -> None:
        if self._write_fd is None:
            return
        try:
            os.write(self._write_fd, line.encode())
        except BrokenPipeError:
            self._on_notice("the watchdog has ended; starting another")
            self._close()
            self._start()  # it is told everything

    def _start(self) -> None:
        stdin, self._write_fd = os.pipe()
        self._read_fd, stdout = os.pipe()
        try:
            log_fd = open_log(self._log_path)
            command = [
                sys.executable,
                "-P",
                __file__,  # as a program by itself: the package around it would be loaded for as long as it waits
                "--deployment",
                self._deployment,
                "--supervisor",
                str(os.getpid()),
            ]
            try:
                # It ends at once: the watchdog is its child, and then nobody's.
                subprocess.run(
                    command,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=log_fd,
                    start_new_session=True,
                    timeout=START_TIMEOUT_S,
                    check=True,
                )
            finally:
                os.close(log_fd)
        except (OSError, subprocess.SubprocessError) as error:
            self._close()
            raise StartError(f"the watchdog could not be started: {error}", remedy=f"read {self._log_path}") from error
        finally:
            os.close(stdin)
            os.close(stdout)
        if self._hear(START_TIMEOUT_S) != watchdog.READY_LINE:
            self._close()
            raise StartError("the watchdog did not start", remedy=f"read {self._log_path}")
        for session in self._sessions.values():
            os.write(self._write_fd, add_line(session).encode())

    def _stop(self) -> None:
        if self._write_fd is None:
            return
        os.close(self._write_fd)
        self._write_fd = None
        self._hear(KILL_DEADLINE_S + watchdog.TERM_GRACE_S)
        self._close()

    def _hear(self, timeout_s: float) -> bytes | None:
        """What the watchdog writes, empty at its end; None where it does neither in time."""
        assert self._read_fd is not None
        readable, _, _ = select.select([self._read_fd], [], [], timeout_s)
        return os.read(self._read_fd, 64) if readable else None

    def _close(self) -> None:
        for fd in (self._write_fd, self._read_fd):
            if fd is not None:
                os.close(fd)
        self._write_fd = self._read_fd = None


def main() -> int:
    """Fork, and be the watchdog in the child."""
    if os.fork():
        return 0
    return watchdog.main()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
