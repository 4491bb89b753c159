"""What the documents promise, read as data: tables, links, commands, and text that must not be there."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.house.tree import Finding

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^\s*(```|~~~)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$")
SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)

MAKE_TARGET = re.compile(r"^([a-z][a-z0-9-]*):(?!=)", re.MULTILINE)
CODE_SPAN = re.compile(r"`([^`]+)`")
WORD = re.compile(r"^[a-z][a-z0-9-]*$")

CHANGELOG_RELEASE = re.compile(r"^## \[(Unreleased|\d+\.\d+\.\d+)\](?: - (\d{4}-\d{2}-\d{2}))?$")
CHANGELOG_KINDS = frozenset({"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"})

# In halves, so that this file does not hold what it looks for. Each with what should stand there instead.
FORBIDDEN = {
    "/wo" + "rk/": "a relative path",
    "/tm" + "p/w/": "a relative path",
    "/ro" + "ot/": "a relative path, or ~",
    "/opt/" + "py": "a relative path",
    "sha" + "red/design": "the fact itself",
    "sha" + "red/research": "the fact itself",
    "sha" + "red/bench": "the fact itself",
    "sha" + "red/seeds": "the fact itself",
    "py" + "pi.org": "nothing: pip's own configuration names the index",
    "python" + "hosted.org": "nothing: pip's own configuration names the index",
    "--index" + "-url": "nothing: pip's own configuration names the index",
    "--extra-index" + "-url": "nothing: pip's own configuration names the index",
    "--find" + "-links": "nothing: pip's own configuration names the index",
}


@dataclass(frozen=True)
class Command:
    """A command that a document tells its reader to type."""

    line: int
    words: tuple[str, ...]


def tracked_files(root: Path) -> list[Path]:
    """Every file that git tracks or would track; all files where there is no git."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        skipped = {".git", ".venv", "__pycache__"}
        return sorted(path for path in root.rglob("*") if path.is_file() and not skipped & set(path.parts))
    paths = (root / name for name in done.stdout.decode().split("\0") if name)
    return sorted(path for path in paths if path.is_file())


def parse_table(text: str, *columns: str) -> list[dict[str, str]]:
    """The rows of the first markdown table that has all of ``columns``, cells without code marks; empty if none has."""
    names: list[str] = []
    rows: list[dict[str, str]] = []
    for line in text.splitlines():
        if not line.lstrip().startswith("|"):
            if rows:
                break
            names = []
            continue
        cells = [cell.strip().strip("`*") for cell in line.strip().strip("|").split("|")]
        if not names:
            lowered = [cell.lower() for cell in cells]
            if all(column in lowered for column in columns):
                names = lowered
        elif not all(set(cell) <= set("-: ") for cell in cells):
            rows.append(dict(zip(names, cells, strict=False)))
    return rows


def ranks_in(text: str) -> dict[str, int]:
    """Room -> rank, from a table with the columns ``rank`` and ``room``. A cell may hold several rooms."""
    return {
        room.rstrip("/"): int(row["rank"])
        for row in parse_table(text, "rank", "room")
        for room in re.findall(r"[a-z_]+/?", row["room"])
    }


def without_fences(text: str) -> str:
    """The text with fenced code blanked, lines kept."""
    kept, is_inside = [], False
    for line in text.splitlines():
        if FENCE.match(line):
            is_inside = not is_inside
            kept.append("")
        else:
            kept.append("" if is_inside else line)
    return "\n".join(kept)


