"""The connector's options."""

from __future__ import annotations

import dataclasses

import pytest

from antiphon.connector.settings import KNOWN, ConnectorSettings, read_settings
from antiphon.core.errors import ConfigError


def test_nothing_given_is_the_server_next_door() -> None:
    assert read_settings({}) == (ConnectorSettings(), ())
    settings = ConnectorSettings()
    assert (settings.host, settings.port, settings.chunk_size_tokens) == ("127.0.0.1", 6555, 256)


def test_every_option_is_read() -> None:
    extra = {
        "antiphon.host": "tcp://cache.local/",
        "antiphon.port": "7000",
        "antiphon.chunk_size": 512,
        "antiphon.weights_revision": " r1 ",
        "antiphon.engine_name": "prefill-0",
        "antiphon.lookup_timeout_ms": 20,
        "antiphon.onboard_max_ms": 900,
        "antiphon.load": False,
        "antiphon.store": "false",
        "antiphon.store_queue_max": 8,
    }
    assert set(extra) == set(KNOWN)
    settings, notices = read_settings(extra)
    assert notices == ()
    assert dataclasses.astuple(settings) == ("cache.local", 7000, 512, "r1", "prefill-0", 20, 900, False, False, 8)


@pytest.mark.parametrize(
    ("given", "host"),
    [("10.0.0.1", "10.0.0.1"), ("tcp://10.0.0.1", "10.0.0.1"), ("tcp://[::1]", "::1"), ("::1", "::1")],
)
def test_a_host_comes_with_or_without_its_scheme(given: str, host: str) -> None:
    assert read_settings({"antiphon.host": given})[0].host == host


def test_nested_keys_are_those_of_the_dotted_command_line() -> None:
    settings, notices = read_settings({"antiphon": {"port": 7001}, "lmcache": {"mp": {"host": "tcp://h"}}})
    assert (settings.host, settings.port) == ("h", 7001)
    assert notices == ("lmcache.mp.host is read as antiphon.host",)


def test_lmcache_keys_are_aliases() -> None:
    settings, notices = read_settings({"lmcache.mp.host": "tcp://127.0.0.2", "lmcache.mp.port": 6556})
    assert (settings.host, settings.port) == ("127.0.0.2", 6556)
    assert notices == ("lmcache.mp.host is read as antiphon.host", "lmcache.mp.port is read as antiphon.port")


@pytest.mark.parametrize("is_ours_first", [True, False])
def test_ours_win_over_aliases(is_ours_first: bool) -> None:
    pairs = [("antiphon.port", 1), ("lmcache.mp.port", 2)]
    settings, notices = read_settings(dict(pairs if is_ours_first else reversed(pairs)))
    assert settings.port == 1
    assert notices == ("lmcache.mp.port is ignored: antiphon.port is given too",)


def test_keys_of_others_are_ignored_one_notice_each() -> None:
    settings, notices = read_settings({"lmcache.mp.mq_timeout": 3, "lmcache.local_cpu": True, "other": {"a": 1}})
    assert settings == ConnectorSettings()
    assert [notice.split()[0] for notice in notices] == ["lmcache.mp.mq_timeout", "lmcache.local_cpu", "other"]


def test_an_unknown_key_of_ours_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean antiphon\.store_queue_max\?") as caught:
        read_settings({"antiphon.store_queue_mx": 3})
    assert caught.value.field == "antiphon.store_queue_mx"
    with pytest.raises(ConfigError, match=r"antiphon\.weights_revision"):
        read_settings({"antiphon": 3})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("antiphon.port", value) for value in (0, 65536, "http", True, 1.5, None, -1)),
        *(("antiphon.host", value) for value in ("", "h:6555", "tcp://h:6555", "http://h", "a b", 3)),
        *(("antiphon.store", value) for value in ("yes", 1, None)),
        *(("antiphon.lookup_timeout_ms", value) for value in (0, 10_001)),
        *(("antiphon.store_queue_max", value) for value in (0, 65_537)),
        *(("antiphon.chunk_size", value) for value in (0, "many")),
        *(("antiphon.weights_revision", value) for value in ("", 7)),
    ],
)
def test_a_wrong_value_is_refused_with_its_field_and_a_remedy(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({key: value})
    assert caught.value.field == key
    assert caught.value.remedy
