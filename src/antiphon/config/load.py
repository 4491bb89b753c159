"""From a file and flags to a :class:`Spec`, or to every problem that they have.

Precedence: defaults, then the file, then flags (``path=value``). Nothing here looks at the host; that is ``facts.py``.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from antiphon.config.explain import explain
from antiphon.config.problems import Problem, SpecError
from antiphon.config.spec import Spec
from antiphon.config.tenant_files import beside

FILE_MAX_BYTES = 1_000_000
"""A spec is a page of text; more is a wrong file, and would be parsed slowly."""

Sets = Mapping[str, Any] | Sequence[str | tuple[str, Any]]
"""``{"prefill.replicas": 2}``, or ``["prefill.replicas=2", ("prefill.replicas", 2)]``, where later ones win."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, of which YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping", node.start_mark, f"{key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_spec(path: str | Path | None = None, sets: Sets = ()) -> Spec:
    """The spec in the file at ``path`` (none: defaults only), with ``sets`` laid over it.

    Args:
        path: a YAML file of at most 1 MB, in UTF-8.
        sets: values by dotted path. Text is read as YAML where the field is not text.

    Raises:
        SpecError: with every problem found.
    """
    raw: dict[str, Any] = {}
    if path is not None:
        raw = read_mapping(path)
        beside(Path(path), raw)
    problems: list[Problem] = []
    for dotted, value in _pairs(sets, problems):
        problem = _assign(raw, dotted, value)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise SpecError(problems)
    try:
        return Spec.model_validate(raw)
    except ValidationError as error:
        raise SpecError(explain(error, Spec)) from error


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The YAML mapping in the file at ``path``; SpecError where there is none, with line and column where known."""
    name = str(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        problem = Problem(
            name, f"cannot be read: {error.strerror or error}", "name an existing file with --config FILE"
        )
        raise SpecError([problem]) from error
    if len(data) > FILE_MAX_BYTES:
        fix = "name the spec file with --config FILE"
        raise SpecError([Problem(name, f"is {len(data)} bytes long; a spec has at most {FILE_MAX_BYTES}", fix)])
    try:
        loaded = yaml.load(data.decode("utf-8"), Loader=_Loader)  # a subclass of SafeLoader
    except UnicodeDecodeError as error:
        raise SpecError([Problem(name, f"is not UTF-8 at byte {error.start}", "save the file as UTF-8")]) from error
    except yaml.YAMLError as error:
        raise SpecError([_yaml_problem(name, error)]) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        fix = "start it with sections such as `model:` and `prefill:`"
        raise SpecError([Problem(name, f"is a YAML {type(loaded).__name__}, not a mapping", fix)])
    return loaded


def _yaml_problem(name: str, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or "cannot be parsed"
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return Problem(
        name,
        f"{where}{what}",
        "correct the YAML there; sections are indented by spaces, and text with `: ` or `#` is quoted",
    )


def _pairs(sets: Sets, problems: list[Problem]) -> Iterator[tuple[str, Any]]:
    """``sets`` as pairs of dotted path and value; what is no pair is added to ``problems``."""
    if isinstance(sets, Mapping):
        yield from sets.items()
        return
    for item in sets:
        if isinstance(item, tuple):
            yield item
            continue
        dotted, sign, value = item.partition("=")
        if sign and dotted.strip():
            yield dotted.strip(), value
        else:
            problems.append(Problem(f"--set {item}", "is not path=value", "write it like --set prefill.replicas=2"))


def _assign(raw: dict[str, Any], dotted: str, value: Any) -> Problem | None:
    """Put ``value`` at ``dotted`` in ``raw``, in place."""
    *parents, last = dotted.split(".")
    place = raw
    for index, part in enumerate(parents):
        inner = place.setdefault(part, {})
        if inner is None:
            inner = place[part] = {}
        if not isinstance(inner, dict):
            here = ".".join(parents[: index + 1])
            return Problem(dotted, f"{here} is a value, not a section", f"set {here} itself, or a key of a section")
        place = inner
    try:
        place[last] = _typed(dotted, value) if isinstance(value, str) else value
    except yaml.YAMLError as error:
        return Problem(dotted, f"{value!r} is not YAML: {getattr(error, 'problem', None) or error}", "quote the value")
    return None


def _typed(dotted: str, text: str) -> Any:
    """``text`` as the field at ``dotted`` wants it: text stays text, the rest is read as YAML, a list may be a,b,c."""
    kinds = _kinds(_annotation(Spec, dotted.split(".")))
    if text in ("null", "~") and type(None) in kinds:
        return None
    if str in kinds and kinds <= {str, type(None)}:
        return text
    value = yaml.safe_load(text)
    if list in kinds and not isinstance(value, list | dict):
        items = [item.strip() for item in text.split(",") if item.strip()]
        return [yaml.safe_load(item) if item.isdigit() else item for item in items]
    return value


def _annotation(model: type[BaseModel], parts: Sequence[str]) -> Any:
    """The annotation of the field at ``parts``, or None where there is no such field or it is inside a mapping."""
    field = model.model_fields.get(parts[0])
    if field is None:
        return None
    if len(parts) == 1:
        return field.annotation
    inner = field.annotation
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        return _annotation(inner, parts[1:])
    return str if dict in _kinds(inner) and parts[-2] == "env" else None


def _kinds(annotation: Any) -> set[type]:
    """The plain types of ``annotation``: ``list[str] | None`` is {list, NoneType}."""
    if annotation is None:
        return set()
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_kinds(part) for part in typing.get_args(annotation)))
    if origin is typing.Literal:
        return {type(value) for value in typing.get_args(annotation)}
    return {origin or annotation}
