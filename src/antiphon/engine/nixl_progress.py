"""A vLLM plug-in that lets NIXL's progress thread rest between polls.

vLLM starts every NIXL agent with its progress thread on, and NIXL's Python binding sets the pause between two polls of
that thread to zero, with no option to change it: an idle engine burns a whole core. On a CPU machine that core is the
one that the model should run on. This module sets the pause from ``ANTIPHON_NIXL_PROGRESS_DELAY_US`` (microseconds).
The compiler sets the variable for CPU engines; without it nothing is touched. A transfer may start and end one pause
later.

Loaded by vLLM in each of its processes through the entry point group ``vllm.general_plugins``; may be called more than
once. Imports nothing but NIXL, and that only when the variable is set.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

DELAY_VARIABLE = "ANTIPHON_NIXL_PROGRESS_DELAY_US"
DELAY_MAX_US = 1_000_000

log = logging.getLogger("antiphon.engine")


class _Bindings:
    """NIXL's bindings, with every agent created at the wanted pause."""

    def __init__(self, bindings: Any, delay_us: int) -> None:
        self._bindings = bindings
        self._delay_us = delay_us

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802 - the name that NIXL's own module uses
        config.pthrDelay = self._delay_us
        return self._bindings.nixlAgent(name, config)


def install() -> None:
    """Apply the pause that the environment asks for; says so in the log, and says when it cannot."""
    text = os.environ.get(DELAY_VARIABLE)
    if text is None:
        return
    if not text.isdigit() or int(text) > DELAY_MAX_US:
        log.warning("%s=%r is not a number of microseconds up to %d: ignored", DELAY_VARIABLE, text, DELAY_MAX_US)
        return
    api: Any
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        log.warning("%s is set, but NIXL cannot be imported: %s", DELAY_VARIABLE, error)
        return
    bindings = getattr(api, "nixlBind", None)
    if bindings is None or not hasattr(bindings, "nixlAgent"):
        log.warning("this NIXL has no nixlBind.nixlAgent: its progress thread keeps polling without a pause")
        return
    if not isinstance(bindings, _Bindings):
        api.nixlBind = _Bindings(bindings, int(text))
