"""What is behind a tier, with its faults: it is killed, hung and filled up, and brought back.

A disk cannot be killed or stopped as a process can: killed, its folder is gone; hung, its records are pipes that nobody
writes to, so that the system's ``open`` does not return; full, its file system has no room.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import obstore
import redis
from obstore.exceptions import BaseError
from obstore.store import S3Store

from antiphon.core.errors import TierError, TierFull
from antiphon.core.units import KIB, MIB
from antiphon.storage.etcd_metadata import EtcdAccess, EtcdMetadata
from antiphon.storage.mooncake_tier import MooncakeTier, MooncakeTierOptions
from tests.storage.secured_etcd import PASSWORD, USER, Certificates, SecuredEtcd
from tests.storage.servers import Etcd, MooncakeMaster, MooncakeMemory, SeaweedS3, Service, Valkey
from tests.storage.tier_kit import key_of, meta_of, payload_of

TIMEOUT_S = 1.0
"""Of a call to a tier."""
OPTIONS = f"timeout_s={TIMEOUT_S}"
DISK_BYTES = 128 * MIB
Take = Callable[[int], list[int]]


class Backing(ABC):
    """What is behind one tier. Each ``begin_`` is followed by the ``end_`` of that name, when all is as before."""

    full_counts: str = "full"
    """How a publication that finds no room is counted: ``full``, or ``failed`` where the service does not say so."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Of the tier."""

    @abstractmethod
    def begin_kill(self) -> None: ...

    @abstractmethod
    def end_kill(self) -> None: ...

    @abstractmethod
    def begin_hang(self) -> None: ...

    @abstractmethod
    def end_hang(self) -> None: ...

    @abstractmethod
    def begin_fill(self) -> None: ...

    @abstractmethod
    def end_fill(self) -> None: ...

    def close(self) -> None:  # noqa: B027  # most have services that end by themselves
        pass


