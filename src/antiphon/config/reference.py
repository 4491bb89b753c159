"""``docs/configuration.md``, made from the spec, so that every knob is described once.

``python -m antiphon.config.reference`` writes it to standard output.
"""

from __future__ import annotations

import sys

from antiphon.config.knobs import Knob, knobs, section_model
from antiphon.config.model import SpecModel
from antiphon.config.spec import DecodeSpec, EngineSpec, PoolSpec, Spec

_HEAD = """\
# Configuration

Generated from the spec by `python -m antiphon.config.reference`; a test keeps it in step.

A deployment is one file, `antiphon.yaml`. Only `model.path` is required. Values come from the defaults, then the file,
then the flags of `antiphon up`: each field below is a flag too (`--router.port 8080`), and `--set path=value` sets any
path, also one inside a mapping (`--set engine.args.seed=1`). A true/false field is a flag without a value:
`--tracing.enabled` for true, `--tracing.no-enabled` for false.

- `antiphon config check` refuses what cannot work before anything starts; `--live` tries running processes, and asks a
  coordinator that `cache.coordinator_url` names whether it takes the cluster secret.
- `antiphon config render` prints the command line and environment of every process; values that look
  like secrets are masked unless `--show-secrets` is given.

"""
_KINDS = {
    "bool": "true/false",
    "int": "integer",
    "float": "number",
    "text": "text",
    "mapping": "mapping",
    "bytes": "bytes",
}


def reference() -> str:
    """The whole page, in Markdown: a section of the page for each section of the spec."""
    sections: dict[str, list[Knob]] = {}
    for knob in knobs(Spec):
        if not _is_repeated(knob):
            sections.setdefault(knob.path.rpartition(".")[0], []).append(knob)
    return _HEAD + "\n".join(_section(path, rows) for path, rows in sections.items())


def _is_repeated(knob: Knob) -> bool:
    """Whether another table has it: a pool may set every knob of ``engine``, and decode what prefill has."""
    parts = knob.path.split(".")
    if parts[0] in ("prefill", "decode") and parts[1] in EngineSpec.model_fields:
        return True
    return knob.model is DecodeSpec and parts[1] not in DecodeSpec.__annotations__


def _section(path: str, rows: list[Knob]) -> str:
    lines = [f"## `{path}`" if path else "## The deployment", ""]
    if path:
        lines += [_description(path), ""]
    if issubclass(rows[0].model, PoolSpec):
        lines += ["Every field of `engine` may be set here too, for this pool only; `args` and `env` are merged.", ""]
    if rows[0].model is DecodeSpec:
        lines += ["The fields are those of `prefill`, with other ports:", ""]
    lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
    for knob in rows:
        assert "|" not in knob.description, f"{knob.path}: a bar would end the table cell"
        lines.append(f"| `{knob.path}` | {_type(knob)} | {_default(knob)} | {knob.description} |")
    return "\n".join(lines) + "\n"


def _description(path: str) -> str:
    model: type[SpecModel] = Spec
    text = ""
    for part in path.split("."):
        field = model.model_fields[part]
        inner = section_model(field)
        assert inner is not None, path
        model, text = inner, field.description or ""
    return text


def _type(knob: Knob) -> str:
    if knob.kind == "choice":
        return " or ".join(f"`{choice}`" for choice in knob.choices)
    return f"list of {_KINDS.get(knob.item_kind or '', 'text')}" if knob.kind == "list" else _KINDS[knob.kind]


def _default(knob: Knob) -> str:
    if knob.is_required:
        return "required"
    if knob.default is None:
        return "–"
    if isinstance(knob.default, bool):
        return f"`{str(knob.default).lower()}`"
    if isinstance(knob.default, list):
        return f"`{', '.join(knob.default)}`"
    return f"`{knob.default:g}`" if isinstance(knob.default, float) else f"`{knob.default}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
