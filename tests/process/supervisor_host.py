"""Runs a supervisor as ``antiphon up`` does, on the plans of a JSON document (first argument). Run by path.

The document's ``dropped_mark`` names a file that is made when the console has dropped a line. Exit code 0 after a
requested stop, 1 when something did not start. Dies with the test.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import sys

from antiphon.config.plan import ProcessPlan
from antiphon.config.supervisor_spec import SupervisorSpec
from antiphon.core.errors import StartError
from antiphon.supervisor.console import Console
from antiphon.supervisor.supervisor import StartCancelled, Supervisor


class MarkedConsole(Console):
    """Makes a file when a line is dropped."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self._mark = mark

    def log_line(self, name: str, line: str) -> None:
        super().log_line(name, line)
        if self._mark and self.statistics()["num_dropped"]:
            open(self._mark, "wb").close()
            self._mark = ""


async def serve(supervisor: Supervisor, console: Console) -> int:
    undo = supervisor.handle_signals()
    try:
        await supervisor.start()
        console.plain("ALL READY")
        await supervisor.run_until_stopped()
    except StartCancelled:
        return 0
    except StartError as error:
        console.plain(str(error))
        return 1
    finally:
        undo()
    return 0


def main() -> int:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    document = json.loads(sys.argv[1])
    plans = [ProcessPlan(**{**plan, "argv": tuple(plan["argv"])}) for plan in document["plans"]]
    console = MarkedConsole(document["dropped_mark"])
    try:
        return asyncio.run(
            serve(Supervisor(plans, SupervisorSpec(**document["spec"]), document["name"], console), console)
        )
    finally:
        console.close()


if __name__ == "__main__":
    sys.exit(main())
