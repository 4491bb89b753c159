"""``antiphon sim``: deterministic simulation, of faults for who develops this program, of fleets for who sizes one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import click

from antiphon.sim.faults import ALL_FAULTS, Fault, SimulationOptions
from antiphon.sim.fleet_compare import WORKLOADS, CompareOptions, compare
from antiphon.sim.fleet_engine import H200_8B
from antiphon.sim.fleet_flood import NUM_COLD, FloodRun, flood_lines
from antiphon.sim.fleet_policies import NAMES
from antiphon.sim.fleet_trace import SCALES, TraceInvalid
from antiphon.sim.peers_run import run_peers_seeds
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
        names = ", ".join(fault.value for fault in Fault)
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
@click.option("--tiers", is_flag=True, help="With tiers behind the cache, and their faults.")
def cache(
    seeds: int, first_seed: int, validate_every: int, trace: bool, faults: tuple[Fault, ...], *, tiers: bool
) -> None:
    """Run the real cache with fake engines whose tokens prove their KV."""
    if tiers and faults == ALL_FAULTS:
        faults = SimulationOptions.with_tiers().faults
    options = SimulationOptions(faults, validate_every, has_tiers=tiers)
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


@sim.command(name="peers")
@click.option("--seeds", type=click.IntRange(min=1), default=200, show_default=True, help="Number of seeds.")
@click.option("--first-seed", type=click.IntRange(min=0), default=1, show_default=True, help="The first of them.")
@click.option("--trace", is_flag=True, help="Print the trace of each seed.")
def peers(seeds: int, first_seed: int, trace: bool) -> None:
    """Run real caches that share through the real directory, under partitions, deaths and late messages."""

    def describe(result: SeedResult) -> str:
        again = f"antiphon sim peers --first-seed {result.seed} --seeds 1 --trace"
        return "\n".join([*result.failure_lines(), f"run it again: {again}"])

    _run(run_peers_seeds(first_seed, seeds), describe, seeds, trace=trace)


def _policies(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    names = NAMES if text == "all" else tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(NAMES)}; or all.")
    return names


def _fleet_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every simulated fleet."""
    positive = click.FloatRange(min=0, min_open=True)
    options: tuple[Callable[[Any], Any], ...] = (
        click.option("--prefill", type=click.IntRange(1, 256), default=4, show_default=True, help="Prefill engines."),
        click.option("--decode", type=click.IntRange(1, 256), default=4, show_default=True, help="Decode engines."),
        click.option(
            "--scale",
            type=click.Choice([str(scale) for scale in SCALES]),
            default="8",
            show_default=True,
            help="Tokens that one simulated token stands for.",
        ),
        click.option(
            "--kv-tokens",
            type=click.IntRange(min=200_000),
            default=H200_8B.kv_tokens,
            show_default=True,
            help="Tokens that an engine's KV holds.",
        ),
        click.option(
            "--link-gbytes",
            type=positive,
            default=H200_8B.card_bytes_per_s / 1e9,
            show_default=True,
            help="Gigabytes a second of an engine's network card.",
        ),
        click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of all chance."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _model(given: dict[str, Any]) -> dict[str, Any]:
    """The engine's model in place of the options that describe it."""
    link, tokens, scale = given.pop("link_gbytes"), given.pop("kv_tokens"), int(given.pop("scale"))
    given["model"] = replace(H200_8B, card_bytes_per_s=link * 1e9, kv_tokens=tokens).scaled(scale)
    return given


def _say(text: str) -> None:
    """Progress, on a terminal only."""
    if sys.stderr.isatty():
        click.echo(f"\r{text:<60}", nl=not text, err=True)


@sim.command(name="fleet")
@_fleet_options
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Requests of a trace. [default: made]"
)
@click.option(
    "--workload",
    type=click.Choice(list(WORKLOADS)),
    default="chats",
    show_default=True,
    help="What is made without a trace.",
)
@click.option(
    "--policies", callback=_policies, default="all", show_default=True, help="Names with commas: " + ", ".join(NAMES)
)
@click.option(
    "--rate-scale",
    type=click.FloatRange(min=0, min_open=True),
    help="Requests come so many times as fast. [default: computing all would take 0.8 of the prefill engines' time]",
)
@click.option("--requests", type=click.IntRange(1, 1_000_000), default=10_000, show_default=True)
@click.option("--load-factor", type=click.FloatRange(min=1), default=1.25, show_default=True, help="As in a spec.")
def fleet(**given: Any) -> None:
    """Compare routing policies on a simulated fleet, by a trace or by generated requests.

    A trace has one JSON object a line: timestamp (ms), input_length, output_length, hash_ids (one for each 512 tokens
    of the prompt; equal ones mean equal tokens there and before). Requests of one timestamp are spread until the next.
    """
    try:
        for line in compare(CompareOptions(**_model(given)), _say):
            click.echo(line)
    except (TraceInvalid, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)


@sim.command(name="flood")
@_fleet_options
@click.option("--prompts", type=click.IntRange(1, 1024), default=NUM_COLD, show_default=True)
@click.option("--off", is_flag=True, help="With admission off only.")
@click.option("--on", is_flag=True, help="With admission on only.")
def flood(**given: Any) -> None:
    """Large cold prompts come at once among steady warm traffic, with admission off and on."""
    is_off, is_on = given.pop("off"), given.pop("on")
    run = FloodRun(**_model(given), has_off=is_off or not is_on, has_on=is_on or not is_off)
    for line in flood_lines(run, _say):
        click.echo(line)
