"""Threads that give way: only where the system knows of it, and only the thread that asks."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from antiphon.cache_server.giving_way import give_way


def policy() -> int:
    return os.sched_getscheduler(threading.get_native_id())


def test_the_thread_gives_way_and_no_other() -> None:
    before = policy()
    with ThreadPoolExecutor(1, initializer=give_way) as pool:
        assert pool.submit(policy).result() == os.SCHED_BATCH
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(policy).result() == before
    assert policy() == before


@pytest.mark.parametrize("error", [PermissionError("not here"), AttributeError("not Linux")])
def test_a_system_that_does_not_know_of_it_is_no_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "sched_setscheduler", refuses)
    with ThreadPoolExecutor(1, initializer=give_way) as pool:
        assert pool.submit(policy).result() != os.SCHED_BATCH
