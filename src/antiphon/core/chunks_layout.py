"""The form of a stored chunk: equal slabs, and which of them a rank reads and writes.

A chunk is stored head-major, one slab a KV head, so that engines of different tensor-parallel size share chunks. MLA
has one slab. Where an engine's bytes are opaque a chunk is one slab of whole blocks, and a fingerprint names what can
read it. A chunk is readable when all its slabs are committed.

Values and arithmetic only: the order of bytes inside a slab belongs to the copy, and to the format version.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.core.namespace import ModelIdentity


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """How many slabs a chunk has, and how large each is.

    Args:
        num_slabs: slabs of one chunk, over all ranks.
        slab_bytes: bytes of one slab.
        fingerprint: names an opaque layout; None where the slabs are head-major.
    """

    num_slabs: int
    slab_bytes: int
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        if self.num_slabs < 1 or self.slab_bytes < 1:
            raise ValueError(f"a chunk has at least one slab of at least one byte: {self}")

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a whole chunk: its slabs lie next to each other, in order."""
        return self.num_slabs * self.slab_bytes


def head_major_layout(model: ModelIdentity, chunk_size_tokens: int, element_bytes: int) -> ChunkLayout:
    """The layout of a model whose K and V are stored by head.

    Args:
        model: ``mla`` stores one latent vector of ``head_size`` elements a token; every other kind stores K and V.
        chunk_size_tokens: tokens of a chunk.
        element_bytes: bytes of one element of the KV type.
    """
    if model.attention_kind == "mla":
        return ChunkLayout(1, model.num_layers * chunk_size_tokens * model.head_size * element_bytes)
    return ChunkLayout(model.num_kv_heads, model.num_layers * chunk_size_tokens * 2 * model.head_size * element_bytes)


def slabs_of_rank(num_slabs: int, rank: int, num_ranks: int) -> range:
    """The slabs that a tensor-parallel rank holds: its share of the heads, or one head that several ranks repeat.

    Raises:
        ValueError: heads and ranks do not divide each other, so that no engine shards them evenly.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank {rank} of {num_ranks}")
    if num_slabs % num_ranks == 0:
        share = num_slabs // num_ranks
        return range(rank * share, (rank + 1) * share)
    if num_ranks % num_slabs == 0:
        head = rank // (num_ranks // num_slabs)
        return range(head, head + 1)
    raise ValueError(f"{num_slabs} KV heads cannot be shared evenly by {num_ranks} ranks")
