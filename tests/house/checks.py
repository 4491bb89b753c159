"""The rules of the house as functions: a source tree in, findings out. ``test_rooms.py`` runs each on the real source,
and on a small tree with the violation planted, so that no check can pass by being blind.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from tests.house.tree import (
    PACKAGE,
    Finding,
    House,
    SourceFile,
    SourceTree,
    dotted,
    is_dynamic_import,
    literal_argument,
)

PURE_ROOMS = frozenset({"cache", "routing"})
"""Rooms that decide and do nothing else: time, chance and bytes are arguments, effects are return values."""

IMPURE_MODULES = (
    *("asyncio", "concurrent", "datetime", "http.client", "http.server", "logging", "multiprocessing", "numpy", "os"),
    *("pathlib", "queue", "random", "sched", "secrets", "select", "selectors", "shutil", "signal", "socket"),
    *("socketserver", "ssl", "subprocess", "tempfile", "threading", "time", "urllib.request", "uuid"),
)

CLOCK_ROOMS = PURE_ROOMS | {"core"}
CLOCK_FILE = "core/clock.py"
"""The one file of those rooms that may read the clock, to give it to the others as an argument."""
CLOCK_CALLS = frozenset(f"{name}{suffix}" for name in ("time", "monotonic", "perf_counter") for suffix in ("", "_ns"))

PRINTING_ROOMS = frozenset({"cli"})
LAZY_ROOMS = frozenset({"cli"})
"""Rooms that may import by a computed name: the command line loads a verb when it is asked for, and outranks all."""

SUPERVISED = re.compile(r"#\s*supervised:\s*\S+(\s+\S+)+")
# In halves, so that this file does not hold the marks that it looks for.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")


# ---- imports ---------------------------------------------------------------------------------------------------------


def rooms_are_declared(tree: SourceTree, house: House) -> Iterator[Finding]:
    """Every file belongs to a room of the table."""
    for file in tree.files:
        if file.room not in house.rooms and file.room not in {"", "__main__"}:
            yield Finding(file.path, 1, f"room {file.room!r} is not in [tool.antiphon.rooms] of pyproject.toml")


def imports_go_down(tree: SourceTree, house: House) -> Iterator[Finding]:
    """A room imports only rooms of a strictly lower rank. The package's ``__init__`` imports none of them."""
    for file in tree.files:
        if file.room == "__main__":
            continue
        own = house.rooms.get(file.room)
        for item in file.imports:
            top, _, rest = item.module.partition(".")
            room = rest.partition(".")[0]
            if top != PACKAGE or not room or room == file.room or room.startswith("__"):
                continue
            other = house.rooms.get(room)
            if other is None:
                if file.room:  # `from antiphon import NAME` in a room: a value of the package, or a room undeclared
                    yield Finding(file.path, item.line, f"imports {item.module}: {room!r} is not a room")
            elif own is None or other.rank >= own.rank:
                rank = "none" if own is None else own.rank
                yield Finding(
                    file.path,
                    item.line,
                    f"imports {item.module} (rank {other.rank}) from rank {rank}: imports go to a lower rank",
                )


def imports_can_be_checked(tree: SourceTree, house: House) -> Iterator[Finding]:
    """No import by a computed name, which the other checks cannot see."""
    for file in tree.files:
        for call, name in file.calls():
            if is_dynamic_import(name) and literal_argument(call) is None and file.room not in LAZY_ROOMS:
                yield Finding(file.path, call.lineno, f"{name} of a computed name: import by a literal name")


def packages_have_owners(tree: SourceTree, house: House) -> Iterator[Finding]:
    """A third-party package is imported only in the rooms that own it."""
    for file in tree.files:
        allowed = house.rooms[file.room].packages if file.room in house.rooms else frozenset()
        for item in file.imports:
            top = item.module.partition(".")[0]
            if top == PACKAGE or top in sys.stdlib_module_names or top in allowed:
                continue
            owners = sorted(name for name, room in house.rooms.items() if top in room.packages)
            where = f"owned by {', '.join(owners)}" if owners else "owned by no room"
            yield Finding(file.path, item.line, f"imports {top}, {where}")


def pure_rooms_are_pure(tree: SourceTree, house: House) -> Iterator[Finding]:
    """No input, output, clock, chance, thread or log in the rooms that decide."""
    for file in tree.files:
        if file.room not in PURE_ROOMS:
            continue
        for item in file.imports:
            if any(item.module == name or item.module.startswith(f"{name}.") for name in IMPURE_MODULES):
                yield Finding(
                    file.path, item.line, f"imports {item.module}: {file.room} is pure, take it as an argument"
                )
        for call, name in file.calls():
            if name in {"open", "input", "print"}:
                yield Finding(file.path, call.lineno, f"{name}(): {file.room} is pure, return an effect")