class _OfService(Backing):
    """Something behind a process.

    Args:
        service: that is killed and hung.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def begin_kill(self) -> None:
        self._service.kill()

    def begin_hang(self) -> None:
        self._service.hang()

    def end_kill(self) -> None:
        self._service.restore()

    def end_hang(self) -> None:
        self._service.restore()


class RedisBacking(_OfService):
    """Valkey; full, it may take no more than it has and may not evict."""

    def __init__(self, folder: Path, adopted: set[int], take: Take) -> None:
        valkey = Valkey(folder, adopted, take)
        super().__init__(valkey)
        self._port = valkey.port
        valkey.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0?{OPTIONS}"

    def begin_fill(self) -> None:
        self._limit("noeviction", 1 * MIB)

    def end_fill(self) -> None:
        self._limit("allkeys-lru", 256 * MIB)

    def _limit(self, policy: str, num_bytes: int) -> None:
        with redis.Redis(port=self._port) as plain:
            plain.config_set("maxmemory-policy", policy)
            plain.config_set("maxmemory", num_bytes)

    def close(self) -> None:
        self._service.kill()


class QuickSeaweed(SeaweedS3):
    """Its master takes no 20 s to find out that it is alone when it is started again."""

    def command(self) -> list[str]:
        return [*super().command(), "-master.electionTimeout=1s", "-master.heartbeatInterval=100ms"]


class S3Backing(_OfService):
    """SeaweedFS; full, all its volumes are, and it is brought back with room for more of them."""

    full_counts = "failed"

    def __init__(self, folder: Path, adopted: set[int], take: Take) -> None:
        self._weed = QuickSeaweed(folder, adopted, take, num_volumes=9)
        super().__init__(self._weed)
        self._weed.start()
        self._weed.make_bucket(SeaweedS3.BUCKET)
        self._keys = folder / "keys"
        self._keys.write_text(f"{SeaweedS3.ACCESS_KEY}\n{SeaweedS3.SECRET_KEY}\n")
        self._keys.chmod(0o600)

    @property
    def url(self) -> str:
        endpoint = f"endpoint={self._weed.endpoint}&region=us-east-1"
        return f"s3://{SeaweedS3.BUCKET}/antiphon?{OPTIONS}&{endpoint}&credentials_file={self._keys}"

    def begin_fill(self) -> None:
        plain = S3Store(
            SeaweedS3.BUCKET,
            prefix="filler",
            endpoint=self._weed.endpoint,
            region="us-east-1",
            access_key_id=SeaweedS3.ACCESS_KEY,
            secret_access_key=SeaweedS3.SECRET_KEY,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        data = bytes(16 * MIB)
        with contextlib.suppress(BaseError):
            for number in range(60):
                obstore.put(plain, str(number), data, use_multipart=False)
            raise AssertionError("the object store is not full")

    def end_fill(self) -> None:
        self._weed.kill()
        self._weed._num_volumes = 40
        self._weed.start()

    def close(self) -> None:
        self._service.kill()


class _Mooncake(_OfService):
    """A Mooncake store over TCP; full, another client puts as long as there is room.

    Args:
        service: that is killed and hung.
        master, memory: of the store, not started.
    """

    def __init__(self, service: Service, master: MooncakeMaster, memory: MooncakeMemory) -> None:
        super().__init__(service)
        self._master, self._memory = master, memory
        try:
            self._master.start()
            self._memory.start()
        except BaseException:
            self.stop()
            raise
        self._filler: threading.Thread | None = None
        self._is_over = threading.Event()
        self._is_full = threading.Event()

    @property
    def url(self) -> str:
        return f"mooncake://{self._master.address}?{OPTIONS}&chunk_gb_max=0.001&{self._metadata_options()}"

    @abstractmethod
    def _metadata_options(self) -> str:
        """Of the tier's URL."""

    @abstractmethod
    def _metadata(self) -> str | EtcdAccess:
        """For a client in this process."""

    def begin_fill(self) -> None:
        self._is_over.clear()
        self._is_full.clear()
        self._filler = threading.Thread(target=self._fill)
        self._filler.start()
        assert self._is_full.wait(30), "the store is not full"

    def _fill(self) -> None:
        options = MooncakeTierOptions(self._master.address, self._metadata(), chunk_bytes_max=16 * MIB)
        store = MooncakeTier("filler", options)
        number = 0
        try:
            while not self._is_over.is_set():
                for num_bytes in (16 * MIB, MIB, 64 * KIB):
                    number += self._put_all(store, num_bytes, number)
                self._is_full.set()
            store.remove([key_of(each) for each in range(number)])
        finally:
            store.close()

    def _put_all(self, store: MooncakeTier, num_bytes: int, first: int) -> int:
        """Puts until the store is full; returns how many came in."""
        payload = payload_of(1, num_bytes)
        for number in range(first, first + 600):
            if self._is_over.is_set():
                return number - first
            try:
                store.put(key_of(number), payload, meta_of(num_bytes))
            except TierFull:
                return number - first
            except TierError:
                self._is_over.wait(0.05)
        return 600

    def end_fill(self) -> None:
        self._is_over.set()
        if self._filler is not None:
            self._filler.join(30)
            assert not self._filler.is_alive()

    def close(self) -> None:
        self.end_fill()
        self.stop()

    def stop(self) -> None:
        """Kills all of it."""
        self._memory.kill()
        self._master.kill()


class MooncakeBacking(_Mooncake):
    """A store whose master is its metadata server too."""

    def __init__(self, folder: Path, adopted: set[int], take: Take) -> None:
        master = MooncakeMaster(folder / "master", adopted, take)
        super().__init__(master, master, MooncakeMemory(folder / "memory", adopted, take, master, master.metadata))

    def _metadata_options(self) -> str:
        return f"metadata={self._master.metadata}"

    def _metadata(self) -> str:
        return self._master.metadata


