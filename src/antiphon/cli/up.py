"""``antiphon up``: check the spec, start what belongs to this host, stay until Ctrl-C.

Exit code 0 after a requested stop, 1 when something did not start or every process failed, 2 when the spec is refused.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from antiphon.cli.config import config_option, set_option, spec_file, spec_from
from antiphon.cli.flags import FlagsCommand, given_values, spec_options
from antiphon.config.checks import run_checks
from antiphon.config.compile import Compiled, compile_all
from antiphon.config.facts import gather_facts
from antiphon.config.load import load_spec
from antiphon.config.plan import ProcessPlan
from antiphon.config.problems import SpecError
from antiphon.config.spec import Spec
from antiphon.core.errors import AntiphonError, ConfigError, StartError
from antiphon.protocol.openai import curl_line
from antiphon.supervisor.console import Console
from antiphon.supervisor.report import refuse_second
from antiphon.supervisor.supervisor import StartCancelled, Supervisor

EXIT_FAILED = 1
EXIT_REFUSED = 2


@dataclass(frozen=True)
class Selection:
    """Which processes of a deployment this command starts."""

    started: tuple[ProcessPlan, ...]
    elsewhere: tuple[ProcessPlan, ...]
    """Those of other hosts that ``--only`` would have let through."""


def select_plans(plans: Sequence[ProcessPlan], only: Sequence[str], local_hosts: frozenset[str]) -> Selection:
    """The plans that ``only`` (roles or names; empty: all) lets through, by whether their host is this machine.

    Raises ConfigError for a value of ``only`` that is no role and no name of the deployment.
    """
    known = {plan.role for plan in plans} | {plan.name for plan in plans}
    for value in only:
        if value not in known:
            raise ConfigError(f"--only {value}: there is no such process", remedy=f"one of: {', '.join(sorted(known))}")
    wanted = [plan for plan in plans if not only or plan.role in only or plan.name in only]
    return Selection(
        started=tuple(plan for plan in wanted if plan.host in local_hosts),
        elsewhere=tuple(plan for plan in wanted if plan.host not in local_hosts),
    )


def prepare(
    config_path: Path | None, sets: Sequence[str], only: Sequence[str]
) -> tuple[Compiled, Selection, list[str]]:
    """Load, compile and check; returns what to start and the notices. Raises SpecError or ConfigError."""
    compiled = compile_all(load_spec(config_path, sets))
    facts = gather_facts(compiled)
    selection = select_plans(compiled.plans, only, facts.local_hosts)
    report = run_checks(compiled, facts, started=[plan.name for plan in selection.started])
    if report.problems:
        raise SpecError(report.problems)
    notices = [str(notice) for notice in report.notices]
    for host in sorted({plan.host for plan in selection.elsewhere}):
        names = ", ".join(plan.name for plan in selection.elsewhere if plan.host == host)
        where = f"--config {config_path} " if config_path else ""
        notices.append(f"not started here: {names} on {host}. See: antiphon config render {where}--host {host}")
    started = {plan.name for plan in selection.started}
    for server in compiled.servers:
        served = [engine.name for engine in compiled.engines if engine.name in started and server.serves(engine)]
        if served and server.name not in started:
            notices.append(f"{server.name}, the cache server of {', '.join(served)}, is not started by this command")
    if not selection.started:
        raise ConfigError("no process of this deployment belongs to this host", remedy="; ".join(notices) or None)
    return compiled, selection, notices


def closing_lines(selection: Selection, model_name: str, records: Sequence[tuple[str, str]]) -> list[str]:
    """What a reader needs once everything is ready. ``records``: name and log path of each process."""
    lines = ["", "Ready.", ""]
    width = max(len(plan.name) for plan in selection.started)
    lines += [f"  {plan.name:<{width}}  {plan.base_url}" for plan in selection.started]
    routers = [plan for plan in selection.started if plan.kind == "router"]
    if routers:
        lines += ["", "Try it:", "", f"  {curl_line(routers[0].base_url, model_name)}"]
    lines += ["", "Logs:", ""]
    lines += [f"  {name:<{width}}  {path}" for name, path in records]
    return [*lines, "", "antiphon status shows what runs; Ctrl-C here, or antiphon down, stops it.", ""]


async def _serve(supervisor: Supervisor, console: Console, selection: Selection, model_name: str) -> int:
    undo = supervisor.handle_signals()
    try:
        await supervisor.start()
        records = [(record.name, record.log_path) for record in supervisor.records()]
        console.plain("\n".join(closing_lines(selection, model_name, records)))
        await supervisor.run_until_stopped()
    except StartCancelled:
        return 0
    except StartError as error:
        console.say(error.message)
        if error.remedy:
            console.say(f"fix: {error.remedy}")
        return EXIT_FAILED
    finally:
        undo()
    return 0


def _refuse(error: AntiphonError, exit_code: int) -> int:
    text = str(error)
    if not isinstance(error, SpecError) and error.remedy is not None:
        text = f"{error.message}\n  fix: {error.remedy}"
    click.echo(text, err=True)
    return exit_code


def sets_of(sets: Sequence[str], params: dict[str, Any]) -> list[str]:
    """``--set`` values, then the spec's own options, all as ``path=value``: an option wins over ``--set``."""
    given = given_values(params)
    return [
        *sets,
        *(f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in given.items()),
    ]


@click.command(name="up", cls=FlagsCommand)
@config_option
@set_option
@click.option(
    "--only",
    multiple=True,
    metavar="ROLE|NAME",
    help="Start only prefill, decode, router, cache_server, coordinator, or one process.",
)
@click.option("--quiet-logs", is_flag=True, help="Do not show the processes' log lines on the console.")
@spec_options(Spec)
def up(config_file: Path | None, sets: tuple[str, ...], only: tuple[str, ...], quiet_logs: bool, **params: Any) -> None:
    """Start the deployment's processes on this host and stay until Ctrl-C.

    Every field of the spec is an option as well, by its dotted path; an option wins over --set, --set over the file.
    """
    sys.exit(run_up(spec_file(config_file), sets_of(sets, params), only, has_logs=not quiet_logs))


def run_up(config_path: Path | None, sets: Sequence[str], only: Sequence[str], *, has_logs: bool) -> int:
    """What ``antiphon up`` does; returns the exit code."""
    try:
        spec = spec_from(config_path, sets)
        # Before the checks, which would find the ports of that very deployment in use.
        refuse_second(spec.supervisor.state_dir, spec.name)
        compiled, selection, notices = prepare(config_path, sets, only)
    except StartError as error:
        return _refuse(error, EXIT_FAILED)
    except ConfigError as error:
        return _refuse(error, EXIT_REFUSED)
    console = Console(has_logs=has_logs)
    try:
        for notice in notices:
            console.say(notice)
        supervisor = Supervisor(selection.started, compiled.spec.supervisor, compiled.spec.name, console)
        return asyncio.run(_serve(supervisor, console, selection, compiled.spec.model.served))
    finally:
        console.close()
