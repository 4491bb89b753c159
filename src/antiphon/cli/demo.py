"""``antiphon demo``: see prefill and decode apart on this machine."""

from __future__ import annotations

import asyncio
import sys

import click

from antiphon.core.errors import AntiphonError
from antiphon.verify.demo import Demo


@click.command()
@click.option("--stay", is_flag=True, help="Keep everything up after the questions, until Ctrl-C.")
def demo(stay: bool) -> None:
    """Serve a small model with prefill and decode on two engines, ask it three questions, show the receipts, stop."""
    try:
        code = asyncio.run(Demo(click.echo, stay=stay).run())
    except AntiphonError as error:
        click.echo(f"\nantiphon demo: {error}", err=True)
        code = 1
    sys.exit(code)
