"""Process plans as text: command lines to paste into a shell on the right host, or JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable

from antiphon.config.plan import ProcessPlan

_KEY = shlex.quote(r"s/^[[:space:]]*\([^#[:space:]][^[:space:]]*\).*/\1/p")
"""What sed takes out of a file with one key: comments and white space are none of it."""


def render_shell(plans: Iterable[ProcessPlan]) -> str:
    """Each plan as a comment that says where it runs, and a command with its environment in front of it."""
    return "\n".join(_shell(plan) for plan in plans)


def render_json(plans: Iterable[ProcessPlan]) -> str:
    """``{"processes": [{name, role, kind, host, argv, env, env_files, unset_env, ports, base_url, ready_path,
    model_name}]}``."""
    processes = [
        {
            "name": plan.name,
            "role": plan.role,
            "kind": plan.kind,
            "host": plan.host,
            "argv": list(plan.argv),
            "env": plan.env,
            "env_files": plan.env_files,
            "unset_env": list(plan.unset_env),
            "ports": plan.ports,
            "base_url": plan.base_url,
            "ready_path": plan.ready_path,
            "model_name": plan.model_name,
        }
        for plan in plans
    ]
    return json.dumps({"processes": processes}, indent=2) + "\n"


def _shell(plan: ProcessPlan) -> str:
    ports = ", ".join(f"{use.replace('_', ' ')} port {port}" for use, port in plan.ports.items())
    lines = [f"{name}={shlex.quote(value)}" for name, value in plan.env.items()]
    lines += [f'{name}="$(sed -n {_KEY} {shlex.quote(path)})"' for name, path in plan.env_files.items()]
    if plan.unset_env:
        # A variable is removed by env, which takes the others along.
        lines.insert(0, "env " + " ".join(f"-u {name}" for name in plan.unset_env))
    lines += _argv_lines(plan.argv)
    command = " \\\n  ".join(lines)
    ready = f"ready when GET {plan.base_url}{plan.ready_path} is 200"
    return f"# {plan.name} runs on {plan.host} ({ports}); {ready}\n{command}\n"


def _argv_lines(argv: tuple[str, ...]) -> list[str]:
    """The program and its module on one line, then a line for each flag with its values."""
    lines: list[str] = []
    for arg in argv:
        if lines and not arg.startswith("--"):
            lines[-1] += f" {shlex.quote(arg)}"
        else:
            lines.append(shlex.quote(arg))
    return lines
