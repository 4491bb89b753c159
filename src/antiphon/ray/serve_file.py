"""A Serve config file: the YAML that ``serve deploy`` takes, read for its one application of ours.

Invariants of what :func:`read_serve_file` returns: exactly one application of the file names the builder, every key of
the file is one that Serve knows, and ``args`` are checked. The options of Serve itself (HTTP, logs) are Serve's: their
names are checked and their values are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from antiphon.config.explain import nearest
from antiphon.config.load import read_mapping
from antiphon.config.problems import Notice, Problem, SpecError
from antiphon.ray.schema import CONFIGS, PDServingArgs, parse

IMPORT_PATH = "antiphon.ray:build_pd_openai_app"
RAY_IMPORT_PATH = "ray.serve.llm:build_pd_openai_app"
FILE_KEYS = (
    *("applications", "proxy_location", "http_options", "grpc_options", "controller_options", "logging_config"),
    *("tracing_config", "target_capacity"),
)
APPLICATION_KEYS = (
    *("name", "route_prefix", "import_path", "args", "runtime_env", "host", "port", "deployments"),
    *("autoscaling_policy", "logging_config", "external_scaler_enabled"),
)
NOT_USED = {
    "deployments": "write deployment_config in prefill_config or decode_config",
    "autoscaling_policy": "write autoscaling_config in prefill_config or decode_config",
    "external_scaler_enabled": "remove it; the pools are scaled by their engines' metrics",
}
"""Keys of an application that are refused, and what to do instead."""
_NAME = re.compile(r"[a-z0-9-]{1,32}")


@dataclass(frozen=True)
class ServeApplication:
    """The application of a file."""

    name: str | None
    """A name that a spec may have; None where the file's own cannot be one."""
    args: PDServingArgs
    folder: Path
    """Where the file is: what names of files in it are relative to."""
    notices: tuple[Notice, ...]


def read_serve_file(path: str | Path) -> ServeApplication:
    """The application in the Serve config file at ``path`` whose ``import_path`` is the builder, ours or Ray's.

    Raises:
        SpecError: with every problem found.
    """
    try:
        raw = read_mapping(path)
    except SpecError as error:
        raise SpecError([_about_serve(problem) for problem in error.problems]) from None
    problems = list(_unknown(raw, FILE_KEYS, ""))
    where, application = _application(raw, problems)
    problems += _unknown(application, APPLICATION_KEYS, f"{where}.")
    problems += [Problem(f"{where}.{key}", "is not used", fix) for key, fix in NOT_USED.items() if application.get(key)]
    folder = Path(path).parent
    args = application.get("args") or {}
    if not isinstance(args, dict):
        problems.append(Problem(f"{where}.args", "is not a mapping", "write prefill_config and decode_config in it"))
        args = {}
    notices: list[Notice] = []
    try:
        parsed = parse(_with_env(args, application.get("runtime_env")), folder)
    except SpecError as error:
        problems += [replace(problem, field=f"{where}.args.{problem.field}") for problem in error.problems]
        raise SpecError(problems) from None
    if problems:
        raise SpecError(problems)
    if application["import_path"] == RAY_IMPORT_PATH:
        notices.append(Notice(f"{where}.import_path", f"is Ray's own builder; for Antiphon it is {IMPORT_PATH}"))
    name = application.get("name")
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        notices.append(Notice(f"{where}.name", f"{name!r} stays Serve's name; a spec's has 1 to 32 of a-z, 0-9 and -"))
        name = None
    return ServeApplication(name, parsed, folder, tuple(notices))


def _about_serve(problem: Problem) -> Problem:
    return replace(problem, fix=problem.fix.replace("--config FILE", "--from-ray FILE").replace("spec file", "file"))


def _unknown(raw: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> Iterator[Problem]:
    for key in raw:
        if key not in known:
            near = nearest(str(key), known)
            fix = f"did you mean {prefix}{near}?" if near else f"remove it; known here: {', '.join(known)}"
            yield Problem(f"{prefix}{key}", "is not a known key", fix)


def _application(raw: Mapping[str, Any], problems: list[Problem]) -> tuple[str, dict[str, Any]]:
    """The one application that names the builder, and its path; SpecError where there is not exactly one."""
    listed = raw.get("applications")
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed) or not listed:
        fix = f"list one there, with import_path: {IMPORT_PATH} and args:"
        raise SpecError([*problems, Problem("applications", "is not a list of applications", fix)])
    ours = [
        (f"applications[{index}]", item)
        for index, item in enumerate(listed)
        if item.get("import_path") in (IMPORT_PATH, RAY_IMPORT_PATH)
    ]
    if len(ours) == 1:
        return ours[0]
    if ours:
        places = ", ".join(where for where, _ in ours)
        message = f"{places} each name the builder; a spec is one deployment"
        raise SpecError([*problems, Problem("applications", message, "keep one of them in the file")])
    found = ", ".join(repr(item.get("import_path")) for item in listed)
    message = f"none has the import_path of the builder; there is {found}"
    raise SpecError([*problems, Problem("applications[0].import_path", message, f"write {IMPORT_PATH}")])


def _with_env(args: dict[str, Any], runtime_env: object) -> dict[str, Any]:
    """``args`` whose configs have the environment of the application, where they do not set a variable themselves."""
    shared = runtime_env.get("env_vars") if isinstance(runtime_env, dict) else None
    if not isinstance(shared, dict):
        return args
    merged = dict(args)
    for name in CONFIGS:
        config = args.get(name)
        if isinstance(config, dict):
            own = config.get("runtime_env") or {}
            if isinstance(own, dict) and isinstance(own.get("env_vars", {}), dict):
                merged[name] = {**config, "runtime_env": {**own, "env_vars": {**shared, **own.get("env_vars", {})}}}
    return merged
