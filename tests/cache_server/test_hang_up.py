"""A peer that hangs up before its calls are taken up: what it sent is done, but nothing is leased to nobody."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from antiphon.protocol import cache as wire
from tests.cache_server.world import ServerProcess, keys_of, namespace_of, wait_for

pytestmark = pytest.mark.process


@pytest.mark.parametrize("is_half_closed", [False, True])
def test_a_lookup_of_who_has_hung_up_leases_nothing(
    tmp_path: Path, die_with_parent: Callable[[], None], is_half_closed: bool
) -> None:
    """As a scheduler does that gives a server up which does not answer: its workers are there, and keep its leases."""
    keys = keys_of("a", 2)
    with ServerProcess(tmp_path, die_with_parent) as server:
        server.wait_populated()
        with server.connect().attach() as worker, server.connect().attach(role="scheduler", slabs=()) as scheduler:
            worker.store("a", keys)
            early = scheduler.lookup("a", keys, "early")
            assert early.lease is not None
            lookup = wire.Lookup("late", namespace_of("a"), "t", b"".join(keys))
            server.process.send_signal(signal.SIGSTOP)
            scheduler.send(lookup)
            scheduler.send(wire.Release("early", early.lease))
            if is_half_closed:
                scheduler.sock.shutdown(1)
            else:
                scheduler.close()
            server.process.send_signal(signal.SIGCONT)
            wait_for(lambda: "is gone" in server.log.read_text(), "the scheduler's end is seen")
            assert server.get("/leases")["leases"] == [], "the release was taken up, the lookup was not"
            if is_half_closed:
                answers = scheduler.at_end()
                assert wire.decode_answer(answers[4:]).body == wire.LeaseNoted(early.lease, "ended")
            assert worker.lookup("a", keys).num_tokens == 512
