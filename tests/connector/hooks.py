"""Holds a connector's class against recorded versions of vLLM: sources in, findings out, nothing imported."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from tests.connector.record_signatures import classes, methods_of, own_attributes

SIGNATURES = Path(__file__).parent / "signatures"
VERSIONS = ("0.26", "0.32")

Json = dict[str, Any]


def records() -> dict[str, Json]:
    """What was recorded, by version."""
    return {version: json.loads((SIGNATURES / f"{version}.json").read_text()) for version in VERSIONS}


def problems(source: str, name: str, recorded: dict[str, Json]) -> list[str]:
    """What is wrong with the class ``name`` of ``source`` under any of the recorded versions."""
    node = classes(source)[name]
    methods = methods_of(node)
    known = {hook for record in recorded.values() for hook in record["hooks"]}
    found = [
        f"{method}: no version of vLLM has this hook"
        for method in methods
        if not method.startswith("_") and method not in known
    ]
    for version, record in recorded.items():
        found += [f"{version}: {problem}" for problem in _problems_under(node, methods, record)]
    return found


def _problems_under(node: ast.ClassDef, methods: dict[str, Json], record: Json) -> list[str]:
    found = [
        f"{hook} is abstract, and not there"
        for hook, signature in record["hooks"].items()
        if signature["is_abstract"] and hook not in methods
    ]
    theirs = {*record["base_attributes"], *record["base_private"]}
    found += [f"{name} belongs to vLLM's base class" for name in (*own_attributes(node), *methods) if name in theirs]
    for hook, signature in {**record["hooks"], "__init__": record["constructor"]}.items():
        own = methods.get(hook)
        if own is None:
            continue
        if own["kind"] != signature["kind"]:
            found.append(f"{hook} is a {own['kind']}, where vLLM has a {signature['kind']}")
        found += [f"{hook} {problem}" for problem in _difference(own["parameters"], signature["parameters"])]
        for call in record["calls"].get(hook, []):
            if (problem := _misfit(own["parameters"], call)) is not None:
                found.append(f"{hook} is called in {call['file']}:{call['line']}: {problem}")
    return found


def _difference(own: list[Json], theirs: list[Json]) -> list[str]:
    """What keeps a call that fits ``theirs`` from fitting ``own``: names and places, and what is required."""
    found = []
    takes_all = {item["kind"] for item in own}
    named = [item for item in own if item["kind"] == "named"]
    wanted = [item for item in theirs if item["kind"] == "named"]
    for index, parameter in enumerate(wanted):
        if index >= len(named):
            if not {"args", "kwargs"} <= takes_all:
                found.append(f"lacks the parameter {parameter['name']}")
        elif named[index]["name"] != parameter["name"]:
            found.append(f"calls its parameter {index + 1} {named[index]['name']}, where vLLM has {parameter['name']}")
        elif parameter["is_optional"] and not named[index]["is_optional"]:
            found.append(f"requires {parameter['name']}, which is optional")
    extra = [item["name"] for item in named[len(wanted) :] if not item["is_optional"]]
    extra += [item["name"] for item in own if item["kind"] == "keyword" and not item["is_optional"]]
    found += [f"requires {name}, which vLLM does not give" for name in extra]
    for kind in ("args", "kwargs"):
        if any(item["kind"] == kind for item in theirs) and kind not in takes_all:
            found.append(f"lacks **{kind}" if kind == "kwargs" else f"lacks *{kind}")
    return found


def _misfit(own: list[Json], call: Json) -> str | None:
    """Why a recorded call does not fit; None where it does, or where its arguments cannot be counted."""
    named = [item for item in own if item["kind"] == "named"]
    kinds = {item["kind"] for item in own}
    if call["num_positional"] > len(named) and "args" not in kinds:
        return f"{call['num_positional']} arguments, where {len(named)} are taken"
    names = {item["name"] for item in own if item["kind"] in ("named", "keyword")}
    for keyword in call["keywords"]:
        if keyword not in names and "kwargs" not in kinds:
            return f"the keyword {keyword} is not taken"
    if call["has_kwargs"] and "kwargs" not in kinds:
        return "further keywords are not taken"
    given = {item["name"] for item in named[: call["num_positional"]]} | set(call["keywords"])
    missing = [item["name"] for item in own if not item["is_optional"] and item["name"] not in given]
    if missing and not call["has_args"] and not call["has_kwargs"]:
        return f"{', '.join(missing)} is not given"
    return None
