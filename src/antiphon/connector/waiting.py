"""A vLLM plug-in that lets vLLM's processes rest while they wait for each other, instead of yielding in a loop.

vLLM's engine core and its worker exchange messages through shared memory; who waits calls ``sched_yield`` in a tight
loop for a second before it sleeps. On a machine with a core for each process that saves microseconds. On a small CPU
machine these loops take the cores from the model, from the thread that answers NIXL handshakes and from NIXL itself:
hand-overs were seen to take, now and then, until the prefill engine's lease ended. A short sleep adds a fraction of a
millisecond to a step that takes tens of them.

In force where ``ANTIPHON_SPIN_WAIT`` is ``0``, which the compiler sets for CPU engines; otherwise nothing is touched.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from typing import Any

VARIABLE = "ANTIPHON_SPIN_WAIT"
REST_S = 0.0001
"""Long enough to leave the core, short beside a step."""

log = logging.getLogger("antiphon.connector")


def _rest() -> None:
    time.sleep(REST_S)


def install() -> None:
    """Do what the environment asks for; says so in the log when it cannot."""
    if os.environ.get(VARIABLE) != "0":
        return
    modules: tuple[Any, ...]
    try:
        modules = (
            importlib.import_module("vllm.distributed.utils"),
            importlib.import_module("vllm.distributed.device_communicators.shm_broadcast"),
        )
    except ImportError as error:
        log.warning("%s is set, but this vLLM is another one: %s", VARIABLE, error)
        return
    for module in modules:
        if callable(getattr(module, "sched_yield", None)):
            vars(module)["sched_yield"] = _rest
        else:
            log.warning(
                "%s.sched_yield is not there in this vLLM: its processes go on yielding in a loop", module.__name__
            )
