"""What vLLM takes out of a request's further arguments and is the router's to say: a client may not."""

from __future__ import annotations

import json

import pytest

from tests.router.apis import ALL, GENERATE, Spoken, prefills, send, send_bytes, streams
from tests.router.scripted import HANDLE, engine, routing

TOPPED = [api for api in ALL if api is not GENERATE]


@pytest.mark.parametrize("api", TOPPED, ids=lambda api: api.path)
@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("kv_transfer_params", HANDLE, "kv_transfer_params"),
        ("kv_transfer_params", "text", "kv_transfer_params"),
        ("kv_cache_report_mode", "full", "kv_cache_report_mode"),
        ("kv_cache_report_mod\\u0065", "full", "kv_cache_report_mode"),
    ],
)
async def test_further_arguments_that_are_the_routers(api: Spoken, key: str, value: object, field: str) -> None:
    async with engine(prefills) as p, engine(streams(api)) as d, routing([p], [d]) as router:
        further = f'{{"a": [1], "{key}": {json.dumps(value)}}}'
        body = f'{json.dumps(api.body)[:-1]}, "vllm_xargs": {{}}, "vllm_xargs": {further}}}'
        reply = await send_bytes(router, api.path, body.encode())
        assert reply.status == 400
        assert f"{field} is set by the router" in reply.body.decode()
        assert p.seen == d.seen == []


@pytest.mark.parametrize("xargs", [{"a": 1, "session_id": "s"}, {}, None, "text", 5, [1], {"a": "kv_transfer_params"}])
async def test_other_further_arguments_are_the_engines_to_judge(xargs: object) -> None:
    api = ALL[0]
    async with engine(prefills) as p, engine(streams(api)) as d, routing([p], [d]) as router:
        assert (await send(router, api, vllm_xargs=xargs)).status == 200
        assert [json.loads(seen.body)["vllm_xargs"] for seen in (*p.seen, *d.seen)] == [xargs, xargs]


async def test_too_many_further_arguments() -> None:
    api = ALL[0]
    async with engine(prefills) as p, engine(streams(api)) as d, routing([p], [d]) as router:
        reply = await send(router, api, vllm_xargs={f"k{number}": 1 for number in range(2000)})
        assert (reply.status, json.loads(reply.body)["error"]["param"]) == (400, "vllm_xargs")
        assert p.seen == d.seen == []


async def test_the_report_mode_of_generate() -> None:
    async with engine(prefills) as p, engine(streams(GENERATE)) as d, routing([p], [d]) as router:
        reply = await send(router, GENERATE, sampling_params={"extra_args": {"kv_cache_report_mode": "full"}})
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["code"]) == (400, "kv_cache_report_mode_refused")
        assert error["param"] == "sampling_params.extra_args.kv_cache_report_mode"
        assert p.seen == d.seen == []
