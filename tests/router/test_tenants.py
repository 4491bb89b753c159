"""Whose request it is, and the salt that its bodies are stamped with, on every route."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.config.tenant_files import TenantSpec, auto_salt, read_tenants
from antiphon.core.errors import RequestRefused
from antiphon.core.tenants import tenant_of
from antiphon.protocol.body import Body, scan
from antiphon.protocol.handoff import decode_body
from antiphon.router.routes import ROUTES
from antiphon.router.tenants import (
    SALTED,
    UNSTAMPED,
    WITHOUT_KV,
    Tenant,
    TenantKeys,
    admission,
    combined_salt,
    tenant_options,
)
from antiphon.routing.tenants import ADMIT, WAIT
from antiphon.transport.http.message import HttpRequest

SPLIT = [path for path, route in ROUTES.items() if route.is_split]
PARAMS = b'{"remote_engine_id":"p"}'


@pytest.fixture
def tenants(tmp_path: Path) -> TenantKeys:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.keys").write_text(f"sk-{name}\nsk-{name}-2\n")
    (tmp_path / "tenants.yaml").write_text(
        """
        tenants:
          - {name: a, api_key_files: [a.keys]}
          - {name: b, api_key_files: [b.keys], may_salt: true}
          - {name: c, api_key_files: [c.keys], cache_salt: none}
        """
    )
    return TenantKeys(read_tenants(str(tmp_path / "tenants.yaml")))


def asked(key: bytes | None) -> HttpRequest:
    return HttpRequest("POST", b"/", "1.1", [] if key is None else [(b"authorization", b"Bearer " + key)])


def found(tenants: TenantKeys, key: bytes) -> Tenant:
    tenant = tenants.find(asked(key))
    assert tenant is not None
    return tenant


def body_of(path: str, raw: bytes) -> Body:
    return scan(raw, ROUTES[path].api.handoff.replaced)


def salts_sent(path: str, tenant: Tenant, raw: bytes) -> list[Any]:
    """The salt in each body that engines get: of the prefill, of the decode, and of a request that only pulls."""
    body = body_of(path, raw)
    fields = tenant.stamp(path, body).fields
    handoff = ROUTES[path].api.handoff
    bodies = (
        body.splice({**handoff.prefill_fields(body), **fields}),
        body.splice({"kv_transfer_params": PARAMS, **fields}),
        body.splice({**handoff.drain_fields(body, PARAMS), **fields}),
        body.splice(fields),
    )
    return [json.loads(b"".join(pieces)).get("cache_salt") for pieces in bodies]


# ---- whose request it is ---------------------------------------------------------------------------------------------


def test_a_key_tells_whose_request_it_is(tenants: TenantKeys) -> None:
    for name in "abc":
        for key in (f"sk-{name}", f"sk-{name}-2"):
            assert found(tenants, key.encode()).name == name
            assert tenants.refusal(asked(key.encode())) is None


@pytest.mark.parametrize(
    ("key", "code"), [(None, "missing_api_key"), (b"sk-d", "invalid_api_key"), (b"sk-", "invalid_api_key")]
)
def test_a_key_that_is_not_known_is_refused(tenants: TenantKeys, key: bytes | None, code: str) -> None:
    assert tenants.find(asked(key)) is None
    refusal = tenants.refusal(asked(key))
    assert refusal is not None
    assert (refusal.status, refusal.code) == (401, code)


# ---- the stamp -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SPLIT)
def test_every_body_that_an_engine_gets_is_stamped(tenants: TenantKeys, path: str) -> None:
    raw = b'{"model":"m","prompt":"the same","sampling_params":{"n":1},"stream":true,"x":1.50}'
    ours, theirs = (salts_sent(path, found(tenants, key), raw) for key in (b"sk-a", b"sk-b"))
    assert set(ours) == {auto_salt("a")}
    assert set(theirs) == {auto_salt("b")}
    assert tenant_of(ours[0]) != tenant_of(theirs[0]), "nor do they share a quota"
    assert set(salts_sent(path, found(tenants, b"sk-c"), raw)) == {None}


def test_without_a_stamp_the_bytes_are_the_clients(tenants: TenantKeys) -> None:
    raw = b'{ "prompt" : "x", "temperature": 0.10 }'
    body = body_of("/v1/completions", raw)
    stamp = found(tenants, b"sk-c").stamp("/v1/completions", body)
    assert stamp is UNSTAMPED
    assert b"".join(body.splice({"kv_transfer_params": PARAMS, **stamp.fields})) == b"".join(decode_body(body, PARAMS))
    assert b"".join(body.splice(stamp.fields)) == raw


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":"x","cache_salt":"theirs"}',
        b'{"cache_salt":null,"prompt":"x","cache_salt":"theirs"}',
        b'{"cache\\u005fsalt":"theirs"}',
        b'{"cache_salt":""}',
        b'{"cache_salt":0}',
        b'{"cache_salt":{"a":[1]}}',
        b'{"cache_salt":false}',
    ],
)
@pytest.mark.parametrize("key", [b"sk-a", b"sk-c"])
def test_a_clients_own_salt_is_refused(tenants: TenantKeys, raw: bytes, key: bytes) -> None:
    tenant = Tenant("c", None) if key == b"sk-c" else found(tenants, key)
    with pytest.raises(RequestRefused, match="set by the router") as refused:
        tenant.stamp("/v1/chat/completions", body_of("/v1/chat/completions", raw))
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "cache_salt_refused", "cache_salt")
    assert "tenant-" not in refused.value.message, "a salt is nobody's business"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":"x","cache_salt":null}',
        b'{"cache_salt":"theirs","prompt":"x","cache_salt":null}',
        b'{"cache\\u005fsalt" : null , "prompt":"x"}',
    ],
)
def test_no_salt_of_a_client_is_left_anywhere(tenants: TenantKeys, raw: bytes) -> None:
    body = body_of("/v1/completions", raw)
    sent = b"".join(body.splice(found(tenants, b"sk-a").stamp("/v1/completions", body).fields))
    assert b"theirs" not in sent
    assert json.loads(sent) == {"prompt": "x", "cache_salt": auto_salt("a")}


def test_a_clients_salt_is_combined_with_the_tenants_where_it_is_allowed(tenants: TenantKeys) -> None:
    tenant = found(tenants, b"sk-b")
    alone = salts_sent("/v1/completions", tenant, b'{"prompt":"x"}')[0]
    (salt,) = set(salts_sent("/v1/completions", tenant, b'{"cache_salt":"mine","prompt":"x"}'))
    assert salt == combined_salt(auto_salt("b"), "mine")
    assert salt.startswith(f"{alone}.")
    assert tenant_of(salt) == salt, "a name at the cache server"
    assert set(salts_sent("/v1/completions", tenant, b'{"cache_salt":"m\\u0069ne","prompt":"x"}')) == {salt}
    assert set(salts_sent("/v1/completions", tenant, b'{"cache_salt":"mine2","prompt":"x"}')) != {salt}
    (half,) = set(salts_sent("/v1/completions", tenant, b'{"cache_salt":"\\ud800"}'))
    assert half.startswith(f"{alone}.")


@given(st.text(min_size=1, max_size=128), st.text(min_size=1, max_size=128))
def test_no_client_reaches_another_tenants_kv(own: str, other: str) -> None:
    salts = [auto_salt("a"), auto_salt("b"), "plain", None]
    made = [combined_salt(salt, text) for salt in salts for text in {own, other, "plain", auto_salt("a")}]
    assert len(set(made)) == len(salts) * len({own, other, "plain", auto_salt("a")})
    assert set(made).isdisjoint(each for each in salts if each is not None)
    assert all(len(salt) <= 128 and not set("@/\\\0") & set(salt) for salt in made), "vLLM takes it"


@pytest.mark.parametrize("value", [b'""', b"1", b"[]", b"{}", b"true", b'"a@b"', b'"a/b"', b'"\\u0000"', b"[NaN]"])
def test_a_salt_that_no_engine_would_take_is_refused(value: bytes) -> None:
    tenant = Tenant("t", "salt", may_salt=True)
    with pytest.raises(RequestRefused, match="cache_salt must be text") as refused:
        tenant.stamp("/v1/completions", body_of("/v1/completions", b'{"cache_salt":%b}' % value))
    assert (refused.value.status, refused.value.code) == (400, "invalid_cache_salt")
    longest = b'{"cache_salt":"%b"}' % (b"x" * 128)
    assert tenant.stamp("/v1/completions", body_of("/v1/completions", longest)).salt.startswith("salt.")
    with pytest.raises(RequestRefused):
        tenant.stamp("/v1/completions", body_of("/v1/completions", longest.replace(b"x", b"xx", 1)))


def test_a_tenant_without_a_salt_that_may_send_one_reaches_no_salt_of_others() -> None:
    tenant = Tenant("t", None, may_salt=True)
    body = body_of("/v1/completions", b'{"cache_salt":"%b"}' % auto_salt("a").encode())
    assert tenant.stamp("/v1/completions", body).salt == combined_salt(None, auto_salt("a"))
    assert combined_salt(None, "x") != combined_salt("none-", "x")


# ---- routes ----------------------------------------------------------------------------------------------------------


def test_what_is_known_of_every_route() -> None:
    assert not SALTED & WITHOUT_KV
    assert ROUTES.keys() >= SALTED | WITHOUT_KV
    assert ROUTES.keys() - SALTED - WITHOUT_KV == {"/v2/embed", "/v1/audio/transcriptions", "/v1/audio/translations"}
    assert set(SPLIT) <= SALTED, "every API that is handed over can be kept apart"
    assert all("cache_salt" in ROUTES[path].api.handoff.replaced for path in SALTED), "it can be spliced"
    assert all(ROUTES[path].is_json for path in SALTED)


@pytest.mark.parametrize("path", ["/v2/embed", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/new"])
def test_a_route_without_a_salt_is_closed_to_who_needs_one(tenants: TenantKeys, path: str) -> None:
    for key in (b"sk-a", b"sk-b"):
        with pytest.raises(RequestRefused, match="closed to this API key") as refused:
            found(tenants, key).stamp(path, Body(b"not JSON", {}))
        assert (refused.value.status, refused.value.code) == (403, "route_not_isolated")
    assert found(tenants, b"sk-c").stamp(path, Body(b"not JSON", {})) is UNSTAMPED


@pytest.mark.parametrize("path", sorted(WITHOUT_KV))
def test_a_route_that_computes_nothing_is_left_alone(tenants: TenantKeys, path: str) -> None:
    assert found(tenants, b"sk-a").stamp(path, body_of(path, b'{"cache_salt":"mine"}')) is UNSTAMPED


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_limits_are_those_of_the_file() -> None:
    given_all = TenantSpec(
        name="t",
        api_key_files=["k"],
        weight=2,
        requests_per_s=2.5,
        burst=7,
        tokens_per_s=9,
        tokens_burst=8,
        concurrent_max=6,
        queue_max=5,
    )
    options = tenant_options(given_all)
    assert (options.name, options.weight, options.requests_per_s, options.burst) == ("t", 2, 2.5, 7)
    assert (options.tokens_per_s, options.tokens_burst) == (9, 8)
    assert (options.concurrent_max, options.queue_max) == (6, 5)
    some = tenant_options(TenantSpec(name="t", api_key_files=["k"], requests_per_s=2.5, tokens_per_s=9))
    assert (some.burst, some.tokens_burst, some.concurrent_max) == (3, 90, None)
    assert tenant_options(TenantSpec(name="t", api_key_files=["k"], requests_per_s=0.1)).burst == 1


def test_admission_has_every_tenant_and_the_bounds_of_all(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("sk-a")
    (tmp_path / "t.yaml").write_text(
        "in_flight_max: 1\nwait_max_s: 2\ntenants:\n- {name: a, api_key_files: [a], queue_max: 1}\n"
    )
    shared = admission(read_tenants(str(tmp_path / "t.yaml")))
    assert [shared.offer(item, "a", 1, 0.0) for item in (1, 2)] == [ADMIT, WAIT]
    ((item, refusal),) = shared.tick(2.0).refused
    assert (item, refusal.status) == (2, 503)
