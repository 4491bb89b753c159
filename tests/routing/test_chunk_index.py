"""What cache servers hold: the index against a plain model, and the namespaces that are learnt."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.chunks import ChunkKey, MultimodalItem, chunk_keys
from antiphon.core.namespace import NamespaceDigest
from antiphon.routing import chunk_index
from antiphon.routing.chunk_index import NAMESPACES_MAX, ChunkIndex, scope_of

SIZE = 4
SERVERS = ("s0", "s1", "s2")


def namespace(number: int) -> NamespaceDigest:
    return NamespaceDigest(bytes([number]) * 32)


def keys(tokens: list[int], number: int = 0) -> list[ChunkKey]:
    return chunk_keys(namespace(number), tokens, SIZE)


def test_whole_chunks_from_the_first_on() -> None:
    index = ChunkIndex()
    index.begin("s0", SIZE)
    tokens = list(range(15))
    first, second, third = keys(tokens)
    assert index.num_tokens_held("s0", namespace(0), tokens) == 0
    index.stored("s0", second)
    assert index.num_tokens_held("s0", namespace(0), tokens) == 0  # out of reach without the first
    index.stored("s0", first)
    assert index.num_tokens_held("s0", namespace(0), tokens) == 8
    index.stored("s0", third)
    assert index.num_tokens_held("s0", namespace(0), tokens) == 12  # the tail is no chunk
    assert index.num_tokens_held("s0", namespace(0), array("i", tokens)) == 12
    assert index.num_tokens_held("s0", namespace(0), tokens[:11]) == 8
    assert index.num_tokens_held("s0", namespace(0), tokens[:3]) == 0
    assert index.num_tokens_held("s0", namespace(0), [*tokens[:4], 99, *tokens[5:]]) == 4
    assert index.num_tokens_held("s0", namespace(1), tokens) == 0
    assert index.num_tokens_held("s1", namespace(0), tokens) == 0
    index.removed("s0", first)
    assert index.num_tokens_held("s0", namespace(0), tokens) == 0
    with pytest.raises(ValueError, match="32 bits"):
        index.num_tokens_held("s0", namespace(0), [1 << 40] * 8)


def test_a_prompt_with_an_image_matches_up_to_it() -> None:
    index = ChunkIndex()
    index.begin("s0", SIZE)
    tokens = list(range(12))
    for key in chunk_keys(namespace(0), tokens, SIZE, [MultimodalItem("cat", 5, 2)]):
        index.stored("s0", key)
    assert index.num_tokens_held("s0", namespace(0), tokens) == SIZE


def test_a_server_that_is_down_holds_nothing_until_it_is_back() -> None:
    index = ChunkIndex()
    index.set_up("s0", False)  # not known: nothing to say
    index.begin("s0", SIZE)
    tokens = list(range(4))
    index.stored("s0", keys(tokens)[0])
    index.set_up("s0", False)
    assert index.num_tokens_held("s0", namespace(0), tokens) == 0
    index.set_up("s0", True)
    assert index.num_tokens_held("s0", namespace(0), tokens) == 4
    index.forget("s0")
    index.stored("s0", keys(tokens)[0])  # its content is not told from the start
    assert index.num_tokens_held("s0", namespace(0), tokens) == index.num_chunks("s0") == 0


def test_past_its_bound_chunks_are_left_out_and_counted() -> None:
    index = ChunkIndex(chunks_max=2)
    index.begin("s0", SIZE)
    tokens = list(range(12))
    made = keys(tokens)
    for key in (*made, made[0]):
        index.stored("s0", key)
        index.validate()
    assert (index.num_chunks("s0"), index.num_left_out("s0"), index.has_room("s0")) == (2, 1, False)
    assert index.num_tokens_held("s0", namespace(0), tokens) == 8
    index.removed("s0", made[1])
    assert index.has_room("s0")
    index.begin("s0", SIZE)
    assert (index.num_chunks("s0"), index.num_left_out("s0")) == (0, 0)


def test_namespaces_are_learnt_for_all_engines_of_a_server() -> None:
    index = ChunkIndex()
    scope, other = scope_of(b"m", b"tenant"), scope_of(b"m", b"")
    tokens = list(range(8))
    for server in SERVERS:
        index.begin(server, SIZE)
        for key in keys(tokens, 1)[: 1 + (server == "s1")]:
            index.stored(server, key)
    assert index.held_by_engines(scope, tokens) == {}
    index.learn(scope, "p:1", "s0", namespace(1))
    assert index.held_by_engines(scope, tokens) == {"p:1": 4}
    index.learn(other, "d:1", "s0", namespace(2))  # it has not had this tenant yet, and its server has
    assert index.held_by_engines(scope, tokens) == {"p:1": 4, "d:1": 4}
    assert index.held_by_engines(other, tokens) == {}
    index.learn(scope, "d2:1", "s1", namespace(1))
    assert index.held_by_servers(scope, tokens) == {"s0": 4, "s1": 8}
    assert index.held_by_engines(scope, tokens) == {"p:1": 4, "d:1": 4, "d2:1": 8}
    index.forget_engine("d:1")
    index.learn(scope, "p:1", "s1", namespace(1))  # it was restarted elsewhere
    assert index.held_by_engines(scope, tokens) == {"p:1": 8, "d2:1": 8}
    assert (index.server_of("p:1"), index.server_of("d:1")) == ("s1", None)
    index.learn(scope, "d3:1", "s2", b"short")
    assert index.server_of("d3:1") is None
    index.validate()


def test_scopes_differ_by_model_and_salt() -> None:
    made = [
        scope_of(b"a", b"bc"),
        scope_of(b"ab", b"c"),
        scope_of(b"abc", b""),
        scope_of(b"", b"abc"),
        scope_of(b"", b""),
    ]
    assert len(set(made)) == len(made)
    assert scope_of(b"a", b"bc") == made[0]


def test_what_is_learnt_is_bounded() -> None:
    index = ChunkIndex()
    tokens = list(range(4))
    index.begin("s0", SIZE)
    index.stored("s0", keys(tokens, 0)[0])
    scope = scope_of(b"m", b"")
    for number in range(NAMESPACES_MAX):
        index.learn(scope, "d:1", "s0", namespace(number))
    assert index.held_by_servers(scope, tokens) == {"s0": 4}
    index.learn(scope, "d:1", "s0", namespace(0))  # in use again, so that it is not the one that goes
    index.learn(scope, "d:1", "s0", namespace(90))
    assert index.held_by_servers(scope, tokens) == {"s0": 4}
    for number in range(91, 91 + NAMESPACES_MAX - 1):
        index.learn(scope, "d:1", "s0", namespace(number))
    assert index.held_by_servers(scope, tokens) == {}
    index.validate()


def test_scopes_and_engines_are_bounded() -> None:
    index = ChunkIndex()
    oldest = scope_of(b"m", b"0")
    tokens = list(range(4))
    index.begin("s0", SIZE)
    index.stored("s0", keys(tokens, 1)[0])
    for number in range(chunk_index.SCOPES_MAX):
        index.learn(scope_of(b"m", b"%d" % number), f"e{number}", "s0", namespace(1))
    assert len(index.held_by_engines(oldest, tokens)) == chunk_index.ENGINES_MAX
    index.learn(scope_of(b"m", b"one more"), "e0", "s0", namespace(1))
    assert index.held_by_engines(oldest, tokens) == {}
    assert index.held_by_servers(scope_of(b"m", b"1"), tokens) == {"s0": 4}
    index.validate()


PROMPTS = st.lists(st.integers(0, 1), max_size=14)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), st.sampled_from(SERVERS), PROMPTS, st.integers(0, 1)),
        st.tuples(st.just("removed"), st.sampled_from(SERVERS), PROMPTS, st.integers(0, 1)),
        st.tuples(st.sampled_from(["begin", "forget", "up", "down"]), st.sampled_from(SERVERS)),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(STEPS, st.lists(PROMPTS, min_size=1, max_size=5))
def test_against_a_plain_model(steps: list[tuple[object, ...]], asked: list[list[int]]) -> None:
    index = ChunkIndex()
    held: dict[object, set[tuple[int, tuple[int, ...]]]] = {}  # prefixes of whole chunks, by server
    down: set[object] = set()
    scopes = [scope_of(b"m", b"%d" % number) for number in range(2)]
    for server in SERVERS:
        for number in range(2):
            index.learn(scopes[number], f"engine of {server}", server, namespace(number))
    for kind, server, *more in steps:
        assert isinstance(server, str)
        if kind in ("stored", "removed"):
            tokens, number = more
            assert isinstance(tokens, list)
            assert isinstance(number, int)
            made = keys(tokens, number)
            if not made:
                continue
            prefix = (number, tuple(tokens[: len(made) * SIZE]))
            if kind == "stored":
                index.stored(server, made[-1])
                if server in held:
                    held[server].add(prefix)
            else:
                index.removed(server, made[-1])
                held.get(server, set()).discard(prefix)
        elif kind == "begin":
            index.begin(server, SIZE)
            held[server] = set()
            down.discard(server)
        elif kind == "forget":
            index.forget(server)
            held.pop(server, None)
            down.discard(server)
        else:
            index.set_up(server, kind == "up")
            if server in held:
                (down.discard if kind == "up" else down.add)(server)
        index.validate()
    for tokens in asked:
        for number in range(2):
            wanted = {}
            for server, prefixes in held.items():
                length = 0
                while length + SIZE <= len(tokens) and (number, tuple(tokens[: length + SIZE])) in prefixes:
                    length += SIZE
                if length and server not in down:
                    wanted[server] = length
            assert index.held_by_servers(scopes[number], tokens) == wanted
            by_engine = {f"engine of {server}": length for server, length in wanted.items()}
            assert index.held_by_engines(scopes[number], tokens) == by_engine
            for server in SERVERS:
                assert index.num_tokens_held(server, namespace(number), tokens) == wanted.get(server, 0)
