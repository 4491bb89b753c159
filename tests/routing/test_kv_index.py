"""Which engine holds which blocks: matching by tokens, adapters, salts and images, limits, and lives."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.routing.ask import Prompt
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.kv_chain import StoredBlocks, chain_root
from antiphon.routing.kv_index import IndexOptions, KvIndex

TOKENS = list(range(1000, 1017))
"""Four blocks of four tokens, and one token."""


def engine(name: str = "e") -> Endpoint:
    return Endpoint(f"http://{name}:1", "prefill")


def stored(
    hashes: Sequence[int | bytes], tokens: Sequence[int], parent: int | bytes | None = None, size: int = 4
) -> StoredBlocks:
    return StoredBlocks(hashes, parent, tokens, size)


def salted(salt: str, *, adapter: str = "", extra: object = None) -> StoredBlocks:
    event = stored([1, 2, 3, 4], TOKENS[:16])
    event.adapter = adapter
    first = [part for part in (adapter, extra, salt) if part]
    rest = [adapter] if adapter else None
    event.extras = [first or None, rest, rest, rest]
    return event


def held(index: KvIndex, *endpoints: Endpoint, tokens: Sequence[int] = TOKENS, root: bytes | None = None) -> list[int]:
    index.validate()
    return index.match(tokens, endpoints, root)


def test_blocks_are_found_by_their_tokens_whatever_they_are_called() -> None:
    one, other, index = engine("a"), engine("b"), KvIndex(IndexOptions())
    index.store(one, 0, stored([11, 12], TOKENS[:8]))
    index.store(one, 0, stored([b"x"], TOKENS[8:12], parent=12))
    index.store(other, 0, stored([11], TOKENS[:4]))
    assert held(index, one, other, engine("c")) == [12, 4, 0]
    assert held(index, one, tokens=[1, *TOKENS[1:]]) == [0]
    assert held(index, one, tokens=TOKENS[:3]) == [0]
    assert held(index, one, tokens=[]) == [0]


def test_the_last_token_is_computed_in_any_case() -> None:
    one, index = engine(), KvIndex(IndexOptions())
    index.store(one, 0, stored([1, 2], TOKENS[:8]))
    assert held(index, one, tokens=TOKENS[:8]) == [4]
    assert held(index, one, tokens=TOKENS[:9]) == [8]


def test_a_block_whose_parent_is_unknown_is_not_placed_nor_are_its_children() -> None:
    one, index = engine(), KvIndex(IndexOptions())
    index.store(one, 0, stored([2], TOKENS[4:8], parent=1))
    index.store(one, 0, stored([3], TOKENS[8:12], parent=2))
    assert index.num_unplaced == 2
    index.store(one, 0, stored([1], TOKENS[:4]))
    assert held(index, one) == [4]


def test_a_block_held_twice_goes_when_both_are_gone() -> None:
    one, index = engine(), KvIndex(IndexOptions())
    index.store(one, 0, stored([1, 2], TOKENS[:8]))
    index.store(one, 0, stored([1, 2], TOKENS[:8]))
    index.remove(one, 0, [1], 0, "GPU")
    assert held(index, one) == [8]
    index.remove(one, 0, [1], -1, "")
    assert held(index, one) == [0]
    index.store(one, 0, stored([1], TOKENS[:4]))
    assert held(index, one) == [8], "the second was never gone"


def test_salts_and_adapters_share_nothing_and_images_end_a_match() -> None:
    one, index = engine(), KvIndex(IndexOptions())
    index.store(one, 0, salted("acme"))
    assert held(index, one) == [0]
    assert held(index, one, root=chain_root("", "acme")) == [16]
    assert held(index, one, root=chain_root("acme", "")) == [0]
    other = engine("b")
    index.store(other, 0, salted("acme", adapter="poet"))
    assert held(index, other, root=chain_root("", "acme")) == [0]
    assert held(index, other, root=chain_root("poet", "acme")) == [16]
    seer = engine("c")
    event = stored([1, 2], TOKENS[:8])
    event.extras = [None, [["image-digest", 2]]]
    index.store(seer, 0, event)
    assert held(index, seer) == [4]
    index.store(seer, 0, salted("acme", extra=["image-digest", 0]))
    assert held(index, seer, root=chain_root("", "acme")) == [0]


def test_tagged_keys_mean_what_untagged_ones_do() -> None:
    one, index = engine(), KvIndex(IndexOptions())
    event = stored([1], TOKENS[:4])
    event.adapter = "poet"
    event.extras = [[["lora", "poet", "/some/path"], ["cache_salt", "acme"]]]
    index.store(one, 0, event)
    assert held(index, one, root=chain_root("poet", "acme")) == [4]


def test_ranks_and_groups_hold_what_all_of_them_hold() -> None:
    one, index = engine(), KvIndex(IndexOptions())
    index.store(one, 0, stored([1, 2, 3], TOKENS[:12]))
    index.store(one, 1, stored([1, 2], TOKENS[:8]))
    assert held(index, one) == [8]
    large = stored([1], TOKENS[:16], size=16)
    large.group = 1
    index.store(one, 0, large)
    assert held(index, one) == [8]
    index.clear(one, 1)
    assert held(index, one) == [0], "a request may go to any rank"


def test_other_media_other_kinds_and_parts_of_blocks_are_ignored() -> None:
    one, index = engine(), KvIndex(IndexOptions())
    index.store(one, 0, stored([1, 2], TOKENS[:8]))
    for medium, kind in (("CPU", ""), ("GPU", "sliding_window"), ("", "mamba")):
        event = stored([3], TOKENS[8:12], parent=2)
        event.medium, event.kind = medium, kind
        index.store(one, 0, event)
    index.store(one, 0, stored([9], TOKENS[8:10], parent=2, size=2))
    index.remove(one, 0, [1], 0, "CPU")
    assert held(index, one) == [8]
    assert index.num_ignored == 4
    index.store(one, 0, stored([3], TOKENS[8:11], parent=2))
    assert index.num_unplaced == 1


def test_another_life_claims_nothing_of_the_earlier_one() -> None:
    one, index = engine(), KvIndex(IndexOptions())
    index.store(one, 0, stored([1, 2], TOKENS[:8]))
    assert index.hears(one)
    one.life += 1
    assert held(index, one) == [0]
    assert not index.hears(one)
    index.store(one, 0, stored([7], TOKENS[:4]))
    assert held(index, one) == [4]


def test_what_is_forgotten_is_swept_in_steps_and_never_claimed() -> None:
    one, other, index = engine("a"), engine("b"), KvIndex(IndexOptions())
    index.store(one, 0, stored([1, 2, 3], TOKENS[:12]))
    index.store(other, 0, stored([1], TOKENS[:4]))
    index.forget(one)
    assert held(index, one, other) == [0, 4]
    assert index.statistics()["unswept"] == 3
    index.store(one, 0, stored([1], TOKENS[:4]))
    assert held(index, one, other) == [4, 4]
    index.sweep(100)
    assert held(index, one, other) == [4, 4]
    assert index.statistics()["unswept"] == 0
    assert index.statistics()["digests"] == 1


def test_an_engine_has_so_many_blocks_and_the_rest_is_counted() -> None:
    one, index = engine(), KvIndex(IndexOptions(blocks_max=2))
    index.store(one, 0, stored([1, 2, 3, 4], TOKENS[:16]))
    assert held(index, one) == [8]
    assert index.num_overflowed == 2
    assert index.num_blocks(one) == 2
    index.forget(one)
    index.store(one, 0, stored([1, 2], TOKENS[:8]))
    index.forget(one)
    assert index.statistics()["unswept"] <= 2


def test_a_name_that_stands_for_other_tokens_now_claims_these_alone() -> None:
    one, index = engine(), KvIndex(IndexOptions())
    index.store(one, 0, stored([1], TOKENS[:4]))
    index.store(one, 0, stored([1], [5, 6, 7, 8]))
    assert held(index, one) == [0]
    assert held(index, one, tokens=[5, 6, 7, 8, 9]) == [4]
    assert index.num_conflicts == 1


def test_a_receipt_takes_back_what_was_not_there() -> None:
    one, index = engine(), KvIndex(IndexOptions())
    index.know_scope(b"s")
    prompt = Prompt(b"s", b"", len(TOKENS), TOKENS)
    index.store(one, 0, stored([1, 2, 3, 4], TOKENS[:16]))
    assert index.match_prompt(prompt, [one]) == [16]
    index.correct(one, prompt, 16)
    assert index.num_corrected == 0
    index.correct(one, prompt, 5)
    assert held(index, one) == [4]
    assert index.num_corrected == 3
    index.store(one, 0, stored([2, 3], TOKENS[4:12], parent=1))
    assert held(index, one) == [12]
    index.remove(one, 0, [2], 0, "GPU")
    assert held(index, one) == [4], "it was held once"


def test_too_many_corrections_and_the_engine_is_forgotten() -> None:
    one, index = engine(), KvIndex(IndexOptions(doubted_max=1))
    index.know_scope(b"s")
    index.store(one, 0, stored([1, 2, 3, 4], TOKENS[:16]))
    index.correct(one, Prompt(b"s", b"", len(TOKENS), TOKENS), 0)
    assert index.num_blocks(one) == 0
    assert held(index, one) == [0]


def test_a_scope_that_is_not_known_matches_nothing() -> None:
    one, index = engine(), KvIndex(IndexOptions(scopes_max=1))
    index.store(one, 0, stored([1], TOKENS[:4]))
    prompt = Prompt(b"plain", b"", len(TOKENS), TOKENS)
    assert not index.knows(prompt)
    assert index.match_prompt(prompt, [one]) == [0]
    index.know_scope(b"plain")
    assert index.match_prompt(prompt, [one]) == [4]
    index.know_scope(b"acme", "", "acme")
    assert not index.knows(prompt), "the older scope made room"


def test_many_prompts_are_told_apart_though_few_are_remembered() -> None:
    one, index = engine(), KvIndex(IndexOptions(prompts_max=2))
    index.store(one, 0, stored([1], TOKENS[:4]))
    for _ in range(3):
        assert [held(index, one, tokens=[first, *TOKENS[1:]])[0] for first in (1000, 1, 2, 3)] == [4, 0, 0, 0]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "clear", "forget", "sweep", "life"]),
        st.integers(0, 1),
        st.integers(0, 1),
        st.integers(0, 3),
        st.integers(1, 3),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS)
def test_the_index_claims_what_a_plain_record_of_the_announcements_does(
    actions: list[tuple[str, int, int, int, int]],
) -> None:
    engines = [engine("a"), engine("b")]
    prompts = [TOKENS, [*TOKENS[:4], *range(13)]]  # they share the first block
    index = KvIndex(IndexOptions())
    plain: list[dict[tuple[int, ...], int]] = [{}, {}]
    for kind, which, prompt, first, num in actions:
        endpoint, record, tokens = engines[which], plain[which], prompts[prompt]
        if kind == "store":
            last = min(first + num, 4)
            hashes = [hash(tuple(tokens[: 4 * (block + 1)])) % 2**60 for block in range(first, last)]
            parent = hash(tuple(tokens[: 4 * first])) % 2**60 if first else None
            index.store(endpoint, 0, stored(hashes, tokens[4 * first : 4 * last], parent))
            if not first or record.get(tuple(tokens[: 4 * first])):
                for block in range(first, last):
                    prefix = tuple(tokens[: 4 * (block + 1)])
                    record[prefix] = record.get(prefix, 0) + 1
        elif kind == "remove":
            prefix = tuple(tokens[: 4 * (first + 1)])
            index.remove(endpoint, 0, [hash(prefix) % 2**60], 0, "GPU")
            record[prefix] = max(0, record.get(prefix, 0) - 1)
        elif kind == "sweep":
            index.sweep(num)
        else:
            record.clear()
            if kind == "life":
                endpoint.life += 1
            elif kind == "clear":
                index.clear(endpoint, 0)
            else:
                index.forget(endpoint)
        index.validate()
        for tokens in prompts:
            expected = []
            for record in plain:
                depth = 0
                while depth < 4 and record.get(tuple(tokens[: 4 * (depth + 1)])):
                    depth += 1
                expected.append(4 * depth)
            assert index.match(tokens, engines) == expected
