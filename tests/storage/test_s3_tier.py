"""The tier in S3: the contract against a real SeaweedFS; wrong keys, a missing bucket, faults of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from antiphon.core.errors import TierFull, TierTimeout, TierUnavailable
from antiphon.core.units import MIB
from antiphon.storage.s3_tier import S3Tier, S3TierOptions
from tests.storage.servers import SeaweedS3
from tests.storage.tier_kit import TIMEOUT_S, Rig, ServiceContract, TierContract, key_of, outcome

pytestmark = pytest.mark.process
BUCKET = SeaweedS3.BUCKET


@pytest.fixture(scope="session")
def options(seaweed: SeaweedS3) -> S3TierOptions:
    seaweed.make_bucket(BUCKET)
    return S3TierOptions(
        BUCKET,
        prefix="antiphon",
        endpoint=seaweed.endpoint,
        region="us-east-1",
        access_key_id=seaweed.ACCESS_KEY,
        secret_access_key=seaweed.SECRET_KEY,
        timeout_s=TIMEOUT_S,
    )


@pytest.fixture
def rig(seaweed: SeaweedS3, options: S3TierOptions) -> Iterator[Rig]:
    plain = S3Store(
        BUCKET,
        prefix="antiphon",
        endpoint=seaweed.endpoint,
        region="us-east-1",
        access_key_id=seaweed.ACCESS_KEY,
        secret_access_key=seaweed.SECRET_KEY,
        client_options={"allow_http": True},
    )

    def name_of(key: bytes) -> str:
        return f"{key.hex()[:2]}/{key.hex()}"

    def set_raw(key: bytes, record: bytes) -> None:
        obstore.put(plain, name_of(key), record)

    def reopen() -> S3Tier:
        made.store.close()
        return S3Tier("s3", options)

    made = Rig(S3Tier("s3", options), lambda key: bytes(obstore.get(plain, name_of(key)).bytes()), set_raw, reopen)
    yield made
    made.store.close()
    for found in obstore.list(plain):
        obstore.delete(plain, [item["path"] for item in found])


@pytest.fixture
def service(seaweed: SeaweedS3) -> SeaweedS3:
    return seaweed


class TestContract(TierContract):
    pass


class TestFaults(ServiceContract):
    pass


def test_wrong_keys_are_said(options: S3TierOptions) -> None:
    wrong = replace(options, secret_access_key="guess-this")
    assert "guess-this" not in repr(wrong)
    store = S3Tier("s3", wrong)
    found = outcome(store.probe)
    assert isinstance(found.error, TierUnavailable)
    assert "credentials_file" in str(found.error)
    assert "guess-this" not in str(found.error)
    store.close()


def test_a_bucket_that_is_somebody_elses(options: S3TierOptions) -> None:
    store = S3Tier("s3", replace(options, bucket="nobody-made-this"))
    rig = Rig(store, bytes, lambda key, record: None, lambda: store)
    found = outcome(lambda: rig.put(1))
    assert isinstance(found.error, TierUnavailable), found
    store.close()


def test_a_store_that_is_full(
    options: S3TierOptions, tmp_path: Path, adopted: set[int], take_ports: Callable[[int], list[int]]
) -> None:
    """This one calls a full disk an internal error; it stays readable."""
    small = SeaweedS3(tmp_path, adopted, take_ports, num_volumes=9)
    small.start()
    store = S3Tier("s3", replace(options, endpoint=small.endpoint))
    try:
        small.make_bucket(BUCKET)
        rig = Rig(store, bytes, lambda key, record: None, lambda: store)
        payload = rig.put(1)
        found = None
        for number in range(1000, 1030):
            found = outcome(lambda number=number: rig.put(number, 16 * MIB))  # type: ignore[misc]
            if found.error is not None:
                break
        assert found is not None
        assert isinstance(found.error, TierFull | TierUnavailable | TierTimeout)
        assert found.took_s < TIMEOUT_S + 0.5
        assert rig.get(1) == payload
    finally:
        store.close()
        small.kill()


def test_nobody_listens(options: S3TierOptions, take_ports: Callable[[int], list[int]]) -> None:
    store = S3Tier("s3", replace(options, endpoint=f"http://127.0.0.1:{take_ports(1)[0]}"))
    found = outcome(store.probe)
    assert isinstance(found.error, TierUnavailable | TierTimeout)
    assert found.took_s < TIMEOUT_S
    store.close()


def test_the_bucket_in_the_host(options: S3TierOptions) -> None:
    store = S3Tier("s3", replace(options, endpoint="http://chunks.invalid:1", is_virtual_hosted=True))
    found = outcome(store.probe)
    assert isinstance(found.error, TierUnavailable | TierTimeout)
    store.close()


def test_many_keys_at_once(rig: Rig) -> None:
    rig.put(7)
    keys = [key_of(number) for number in range(40)]
    assert [number for number, found in enumerate(rig.store.contains(keys)) if found] == [7]
    rig.store.remove(keys)
    assert rig.store.contains([key_of(7)]) == [False]
