"""The simulated engine's loads from a cache server: a lease is given back whatever becomes of the copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.core.errors import CacheUnavailable
from antiphon.engine.simulated import cache_kv
from antiphon.engine.simulated.cache_kv import CacheOptions, SimulatedCache
from antiphon.engine.simulated.tokenizer import SimulatedTokenizer
from antiphon.protocol import cache as calls

FOUND = calls.Found(7, (calls.Region(0, 4096, 1),), 32, 0)


class FakeSession:
    """Answers each lookup with one chunk whose address cannot be had."""

    incarnation = "life"

    def __init__(self) -> None:
        self.num_holds = 0

    def hold(self) -> bool:
        self.num_holds += 1
        return True

    def unhold(self) -> None:
        self.num_holds -= 1

    def submit(self, body: calls.Lookup) -> Any:
        return SimpleNamespace(wait=lambda _seconds: True, result=lambda: FOUND, onboarding=None)

    def address_of(self, region: calls.Region) -> int:
        raise CacheUnavailable("the mapping is closed")


class FakeClient:
    def __init__(self, options: object) -> None:
        self.session = FakeSession()
        self.released: list[tuple[str, str, int]] = []

    def start(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing runs."""

    def release(self, incarnation: str, request: str, lease: int) -> None:
        self.released.append((incarnation, request, lease))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cache_kv, "CacheClient", FakeClient)
    made = SimulatedCache(CacheOptions(1, 32), "P-life", "m", 16)
    yield made
    made.close()


def test_a_load_that_fails_gives_its_lease_back(cache: SimulatedCache) -> None:
    request: Any = SimpleNamespace(request_id="r", namespace="", prompt=list(range(40)), traceparent="")
    assert cache._load(request, None) == []  # type: ignore[arg-type]
    client: Any = cache._client
    assert client.released == [("life", "r", 7)]
    assert client.session.num_holds == 0


def test_a_text_of_ids_that_keys_have_no_room_for_has_keys(cache: SimulatedCache) -> None:
    def keys(text: str) -> list[bytes]:
        prompt = SimulatedTokenizer(4).encode(text)
        assert max(prompt) >> 32
        return cache._keys(SimpleNamespace(namespace="", prompt=prompt))  # type: ignore[arg-type]

    text = "what is said about this? " * 20
    assert len(keys(text)) >= 3
    assert keys(text + "more" * 40)[:3] == keys(text)[:3]
    assert not set(keys("x" + text[1:])) & set(keys(text))
