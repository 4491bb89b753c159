"""Where each engine runs and with what: ports, devices, and the defaults that depend on the device.

Pure: the machine is an argument. The machine that compiles the spec stands for the others, whose cores cannot be seen.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

from antiphon.config.cuda import num_cuda_devices
from antiphon.config.hosts import is_loopback
from antiphon.config.kv_events import hears_kv_events
from antiphon.config.problems import Notice
from antiphon.config.router_spec import RouterSpec
from antiphon.config.spec import POOLS, Pool, PoolSpec, Spec
from antiphon.config.units import format_bytes
from antiphon.core.memory import available_memory_bytes

CPU_KV_MEMORY_BYTES = 400_000_000
"""Enough for 4096 tokens of a small model in float32 several times over; registering 1 GB with NIXL takes seconds."""
CPU_BLOCK_SIZE_TOKENS, CUDA_BLOCK_SIZE_TOKENS = 128, 16
"""What vLLM chooses when it is not told."""
PROCESS_BYTES_PER_ENGINE = 10**9
"""Three Python processes with torch loaded, private memory, measured without weights and KV."""


@dataclass(frozen=True)
class Machine:
    """What the defaults depend on."""

    cores: int
    """CPU cores that this process may use."""
    has_cuda: bool
    """Whether an NVIDIA GPU is present."""
    mem_available_bytes: int | None = None
    """Memory that can be had without swapping; None: not known, taken for plenty."""


@dataclass(frozen=True)
class Engine:
    """One engine of a pool, every default filled in."""

    pool: Pool
    index: int
    spec: PoolSpec
    host: str
    bind: str
    port: int
    side_channel_port: int
    kv_replay_port: int | None
    """Where its first rank repeats KV events; None: nowhere, because nobody hears them or its address is IPv6, which
    vLLM's publisher does not bind."""
    device: Literal["cpu", "cuda"]
    kv_memory_bytes: int | None
    """None: what ``gpu_memory_utilization`` leaves."""
    enforce_eager: bool
    threads: int
    """OpenMP threads; for CPU only."""
    nixl_progress_thread: bool
    """Whether NIXL polls on a thread of its own."""
    spin_wait: bool
    """Whether vLLM's processes wait for each other in a loop that yields."""
    devices: tuple[str, ...]
    """CUDA device ids; empty: as CUDA counts them."""

    @property
    def block_size_tokens(self) -> int:
        """Tokens in a KV block, vLLM's own default filled in."""
        return self.spec.block_size_tokens or (
            CPU_BLOCK_SIZE_TOKENS if self.device == "cpu" else CUDA_BLOCK_SIZE_TOKENS
        )

    @property
    def num_ranks(self) -> int:
        """Its data-parallel ranks, each of which has KV blocks of its own."""
        size = self.spec.args.get("data-parallel-size")
        return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 1

    @property
    def name(self) -> str:
        """``prefill-0``."""
        return f"{self.pool}-{self.index}"


def this_machine() -> Machine:
    """The machine that this process runs on."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        has_cuda=num_cuda_devices() > 0,
        mem_available_bytes=available_memory_bytes(),
    )


def device_of(pool: PoolSpec, machine: Machine) -> Literal["cpu", "cuda"]:
    """The device of ``pool``, with ``auto`` decided."""
    if pool.device != "auto":
        return pool.device
    return "cuda" if machine.has_cuda else "cpu"


def handing_over(spec: Spec) -> RouterSpec:
    """The router's knobs with what the way of handing over implies, which engines go by as well."""
    update: dict[str, Any] = {"handoff": spec.handoff.kind}
    if spec.handoff.kind == "cache" and "local_max_tokens" not in spec.router.model_fields_set:
        update["local_max_tokens"] = spec.cache.chunk_size_tokens - 1
    return spec.router.model_copy(update=update)


def place_engines(spec: Spec, machine: Machine) -> list[Engine]:
    """Every engine of the deployment, prefill first, in the order of their indices."""
    is_heard = hears_kv_events(handing_over(spec))
    per_host = Counter(_host(spec.pool(pool), index) for pool in POOLS for index in range(spec.pool(pool).replicas))
    engines = []
    for pool in POOLS:
        section = spec.pool(pool)
        device = device_of(section, machine)
        on_host: Counter[str] = Counter()
        for index in range(section.replicas):
            host = _host(section, index)
            on_cpu = device == "cpu"
            first = index * section.tensor_parallel_size
            engine = Engine(
                pool=pool,
                index=index,
                spec=section,
                host=host,
                bind=section.bind or _bind(host),
                port=section.port + on_host[host],
                side_channel_port=section.side_channel_port + on_host[host],
                device=device,
                kv_memory_bytes=section.kv_memory_bytes or (CPU_KV_MEMORY_BYTES if on_cpu else None),
                enforce_eager=section.enforce_eager if section.enforce_eager is not None else on_cpu,
                threads=section.threads or max(1, machine.cores // per_host[host]),
                nixl_progress_thread=_unless_cpu(section.nixl_progress_thread, on_cpu),
                spin_wait=_unless_cpu(section.spin_wait, on_cpu),
                devices=tuple(str(device) for device in section.devices[first : first + section.tensor_parallel_size]),
                kv_replay_port=None,
            )
            if is_heard and ":" not in engine.host + engine.bind:
                port = section.kv_replay_port + on_host[host] * engine.num_ranks
                engine = replace(engine, kv_replay_port=port)
            engines.append(engine)
            on_host[host] += 1
    return engines


def default_notices(spec: Spec, engines: list[Engine]) -> list[Notice]:
    """What was filled in for vLLM on CPU, which differs from vLLM's own defaults."""
    notices: dict[Notice, None] = {}
    for engine in engines:
        pool = engine.spec
        if pool.kind != "vllm":
            continue
        if pool.device == "auto":
            notices[Notice("engine.device", f"auto is {engine.device} on this host")] = None
        if engine.device != "cpu":
            continue
        if pool.kv_memory_bytes is None:
            size = format_bytes(CPU_KV_MEMORY_BYTES)
            notices[Notice("engine.kv_memory_bytes", f"{size} of KV cache for each engine on CPU")] = None
        if pool.enforce_eager is None:
            notices[Notice("engine.enforce_eager", "true on CPU, where compiling takes minutes")] = None
        if pool.threads is None:
            text = f"{engine.threads} for each engine on {engine.host}: its cores shared by the engines there"
            notices[Notice("engine.threads", text)] = None
    return list(notices)


def _host(pool: PoolSpec, index: int) -> str:
    return pool.hosts[index % len(pool.hosts)]


def _unless_cpu(value: bool | None, on_cpu: bool) -> bool:
    return value if value is not None else not on_cpu


def _bind(host: str) -> str:
    """Loopback stays private; otherwise peers must reach it, and its own name may be another address inside."""
    return host if is_loopback(host) else "0.0.0.0"
