"""Namespaces: every field counts, equal fields agree everywhere, and no two field lists run together."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.namespace import DIGEST_BYTES, LoraIdentity, ModelIdentity, Namespace, Value, encode_value

MODEL = ModelIdentity(
    model_name="demo",
    weights_revision="rev1",
    kv_dtype="bfloat16",
    kv_scales="",
    attention_kind="full",
    num_layers=30,
    num_kv_heads=3,
    head_size=64,
    positional=(("rope_theta", "10000"), ("rope_scaling", "none")),
)
PLAIN = Namespace(MODEL, 256)

MODEL_CHANGES: dict[str, Any] = {
    "model_name": "demo2",
    "weights_revision": "rev2",
    "kv_dtype": "float16",
    "kv_scales": "ab12",
    "attention_kind": "mla",
    "num_layers": 31,
    "num_kv_heads": 6,
    "head_size": 128,
    "positional": (("rope_theta", "500000"), ("rope_scaling", "none")),
}
CHANGES: dict[str, Any] = {
    "chunk_size_tokens": 128,
    "layout_fingerprint": "cpu-avx512",
    "lora": LoraIdentity("style", "1"),
    "cache_salt": "tenant",
    "format_version": 2,
}


def variants() -> dict[str, Namespace]:
    found = {"plain": PLAIN, "other lora revision": dataclasses.replace(PLAIN, lora=LoraIdentity("style", "2"))}
    for name, value in MODEL_CHANGES.items():
        found[name] = dataclasses.replace(PLAIN, model=dataclasses.replace(MODEL, **{name: value}))
    for name, value in CHANGES.items():
        found[name] = dataclasses.replace(PLAIN, **{name: value})
    return found


def test_every_field_changes_the_digest() -> None:
    assert MODEL_CHANGES.keys() == {field.name for field in dataclasses.fields(ModelIdentity)}
    assert CHANGES.keys() | {"model"} == {field.name for field in dataclasses.fields(Namespace)}
    digests = {name: namespace.digest() for name, namespace in variants().items()}
    assert len(set(digests.values())) == len(digests)
    assert {len(digest) for digest in digests.values()} == {DIGEST_BYTES}


def test_order_of_positional_settings_has_no_meaning() -> None:
    turned = dataclasses.replace(PLAIN, model=dataclasses.replace(MODEL, positional=MODEL.positional[::-1]))
    assert turned.digest() == PLAIN.digest()


def test_digest_is_the_same_in_another_process() -> None:
    program = (
        "from antiphon.core.namespace import *;"
        "model = ModelIdentity('demo', 'rev1', 'bfloat16', '', 'full', 30, 3, 64,"
        " (('rope_theta', '10000'), ('rope_scaling', 'none')));"
        "print(Namespace(model, 256).digest().hex(), end='')"
    )
    environment = {"PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True, env=environment)
    assert done.stdout == PLAIN.digest().hex()


def test_digest_is_part_of_the_format() -> None:
    # Stored chunks are found by it: a change here needs a new FORMAT_VERSION.
    assert PLAIN.digest().hex() == "da11e39f67d7a1f29fde79f9c6a452ed7b17a1bb0767a626b8da2dc9766d45a6"


@pytest.mark.parametrize("value", [True, 1.5, ["list"], {"a": 1}, ("nested", False)])
def test_values_without_an_agreed_encoding_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be part of a namespace"):
        encode_value(value)


def test_senseless_namespaces_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        dataclasses.replace(MODEL, num_layers=0)
    with pytest.raises(ValueError, match="twice"):
        dataclasses.replace(MODEL, positional=(("a", "1"), ("a", "2")))
    with pytest.raises(ValueError, match="at least one token"):
        Namespace(MODEL, 0)


# ---- the encoding is injective: it can be read back ------------------------------------------------------------------


def decode(data: bytes) -> tuple[Value, bytes]:
    letter, length = data[:1], int.from_bytes(data[1:9], "little")
    payload, rest = data[9 : 9 + length], data[9 + length :]
    assert len(payload) == length
    if letter == b"n":
        return None, rest
    if letter == b"s":
        return payload.decode(), rest
    if letter == b"b":
        return payload, rest
    if letter == b"i":
        return int(payload), rest
    assert letter == b"t"
    items: list[Value] = []
    while payload:
        item, payload = decode(payload)
        items.append(item)
    return tuple(items), rest


values = st.recursive(
    st.none() | st.text(max_size=8) | st.binary(max_size=8) | st.integers(),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)


@given(values)
def test_encoding_can_be_read_back(value: Value) -> None:
    decoded, rest = decode(encode_value(value))
    assert rest == b""
    assert repr(decoded) == repr(value)


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_field_lists_collide_only_if_equal(one: list[str], other: list[str]) -> None:
    assert (encode_value(tuple(one)) == encode_value(tuple(other))) == (one == other)
