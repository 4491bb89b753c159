"""Threads that give way: those that serve engines, and the one that moves bytes, go on when these wake up.

Where there are fewer processors than threads that want one, a thread that wakes up takes a processor from one that is
at work. A batch thread (``SCHED_BATCH``, sched(7)) waits until one is free, or until its turn has come: it gets as much
of them as before, in fewer pieces.
"""

from __future__ import annotations

import logging
import os
import threading

log = logging.getLogger("antiphon.cache_server")


def give_way() -> None:
    """This thread gives way from here on, where the system knows of that."""
    try:
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError) as error:  # not Linux, or not allowed to this process
        log.debug("threads do not give way: %s", error)
