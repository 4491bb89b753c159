"""The ``antiphon`` command: one file a verb, imported when that verb is used and not before.

Each verb is listed here with its module and help line, so that ``antiphon --help`` imports none of them and
``antiphon router`` imports only what the router needs.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

from antiphon import __version__

VERBS = {
    "demo": ("antiphon.cli.demo", "See it work on this machine: two engines, three questions, receipts."),
    "up": ("antiphon.cli.up", "Start the engines and the router, and keep them running."),
    "down": ("antiphon.cli.down", "Stop a running deployment."),
    "status": ("antiphon.cli.status", "Show the processes of a running deployment."),
    "config": ("antiphon.cli.config", "Check a spec, or print the command line of each process."),
    "bench": ("antiphon.cli.bench", "Measure how fast it is on this machine."),
    "router": ("antiphon.cli.router", "Run the router."),
    "endpoints": ("antiphon.cli.endpoints", "Look at a running router's engines; add, drain and remove them."),
    "cache": ("antiphon.cli.cache", "Look at running cache servers; list, clear and pin what they hold, set quotas."),
    "cache-server": ("antiphon.cli.cache_server", "Run a cache server."),
    "server": ("antiphon.cli.cache_server", "The same as cache-server."),
    "coordinator": ("antiphon.cli.coordinator", "Run a coordinator: it lets cache servers share what they hold."),
    "sim-engine": ("antiphon.cli.sim_engine", "Run a simulated engine."),
    "sim": ("antiphon.cli.sim", "Simulate the cache in virtual time, under seeded faults."),
}
"""Verb to module and help line. The module holds a click command named as the verb, with underscores."""


def dashes(name: str) -> str:
    """Option and verb names are the same with underscores: a field's name may be typed as the spec spells it."""
    return name.replace("_", "-")


class VerbGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*VERBS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(importlib.import_module(VERBS[cmd_name][0]), cmd_name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = dashes(args[0])
        if not name.startswith("-") and name not in self.list_commands(ctx):
            ctx.fail(f"there is no verb {args[0]!r}. {_did_you_mean(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])


def _did_you_mean(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else f"The verbs are {', '.join(known)}."


@click.group(
    cls=VerbGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": dashes,
        "max_content_width": 120,
    },
)
@click.version_option(__version__, prog_name="antiphon")
def main(**_: Any) -> None:
    """Prefill and decode on separate vLLM engines, KV handed over with NIXL."""
