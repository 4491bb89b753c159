"""The simulated models: what their KV is made of, and the output that a prompt must have.

KV is that of the simulated engine (``antiphon.engine.simulated.kv``), once for each slab: a block's bytes follow from
the model, the tenant, the slab and all tokens up to the last one in the block, and a generated token is a digest over
the bytes of all blocks of all slabs. So any wrong, torn, stale or foreign chunk changes the output, and
``expected_output`` is the one oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.namespace import ModelIdentity, Namespace, NamespaceDigest
from antiphon.engine.simulated.kv import BLOCK_BYTES, extend, pack, root_state

CHUNK_SIZE_TOKENS = 4
BLOCK_SIZE_TOKENS = 2
BLOCKS_PER_CHUNK = CHUNK_SIZE_TOKENS // BLOCK_SIZE_TOKENS
SLAB_BYTES = BLOCKS_PER_CHUNK * BLOCK_BYTES

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model.

    Args:
        num_slabs: slabs of a chunk; a model of one slab has an opaque layout.
    """

    name: str
    num_slabs: int

    @property
    def layout(self) -> ChunkLayout:
        """The form of its chunks."""
        return ChunkLayout(self.num_slabs, SLAB_BYTES, "opaque" if self.num_slabs == 1 else None)


@lru_cache(maxsize=256)
def namespace_of(model: SimulatedModel, tenant: str) -> NamespaceDigest:
    """The namespace of a tenant's requests."""
    identity = ModelIdentity(model.name, "rev1", "bfloat16", "", "full", 1, model.num_slabs, 16)
    return Namespace(identity, CHUNK_SIZE_TOKENS, model.layout.fingerprint, cache_salt=tenant).digest()


@lru_cache(maxsize=1024)
def root_of(model: SimulatedModel, tenant: str, slab: int) -> int:
    """The state of a slab's KV before the first token."""
    return root_state(model.name, f"{tenant}/{slab}")


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // BLOCK_SIZE_TOKENS)


def next_token(slabs: Sequence[bytes]) -> int:
    """The token that follows, by the bytes of all blocks of each slab."""
    return int.from_bytes(blake2b(b"".join(slabs), digest_size=4).digest(), "big") >> 1


def expected_output(model: SimulatedModel, tenant: str, prompt: Tokens, num_output: int) -> Tokens:
    """What the model answers, from the prompt alone."""
    output: list[int] = []
    states = [root_of(model, tenant, slab) for slab in range(model.num_slabs)]  # after the last full block
    full: list[list[bytes]] = [[] for _ in states]
    num_full = 0
    tokens = list(prompt)
    while len(output) < num_output:
        while len(tokens) - num_full >= BLOCK_SIZE_TOKENS:
            packed = pack(tokens[num_full : num_full + BLOCK_SIZE_TOKENS])
            num_full += BLOCK_SIZE_TOKENS
            for slab, state in enumerate(states):
                states[slab] = extend(state, packed)
                full[slab].append(states[slab].to_bytes(BLOCK_BYTES, "big"))
        packed = pack(tokens[num_full:])
        tails = [extend(state, packed).to_bytes(BLOCK_BYTES, "big") if packed else b"" for state in states]
        output.append(next_token([b"".join(blocks) + tail for blocks, tail in zip(full, tails, strict=True)]))
        tokens.append(output[-1])
    return tuple(output)
