"""A clear of a tier that others use too: what an earlier life has put there goes as well, page by page.

A real server process over a real Valkey; and the thread's part alone, with a store whose pages are at hand.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from antiphon.cache.events import TierDone
from antiphon.cache.tier_jobs import JobId, JobKind, Outcome, TierJob
from antiphon.cache.tier_key import TierKey, selection_of, tag_of
from antiphon.cache_server import tier_runner
from antiphon.cache_server.tier_runner import TierRunner
from antiphon.core.errors import TierTimeout
from antiphon.protocol import cache as wire
from antiphon.storage.memory_tier import MemoryTier
from tests.cache_server.test_tiers import fill, onboard, tier_of
from tests.cache_server.world import ServerProcess, keys_of, wait_for
from tests.conftest import Ports
from tests.storage.servers import Valkey

pytest.importorskip("xxhash", reason="needs xxhash")


@pytest.fixture
def valkey(tmp_path: Path, adopted: set[int], _ports: Ports) -> Iterator[Valkey]:
    pytest.importorskip("redis", reason="needs redis")
    service = Valkey(tmp_path / "vk", adopted, _ports.take)
    service.start()
    yield service
    service.kill()


@pytest.mark.process
def test_a_tenant_of_an_earlier_life_is_cleared(
    tmp_path: Path, die_with_parent: Callable[[], None], valkey: Valkey
) -> None:
    flags = ("--l2", f"redis://127.0.0.1:{valkey.port}/0", "--instance-id", "one")
    mine, others = keys_of("p", 3), keys_of("o", 3)
    with ServerProcess(tmp_path, die_with_parent, *flags).wait_populated() as one, one.connect().attach() as client:
        fill(client, "p", mine)
        client.store("o", others, tenant="other")
        wait_for(lambda: tier_of(one)["publications"]["published"] == 6, "the chunks are published")
    with ServerProcess(tmp_path, die_with_parent, *flags).wait_populated() as two, two.connect().attach() as client:
        client.call(wire.Clear(tenant="t"), wire.Cleared)
        wait_for(lambda: tier_of(two)["clears_pending"] == 0, "the clear has reached the tier")
        assert onboard(client, "p", mine)[0].num_tokens == 0
        found, _ = onboard(client, "o", others, tenant="other")
        assert found.num_tokens == 3 * 256
        client.release(found)


# ---- the thread's part -----------------------------------------------------------------------------------------------


class PagedTier(MemoryTier):
    """Its books know nothing; it is gone through, five keys a page."""

    num_pages_left = 10**6
    """Then it is out of service."""

    def keys(self) -> None:  # type: ignore[override]
        """See ``TierStore.keys``."""

    def pages(self, part: bytes, at: int = 0) -> Iterator[list[bytes]]:
        self.asked = (part, at)
        keys = iter(super().keys())
        while page := list(itertools.islice(keys, 5)):
            self.num_pages_left -= 1
            if self.num_pages_left < 0:
                raise TierTimeout("late")
            yield page

    def add(self, keys: Sequence[bytes]) -> None:
        with self._changed:
            self._records.update((key, bytearray(1)) for key in keys)
            self._held_bytes += len(keys)


def names(tenant: str, model: str, num_keys: int) -> list[TierKey]:
    head = tag_of(tenant) + tag_of(model)
    return [TierKey(head + key[8:]) for key in keys_of(tenant + model, num_keys)]


class Cleared:
    """A runner of one such tier."""

    def __init__(self) -> None:
        self.tier = PagedTier("paged", 10**6)
        self._ended: asyncio.Queue[TierDone] = asyncio.Queue()
        self._runner = TierRunner([self.tier], [(1, 10)], None, self._ended.put_nowait)  # type: ignore[arg-type]

    async def clear(self, tenant: str | None, model: str | None, *, is_continued: bool = False) -> TierDone:
        job = TierJob(*(JobId(1), 0, JobKind.CLEAR), selection=selection_of(tenant, model), is_continued=is_continued)
        self._runner.run(job)
        return await asyncio.wait_for(self._ended.get(), 5)

    def close(self) -> None:
        assert self._runner.close()


@pytest.fixture
async def cleared() -> Iterator[Cleared]:  # type: ignore[misc]
    made = Cleared()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("tenant", "model", "num_left", "asked"),
    [
        (None, None, 0, (b"", 0)),
        ("a", None, 24, (tag_of("a"), 0)),
        (None, "m", 24, (tag_of("m"), 4)),
        ("a", "m", 36, (tag_of("a") + tag_of("m"), 0)),
    ],
)
async def test_what_is_meant_goes_whoever_has_put_it(
    cleared: Cleared, tenant: str | None, model: str | None, num_left: int, asked: tuple[bytes, int]
) -> None:
    cleared.tier.add([key for pair in itertools.product("ab", "mn") for key in names(*pair, 12)])
    done = await cleared.clear(tenant, model)
    assert (done.outcome, done.is_whole, done.num_paged) == (Outcome.DONE, True, 48 - num_left)
    assert cleared.tier.usage().num_chunks == num_left
    assert cleared.tier.asked == asked


async def test_a_long_clear_goes_on_where_it_was(cleared: Cleared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_runner, "_CLEAR_MAX_S", 0.0)
    cleared.tier.add(names("a", "m", 12))
    numbers = [await cleared.clear("a", None)]
    while not numbers[-1].is_whole:
        numbers.append(await cleared.clear("a", None, is_continued=True))
    assert [done.num_paged for done in numbers] == [5, 5, 2, 0]
    assert cleared.tier.usage().num_chunks == 0


async def test_a_clear_that_failed_begins_anew(cleared: Cleared) -> None:
    cleared.tier.add(names("a", "m", 12))
    cleared.tier.num_pages_left = 1
    assert (await cleared.clear("a", None)).outcome is Outcome.FAILED
    cleared.tier.num_pages_left = 99
    done = await cleared.clear("a", None, is_continued=True)
    assert (done.is_whole, done.num_paged) == (True, 7)
