"""The tier in S3: the contract against a real SeaweedFS; wrong keys, a missing bucket, faults of the server."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
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
from tests.storage.tier_kit import TIMEOUT_S, ListingContract, Rig, ServiceContract, TierContract, key_of, outcome

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


class TestListing(ListingContract):
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


# ---- a service that is far away --------------------------------------------------------------------------------------


class FarService(http.server.ThreadingHTTPServer):
    """It has every object, and answers each question after ``delay_s``; what is asked at once, at once."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, delay_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _FarAnswers)
        self.delay_s = delay_s
        self.num_asked = 0
        self.count_lock = threading.Lock()
        self.is_over = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """Who asked has hung up."""


class _FarAnswers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FarService

    def do_HEAD(self) -> None:
        with self.server.count_lock:
            self.server.num_asked += 1
        self.server.is_over.wait(self.server.delay_s)
        self.send_response(200)
        self.send_header("content-length", "1")
        self.send_header("last-modified", "Tue, 01 Jul 2025 00:00:00 GMT")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Says nothing."""


@contextlib.contextmanager
def far(delay_s: float) -> Iterator[tuple[FarService, S3Tier]]:
    options = S3TierOptions(
        BUCKET, region="us-east-1", access_key_id="a", secret_access_key="b", timeout_s=TIMEOUT_S, num_threads=7
    )
    with FarService(delay_s) as service:
        serving = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.02})
        serving.start()
        store = S3Tier("s3", replace(options, endpoint=f"http://127.0.0.1:{service.server_port}"))
        try:
            yield service, store
        finally:
            store.close()
            service.is_over.set()
            service.shutdown()
            serving.join(5)


def test_a_long_prompt_is_asked_for_within_the_deadline() -> None:
    keys = [key_of(number) for number in range(512)]
    with far(0.03) as (_, store):
        assert store.contains(keys) == [True] * 512


def test_what_is_known_at_the_deadline_is_the_answer() -> None:
    keys = [key_of(number) for number in range(512)]
    with far(0.4) as (service, store):
        began_s = time.monotonic()
        found = store.contains(keys)
        assert time.monotonic() - began_s < TIMEOUT_S
        assert found[0]
        assert 16 <= sum(found) < 512
        num_asked = service.num_asked
        assert outcome(store.probe).error is None
        assert service.num_asked == num_asked + 1, "nobody goes on asking"


def test_a_long_question_delays_no_other_call() -> None:
    keys = [key_of(number) for number in range(512)]
    with far(0.4) as (service, store):
        asking = [threading.Thread(target=store.contains, args=(keys,)) for _ in range(2)]
        for each in asking:
            each.start()
        while service.num_asked < 8:
            asking[0].join(0.01)
        probed = outcome(store.probe)
        for each in asking:
            each.join()
        assert probed.error is None
        assert probed.took_s < TIMEOUT_S / 2


def test_a_question_that_nothing_answers_is_a_failure() -> None:
    with far(60) as (_, store):
        found = outcome(lambda: store.contains([key_of(number) for number in range(512)]))
        assert isinstance(found.error, TierTimeout)
        assert found.took_s < TIMEOUT_S + 0.5
