"""What an engine's log and metrics mean: phases, fatal lines, the lines that explain a failure, the scrape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ConnectFailed, UpstreamGarbage, UpstreamLost, UpstreamTimeout
from antiphon.engine import vllm

API = "(APIServer pid=11) "
CORE = "(EngineCore pid=22) "
WORKER = "(Worker pid=33) "


def header(source: str, level: str = "ERROR", place: str = "core.py:1510") -> str:
    return f"{source}{level} 11-29 20:21:14 [{place}] "


def prefixed(prefix: str, text: str) -> list[str]:
    return [f"{prefix}{line}" for line in text.splitlines()]


# The shape of a start that fails in the worker: each process logs or prints its own traceback, the root first.
WORKER_TRACE = """WorkerProc failed to start.
Traceback (most recent call last):
  File "/x/vllm/v1/executor/multiproc_executor.py", line 901, in worker_main
    worker = WorkerProc(*args, **kwargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/x/vllm/distributed/kv_transfer/nixl/base_worker.py", line 514, in __init__
    raise RuntimeError("NIXL is not available")
RuntimeError: NIXL is not available"""
CORE_TRACE = """EngineCore failed to start.
Traceback (most recent call last):
  File "/x/vllm/v1/engine/core.py", line 1480, in run_engine_core
    engine_core = EngineCoreProc(*args, **kwargs)
  File "/x/vllm/v1/executor/multiproc_executor.py", line 820, in wait_for_ready
    raise e from None
Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace."""
RAW_CORE_TRACE = "Process EngineCore:\n" + CORE_TRACE.split("\n", 1)[1]
API_TRACE = """Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/x/vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"""
FAILED_START = [
    header(API, "INFO", "api_utils.py:286") + "non-default args: {'port': 8001}",
    header(CORE, "INFO", "core.py:133") + "Initializing a V1 LLM engine (v0.32.0) with config: model='/m'",
    header(WORKER, "WARNING", "cpu_worker.py:114") + "libtcmalloc is not found in LD_PRELOAD.",
    *prefixed(header(WORKER, place="multiproc_executor.py:953"), WORKER_TRACE),
    *prefixed(header(CORE), CORE_TRACE),
    *RAW_CORE_TRACE.splitlines(),
    *API_TRACE.splitlines(),
]

REAL_PHASES = [
    (API + "INFO 11-29 20:20:57 [api_utils.py:286] non-default args: {'host': '127.0.0.1'}", "importing libraries"),
    (API + "INFO 11-29 20:21:08 [model.py:733] Resolved architecture: LlamaForCausalLM", "checking the model"),
    (
        CORE + "INFO 11-29 20:21:14 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with",
        "starting the engine core",
    ),
    (WORKER + "INFO 11-29 20:21:22 [cpu_model_runner.py:68] Starting to load model /m...", "loading weights"),
    ("Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]", "loading weights"),
    (WORKER + "INFO 11-29 20:21:23 [default_loader.py:501] Loading weights took 1.66 seconds", "weights loaded"),
    (CORE + "INFO 11-29 20:21:25 [kv_cache_utils.py:2327] CPU KV cache size: 8,576 tokens", "allocating the KV cache"),
    (WORKER + "INFO 11-29 20:21:25 [base_worker.py:515] Initializing NIXL wrapper", "initializing NIXL"),
    (
        WORKER + "INFO 11-29 20:21:36 [base_worker.py:1416] Registering KV_Caches. use_mla: False",
        "registering the KV cache with NIXL",
    ),
    (CORE + "INFO 11-29 20:21:36 [core.py:402] init engine (profile, create kv cache)", "engine core initialized"),
    (API + "INFO 11-29 20:21:39 [entry.py:140] Starting vLLM server on http://x", "starting the HTTP server"),
    ("INFO:     Started server process [2471]", "starting the HTTP server"),
    ("INFO:     Application startup complete.", "HTTP server started"),
    (API + "INFO 11-29 20:21:39 [launcher.py:195] Route: /health, Methods: GET", None),
    (CORE + "INFO 11-29 20:21:14 [ompmultiprocessing.py:185] OpenMP thread binding info: ", None),
    ("", None),
]


@pytest.mark.parametrize(("line", "phase"), REAL_PHASES)
def test_phase_of_real_lines(line: str, phase: str | None) -> None:
    assert vllm.phase_of(line) == phase


def test_line_is_taken_apart() -> None:
    taken = vllm.split_line("\x1b[1;36m(EngineCore pid=7)\x1b[0;0m ERROR 11-29 20:21:14 [core.py:1510] gone\n")
    assert taken == ("EngineCore pid=7", "ERROR 11-29 20:21:14 [core.py:1510]", "ERROR", "gone")
    assert vllm.split_line("plain text") == ("", "", "", "plain text")


@pytest.mark.parametrize(
    ("line", "while_starting", "when_ready"),
    [
        (header(CORE) + "EngineCore failed to start.", True, True),
        (header(CORE) + "EngineCore encountered a fatal error.", True, True),
        (header(WORKER) + "WorkerProc failed to start.", True, True),
        (header(CORE) + "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down", True, True),
        (
            API + "WARNING 11-29 20:21:14 [core_client.py:823] [shutdown] MPClient: engine core exited unexpectedly; x",
            True,
            True,
        ),
        ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", True, True),
        ("RuntimeError: Engine core initialization failed. See root cause above.", True, True),
        ("OSError: [Errno 98] Address already in use", True, False),
        ("ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8001)", True, False),
        # What a client wrote, as vLLM logs it, is not the engine's word.
        (header(API, "INFO") + "prompt: 'EngineCore encountered a fatal error.'", False, False),
        (header(API, "INFO") + "EngineCore encountered a fatal error.", False, False),
        (header(API, "INFO") + "vllm.v1.engine.exceptions.EngineDeadError: x", False, False),
        ("  vllm.v1.engine.exceptions.EngineDeadError: indented", False, False),
        (header(API, "ERROR") + "the client said EngineDeadError", False, False),
    ],
)
def test_fatal_lines(line: str, while_starting: bool, when_ready: bool) -> None:
    assert (vllm.fatal_in(line, is_ready=False) is not None) == while_starting
    assert (vllm.fatal_in(line, is_ready=True) is not None) == when_ready


def test_useful_lines_are_the_workers_exception_not_its_wrappers() -> None:
    assert vllm.last_useful_lines(FAILED_START) == [
        "RuntimeError: NIXL is not available",
        '  at File "/x/vllm/distributed/kv_transfer/nixl/base_worker.py", line 514, in __init__',
    ]


def test_useful_lines_of_interleaved_processes() -> None:
    one = prefixed(header("(Worker_TP0 pid=33) "), WORKER_TRACE)
    two = prefixed(header("(Worker_TP1 pid=34) "), WORKER_TRACE.replace("NIXL is not available", "second"))
    mixed = [line for pair in zip(one, two, strict=True) for line in pair]
    assert vllm.last_useful_lines(mixed)[0] in ("RuntimeError: NIXL is not available", "RuntimeError: second")


def test_useful_lines_without_markers_take_the_last_real_exception() -> None:
    log = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "ValueError: handled earlier", ""]
    log += ["Traceback (most recent call last):", '  File "b.py", line 2, in g', "KeyError: 'model'"]
    assert vllm.last_useful_lines(log) == ["KeyError: 'model'", '  at File "b.py", line 2, in g']


def test_useful_lines_of_a_chain_show_cause_or_both() -> None:
    first = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "OSError: [Errno 28] No space left"]
    last = ["Traceback (most recent call last):", '  File "b.py", line 2, in g', "RuntimeError: cannot make shm"]
    caused = [*first, "", "The above exception was the direct cause of the following exception:", "", *last]
    assert vllm.last_useful_lines(caused) == ["OSError: [Errno 28] No space left", '  at File "a.py", line 1, in f']
    handling = [*first, "", "During handling of the above exception, another exception occurred:", "", *last]
    assert vllm.last_useful_lines(handling) == [
        "OSError: [Errno 28] No space left",
        '  at File "a.py", line 1, in f',
        "RuntimeError: cannot make shm",
        '  at File "b.py", line 2, in g',
    ]


def test_useful_lines_keep_a_message_of_several_lines_and_skip_ignored_ones() -> None:
    log = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, the model type is unknown [type=value_error]",
        "    For further information visit https://errors.example",
        "",
        "Exception ignored in: <function X.__del__ at 0x7f>",
        "Traceback (most recent call last):",
        '  File "z.py", line 9, in __del__',
        "AttributeError: 'NoneType' object has no attribute 'close'",
    ]
    lines = vllm.last_useful_lines(log)
    assert lines[0].endswith("1 validation error for ModelConfig")
    assert lines[1].strip().startswith("Value error")
    assert not any("NoneType" in line for line in lines)


def test_useful_lines_without_a_traceback() -> None:
    usage = ["usage: api_server.py [-h]", "api_server.py: error: unrecognized arguments: --bogus"]
    assert vllm.last_useful_lines(usage) == ["api_server.py: error: unrecognized arguments: --bogus"]
    bind = ["INFO:     Started", "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 1)"]
    assert vllm.last_useful_lines(bind) == ["[Errno 98] error while attempting to bind on address ('127.0.0.1', 1)"]
    assert vllm.last_useful_lines(["one", "", "two"]) == ["one", "two"]
    assert vllm.last_useful_lines([]) == []
    routes = [header(API, "INFO") + "Route: /health, Methods: GET", "real words"]
    assert vllm.last_useful_lines(routes) == ["real words"]


def test_remedies() -> None:
    assert "nixl" in (vllm.remedy_for(["RuntimeError: NIXL is not available"]) or "")
    assert "port" in (vllm.remedy_for(["OSError: [Errno 98] Address already in use"]) or "")
    assert "/dev/shm" in (vllm.remedy_for(["OSError: [Errno 28] No space left on device"]) or "")
    assert vllm.remedy_for(["KeyError: 'x'"]) is None


@given(st.lists(st.one_of(st.text(max_size=80), st.sampled_from(FAILED_START)), max_size=40), st.integers(1, 20))
def test_useful_lines_of_any_log(log: list[str], lines_max: int) -> None:
    lines = vllm.last_useful_lines(log, lines_max=lines_max)
    assert len(lines) <= lines_max
    if any(vllm.split_line(line).text.strip() for line in log):
        assert lines


# --- metrics ---------------------------------------------------------------------------------------------------------

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} 7.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 1.048576e+06
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 0.0
vllm:prompt_tokens_by_source_total{engine="0",source="a } \\"b\\""} 4.0 1700000000000
not a sample
vllm:bad{engine="0"} abc
"""


def test_metrics() -> None:
    metrics = vllm.parse_metrics(METRICS)
    assert (metrics.num_running, metrics.num_waiting, metrics.kv_usage) == (5, 1, 0.375)
    assert (metrics.num_nixl_transfers, metrics.nixl_bytes, metrics.num_nixl_failed) == (7, 1048576, 0)
    assert metrics.num_nixl_expired is None
    assert metrics.get("vllm:num_requests_running", engine="1") == 3.0
    assert metrics.get("vllm:num_requests_running", engine="2") is None
    assert metrics.get("vllm:prompt_tokens_by_source_total", source='a } \\"b\\"') == 4.0
    assert metrics.get("vllm:bad") is None
    assert vllm.parse_metrics("").num_running is None


# --- HTTP ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def answering(answer: bytes, *, is_silent: bool = False) -> AsyncIterator[str]:
    silence = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        if is_silent:
            await silence.wait()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        silence.set()
        server.close()
        await server.wait_closed()


async def get(url: str) -> tuple[int, bytes]:
    return await vllm.http_get(f"{url}/metrics?x=1", timeout_s=5.0)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokIGNORED", (200, b"ok")),
        (b"HTTP/1.1 503 No\r\ncontent-length:0\r\n\r\n", (503, b"")),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", (200, b"until the end")),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nab\r\n3\r\ncde\r\n0\r\n\r\n", (200, b"abcde")),
    ],
)
async def test_http_get(answer: bytes, expected: tuple[int, bytes]) -> None:
    async with answering(answer) as url:
        assert await get(url) == expected


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nshort", UpstreamLost),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nab", UpstreamLost),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nab", UpstreamGarbage),
        (b"SSH-2.0-OpenSSH\r\n\r\n", UpstreamGarbage),
        (b"HTTP/1.1 200 OK\r\n", UpstreamLost),
        (b"", UpstreamLost),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70000 + b"\r\n\r\n", UpstreamGarbage),
    ],
)
async def test_http_get_faults(answer: bytes, error: type[Exception]) -> None:
    async with answering(answer) as url:
        with pytest.raises(error):
            await get(url)
        assert not await vllm.is_ready(url, "/health", timeout_s=5.0)


