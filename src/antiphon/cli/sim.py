"""``antiphon sim``: deterministic simulation under seeded faults, for who develops this program."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any

import click

from antiphon.sim.faults import ALL_FAULTS, Fault, SimulationOptions
from antiphon.sim.routing_run import run_routing_seeds
from antiphon.sim.routing_world import RoutingSimulationOptions
from antiphon.sim.run import describe_failure, run_seeds
from antiphon.sim.seeds import SeedResult

PROGRESS_EVERY = 500


def _faults(context: click.Context, parameter: click.Parameter, text: str) -> tuple[Fault, ...]:
    if text in ("all", "none"):
        return ALL_FAULTS if text == "all" else ()
    try:
        return tuple(Fault(name.strip()) for name in text.split(","))
    except ValueError as error:
        names = ", ".join(fault.value for fault in ALL_FAULTS)
        raise click.BadParameter(f"{error}. The faults are {names}; or all, or none.") from error


def _seed_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every simulation."""
    options: tuple[Callable[[Any], Any], ...] = (
        click.option("--seeds", type=click.IntRange(min=1), default=200, show_default=True, help="Number of seeds."),
        click.option(
            "--first-seed", type=click.IntRange(min=0), default=1, show_default=True, help="The first of them."
        ),
        click.option(
            "--validate-every",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            help="Check invariants each N steps.",
        ),
        click.option("--trace", is_flag=True, help="Print the trace of each seed."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _run(results: Iterable[SeedResult], describe: Callable[[SeedResult], str], num_seeds: int, *, trace: bool) -> None:
    """Show seeds as they end. The first failure is described, and ends the process with status 1."""
    seen: Counter[str] = Counter()
    digests = sha256()
    first = 0
    for number, result in enumerate(results, start=1):
        if trace:
            click.echo("\n".join(result.trace))
        if result.failure is not None:
            click.echo(describe(result), err=True)
            sys.exit(1)
        first = result.seed if number == 1 else first
        seen += result.seen
        digests.update(result.digest.encode())
        if number % PROGRESS_EVERY == 0 and number < num_seeds:
            click.echo(f"{number} seeds passed", err=True)
    for name, count in sorted(seen.items()):
        click.echo(f"{count:>9}  {name}")
    click.echo(f"{num_seeds} seeds passed, from {first}; digest of their traces {digests.hexdigest()[:16]}")


@click.group(name="sim")
def sim() -> None:
    """Simulate parts of this program in virtual time, under seeded faults.

    A seed gives the same trace, byte for byte, each time. The first failure ends the run with exit status 1, and prints
    the end of its trace and how to run it again.
    """


@sim.command(name="cache")
@_seed_options
@click.option("--faults", callback=_faults, default="all", show_default=True, help="Names with commas, all, or none.")
def cache(seeds: int, first_seed: int, validate_every: int, trace: bool, faults: tuple[Fault, ...]) -> None:
    """Run the real cache with fake engines whose tokens prove their KV."""
    options = SimulationOptions(faults, validate_every)
    _run(run_seeds(first_seed, seeds, options), lambda result: describe_failure(result, options), seeds, trace=trace)


@sim.command(name="routing")
@_seed_options
def routing(seeds: int, first_seed: int, validate_every: int, trace: bool) -> None:
    """Run the real routing with simulated engines, clients and operators."""
    options = RoutingSimulationOptions(validate_every=validate_every)

    def describe(result: SeedResult) -> str:
        again = f"antiphon sim routing --first-seed {result.seed} --seeds 1 --trace --validate-every {validate_every}"
        return "\n".join([*result.failure_lines(), f"again: {again}"])

    _run(run_routing_seeds(first_seed, seeds, options), describe, seeds, trace=trace)
