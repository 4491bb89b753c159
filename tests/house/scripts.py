"""Loads a script of ``scripts/`` as a module."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.house.tree import ROOT


def load_script(name: str) -> ModuleType:
    qualified = f"antiphon_scripts_{name}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    spec = importlib.util.spec_from_file_location(qualified, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[qualified] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module