def anchor(heading: str) -> str:
    """The anchor that a forge gives a heading."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")


def broken_links(root: Path, documents: list[Path]) -> Iterator[Finding]:
    """Relative links whose file, or whose heading in a markdown file, does not exist."""
    for document in documents:
        text = without_fences(document.read_text())
        for number, line in enumerate(text.splitlines(), 1):
            for match in LINK.finditer(line):
                target = match.group(1) or match.group(2)
                if SCHEME.match(target) or target.startswith("//"):
                    continue
                name, _, fragment = target.partition("#")
                where = (document.parent / name).resolve() if name else document
                here = document.relative_to(root).as_posix()
                if not where.exists():
                    yield Finding(here, number, f"link to {target}: no such file")
                elif fragment and where.suffix == ".md" and fragment not in anchors(where):
                    yield Finding(here, number, f"link to {target}: no such heading")


def anchors(document: Path) -> set[str]:
    lines = without_fences(document.read_text()).splitlines()
    return {anchor(match.group(1)) for line in lines if (match := HEADING.match(line))}


def make_targets(makefile: str) -> set[str]:
    return set(MAKE_TARGET.findall(makefile))


def code_lines(text: str) -> Iterator[tuple[int, str]]:
    """Every line of fenced code and every code span, with its line number."""
    is_inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            is_inside = not is_inside
        elif is_inside:
            yield number, line
        else:
            yield from ((number, span) for span in CODE_SPAN.findall(line))


def commands(text: str) -> Iterator[Command]:
    """Every shell command in the code of a document, without its prompt and the variables set before it."""
    for number, code in code_lines(text):
        for part in re.split(r"&&|\|\||[;|]", code.partition(" #")[0]):
            try:
                words = shlex.split(part)
            except ValueError:  # not a shell command
                continue
            while words and (words[0] == "$" or re.match(r"^[A-Z_]+=", words[0])):
                words.pop(0)
            if words:
                yield Command(number, tuple(words))


def missing_targets(root: Path, documents: list[Path], targets: set[str]) -> Iterator[Finding]:
    for document in documents:
        for command in commands(document.read_text()):
            if command.words[0] != "make":
                continue
            for word in command.words[1:]:
                if WORD.match(word) and word not in targets:
                    yield Finding(document.relative_to(root).as_posix(), command.line, f"`make {word}`: no such target")


def missing_verbs(root: Path, documents: list[Path], verbs: Mapping[str, frozenset[str]]) -> Iterator[Finding]:
    """``verbs``: each verb with its subverbs, empty where it has none."""
    for document in documents:
        here = document.relative_to(root).as_posix()
        for command in commands(document.read_text()):
            program, verb, subverb = (*command.words, "", "")[:3]
            if Path(program).name != "antiphon" or not WORD.match(verb):
                continue
            if verb not in verbs:
                yield Finding(here, command.line, f"`antiphon {verb}`: no such verb")
            elif verbs[verb] and WORD.match(subverb) and subverb not in verbs[verb]:
                yield Finding(here, command.line, f"`antiphon {verb} {subverb}`: no such verb")


def forbidden_text(root: Path, files: list[Path]) -> Iterator[Finding]:
    """Paths of one machine, hosts of a package index, and references to what is not in the repository."""
    for path in files:
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            for text, instead in FORBIDDEN.items():
                if text in line:
                    yield Finding(path.relative_to(root).as_posix(), number, f"holds {text!r}; write {instead}")


def changelog_faults(text: str) -> Iterator[str]:
    """What keeps a text from being a changelog in the Keep-a-Changelog form."""
    lines = text.splitlines()
    if not lines or lines[0] != "# Changelog":
        yield "the first line must be '# Changelog'"
    releases: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        if line.startswith("## "):
            match = CHANGELOG_RELEASE.match(line)
            if not match or (match.group(1) == "Unreleased") != (match.group(2) is None):
                yield f"line {number}: expected '## [Unreleased]' or '## [1.2.3] - 2026-01-31', found {line!r}"
            else:
                releases.append((match.group(1), match.group(2) or "9999"))
        elif line.startswith("### ") and line[4:] not in CHANGELOG_KINDS:
            yield f"line {number}: {line[4:]!r} is none of {', '.join(sorted(CHANGELOG_KINDS))}"
        elif line.startswith("- ") and not releases:
            yield f"line {number}: an entry before the first release"
    if not releases:
        yield "no release and no [Unreleased] section"
    dates = [date for _, date in releases]
    if dates != sorted(dates, reverse=True):
        yield "releases must stand newest first"
