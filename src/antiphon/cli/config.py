"""``antiphon config``: what a spec becomes, and whether it can work."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from antiphon.cli.live_coordinator import ask_coordinator
from antiphon.config.checks import Report, run_checks
from antiphon.config.compile import Compiled, compile_all
from antiphon.config.explain import nearest
from antiphon.config.facts import gather_facts
from antiphon.config.knobs import knobs
from antiphon.config.live import LiveRow, check_live
from antiphon.config.load import Sets, load_spec
from antiphon.config.masking import masked as masked_plan
from antiphon.config.plan import ProcessPlan
from antiphon.config.problems import Notice, Problem, SpecError
from antiphon.config.render import render_json, render_shell
from antiphon.config.spec import Spec
from antiphon.core.ids import new_incarnation
from antiphon.ray.mapping import mapped
from antiphon.ray.render import serve_file
from antiphon.ray.render import spec_file as spec_as_file
from antiphon.ray.serve_file import read_serve_file
from antiphon.supervisor.report import running_ports

DEFAULT_FILE = "antiphon.yaml"
_NO_FILE = Problem(
    "--config",
    f"no {DEFAULT_FILE} in this folder",
    "name one with --config, or start from examples/, or pass --set model.path=FOLDER",
)

config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"The spec [default: {DEFAULT_FILE} where it exists].",
)
set_option = click.option(
    "--set", "sets", multiple=True, metavar="PATH=VALUE", help="Set a field, over the file; may be repeated."
)


def spec_file(config_file: Path | None) -> Path | None:
    """The file to read: the one named, else ``antiphon.yaml`` where it exists, else none."""
    if config_file is None and Path(DEFAULT_FILE).exists():
        return Path(DEFAULT_FILE)
    return config_file


def spec_from(path: Path | None, sets: Sets) -> Spec:
    """As ``load_spec``; without a file, a missing model is said to be a missing file. Raises SpecError."""
    try:
        return load_spec(path, sets)
    except SpecError as error:
        if path is not None:
            raise
        problems = [_NO_FILE if problem.field == "model.path" else problem for problem in error.problems]
        raise SpecError(problems) from None


class SetCommand(click.Command):
    """A command with ``--set``, which knows what is meant by a field of the spec that is given as an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            path = _field_of(error.option_name)
            if path is None:
                raise
            text = f"No such option: {error.option_name}. Write --set {path}={_value_after(given, path)}"
            raise click.NoSuchOption(error.option_name, text, ctx=ctx) from error


def _field_of(option: str) -> str | None:
    """The dotted path of the field of the spec that ``option`` spells."""
    spelled = option.lstrip("-").replace("_", "-")
    return next((knob.path for knob in knobs(Spec) if spelled in (knob.flag, knob.path.replace("_", "-"))), None)


def _value_after(args: list[str], path: str) -> str:
    """The value that ``args`` give to the option that spells the field at ``path``."""
    for index, arg in enumerate(args):
        option, sign, value = arg.partition("=")
        if _field_of(option) == path:
            following = args[index + 1 : index + 2]
            return value if sign else next((each for each in following if not each.startswith("--")), "VALUE")
    return "VALUE"


@click.group()
def config() -> None:
    """Check a spec, or print the command line of each process."""


@config.command(cls=SetCommand)
@config_option
@set_option
@click.option("--host", metavar="HOST", help="Only the processes that run on this host.")
@click.option(
    "--only", metavar="ROLE|NAME", help="Only prefill, decode, router, cache_server, or one process such as prefill-0."
)
@click.option("--format", "form", type=click.Choice(["shell", "json"]), default="shell", show_default=True)
@click.option("--show-secrets", is_flag=True, help="Print the values of keys, tokens and passwords instead of ***.")
@click.option("--ray", is_flag=True, help="Print the Serve config file that the spec means instead (docs/ray.md).")
@click.option(
    "--from-ray",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Print the spec that the Serve config file FILE means instead; nothing else is read.",
)
def render(config_file: Path | None, sets: tuple[str, ...], **options: Any) -> None:
    """Print the exact command line and environment of each process, to start it by hand on its host.

    Each engine's id carries a fresh incarnation: render again before a restart. Values whose names look like secrets
    (api-key, HF_TOKEN) are masked unless --show-secrets is given.
    """
    wanted = _Wanted(**options)
    try:
        if wanted.from_ray is not None:
            wanted.refuse_others(config_file, sets)
            text, notices = _spec_of_serve_file(wanted.from_ray, wanted.show_secrets)
        else:
            compiled = compile_all(spec_from(spec_file(config_file), sets))
            if compiled.problems:
                raise SpecError(compiled.problems)
            text, notices = _rendered(compiled, wanted)
    except SpecError as error:
        _print_problems(error.problems, err=True)
        sys.exit(2)
    for notice in notices:
        click.echo(f"notice: {notice}", err=True)
    click.echo(text, nl=False)


@dataclass(frozen=True)
class _Wanted:
    """What ``render`` shall print."""

    host: str | None
    only: str | None
    form: str
    show_secrets: bool
    ray: bool
    from_ray: Path | None

    def refuse_others(self, config_file: Path | None, sets: tuple[str, ...]) -> None:
        """click.UsageError for an option that ``--from-ray`` would ignore."""
        given = {
            "--config": config_file,
            "--set": sets,
            "--host": self.host,
            "--only": self.only,
            "--format json": self.form == "json",
            "--ray": self.ray,
        }
        others = [name for name, value in given.items() if value]
        if others:
            raise click.UsageError(f"--from-ray prints a spec from FILE alone: leave out {', '.join(others)}")


