"""A server whose tier is not there, or starts slowly: what the first probe finds, says and costs.

Real servers in this process over a tier in memory. Out of scope: when the plan probes (tests/cache/test_tier_start.py).
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from antiphon.cache_server import tier_setup
from antiphon.cache_server.tier_setup import tiers_options
from antiphon.config.tier_spec import TierSpec, parse_tier
from antiphon.core.errors import AntiphonError, ConfigError, TierUnavailable
from antiphon.storage.memory_tier import MemoryTier
from antiphon.storage.tier import PagedStore
from tests.cache_server.test_tiers import Served, fill, is_right, keys_of, onboard, serve

pytest.importorskip("xxhash", reason="needs xxhash")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if message.startswith("tier memory: the breaker is ")]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("is_down", "the tier memory is down"), ("is_hung", "the tier memory did not answer within 0.3 s")],
)
async def test_a_tier_that_is_not_there_is_known_and_said_once_before_it_is_needed(
    fault: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "antiphon.cache_server")

    probes: list[MemoryTier] = []
    probe = MemoryTier.probe

    def counted(tier: MemoryTier) -> None:
        probes.append(tier)
        probe(tier)

    monkeypatch.setattr(MemoryTier, "probe", counted)

    async def test(served: Served) -> None:
        await served.until(lambda: served.breaker != "closed", "its first probe has failed")
        await served.until(lambda: len(probes) >= 3, "it is probed again", 10)
        (tier, _) = served.server.tiers()[0]
        assert (tier.reason, tier.num_opened) == (reason, 1)
        (line,) = told(caplog)
        assert "open" in line
        assert reason in line
        setattr(served.tier.faults, fault, False)
        served.tier.wake()
        await served.until(lambda: served.breaker == "closed", "it is there")
        assert len(told(caplog)) == 2

    await serve(tmp_path, monkeypatch, test, **{fault: True})


async def test_a_tier_that_is_there_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "antiphon.cache_server")

    async def test(served: Served) -> None:
        await served.until(lambda: not served.server.tiers()[0][0].num_running, "it is probed and listed")
        assert served.tier.num_calls == 1
        assert served.server.tiers()[0][0].num_opened == 0
        assert told(caplog) == []

    await serve(tmp_path, monkeypatch, test)


async def test_a_store_that_starts_slowly_is_waited_for_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Several of its deadlines pass. Nobody asks it for anything, so its breaker has no reason to open."""
    monkeypatch.setattr(tier_setup, "_START_S", {"memory": 60.0})
    monkeypatch.setattr("antiphon.config.tier_spec.TierSpec.is_shared", property(lambda spec: True))  # it lists nothing
    caplog.set_level(logging.INFO, "antiphon.cache_server")

    async def test(served: Served) -> None:
        await served.until(lambda: served.tier.num_calls >= 4, "it was probed in vain", 20)
        assert served.breaker == "closed"
        served.tier.wake()
        await served.until(lambda: not served.server.tiers()[0][0].num_running, "the first probe has ended")
        keys = keys_of("p", 2)
        await served.call(fill, served.client, "p", keys)
        await served.until(lambda: served.tier.usage().num_chunks == 2, "it is written to at once")
        found, _ = await served.call(onboard, served.client, "p", keys)
        assert is_right(served.client, found, keys)
        await served.call(served.client.release, found)
        assert served.server.tiers()[0][0].num_opened == 0
        assert told(caplog) == []

    await serve(tmp_path, monkeypatch, test, is_hung=True)


async def test_a_request_does_not_wait_longer_for_a_store_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked while it starts: its breaker opens after one deadline, as it did, and closes when it is there."""
    monkeypatch.setattr(tier_setup, "_START_S", {"memory": 60.0})
    monkeypatch.setattr("antiphon.config.tier_spec.TierSpec.is_shared", property(lambda spec: True))

    async def test(served: Served) -> None:
        await served.call(fill, served.client, "p", keys_of("p", 2))
        await served.until(lambda: served.breaker != "closed", "one deadline has passed")
        served.tier.wake()
        took_s = await served.until(lambda: served.breaker == "closed", "it is there")
        assert took_s < 3
        await served.until(lambda: served.tier.usage().num_chunks == 2, "what waited is published")

    await serve(tmp_path, monkeypatch, test, is_hung=True)


async def test_a_server_that_stops_while_its_store_starts_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier_setup, "_START_S", {"memory": 60.0})

    async def test(served: Served) -> None:
        await served.until(lambda: served.tier.num_calls >= 1, "it is probed")

    await serve(tmp_path, monkeypatch, test, is_hung=True)
    assert not [record for record in caplog.records if "does not end" in record.getMessage()]


def test_a_store_that_starts_in_the_background_has_much_patience_and_others_a_little() -> None:
    urls = [
        "disk:///x?capacity_gb=1",
        "redis://h:1/0?timeout_s=3",
        "s3://b/x",
        "mooncake://h:1?timeout_s=3",
    ]
    plan = tiers_options([parse_tier(url) for url in urls], 5.0)
    more_s = {tier.name: (tier.first_probe_s or 0.0) - tier.timeout_s for tier in plan.tiers}
    assert more_s == {"disk": 2.0, "redis": 2.0, "s3": 2.0, "mooncake": 15.0}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("cannot be read", field="password_file"), "password_file: cannot be read"),
        (ConfigError("password_file is empty", field="password_file"), "password_file is empty"),
        (TierUnavailable("it is away"), "it is away"),
    ],
)
def test_what_is_wrong_in_a_tiers_url_is_said_of_the_flag_that_has_it(
    error: AntiphonError, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option of the URL is no flag of the server."""
    opened = MemoryTier("first", 1 << 20)
    closed: list[str] = []
    monkeypatch.setattr(opened, "close", lambda: closed.append("first"))

    def fails_second(spec: TierSpec) -> MemoryTier:
        if spec.kind == "memory":
            return opened
        raise error

    monkeypatch.setattr(tier_setup, "open_tier", fails_second)
    with pytest.raises(ConfigError, match=f"the tier near: {message}") as found:
        tier_setup.open_stores([parse_tier("memory://?capacity_gb=0.1"), parse_tier("redis://127.0.0.1?name=near")])
    assert found.value.field == "l2"
    assert closed == ["first"]


@pytest.mark.parametrize("kind", ["disk", "memory", "redis", "s3", "mooncake"])
def test_what_is_said_to_be_listed_is_what_the_store_of_the_kind_can(kind: str, tmp_path: Path) -> None:
    urls = {"disk": f"disk://{tmp_path}/kv?capacity_gb=0.1", "memory": "memory://?capacity_gb=0.1"}
    urls |= {"redis": "redis://127.0.0.1:1", "s3": "s3://bucket?region=us-east-1", "mooncake": "mooncake://127.0.0.1:1"}
    spec = parse_tier(urls[kind])
    (options,) = tiers_options([spec], 5.0).tiers
    (store,) = tier_setup.open_stores([spec])
    try:
        assert options.can_list == (isinstance(store, PagedStore) or store.keys() is not None)
    finally:
        store.close()
