"""The documents agree with the code (ranks, links, commands, changelog), and nothing of one machine is committed.

Out of scope: whether what they say is true beyond that, and links to other sites.
"""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from tests.house import docs
from tests.house.tree import ROOT, House


@pytest.fixture(scope="module")
def files() -> list[Path]:
    found = docs.tracked_files(ROOT)
    assert ROOT / "pyproject.toml" in found
    return found


@pytest.fixture(scope="module")
def documents(files: list[Path]) -> list[Path]:
    return [path for path in files if path.suffix == ".md"]


def test_documents_exist(documents: list[Path]) -> None:
    names = {path.name for path in documents if path.parent == ROOT}
    assert {"README.md", "ARCHITECTURE.md", "STYLE.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= names


def test_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_architecture_has_the_rank_table() -> None:
    wanted = {name: room.rank for name, room in House.load(ROOT / "pyproject.toml").rooms.items()}
    assert docs.ranks_in((ROOT / "ARCHITECTURE.md").read_text()) == wanted


def test_links_lead_somewhere(documents: list[Path]) -> None:
    assert [str(finding) for finding in docs.broken_links(ROOT, documents)] == []


def test_make_commands_exist(documents: list[Path]) -> None:
    targets = docs.make_targets((ROOT / "Makefile").read_text())
    assert {"help", "demo", "up", "test"} <= targets
    assert [str(finding) for finding in docs.missing_targets(ROOT, documents, targets)] == []


def test_ci_runs_the_command_that_readers_are_told() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    ran = [command.words[1:] for command in docs.commands(f"```\n{text}\n```") if command.words[:2] == ("exec", "make")]
    assert [words[1] for words in ran] == ["test"]
    told = [command.words for command in docs.commands((ROOT / "README.md").read_text())]
    assert ("make", "test") in told
    assert ("make", "demo") in told


def test_verbs_exist(documents: list[Path]) -> None:
    from antiphon.cli.main import main

    context = click.Context(main)
    verbs: dict[str, frozenset[str]] = {}
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None, name
        subverbs = command.list_commands(context) if isinstance(command, click.Group) else []
        verbs[name] = frozenset(subverbs)
    assert verbs
    assert [str(finding) for finding in docs.missing_verbs(ROOT, documents, verbs)] == []


def test_nothing_of_one_machine(files: list[Path]) -> None:
    assert [str(finding) for finding in docs.forbidden_text(ROOT, files)] == []


def test_changelog_has_its_form() -> None:
    assert list(docs.changelog_faults((ROOT / "CHANGELOG.md").read_text())) == []


# ---- each reader catches its violation -------------------------------------------------------------------------------


def written(root: Path, **texts: str) -> list[Path]:
    paths = []
    for name, text in texts.items():
        path = root / f"{name}.md"
        path.write_text(text)
        paths.append(path)
    return paths


def test_rank_table_is_read() -> None:
    text = """
| name | value |
|---|---|
| core | 9 |

| rank | room | owns |
|-----:|------|------|
| 0 | `core/` | values |
| 1 | `config/`, `observe` | the spec |

after
"""
    assert docs.ranks_in(text) == {"core": 0, "config": 1, "observe": 1}
    assert docs.ranks_in("no table") == {}


@pytest.mark.parametrize(
    ("text", "is_broken"),
    [
        ("[a](other.md)", False),
        ("[a](other.md#two-words)", False),
        ("[a](#here)\n\n# Here\n", False),
        ("[a](https://example.org/x)", False),
        ("```\n[a](nowhere.md)\n```", False),
        ("[a](nowhere.md)", True),
        ("![a](nowhere.png)", True),
        ("[a](other.md#three)", True),
        ("[a](#here)", True),
        ('see [a](nowhere.md "title") and [b](other.md)', True),
    ],
)
def test_broken_links_are_caught(text: str, is_broken: bool, tmp_path: Path) -> None:
    found = list(docs.broken_links(tmp_path, written(tmp_path, page=text, other="# Two `words`\n")))
    assert bool(found) == is_broken, found


@pytest.mark.parametrize(
    ("text", "is_missing"),
    [
        ("run `make demo`", False),
        ("run `make demo PYTHON=python3.11`", False),
        ("```\nmake demo  # first\n```", False),
        ("that will\nmake sense of it", False),
        ('`make demo ARGS="-k thing -x"` and `make <target>`', False),
        ("`make`", False),
        ("run `make dem`", True),
        ("```sh\nmake clean demos\n```", True),
        ("```sh\ncd antiphon && make nothing\n```", True),
    ],
)
def test_missing_make_targets_are_caught(text: str, is_missing: bool, tmp_path: Path) -> None:
    targets = docs.make_targets("X := 1\ndemo: install\n\ttrue\nclean:\n")
    assert targets == {"demo", "clean"}
    found = list(docs.missing_targets(tmp_path, written(tmp_path, page=text), targets))
    assert bool(found) == is_missing, found


@pytest.mark.parametrize(
    ("text", "is_missing"),
    [
        ("`antiphon up --prefill 1`", False),
        ("`antiphon config check antiphon.yaml`", False),
        ("```\n$ .venv/bin/antiphon up\n```", False),
        ("antiphon sings", False),
        ("`antiphon --help`", False),
        ("`antiphon.yaml`", False),
        ("`antiphon sing`", True),
        ("`antiphon config sing`", True),
        ("```\nantiphon sing --loud\n```", True),
    ],
)
def test_missing_verbs_are_caught(text: str, is_missing: bool, tmp_path: Path) -> None:
    verbs = {"up": frozenset[str](), "config": frozenset({"check", "render"})}
    found = list(docs.missing_verbs(tmp_path, written(tmp_path, page=text), verbs))
    assert bool(found) == is_missing, found


@pytest.mark.parametrize("text", sorted(docs.FORBIDDEN))
def test_forbidden_text_is_caught(text: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(f"fine\nsee {text}x\n")
    assert [finding.line for finding in docs.forbidden_text(tmp_path, [path])] == [2]


@pytest.mark.parametrize(
    ("text", "is_faulty"),
    [
        ("# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.1.0] - 2026-01-31\n", False),
        ("# Changes\n\n## [Unreleased]\n", True),
        ("# Changelog\n\n## Unreleased\n", True),
        ("# Changelog\n\n## [0.1.0]\n", True),
        ("# Changelog\n\n## [Unreleased] - 2026-01-31\n", True),
        ("# Changelog\n\n## [Unreleased]\n\n### New\n", True),
        ("# Changelog\n\n- A thing.\n\n## [Unreleased]\n", True),
        ("# Changelog\n", True),
        ("# Changelog\n\n## [0.1.0] - 2025-01-01\n\n## [0.2.0] - 2026-01-01\n", True),
    ],
)
def test_changelog_faults_are_caught(text: str, is_faulty: bool) -> None:
    assert bool(list(docs.changelog_faults(text))) == is_faulty


def test_tracked_files_without_git(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "x").write_text("x")
    (tmp_path / "a.md").write_text("a")
    assert docs.tracked_files(tmp_path) == [tmp_path / "a.md"]
