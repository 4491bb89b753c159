"""The endpoint registry against a plain model, and the properties that callers lean on."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from antiphon.routing.registry import FAILED_PROBES_MAX, Endpoint, EndpointRegistry, EndpointState, Role

PREFILL = ["http://10.0.0.1:8001", "http://10.0.0.2:8001", "http://10.0.0.3:8001"]
DECODE = ["http://10.0.0.1:8101", "http://10.0.0.2:8101"]
ROLES = st.sampled_from(["prefill", "decode"])


def registry_of(num_prefill: int = 2, num_decode: int = 2) -> EndpointRegistry:
    return EndpointRegistry(PREFILL[:num_prefill], DECODE[:num_decode])


class RegistryMachine(RuleBasedStateMachine):
    """The model: which URLs are down, failed probes in a row and requests in flight by URL, the last pick of a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = registry_of(3, 2)
        self.down: set[str] = set()
        self.failed: Counter[str] = Counter()
        self.active: Counter[str] = Counter()
        self.last: dict[str, int] = {"prefill": -1, "decode": -1}

    def endpoint(self, role: Role, number: int) -> Endpoint:
        pool = self.registry.pools[role]
        return pool[number % len(pool)]

    @rule(role=ROLES, avoided=st.sets(st.integers(0, 2)))
    def pick(self, role: Role, avoided: set[int]) -> None:
        pool = self.registry.pools[role]
        avoid = frozenset(pool[number] for number in avoided if number < len(pool))
        allowed = [endpoint for endpoint in pool if endpoint.url not in self.down and endpoint not in avoid]
        picked = self.registry.pick(role, avoid)
        if not allowed:
            assert picked is None
            return
        after = [(self.last[role] + 1 + step) % len(pool) for step in range(len(pool))]
        expected = next(index for index in after if pool[index] in allowed)
        assert picked is pool[expected]
        self.last[role] = expected

    @rule(role=ROLES, number=st.integers(0, 2))
    def acquire(self, role: Role, number: int) -> None:
        endpoint = self.endpoint(role, number)
        self.registry.acquire(endpoint)
        self.active[endpoint.url] += 1

    @precondition(lambda self: self.active.total() > 0)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        url = data.draw(st.sampled_from(sorted(url for url, num in self.active.items() if num)))
        (endpoint,) = [endpoint for endpoint in self.registry.all() if endpoint.url == url]
        self.registry.release(endpoint)
        self.active[url] -= 1

    @rule(role=ROLES, number=st.integers(0, 2))
    def refuse(self, role: Role, number: int) -> None:
        endpoint = self.endpoint(role, number)
        self.registry.connection_refused(endpoint)
        self.down.add(endpoint.url)

    @rule(role=ROLES, number=st.integers(0, 2))
    def answer_probe(self, role: Role, number: int) -> None:
        endpoint = self.endpoint(role, number)
        self.registry.probe_succeeded(endpoint)
        self.down.discard(endpoint.url)
        self.failed[endpoint.url] = 0

    @rule(role=ROLES, number=st.integers(0, 2))
    def fail_probe(self, role: Role, number: int) -> None:
        endpoint = self.endpoint(role, number)
        self.registry.probe_failed(endpoint)
        self.failed[endpoint.url] += 1
        if self.failed[endpoint.url] >= FAILED_PROBES_MAX:
            self.down.add(endpoint.url)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.registry.validate()
        for role, pool in self.registry.pools.items():
            assert self.registry.num_usable(role) == sum(endpoint.url not in self.down for endpoint in pool)
        for endpoint in self.registry.all():
            assert endpoint.is_usable == (endpoint.url not in self.down)
            assert endpoint.num_active == self.active[endpoint.url]


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_prefill_and_decode_are_picked_independently() -> None:
    """Counters in step would only ever give the pairs (P1, D1) and (P2, D2)."""
    registry = registry_of()
    pairs: Counter[tuple[str, str]] = Counter()
    for number in range(60):
        prefill = registry.pick("prefill")
        if number % 3 == 0:
            registry.pick("decode")  # a request that takes the local path
        decode = registry.pick("decode")
        assert prefill is not None
        assert decode is not None
        pairs[prefill.url, decode.url] += 1
    assert len(pairs) == 4
    assert min(pairs.values()) >= 10


def test_an_endpoint_that_is_down_is_not_picked_until_a_probe_succeeds() -> None:
    registry = registry_of()
    first = registry.pools["decode"][0]
    registry.connection_refused(first)
    assert {registry.pick("decode") for _ in range(10)} == {registry.pools["decode"][1]}
    registry.probe_failed(first)
    assert first not in {registry.pick("decode") for _ in range(4)}
    registry.probe_succeeded(first)
    assert {registry.pick("decode") for _ in range(4)} == set(registry.pools["decode"])
    assert first.state is EndpointState.READY


def test_a_busy_engine_is_down_only_after_several_failed_probes_in_a_row() -> None:
    registry = registry_of()
    endpoint = registry.pools["prefill"][0]
    for _ in range(FAILED_PROBES_MAX - 1):
        registry.probe_failed(endpoint)
    registry.probe_succeeded(endpoint)
    for _ in range(FAILED_PROBES_MAX - 1):
        registry.probe_failed(endpoint)
    assert endpoint.is_usable
    registry.probe_failed(endpoint)
    assert not endpoint.is_usable


def test_an_endpoint_that_was_never_probed_is_usable() -> None:
    registry = registry_of()
    assert {endpoint.state for endpoint in registry.all()} == {EndpointState.UNKNOWN}
    assert registry.pick("prefill") is registry.pools["prefill"][0]


def test_an_empty_pool_gives_nothing() -> None:
    assert registry_of(0, 1).pick("prefill") is None


def test_a_release_too_many_is_a_bug() -> None:
    registry = registry_of()
    endpoint = registry.pools["prefill"][0]
    registry.acquire(endpoint)
    registry.release(endpoint)
    with pytest.raises(AssertionError, match="released more often"):
        registry.release(endpoint)


def test_address_is_the_url_without_its_scheme() -> None:
    assert [endpoint.address for endpoint in registry_of(1, 1).all()] == ["10.0.0.1:8001", "10.0.0.1:8101"]
