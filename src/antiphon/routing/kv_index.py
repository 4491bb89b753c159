"""Which engine holds which KV blocks, by what the engines themselves say.

Owns, of each engine, the blocks that it has announced and not withdrawn. An engine names blocks by hashes of its own,
which mean nothing elsewhere; so a block is known here by a digest of all tokens up to its end, chained over the blocks
before it, and the engine's name only leads to it. A block whose parent is not known cannot be placed: it is counted and
left out, and its children with it. Not claiming a block costs a recomputation at most.

What may be reused is decided by the engine with more than tokens, and an event says with what: the adapter
(``lora_name``), and keys of single blocks (``extra_keys``): the salt in the first block, images and embeddings wherever
they are. Adapter and salt begin the chain (:func:`chain_root`), other keys go into the digest of their block: no text
leads there, so that a prompt with an image is matched up to the image. Only blocks on the device of a group with full
attention count; with several groups or data-parallel ranks, an engine holds what each of them holds.

One bit of ``holders[digest]`` is one engine's claim, so that a prompt is looked up once for all engines, and hashed
only as far as some engine still holds it. Forgetting an engine gives it another bit: O(1); the old bit is swept later,
in steps.

Invariants (:meth:`KvIndex.validate`): a bit that is in use is set for no digest that the engine has not announced; no
engine has more than ``blocks_max`` blocks; what was announced in another life of an endpoint is not claimed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from antiphon.routing.ask import Prompt
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.kv_chain import (
    PLAIN,
    TOKEN_BYTES,
    BlockHash,
    HashedPrompt,
    canonical,
    chain_root,
    keys_of,
    next_digest,
    pack,
    salt_of,
    sized_root,
)
from antiphon.routing.kv_chain import StoredBlocks as StoredBlocks

_SWEEP_STEP: Final = 64
DEVICE_MEDIA: Final = ("", "GPU")
FULL_KINDS: Final = ("", "full_attention", "mla_attention", "sink_full_attention")
"""Of ``kv_cache_spec_kind``: every block of a prefix is needed, and announced. Others keep parts of it."""


@dataclass(frozen=True)
class IndexOptions:
    """Limits.

    Args:
        blocks_max: blocks of one engine, about 250 bytes each; further ones are left out and counted.
        doubted_max: blocks of one engine that are known to be gone without word; one more and all are forgotten.
        scopes_max: scopes of prompts that are known at once.
        adapters_max: names of adapters that engines have used; further ones are taken for models.
        prompts_max: prompts whose digests are kept for the next look-up.
    """

    blocks_max: int = 262_144
    doubted_max: int = 4_096
    scopes_max: int = 8_192
    adapters_max: int = 4_096
    prompts_max: int = 32


class _Block:
    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.count = 1
        """The engine holds it in so many places, and announces the end of each."""


class _Content:
    """What one group of one rank of one engine holds."""

    def __init__(self, bit: int, block_size: int, life: int) -> None:
        self.bit = bit
        self.block_size = block_size
        self.life = life
        self.blocks: dict[BlockHash, _Block] = {}
        self.doubted: set[bytes] = set()
        """Digests that the engine was found not to hold, with a block here that says it does."""


class KvIndex:
    """The blocks of all engines of one or more pools."""

    def __init__(self, options: IndexOptions) -> None:
        self._options = options
        self._holders: dict[bytes, int] = {}
        self._engines: dict[Endpoint, dict[tuple[int, int], _Content]] = {}
        self._heard: dict[Endpoint, int] = {}
        """Engines that have said something, and in which life."""
        self._retired: list[_Content] = []
        self._num_retired = 0
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._scopes: OrderedDict[bytes, bytes] = OrderedDict()
        self._adapters: set[str] = set()
        self._prompts: OrderedDict[tuple[int, bytes], HashedPrompt] = OrderedDict()
        self.num_stored = 0
        self.num_removed = 0
        self.num_cleared = 0
        self.num_unplaced = 0
        """Blocks whose parent is not known, or whose tokens do not fit their number."""
        self.num_ignored = 0
        """Blocks elsewhere than on the device, of another group than one with full attention, or not full."""
        self.num_overflowed = 0
        """Blocks left out because their engine has ``blocks_max`` already: raise it, or expect recomputation."""
        self.num_conflicts = 0
        """Blocks announced under a name that stood for other tokens."""
        self.num_corrected = 0

    # -- what engines say -------------------------------------------------------------------------------------------

    def store(self, endpoint: Endpoint, rank: int, stored: StoredBlocks) -> None:
        """The engine holds these blocks now."""
        self._heard[endpoint] = endpoint.life
        if stored.adapter and len(self._adapters) < self._options.adapters_max:
            self._adapters.add(stored.adapter)
        hashes, size = stored.hashes, stored.block_size
        num = len(hashes)
        if stored.medium not in DEVICE_MEDIA or stored.kind not in FULL_KINDS:
            self.num_ignored += num
            return
        if size < 1 or len(stored.token_ids) != num * size:
            self.num_unplaced += num
            return
        if not num:
            return
        content = self._content(endpoint, rank, stored.group, size)
        if content is None:
            self.num_ignored += num
            return
        keys = keys_of(stored, 0)
        if stored.parent is None:
            salt = salt_of(keys)
            digest = sized_root(chain_root(stored.adapter, salt), size)
            if salt:
                keys = []
        else:
            parent = content.blocks.get(stored.parent)
            if parent is None:
                self.num_unplaced += num
                return
            digest = parent.digest
        packed = pack(stored.token_ids)
        width = size * TOKEN_BYTES
        for index in range(num):
            if index and stored.extras is not None:
                keys = keys_of(stored, index)
            extra = canonical(keys) if keys else b""
            digest = next_digest(digest, packed[index * width : (index + 1) * width], extra)
            if not self._add(content, hashes[index], digest):
                self.num_overflowed += num - index
                break
        self.sweep(num + _SWEEP_STEP)

    def remove(self, endpoint: Endpoint, rank: int, hashes: Sequence[BlockHash], group: int, medium: str) -> None:
        """The engine no longer holds these blocks, in one of the places where it held them. ``group`` -1 is every
        group."""
        self._heard[endpoint] = endpoint.life
        contents = self._engines.get(endpoint)
        if contents is None or medium not in DEVICE_MEDIA:
            return
        for (of_rank, of_group), content in contents.items():
            if of_rank == rank and group in (of_group, -1):
                for name in hashes:
                    self._remove(content, name)
        self.sweep(_SWEEP_STEP)

    def clear(self, endpoint: Endpoint, rank: int) -> None:
        """The engine says that it, or this rank of it, holds nothing any more."""
        self._heard[endpoint] = endpoint.life
        self.num_cleared += 1
        self.forget_rank(endpoint, rank)

    def forget_rank(self, endpoint: Endpoint, rank: int) -> None:
        """Claim nothing of this rank until it says more."""
        contents = self._engines.get(endpoint)
        if contents is None:
            return
        for place, content in contents.items():
            if place[0] == rank:  # it stays, with nothing: other ranks do not speak for it
                contents[place] = _Content(self._new_bit(), content.block_size, endpoint.life)
                self._retire(content)

    def forget(self, endpoint: Endpoint) -> None:
        """Claim nothing of this engine until it says more, as if it had never said anything."""
        self._heard.pop(endpoint, None)
        for content in self._engines.pop(endpoint, {}).values():
            self._retire(content)

    # -- what prompts ask -------------------------------------------------------------------------------------------

    def know_scope(self, scope: bytes, adapter: str = "", cache_salt: str = "") -> None:
        """Prompts of ``scope`` (``Prompt.scope``) go to engines with this adapter and this ``cache_salt``."""
        scopes = self._scopes
        if scope in scopes:
            scopes.move_to_end(scope)
        scopes[scope] = chain_root(adapter, cache_salt)  # again, too: that a model is an adapter may be new
        if len(scopes) > self._options.scopes_max:
            scopes.popitem(last=False)

    def is_adapter(self, model: str) -> bool:
        """Whether an engine has used an adapter of this name: requests for it name it as their model."""
        return model in self._adapters

    def hears(self, endpoint: Endpoint) -> bool:
        """Whether the engine has said anything in its present life: what is not claimed then, it does not hold."""
        return self._heard.get(endpoint, -1) == endpoint.life

    def knows(self, prompt: Prompt) -> bool:
        """Whether :meth:`match_prompt` can tell anything of this prompt."""
        return prompt.token_ids is not None and prompt.scope in self._scopes

    def match_prompt(self, prompt: Prompt, endpoints: Sequence[Endpoint]) -> list[int]:
        """As :meth:`match`; nothing where the tokens or the scope are not known."""
        root = self._scopes.get(prompt.scope)
        token_ids = prompt.token_ids
        if token_ids is None or root is None:
            return [0] * len(endpoints)
        return self.match(token_ids, endpoints, root)

    def match(self, token_ids: Sequence[int], endpoints: Sequence[Endpoint], root: bytes | None = None) -> list[int]:
        """Tokens from the beginning that each of ``endpoints`` holds, whole blocks, less than the prompt: an engine
        computes the last token in any case.

        Args:
            token_ids: not changed as long as the index may remember it.
            root: :func:`chain_root` of the prompt's scope; None is the model itself without a salt.
        """
        found = [0] * len(endpoints)
        if not token_ids:
            return found
        places: list[list[_Content]] = []
        masks: dict[int, int] = {}
        for endpoint in endpoints:
            contents = self._current(endpoint)
            places.append(contents)
            for content in contents:
                masks[content.block_size] = masks.get(content.block_size, 0) | content.bit
        if not masks:
            return found
        hashed = self._hashed(token_ids, PLAIN if root is None else root)
        depths: dict[int, int] = {}
        for size, mask in masks.items():
            self._walk(hashed, size, mask, depths)
        for index, contents in enumerate(places):
            if contents:
                found[index] = min([depths[content.bit] for content in contents])
        return found

    def correct(self, endpoint: Endpoint, prompt: Prompt, num_device_tokens: int) -> None:
        """A request with this prompt found only so many tokens on the engine's device: what is claimed beyond is
        gone."""
        contents = self._engines.get(endpoint)
        root = self._scopes.get(prompt.scope)
        token_ids = prompt.token_ids
        if contents is None or root is None or not token_ids:
            return
        hashed = self._hashed(token_ids, root)
        for content in list(contents.values()):
            size, bit = content.block_size, content.bit
            for index in range((len(token_ids) - 1) // size):
                digest = hashed.digest(index, size)
                if index < num_device_tokens // size:
                    continue
                if not self._holders.get(digest, 0) & bit:
                    break
                self._unset(digest, bit)
                content.doubted.add(digest)
                self.num_corrected += 1
            if len(content.doubted) > self._options.doubted_max:
                self.forget(endpoint)
                return

    # -- looking at it ----------------------------------------------------------------------------------------------

    def num_blocks(self, endpoint: Endpoint) -> int:
        """Blocks that are known of the engine."""
        return sum([len(content.blocks) for content in self._engines.get(endpoint, {}).values()])

    def statistics(self) -> dict[str, int]:
        """Counts since the start, and ``digests`` and ``unswept`` now."""
        return {
            "stored": self.num_stored,
            "removed": self.num_removed,
            "cleared": self.num_cleared,
            "unplaced": self.num_unplaced,
            "ignored": self.num_ignored,
            "overflowed": self.num_overflowed,
            "conflicts": self.num_conflicts,
            "corrected": self.num_corrected,
            "digests": len(self._holders),
            "unswept": self._num_retired,
        }

    def sweep(self, num: int) -> None:
        """Clear up to ``num`` claims of engines that were forgotten."""
        while self._retired and num > 0:
            content = self._retired[-1]
            while content.blocks and num > 0:
                block = content.blocks.popitem()[1]
                self._unset(block.digest, content.bit)
                self._num_retired -= 1
                num -= 1
            if not content.blocks:
                self._retired.pop()
                self._free_bits.append(content.bit)

    def validate(self) -> None:
        """Assert the invariants."""
        expected: dict[bytes, int] = {}
        contents = [content for places in self._engines.values() for content in places.values()]
        bits = [content.bit for content in (*contents, *self._retired)]
        assert len(set(bits)) == len(bits) and not set(bits) & set(self._free_bits)
        assert len(bits) + len(self._free_bits) == self._num_bits
        for content in contents:
            assert len(content.blocks) <= self._options.blocks_max
            for block in content.blocks.values():
                assert block.count >= 1
                if block.digest not in content.doubted:
                    expected[block.digest] = expected.get(block.digest, 0) | content.bit
        retired = sum([content.bit for content in self._retired])
        for digest, mask in self._holders.items():
            assert mask, "a digest that nobody holds"
            in_use = mask & ~retired
            assert in_use & ~expected.get(digest, 0) == 0, "a claim without a block"
        assert self._num_retired == sum([len(content.blocks) for content in self._retired])

    # -- inside -----------------------------------------------------------------------------------------------------

    def _current(self, endpoint: Endpoint) -> list[_Content]:
        """What the engine holds in its present life."""
        contents = self._engines.get(endpoint)
        if contents is None:
            return []
        current = list(contents.values())
        for content in current:
            if content.life != endpoint.life:
                self.forget(endpoint)
                return []
        return current

    def _walk(self, hashed: HashedPrompt, size: int, alive: int, depths: dict[int, int]) -> None:
        """Fill in the tokens that each of the bits ``alive`` holds."""
        num = (len(hashed.token_ids) - 1) // size
        holders = self._holders
        index = 0
        while alive and index < num:
            mask = holders.get(hashed.digest(index, size), 0)
            _note(alive & ~mask, index * size, depths)
            alive &= mask
            index += 1
        _note(alive, num * size, depths)

    def _content(self, endpoint: Endpoint, rank: int, group: int, size: int) -> _Content | None:
        """Where blocks of this size belong; None where they are parts of the blocks that the engine caches."""
        self._current(endpoint)
        contents = self._engines.get(endpoint)
        if contents is None:
            contents = self._engines[endpoint] = {}
        content = contents.get((rank, group))
        if content is not None and content.block_size != size:
            if size < content.block_size and content.blocks:
                return None
            self._retire(content)
            content = None
        if content is None:
            content = contents[rank, group] = _Content(self._new_bit(), size, endpoint.life)
        return content

    def _new_bit(self) -> int:
        if self._free_bits:
            return self._free_bits.pop()
        self._num_bits += 1
        return 1 << (self._num_bits - 1)

    def _add(self, content: _Content, name: BlockHash, digest: bytes) -> bool:
        """Returns whether there was room."""
        block = content.blocks.get(name)
        if block is None:
            if len(content.blocks) >= self._options.blocks_max:
                return False
            content.blocks[name] = _Block(digest)
        elif block.digest != digest:
            self.num_conflicts += 1
            content.doubted.discard(block.digest)
            self._unset(block.digest, content.bit)
            content.blocks[name] = _Block(digest)
        elif digest in content.doubted:
            block.count = 1
        else:
            block.count += 1
        content.doubted.discard(digest)
        self._holders[digest] = self._holders.get(digest, 0) | content.bit
        self.num_stored += 1
        return True

    def _remove(self, content: _Content, name: BlockHash) -> None:
        block = content.blocks.get(name)
        if block is None:
            return
        self.num_removed += 1
        block.count -= 1
        if not block.count or block.digest in content.doubted:
            del content.blocks[name]
            content.doubted.discard(block.digest)
            self._unset(block.digest, content.bit)

    def _unset(self, digest: bytes, bit: int) -> None:
        mask = self._holders.get(digest, 0) & ~bit
        if mask:
            self._holders[digest] = mask
        else:
            self._holders.pop(digest, None)

    def _retire(self, content: _Content) -> None:
        """Its bit is in use no more; who held it is swept later, at once where too much waits for that."""
        self._retired.append(content)
        self._num_retired += len(content.blocks)
        if not content.blocks:
            self.sweep(1)
        if self._num_retired > self._options.blocks_max:
            self.sweep(self._num_retired - self._options.blocks_max)

    def _hashed(self, token_ids: Sequence[int], root: bytes) -> HashedPrompt:
        prompts = self._prompts
        place = id(token_ids), root
        hashed = prompts.get(place)
        if hashed is None:
            hashed = prompts[place] = HashedPrompt(token_ids, root)
            if len(prompts) > self._options.prompts_max:
                prompts.popitem(last=False)
        return hashed


def _note(bits: int, num_tokens: int, depths: dict[int, int]) -> None:
    while bits:
        bit = bits & -bits
        depths[bit] = num_tokens
        bits ^= bit
