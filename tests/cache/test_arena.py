"""The books of the arena: what is allocated is disjoint, and every byte is accounted for."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.cache.arena import Arena, RegionHandle

UNIT = 64


def arena(num_units: int, usable: int | None = None, first_generation: int = 1) -> Arena:
    return Arena(num_units * UNIT, (num_units if usable is None else usable) * UNIT, UNIT, first_generation)


def allocate(books: Arena, num_units: int) -> RegionHandle:
    region = books.allocate(num_units * UNIT)
    assert region is not None
    books.validate()
    return region


def test_equal_sizes_never_fragment() -> None:
    books = arena(9)
    regions = [allocate(books, 3) for _ in range(3)]
    for turn in range(50):
        books.free(regions.pop(turn % 3))
        regions.append(allocate(books, 3))
        assert books.free_bytes == 0


def test_the_smallest_hole_that_fits_is_taken() -> None:
    books = arena(10)
    first, _, second, _ = allocate(books, 3), allocate(books, 1), allocate(books, 2), allocate(books, 4)
    books.free(first)
    books.free(second)
    assert allocate(books, 2).offset_bytes == second.offset_bytes


def test_holes_that_touch_become_one() -> None:
    books = arena(6)
    regions = [allocate(books, 2) for _ in range(3)]
    assert books.allocate(1) is None
    for region in (regions[0], regions[2], regions[1]):
        books.free(region)
        books.validate()
    assert books.largest_hole_bytes == 6 * UNIT


def test_sizes_are_rounded_up_to_the_alignment() -> None:
    books = arena(2)
    region = books.allocate(1)
    assert region is not None
    assert region.size_bytes == UNIT
    assert books.free_bytes == UNIT


def test_what_would_be_free_counts_the_neighbours() -> None:
    books = arena(6)
    left, middle, right = (allocate(books, 2) for _ in range(3))
    assert books.span_if_freed_bytes(middle) == 2 * UNIT
    books.free(left)
    assert books.span_if_freed_bytes(middle) == 4 * UNIT
    books.free(right)
    assert books.span_if_freed_bytes(middle) == 6 * UNIT


def test_a_handle_is_stale_when_its_bytes_are_given_again() -> None:
    books = arena(1, first_generation=700)
    old = allocate(books, 1)
    assert (books.is_current(old), old.generation) == (True, 700)
    books.free(old)
    assert not books.is_current(old)
    new = allocate(books, 1)
    assert new.offset_bytes == old.offset_bytes
    assert (books.is_current(old), books.is_current(new)) == (False, True)
    with pytest.raises(AssertionError, match="not allocated"):
        books.free(old)


def test_the_arena_grows_into_the_last_hole() -> None:
    books = arena(8, usable=3)
    region = allocate(books, 2)
    assert books.allocate(2 * UNIT) is None
    books.grow(8 * UNIT)
    books.validate()
    assert books.largest_hole_bytes == 6 * UNIT
    books.free(region)
    assert books.largest_hole_bytes == 8 * UNIT


def test_an_arena_that_is_not_populated_gives_nothing() -> None:
    books = arena(8, usable=0)
    books.validate()
    assert books.allocate(1) is None
    assert books.largest_hole_bytes == 0


steps = st.lists(st.tuples(st.sampled_from(["allocate", "free", "grow"]), st.integers(1, 9)), max_size=80)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(steps)
def test_regions_are_disjoint_and_add_up(orders: list[tuple[str, int]]) -> None:
    books = arena(32, usable=16)
    held: list[RegionHandle] = []
    for order, number in orders:
        if order == "allocate":
            hole_bytes = books.largest_hole_bytes
            region = books.allocate(number * UNIT)
            assert (region is None) == (hole_bytes < number * UNIT), "an allocation fails only where no hole fits"
            if region is not None:
                held.append(region)
        elif order == "free" and held:
            books.free(held.pop(number % len(held)))
        elif order == "grow":
            books.grow(min(32 * UNIT, books.usable_bytes + number * UNIT))
        books.validate()
        assert books.used_bytes == sum(region.size_bytes for region in held)
        covered = [unit for region in held for unit in range(region.offset_bytes, region.end_bytes, UNIT)]
        assert len(covered) == len(set(covered))
        assert all(books.is_current(region) for region in held)
    for region in held:
        books.free(region)
    assert books.largest_hole_bytes == books.usable_bytes
