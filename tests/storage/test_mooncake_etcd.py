"""A Mooncake store whose etcd fails: what goes on, what waits, and when it is as before.

Goal: what is in a store can be read and written without its etcd, by a client that has met the other nodes; one that
starts meanwhile is out of service, by the deadline of each call, and comes back by itself. Method: a real etcd, with
and without users and TLS, killed and hung after the memory of the store is given.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from antiphon.config.tier_spec import TierSpec
from antiphon.core.errors import TierTimeout, TierUnavailable
from antiphon.core.units import MIB
from antiphon.storage.etcd_metadata import EtcdAccess
from antiphon.storage.mooncake_tier import MooncakeTier
from antiphon.storage.plain_calls import MooncakePlain
from tests.storage.conftest import MooncakeStore
from tests.storage.secured_etcd import PASSWORD, SecuredEtcd
from tests.storage.servers import Etcd
from tests.storage.test_mooncake_tier import make_rig, options_of
from tests.storage.tier_kit import SLACK_S, TIMEOUT_S, Rig, outcome, recovers

pytestmark = pytest.mark.process


@pytest.fixture(scope="module", params=["etcd", "secured"])
def mooncake(request: pytest.FixtureRequest, start_mooncake: Callable[[str], MooncakeStore]) -> MooncakeStore:
    return start_mooncake(request.param)


@pytest.fixture
def etcd(mooncake: MooncakeStore) -> Iterator[Etcd]:
    assert mooncake.etcd is not None
    yield mooncake.etcd
    mooncake.etcd.restore()


@pytest.fixture
def rig(mooncake: MooncakeStore) -> Iterator[Rig]:
    made = make_rig(options_of(mooncake.master.address, mooncake.metadata))
    yield made
    made.store.close()


FAULTS = {"killed": Etcd.kill, "hung": Etcd.hang}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_client_that_has_met_the_others_goes_on(rig: Rig, etcd: Etcd, fault: str) -> None:
    payload = rig.put(1, MIB)
    assert rig.get(1, MIB) == payload
    FAULTS[fault](etcd)
    for number in (2, 3):
        assert rig.put(number, MIB) == rig.get(number, MIB)
    assert rig.get(1, MIB) == payload
    rig.store.probe()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_client_that_starts_meanwhile_is_out_of_service(
    rig: Rig, mooncake: MooncakeStore, etcd: Etcd, fault: str
) -> None:
    payload = rig.put(1)
    FAULTS[fault](etcd)
    late = Rig(
        MooncakeTier("late", options_of(mooncake.master.address, mooncake.metadata)),
        bytes,
        lambda key, record: None,
        lambda: late.store,
    )
    try:
        calls: list[Callable[[], object]] = [lambda: late.put(2), lambda: late.get(1), late.store.probe]
        for call in calls:
            found = outcome(call)
            assert isinstance(found.error, TierUnavailable | TierTimeout), found
            assert found.took_s < TIMEOUT_S + SLACK_S
        etcd.restore()
        assert recovers(late) < 7.0
        assert late.get(1) == payload
    finally:
        late.store.close()


def test_the_plain_calls_of_a_bench_reach_the_same_store(mooncake: MooncakeStore) -> None:
    access, etcd = mooncake.metadata, mooncake.etcd
    options = {"metadata": access}
    if isinstance(access, EtcdAccess):
        assert isinstance(etcd, SecuredEtcd)
        options = {"metadata": f"etcds://{access.endpoints[0]}", "metadata_user": access.user}
        options |= {"metadata_password_file": str(etcd.password_file), "metadata_ca_file": access.ca_file}
        options |= {"metadata_cert_file": access.cert_file, "metadata_key_file": access.key_file}
    spec = TierSpec.model_validate({"url": f"mooncake://{mooncake.master.address}", **options})
    with contextlib.closing(MooncakePlain(spec, 2, MIB, 1)) as plain:
        assert min(*plain.round(), *plain.round()) > 0


def test_what_the_child_is_told_is_in_no_argument(rig: Rig, mooncake: MooncakeStore) -> None:
    """Everybody may read the arguments of a process."""
    store = rig.store
    assert isinstance(store, MooncakeTier)
    assert store._child is not None
    arguments = Path(f"/proc/{store._child.process.pid}/cmdline").read_bytes()
    assert b"mooncake_child" in arguments
    if isinstance(mooncake.metadata, EtcdAccess):
        assert store._etcd is not None
        assert store._etcd.url.encode() not in arguments
        assert PASSWORD.encode() not in arguments + json.dumps(repr(store._options)).encode()
