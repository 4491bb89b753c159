"""Uses the compiled form of the router's hot modules, where there is one of exactly this source.

``scripts/compile.py`` makes it: a folder beside the environment's interpreter that holds the extension modules and a
manifest of the sources they were made from. Without it, or once a source has changed, the same modules run as Python.

Invariant: all of the modules run compiled, or none.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path

MANIFEST = "manifest.json"
SWITCH = "ANTIPHON_COMPILED"
"""Environment variable: ``0`` runs Python, ``1`` refuses to run it."""


def folder() -> Path:
    """Where the compiled modules of this environment are, if there are any."""
    return Path(sys.prefix) / "antiphon-compiled"


def source_root() -> Path:
    """The folder that holds the package ``antiphon``."""
    return Path(__file__).resolve().parents[2]


def digest_of(path: Path) -> str:
    """Of one source, as the manifest names it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def use_compiled() -> str | None:
    """Let the modules be imported in their compiled form; None, or why they will run as Python.

    Call it before any of them is imported: a process that has imported one keeps all of them as they are.

    Raises:
        RuntimeError: they would run as Python, and ``ANTIPHON_COMPILED`` is ``1``.
    """
    wish = os.environ.get(SWITCH, "")
    reason = f"{SWITCH} is 0" if wish == "0" else _use(folder())
    if wish == "1" and reason is not None:
        raise RuntimeError(f"{SWITCH} is 1, but {reason}")
    return reason


def _use(compiled: Path) -> str | None:
    try:
        manifest = json.loads((compiled / MANIFEST).read_text())
    except FileNotFoundError:
        return "there are no compiled modules: scripts/compile.py makes them"
    if manifest["python"] != sys.implementation.cache_tag:
        return f"the compiled modules are for {manifest['python']}: run scripts/compile.py"
    root = source_root()
    for path, digest in manifest["sources"].items():
        source = root / path
        if not source.exists() or digest_of(source) != digest:
            return f"{path} has changed since it was compiled: run scripts/compile.py"
    names = [path.removesuffix(".py").replace("/", ".") for path in manifest["sources"]]
    early = [name for name in names if name in sys.modules]
    if early:
        return f"{early[0]} was imported before its compiled form could be used"
    sys.path.append(str(compiled))  # the library that all of them share
    for package in sorted({name.rpartition(".")[0] for name in names}):
        importlib.import_module(package).__path__.insert(0, str(compiled / package.replace(".", "/")))
    return None
