"""The source keeps the rules of the house, and each rule is seen to catch its violation.

In scope: the form of ``src`` and ``tests``. Out of scope: behaviour, style that ruff checks, types that mypy checks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.house import checks
from tests.house.tree import ROOT, Finding, House, Room, SourceFile, SourceTree

Check = Callable[[SourceTree, House], Iterator[Finding]]

SMALL_HOUSE = House(
    rooms={
        "core": Room(0, frozenset()),
        "protocol": Room(1, frozenset({"msgspec"})),
        "routing": Room(2, frozenset()),
        "router": Room(4, frozenset()),
        "cli": Room(7, frozenset({"click"})),
    },
    file_lines_max=40,
    function_lines_max=6,
    parameters_max=3,
)


@pytest.fixture(scope="module")
def source() -> SourceTree:
    tree = SourceTree(ROOT / "src" / "antiphon")
    assert len(tree.files) > 10, "the source was not found"
    return tree


@pytest.fixture(scope="module")
def suite() -> SourceTree:
    tree = SourceTree(ROOT / "tests")
    assert any(file.path == "house/test_rooms.py" for file in tree.files), "the tests were not found"
    return tree


@pytest.fixture(scope="module")
def house() -> House:
    return House.load(ROOT / "pyproject.toml")


@pytest.mark.parametrize("check", checks.SOURCE_CHECKS, ids=lambda check: check.__name__)
def test_source_keeps(check: Check, source: SourceTree, house: House) -> None:
    found = sorted(check(source, house))
    assert not found, "\n" + "\n".join(map(str, found))


@pytest.mark.parametrize("check", checks.TEST_CHECKS, ids=lambda check: check.__name__)
def test_tests_keep(check: Check, suite: SourceTree, house: House) -> None:
    found = sorted(check(suite, house))
    assert not found, "\n" + "\n".join(map(str, found))


def test_ranks_leave_no_room_without_a_folder(source: SourceTree, house: House) -> None:
    folders = {file.room for file in source.files}
    assert set(house.rooms) <= folders, "rooms in the table without a folder"


# ---- each check catches its violation --------------------------------------------------------------------------------


def plant(root: Path, path: str, text: str) -> SourceTree:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(textwrap.dedent(text))
    return SourceTree(root)


def upward(statement: str) -> tuple[Check, str, str]:
    return checks.imports_go_down, "protocol/wire.py", statement


UPWARD_IMPORTS = [
    "import antiphon.routing.machine",
    "import antiphon.core, antiphon.router.server",
    "from antiphon.routing import machine",
    "from antiphon import routing",
    "from ..routing import machine",
    "from .. import routing",
    "def f():\n    from antiphon.cli import main",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import antiphon.router",
    "import importlib\nm = importlib.import_module('antiphon.router.server')",
    "from importlib import import_module\nm = import_module('antiphon.router.server')",
    "m = __import__('antiphon.router')",
    "try:\n    import antiphon.router\nexcept ImportError:\n    pass",
    "from antiphon.nowhere import thing",
]

LONG_BODY = "def f():\n" + "    x = 1\n" * 6

VIOLATIONS: list[tuple[Check, str, str]] = [
    *[upward(statement) for statement in UPWARD_IMPORTS],
    (checks.imports_go_down, "__init__.py", "from antiphon.core import errors"),
    (checks.imports_go_down, "core/values.py", "import antiphon.protocol"),
    (checks.rooms_are_declared, "attic/thing.py", "x = 1"),
    (checks.rooms_are_declared, "attic.py", "x = 1"),
    (checks.imports_can_be_checked, "core/a.py", "import importlib\nimportlib.import_module('anti' + 'phon')"),
    (checks.packages_have_owners, "core/a.py", "import msgspec"),
    (checks.packages_have_owners, "core/a.py", "def f():\n    from msgspec.json import decode"),
    (checks.packages_have_owners, "router/a.py", "import torch"),
    (checks.packages_have_owners, "__init__.py", "import click"),
    (checks.pure_rooms_are_pure, "routing/a.py", "import asyncio"),
    (checks.pure_rooms_are_pure, "routing/a.py", "def f():\n    from time import monotonic"),
    (checks.pure_rooms_are_pure, "routing/a.py", "import numpy as np"),
    (checks.pure_rooms_are_pure, "routing/a.py", "from urllib import request"),
    (checks.pure_rooms_are_pure, "routing/a.py", "f = open('x')"),
    (checks.pure_rooms_are_pure, "cache/a.py", "import logging"),
    (checks.clock_is_an_argument, "core/a.py", "import time\nt = time.monotonic()"),
    (checks.clock_is_an_argument, "core/a.py", "from time import time_ns\nt = time_ns()"),
    (checks.clock_is_an_argument, "routing/a.py", "import time\nt = time.time()"),
    (checks.files_are_small, "core/a.py", "x = 1\n" * 41),
    (checks.functions_are_small, "core/a.py", LONG_BODY),
    (checks.functions_are_small, "core/a.py", "class A:\n" + textwrap.indent("async " + LONG_BODY, "    ")),
    (checks.parameters_are_few, "core/a.py", "def f(a, b, c, d): ..."),
    (checks.parameters_are_few, "core/a.py", "def f(a, *b, c, **d): ..."),
    (checks.parameters_are_few, "core/a.py", "class A:\n    def f(self, a, b, c, d): ..."),
    (checks.parameters_are_few, "core/a.py", "class A:\n    @staticmethod\n    def f(a, b, c, d): ..."),
    (checks.faults_are_named, "core/a.py", "try:\n    f()\nexcept:\n    pass"),
    (checks.faults_are_named, "core/a.py", "try:\n    f()\nexcept Exception:\n    pass"),
    (checks.faults_are_named, "core/a.py", "try:\n    f()\nexcept (OSError, BaseException) as e:\n    pass"),
    (checks.faults_are_named, "core/a.py", "try:\n    f()\nexcept* Exception:\n    pass"),
    (checks.faults_are_named, "core/a.py", "try:\n    f()\nexcept Exception:  # supervised:\n    pass"),
    (checks.faults_are_named, "core/a.py", "try:\n    f()\n# supervised: the line above\nexcept Exception:\n    pass"),
    (checks.faults_are_named, "core/a.py", "import contextlib\nwith contextlib.suppress(Exception):\n    f()"),
    (checks.cancels_are_heard, "core/a.py", "import asyncio\nasync def f(x):\n    await asyncio.wait_for(x, 1)"),
    (checks.cancels_are_heard, "core/a.py", "async def f(x):\n  with suppress(asyncio.CancelledError):\n    await x"),
    (checks.nothing_prints, "router/a.py", "print('x')"),
    (checks.asserts_can_fail, "core/a.py", "assert True"),
    (checks.asserts_can_fail, "core/a.py", "assert 1, 'one'"),
    (checks.asserts_can_fail, "core/a.py", "assert (x == 1, 'always true')"),
    (checks.nothing_is_left_unfinished, "core/a.py", "x = 1  # TO" + "DO: more"),
    (checks.nothing_is_left_unfinished, "core/a.py", "# FIX" + "ME\nx = 1"),
    (checks.tasks_have_owners, "router/a.py", "import asyncio\nasyncio.create_task(f())"),
    (checks.tasks_have_owners, "router/a.py", "import asyncio\n_ = asyncio.create_task(f())"),
    (checks.tasks_have_owners, "router/a.py", "import asyncio\nasyncio.get_running_loop().create_task(f())"),
    (checks.tasks_have_owners, "router/a.py", "from asyncio import ensure_future\nensure_future(f())"),
    (checks.modules_say_what_they_own, "core/a.py", "x = 1"),
    (checks.tests_assert, "test_a.py", "def test_x():\n    f()"),
    (checks.tests_assert, "test_a.py", "class TestX:\n    async def test_x(self):\n        await f()"),
    (checks.skips_name_a_need, "test_a.py", "import pytest\npytest.skip('flaky')"),
    (checks.skips_name_a_need, "test_a.py", "import pytest\n@pytest.mark.skip\ndef f(): ...\npytest.skip()"),
    (checks.skips_name_a_need, "test_a.py", "import pytest\n@pytest.mark.skipif(True, reason='slow')\ndef f(): ..."),
    (checks.skips_name_a_need, "test_a.py", "import pytest\npytest.importorskip('redis')"),
]


@pytest.mark.parametrize(
    ("check", "path", "text"),
    VIOLATIONS,
    ids=[f"{index}-{check.__name__}" for index, (check, _, _) in enumerate(VIOLATIONS)],
)
def test_check_catches(check: Check, path: str, text: str, tmp_path: Path) -> None:
    found = list(check(plant(tmp_path, path, text), SMALL_HOUSE))
    assert found, "the planted violation was not seen"
    assert {finding.path for finding in found} == {path}


def test_every_check_has_a_planted_violation() -> None:
    planted = {check for check, _, _ in VIOLATIONS}
    assert set(checks.SOURCE_CHECKS) | set(checks.TEST_CHECKS) == planted


# ---- and lets the rest pass ------------------------------------------------------------------------------------------

GOOD = [
    ("protocol/wire.py", '"""Doc."""\nimport msgspec\nfrom antiphon.core import errors\nfrom .other import x\n'),
    ("router/a.py", '"""Doc."""\nimport time\nt = time.monotonic()\nimport antiphon.routing\n'),
    ("routing/a.py", '"""Doc."""\nfrom urllib.parse import urlsplit\nfrom antiphon.core import units\n'),
    ("core/clock.py", '"""Doc."""\nimport time\nt = time.monotonic()\n'),
    ("core/a.py", '"""Doc."""\ntry:\n    f()\nexcept OSError:\n    pass\n'),
    (
        "router/b.py",
        '"""Doc."""\ntry:\n    f()\nexcept Exception:  # supervised: one request must not end the server\n    pass\n',
    ),
    ("router/c.py", '"""Doc."""\nasync def f():\n    async with TaskGroup() as t:\n        t.create_task(f())\n'),
    ("router/d.py", '"""Doc."""\ndef f(self):\n    self._tasks.add(asyncio.create_task(g()))\n'),
    ("cli/main.py", '"""Doc."""\nimport click\nprint("x")\nimportlib.import_module(name)\n'),
    (
        "core/b.py",
        '"""Doc."""\nclass A:\n    def f(self, a, b, c): ...\n    @classmethod\n    def g(cls, a, b, c): ...\n',
    ),
    ("core/c.py", '"""Doc."""\nassert x, "TO' + 'DO in a string is text"\n'),
    ("router/e.py", ""),
    ("__main__.py", '"""Doc."""\nfrom antiphon.cli.main import main\n'),
]


@pytest.mark.parametrize(("path", "text"), GOOD, ids=[path for path, _ in GOOD])
def test_checks_allow(path: str, text: str, tmp_path: Path) -> None:
    tree = plant(tmp_path, path, text)
    found = [str(finding) for check in checks.SOURCE_CHECKS for finding in check(tree, SMALL_HOUSE)]
    assert found == []


def test_good_tests_pass(tmp_path: Path) -> None:
    text = """
        import pytest
        def test_a():
            assert f() == 1
        def test_b():
            with pytest.raises(ValueError):
                f()
        def test_c(kit):
            kit.check_everything()
        @pytest.mark.skipif(not have, reason="needs chromium (Debian package)")
        def test_d():
            pytest.skip(f"needs {name}")
            assert f()
    """
    tree = plant(tmp_path, "test_a.py", text)
    found = [str(finding) for check in checks.TEST_CHECKS for finding in check(tree, SMALL_HOUSE)]
    assert found == []


def test_room_of_a_file(tmp_path: Path) -> None:
    for path in ("core/deep/er.py", "__init__.py", "units.py"):
        plant(tmp_path, path, "x = 1")
    rooms = {file.path: file.room for file in SourceTree(tmp_path).files}
    assert rooms == {"__init__.py": "", "core/deep/er.py": "core", "units.py": "units"}


def test_relative_imports_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "__init__.py"
    path.write_text("from . import x\nfrom .y import z\nfrom ..b.c import d\n")
    modules = [item.module for item in SourceFile(path, Path("a/__init__.py")).imports]
    assert modules == ["antiphon.a.x", "antiphon.a.y.z", "antiphon.b.c.d"]
