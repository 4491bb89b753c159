"""The simulated KV: its bytes depend on everything they should, and its accounting always adds up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from antiphon.engine.simulated import kv as kv_module
from antiphon.engine.simulated.kv import BLOCK_BYTES, SimulatedKv, chain_keys, extend, pack, root_state

tokens = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=40)


def computed(prompt: list[int], size: int = 4, namespace: str = "") -> tuple[SimulatedKv, list[int]]:
    kv = SimulatedKv(32, size)
    block_ids = kv.allocate(kv.num_blocks_for(len(prompt)))
    kv.compute(root_state("m", namespace), block_ids, 0, pack(prompt))
    return kv, block_ids


def test_modulus_is_a_255_bit_number_that_passes_fermat() -> None:
    modulus = kv_module._MODULUS
    assert modulus.bit_length() == 255
    assert all(pow(base, modulus - 1, modulus) == 1 for base in (2, 3, 5, 7, 11, 13))


@given(tokens, st.data())
def test_bytes_do_not_depend_on_how_many_tokens_are_computed_at_once(prompt: list[int], data: st.DataObject) -> None:
    whole, block_ids = computed(prompt)
    kv = SimulatedKv(32, 4)
    pieces = kv.allocate(len(block_ids))
    position = 0
    while position < len(prompt):
        count = data.draw(st.integers(1, len(prompt) - position))
        kv.compute(root_state("m", ""), pieces, position, pack(prompt[position : position + count]))
        position += count
    assert kv.read(pieces) == whole.read(block_ids)


@given(tokens)
def test_keys_are_the_bytes_of_full_blocks(prompt: list[int]) -> None:
    kv, block_ids = computed(prompt)
    keys = chain_keys(root_state("m", ""), pack(prompt), 4)
    assert len(keys) == len(prompt) // 4
    assert [key.to_bytes(BLOCK_BYTES, "big") for key in keys] == kv.read(block_ids[: len(keys)])


@given(tokens, st.data())
def test_every_token_changes_its_block_and_all_later_ones(prompt: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(prompt) - 1))
    other = list(prompt)
    other[position] = data.draw(st.integers(0, 2**63 - 1).filter(lambda token: token != prompt[position]))
    kv, block_ids = computed(prompt)
    other_kv, other_ids = computed(other)
    same = [a == b for a, b in zip(kv.read(block_ids), other_kv.read(other_ids), strict=True)]
    assert same == [index < position // 4 for index in range(len(block_ids))]


@given(tokens, st.integers(0, 31), st.integers(1, 255), st.data())
def test_next_token_digest_sees_every_byte(prompt: list[int], byte: int, flip: int, data: st.DataObject) -> None:
    kv, block_ids = computed(prompt)
    victim = data.draw(st.sampled_from(block_ids))
    before = [kv.next_token(block_ids, choice) for choice in range(6)]
    content = bytearray(kv.read([victim])[0])
    content[byte] ^= flip
    kv.write(victim, bytes(content))
    # Six words of twelve bits each: equal by chance once in 2**72.
    assert [kv.next_token(block_ids, choice) for choice in range(6)] != before


def test_namespaces_and_models_do_not_share_bytes() -> None:
    states = {root_state(model, namespace) for model in ("a", "b") for namespace in ("", "x", "y")}
    assert len(states) == 6
    assert root_state("a", "b") != root_state("ab", "")


def test_extend_is_a_chain() -> None:
    assert extend(extend(7, pack([1, 2])), pack([3])) == extend(7, pack([1, 2, 3]))
    assert extend(7, b"") == 7


def test_blocks_are_freed_once() -> None:
    kv = SimulatedKv(4, 4)
    (block,) = kv.allocate(1)
    kv.free([block])
    with pytest.raises(AssertionError, match="freed twice"):
        kv.free([block])


def test_read_refuses_numbers_that_are_no_blocks() -> None:
    kv = SimulatedKv(4, 4)
    for bad in (-1, 4):
        with pytest.raises(IndexError):
            kv.read([0, bad])


def test_overwritten_blocks_stay_in_the_prefix_cache_elsewhere() -> None:
    prompt = list(range(12))
    kv, block_ids = computed(prompt)
    keys = chain_keys(root_state("m", ""), pack(prompt), 4)
    for block, key in zip(block_ids, keys, strict=True):
        kv.publish(block, key)
    before = kv.read(block_ids)
    kv.free_and_overwrite(block_ids)
    assert all(old != new for old, new in zip(before, kv.read(block_ids), strict=True))
    moved = kv.lookup(keys)
    assert not set(moved) & set(block_ids)
    assert kv.read(moved) == before
    kv.validate()


def test_overwriting_spares_blocks_that_others_hold() -> None:
    kv, block_ids = computed(list(range(12)))
    kv.acquire(block_ids[:1])
    before = kv.read(block_ids)
    kv.free_and_overwrite(block_ids)
    after = kv.read(block_ids)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False]


def test_least_recently_freed_is_evicted_first_and_late_blocks_before_early_ones() -> None:
    kv = SimulatedKv(4, 4)
    first, second = kv.allocate(2), kv.allocate(2)
    for key, block in enumerate([*first, *second]):
        kv.publish(block, key)
    kv.free(first)
    kv.free(second)
    assert kv.allocate(1) == [first[1]]
    assert kv.lookup([0, 1]) == [first[0]]
    assert kv.lookup([2, 3]) == second
    assert kv.num_evicted == 1


def test_cache_is_reset_only_while_no_block_is_held() -> None:
    kv = SimulatedKv(4, 4)
    block_ids = kv.allocate(1)
    kv.publish(block_ids[0], 1)
    assert not kv.reset_cache()
    kv.free(block_ids)
    assert kv.lookup([1])
    assert kv.reset_cache()
    assert not kv.lookup([1])
    kv.validate()


class KvAccounting(RuleBasedStateMachine):
    """Any sequence of calls keeps free + used = total, and cached prefixes keep their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = SimulatedKv(12, 2)
        self.held: list[list[int]] = []
        self.root = root_state("m", "")

    @precondition(lambda self: self.kv.num_free > 0)
    @rule(data=st.data(), prompt=st.lists(st.integers(0, 2), min_size=1, max_size=8))
    def request(self, data: st.DataObject, prompt: list[int]) -> None:
        keys = chain_keys(self.root, pack(prompt), 2)
        cached = self.kv.lookup(keys)
        total = self.kv.num_blocks_for(len(prompt))
        if total - len(cached) + self.kv.num_idle(cached) > self.kv.num_free:
            return
        self.kv.acquire(cached)
        block_ids = cached + self.kv.allocate(total - len(cached))
        self.kv.compute(self.root, block_ids, 2 * len(cached), pack(prompt[2 * len(cached) :]))
        expected, expected_ids = computed(prompt, size=2)
        assert self.kv.read(block_ids) == expected.read(expected_ids)
        for block, key in zip(block_ids[: len(keys)], keys, strict=True):
            self.kv.publish(block, key)
        self.held.append(block_ids)

    @precondition(lambda self: bool(self.held))
    @rule(data=st.data(), overwrite=st.booleans())
    def release(self, data: st.DataObject, overwrite: bool) -> None:
        block_ids = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if overwrite:
            self.kv.free_and_overwrite(block_ids)
        else:
            self.kv.free(block_ids)

    @rule()
    def reset(self) -> None:
        assert self.kv.reset_cache() == (not self.held)

    @invariant()
    def adds_up(self) -> None:
        self.kv.validate()
        assert self.kv.num_used == len({block for block_ids in self.held for block in block_ids})


TestKvAccounting = KvAccounting.TestCase
