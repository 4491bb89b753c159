"""JSON in and out: what comes back, and what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ProtocolError
from antiphon.protocol.json import decode, encode, text_in

numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_values_come_back(value: object) -> None:
    data = encode(value)
    assert decode(data) == value
    assert decode(memoryview(bytearray(data))) == value


def test_it_is_compact_and_keeps_the_order_of_keys() -> None:
    assert encode({"b": [1, None], "a": "é"}) == '{"b":[1,null],"a":"é"}'.encode()


@pytest.mark.parametrize("data", [b"", b"{", b"{}x", b"NaN", b"\xff", b'"\xff"', b'"\\ud800"', b"[" * 100_000])
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not valid JSON"):
        decode(data)


@given(values)
def test_a_text_is_read_and_nothing_else(value: object) -> None:
    expected = value if isinstance(value, str) else ""
    assert text_in(encode(value)) == expected
    assert text_in(json.dumps(value).encode()) == expected


@pytest.mark.parametrize("raw", [None, b"", b"null", b'"\\ud800"', b'"\\x"', b'{"a": "b"}'])
def test_what_is_no_text_reads_as_none(raw: bytes | None) -> None:
    assert text_in(raw) == ""
