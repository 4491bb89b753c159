"""What a tier is measured against: the plain calls of the disk or the client behind it, in the same run.

No record, no digest, no deadline, no index: payloads go out and come back, nothing else. For benches only.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from antiphon.config.tier_spec import TierSpec
from antiphon.core.errors import StartError
from antiphon.storage.etcd_metadata import EtcdAccess, EtcdMetadata
from antiphon.storage.mooncake_loader import free_port, loader_environment
from antiphon.storage.tiers import mooncake_metadata

__all__ = ["MooncakePlain", "PlainCalls", "plain_calls"]

_ROUND_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class PlainCalls:
    """Two calls of a client, safe in several threads.

    Args:
        put: stores the payload of a number.
        get: reads it, and returns how many bytes there were.
        close: removes what was stored.
    """

    put: Callable[[int, memoryview], None]
    get: Callable[[int, int], int]
    close: Callable[[], None]


def plain_calls(spec: TierSpec) -> PlainCalls | None:
    """Those of the place of ``spec``; None for a kind that has none in this process.

    Raises:
        OSError: of the system, or of a client.
    """
    match spec.kind:
        case "disk":
            return _disk(Path(f"{spec.path.rstrip('/')}.plain"))
        case "redis":
            return _redis(spec)
        case "s3":
            return _s3(spec)
        case _:
            return None


def _disk(folder: Path) -> PlainCalls:
    """A file for each payload, written with one call past the page cache and forced to the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = threading.local()

    def put(number: int, payload: memoryview) -> None:
        fd = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        try:
            assert os.pwrite(fd, payload, 0) == len(payload)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def get(number: int, num_bytes: int) -> int:
        fd = os.open(folder / str(number), os.O_RDONLY | os.O_DIRECT)
        try:
            if len(getattr(mine, "buffer", b"")) != num_bytes:
                mine.buffer = mmap.mmap(-1, num_bytes)
            return os.preadv(fd, [mine.buffer], 0)
        finally:
            os.close(fd)

    def close() -> None:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

    return PlainCalls(put, get, close)


def _redis(spec: TierSpec) -> PlainCalls:
    """One value for each payload."""
    import redis

    client = redis.Redis.from_url(spec.url, username=spec.username, password=spec.read_password())
    used: set[str] = set()

    def put(number: int, payload: memoryview) -> None:
        name = f"{spec.prefix}-plain-{number}"
        used.add(name)
        client.set(name, payload)

    def get(number: int, num_bytes: int) -> int:
        value: Any = client.get(f"{spec.prefix}-plain-{number}")
        return len(value)

    def close() -> None:
        client.delete(*used)
        client.close()

    return PlainCalls(put, get, close)


def _s3(spec: TierSpec) -> PlainCalls:
    """One object for each payload, in one request."""
    import obstore
    from obstore.store import S3Store

    names = ("access_key_id", "secret_access_key", "session_token")
    given: dict[str, Any] = dict(zip(names, spec.read_credentials(), strict=False))
    given |= {"endpoint": spec.endpoint} if spec.endpoint else {}
    given |= {"region": spec.region} if spec.region else {}
    store = S3Store(
        urlsplit(spec.url).netloc,
        prefix="antiphon-plain",
        virtual_hosted_style_request=spec.virtual_host,
        client_options={"allow_http": True, "timeout": "60s"},
        **given,
    )
    used: set[str] = set()

    def put(number: int, payload: memoryview) -> None:
        used.add(str(number))
        obstore.put(store, str(number), payload, use_multipart=False)

    def get(number: int, num_bytes: int) -> int:
        return len(obstore.get(store, str(number)).bytes())

    return PlainCalls(put, get, lambda: obstore.delete(store, sorted(used)))


# ---- Mooncake, whose client loads only in a process of its own -------------------------------------------------------


class MooncakePlain:
    """Rounds of ``upsert_from`` and ``get_into`` of Mooncake's client, in a process that waits between them.

    Args:
        spec: of the tier.
        num_chunks, chunk_bytes, num_threads: of a round.

    Raises:
        ConfigError: a file that its metadata server needs cannot be used.
    """

    def __init__(self, spec: TierSpec, num_chunks: int, chunk_bytes: int, num_threads: int) -> None:
        with contextlib.ExitStack() as after:
            metadata = mooncake_metadata(spec)
            if isinstance(metadata, EtcdAccess):
                server = EtcdMetadata(metadata)
                after.callback(server.close)
                metadata = server.url
            here = f"{spec.local_host}:{free_port(spec.local_host)}"
            master = urlsplit(spec.url).netloc
            told = {
                "setup": [here, metadata, 0, 16 << 20, spec.protocol, spec.devices, master],
                "num_chunks": num_chunks,
                "chunk_bytes": chunk_bytes,
                "num_threads": num_threads,
            }
            self._said = after.enter_context(tempfile.TemporaryFile())
            self._child = subprocess.Popen(
                [sys.executable, "-m", "antiphon.storage.plain_calls"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                env=loader_environment({**os.environ, "MC_TCP_BIND_ADDRESS": spec.local_host}),
            )
            self._after = after.pop_all()
        self._first = json.dumps(told) + "\n"

    def round(self) -> tuple[float, float]:
        """Bytes a second of storing and of reading all chunks.

        Raises:
            StartError: the client cannot do it, or not in time.
        """
        assert self._child.stdin is not None and self._child.stdout is not None
        timer = threading.Timer(_ROUND_TIMEOUT_S, self._child.kill)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and says nothing
                self._child.stdin.write(f"{self._first}\n")
                self._child.stdin.flush()
            self._first = ""
            while (line := self._child.stdout.readline()) and not line.startswith("["):
                pass  # its library prints too
        finally:
            timer.cancel()
        if not line:
            code = self._child.wait()
            self._said.seek(0)
            tail = self._said.read()[-500:].decode(errors="replace")
            raise StartError(f"Mooncake's client ended with code {code}: {tail}")
        put_rate, get_rate = json.loads(line)
        return float(put_rate), float(get_rate)

    def close(self) -> None:
        """Removes what was stored."""
        try:
            self._child.communicate(timeout=_ROUND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()
        self._after.close()


def _mooncake_main(told: dict[str, Any]) -> None:
    import ctypes
    import time
    from concurrent.futures import ThreadPoolExecutor

    store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    assert store.setup(*told["setup"]) == 0
    size, count, threads = told["chunk_bytes"], told["num_chunks"], told["num_threads"]
    buffer = mmap.mmap(-1, size * threads)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    ctypes.memset(address, 1, size * threads)
    assert store.register_buffer(address, size * threads) == 0
    calls = (
        lambda n: store.upsert_from(f"antiphon-plain-{n}", address + n % threads * size, size) == 0,
        lambda n: store.get_into(f"antiphon-plain-{n}", address + n % threads * size, size) == size,
    )
    with ThreadPoolExecutor(threads) as pool:
        for _ in sys.stdin:
            rates = []
            for call in calls:
                start_s = time.perf_counter()
                assert all(pool.map(call, range(count)))
                rates.append(count * size / (time.perf_counter() - start_s))
            sys.stdout.write(json.dumps(rates) + "\n")
            sys.stdout.flush()
    store.batch_remove([f"antiphon-plain-{n}" for n in range(count)], True)


if __name__ == "__main__":
    _mooncake_main(json.loads(sys.stdin.readline()))
    os._exit(0)  # Mooncake's exit handlers may hang
