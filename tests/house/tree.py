"""A source tree read once: the files, what they parse to, their comments and their imports. No rules live here."""

from __future__ import annotations

import ast
import io
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "antiphon"


@dataclass(frozen=True)
class Room:
    """A row of the rank table."""

    rank: int
    packages: frozenset[str]
    """The third-party packages that it alone, or with other owners, may import."""


@dataclass(frozen=True)
class House:
    """The rules' numbers, as ``pyproject.toml`` gives them."""

    rooms: dict[str, Room]
    file_lines_max: int
    function_lines_max: int
    parameters_max: int

    @classmethod
    def load(cls, pyproject: Path) -> House:
        table = tomllib.loads(pyproject.read_text())["tool"]["antiphon"]
        rooms = {name: Room(row["rank"], frozenset(row["packages"])) for name, row in table["rooms"].items()}
        return cls(rooms=rooms, **table["sizes"])


@dataclass(frozen=True, order=True)
class Finding:
    """One violation."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Import:
    """One imported module, or value of a module, by its full dotted name, wherever in the file it stands."""

    line: int
    module: str


class SourceFile:
    """A Python file below the root of a tree."""

    def __init__(self, path: Path, relative: Path) -> None:
        self.relative = relative
        self.path = relative.as_posix()
        self.text = path.read_text()
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text, filename=self.path)

    @property
    def room(self) -> str:
        """The top-level folder or module that the file belongs to; empty for the package's own ``__init__``."""
        first = self.relative.parts[0]
        return "" if first == "__init__.py" else first.removesuffix(".py")

    @cached_property
    def comments(self) -> dict[int, str]:
        """Line number -> the comment that stands on it."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Every call with the dotted name of what is called; empty where that is not a plain name."""
        for node in self.nodes:
            if isinstance(node, ast.Call):
                yield node, dotted(node.func)

    @cached_property
    def imports(self) -> list[Import]:
        """Every import: at the top, lazy, under ``TYPE_CHECKING``, relative, and by ``import_module("literal")``."""
        found: list[Import] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [Import(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                # The alias may be a module (`from antiphon import core`) or a value; both lie in the same room.
                found += [Import(node.lineno, f"{base}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.Call) and is_dynamic_import(dotted(node.func)):
                literal = literal_argument(node)
                if literal is not None:
                    found.append(Import(node.lineno, literal.partition(":")[0]))
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        package = [PACKAGE, *self.relative.parts[:-1]]
        package = package[: len(package) - (node.level - 1)]
        return ".".join([*package, node.module] if node.module else package)


class SourceTree:
    """Every Python file below a folder, in a fixed order."""

    def __init__(self, root: Path) -> None:
        paths = sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)
        self.files = [SourceFile(path, path.relative_to(root)) for path in paths]


def dotted(node: ast.expr) -> str:
    """``a.b.c`` for a chain of names, empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join(reversed([*parts, node.id]))


def is_dynamic_import(name: str) -> bool:
    return name in {"__import__", "import_module", "importlib.import_module"}


def literal_argument(call: ast.Call) -> str | None:
    """The first argument of a call where it is a string literal."""
    if call.args and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str):
        return call.args[0].value
    return None
