"""Who may call, and what must agree: connections, engines, namespaces, layouts."""

from __future__ import annotations

import dataclasses

import pytest

from antiphon.cache.effects import Attached, Detached, Refused, Verdict
from antiphon.cache.events import Attach, Commit, ConnectionId, Detach, EngineId, Lookup, Reserve
from antiphon.cache.options import CacheOptions
from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import ConnectionUnknown, LayoutMismatch, ProtocolError
from tests.cache.world import CHUNK_BYTES, CHUNK_SIZE_TOKENS, FOUR_SLABS, MODEL, TWO_SLABS, World, namespace, options
from tests.cache.world import prompt_keys as keys_of

NOBODY = ConnectionId(99)


def attach_event(connection: int, **changes: object) -> Attach:
    engine = EngineId("engine", "1")
    plain = Attach(ConnectionId(connection), engine, "demo", CHUNK_SIZE_TOKENS, TWO_SLABS, (0, 1))
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def test_an_attached_engine_is_told_what_to_map() -> None:
    world = World(options(4, usable_bytes=CHUNK_BYTES))
    assert world.call(attach_event(1), Attached) == Attached(4 * CHUNK_BYTES, CHUNK_BYTES)


def test_nobody_calls_before_attaching_or_after_the_end() -> None:
    world = World(options(4))
    for event in (
        Lookup(NOBODY, "r", namespace(), "", keys_of("a")),
        Reserve(NOBODY, namespace(), "", None, keys_of("a")),
        Commit(NOBODY, ()),
        Detach(NOBODY),
    ):
        world.assert_refused(event, ConnectionUnknown)
    engine = world.attach()
    assert world.call(Detach(engine), Detached) == Detached(0, 0)
    world.assert_refused(Detach(engine), ConnectionUnknown)
    assert world.cache.statistics().num_engines == 0


def test_a_connection_attaches_once() -> None:
    world = World(options(4))
    world.call(attach_event(1), Attached)
    world.assert_refused(attach_event(1), ProtocolError)


@pytest.mark.parametrize("slabs", [(2,), (-1,), (0, 0)])
def test_slabs_must_be_in_the_layout(slabs: tuple[int, ...]) -> None:
    World(options(4)).assert_refused(attach_event(1, slabs=slabs), ProtocolError)


def test_an_engine_with_another_chunk_size_is_refused() -> None:
    message = World(options(4)).assert_refused(attach_event(1, chunk_size_tokens=8), LayoutMismatch)
    assert "8 tokens, the cache's 4" in message


@pytest.mark.parametrize("change", [{"layout": FOUR_SLABS}, {"model": "other"}])
def test_processes_of_one_engine_must_agree(change: dict[str, object]) -> None:
    world = World(options(4))
    world.call(attach_event(1), Attached)
    world.assert_refused(attach_event(2, **change), LayoutMismatch)
    world.call(attach_event(2, engine=EngineId("engine", "2"), **change), Attached)


@pytest.mark.parametrize(
    "layout",
    [FOUR_SLABS, dataclasses.replace(TWO_SLABS, fingerprint="cpu-amx"), ChunkLayout(1, CHUNK_BYTES)],
    ids=["head count", "fingerprint", "one opaque slab"],
)
def test_one_namespace_has_one_layout(layout: ChunkLayout) -> None:
    world = World(options(8))
    world.store(world.attach(), "ab")
    other = world.attach("other", (0,), layout=layout)
    world.assert_refused(Lookup(other, "r", namespace(), "", keys_of("ab")), LayoutMismatch)
    world.assert_refused(Reserve(other, namespace(), "", None, keys_of("x")), LayoutMismatch)


def test_one_namespace_has_one_tenant_and_one_model() -> None:
    world = World(options(8))
    engine, renamed = world.attach(), world.attach("renamed", model="another")
    world.store(engine, "ab")
    world.assert_refused(Lookup(engine, "r", namespace(), "someone", keys_of("ab")), LayoutMismatch)
    world.assert_refused(Lookup(renamed, "r", namespace(), "", keys_of("ab")), LayoutMismatch)


def test_a_namespace_without_chunks_is_bound_to_nothing() -> None:
    world = World(options(2))
    engine = world.attach()
    world.store(engine, "a")
    world.store(engine, "xy", tenant="other")  # evicts the last chunk of the first namespace
    other = world.attach("other", (0,), layout=FOUR_SLABS)
    assert world.num_hit(other, "a") == 0


def test_a_key_under_the_wrong_namespace_is_refused() -> None:
    world = World(options(8))
    engine = world.attach()
    world.store(engine, "ab")
    wrong = namespace("salted")
    assert "another namespace" in world.assert_refused(
        Lookup(engine, "r", wrong, "salted", keys_of("ab")), LayoutMismatch
    )
    world.assert_refused(Reserve(engine, wrong, "salted", None, keys_of("ab")), LayoutMismatch)
    world.assert_refused(Reserve(engine, wrong, "salted", keys_of("ab")[0], (ChunkKey(bytes(32)),)), LayoutMismatch)


@pytest.mark.parametrize("change", [{"kv_dtype": "float16"}, {"num_kv_heads": 4}, {"weights_revision": "rev2"}])
def test_kv_of_another_meaning_is_a_miss(change: dict[str, object]) -> None:
    world = World(options(8))
    engine = world.attach()
    world.store(engine, "ab")
    changed = dataclasses.replace(MODEL, **change)  # type: ignore[arg-type]
    keys = keys_of("ab", model=changed)
    reply = world.reply(Lookup(engine, "r", namespace(model=changed), "", keys))
    assert not isinstance(reply, Refused)
    assert reply.num_tokens == 0  # type: ignore[union-attr]
    answer = world.reply(Reserve(engine, namespace(model=changed), "", None, keys))
    assert answer.verdicts == (Verdict.WRITE, Verdict.WRITE)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"arena_bytes": 10}, "holds no unit"),
        ({"arena_bytes": 64 * 3 + 1}, "multiples"),
        ({"usable_bytes": 64 * 100}, "usable_bytes must be"),
        ({"quarantine_s": -1.0}, "quarantine_s"),
        ({"leased_share_max": 0.0}, "leased_share_max"),
        ({"leases_per_engine_max": 0}, "leases_per_engine_max"),
        ({"reserved_share_max": 1.5}, "reserved_share_max"),
        ({"tenants_max": 0}, "tenants_max"),
        ({"event_log_max": 0}, "event_log_max"),
    ],
)
def test_senseless_options_are_refused(changes: dict[str, object], match: str) -> None:
    plain = CacheOptions(arena_bytes=64 * 4, alignment_bytes=64)
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(plain, **changes)  # type: ignore[arg-type]
