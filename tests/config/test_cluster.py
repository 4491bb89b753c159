"""Addresses and the secret of a cluster: what is refused before anything starts, and what is made on loopback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from antiphon.cache_server.peers import wants_peers
from antiphon.config.cache_server_spec import CacheServerSpec
from antiphon.config.cluster import SECRET_FILE, cluster_secret, host_port_of, host_port_text
from antiphon.core.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("http://host:6655", ("host", 6655)),
        ("tcp://host:6655/", ("host", 6655)),
        ("[::1]:7", ("::1", 7)),
    ],
)
def test_addresses_are_read(url: str, expected: tuple[str, int]) -> None:
    assert host_port_of(url) == expected
    assert host_port_of(host_port_text(*expected)) == expected


@pytest.mark.parametrize("url", ["", "host", "host:", ":80", "host:99999", "https://host:1", "http://u@h:1", "a b:1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no address"):
        host_port_of(url)


def test_a_secret_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x" * 32 + "\n")
    assert cluster_secret(str(path), "/nowhere", ["10.0.0.1"]) == b"x" * 32
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="32 are the least"):
        cluster_secret(str(path), "/nowhere", [])


def test_loopback_makes_a_secret_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    secret = cluster_secret(None, str(folder), ["127.0.0.1", "localhost"])
    assert len(secret) == 64
    assert (folder / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == [SECRET_FILE]
    assert cluster_secret(None, str(folder), ["::1"]) == secret
    os.chmod(folder / SECRET_FILE, 0o640)
    with pytest.raises(ConfigError, match="not this user's alone"):
        cluster_secret(None, str(folder), ["::1"])


def test_an_address_that_others_reach_needs_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1 is not a loopback address") as caught:
        cluster_secret(None, str(tmp_path), ["127.0.0.1", "10.0.0.1"])
    assert "--cluster-secret-file" in (caught.value.remedy or "")
    assert not list(tmp_path.iterdir())


def spec(tmp_path: Path, **values: str) -> CacheServerSpec:
    return CacheServerSpec.model_validate({"l1_size_gb": 0.01, "runtime_dir": str(tmp_path)} | values)


def test_sharing_takes_both_addresses(tmp_path: Path) -> None:
    assert not wants_peers(spec(tmp_path))
    assert wants_peers(spec(tmp_path, coordinator_url="127.0.0.1:1", p2p_advertise_url="127.0.0.1:2"))
    for given, missing in (("coordinator_url", "--p2p-advertise-url"), ("p2p_advertise_url", "--coordinator-url")):
        with pytest.raises(ConfigError) as caught:
            wants_peers(spec(tmp_path, **{given: "127.0.0.1:1"}))
        assert missing in (caught.value.remedy or "")
    with pytest.raises(ConfigError, match="nothing is shared"):
        wants_peers(spec(tmp_path, cluster_secret_file="x"))


@pytest.mark.parametrize("field", ["coordinator_url", "p2p_advertise_url", "p2p_host"])
def test_any_address_that_others_reach_needs_a_secret(tmp_path: Path, field: str) -> None:
    values = {"coordinator_url": "127.0.0.1:1", "p2p_advertise_url": "127.0.0.1:2"}
    values[field] = "10.1.2.3:5" if field != "p2p_host" else "0.0.0.0"
    with pytest.raises(ConfigError, match="not a loopback address"):
        wants_peers(spec(tmp_path, **values))
