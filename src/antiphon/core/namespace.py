"""What must be equal for KV to be reused: the namespace, as fields and as a digest.

A namespace holds what the bytes *mean*. It holds nothing of how they are served: no path, port, block size,
tensor-parallel size, seed or process state, so that two engines which differ only in these share their chunks. Where an
engine's bytes are opaque (packed for an instruction set), the layout fingerprint is part of what they mean.

Always true:

- Two namespaces that differ in any field have different digests: fields are encoded with a type and a length, so that
  no two field lists have the same encoding (``encode_value`` is injective).
- A digest depends on the fields only: the same in every process and on every machine.

It does not decide which fields an engine has; the connector reads them from the engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import NewType

FORMAT_VERSION = 1
"""Version of the stored format: the encoding here, the chain of keys, and the order of bytes inside a slab."""

DIGEST_BYTES = 32

NamespaceDigest = NewType("NamespaceDigest", bytes)
"""SHA-256 over a namespace, 32 bytes."""

Value = str | bytes | int | None | tuple["Value", ...]

_LENGTH_BYTES = 8


def encode_value(value: Value) -> bytes:
    """``value`` as bytes: a type letter, the length of the payload in 8 bytes, the payload. Different values differ.

    Raises:
        TypeError: a value of another type (a bool or a float has no agreed encoding here).
    """
    if value is None:
        letter, payload = b"n", b""
    elif isinstance(value, str):
        letter, payload = b"s", value.encode()
    elif isinstance(value, bytes):
        letter, payload = b"b", value
    elif isinstance(value, int) and not isinstance(value, bool):
        letter, payload = b"i", b"%d" % value
    elif isinstance(value, tuple):
        letter, payload = b"t", b"".join(map(encode_value, value))
    else:
        raise TypeError(f"{value!r} cannot be part of a namespace: use text, bytes, whole numbers, None or tuples")
    return letter + len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model and how it turns tokens into K and V.

    Args:
        model_name: the served model name, which the operator gives; never a path.
        weights_revision: revision or digest of the weights.
        kv_dtype: element type of the stored K and V (``bfloat16``, ``fp8_e4m3``).
        kv_scales: digest of the K and V scales; empty where the type needs none.
        attention_kind: ``full``, ``mla``, or another kind with its parameters (``sliding:4096``).
        num_layers: layers that hold KV.
        num_kv_heads: KV heads of the whole model, over all ranks.
        head_size: elements of one head.
        positional: settings that change K by position (rope theta, scaling), as (name, value); the order has no
            meaning.
    """

    model_name: str
    weights_revision: str
    kv_dtype: str
    kv_scales: str
    attention_kind: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    positional: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for count in (self.num_layers, self.num_kv_heads, self.head_size):
            if count < 1:
                raise ValueError(f"layers, KV heads and head size must be at least 1: {self}")
        names = [name for name, _ in self.positional]
        if len(set(names)) != len(names):
            raise ValueError(f"a positional setting is named twice: {names}")


@dataclass(frozen=True, slots=True)
class LoraIdentity:
    """An adapter: the name that requests use, and the revision or digest of its weights."""

    name: str
    revision: str


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that two requests must share before the KV of equal tokens is equal.

    Multimodal items differ by request and by place, so they enter the chain of chunk keys instead (``core.chunks``).

    Args:
        model: the model and its KV format.
        chunk_size_tokens: tokens of one chunk.
        layout_fingerprint: describes bytes that only engines of the same build and machine kind can read; None where
            the stored form is head-major, which every engine can read.
        lora: the request's adapter, if any.
        cache_salt: the request's salt: equal tokens under different salts share nothing.
        format_version: version of our stored format.
    """

    model: ModelIdentity
    chunk_size_tokens: int
    layout_fingerprint: str | None = None
    lora: LoraIdentity | None = None
    cache_salt: str = ""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.chunk_size_tokens < 1:
            raise ValueError(f"a chunk has at least one token, not {self.chunk_size_tokens}")

    def fields(self) -> tuple[tuple[str, Value], ...]:
        """Every field with its name, nested values as tuples of the same form."""
        model = tuple((field.name, getattr(self.model, field.name)) for field in dataclasses.fields(self.model))
        ordered = tuple((name, tuple(sorted(value)) if name == "positional" else value) for name, value in model)
        return (
            ("format_version", self.format_version),
            ("model", ordered),
            ("chunk_size_tokens", self.chunk_size_tokens),
            ("layout_fingerprint", self.layout_fingerprint),
            ("lora", None if self.lora is None else (self.lora.name, self.lora.revision)),
            ("cache_salt", self.cache_salt),
        )

    def digest(self) -> NamespaceDigest:
        """SHA-256 over the encoded fields: 32 bytes, the seed of every chunk key of this namespace."""
        return NamespaceDigest(hashlib.sha256(encode_value(("antiphon.namespace", self.fields()))).digest())
