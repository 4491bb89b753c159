"""``antiphon bench``: how fast is it. One subverb for each thing that is measured.

Exit code 0; 1 when it could not run, or with ``--check`` when a target was missed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from antiphon.bench.cache import CacheBenchOptions, run_cache_bench
from antiphon.bench.figures import BenchResult, Say
from antiphon.bench.peers import PeersBenchOptions, run_peers_bench
from antiphon.bench.router import RouterBenchOptions, run_router_bench
from antiphon.bench.tiers import TiersBenchOptions, run_tiers_bench
from antiphon.config.tier_spec import parse_tier
from antiphon.core.chunks import CHUNK_SIZE_TOKENS
from antiphon.core.errors import AntiphonError


@click.group(name="bench")
def bench() -> None:
    """Measure how fast it is on this machine."""


def _address(_: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    host, _colon, port = text.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise click.BadParameter(f"{text!r} is no HOST:PORT", param=parameter)
    return host, int(port)


_json_option = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there."
)


def _measure(run: Callable[[Say], BenchResult], json_path: Path | None) -> BenchResult:
    """Run a bench; one that cannot run ends the command with 1."""
    try:
        result = run(lambda line: click.echo(line, err=True))
        if json_path is not None:
            json_path.write_text(json.dumps(result.as_dict(), indent=2) + "\n")
    except (AntiphonError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    return result


@bench.command(name="cache")
@click.option("--server", callback=_address, metavar="HOST:PORT", help="A running server. [default: start one]")
@click.option(
    "--chunk-size",
    type=click.IntRange(1, 65536),
    default=CHUNK_SIZE_TOKENS,
    show_default=True,
    help="Tokens in a chunk of that server.",
)
@click.option("--quick", is_flag=True, help="Seconds instead of a minute: whether it runs, not how fast it is.")
@click.option("--check", is_flag=True, help="Exit with 1 when a target is missed.")
@_json_option
def cache(server: tuple[str, int] | None, chunk_size: int, *, quick: bool, check: bool, json_path: Path | None) -> None:
    """Measure a cache server: store and retrieve beside a plain copy, lookups, lookups beside writers.

    Without --server it starts one of its own, which needs 1.7 GB of memory, and ends it.
    """
    if server is None and chunk_size != CHUNK_SIZE_TOKENS:
        raise click.UsageError("--chunk-size goes with --server: a server that is started has the default")
    if quick:
        options = CacheBenchOptions.quick(server, chunk_size)
    else:
        options = CacheBenchOptions(server, chunk_size)
    result = _measure(lambda say: run_cache_bench(options, say), json_path)
    click.echo("\n".join(table_lines(result, is_judged=check or not quick)))
    if check and result.missed:
        click.echo(f"{len(result.missed)} targets missed", err=True)
        sys.exit(1)


@bench.command(name="router")
@click.option(
    "--seconds",
    type=click.FloatRange(0.2, 600),
    default=RouterBenchOptions.seconds,
    show_default=True,
    help="Of load for each measurement.",
)
@_json_option
def router(seconds: float, json_path: Path | None) -> None:
    """Measure a router: processor time of a request and of a streamed event, latency added, memory.

    It starts a router, two prefill and two decode engines, which are simulated, and ends them.
    """
    result = _measure(lambda say: run_router_bench(RouterBenchOptions(seconds), say), json_path)
    click.echo("\n".join(table_lines(result)))


@bench.command(name="peers")
@click.option("--quick", is_flag=True, help="Seconds instead of a minute: whether it runs, not how fast it is.")
@click.option("--check", is_flag=True, help="Exit with 1 when a target is missed.")
@_json_option
def peers(*, quick: bool, check: bool, json_path: Path | None) -> None:
    """Measure chunks that come from another cache server, beside plain NIXL.

    It starts a coordinator and two cache servers, which need 3 GB of memory, and ends them.
    """
    options = PeersBenchOptions.quick() if quick else PeersBenchOptions()
    result = _measure(lambda say: run_peers_bench(options, say), json_path)
    click.echo("\n".join(table_lines(result, is_judged=check or not quick)))
    if check and result.missed:
        click.echo(f"{len(result.missed)} targets missed", err=True)
        sys.exit(1)


@bench.command(name="tiers")
@click.option(
    "--l2",
    "urls",
    multiple=True,
    metavar="URL",
    help="A tier, as for antiphon cache-server; may be given again. [default: a disk tier in a folder of its own]",
)
@click.option("--quick", is_flag=True, help="Seconds instead of a minute: whether it runs, not how fast it is.")
@click.option("--check", is_flag=True, help="Exit with 1 when a target is missed.")
@_json_option
def tiers(urls: tuple[str, ...], *, quick: bool, check: bool, json_path: Path | None) -> None:
    """Measure tiers: store and read chunks, beside the plain calls of what is behind each.

    What a tier holds already is left alone, but may be evicted. Without --l2 a disk tier is made in the temporary
    folder (TMPDIR) and removed: where that is memory, the figures are those of memory.
    """
    with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as folder:
        try:
            specs = [parse_tier(url) for url in urls or (f"disk://{folder}/tier?capacity_gb=1",)]
        except AntiphonError as error:
            raise click.UsageError(str(error)) from error
        options = TiersBenchOptions.quick(specs) if quick else TiersBenchOptions(specs)
        result = _measure(lambda say: run_tiers_bench(options, say), json_path)
    click.echo("\n".join(table_lines(result, is_judged=check or not quick)))
    if check and result.missed:
        click.echo(f"{len(result.missed)} targets missed", err=True)
        sys.exit(1)


def table_lines(result: BenchResult, *, is_judged: bool = True) -> list[str]:
    """The figures as a table in markdown; a quick run measures too little to judge targets by."""
    cells = [("what", "figure", "target", "")]
    for row in result.rows:
        is_met = row.is_met if is_judged else None
        verdict = {None: row.note, True: "met", False: "MISSED"}[is_met]
        cells.append((row.name, f"{_figure(row.value)} {row.unit}", row.goal or "", verdict))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return [f"{result.num_cpus} CPUs ({result.machine}), Python {result.python}, Antiphon {result.version}", "", *lines]


def _figure(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
