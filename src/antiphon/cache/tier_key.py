"""Under which key a chunk lies in a tier. Digests only.

A tier key has 32 bytes: 4 of a digest of the tenant, 4 of the model, and 24 of a digest over the namespace, the layout
and the chunk key. So what differs in meaning never shares a record, and the records of a tenant or a model can be told
from their keys alone, also those that an earlier life of the server, or another server, has written. Two tenants may
share their 4 bytes: what is cleared for one is then a miss for the other, no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Final, NewType

from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.namespace import NamespaceDigest

TierKey = NewType("TierKey", bytes)

TAG_BYTES: Final = 4
_DIGEST_BYTES: Final = 24


def tag_of(name: str) -> bytes:
    """The bytes that stand for a tenant's or a model's name."""
    return sha256(name.encode()).digest()[:TAG_BYTES]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What the chunks of one engine's request are, beyond their chunk keys.

    Args:
        prefix: tags of tenant and model.
        seed: digest state over namespace and layout.
    """

    namespace: NamespaceDigest
    layout: ChunkLayout
    prefix: bytes
    seed: bytes

    def key_of(self, key: ChunkKey) -> TierKey:
        """The tier key of a chunk."""
        return TierKey(self.prefix + sha256(self.seed + key).digest()[:_DIGEST_BYTES])


def meaning_of(namespace: NamespaceDigest, tenant: str, model: str, layout: ChunkLayout) -> Meaning:
    """The meaning of chunks of ``namespace`` in ``layout``."""
    form = f"{layout.num_slabs}:{layout.slab_bytes}:{layout.fingerprint or ''}"
    seed = sha256(b"antiphon tier 1\0" + namespace + form.encode()).digest()
    return Meaning(namespace, layout, tag_of(tenant) + tag_of(model), seed)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records a ``Clear`` means: those of a tenant, a model, both, or, with neither, all. Tags of the names."""

    tenant: bytes | None = None
    model: bytes | None = None

    def matches(self, key: bytes) -> bool:
        """Whether the record of that tier key is meant."""
        return self.tenant in (None, key[:TAG_BYTES]) and self.model in (None, key[TAG_BYTES : 2 * TAG_BYTES])


def selection_of(tenant: str | None, model: str | None) -> Selection:
    """The selection of a ``Clear``."""
    return Selection(None if tenant is None else tag_of(tenant), None if model is None else tag_of(model))
