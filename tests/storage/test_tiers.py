"""A tier from its text to its store, and what is refused; the settings of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.config.tier_spec import TierSpec, parse_tier
from antiphon.core.errors import ConfigError
from antiphon.storage.disk_tier import DiskTier
from antiphon.storage.etcd_metadata import EtcdAccess
from antiphon.storage.memory_tier import MemoryTier
from antiphon.storage.mooncake_tier import MooncakeTier
from antiphon.storage.redis_tier import RedisTier
from antiphon.storage.s3_tier import S3Tier
from antiphon.storage.tiers import faults_of, mooncake_metadata, open_tier, try_tier

GOOD = [
    "disk:///var/kv?capacity_gb=10",
    "disk:///var/k%20v?capacity_gb=0.5&store=back&name=fast&timeout_s=1.5",
    "redis://localhost",
    "redis://127.0.0.1:6379/3?username=kv&password_file=/etc/pw&prefix=mine",
    "rediss://host:6380?ca_file=/etc/ca.pem&password_env=PW",
    "unix:///run/valkey.sock",
    "s3://bucket/deep/prefix?endpoint=http%3A//127.0.0.1%3A9000&region=eu-1&virtual_host=true",
    "s3://bucket?credentials_file=/etc/s3",
    "mooncake://127.0.0.1:50051",
    "mooncake://host:50051?metadata=etcd%3A//10.0.0.1%3A2379&segment_gb=4.0&local_host=10.0.0.2&protocol=rdma",
    "mooncake://host:50051?metadata=etcds%3A//e1%3A2379,e2%3A2379&metadata_user=kv&metadata_password_file=/etc/pw",
    "mooncake://host:1?metadata=etcds%3A//e%3A1&metadata_ca_file=/a&metadata_cert_file=/b&metadata_key_file=/c",
    "memory://?capacity_gb=1",
]


@pytest.mark.parametrize("text", GOOD)
def test_text_and_spec_are_the_same(text: str) -> None:
    spec = parse_tier(text)
    assert parse_tier(spec.text()) == spec
    assert TierSpec.model_validate(text) == spec
    assert "?" not in spec.url


def test_options_may_stand_beside_the_url() -> None:
    beside = TierSpec(url="disk:///var/kv", capacity_gb=10, store="back")
    assert beside == TierSpec.model_validate({"url": "disk:///var/kv?store=back", "capacity_gb": 10})
    assert (beside.tier_name, beside.kind, beside.path, beside.capacity_bytes) == ("disk", "disk", "/var/kv", 10**10)
    assert not beside.is_shared
    assert parse_tier("unix:///s").kind == "redis"
    assert parse_tier("unix:///s").is_shared


BAD = [
    ("", "url"),
    ("ftp://host", "ftp:// is no tier"),
    ("/var/kv", "nothing:// is no tier"),
    ("disk:///var/kv", "needs a capacity"),
    ("disk://var/kv?capacity_gb=1", "absolute path"),
    ("disk:///var/kv?capacity_gb=0", "capacity_gb"),
    ("disk:///var/kv?capacity_gb=1&capacity_gb=2", "given twice"),
    ("disk:///var/kv?capacity_gb=1&endpoint=http://x", "endpoint is no option of disk"),
    ("disk:///var/kv?capacity_gb=1&unknown=2", "unknown"),
    ("redis://host?capacity_gb=1", "capacity_gb is no option of redis"),
    ("redis://", "needs a host"),
    ("redis://host/name", "number of a database"),
    ("redis://host:port", "port is none"),
    ("redis://host?ca_file=/x", "ca_file is no option of redis"),
    ("redis://host?password_file=/x&password_env=Y", "both given"),
    ("redis://host#x", "no #"),
    ("s3://", "needs a bucket"),
    ("s3://host:9000/bucket", "endpoint"),
    ("mooncake://host", "host and port"),
    ("mooncake://host:1?metadata=ftp://x", "metadata"),
    ("mooncake://host:1?metadata=redis://x:6379", "metadata is none"),
    ("mooncake://host:1?metadata=http://", "metadata needs a host"),
    ("mooncake://host:1?metadata=etcd://host", "etcd://host:port"),
    ("mooncake://host:1?metadata=etcd://host:x", "etcd://host:port"),
    ("mooncake://host:1?metadata=etcd://a:1,b", "etcd://host:port"),
    ("mooncake://host:1?metadata=etcd://https://a:1", "etcds://host:port"),
    ("mooncake://host:1?metadata=etcd://kv:hunter2@a:1", "metadata_password_file"),
    ("mooncake://host:1?metadata_user=kv&metadata_password_file=/x", "is for an etcd"),
    ("mooncake://host:1?metadata=http://h/m&metadata_user=kv&metadata_password_file=/x", "is for an etcd"),
    ("mooncake://host:1?metadata=etcd://a:1&metadata_user=kv", "given together"),
    ("mooncake://host:1?metadata=etcds://a:1&metadata_cert_file=/x", "given together"),
    ("mooncake://host:1?metadata=etcd://a:1&metadata_ca_file=/x", "is for TLS"),
    ("redis://host?metadata_user=kv", "metadata_user is no option of redis"),
    ("mooncake://host:1?protocol=ib", "protocol"),
    ("memory://x?capacity_gb=1", "no place"),
    ("disk:///x?store=sometimes&capacity_gb=1", "store"),
    ("disk:///x?capacity_gb=1&name=Not A Name", "name"),
]


@pytest.mark.parametrize(("text", "says"), BAD)
def test_what_cannot_be_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_tier(text)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "s3", "mooncake"])
def test_a_password_in_a_url_is_refused_and_not_shown(scheme: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tier(f"{scheme}://user:hunter2@host:6379")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        parse_tier(f"{scheme}://host:6379?password=hunter2")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match="password_file") as plain:
        TierSpec(url=f"{scheme}://user:hunter2@host:6379")
    assert "hunter2" not in str(plain.value)


def test_a_password_of_etcd_is_refused_and_not_shown() -> None:
    for options in ("metadata=etcd://kv:hunter2@a:1", "metadata=kv:hunter2@a:1", "metadata_password=hunter2"):
        with pytest.raises(ConfigError) as caught:
            parse_tier(f"mooncake://host:1?{options}")
        assert "hunter2" not in str(caught.value)


def test_how_mooncake_reaches_its_etcd(tmp_path: Path) -> None:
    """Its own client does where there is no user and no TLS."""
    plain = parse_tier("mooncake://host:1?metadata=etcd://a:1,b:2/")
    assert (plain.metadata_members, mooncake_metadata(plain)) == ([], "etcd://a:1,b:2")
    assert mooncake_metadata(parse_tier("mooncake://host:1?metadata=http://a:1/metadata")) == "http://a:1/metadata"
    assert mooncake_metadata(parse_tier("mooncake://host:1")) == "P2PHANDSHAKE"
    password = tmp_path / "pw"
    password.write_text("hunter2\n")
    user = f"metadata_user=kv&metadata_password_file={password}"
    access = mooncake_metadata(parse_tier(f"mooncake://host:1?metadata=etcd://a:1,b:2&{user}"))
    assert access == EtcdAccess(["a:1", "b:2"], user="kv", password="hunter2")
    access = mooncake_metadata(parse_tier(f"mooncake://host:1?metadata=etcds://a:1&{user}&metadata_ca_file=/ca"))
    assert access == EtcdAccess(["a:1"], is_tls=True, user="kv", password="hunter2", ca_file="/ca")
    assert mooncake_metadata(parse_tier("mooncake://host:1?metadata=etcds://a:1")) == EtcdAccess(["a:1"], is_tls=True)


@pytest.mark.process
def test_stores_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    password = tmp_path / "pw"
    password.write_text("hunter2\n")
    credentials = tmp_path / "keys"
    credentials.write_text("id\nsecret\n")
    opened = [
        (f"disk://{tmp_path}/kv?capacity_gb=0.1", DiskTier),
        (f"redis://127.0.0.1:1?password_file={password}", RedisTier),
        (f"s3://bucket?endpoint=http://127.0.0.1:1&region=x&credentials_file={credentials}", S3Tier),
        ("mooncake://127.0.0.1:1", MooncakeTier),
        (
            f"mooncake://127.0.0.1:1?metadata=etcds://127.0.0.1:1&metadata_user=kv&metadata_password_file={password}",
            MooncakeTier,
        ),
        ("memory://?capacity_gb=0.1&name=fake", MemoryTier),
    ]
    for text, kind in opened:
        store = open_tier(parse_tier(text))
        assert isinstance(store, kind)
        assert store.name in ("disk", "redis", "s3", "mooncake", "fake")
        assert "hunter2" not in repr(vars(store))
        store.close()
    monkeypatch.setenv("KV_PW", "hunter2")
    assert parse_tier("unix:///s?password_env=KV_PW").read_password() == "hunter2"


def test_secrets_that_cannot_be_read(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("only-an-id\n")
    for text, says in (
        (f"redis://h?password_file={tmp_path}/none", "cannot be read"),
        ("redis://h?password_env=NOBODY_SET_THIS", "not set"),
        (f"s3://b?credentials_file={short}", "has 1 lines"),
        (
            f"mooncake://h:1?metadata=etcd://h:1&metadata_user=kv&metadata_password_file={tmp_path}/none",
            "cannot be read",
        ),
        (f"mooncake://h:1?metadata=etcds://h:1&metadata_ca_file={tmp_path}/none", "metadata_ca_file"),
    ):
        with pytest.raises(ConfigError, match=says):
            open_tier(parse_tier(text))


def test_a_local_host_of_another_machine_is_refused_and_named() -> None:
    text = "mooncake://127.0.0.1:1?local_host=203.0.113.7"
    for call in (open_tier, try_tier):
        with pytest.raises(ConfigError, match=r"local_host '203\.0\.113\.7' is no address of this machine") as caught:
            call(parse_tier(text))
        assert caught.value.field == "local_host"
    ((found, message, remedy),) = faults_of(["mooncake://127.0.0.1:1?name=near&local_host=127.0.0.1", text])
    assert found == text
    assert message.startswith("the tier mooncake: local_host ")
    assert remedy.startswith("write in local_host the address of this machine")


@pytest.mark.parametrize(
    ("text", "package"), [("redis://h", "redis"), ("s3://b", "obstore.store"), ("s3://b", "xxhash")]
)
def test_a_package_that_is_not_installed_is_named(text: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ConfigError, match="pip install"):
        open_tier(parse_tier(text))