async def test_silence_and_refusal(free_port: int) -> None:
    async with answering(b"HTTP/1.1 200 OK\r\n", is_silent=True) as url:
        with pytest.raises(UpstreamTimeout, match=r"0\.1 s"):
            await vllm.http_get(url, timeout_s=0.1)
    with pytest.raises(ConnectFailed):
        await vllm.http_get(f"http://127.0.0.1:{free_port}/health", timeout_s=1.0)


async def test_version_and_scrape() -> None:
    body = b'{"version": "0.32.0"}'
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)) as url:
        assert await vllm.fetch_version(url, timeout_s=5.0) == "0.32.0"
        assert await vllm.is_ready(url, "/health", timeout_s=5.0)
    async with answering(b"HTTP/1.1 200 OK\r\n\r\nnot json") as url:
        with pytest.raises(UpstreamGarbage):
            await vllm.fetch_version(url, timeout_s=5.0)
    async with answering(b"HTTP/1.1 404 Not Found\r\n\r\n") as url:
        with pytest.raises(UpstreamGarbage, match="404"):
            await vllm.scrape_metrics(url, timeout_s=5.0)
    async with answering(b"HTTP/1.1 200 OK\r\n\r\n" + METRICS.encode()) as url:
        assert (await vllm.scrape_metrics(url, timeout_s=5.0)).num_running == 5
