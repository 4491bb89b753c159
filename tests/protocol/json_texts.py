"""Hypothesis strategies for JSON objects as text: every way to write the same thing, with the place of each value.

The text is built from parts, so that what a splice must give is known without parsing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from hypothesis import strategies as st

ODD_NUMBERS = ("1e400", "-1e400", "-0.0", "-0", "1.10", "0.1e-7", "1E+05", "2e00", "0.30000000000000004", "1" * 40)


@dataclass(frozen=True)
class JsonText:
    """A JSON object: ``parts`` alternate between what lies between the values and (key, text of the value)."""

    parts: tuple[bytes | tuple[str, bytes], ...]

    @property
    def raw(self) -> bytes:
        return b"".join(part if isinstance(part, bytes) else part[1] for part in self.parts)

    @property
    def keys(self) -> list[str]:
        return [part[0] for part in self.parts if isinstance(part, tuple)]

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        found, position = [], 0
        for part in self.parts:
            size = len(part) if isinstance(part, bytes) else len(part[1])
            if isinstance(part, tuple):
                found.append((part[0], position, position + size))
            position += size
        return found

    def replaced(self, replace: dict[str, bytes]) -> bytes:
        """The text with the values of some keys replaced in place, those that are absent added at the end, and no white
        space after it."""
        pieces = [part if isinstance(part, bytes) else replace.get(part[0], part[1]) for part in self.parts]
        missing = [b'"%b":%b' % (key.encode(), replace[key]) for key in replace if key not in self.keys]
        if missing:
            head, brace, _ = pieces[-1].rpartition(b"}")
            assert brace
            pieces[-1] = head + (b"," if self.keys else b"") + b",".join(missing) + b"}"
        return b"".join(pieces).rstrip()


white = st.sampled_from(["", " ", "\n", "\t \r\n"])


def string_texts(value: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, str]]:
    """A string and one of the ways to write it in JSON."""
    return st.tuples(value, st.sampled_from([json.dumps, _plainest, _escaped, _escaped_upper])).map(
        lambda drawn: (drawn[0], drawn[1](drawn[0]))
    )


def _plainest(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("/", "\\/")


def _escaped(text: str) -> str:
    return '"' + "".join([f"\\u{unit:04x}" for unit in _utf16(text)]) + '"'


def _escaped_upper(text: str) -> str:
    """Every other character as an escape in capitals."""
    pieces = [json.dumps(char)[1:-1] if i % 2 else _escaped(char)[1:-1].upper() for i, char in enumerate(text)]
    return '"' + "".join(pieces).replace("\\U", "\\u") + '"'


def _utf16(character: str) -> list[int]:
    data = character.encode("utf-16-be")
    return [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)]


plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
number_texts = (
    st.sampled_from(ODD_NUMBERS)
    | st.integers().map(str)
    | st.floats(allow_nan=False, allow_infinity=False).map(json.dumps)
)
scalar_texts = st.sampled_from(["null", "true", "false"]) | number_texts | string_texts(plain_text).map(lambda s: s[1])


@st.composite
def _array_texts(draw: st.DrawFn, items: st.SearchStrategy[str]) -> str:
    inside = [f"{draw(white)}{item}{draw(white)}" for item in draw(st.lists(items, max_size=3))]
    return f"[{','.join(inside) or draw(white)}]"


@st.composite
def _object_texts(draw: st.DrawFn, items: st.SearchStrategy[str]) -> str:
    # The same few keys as at the top level, so that a scanner that loses its place finds something to trip over.
    key = string_texts(st.sampled_from(["prompt", "stream", "n", "a", ""]) | plain_text).map(lambda s: s[1])
    inside = [
        f"{draw(white)}{name}{draw(white)}:{draw(white)}{item}{draw(white)}"
        for name, item in draw(st.lists(st.tuples(key, items), max_size=3))
    ]
    return f"{{{','.join(inside) or draw(white)}}}"


value_texts = st.recursive(scalar_texts, lambda items: _array_texts(items) | _object_texts(items), max_leaves=6)


@st.composite
def object_texts(
    draw: st.DrawFn,
    keys: st.SearchStrategy[str] = plain_text,
    values: st.SearchStrategy[str] = value_texts,
    fixed: tuple[tuple[str, str], ...] = (),
    max_extra: int = 5,
) -> JsonText:
    """An object with some ``keys``, in any order with the ``fixed`` pairs; keys may occur twice."""
    pairs: list[tuple[tuple[str, str], str]] = [((key, json.dumps(key)), value) for key, value in fixed]
    pairs += draw(st.lists(st.tuples(string_texts(keys), values), max_size=max_extra))
    pairs = draw(st.permutations(pairs))
    parts: list[bytes | tuple[str, bytes]] = []
    between = draw(white) + "{" + draw(white)
    for index, ((key, written), value) in enumerate(pairs):
        if index:
            between += "," + draw(white)
        between += written + draw(white) + ":" + draw(white)
        parts += [between.encode(), (key, value.encode())]
        between = draw(white)
    parts.append((between + "}" + draw(white)).encode())
    return JsonText(tuple(parts))
