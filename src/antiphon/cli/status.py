"""``antiphon status``: what really runs on this host; with ``--router``, what one router knows, wherever it runs.

Exit code 0 when every process of every deployment shown is ready, 3 when nothing is up, 1 otherwise. Of a router: 0
when every engine of it is ready, 1 otherwise, or where it does not answer. 2 for a command line that cannot be meant.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from antiphon.cli import shown
from antiphon.cli.config import config_option, spec_file
from antiphon.cli.endpoints import client_of, table
from antiphon.config.load import load_spec
from antiphon.config.plan import BEHIND_ENGINES
from antiphon.config.supervisor_spec import default_state_dir
from antiphon.config.units import format_bytes
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.supervisor import store
from antiphon.supervisor.report import DeploymentReport, ProcessRow, judge, with_load
from antiphon.supervisor.router_load import RoutedEngine, RouterLoad, load_of

EXIT_NOT_ALL_READY = 1
EXIT_NOTHING_UP = 3
_HEADER = ("process", "role", "pid", "state", "port", "uptime", "running", "waiting", "restarts")
_TENANTS_SHOWN = 8
_ENGINES_SHOWN = 16


def resolve_place(config_file: Path | None, state_dir: str | None, name: str | None) -> tuple[str, str | None]:
    """The state folder and the deployment's name. Raises ConfigError.

    A spec file that is named gives both; ``antiphon.yaml`` in the working folder gives the state folder only.
    """
    if config_file is None and state_dir is not None:
        return state_dir, name
    path = spec_file(config_file)
    if path is None:
        return default_state_dir(), name
    spec = load_spec(path, ())
    return state_dir or spec.supervisor.state_dir, name or (spec.name if config_file is not None else None)


def collect(state_dir: str, name: str | None) -> list[DeploymentReport]:
    """The reports of the named deployment, or of all that have a state file; stopped ones only when named."""
    reports = []
    for each in [name] if name is not None else store.known_names(state_dir):
        state = store.read_state(store.deployment_dir(state_dir, each))
        if state is None:
            continue
        report = judge(state)
        # A deployment that was stopped cleanly is shown only when it is asked for; one that died is always shown.
        if name is not None or report.is_up or any(row.state == "dead" for row in report.processes):
            reports.append(report)
    return reports


async def _add_load(reports: Sequence[DeploymentReport]) -> list[DeploymentReport]:
    return list(await asyncio.gather(*(with_load(report) for report in reports)))


def format_uptime(seconds: float | None) -> str:
    """``75`` as ``1m15s``; ``-`` for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def _cells(row: ProcessRow) -> tuple[str, ...]:
    def load(value: int | None) -> str:
        if value is not None:
            return str(value)
        return "?" if row.is_load_unknown else "-"

    pid, port = (str(value) if value is not None else "-" for value in (row.pid, row.port))
    uptime = format_uptime(row.uptime_s)
    is_engine = row.kind != "router" and row.kind not in BEHIND_ENGINES
    running, waiting = (load(value) if is_engine else "-" for value in (row.num_running, row.num_waiting))
    return (row.name, row.role, pid, row.state, port, uptime, running, waiting, str(row.restarts))


def _held(row: ProcessRow) -> str:
    """What a cache server holds."""
    if row.num_objects is None or row.used_bytes is None or row.total_bytes is None:
        return f"{row.name} did not tell what it holds in time ({row.base_url}/status)"
    objects = f"{row.num_objects} object{'s' if row.num_objects != 1 else ''}"
    return f"{row.name} holds {objects}, {format_bytes(row.used_bytes)} of {format_bytes(row.total_bytes)}"


def _known(row: ProcessRow) -> str:
    """What a coordinator knows."""
    if row.num_members is None:
        return f"{row.name} did not tell what it knows in time ({row.base_url}/status)"
    servers = f"{row.num_members} cache server{'s' if row.num_members != 1 else ''}"
    chunks = f"{row.num_objects} different object{'s' if row.num_objects != 1 else ''}"
    return f"{row.name} knows {servers}, which hold {chunks}"


def _waiting(load: RouterLoad) -> list[str]:
    """What waits in a router: cold prompts where they are admitted by bytes, and the tenants with most to do."""
    lines, cold = [], load.cold
    if cold is not None:
        waiting = f"{cold.num_waiting} waiting"
        if cold.num_waiting:
            waiting += f" ({format_bytes(cold.waiting_bytes)}, the oldest for {format_uptime(cold.oldest_wait_s)})"
        held = f", {cold.num_held} held after their prefill" if cold.num_held else ""
        lines.append(f"cold prompts: {waiting}{held}, {format_bytes(cold.in_flight_bytes)} of KV in flight")
    if load.tenants:
        busiest = sorted(load.tenants, key=lambda each: (-each.num_waiting, -each.num_in_flight))
        shown = [f"{each.name} {each.num_in_flight} in flight, {each.num_waiting} waiting" for each in busiest]
        more = f"; {len(shown) - _TENANTS_SHOWN} more" if len(shown) > _TENANTS_SHOWN else ""
        lines.append(f"tenants: {'; '.join(shown[:_TENANTS_SHOWN])}{more}")
    return lines


