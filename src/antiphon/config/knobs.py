"""The fields of a spec model as plain values, for what is made from them: command-line options and documentation."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from antiphon.config.explain import explain
from antiphon.config.model import SpecModel
from antiphon.config.problems import SpecError
from antiphon.config.units import Bytes

Kind = Literal["bool", "int", "float", "bytes", "text", "choice", "list", "mapping"]
Model = TypeVar("Model", bound=SpecModel)
_PLAIN: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", str: "text", Bytes: "bytes"}


@dataclass(frozen=True)
class Knob:
    """One field that holds a value rather than a section."""

    path: str
    """Dotted path from the model that was asked: ``prefill.replicas``."""
    kind: Kind
    """What it takes; a union of several is ``text``, to be read as YAML."""
    item_kind: Kind | None
    """What its items are, where it is a list."""
    choices: tuple[str, ...]
    """The values allowed, where it is a choice."""
    default: Any
    """None where there is none, or where it is made at run time."""
    description: str
    is_required: bool
    model: type[SpecModel]
    """The model that the field belongs to."""
    flag: str = ""
    """Its option without the leading dashes: the path with dashes, unless the field says otherwise."""


def knobs(model: type[SpecModel], prefix: str = "") -> Iterator[Knob]:
    """Every knob of ``model``, those of its sections included, in the order in which they are declared."""
    for name, field in model.model_fields.items():
        inner = section_model(field)
        if inner is not None:
            yield from knobs(inner, f"{prefix}{name}.")
        else:
            yield _knob(model, f"{prefix}{name}", field)


def section_model(field: FieldInfo) -> type[SpecModel] | None:
    """The model of ``field`` where it is a section, else None."""
    inner = field.annotation
    return inner if isinstance(inner, type) and issubclass(inner, SpecModel) else None


def model_of(model: type[Model], values: Mapping[str, Any]) -> Model:
    """A ``model`` made of ``values``, for one without sections; SpecError with every problem."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise SpecError(explain(error, model)) from error


def _knob(model: type[SpecModel], path: str, field: FieldInfo) -> Knob:
    bare = _bare(field.annotation)
    origin, args = typing.get_origin(bare), typing.get_args(bare)
    is_list = origin is list
    return Knob(
        path=path,
        kind=_kind(bare),
        item_kind=_kind(_bare(args[0])) if is_list else None,
        choices=tuple(str(value) for value in args) if origin is typing.Literal else (),
        default=None if field.is_required() or field.default_factory is not None else field.default,
        description=field.description or "",
        is_required=field.is_required(),
        model=model,
        flag=_flag(path, field),
    )


def _flag(path: str, field: FieldInfo) -> str:
    """``router.cache_servers`` is given once for each server, as ``--router.cache-server``: it says so itself."""
    said = field.json_schema_extra.get("flag") if isinstance(field.json_schema_extra, dict) else None
    section, dot, name = path.rpartition(".")
    return f"{section}{dot}{said if isinstance(said, str) else name}".replace("_", "-")


def _kind(bare: Any) -> Kind:
    origin = typing.get_origin(bare)
    if origin is typing.Literal:
        return "choice"
    if origin is list:
        return "list"
    return "mapping" if origin is dict else _PLAIN.get(bare, "text")


def _bare(annotation: Any) -> Any:
    """The annotation without ``| None`` and without what pydantic hangs on it; str for any other union."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return annotation if annotation == Bytes else _bare(args[0])
    if origin in (typing.Union, types.UnionType):
        kinds = [part for part in args if part is not type(None)]
        return _bare(kinds[0]) if len(kinds) == 1 else str
    return annotation
