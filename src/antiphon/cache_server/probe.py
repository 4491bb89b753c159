"""The self-probe behind ``/healthz``: one chunk goes the way that an engine's KV goes.

Over the server's own unix socket: Hello, which gives the arena; Attach; Reserve, write through the mapping, Commit;
Lookup, read back and compare; Release; Clear. The connection is kept for the next probe and made again after an error.

Always true:

- One probe runs at a time; who asks meanwhile gets its result, and who asks soon after gets it too.
- A probe ends within ``PROBE_TIMEOUT_S``, whatever the server does.
- What a probe leaves in the books is known here (``ProbeTally``), so that status and metrics show engines only.

A chunk of the probe takes a hole of the arena. Where there is none, room is made as for any chunk: one chunk may go,
which the next store would have made go, and whose room is there for that store when the probe has ended. Having no room
is no ill health.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Final

from antiphon import __version__
from antiphon.cache_server.probe_connection import ProbeConnection
from antiphon.core.errors import AntiphonError, CacheError
from antiphon.protocol import cache as wire
from antiphon.protocol.cache import KEY_BYTES, PROTOCOL_VERSION

log = logging.getLogger("antiphon.cache_server")

PROBE_NAME: Final = "antiphon.probe"
"""Engine, model and tenant of the probe."""

PROBE_BYTES: Final = 4096
"""The smallest region: a page."""

PROBE_TIMEOUT_S: Final = 1.0
"""A healthy probe takes a millisecond or two; engines give a call up after the same time."""

PROBE_FRESH_S: Final = 0.5
"""How long a result is given out: several watchers, or an eager one, cost no more than two probes a second."""

_TRIES = 2
"""A chunk that is gone between its commit and its lookup may have been cleared by somebody: that can happen once."""

_NO_ROOM = frozenset(("capacity_exceeded", "quota_exceeded"))


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found.

    Args:
        is_ok: the whole way works, as far as there was room to go it.
        step: the last step that was begun: ``connect``, ``hello``, ``attach``, ``reserve``, ``write``, ``commit``,
            ``lookup``, ``read``, ``release``, ``clear``.
        detail: why it failed, or what was left out.
        took_s: how long it took.
        ended_s: when it ended, by ``time.monotonic``.
    """

    is_ok: bool
    step: str
    detail: str | None
    took_s: float
    ended_s: float


@dataclass(slots=True)
class ProbeTally:
    """What the probes did that the server's totals count too.

    Args:
        num_readable: chunks of probes that lookups can report now: 0 unless a probe runs, or failed halfway.
    """

    num_readable: int = 0
    num_lookups: int = 0
    num_lookup_chunks: int = 0
    num_hit_chunks: int = 0
    num_stored: int = 0
    num_cleared: int = 0
    num_ok: int = 0
    num_failed: int = 0
    num_without_room: int = 0
    num_written: int = 0


class _Gone(Exception):
    """The chunk left the cache while it was probed."""