def _further(report: DeploymentReport) -> list[str]:
    """The engines of its routers that no process of the deployment here is: added at run time, or of another host."""
    own = {row.base_url for row in report.processes}
    lines = []
    for row in report.processes:
        engines = [each for each in row.waiting.engines if each.url not in own] if row.waiting is not None else []
        if engines:
            lines.append(f"{row.name} has further engines, of other hosts or added at run time:")
            lines += [f"  {_engine_line(each)}" for each in engines[:_ENGINES_SHOWN]]
            if len(engines) > _ENGINES_SHOWN:
                lines.append(
                    f"  and {len(engines) - _ENGINES_SHOWN} more: antiphon endpoints list --router {row.base_url}"
                )
    return lines


def _engine_line(engine: RoutedEngine) -> str:
    return f"{engine.role} {engine.url} {engine.state}, {engine.num_in_flight} in flight"


def table_lines(report: DeploymentReport) -> list[str]:
    """The table of one deployment, and below it what a reader should know about it."""
    if report.is_supervisor_alive:
        supervisor = f"supervisor pid {report.supervisor_pid}{', stopping' if report.is_stopping else ''}"
    elif report.is_up or any(row.state == "dead" for row in report.processes):
        supervisor = f"supervisor gone (was pid {report.supervisor_pid})"
    else:
        supervisor = "stopped"
    lines = [f"{report.name}: {supervisor}"]
    lines += shown.table_lines([_HEADER, *map(_cells, report.processes)])
    lines += [_held(row) for row in report.processes if row.kind == "cache_server" and row.state == "ready"]
    lines += [f"{row.name} {shown.printable(each)}" for row in report.processes for each in row.lacks]
    lines += [_known(row) for row in report.processes if row.kind == "coordinator" and row.state == "ready"]
    for row in report.processes:
        lines += _waiting(row.waiting) if row.waiting is not None else []
    lines += _further(report)
    for row in report.processes:
        if row.last_exit and row.state not in ("ready", "stopped"):
            lines.append(f"{row.name} {row.last_exit} (log: {row.log_path})")
    if report.orphan_pids:
        pids = ", ".join(map(str, report.orphan_pids))
        lines.append(f"still running without a supervisor: pid {pids}; antiphon down --name {report.name} ends them")
    elif not report.is_supervisor_alive and any(row.state == "dead" for row in report.processes):
        lines.append(f"nothing of it runs any more; antiphon down --name {report.name} puts it away")
    return lines


def exit_code_of(reports: Sequence[DeploymentReport]) -> int:
    """The exit code of ``antiphon status`` for these reports."""
    if not any(report.is_up for report in reports):
        return EXIT_NOTHING_UP
    return 0 if all(report.is_all_ready for report in reports) else EXIT_NOT_ALL_READY


def _show_router(url: str, admin_key_file: str | None, *, is_json: bool) -> int:
    """Show what one router says of its engines, and of what waits in it; returns the exit code.

    Raises:
        AntiphonError: it does not answer, is no router, or refuses.
    """
    told = client_of(url, admin_key_file).ask("GET", "/status")
    load = load_of(told)
    if load is None:
        raise AntiphonError(f"what answers at {url} is no router", remedy="name a router with --router")
    num_ready = sum(engine.state == "ready" for engine in load.engines)
    if is_json:
        click.echo(json.dumps(told, indent=2))
    else:
        num_active = told.get("active", 0)
        click.echo(f"router {url}: {num_ready} of {len(load.engines)} engines ready, {num_active} requests in progress")
        click.echo("\n".join([*table({"endpoints": told["engines"]}), *_waiting(load)]))
    return 0 if num_ready == len(load.engines) else EXIT_NOT_ALL_READY


class NamedCommand(click.Command):
    """A command about one deployment, which knows what is meant by a name that is given without ``--name``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            words = " ".join(rest)
            ctx.fail(f"Got unexpected extra argument ({words}). Name a deployment with --name {rest[0]}")
        return rest


@click.command(name="status", cls=NamedCommand)
@click.option("--name", help="The deployment (default: all of this user on this host).")
@config_option
@click.option("--state-dir", help="Folder of the state files (default: as in the spec).")
@click.option("--router", "url", help="Ask this router instead, http://HOST:PORT: one that was started by hand, say.")
@click.option("--admin-key-file", help="With --router: file with its admin key, where it has one.")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def status(name: str | None, config_file: Path | None, state_dir: str | None, form: str, **router: str | None) -> None:
    """Show the processes of this host's deployments and whether they live; or the engines of one router."""
    try:
        if router["url"] is not None:
            if name is not None or config_file is not None or state_dir is not None:
                raise ConfigError("--router goes without --name, --config and --state-dir: it asks that router alone")
            sys.exit(_show_router(router["url"], router["admin_key_file"], is_json=form == "json"))
        if router["admin_key_file"] is not None:
            raise ConfigError("--admin-key-file goes with --router")
        place, name = resolve_place(config_file, state_dir, name)
        reports = asyncio.run(_add_load(collect(place, name)))
    except AntiphonError as error:
        click.echo(str(error), err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    if form == "json":
        click.echo(json.dumps({"deployments": [asdict(report) for report in reports]}, indent=2))
    elif reports:
        click.echo("\n\n".join("\n".join(table_lines(report)) for report in reports))
    else:
        click.echo(f"nothing is up{f' under the name {name}' if name else ''} (state folder: {place})")
    sys.exit(exit_code_of(reports))
