"""``antiphon sim``: deterministic simulation under seeded faults, for who develops this program."""

from __future__ import annotations

import sys
from collections import Counter
from hashlib import sha256

import click

from antiphon.sim.faults import ALL_FAULTS, Fault, SimulationOptions
from antiphon.sim.routing_run import describe_routing_failure, run_routing_seeds
from antiphon.sim.routing_world import RoutingSimulationOptions
from antiphon.sim.run import describe_failure, run_seeds

PROGRESS_EVERY = 500


def _faults(context: click.Context, parameter: click.Parameter, text: str) -> tuple[Fault, ...]:
    if text in ("all", "none"):
        return ALL_FAULTS if text == "all" else ()
    try:
        return tuple(Fault(name.strip()) for name in text.split(","))
    except ValueError as error:
        names = ", ".join(fault.value for fault in ALL_FAULTS)
        raise click.BadParameter(f"{error}. The faults are {names}; or all, or none.") from error


@click.group(name="sim")
def sim() -> None:
    """Simulate parts of this program in virtual time, under seeded faults."""


@sim.command(name="cache")
@click.option("--seeds", type=click.IntRange(min=1), default=200, show_default=True, help="Number of seeds.")
@click.option("--first-seed", type=click.IntRange(min=0), default=1, show_default=True, help="The first of them.")
@click.option("--faults", callback=_faults, default="all", show_default=True, help="Names with commas, all, or none.")
@click.option(
    "--validate-every", type=click.IntRange(min=1), default=1, show_default=True, help="Check invariants each N steps."
)
@click.option("--trace", is_flag=True, help="Print the trace of each seed.")
def cache(seeds: int, first_seed: int, faults: tuple[Fault, ...], validate_every: int, trace: bool) -> None:
    """Run the real cache with fake engines whose tokens prove their KV.

    A seed gives the same trace, byte for byte, each time. The first failure ends the run with exit status 1, and prints
    the end of its trace and how to run it again.
    """
    options = SimulationOptions(faults, validate_every)
    seen: Counter[str] = Counter()
    digests = sha256()
    for number, result in enumerate(run_seeds(first_seed, seeds, options), start=1):
        if trace:
            click.echo("\n".join(result.trace))
        if result.failure is not None:
            click.echo(describe_failure(result, options), err=True)
            sys.exit(1)
        seen += result.seen
        digests.update(result.digest.encode())
        if number % PROGRESS_EVERY == 0 and number < seeds:
            click.echo(f"{number} seeds passed", err=True)
    for name, count in sorted(seen.items()):
        click.echo(f"{count:>9}  {name}")
    click.echo(f"{seeds} seeds passed, from {first_seed}; digest of their traces {digests.hexdigest()[:16]}")


@sim.command(name="routing")
@click.option("--seeds", type=click.IntRange(min=1), default=200, show_default=True, help="Number of seeds.")
@click.option("--first-seed", type=click.IntRange(min=0), default=1, show_default=True, help="The first of them.")
@click.option(
    "--validate-every", type=click.IntRange(min=1), default=1, show_default=True, help="Check invariants each N steps."
)
@click.option("--trace", is_flag=True, help="Print the trace of each seed.")
def routing(seeds: int, first_seed: int, validate_every: int, trace: bool) -> None:
    """Run the real routing with simulated engines, clients and operators.

    A seed gives the same trace, byte for byte, each time. The first failure ends the run with exit status 1, and prints
    the end of its trace.
    """
    options = RoutingSimulationOptions(validate_every=validate_every)
    seen: Counter[str] = Counter()
    digests = sha256()
    for number, result in enumerate(run_routing_seeds(first_seed, seeds, options), start=1):
        if trace:
            click.echo("\n".join(result.trace))
        if result.failure is not None:
            again = (
                f"antiphon sim routing --seeds 1 --first-seed {result.seed} --validate-every {validate_every} --trace"
            )
            click.echo(f"{describe_routing_failure(result)}\nrun it again: {again}", err=True)
            sys.exit(1)
        seen += result.seen
        digests.update(result.digest.encode())
        if number % PROGRESS_EVERY == 0 and number < seeds:
            click.echo(f"{number} seeds passed", err=True)
    for name, count in sorted(seen.items()):
        click.echo(f"{count:>9}  {name}")
    click.echo(f"{seeds} seeds passed, from {first_seed}; digest of their traces {digests.hexdigest()[:16]}")
