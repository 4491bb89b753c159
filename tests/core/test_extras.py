"""What people are told to install: it is there, and holds what they lack."""

from __future__ import annotations

import re
import tomllib

import pytest

from antiphon.core.extras import LOCKED_PARTS, install_remedy
from tests.house.scripts import load_script
from tests.house.tree import ROOT

install = load_script("install")


@pytest.mark.parametrize("extra", LOCKED_PARTS)
def test_both_ways_to_install_an_extra_hold_its_packages(extra: str) -> None:
    words = re.fullmatch(
        r"in the clone: make install WITH=\"(.+)\", or pip install '\.\[(.+)\]'", install_remedy(extra)
    )
    assert words is not None
    part, named = words.groups()
    assert named == extra
    assert part in install.EXTRAS, "make install refuses it"
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    locked = {name for lock in ("cpu", part) for name in install.read_lock(ROOT / "requirements" / f"{lock}.lock")}
    for requirement in declared:
        name = install.canonical(re.split(r"[\[<>=]", requirement)[0].strip())
        assert name in locked, f"{part}.lock lacks {name}"
