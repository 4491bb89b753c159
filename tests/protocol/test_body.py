"""The body scanner: the client's bytes stay as they are, except for the values that are replaced."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.errors import ProtocolError
from antiphon.protocol.body import Body, scan
from tests.protocol.json_texts import JsonText, object_texts, plain_text

SOME_KEYS = st.sampled_from(["prompt", "stream", "n", "max_tokens", "kv_transfer_params", "a", ""]) | plain_text


def joined(body: Body, replace: dict[str, bytes]) -> bytes:
    return b"".join(body.splice(replace))


def pairs_of(raw: bytes) -> dict[str, Any]:
    """What the standard library reads; numbers as text, so that none is rounded."""
    value = json.loads(raw, parse_float=str, parse_int=str)
    assert isinstance(value, dict)
    return value


@given(object_texts(SOME_KEYS), st.dictionaries(st.sampled_from(["n", "stream", "max_tokens", "new"]), st.integers()))
def test_splice_changes_the_replaced_values_and_no_other_byte(text: JsonText, numbers: dict[str, int]) -> None:
    raw = text.raw
    body = scan(raw)
    assert body.spans == text.spans
    assert set(body.values) == set(text.keys)
    for key, start, end in text.spans:
        is_last = (key, start, end) == [span for span in text.spans if span[0] == key][-1]
        assert not is_last or body.get(key) == raw[start:end]
    replace = {key: b"%d" % number for key, number in numbers.items()}
    spliced = joined(body, replace)
    assert spliced == text.replaced(replace)
    assert pairs_of(spliced) == pairs_of(raw) | {key: str(number) for key, number in numbers.items()}
    # A scan may be used again, and a buffer that can change is read the same way.
    assert joined(body, {}) == raw.rstrip()
    assert joined(scan(bytearray(raw)), replace) == spliced
    # Where only these keys are wanted, the rest is not gone through; what is spliced is the same.
    for wanted in (frozenset(replace), frozenset(("n", "stream", "max_tokens", "new"))):
        assert joined(scan(raw, wanted), replace) == spliced


WANTED = frozenset(("n", "max_tokens"))


@pytest.mark.parametrize(
    "raw",
    [
        rb'{"n":2}',
        rb'{ "n" : 2 , "x":1}',
        b'{"n"\n:\t2}',
        rb'{"x":{"n":3},"n":2}',
        rb'{"n":2,"x":{"n":3}}',
        rb'{"x":"n","n":2}',
        rb'{"x":["n","max_tokens"],"n":2}',
        rb'{"x":"\"n\"","n":2}',
        rb'{"x":"\"n","n":2}',
        rb'{"x":{"n":3},"\u006e":2}',
        rb'{"\u006e":2,"x":"\u006e"}',
        rb'{"n":2,"\u006e":4}',
        rb'{"n":2,"n":4}',
        rb'{"max_tokens":7,"x":"}","n":2}',
        rb'{"n":{"n":{"n":1}},"max_tokens":"n"}',
        rb'{"x":{"n":3}}',
        rb"{}",
    ],
)
def test_a_wanted_key_is_found_where_it_stands_at_the_top(raw: bytes) -> None:
    whole, quick = scan(raw), scan(raw, WANTED)
    replace = {"n": b"1", "max_tokens": b"5"}
    assert joined(quick, replace) == joined(whole, replace)
    assert [span for span in whole.spans if span[0] in WANTED] == [span for span in quick.spans if span[0] in WANTED]
    value = json.loads(joined(quick, replace))
    assert (value["n"], value["max_tokens"], value.get("x")) == (1, 5, json.loads(raw).get("x"))


def test_a_long_body_is_read_the_same_way() -> None:
    raw = b'{"prompt":"%b","n":2,"x":{"n":3}}' % (b"long " * 2000)
    assert joined(scan(raw, WANTED), {"n": b"1"}) == raw.replace(b'"n":2', b'"n":1')


def test_replacement_is_put_in_as_it_is_written() -> None:
    body = scan(b'{"temperature": 1.10, "seed": 18446744073709551616}')
    assert (
        joined(body, {"p": b'{"x": 1e400}'}) == b'{"temperature": 1.10, "seed": 18446744073709551616,"p":{"x": 1e400}}'
    )


def test_key_written_with_escapes_is_the_key() -> None:
    body = scan(rb'{"kv\u005ftransfer_params":7,"\u006e":2}')
    assert body.get("kv_transfer_params") == b"7"
    assert joined(body, {"n": b"1", "kv_transfer_params": b"null"}) == rb'{"kv\u005ftransfer_params":null,"\u006e":1}'


def test_last_of_two_equal_keys_counts_and_both_are_replaced() -> None:
    body = scan(b'{"n":1,"x":[{"n":3}],"n":22}')
    assert body.get("n") == b"22"
    assert joined(body, {"n": b"5"}) == b'{"n":5,"x":[{"n":3}],"n":5}'


LED_ASTRAY = [
    # The last value's length, taken from the first key, ends inside the first value, at something like a key.
    b'{"a":{"z":1,"a":12345},"a":123456}',
    # The same with two keys, each seen once on the way.
    b'{"a":1,"r":[1234567],"a":{"z":0 ,        "r":[123456]} }',
]


@pytest.mark.parametrize("raw", LED_ASTRAY)
def test_duplicates_made_to_lead_the_scanner_astray(raw: bytes) -> None:
    pairs = json.loads(raw, object_pairs_hook=list)
    body = scan(raw)
    assert [key for key, _, _ in body.spans] == [key for key, _ in pairs]
    for (key, start, end), (_, value) in zip(body.spans, pairs, strict=True):
        assert json.loads(raw[start:end], object_pairs_hook=list) == value, key
    replace = {key: b"0" for key, _ in pairs}
    assert json.loads(joined(body, replace), object_pairs_hook=list) == [(key, 0) for key, _ in pairs]


@settings(max_examples=60)
@given(st.data())
def test_duplicates_of_nested_look_alikes(data: st.DataObject) -> None:
    """Objects of few keys and short values inside each other: lengths collide often."""
    keys = st.sampled_from("ab")
    value = st.recursive(
        st.integers(0, 10**6).map(str),
        lambda items: st.lists(st.tuples(keys, items), max_size=3).map(written),
        max_leaves=6,
    )
    raw = written(data.draw(st.lists(st.tuples(keys, value), min_size=1, max_size=4))).encode()
    pairs = json.loads(raw, object_pairs_hook=list)
    body = scan(raw)
    assert [(key, json.loads(raw[start:end], object_pairs_hook=list)) for key, start, end in body.spans] == pairs
    for wanted in (frozenset("a"), frozenset("ab")):
        replace = dict.fromkeys(sorted(wanted), b"0")
        assert joined(scan(raw, wanted), replace) == joined(body, replace)


def written(pairs: list[tuple[str, str]]) -> str:
    return "{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"{",
        b"}",
        b"null",
        b"1",
        b'"text"',
        b"[]",
        b'[{"prompt":"x"}]',
        b'{"a":1',
        b'{"a":1,}',
        b'{"a"}',
        b'{"a":}',
        b'{"a":1}x',
        b'{"a":1}{"a":1}',
        b"{a:1}",
        b"{'a':1}",
        b'{"a":01}',
        b'{"a":1.}',
        b'{"a":"\\x"}',
        b'{"a":"\x01"}',
        b'{"a":[1,]}',
        b'{"a":1}\x00',
        b"\xef\xbb\xbf{}",
        b"\xff\xfe{\x00}\x00",
        b'{"a":"\xff"}',
        b'{"\xff":1}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\xc0\x80"}',
        b'{"a":"\xc3',
        b'{"a":"\xc3"}',
        b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"[" * 100_000,
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    for data in (raw, bytearray(raw)):
        with pytest.raises(ProtocolError) as caught:
            scan(data)
        assert caught.value.message.startswith("the request body ")


@settings(max_examples=50)
@given(object_texts(SOME_KEYS), st.data())
def test_truncated_object_is_refused(text: JsonText, data: st.DataObject) -> None:
    whole = text.raw.rstrip()
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ProtocolError):
        scan(whole[:cut])


def test_error_text_holds_no_part_of_the_body() -> None:
    with pytest.raises(ProtocolError) as caught:
        scan(b'{"secret-key": secret-value}')
    assert "secret" not in caught.value.message


def test_a_large_body_is_spliced_without_a_copy() -> None:
    raw = b'{"prompt":"' + b"x" * 1_000_000 + b'","max_tokens":5}'
    began = time.perf_counter()
    pieces = scan(raw).splice({"max_tokens": b"1", "stream": b"false"})
    assert time.perf_counter() - began < 0.5  # about a millisecond on a quiet machine
    assert b"".join(pieces) == raw[:-2] + b'1,"stream":false}'
    large = [piece for piece in pieces if len(piece) > 1000]
    assert [type(piece) for piece in large] == [memoryview]
    assert isinstance(large[0], memoryview)
    assert large[0].obj is raw


LONG = {
    "a key of 4 MB": b'{"' + b"k" * 4_000_000 + b'":1}',
    "a text of 4 MB after a key that appears twice": b'{"n":1,"n":22,"prompt":"' + b"a" * 4_000_000 + b'"}',
    "escapes": b'{"n":1,"n":22,"prompt":"' + b"\\n" * 2_000_000 + b'"}',
    "a list of a million strings": b'{"n":1,"n":22,"prompt":[' + b'"",' * 1_000_000 + b'""]}',
    "a list of a million numbers": b'{"n":1,"n":22,"prompt":[' + b"0," * 1_000_000 + b"0]}",
}


@pytest.mark.parametrize("name", LONG)
def test_no_body_costs_much_memory_or_time(name: str) -> None:
    """Each is about 4 MB; a scanner that keeps a note for each byte or item would take a hundred times that."""
    program = (
        "import resource, sys, time\n"
        "from antiphon.protocol.body import scan\n"
        "raw = sys.stdin.buffer.read()\n"
        'scan(b\'{"n":1,"n":2}\')\n'
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "began = time.process_time()\n"
        "spliced = b''.join(scan(raw).splice({'stream': b'true'}))\n"
        "seconds = time.process_time() - began\n"
        "assert spliced == raw[:-1] + b',\"stream\":true}'\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, seconds)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], input=LONG[name], capture_output=True, check=True, timeout=60)
    grown_kib, seconds = map(float, ran.stdout.split())
    assert grown_kib < 40_000
    assert seconds < 1.0


@pytest.mark.parametrize(
    "text",
    [
        r'{"a":"\ud800","max_tokens":9}',
        r'{"a":["x\uDFFFy", "\udc00\ud800"],"max_tokens":9}',
        r'{"\ud800":1,"max_tokens":9}',
        r'{"a":"\\\ud800 \\ud800 \ud83d\ude00","max_tokens":9}',
        r'{"a":NaN,"b":[-Infinity, Infinity],"max_tokens":9}',
        r'{"a":"\ud800 NaN, \"x\": Infinity ","b": NaN ,"max_tokens":9}',
    ],
)
def test_what_pythons_json_takes_is_left_for_an_engine_to_judge(text: str) -> None:
    """vLLM reads bodies with it. The bytes stay as they are, in keys that are replaced and beside them."""
    raw = text.encode()
    json.loads(raw)
    for wanted in (None, frozenset(("max_tokens",))):
        body = scan(raw, wanted)
        assert body.raw == raw
        assert b"".join(body.splice({"max_tokens": b"1"})) == raw.replace(b'"max_tokens":9', b'"max_tokens":1')
        assert body.sent("max_tokens") == body.get("max_tokens") == b"9"


@pytest.mark.parametrize("raw", [b'{"a":NaNs}', b'{"a":nan}', rb'{"a":"\ud8"}', rb'{"a":\ud800}', rb'{"a":"\ud800}'])
def test_what_pythons_json_does_not_take_either_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        json.loads(raw)
    with pytest.raises(ProtocolError):
        scan(raw)


def test_value_as_it_was_sent_is_the_last_one() -> None:
    body = scan(rb'{"a":1,"a":"\ud800"}')
    assert (body.sent("a"), body.get("a"), body.sent("b")) == (rb'"\ud800"', rb'"\ufffd"', None)
