"""Tenants: a salt that can be a name is the name, and no salt takes a name that is used inside."""

from __future__ import annotations

import pytest

from antiphon.cache.tenants import OVERFLOW_TENANT
from antiphon.cache_server.probe import PROBE_NAME
from antiphon.core.tenants import tenant_named, tenant_of


@pytest.mark.parametrize(
    ("salt", "tenant"),
    [
        (None, "default"),
        ("", "default"),
        ("team-a.b_C9", "team-a.b_C9"),
        ("x" * 64, "x" * 64),
        ("defaults", "defaults"),
    ],
)
def test_a_salt_that_can_be_a_name_is_the_tenant(salt: str | None, tenant: str) -> None:
    assert tenant_of(salt) == tenant
    assert tenant_named(tenant) == tenant


INSIDE = ["default", PROBE_NAME, OVERFLOW_TENANT, "antiphon.x", "salt-", "salt-0123456789abcdef"]


@pytest.mark.parametrize("salt", ["x" * 65, "a b", "ä", "a/b", "a\n", "\ud800", *INSIDE])
def test_another_salt_is_digested(salt: str) -> None:
    tenant = tenant_of(salt)
    assert tenant.startswith("salt-")
    assert len(tenant) == 21
    assert tenant not in {salt, tenant_of(salt + "x")}
    assert tenant_named(tenant) == tenant, "as it is shown it can be written"


def test_a_person_means_requests_without_a_salt_by_default() -> None:
    assert tenant_named("default") == tenant_of("") != tenant_of("default")
    assert tenant_named("team a") == tenant_of("team a")
