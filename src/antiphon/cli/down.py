"""``antiphon down``: stop a deployment of this host from anywhere, and say what remains.

Exit code 0 when nothing of it runs any more (also when nothing ran), 1 when something remains, 2 when it is not clear
which deployment is meant.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from antiphon.cli.config import config_option
from antiphon.cli.status import NamedCommand, collect, resolve_place
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.supervisor import store
from antiphon.supervisor.takedown import take_down


def which(state_dir: str, name: str | None) -> str | None:
    """The deployment that is meant: the named one, or the only one that is up; None when none is up.

    Raises ConfigError when several are up.
    """
    if name is not None:
        return name
    names = [report.name for report in collect(state_dir, None) if report.is_up]
    if len(names) > 1:
        raise ConfigError(f"several deployments are up: {', '.join(names)}", remedy="choose one with --name")
    return names[0] if names else None


@click.command(name="down", cls=NamedCommand)
@click.option("--name", help="The deployment (default: the only one that is up).")
@config_option
@click.option("--state-dir", help="Folder of the state files (default: as in the spec).")
@click.option("--timeout-s", type=click.FloatRange(min=0), help="Longest wait (default: from the grace periods).")
def down(name: str | None, config_file: Path | None, state_dir: str | None, timeout_s: float | None) -> None:
    """Stop a deployment: the router drains, then the engines end."""
    try:
        place, name = resolve_place(config_file, state_dir, name)
        name = which(place, name)
        if name is None:
            click.echo(f"nothing is up (state folder: {place})")
            sys.exit(0)
        result = take_down(store.deployment_dir(place, name), click.echo, timeout_s=timeout_s)
    except AntiphonError as error:
        click.echo(str(error), err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    if result.is_put_away:
        click.echo(f"{name} had ended without being stopped; it is put away, and nothing of it is left")
    elif not result.was_up:
        click.echo(f"{name} is not up (state folder: {place})")
    elif result.is_down:
        click.echo(f"{name} is down; nothing of it is left")
    else:
        if result.is_supervisor_alive:
            click.echo(f"{name} is still stopping; its supervisor runs. Ask again, or wait longer with --timeout-s.")
        if result.remaining_pids:
            click.echo(f"still running: pid {', '.join(map(str, result.remaining_pids))}")
    sys.exit(0 if result.is_down else 1)
