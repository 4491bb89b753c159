"""One deployment of real engines for all tests of this folder that share it: two engines at a time, never more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from antiphon.engine import demo_model
from tests.real.deployment import Deployment


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo model, prepared in the user's cache folder as ``antiphon demo`` does it."""
    said: list[str] = []
    return demo_model.prepare(demo_model.cache_folder(), said.append)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that share the deployment come after all others, in their order: no other engine runs beside it."""
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.parent == here and "deployment" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def deployment(
    tmp_path_factory: pytest.TempPathFactory, model: Path, _ports: object, die_with_parent: Callable[[], None]
) -> Iterator[Deployment]:
    """A prefill engine, a decode engine, a cache server for both and the router, ready."""
    ports: list[int] = _ports.take(Deployment.NUM_PORTS)  # type: ignore[attr-defined]
    found = Deployment(tmp_path_factory.mktemp("real"), model, ports, die_with_parent)
    try:
        found.start()
        yield found
        assert found.stop() == 0, found.output.read_text()[-4000:]
    finally:
        if found.process is not None and found.process.poll() is None:
            found.process.kill()
            found.process.wait()
