"""Other interpreters of this host: what identifies one, and a short question to it with a limit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

PROBE_TIMEOUT_S = 20.0
"""An idle host answers in a tenth of a second; a swapping one may take this long."""
InterpreterKey = tuple[str, str]
"""An interpreter and the PYTHONPATH that it is given: together they decide what it can import."""


def run_python(
    key: InterpreterKey, code: str, arguments: Sequence[str] = (), *, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in the interpreter of ``key``. Raises OSError and subprocess.TimeoutExpired."""
    python, pythonpath = key
    env = {**os.environ, "PYTHONPATH": pythonpath} if pythonpath else dict(os.environ)
    return subprocess.run(
        [python, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=env,
        check=False,
    )


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that a child wrote to stderr: of a traceback, the error."""
    return (done.stderr.strip().splitlines() or ["no message"])[-1]
