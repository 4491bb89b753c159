"""``antiphon demo``: see prefill and decode apart on this machine."""

from __future__ import annotations

import asyncio
import sys

import click

from antiphon.core.errors import AntiphonError


@click.command()
@click.option("--stay", is_flag=True, help="Keep everything up after the questions, until Ctrl-C.")
def demo(stay: bool) -> None:
    """Serve a small model with prefill and decode on two engines, ask it three questions, show the receipts, stop."""
    try:
        from antiphon.verify.demo import Demo
    except ModuleNotFoundError as error:
        click.echo(
            f"antiphon demo: the package {error.name} is not installed\n"
            "  fix: run make demo in a clone, which installs what the demo needs",
            err=True,
        )
        sys.exit(1)
    try:
        code = asyncio.run(Demo(click.echo, stay=stay).run())
    except AntiphonError as error:
        click.echo(f"\nantiphon demo: {error}", err=True)
        code = 1
    sys.exit(code)
