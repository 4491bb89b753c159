"""Secrets in a plan: which arguments and variables hold one, going by their names, and the plan without their values.

What is printed or logged goes through :func:`masked`; what is started does not. A secret under a name that does not
tell, or inside a JSON argument, is not found.
"""

from __future__ import annotations

import re
from dataclasses import replace

from antiphon.config.plan import ProcessPlan

MASK = "***"
_ANYWHERE = frozenset({"secret", "secrets", "password", "passwd", "credential", "credentials"})
_LAST = frozenset({"key", "keys", "token", "apikey"})
"""Only at the end of a name: ``--long-prefill-token-threshold`` is none."""
_PLACES = frozenset({"file", "path", "dir"})
"""A name that ends so says where the secret is kept."""
_NUMBERS = (("per", "token"), ("per", "key"))
"""A name that ends so is a number: ``--kv-bytes-per-token``."""


def is_secret(name: str) -> bool:
    """Whether the argument or variable ``name`` holds a secret: ``--api-key``, ``HF_TOKEN``, ``DB_PASSWORD``."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    if tuple(words[-2:]) in _NUMBERS:
        return False
    return words[-1] not in _PLACES and (words[-1] in _LAST or not _ANYWHERE.isdisjoint(words))


def masked(plan: ProcessPlan) -> ProcessPlan:
    """``plan`` with ``***`` for the values of its secrets, to be shown."""
    argv: list[str] = []
    is_hidden = False
    for arg in plan.argv:
        if arg.startswith("--"):
            name, separator, _ = arg.partition("=")
            is_hidden = is_secret(name)
            argv.append(f"{name}={MASK}" if is_hidden and separator else arg)
        else:
            argv.append(MASK if is_hidden else arg)
    env = {name: MASK if is_secret(name) else value for name, value in plan.env.items()}
    return replace(plan, argv=tuple(argv), env=env)