def _rendered(compiled: Compiled, wanted: _Wanted) -> tuple[str, list[object]]:
    """The text to print, and what to say beside it."""
    if wanted.ray:
        if wanted.host is not None or wanted.only is not None or wanted.form == "json":
            raise click.UsageError("--ray prints the whole deployment as YAML: leave out --host, --only and --format")
        file = serve_file(compiled.spec, show_secrets=wanted.show_secrets)
        return file.text, list(file.notices)
    plans = [plan.born(new_incarnation()) for plan in _selected(compiled.plans, wanted.host, wanted.only)]
    shown = plans if wanted.show_secrets else [masked_plan(plan) for plan in plans]
    notices: list[object] = list(compiled.notices)
    if shown != plans:
        notices.append("values that look like secrets are masked with ***; --show-secrets prints them")
    return (render_shell(shown) if wanted.form == "shell" else render_json(shown)), notices


def _spec_of_serve_file(path: Path, show_secrets: bool) -> tuple[str, list[object]]:
    """The spec that the Serve config file at ``path`` means, as YAML, and what to say beside it; raises SpecError."""
    application = read_serve_file(path)
    found = mapped(application.args, name=application.name, folder=application.folder)
    file = spec_as_file(found.spec, show_secrets=show_secrets)
    left = [
        f"{pool}_config: {', '.join(names)}: only Ray knows these, a spec has no place for them"
        for pool, settings in found.pools.items()
        if (names := settings.only_of_ray)
    ]
    return file.text, [*application.notices, *found.notices, *left, *file.notices]


@config.command(cls=SetCommand)
@config_option
@set_option
@click.option(
    "--live", is_flag=True, help="Try what runs, from this host: ports, health, versions, NIXL, the coordinator."
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def check(config_file: Path | None, sets: tuple[str, ...], live: bool, form: str) -> None:
    """Refuse, before anything starts, what cannot work. Exit 2 with every problem and its remedy.

    With --live, for processes that are running: exit 1 where one cannot be reached or does not fit.
    """
    path = spec_file(config_file)
    name = str(path) if path is not None else "the defaults"
    try:
        compiled = compile_all(spec_from(path, sets))
    except SpecError as error:
        _report(name, None, Report(error.problems, ()), form)
        sys.exit(2)
    spec = compiled.spec
    running = running_ports(spec.supervisor.state_dir, spec.name)
    if running:
        text = (
            f"the ports and the memory that {spec.name} holds were not counted, since it is up "
            f"({', '.join(running)}); memory was checked against all that this host has"
        )
        compiled = replace(compiled, notices=(*compiled.notices, Notice("name", text)))
    report = run_checks(compiled, replace(gather_facts(compiled), running=running), is_running=live)
    if report.problems or not live:
        _report(name, compiled, report, form)
        sys.exit(2 if report.problems else 0)
    rows = [*check_live(compiled), *ask_coordinator(compiled)]
    _print_rows(rows, form)
    sys.exit(0 if all(row.is_ok for row in rows) else 1)


def _selected(plans: tuple[ProcessPlan, ...], host: str | None, only: str | None) -> list[ProcessPlan]:
    """The plans on ``host`` that ``only`` names; click.UsageError with the nearest where there is none."""
    hosts = list(dict.fromkeys(plan.host for plan in plans))
    if host is not None and host not in hosts:
        raise click.UsageError(f"no process runs on {host!r}; the hosts are {', '.join(hosts)}")
    names = list(dict.fromkeys([*(plan.role for plan in plans), *(plan.name for plan in plans)]))
    if only is not None and only not in names:
        near = nearest(only, names)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(names)}"
        raise click.UsageError(f"no process is called {only!r}; {hint}")
    return [plan for plan in plans if host in (None, plan.host) and only in (None, plan.role, plan.name)]


def _report(name: str, compiled: Compiled | None, report: Report, form: str) -> None:
    if form == "json":
        answer: dict[str, Any] = {
            "ok": not report.problems,
            "problems": [vars(problem) for problem in report.problems],
            "notices": [vars(notice) for notice in report.notices],
            "processes": [plan.name for plan in compiled.plans] if compiled is not None else [],
        }
        click.echo(json.dumps(answer, indent=2))
        return
    for notice in report.notices:
        click.echo(f"notice: {notice}")
    _print_problems(report.problems)
    if report.problems:
        count = len(report.problems)
        click.echo(f"{name}: {count} problem{'s' if count > 1 else ''}; nothing was started")
    elif compiled is not None:
        click.echo(f"{name}: ok")
        for plan in compiled.plans:
            ports = ", ".join(f"{use.replace('_', ' ')} {port}" for use, port in plan.ports.items())
            click.echo(f"  {plan.name}: {plan.kind} on {plan.host}, {ports}")


def _print_problems(problems: tuple[Problem, ...], *, err: bool = False) -> None:
    for problem in problems:
        click.echo(str(problem), err=err)


def _print_rows(rows: list[LiveRow], form: str) -> None:
    if form == "json":
        click.echo(json.dumps({"ok": all(row.is_ok for row in rows), "rows": [vars(row) for row in rows]}, indent=2))
        return
    cells = [("process", "tried", "result"), *((row.process, row.target, row.result) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
    marks = ["  ", *("ok" if row.is_ok else "no" for row in rows)]
    fixes = ["", *(row.fix for row in rows)]
    for mark, (process, target, result), fix in zip(marks, cells, fixes, strict=True):
        click.echo(f"{mark}  {process:<{widths[0]}}  {target:<{widths[1]}}  {result}".rstrip())
        if fix:
            click.echo(f"      fix: {fix}")
