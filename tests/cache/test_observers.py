"""What others see: the numbered log, clearing, growth, and numbers that add up."""

from __future__ import annotations

import pytest

from antiphon.cache.effects import ArenaResized, ChunkRemoved, ChunkStored, Cleared, Removal, Ticked
from antiphon.cache.events import ArenaGrew, Clear, Tick
from antiphon.cache.states import ChunkState
from antiphon.core.errors import ProtocolError
from tests.cache.world import CHUNK_BYTES, FOUR_SLABS, World, options, prompt_keys

# ---- the log ---------------------------------------------------------------------------------------------------------


def test_observers_read_what_was_stored_and_removed_in_order() -> None:
    world = World(options(2))
    engine = world.attach()
    world.store(engine, "ab")
    world.store(engine, "x")
    page = world.cache.events_since(1, 100)
    assert [type(event) for event in page.events] == [ChunkStored, ChunkStored, ChunkRemoved, ChunkStored]
    assert [event.sequence for event in page.events] == [1, 2, 3, 4]
    assert page.events[2].key == prompt_keys("ab")[1]
    assert (page.next_sequence, page.num_lost) == (5, 0)
    assert world.cache.events_since(5, 100).events == ()
    assert [event.sequence for event in world.cache.events_since(2, 2).events] == [2, 3]


def test_who_reads_too_late_is_told_how_much_is_lost() -> None:
    world = World(options(4, event_log_max=3))
    engine = world.attach()
    world.store(engine, "abcd")
    page = world.cache.events_since(1, 100)
    assert (page.num_lost, [event.sequence for event in page.events]) == (1, [2, 3, 4])


def test_who_asks_beyond_the_log_means_another_server() -> None:
    world = World(options(1))
    with pytest.raises(ValueError, match="from 1 to 1"):
        world.cache.events_since(2, 1)
    with pytest.raises(ValueError, match="from 1 to 1"):
        world.cache.events_since(0, 1)


def test_observers_are_not_told_of_what_was_never_readable() -> None:
    world = World(options(2))
    rank0 = world.attach(slabs=(0,))
    world.store(rank0, "a")
    world.effects(Clear())
    assert [notice.sequence for notice in world.removed()] == [None]
    assert world.cache.events_since(1, 10).events == ()


# ---- clear -----------------------------------------------------------------------------------------------------------


def two_tenants_two_models() -> World:
    world = World(options(16))
    demo, other = world.attach(), world.attach("other", (0, 1, 2, 3), layout=FOUR_SLABS, model="other")
    world.store(demo, "ab", tenant="t1")
    world.store(demo, "abc", tenant="t2")
    world.store(other, "a", tenant="t3")
    return world


@pytest.mark.parametrize(
    ("event", "num_chunks", "num_bytes"),
    [
        (Clear(), 6, 7 * CHUNK_BYTES),
        (Clear(tenant="t1"), 2, 2 * CHUNK_BYTES),
        (Clear(model="demo"), 5, 5 * CHUNK_BYTES),
        (Clear(model="other"), 1, 2 * CHUNK_BYTES),
        (Clear(tenant="t1", model="other"), 0, 0),
    ],
)
def test_clear_forgets_what_it_names(event: Clear, num_chunks: int, num_bytes: int) -> None:
    world = two_tenants_two_models()
    assert world.call(event, Cleared) == Cleared(num_chunks, num_bytes, 0)
    assert {notice.removal for notice in world.removed()} <= {Removal.CLEARED}
    statistics = world.cache.statistics()
    assert statistics.num_chunks[ChunkState.READABLE] == 6 - num_chunks
    assert statistics.num_bytes[ChunkState.READABLE] == 7 * CHUNK_BYTES - num_bytes


def test_clear_says_what_is_still_held() -> None:
    world = World(options(4))
    engine = world.attach()
    world.store(engine, "ab")
    world.lookup(engine, "a")
    assert world.call(Clear(), Cleared) == Cleared(2, CHUNK_BYTES, CHUNK_BYTES)
    assert world.cache.statistics().num_bytes[ChunkState.RETIRED] == CHUNK_BYTES


# ---- growth ----------------------------------------------------------------------------------------------------------


def test_the_arena_is_usable_as_far_as_it_is_populated() -> None:
    world = World(options(4, usable_bytes=CHUNK_BYTES))
    engine = world.attach()
    world.store(engine, "ab")
    assert world.num_hit(engine, "ab") == 1
    assert world.call(ArenaGrew(3 * CHUNK_BYTES), ArenaResized) == ArenaResized(3 * CHUNK_BYTES)
    world.store(engine, "abc")
    assert world.num_hit(engine, "abc") == 3


@pytest.mark.parametrize("usable_bytes", [CHUNK_BYTES, 5 * CHUNK_BYTES, 2 * CHUNK_BYTES + 1])
def test_growth_that_cannot_be_is_refused(usable_bytes: int) -> None:
    world = World(options(4, usable_bytes=2 * CHUNK_BYTES))
    world.assert_refused(ArenaGrew(usable_bytes), ProtocolError)


# ---- numbers and time ------------------------------------------------------------------------------------------------


def test_numbers_add_up() -> None:
    world = World(options(4))
    engine = world.attach()
    rank1 = world.attach("halves", slabs=(1,))
    world.store(engine, "abc")
    world.num_hit(engine, "abx")
    world.store(rank1, "x")
    world.reserve(engine, "yz")
    statistics = world.cache.statistics()
    assert statistics.free_bytes + sum(statistics.num_bytes.values()) == statistics.usable_bytes
    assert (statistics.hit_tokens, statistics.miss_tokens) == (8, 4)
    counters = statistics.counters
    assert (counters.num_stored, counters.num_lookups) == (3, 1)
    assert counters.num_evicted == len(world.removed())
    assert statistics.num_chunks[ChunkState.INCOMPLETE] == 3
    assert statistics.reserved_bytes == 2 * CHUNK_BYTES
    assert (statistics.num_connections, statistics.num_engines) == (2, 2)


def test_a_snapshot_does_not_change_later() -> None:
    world = World(options(4))
    engine = world.attach()
    before = world.cache.statistics()
    world.store(engine, "ab")
    world.num_hit(engine, "ab")
    assert before.counters.num_stored == 0
    assert before.tenants == {}


def test_time_does_not_go_back() -> None:
    world = World(options(1))
    world.cache.step(Tick(), 5.0)
    with pytest.raises(AssertionError, match="went back"):
        world.cache.step(Tick(), 4.0)


def test_a_tick_says_when_the_next_is_due() -> None:
    world = World(options(2))
    engine = world.attach()
    assert world.effects(Tick()) == [Ticked(None)]
    world.reserve(engine, "a")
    assert world.effects(Tick()) == [Ticked(60.0)]
    world.detach(engine)
    assert world.effects(Tick()) == [Ticked(1.0)]
    assert world.tick(1.0) == [Ticked(None)]