class EtcdBacking(_Mooncake):
    """A store whose metadata is in an etcd, which is what fails.

    Args:
        is_secured: the etcd has a user, TLS and client certificates.
    """

    def __init__(self, folder: Path, adopted: set[int], take: Take, *, is_secured: bool) -> None:
        self._adapter: EtcdMetadata | None = None
        master = MooncakeMaster(folder / "master", adopted, take, has_http_metadata=False)
        if is_secured:
            pem = Certificates(folder / "pem")
            secured = SecuredEtcd(folder / "etcd", (adopted, take), pem, wants_certificate=True)
            member, files = f"127.0.0.1:{secured.port}", (str(pem.authority), *pem.files("client"))
            self._access: str | EtcdAccess = EtcdAccess([member], True, USER, PASSWORD, *files)
            options = {"metadata": f"etcds://{member}", "metadata_user": USER}
            options["metadata_password_file"] = str(secured.password_file)
            for name, file in zip(("ca", "cert", "key"), files, strict=True):
                options[f"metadata_{name}_file"] = file
            self._etcd: Etcd = secured
            self._adapter = EtcdMetadata(self._access)
            url = self._adapter.url
        else:
            self._etcd = Etcd(folder / "etcd", adopted, take)
            self._access = url = f"etcd://127.0.0.1:{self._etcd.port}"
            options = {"metadata": url}
        self._options = options
        try:
            self._etcd.start()
        except BaseException:
            self._close_adapter()
            raise
        super().__init__(self._etcd, master, MooncakeMemory(folder / "memory", adopted, take, master, url))

    def _metadata_options(self) -> str:
        return "&".join(f"{name}={value}" for name, value in self._options.items())

    def _metadata(self) -> str | EtcdAccess:
        return self._access

    def _close_adapter(self) -> None:
        if self._adapter is not None:
            self._adapter.close()

    def stop(self) -> None:
        super().stop()
        self._etcd.kill()
        self._close_adapter()


class DiskBacking(Backing):
    """A folder on a file system of its own, of ``DISK_BYTES``: less than the tier may take.

    Only the server sees it: ``show`` says through which process.

    Args:
        mount: where the server has mounted it.
    """

    def __init__(self, mount: Path) -> None:
        self._mount = mount
        self._seen = mount
        self._pipes: list[Path] = []

    @property
    def url(self) -> str:
        return f"disk://{self._mount}/kv?{OPTIONS}&capacity_gb=1"

    def show(self, pid: int) -> None:
        self._seen = Path(f"/proc/{pid}/root{self._mount}")

    def begin_kill(self) -> None:
        (self._seen / "kv").rename(self._seen / "away")

    def end_kill(self) -> None:
        (self._seen / "away").rename(self._seen / "kv")

    def begin_hang(self) -> None:
        for folder in ("pipes", "records"):
            (self._seen / folder).mkdir(exist_ok=True)
        for record in (self._seen / "kv").glob("??/" + 64 * "?"):
            pipe = self._seen / "pipes" / record.name
            os.mkfifo(pipe)
            self._pipes.append(pipe)
            record.rename(self._seen / "records" / record.name)
            os.link(pipe, record)

    def end_hang(self) -> None:
        for pipe in self._pipes:
            record = self._seen / "kv" / pipe.name[:2] / pipe.name
            if record.exists() and record.is_fifo():  # it may have been stored again
                (self._seen / "records" / pipe.name).rename(record)
        for pipe in 2 * self._pipes:  # a call may have been about to wait
            with contextlib.suppress(OSError):  # nobody waits
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        for folder in ("pipes", "records"):
            shutil.rmtree(self._seen / folder)
        self._pipes.clear()

    def begin_fill(self) -> None:
        with contextlib.suppress(OSError), (self._seen / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(64 * KIB)):  # a part, then an error
                pass

    def end_fill(self) -> None:
        (self._seen / "ballast").unlink()
