"""Pydantic's complaints about a spec, said as problems: the dotted path, what is wrong, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from antiphon.config.problems import Problem
from antiphon.config.units import format_bytes

_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "dict": "a mapping",
    "model": "a section with keys of its own",
}


_OTHER_WORDS = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}


def explain(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Every complaint of ``error`` about ``model``, in the order of the spec; one problem a field."""
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        path = _path(detail["loc"], model)
        problems.setdefault(path, _problem(path, detail, model))
    return list(problems.values())


def nearest(name: str, known: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The one of ``known`` that ``name`` most likely meant, if any is as near as ``cutoff`` (0 to 1)."""
    folded = {item.lower().replace("-", "_"): item for item in known}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), list(folded), n=1, cutoff=cutoff)
    return folded[found[0]] if found else None


def split_fix(text: str) -> tuple[str, str | None]:
    """What a validator says, apart from what it says to do: ``no tier: write disk://``, ``no option: leave it out``."""
    for begin in ("write ", "leave "):
        message, sign, fix = text.partition(f": {begin}")
        if sign:
            return message, f"{begin}{fix}"
    return text, None


def limit_of(kind: str, ctx: dict[str, Any]) -> str | None:
    """``at most 60``, of a value that is out of range; None for any other complaint."""
    if kind not in _BOUNDS:
        return None
    key, word = _BOUNDS[kind]
    return f"{word} {ctx[key] if isinstance(ctx[key], int) else format(ctx[key], 'g')}"


def _path(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """``loc`` as a dotted path, without the names of union members that pydantic adds at its end."""
    parts: list[str] = []
    here: Any = model
    for part in loc:
        if isinstance(part, int):
            parts[-1] += f"[{part}]"
        elif here is None and parts and not _is_mapping_key(parts[-1]):
            break
        else:
            parts.append(part)
            field = here.model_fields.get(part) if here is not None else None
            inner = field.annotation if field is not None else None
            here = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
    return ".".join(parts)


def _is_mapping_key(name: str) -> bool:
    return name in ("args", "env", "kv_transfer_config", "quota_bytes")


def _problem(path: str, detail: ErrorDetails, model: type[BaseModel]) -> Problem:
    kind, ctx, value = detail["type"], detail.get("ctx", {}), detail.get("input")
    if kind == "extra_forbidden":
        return _unknown(path, model)
    if kind == "missing":
        return _missing(path)
    message, fix = _value_complaint(kind, ctx, value)
    if kind in _BOUNDS:
        message = _out_of_range(path, kind, ctx, value)
    if message is None:
        message = f"{value!r}: {detail['msg']}"
    hint = _hint(path, model)
    return Problem(path, message, fix if fix is not None else f"correct it ({hint})" if hint else "correct it")


def _out_of_range(path: str, kind: str, ctx: dict[str, Any], value: object) -> str:
    """A size has its limit as a size; any other whole number is written out."""
    limit = limit_of(kind, ctx)
    if any(part.endswith("_bytes") for part in path.split(".")):
        key, word = _BOUNDS[kind]
        limit = f"{word} {format_bytes(ctx[key])}"
        if isinstance(value, int | float) and value < 0:
            limit = f"positive, {limit}"
    return f"{value!r} is out of range: it must be {limit}"


def _value_complaint(kind: str, ctx: dict[str, Any], value: object) -> tuple[str | None, str | None]:
    """What is wrong with ``value``, and what to do; None where pydantic's own words, or the description, must do."""
    if kind == "literal_error":
        choices = str(ctx["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        near = _OTHER_WORDS.get(str(value).lower()) or nearest(str(value), choices)
        return f"{value!r} is not one of {', '.join(choices)}", f"did you mean {near}?" if near in choices else None
    if kind == "value_error":
        return split_fix(str(ctx["error"]))
    if kind == "string_pattern_mismatch":
        return f"{value!r} does not match {ctx['pattern']}", None
    for prefix, wanted in _KINDS.items():
        if kind.startswith(f"{prefix}_"):
            found = "empty" if value is None else f"{value!r} ({type(value).__name__})"
            return f"is {found}, but must be {wanted}", None
    return None, None


def _missing(path: str) -> Problem:
    if path in ("model", "model.path"):
        fix = "add `model:` with `path:`, the folder of the weights or a hub id, or pass --model.path"
        return Problem("model.path", "is required", fix)
    return Problem(path, "is required", f"add {path}")


def _unknown(path: str, model: type[BaseModel]) -> Problem:
    parent, _, key = path.rpartition(".")
    section = _section(model, parent.split(".") if parent else [])
    known = list(section.model_fields) if section is not None else []
    prefix = f"{parent}." if parent else ""
    near = nearest(key, known)
    if near is not None:
        return Problem(path, "is not a known key", f"did you mean {prefix}{near}?")
    # The same word in another section; the section nearest to the top first, where a pool repeats what engine has last.
    places = sorted(_paths(model), key=lambda place: (place.count("."), place.startswith(("prefill.", "decode."))))
    leaves = {place: place.rpartition(".")[2] for place in reversed(places)}
    same = [place for place in places if leaves[place] == key]
    if not same and not parent:
        word = nearest(key, list(leaves.values()), cutoff=0.75)
        same = [place for place in places if leaves[place] == word]
    if same:
        return Problem(path, "is not a known key", f"did you mean {same[0]}?")
    fix = f"known here: {', '.join(known)}" if 0 < len(known) <= 12 else "docs/configuration.md lists what there is"
    return Problem(path, "is not a known key", f"remove it; {fix}")


def _hint(path: str, model: type[BaseModel]) -> str:
    """The description of the field at ``path``: it says unit, range and reason."""
    *parents, last = path.split("[")[0].split(".")
    section = _section(model, parents)
    if section is None or last not in section.model_fields:
        return _hint(".".join(parents), model) if parents else ""
    return (section.model_fields[last].description or "").rstrip(".")


def _section(model: type[BaseModel], parts: Sequence[str]) -> type[BaseModel] | None:
    for part in parts:
        field = model.model_fields.get(part)
        inner = field.annotation if field is not None else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return None
        model = inner
    return model


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted path of ``model``, sections included."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _paths(inner, f"{prefix}{name}.")
