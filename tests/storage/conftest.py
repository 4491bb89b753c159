"""The services of the tier tests: one of each for a session, started when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import Ports
from tests.storage.servers import Etcd, MooncakeMaster, MooncakeMemory, SeaweedS3, Service, Valkey


@dataclass(frozen=True)
class MooncakeStore:
    """A Mooncake store on this machine: its master and the URL of its metadata server."""

    master: MooncakeMaster
    metadata: str


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
    """``start_mooncake("etcd")``: a store with that metadata server (or ``http``, or ``none``), started once."""
    made: dict[str, MooncakeStore] = {}
    services: list[Service] = []

    def start(service: Service) -> None:
        services.append(service)
        service.start()

    def store_with(kind: str) -> MooncakeStore:
        if kind not in made:
            has_http = kind == "http"
            folder = _short_folder(tmp_path_factory, "mc")
            master = MooncakeMaster(folder, adopted, take_ports, has_http_metadata=has_http)
            start(master)
            metadata = master.metadata if has_http else "P2PHANDSHAKE"
            if kind == "etcd":
                etcd = Etcd(_short_folder(tmp_path_factory, "etcd"), adopted, take_ports)
                start(etcd)
                metadata = f"etcd://127.0.0.1:{etcd.port}"
            start(MooncakeMemory(_short_folder(tmp_path_factory, "mem"), adopted, take_ports, master, metadata))
            made[kind] = MooncakeStore(master, metadata)
        return made[kind]

    try:
        yield store_with
    finally:
        for service in reversed(services):
            service.kill()


def _short_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder whose path leaves room for that of a unix socket."""
    return factory.mktemp(name)
