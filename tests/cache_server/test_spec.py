"""The command line of a cache server as values. In scope: ``config.cache_server_spec``. Out of scope: click."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from antiphon.config.cache_server_spec import CacheServerSpec, default_runtime_dir
from antiphon.core.tenants import tenant_of


def test_a_gb_is_a_billion_bytes() -> None:
    spec = CacheServerSpec(l1_size_gb=2.147483648, default_quota_gb=0.5)
    assert spec.l1_size_bytes == 2 << 30, "a size in GiB can be said exactly"
    assert spec.default_quota_bytes == 500_000_000
    assert CacheServerSpec(l1_size_gb=1).default_quota_bytes is None


def test_policies_may_be_in_capitals() -> None:
    assert CacheServerSpec(l1_size_gb=1, eviction_policy="LRU").eviction_policy == "lru"
    with pytest.raises(ValidationError):
        CacheServerSpec.model_validate({"l1_size_gb": 1, "eviction_policy": "fifo"})


def test_quotas_by_tenant() -> None:
    spec = CacheServerSpec(l1_size_gb=1, quota=["a=0.5", "b=c=2", "default=3", "team 1=4"])
    assert spec.quota_bytes == {
        "a": 500_000_000,
        tenant_of("b=c"): 2_000_000_000,
        tenant_of(""): 3_000_000_000,
        tenant_of("team 1"): 4_000_000_000,
    }


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("quota", ["a"], "write TENANT=GB"),
        ("quota", ["=1"], "write TENANT=GB"),
        ("quota", ["a=-1"], "write TENANT=GB"),
        ("quota", ["a=nan"], "write TENANT=GB"),
        ("quota", ["a=1", "a=2"], "a has two quotas"),
        ("quota", ["b c=1", f"{tenant_of('b c')}=2"], "has two quotas"),
        ("host", "0.0.0.0", "not a loopback address"),
        ("http_host", "10.0.0.1", "not a loopback address"),
        ("instance_id", "../up", "pattern"),
        ("instance_id", "x" * 49, "48"),
        ("l1_size_gb", 0, "0.001"),
        ("chunk_size", 0, "1"),
    ],
)
def test_what_cannot_work_is_refused(field: str, value: object, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        CacheServerSpec.model_validate({"l1_size_gb": 1} | {field: value})


def test_the_size_must_be_said() -> None:
    with pytest.raises(ValidationError, match="l1_size_gb"):
        CacheServerSpec.model_validate({})


def test_the_runtime_folder_belongs_to_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_runtime_dir() == f"{tmp_path}/antiphon"
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert default_runtime_dir().startswith("/tmp/antiphon-")
