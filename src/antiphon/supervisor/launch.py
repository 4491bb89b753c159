"""The first program of every child: ties its life to the supervisor, waits to be let go, then becomes the real one.

Run as a script, by path and without site-packages, so that it costs some 20 ms. It does what must happen between fork
and exec without running Python in a forked copy of the supervisor (unsafe when there are threads):

- asks the kernel for SIGKILL when the supervisor's thread that started it ends (``PR_SET_PDEATHSIG``);
- waits for one byte on standard input, which the supervisor sends once the watchdog knows this session, so that there
  is no moment in which a supervisor killed with SIGKILL leaves a process that nobody looks for;
- makes standard input ``/dev/null``, resets signals, and execs: the pid stays the same.

Standard library only; imports nothing of Antiphon.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

EXIT_CANNOT_EXECUTE = 127
EXIT_SUPERVISOR_GONE = 126
_PR_SET_PDEATHSIG = 1


def main(args: list[str]) -> int:
    """``launch.py SUPERVISOR_PID PROGRAM [ARG]...``; returns only when it could not exec."""
    supervisor_pid, program = int(args[0]), args[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.stderr.write(f"antiphon: prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}\n")
        return EXIT_CANNOT_EXECUTE
    # The supervisor may have died before the request above; the end of file of the gate says so as well.
    if os.getppid() != supervisor_pid or os.read(0, 1) != b"g":
        return EXIT_SUPERVISOR_GONE
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.stderr.write(f"antiphon: cannot execute {program[0]}: {error.strerror}\n")
    return EXIT_CANNOT_EXECUTE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