class Probe:
    """Probes one server.

    Args:
        socket_path: the server's unix socket.
    """

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._namespace = hashlib.sha256(PROBE_NAME.encode()).digest()
        self._connection: ProbeConnection | None = None
        self._running: asyncio.Task[ProbeResult] | None = None
        self._latest: ProbeResult | None = None
        self._step = "connect"
        self.tally = ProbeTally()

    async def result(self) -> ProbeResult:
        """A result that is at most ``PROBE_FRESH_S`` old; probes where there is none."""
        latest = self._latest
        if latest is not None and time.monotonic() - latest.ended_s < PROBE_FRESH_S:
            return latest
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="antiphon-cache-probe")
        # Who asks may leave; the others still wait for the same probe.
        return await asyncio.shield(self._running)

    @property
    def is_running(self) -> bool:
        """A chunk of a probe may be in the server's totals and not yet in ``tally``, or the other way round."""
        return self._running is not None

    async def settle(self, timeout_s: float) -> None:
        """Wait until no probe runs, at most ``timeout_s``."""
        if self._running is not None:
            await asyncio.wait({self._running}, timeout=timeout_s)

    async def close(self) -> None:
        """End a probe that runs, and the connection."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self._disconnect()

    async def _run(self) -> ProbeResult:
        began_s = time.monotonic()
        is_ok, detail = False, None
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                detail = await self._probe()
            is_ok = True
        except TimeoutError:
            detail = f"no answer within {PROBE_TIMEOUT_S:g} s"
        except AntiphonError as error:
            detail = str(error)
        finally:
            if not is_ok:
                self._disconnect()
            self._running = None
        ended_s = time.monotonic()
        if is_ok:
            self.tally.num_ok += 1
        else:
            self.tally.num_failed += 1
            log.warning("the self-probe failed at %s: %s", self._step, detail)
        self._latest = ProbeResult(is_ok, self._step, detail, ended_s - began_s, ended_s)
        return self._latest

    async def _probe(self) -> str | None:
        """Go the whole way; returns what was left out."""
        connection = await self._connected()
        for _ in range(_TRIES):
            try:
                return await self._store_and_load(connection)
            except _Gone:
                continue
        raise CacheError(f"a chunk that was committed was not there {_TRIES} times in a row")

    async def _connected(self) -> ProbeConnection:
        if self._connection is not None and self._connection.is_open:
            return self._connection
        self._disconnect()
        self._step = "connect"
        connection = self._connection = await ProbeConnection.connect(self._socket_path)
        self._step = "hello"
        welcome = await connection.hello(wire.Hello(PROTOCOL_VERSION, f"{PROBE_NAME} {__version__}"))
        self._step = "attach"
        await connection.call(
            wire.Attach(
                engine=PROBE_NAME,
                incarnation=welcome.incarnation,
                role="probe",
                pid=os.getpid(),
                model=PROBE_NAME,
                chunk_size_tokens=welcome.chunk_size_tokens,
                num_slabs=1,
                slab_bytes=PROBE_BYTES,
                fingerprint=PROBE_NAME,
                slabs=(0,),
            ),
            wire.Attached,
        )
        return connection

    async def _store_and_load(self, connection: ProbeConnection) -> str | None:
        """Raises ``_Gone`` where somebody cleared the chunk meanwhile."""
        tally = self.tally
        key, written = os.urandom(KEY_BYTES), os.urandom(PROBE_BYTES)
        self._step = "reserve"
        reserved = await connection.call(
            wire.Reserve(namespace=self._namespace, tenant=PROBE_NAME, parent=None, keys=key), wire.Reserved
        )
        if reserved.verdicts == ("refused",) and reserved.refusal is not None and reserved.refusal[0] in _NO_ROOM:
            tally.num_without_room += 1
            return f"not stored, for lack of room: {reserved.refusal[1]}"
        if reserved.verdicts != ("write",) or len(reserved.grants) != 1:
            raise CacheError(f"the answer for a new chunk was {reserved.verdicts}, {reserved.refusal}")
        tally.num_written += 1
        region = reserved.grants[0].region
        self._step = "write"
        connection.write(region, written)
        self._step = "commit"
        committed = await connection.call(wire.Commit((region,)), wire.Committed)
        if committed.outcomes == ("dropped",):
            raise _Gone
        if committed.outcomes != ("readable",):
            raise CacheError(f"the outcome of the commit was {committed.outcomes}")
        tally.num_stored += 1
        tally.num_readable += 1
        await self._load(connection, key, written)
        self._step = "clear"
        cleared = await connection.call(wire.Clear(tenant=PROBE_NAME), wire.Cleared)
        tally.num_cleared += cleared.num_chunks
        tally.num_readable = 0
        return None

    async def _load(self, connection: ProbeConnection, key: bytes, written: bytes) -> None:
        tally = self.tally
        request = key.hex()
        self._step = "lookup"
        found = await connection.call(
            wire.Lookup(request=request, namespace=self._namespace, tenant=PROBE_NAME, keys=key), wire.Found
        )
        tally.num_lookups += 1
        tally.num_lookup_chunks += 1
        tally.num_hit_chunks += len(found.regions)
        if found.lease is None:
            if found.num_chunks_capped:
                raise CacheError("a lookup of one chunk was refused by the cap on leases")
            raise _Gone
        self._step = "read"
        if connection.read(found.regions[0], PROBE_BYTES) != written:
            raise CacheError("the bytes that were read are not those that were written")
        self._step = "release"
        await connection.call(wire.Release(request=request, lease=found.lease), wire.LeaseNoted)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
