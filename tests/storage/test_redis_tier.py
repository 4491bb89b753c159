"""The tier in Redis: the contract against a real Valkey, over TCP and its unix socket; faults of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from antiphon.core.errors import ConfigError, TierFull, TierTimeout, TierUnavailable
from antiphon.core.units import KIB, MIB
from antiphon.storage.redis_tier import UNFINISHED_TTL_S, RedisTier, RedisTierOptions
from tests.storage.servers import Valkey
from tests.storage.tier_kit import TIMEOUT_S, ListingContract, Rig, ServiceContract, TierContract, fill, key_of, outcome

pytestmark = pytest.mark.process


def make_rig(service: Valkey, url: str) -> Rig:
    options = RedisTierOptions(url, timeout_s=TIMEOUT_S, password=service.password)
    plain = redis.Redis(port=service.port, password=service.password)

    def name_of(key: bytes) -> str:
        return f"antiphon:{{{key.hex()}}}"

    def raw(key: bytes) -> bytes:
        value = plain.get(name_of(key))
        assert isinstance(value, bytes)
        return value

    def set_raw(key: bytes, record: bytes) -> None:
        plain.set(name_of(key), record)

    def reopen() -> RedisTier:
        rig.store.close()
        return RedisTier("redis", options)

    rig = Rig(RedisTier("redis", options), raw, set_raw, reopen)
    rig.closers += [plain.close]
    return rig


def closing(rig: Rig, service: Valkey) -> None:
    rig.store.close()
    for close in rig.closers:
        close()
    with redis.Redis(port=service.port, password=service.password) as plain:
        plain.flushall()
        plain.config_set("maxmemory", "256mb")
        plain.config_set("maxmemory-policy", "allkeys-lru")


@pytest.fixture(params=["tcp", "unix"])
def url(request: pytest.FixtureRequest, valkey: Valkey) -> str:
    return f"redis://127.0.0.1:{valkey.port}/0" if request.param == "tcp" else f"unix://{valkey.socket_path}?db=0"


@pytest.fixture
def rig(valkey: Valkey, url: str) -> Iterator[Rig]:
    made = make_rig(valkey, url)
    yield made
    closing(made, valkey)


@pytest.fixture
def service(valkey: Valkey) -> Valkey:
    return valkey


class TestContract(TierContract):
    pass


class TestFaults(ServiceContract):
    pass


class TestListing(ListingContract):
    pass


def test_a_listing_has_whole_chunks_of_this_prefix_only(rig: Rig, valkey: Valkey) -> None:
    rig.put(1)
    name = f"antiphon:{{{key_of(1).hex()}}}"
    with redis.Redis(port=valkey.port) as plain:
        for other in (f"other:{name}", f"{name}:life:3", f"antiphon2:{{{key_of(2).hex()}}}", "antiphon:{zz}"):
            plain.set(other, b"x")
    options = RedisTierOptions(f"redis://127.0.0.1:{valkey.port}", prefix="ant*phon", timeout_s=TIMEOUT_S)
    other_store = RedisTier("redis", options)
    try:
        assert isinstance(rig.store, RedisTier)
        assert [key for page in rig.store.pages(b"") for key in page] == [key_of(1)]
        assert not any(other_store.pages(b""))
    finally:
        other_store.close()


def test_a_server_that_may_not_evict_is_full(rig: Rig, valkey: Valkey) -> None:
    with redis.Redis(port=valkey.port) as plain:
        plain.config_set("maxmemory", "48mb")
        plain.config_set("maxmemory-policy", "noeviction")
        error = fill(rig, 4 * MIB, 20)
        assert error is not None
        assert "maxmemory" in str(error)
        assert rig.get(1000, 4 * MIB) is not None
        rig.store.remove([key_of(1000)])
        assert rig.put(5, MIB) == rig.get(5, MIB)
        assert not [name for name in plain.scan_iter() if name.count(b":") > 1], "unfinished chunks were left"


def test_a_server_that_evicts_is_never_full_and_never_wrong(rig: Rig, valkey: Valkey) -> None:
    with redis.Redis(port=valkey.port) as plain:
        plain.config_set("maxmemory", "48mb")
        assert fill(rig, 4 * MIB, 30) is None
    hits = [rig.get(number, 4 * MIB) for number in range(1000, 1030)]
    assert 0 < sum(hit is not None for hit in hits) < 30


def test_an_unfinished_chunk_ends_by_itself(rig: Rig, valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(rig.store, RedisTier)
    monkeypatch.setattr(rig.store, "_command", _dying_after(2, rig.store._command))
    with pytest.raises(TierUnavailable):
        rig.put(1, 4 * MIB)
    with redis.Redis(port=valkey.port) as plain:
        (left,) = plain.keys()
        assert 0 < plain.ttl(left) <= UNFINISHED_TTL_S
        monkeypatch.undo()
        assert rig.get(1, 4 * MIB) is None
        rig.put(1, 4 * MIB)
        assert plain.ttl(f"antiphon:{{{key_of(1).hex()}}}") == -1


def _dying_after(num_calls: int, real: Callable[..., object]) -> Callable[..., object]:
    left = [num_calls]

    def command(*args: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise redis.ConnectionError("gone")
        return real(*args)

    return command


def test_a_chunk_that_is_evicted_while_it_is_written(rig: Rig, valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(rig.store, RedisTier)
    real = rig.store._command
    with redis.Redis(port=valkey.port) as plain:

        def command(*args: object) -> object:
            if args[0] == "APPEND":
                plain.flushall()
            return real(*args)

        monkeypatch.setattr(rig.store, "_command", command)
        with pytest.raises(TierFull, match="evicted"):
            rig.put(1, 2 * MIB)
        assert plain.keys() == []


def test_another_type_under_the_name(rig: Rig, valkey: Valkey) -> None:
    with redis.Redis(port=valkey.port) as plain:
        plain.lpush(f"antiphon:{{{key_of(1).hex()}}}", b"x")
    with pytest.raises(TierUnavailable, match="WRONGTYPE"):
        rig.get(1)


def test_passwords(
    tmp_path: Path, adopted: set[int], take_ports: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Valkey(tmp_path, adopted, take_ports, password="letmein")
    server.start()
    try:
        rig = make_rig(server, f"redis://127.0.0.1:{server.port}")
        assert rig.put(1) == rig.get(1)
        closing(rig, server)
        wrong = RedisTierOptions(f"redis://127.0.0.1:{server.port}", password="guess")
        assert "guess" not in repr(wrong)
        store = RedisTier("redis", wrong)
        with pytest.raises(TierUnavailable, match="password"):
            store.probe()
        store.close()
    finally:
        server.kill()


def test_nobody_listens(take_ports: Callable[[int], list[int]]) -> None:
    store = RedisTier("redis", RedisTierOptions(f"redis://127.0.0.1:{take_ports(1)[0]}", timeout_s=2.0))
    found = outcome(store.probe)
    assert isinstance(found.error, TierUnavailable | TierTimeout)
    assert found.took_s < 1.0, "it is not tried again and again"
    store.close()


def test_a_url_that_is_none() -> None:
    with pytest.raises(ConfigError, match="URL"):
        RedisTier("redis", RedisTierOptions("http://127.0.0.1"))


def test_many_keys_at_once(rig: Rig) -> None:
    rig.put(7, 4 * KIB)
    keys = [key_of(number) for number in range(2500)]
    assert [number for number, found in enumerate(rig.store.contains(keys)) if found] == [7]
    rig.store.remove(keys)
    assert rig.store.contains([key_of(7)]) == [False]
