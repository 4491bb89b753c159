"""A client of a cache server as a process: ``python -m tests.process.cache_traffic ROLE SOCKET PID``.

It says ``ready``, works until its standard input ends, then prints what it saw as JSON: ``samples``, for each call when
it began (``time.monotonic``) and the seconds that it took, without those for which this process and the main thread of
the server (``PID``) were ready and had no processor; ``hits``, the times at which chunks came from a tier; ``errors``.

Roles: ``hot`` looks up what is in memory; ``cold`` looks up what its quota has evicted, and stores again what is
nowhere, as an engine that computes it; ``new`` stores what nobody has seen. ``shared`` stores under names made of the
time, and ``pull``, elsewhere on this machine, looks up what was stored so half a second ago.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable
from typing import Any

from antiphon.protocol import cache as wire
from tests.cache_server.world import SLAB_BYTES, Client, keys_of, namespace_of

CHUNKS = 4
"""Of a prompt."""
COLD_PROMPTS = 10
"""More than the quota of a megabyte holds."""
ONBOARD_S = 0.5
PERIODS_S = {"hot": 0.008, "cold": 0.02, "new": 0.05, "shared": 0.05, "pull": 0.05}
BEHIND = 10
"""Periods that ``pull`` is behind ``shared``."""
ERRORS_MAX = 20


class Traffic:
    """What one client does.

    Args:
        role: of it, and its tenant.
        client: attached.
    """

    def __init__(self, role: str, client: Client) -> None:
        self._role = role
        self._tenant = "shared" if role == "pull" else role
        self._client = client
        self._number = 0
        self.samples: list[tuple[float, float]] = []
        self.hits: list[float] = []
        self.errors: list[str] = []
        self.step: Callable[[], object] = {
            "hot": self._hot,
            "cold": self._cold,
            "new": self._new,
            "shared": lambda: self._store(f"shared{now_number()}"),
            "pull": lambda: self._lookup(f"shared{now_number() - BEHIND}"),
        }[role]

    def prepare(self) -> None:
        """What must be there before the first step."""
        for number in range({"hot": 1, "cold": COLD_PROMPTS}.get(self._role, 0)):
            self._store(f"{self._role}{number}")

    def note(self, problem: str) -> None:
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(problem)

    def _store(self, name: str) -> None:
        """Stores the chunks that are not there, each wholly filled with bytes of its key."""
        keys, client = keys_of(name, CHUNKS), self._client
        reserved = client.reserve(name, keys, self._tenant)
        for grant in reserved.grants:
            client.write(grant.region, keys[grant.index] * (SLAB_BYTES // 32))
        if reserved.grants:
            regions = tuple(grant.region for grant in reserved.grants)
            outcomes = client.call(wire.Commit(regions), wire.Committed).outcomes
            if set(outcomes) != {"readable"}:
                self.note(f"a commit of {name} came to {outcomes}")

    def _lookup(self, name: str) -> tuple[int, bool]:
        """Chunks found, and whether the server said first that it looks elsewhere."""
        client, keys = self._client, keys_of(name, CHUNKS)
        call_id = client.send(wire.Lookup("r", namespace_of(name), self._tenant, b"".join(keys), ONBOARD_S))
        answer = client.receive()
        is_elsewhere = isinstance(answer.body, wire.Onboarding)
        if is_elsewhere:
            answer = client.receive()
        found = answer.body
        if answer.id != call_id or not isinstance(found, wire.Found):
            self.note(f"a lookup of {name} came to {answer}")
            return 0, is_elsewhere
        for region, key in zip(found.regions, keys, strict=False):
            if client.read(region, SLAB_BYTES) != key * (SLAB_BYTES // 32):
                self.note(f"a chunk of {name} has wrong bytes")
        if found.fetched:
            self.hits.append(time.monotonic())
        client.release(found)
        return len(found.regions), is_elsewhere

    def _hot(self) -> None:
        found, is_elsewhere = self._lookup("hot0")
        if found != CHUNKS or is_elsewhere:
            self.note(f"{found} chunks of {CHUNKS} are in memory")

    def _cold(self) -> None:
        name = f"cold{self._number % COLD_PROMPTS}"
        self._number += 1
        if self._lookup(name)[0] < CHUNKS:
            self._store(name)

    def _new(self) -> None:
        self._number += 1
        self._store(f"new{self._number}")


def now_number() -> int:
    """Of the present period, the same in all processes of the machine."""
    return int(time.monotonic() / PERIODS_S["shared"])


class Processors:
    """What the kernel says of how long threads were ready and had no processor.

    Args:
        pids: of the threads.
    """

    def __init__(self, *pids: int) -> None:
        self._files = [os.open(f"/proc/{pid}/schedstat", os.O_RDONLY | os.O_CLOEXEC) for pid in pids]

    def waited_s(self) -> float:
        """Of all together, since their start."""
        return sum(int(os.pread(file, 100, 0).split()[1]) for file in self._files) / 1e9


def run(traffic: Traffic, period_s: float, processors: Processors) -> None:
    """Steps, one each period, until the input ends. One that was late is followed by the next at once."""
    due_s = time.monotonic()
    while not select.select([sys.stdin], [], [], max(0.0, due_s - time.monotonic()))[0]:
        waited_s, began_s = processors.waited_s(), time.monotonic()
        traffic.step()
        took_s, waited_s = time.monotonic() - began_s, processors.waited_s() - waited_s
        traffic.samples.append((began_s, max(0.0, took_s - waited_s)))
        due_s += period_s


def main(role: str, address: str, pid: str) -> None:
    """Until the input ends."""
    with Client(address).hello().attach(engine=role) as client:
        traffic = Traffic(role, client)
        traffic.prepare()
        print("ready", flush=True)
        try:
            run(traffic, PERIODS_S[role], Processors(os.getpid(), int(pid)))
        except (AssertionError, OSError) as error:
            traffic.note(repr(error))
    said: dict[str, Any] = {"samples": traffic.samples, "hits": traffic.hits, "errors": traffic.errors}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