def clock_is_an_argument(tree: SourceTree, house: House) -> Iterator[Finding]:
    """No direct clock call in the pure rooms and in core: take ``now_s`` or a ``Clock``."""
    for file in tree.files:
        if file.room not in CLOCK_ROOMS or file.path == CLOCK_FILE:
            continue
        imported = {
            alias.asname or alias.name
            for node in file.nodes
            if isinstance(node, ast.ImportFrom) and node.module == "time"
            for alias in node.names
        }
        for call, name in file.calls():
            owner, _, attribute = name.rpartition(".")
            if attribute in CLOCK_CALLS and (owner == "time" or (not owner and attribute in imported)):
                yield Finding(file.path, call.lineno, f"{name}(): take the time as an argument")


# ---- sizes -----------------------------------------------------------------------------------------------------------


def files_are_small(tree: SourceTree, house: House) -> Iterator[Finding]:
    for file in tree.files:
        if len(file.lines) > house.file_lines_max:
            yield Finding(file.path, 1, f"{len(file.lines)} lines, at most {house.file_lines_max}: split by concern")


def functions(file: SourceFile) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Every function, and whether it is a method."""
    methods = {
        id(item) for node in file.nodes if isinstance(node, ast.ClassDef) for item in node.body if _is_function(item)
    }
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, id(node) in methods


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def functions_are_small(tree: SourceTree, house: House) -> Iterator[Finding]:
    """Length, from ``def`` to the last line, docstring counted."""
    for file in tree.files:
        for node, _ in functions(file):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > house.function_lines_max:
                yield Finding(
                    file.path, node.lineno, f"{node.name} has {length} lines, at most {house.function_lines_max}"
                )


def parameters_are_few(tree: SourceTree, house: House) -> Iterator[Finding]:
    """Parameters, ``self`` and ``cls`` not counted, ``*args`` and ``**kwargs`` counted as one each.

    A GPU kernel (``triton.jit``) takes as many as it needs: its launch cannot pass a dataclass.
    """
    for file in tree.files:
        for node, is_method in functions(file):
            if any(dotted(item) == "triton.jit" for item in node.decorator_list):
                continue
            spec = node.args
            number = len(spec.posonlyargs) + len(spec.args) + len(spec.kwonlyargs)
            number += (spec.vararg is not None) + (spec.kwarg is not None)
            is_static = any(dotted(item) == "staticmethod" for item in node.decorator_list)
            number -= is_method and not is_static
            if number > house.parameters_max:
                message = (
                    f"{node.name} has {number} parameters, at most {house.parameters_max}: use an options dataclass"
                )
                yield Finding(file.path, node.lineno, message)


# ---- habits ----------------------------------------------------------------------------------------------------------


def faults_are_named(tree: SourceTree, house: House) -> Iterator[Finding]:
    """No bare or broad ``except`` (nor ``suppress``), unless its line says ``# supervised: <reason>``."""
    for file in tree.files:
        for node in file.nodes:
            if isinstance(node, ast.ExceptHandler):
                caught = [None] if node.type is None else _names(node.type)
                is_broad = None in caught or bool(_BROAD & {str(name) for name in caught})
            elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "suppress":
                is_broad = bool(_BROAD & {name for arg in node.args for name in _names(arg)})
            else:
                continue
            if is_broad and not SUPERVISED.search(file.comments.get(node.lineno, "")):
                message = "broad except: name the errors, or say `# supervised: <reason>` on this line"
                yield Finding(file.path, node.lineno, message)


_BROAD = frozenset({"Exception", "BaseException"})


def _names(node: ast.expr) -> list[str]:
    items = node.elts if isinstance(node, ast.Tuple) else [node]
    return [dotted(item).removeprefix("builtins.") for item in items]


def cancels_are_heard(tree: SourceTree, house: House) -> Iterator[Finding]:
    """No ``asyncio.wait_for``: in Python 3.11 it loses a cancel that comes when what it waits for has just ended.

    And no ``suppress(CancelledError)``: it takes the cancel of who waits for that of what is waited for.
    """
    for file in tree.files:
        for call, name in file.calls():
            if name.rpartition(".")[2] == "suppress" and any(
                each.endswith("CancelledError") for argument in call.args for each in _names(argument)
            ):
                message = "suppress(CancelledError): it may be the own cancel; use asyncio.wait"
                yield Finding(file.path, call.lineno, message)
            if name == "asyncio.wait_for":
                message = "asyncio.wait_for: it may lose a cancel; use asyncio.timeout"
                yield Finding(file.path, call.lineno, message)


def nothing_prints(tree: SourceTree, house: House) -> Iterator[Finding]:
    for file in tree.files:
        for call, name in file.calls():
            if name == "print" and file.room not in PRINTING_ROOMS:
                yield Finding(file.path, call.lineno, "print(): only the command line prints; log or return instead")


