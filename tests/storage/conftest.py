"""The services of the tier tests: one of each for a session, started when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from antiphon.storage.etcd_metadata import EtcdAccess, EtcdMetadata
from tests.conftest import Ports
from tests.storage.secured_etcd import PASSWORD, USER, Certificates, SecuredEtcd
from tests.storage.servers import Etcd, MooncakeMaster, MooncakeMemory, SeaweedS3, Service, Valkey


@dataclass(frozen=True)
class MooncakeStore:
    """A Mooncake store on this machine: its master and its metadata server.

    Args:
        master: of it.
        metadata: for a tier.
        etcd: where that is one.
    """

    master: MooncakeMaster
    metadata: str | EtcdAccess
    etcd: Etcd | None = None


@pytest.fixture(scope="session")
def take_ports(_ports: Ports) -> Callable[[int], list[int]]:
    return _ports.take


def _running(service: Service) -> Iterator[Service]:
    try:
        service.start()
        yield service
    finally:
        service.kill()


@pytest.fixture(scope="session")
def valkey(
    tmp_path_factory: pytest.TempPathFactory, adopted: set[int], take_ports: Callable[[int], list[int]]
) -> Iterator[Service]:
    yield from _running(Valkey(_short_folder(tmp_path_factory, "vk"), adopted, take_ports))


@pytest.fixture(scope="session")
def seaweed(
    tmp_path_factory: pytest.TempPathFactory, adopted: set[int], take_ports: Callable[[int], list[int]]
) -> Iterator[Service]:
    yield from _running(SeaweedS3(_short_folder(tmp_path_factory, "s3"), adopted, take_ports))


@pytest.fixture(scope="session")
def start_mooncake(
    tmp_path_factory: pytest.TempPathFactory, adopted: set[int], take_ports: Callable[[int], list[int]]
) -> Iterator[Callable[[str], MooncakeStore]]:
    """``start_mooncake("etcd")``: a store with that metadata server (or ``http``, ``secured``, ``none``), started once.
    ``secured`` is an etcd with a user, TLS and client certificates."""
    made: dict[str, MooncakeStore] = {}
    closers: list[Callable[[], None]] = []

    def start(service: Service) -> None:
        closers.append(service.kill)
        service.start()

    def metadata_of(kind: str, master: MooncakeMaster) -> tuple[str | EtcdAccess, str, Etcd | None]:
        """For a tier, for Mooncake's own client, and the etcd."""
        if kind in ("http", "none"):
            url = master.metadata if kind == "http" else "P2PHANDSHAKE"
            return url, url, None
        folder = _short_folder(tmp_path_factory, "etcd")
        if kind == "etcd":
            plain = Etcd(folder, adopted, take_ports)
            start(plain)
            url = f"etcd://127.0.0.1:{plain.port}"
            return url, url, plain
        assert kind == "secured", kind
        pem = Certificates(_short_folder(tmp_path_factory, "pem"))
        etcd = SecuredEtcd(folder, (adopted, take_ports), pem, wants_certificate=True)
        start(etcd)
        member = f"127.0.0.1:{etcd.port}"
        access = EtcdAccess([member], True, USER, PASSWORD, str(pem.authority), *pem.files("client"))
        other = EtcdMetadata(access)
        closers.append(other.close)
        return access, other.url, etcd

    def store_with(kind: str) -> MooncakeStore:
        if kind not in made:
            folder = _short_folder(tmp_path_factory, "mc")
            master = MooncakeMaster(folder, adopted, take_ports, has_http_metadata=kind == "http")
            start(master)
            metadata, url, etcd = metadata_of(kind, master)
            start(MooncakeMemory(_short_folder(tmp_path_factory, "mem"), adopted, take_ports, master, url))
            made[kind] = MooncakeStore(master, metadata, etcd)
        return made[kind]

    try:
        yield store_with
    finally:
        for close in reversed(closers):
            close()


def _short_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder whose path leaves room for that of a unix socket."""
    return factory.mktemp(name)
