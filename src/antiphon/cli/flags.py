"""Click options made from a model of the spec, so that a knob is described in one place.

One option a field, with its name, type, default and description. A list may be given again and again, a boolean is a
flag with a ``--no-`` form, a section becomes dotted options (``--router.port``), and a mapping takes YAML. An option
that is not given is absent from the result, so that the file's value, or the default, stands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any, TypeVar

import click

from antiphon.config.knobs import Kind, Knob, Model, knobs, model_of
from antiphon.config.model import SpecModel
from antiphon.config.problems import Problem, SpecError

Command = TypeVar("Command", bound=Callable[..., Any])
_SEPARATOR = "__"
"""Stands for the dot in the names that click passes to a command."""
_TYPES: dict[Kind, Any] = {"int": int, "float": float}
_METAVARS: dict[Kind | None, str] = {"int": "INT", "float": "NUMBER", "mapping": "YAML", "bytes": "BYTES"}


def spec_options(model: type[SpecModel], *, skip: Collection[str] = ()) -> Callable[[Command], Command]:
    """A decorator that gives a command an option for each field of ``model``.

    Args:
        skip: dotted paths of fields, or of whole sections, that get no option.
    """
    options = [_option(knob) for knob in knobs(model) if not _is_in(knob.path, skip)]

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


class FlagsCommand(click.Command):
    """A command with the options of a spec, which says so where a value follows a flag that takes none."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            words = " ".join(rest)
            ctx.fail(f"Got unexpected extra argument{'s' if len(rest) > 1 else ''} ({words}){self._hint(given, rest)}")
        return rest

    def _hint(self, given: list[str], rest: list[str]) -> str:
        """Which flag the first word of ``rest`` was meant for, where it stands behind one."""
        for option, word in pairwise(given):
            flag = next((each for each in self.params if option.replace("_", "-") in _spellings(each)), None)
            if word == rest[0] and isinstance(flag, click.Option) and flag.is_flag:
                bare, off = flag.opts[0], "".join(f", or {name} for false" for name in flag.secondary_opts[:1])
                return f". {option} takes no value: write {bare} for true{off}"
        return ""


def _spellings(parameter: click.Parameter) -> list[str]:
    return [name.replace("_", "-") for name in (*parameter.opts, *parameter.secondary_opts)]


def given_values(params: dict[str, Any]) -> dict[str, Any]:
    """What was given on the command line, by dotted path, out of the parameters that click passes."""
    return {
        name.replace(_SEPARATOR, "."): list(value) if isinstance(value, tuple) else value
        for name, value in params.items()
        if value is not None and value != ()
    }


def model_from_flags(model: type[Model], params: dict[str, Any]) -> Model:
    """A ``model`` without sections from what was given; click.UsageError that names every option that is wrong."""
    try:
        return model_of(model, given_values(params))
    except SpecError as error:
        lines = [_as_flag(problem, model) for problem in error.problems]
        raise click.UsageError("\n".join(lines)) from error


def _as_flag(problem: Problem, model: type[SpecModel]) -> str:
    """``problem`` in the spelling of the command line."""
    flag, fix = f"--{problem.field.replace('_', '-')}", problem.fix
    knob = next((knob for knob in knobs(model) if knob.path == problem.field), None)
    if knob is not None and fix == f"add {knob.path}":
        fix = f"add --{knob.flag} {_METAVARS.get(knob.kind, 'TEXT')}"
    return f"{flag}: {problem.message}\n  fix: {fix}"


def _is_in(path: str, skip: Collection[str]) -> bool:
    return any(path == skipped or path.startswith(f"{skipped}.") for skipped in skip)


def _option(knob: Knob) -> Callable[[Command], Command]:
    flag = f"--{knob.flag}"
    keywords: dict[str, Any] = {"default": None, "help": _help(knob)}
    if knob.kind == "bool":
        section, dot, last = flag.removeprefix("--").rpartition(".")
        flag = f"{flag}/--{section}{dot}no-{last}"
    elif knob.kind == "choice":
        keywords["type"] = click.Choice(knob.choices, case_sensitive=False)
    elif knob.kind == "list":
        keywords |= {"type": str, "multiple": True, "default": (), "metavar": _METAVARS.get(knob.item_kind, "TEXT")}
    else:
        keywords |= {"type": _TYPES.get(knob.kind, str), "metavar": _METAVARS.get(knob.kind, "TEXT")}
    # A field that spells its option in another way than itself has both.
    names = dict.fromkeys((flag, f"--{knob.path.replace('_', '-')}")) if knob.kind != "bool" else (flag,)
    return click.option(*names, knob.path.replace(".", _SEPARATOR), **keywords)


def _help(knob: Knob) -> str:
    if knob.is_required:
        return f"{knob.description} [required]"
    if knob.default in (None, [], {}, ""):
        return knob.description
    if isinstance(knob.default, bool):
        return f"{knob.description} [default: {'on' if knob.default else 'off'}]"
    shown = ", ".join(map(str, knob.default)) if isinstance(knob.default, list) else str(knob.default)
    return f"{knob.description} [default: {shown.removesuffix('.0')}]"