def asserts_can_fail(tree: SourceTree, house: House) -> Iterator[Finding]:
    """No ``assert`` of a true constant, nor of a tuple with members, which is always true."""
    for file in tree.files:
        for node in file.nodes:
            if not isinstance(node, ast.Assert):
                continue
            is_constant = isinstance(node.test, ast.Constant) and bool(node.test.value)
            if is_constant or (isinstance(node.test, ast.Tuple) and node.test.elts):
                yield Finding(file.path, node.lineno, "this assertion cannot fail")


def nothing_is_left_unfinished(tree: SourceTree, house: House) -> Iterator[Finding]:
    for file in tree.files:
        for line, comment in file.comments.items():
            if UNFINISHED.search(comment):
                yield Finding(file.path, line, "a mark of unfinished work: finish it, or file an issue")


def tasks_have_owners(tree: SourceTree, house: House) -> Iterator[Finding]:
    """The result of ``create_task`` and ``ensure_future`` is kept: the loop itself holds tasks only weakly.

    A ``TaskGroup`` owns its tasks: a receiver bound by ``async with ... TaskGroup() as name``, or named ``...group``.
    """
    for file in tree.files:
        groups = {
            item.optional_vars.id
            for node in file.nodes
            if isinstance(node, ast.AsyncWith)
            for item in node.items
            if isinstance(item.context_expr, ast.Call)
            and dotted(item.context_expr.func).endswith("TaskGroup")
            and isinstance(item.optional_vars, ast.Name)
        }
        for node in file.nodes:
            value = _discarded(node)
            if not isinstance(value, ast.Call):
                continue
            if isinstance(value.func, ast.Attribute):
                owner, attribute = dotted(value.func.value), value.func.attr
            else:
                owner, attribute = "", dotted(value.func)
            is_group = owner in groups or owner.endswith("group")
            if attribute in {"create_task", "ensure_future"} and not is_group:
                yield Finding(file.path, value.lineno, f"{attribute}: keep the task and await it, or use a TaskGroup")


def _discarded(node: ast.AST) -> ast.expr | None:
    """The value of a statement that drops it: a bare expression, or an assignment to ``_``."""
    if isinstance(node, ast.Expr):
        return node.value
    if isinstance(node, ast.Assign) and [dotted(target) for target in node.targets] == ["_"]:
        return node.value
    return None


def modules_say_what_they_own(tree: SourceTree, house: House) -> Iterator[Finding]:
    """Every module that holds anything opens with a docstring."""
    for file in tree.files:
        if file.tree.body and not ast.get_docstring(file.tree):
            yield Finding(file.path, 1, "no module docstring: what it owns, its invariants, what it does not do")


SOURCE_CHECKS = (
    rooms_are_declared,
    imports_go_down,
    imports_can_be_checked,
    packages_have_owners,
    pure_rooms_are_pure,
    clock_is_an_argument,
    files_are_small,
    functions_are_small,
    parameters_are_few,
    faults_are_named,
    cancels_are_heard,
    nothing_prints,
    asserts_can_fail,
    nothing_is_left_unfinished,
    tasks_have_owners,
    modules_say_what_they_own,
)


# ---- tests -----------------------------------------------------------------------------------------------------------

ASSERTING = re.compile(r"^(assert|check|expect|verify|raises|warns|fail|wait|run)(_|$)|.*_(holds|refused|fails)$")


def tests_assert(tree: SourceTree, house: House) -> Iterator[Finding]:
    """A test asserts: by ``assert``, ``pytest.raises``, or a helper whose name says that it checks or waits."""
    for file in tree.files:
        if not file.relative.name.startswith("test_"):
            continue
        for node, _ in functions(file):
            if not node.name.startswith("test_") or any(isinstance(item, ast.Assert) for item in ast.walk(node)):
                continue
            called = {
                item.func.attr if isinstance(item.func, ast.Attribute) else dotted(item.func)
                for item in ast.walk(node)
                if isinstance(item, ast.Call)
            }
            if not any(ASSERTING.match(name) for name in called):
                yield Finding(file.path, node.lineno, f"{node.name} asserts nothing")


def skips_name_a_need(tree: SourceTree, house: House) -> Iterator[Finding]:
    """A skip's reason starts with ``needs``: a test may be left out for what the machine lacks, for nothing else."""
    for file in tree.files:
        for call, name in file.calls():
            kind = name.rpartition(".")[2]
            if not name.startswith(("pytest.", "mark.")) or kind not in {"skip", "skipif", "importorskip"}:
                continue
            reason = next((word.value for word in call.keywords if word.arg == "reason"), None)
            if reason is None and kind == "skip" and call.args:
                reason = call.args[0]
            if isinstance(reason, ast.JoinedStr) and reason.values:
                reason = reason.values[0]
            text = reason.value if isinstance(reason, ast.Constant) else ""
            if not str(text).startswith("needs "):
                yield Finding(file.path, call.lineno, f"{kind}: the reason must start with 'needs ...'")


TEST_CHECKS = (asserts_can_fail, nothing_is_left_unfinished, tests_assert, skips_name_a_need)
