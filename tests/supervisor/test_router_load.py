"""What `antiphon status` shows of the requests that wait in a router."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from antiphon.cli.status import table_lines
from antiphon.router.insight import Insight
from antiphon.routing.admission import ColdAdmission
from antiphon.routing.cold import AdmissionOptions, ColdItem, Wait
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.tenants import TenantOptions, Tenants
from antiphon.supervisor.report import DeploymentReport, ProcessRow, with_load
from antiphon.supervisor.router_load import ColdQueue, RoutedEngine, RouterLoad, TenantLoad, ask_router, load_of
from tests.router.scripted import engine, routing, streams


def row(**changes: Any) -> ProcessRow:
    values: dict[str, Any] = {"name": "router", "role": "router", "kind": "router", "state": "ready", "pid": 1}
    values |= {"port": 30000, "base_url": "http://127.0.0.1:30000", "uptime_s": 1.0, "restarts": 0}
    return ProcessRow(**(values | {"last_exit": None, "log_path": "/l"} | changes))


def lines(load: RouterLoad | None) -> list[str]:
    """What stands below the table."""
    return table_lines(DeploymentReport("demo", 7, True, False, (row(waiting=load),)))[3:]


def test_what_a_router_shows_is_read() -> None:
    """The shape is that of the router itself."""
    now_s = 10.0
    cold = ColdAdmission(AdmissionOptions(kv_bytes_per_token=1000, warm_bytes=1000))
    prefill, decode = Endpoint("prefill", "http://p:1"), Endpoint("decode", "http://d:1")
    cold.set_prefills([prefill])
    cold.set_decodes([decode])
    first, second = ColdItem(50, 50), ColdItem(60, 60)
    cold.offer(first, now_s)
    cold.prefill_chosen(first, prefill, now_s)
    assert isinstance(cold.offer(second, now_s + 1), Wait)
    cold.prefill_answered(first, decode, now_s + 2, 50)
    tenants = Tenants([TenantOptions("a"), TenantOptions("b")], 1, 10.0)
    for name in ("a", "b"):
        tenants.offer(object(), name, 5, now_s)
    status = Insight(cold, tenants, None, lambda: now_s + 3).sections()
    assert load_of(status) == RouterLoad(
        ColdQueue(num_waiting=1, waiting_bytes=60_000, oldest_wait_s=2.0, num_held=0, in_flight_bytes=50_000),
        (TenantLoad("a", 1, 0), TenantLoad("b", 0, 1)),
    )
    assert load_of(Insight(None, None, None, lambda: now_s).sections()) == RouterLoad(None, ())


@pytest.mark.parametrize(
    "status",
    [{}, [], None, {"cold_admission": None, "tenants": None}, {"cold_admission": {"is_on": True}, "tenants": []}]
    + [
        {"cold_admission": {"is_on": False}, "tenants": [each]} for each in (1, {}, {"name": "a", "num_in_flight": "x"})
    ],
)
def test_what_is_of_another_form_is_not_told(status: Any) -> None:
    assert load_of(status) is None


def test_lines() -> None:
    assert lines(None) == lines(RouterLoad(None, ())) == []
    idle = ColdQueue(0, 0, 0.0, 0, 0)
    assert lines(RouterLoad(idle, ())) == ["cold prompts: 0 waiting, 0 bytes of KV in flight"]
    busy = ColdQueue(3, 12_000_000_000, 75.0, 2, 4_500_000_000)
    tenants = tuple(TenantLoad(f"t{number}", 10 - number, number % 2) for number in range(10))
    assert lines(RouterLoad(busy, tenants[:2])) == [
        "cold prompts: 3 waiting (12 GB, the oldest for 1m15s), 2 held after their prefill, 4.5 GB of KV in flight",
        "tenants: t1 9 in flight, 1 waiting; t0 10 in flight, 0 waiting",
    ]
    (shown,) = lines(RouterLoad(None, tenants))
    assert shown.startswith("tenants: t1 9 in flight, 1 waiting; t3 7 in flight, 1 waiting; ")
    assert shown.endswith("; 2 more")


def test_engines_that_are_no_process_of_the_deployment_are_named() -> None:
    engines = tuple(RoutedEngine("decode", f"http://127.0.0.1:{number}", "ready", number) for number in range(20))
    load = RouterLoad(None, (), (RoutedEngine("decode", "http://127.0.0.1:9001", "ready", 1), *engines[:2]))
    own = row(name="decode-0", role="decode", kind="simulated", base_url="http://127.0.0.1:9001")
    shown = table_lines(DeploymentReport("demo", 7, True, False, (own, row(waiting=load))))
    assert shown[4:] == [
        "router has further engines, of other hosts or added at run time:",
        "  decode http://127.0.0.1:0 ready, 0 in flight",
        "  decode http://127.0.0.1:1 ready, 1 in flight",
    ]
    shown = lines(RouterLoad(None, (), engines))
    assert len(shown) == 18
    assert shown[-1] == "  and 4 more: antiphon endpoints list --router http://127.0.0.1:30000"


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "down (unreachable)"),
        ({"cause": None}, "down"),
        ({"is_warming": True}, "warming"),
        ({"is_leaving": True}, "leaving"),
    ],
)
def test_the_state_of_an_engine_is_one_word_and_its_reason(changes: dict[str, Any], state: str) -> None:
    told = {"role": "decode", "url": "http://d:1", "state": "down", "cause": "unreachable", "active_requests": 3}
    told |= {"is_warming": False, "is_leaving": False} | changes
    status = {"cold_admission": {"is_on": False}, "tenants": None, "engines": [told]}
    assert load_of(status) == RouterLoad(None, (), (RoutedEngine("decode", "http://d:1", state, 3),))
    assert load_of(status | {"engines": [1]}) is None


async def test_a_router_is_asked(tmp_path: Any) -> None:
    (tmp_path / "key").write_text("sk-admin")
    async with engine(streams) as d, contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(routing([], [d], kv_bytes_per_token=1))
        closed = await stack.enter_async_context(routing([], [d], admin_key_file=str(tmp_path / "key")))
        urls = [f"http://127.0.0.1:{each.spec.port}" for each in (router, closed)]
        known = (RoutedEngine("decode", d.url, "ready", 0),)
        assert await ask_router(urls[0], timeout_s=5) == RouterLoad(ColdQueue(0, 0, 0.0, 0, 0), (), known)
        assert await ask_router(urls[1], timeout_s=5) is None, "that is for who shows the key"
        rows = tuple(row(base_url=url, state=state) for url, state in zip(urls, ("ready", "failed"), strict=True))
        report = await with_load(DeploymentReport("demo", 7, True, False, rows))
        assert [each.waiting is not None for each in report.processes] == [True, False]
    assert await ask_router(urls[0], timeout_s=5) is None, "nobody listens there any more"
