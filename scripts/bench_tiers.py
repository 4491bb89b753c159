"""Every kind of tier before a real server on this machine, beside the plain calls of what is behind it.

    python scripts/bench_tiers.py

Disk in a temporary folder (TMPDIR), Valkey over TCP and over its Unix socket, SeaweedFS's S3, and a Mooncake store with
a process that gives it memory, one after another: ``antiphon bench tiers`` for each. Exits 1 where a tier misses its
target. Needs 3 GB of memory and the environment of `make install-dev`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from antiphon.bench.tiers import TiersBenchOptions, run_tiers_bench  # noqa: E402
from antiphon.cli.bench import table_lines  # noqa: E402
from antiphon.config.tier_spec import parse_tier  # noqa: E402
from tests.conftest import Ports  # noqa: E402
from tests.storage.servers import MooncakeMaster, MooncakeMemory, SeaweedS3, Service, Valkey  # noqa: E402

KINDS = ("disk", "redis", "s3", "mooncake")
PATIENT = "timeout_s=30"


def main() -> int:
    """All kinds, or those that were named. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all without")
    kinds = parser.parse_args().kinds
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"{', '.join(unknown)}: the kinds are {', '.join(KINDS)}")
    missed = []
    with tempfile.TemporaryDirectory(prefix="antiphon-") as folder:
        for kind in kinds or KINDS:
            with OPEN[kind](Path(folder)) as urls:
                options = TiersBenchOptions([parse_tier(url) for url in urls])
                result = run_tiers_bench(options, _say)
            _say("\n".join(table_lines(result)))
            missed += result.missed
    return 1 if missed else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def _running(*services: Service) -> Iterator[None]:
    """Started in this order, and killed in the other."""
    with ExitStack() as exits:
        for service in services:
            exits.callback(service.kill)
            service.start()
        yield


@contextmanager
def _disk(folder: Path) -> Iterator[list[str]]:
    yield [f"disk://{folder}/disk?capacity_gb=1&{PATIENT}"]


@contextmanager
def _redis(folder: Path) -> Iterator[list[str]]:
    valkey = Valkey(folder / "valkey", set(), Ports().take)
    with _running(valkey):
        tcp = f"redis://127.0.0.1:{valkey.port}?name=redis-tcp&{PATIENT}"
        yield [tcp, f"unix://{valkey.socket_path}?name=redis-unix&{PATIENT}"]


@contextmanager
def _s3(folder: Path) -> Iterator[list[str]]:
    weed = SeaweedS3(folder / "s3", set(), Ports().take)
    credentials = folder / "credentials"
    credentials.touch(0o600)
    credentials.write_text(f"{SeaweedS3.ACCESS_KEY}\n{SeaweedS3.SECRET_KEY}\n")
    with _running(weed):
        weed.make_bucket(SeaweedS3.BUCKET)
        where = f"endpoint={weed.endpoint}&region=us-east-1&credentials_file={credentials}"
        yield [f"s3://{SeaweedS3.BUCKET}?{where}&{PATIENT}"]


@contextmanager
def _mooncake(folder: Path) -> Iterator[list[str]]:
    ports = Ports()
    master = MooncakeMaster(folder / "master", set(), ports.take)
    memory = MooncakeMemory(folder / "memory", set(), ports.take, master, master.metadata)
    with _running(master, memory):
        yield [f"mooncake://{master.address}?metadata={master.metadata}&{PATIENT}"]


OPEN: dict[str, Callable[[Path], AbstractContextManager[list[str]]]] = {
    "disk": _disk,
    "redis": _redis,
    "s3": _s3,
    "mooncake": _mooncake,
}


if __name__ == "__main__":
    sys.exit(main())
