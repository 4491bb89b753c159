"""Which form of the router's modules the other tests of this folder run on."""

from __future__ import annotations

import ast
import importlib
import json
import os
import tomllib
from pathlib import Path
from types import ModuleType, NoneType, UnionType

from antiphon.cli.compiled import SWITCH
from antiphon.router import flight, relay
from antiphon.routing import life, pool
from antiphon.transport.http import server_connection
from tests.router.scripted import connected, engine, routing, streams


def test_the_modules_have_the_form_that_was_asked_for() -> None:
    wanted = ".so" if os.environ.get(SWITCH) == "1" else ".py"
    for module in (flight, relay, life, pool, server_connection):
        assert Path(module.__file__ or "").suffix == wanted


async def test_status_says_which_form_it_is() -> None:
    async with engine(streams) as d, routing([], [d]) as router, connected(router) as client:
        client.writer.write(b"GET /status HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert json.loads((await client.reply()).body)["compiled"] is (os.environ.get(SWITCH) == "1")


def members(module: ModuleType, annotation: ast.expr) -> int:
    """How many types a union has, None not counted."""
    if isinstance(annotation, ast.BinOp):
        return members(module, annotation.left) + members(module, annotation.right)
    if isinstance(annotation, ast.Constant):
        return 0
    named = getattr(module, annotation.id, None) if isinstance(annotation, ast.Name) else None
    return len([one for one in named.__args__ if one is not NoneType]) if isinstance(named, UnionType) else 1


def test_no_default_of_a_class_is_left_unset() -> None:
    """mypyc says nothing of a default that it does not set: None, where the type is a union of two types and None. Such
    an attribute is set in ``__init__``."""
    root = Path(__file__).parents[2]
    with (root / "pyproject.toml").open("rb") as file:
        globs = tomllib.load(file)["tool"]["antiphon"]["compiled"]["modules"]
    src = root / "src" / "antiphon"
    num_seen, unset = 0, []
    for path in sorted({path for pattern in globs for path in src.glob(pattern)}):
        module = importlib.import_module(".".join(path.relative_to(src.parent).with_suffix("").parts))
        for node in ast.parse(path.read_text()).body:
            for one in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(one, ast.AnnAssign) and isinstance(one.value, ast.Constant) and one.value.value is None:
                    num_seen += 1
                    if members(module, one.annotation) > 1:
                        unset.append(f"{path.name}: {ast.unparse(one)}")
    assert num_seen > 20
    assert not unset
