"""A vLLM plug-in that lets an engine's own steps drive NIXL, instead of a thread that polls without a pause.

vLLM starts every NIXL agent with NIXL's progress thread on, and NIXL's Python binding sets the pause between two polls
to zero, with no option to change it: an idle engine burns a whole core. On a CPU machine that is the core that the
model should run on.

Without the thread an agent makes progress when it is polled, and vLLM polls in each step: a decode engine steps while a
request waits for its KV, a prefill engine while a request of its own waits to be pulled. Calls from vLLM's handshake
thread then need NIXL's strict locking, which is switched on together.

In force where ``ANTIPHON_NIXL_PROGRESS_THREAD`` is ``0``, which the compiler sets for CPU engines; otherwise nothing is
touched. Imports nothing but NIXL, and that only when it is in force.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

VARIABLE = "ANTIPHON_NIXL_PROGRESS_THREAD"

log = logging.getLogger("antiphon.connector")


class _Bindings:
    """NIXL's bindings, with every agent created without a progress thread."""

    def __init__(self, bindings: Any, strict_sync: Any) -> None:
        self._bindings = bindings
        self._strict_sync = strict_sync

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802 - the name that NIXL's own module uses
        config.useProgThread = False
        config.syncMode = self._strict_sync
        return self._bindings.nixlAgent(name, config)


def install() -> None:
    """Do what the environment asks for; says so in the log when it cannot."""
    if os.environ.get(VARIABLE) != "0":
        return
    api: Any
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        log.warning("%s is set, but NIXL cannot be imported: %s", VARIABLE, error)
        return
    bindings = getattr(api, "nixlBind", None)
    modes = getattr(api, "nixl_thread_sync_t", None)
    if bindings is None or modes is None or not hasattr(bindings, "nixlAgent"):
        log.warning("this NIXL has another Python binding: its progress thread stays on")
        return
    if not isinstance(bindings, _Bindings):
        api.nixlBind = _Bindings(bindings, modes.NIXL_THREAD_SYNC_STRICT.value)
