"""The command line and environment of a vLLM engine, the same way for CUDA and CPU builds.

The engine is started by module, not by the ``vllm`` script: the script looks for a distribution called ``vllm``, which
a CPU installation does not have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from antiphon.config.hosts import is_loopback
from antiphon.config.resolve import Engine
from antiphon.config.spec import ArgValue, ModelSpec
from antiphon.config.tracing_spec import TracingSpec

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
OWNED_ARGS = {
    "model": "model.path",
    "served-model-name": "model.served_name",
    "dtype": "model.dtype",
    "max-model-len": "model.max_model_len",
    "load-format": "model.load_format",
    "host": "{pool}.bind",
    "port": "{pool}.port",
    "tensor-parallel-size": "{pool}.tensor_parallel_size",
    "kv-transfer-config": "{pool}.kv_transfer_config",
    "block-size": "engine.block_size_tokens",
    "kv-cache-dtype": "engine.kv_cache_dtype",
    "kv-cache-memory-bytes": "engine.kv_memory_bytes",
    "gpu-memory-utilization": "engine.gpu_memory_utilization",
    "enforce-eager": "engine.enforce_eager",
    "no-enforce-eager": "engine.enforce_eager",
    "max-num-seqs": "engine.max_num_seqs",
    "enable-prompt-tokens-details": "nothing: it is always given",
}
"""vLLM arguments that the spec sets itself, and the field that does; they may not be repeated in ``args``."""
OWNED_ENV = {
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "{pool}.hosts",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "{pool}.side_channel_port",
    "VLLM_CPU_KVCACHE_SPACE": "engine.kv_memory_bytes",
    "OMP_NUM_THREADS": "engine.threads",
    "VLLM_SERVER_DEV_MODE": "engine.dev_mode",
    "ANTIPHON_NIXL_PROGRESS_THREAD": "engine.nixl_progress_thread",
    "ANTIPHON_SPIN_WAIT": "engine.spin_wait",
}
"""Environment variables that the spec sets itself, and the field that does; they may not be repeated in ``env``."""


_NO_TRACING = TracingSpec()
_PROTOCOLS = {"grpc": "grpc", "http": "http/protobuf"}
"""As OpenTelemetry's environment names them."""

API_KEY_ENV = "VLLM_API_KEY"
"""Where vLLM takes the key from that it asks its clients for."""


TRACES_ARG = "otlp-traces-endpoint"
"""With it vLLM sends spans of its own, and tells the connector which trace a request belongs to."""


def engine_argv(
    engine: Engine,
    model: ModelSpec,
    transfer: dict[str, Any],
    kv_events: dict[str, Any] | None = None,
    tracing: TracingSpec = _NO_TRACING,
) -> tuple[str, ...]:
    """The command line of ``engine``.

    Args:
        engine: which.
        model: what it serves.
        transfer: the value of ``--kv-transfer-config``.
        kv_events: that of ``--kv-events-config``; None: nobody hears them.
        tracing: where its spans go; an endpoint in its ``args`` wins.

    ``--enable-prompt-tokens-details`` is always there: without it the usage lacks ``cached_tokens``.
    """
    pool = engine.spec
    argv = [pool.python, "-m", SERVER_MODULE]
    argv += ["--model", model.path, "--served-model-name", model.served]
    argv += ["--host", engine.bind, "--port", str(engine.port), "--dtype", model.dtype]
    optional: list[tuple[str, object]] = [
        ("--max-model-len", model.max_model_len),
        ("--load-format", model.load_format if model.load_format != "auto" else None),
        ("--tensor-parallel-size", pool.tensor_parallel_size if pool.tensor_parallel_size > 1 else None),
        ("--block-size", pool.block_size_tokens),
        ("--kv-cache-dtype", pool.kv_cache_dtype if pool.kv_cache_dtype != "auto" else None),
        ("--max-num-seqs", pool.max_num_seqs),
        ("--kv-cache-memory-bytes", engine.kv_memory_bytes),
        ("--gpu-memory-utilization", pool.gpu_memory_utilization if engine.kv_memory_bytes is None else None),
    ]
    for flag, value in optional:
        if value is not None:
            argv += [flag, str(value)]
    if engine.enforce_eager:
        argv.append("--enforce-eager")
    argv.append("--enable-prompt-tokens-details")
    for name, arg in pool.args.items():
        argv += _rendered(name, arg)
    argv += ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
    if kv_events is not None:
        argv += ["--kv-events-config", json.dumps(kv_events, separators=(",", ":"))]
    if tracing.enabled and TRACES_ARG not in pool.args:
        argv += [f"--{TRACES_ARG}", tracing.urls.traces]
    return tuple(argv)


def engine_env(engine: Engine, model: ModelSpec, tracing: TracingSpec = _NO_TRACING) -> dict[str, str]:
    """The variables added to the environment of ``engine``; those of the user's ``env`` win."""
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": engine.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(engine.side_channel_port),
        "UCX_NET_DEVICES": "all",
        "NCCL_CUMEM_ENABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if is_loopback(engine.host):
        # What UCX, gloo and NCCL open for themselves is then as little reached from other machines as its own ports.
        env |= {"UCX_NET_DEVICES": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        env["VLLM_HOST_IP"] = "127.0.0.1"
    if looks_like_folder(model.path) or Path(model.path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    native = Path(engine.spec.python).parent.parent / "native"
    if native.is_dir():
        # Where the system has no libnuma, the install puts one there.
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(native), os.environ.get("LD_LIBRARY_PATH", "")]))
    if engine.device == "cpu":
        # Pinning to cores makes engines that share a host wait for each other.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = str(engine.threads)
        if engine.enforce_eager:
            # vLLM compiles some samplers even so, which takes a C++ compiler: without one, a request ends the engine.
            env["TORCHDYNAMO_DISABLE"] = "1"
    if not engine.nixl_progress_thread:
        env["ANTIPHON_NIXL_PROGRESS_THREAD"] = "0"
    if not engine.spin_wait:
        env["ANTIPHON_SPIN_WAIT"] = "0"
    if engine.devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(engine.devices)
    if engine.spec.dev_mode:
        env["VLLM_SERVER_DEV_MODE"] = "1"
    if tracing.enabled:
        env["OTEL_SERVICE_NAME"] = f"antiphon-{engine.pool}"
        env["OTEL_RESOURCE_ATTRIBUTES"] = f"service.instance.id={engine.name}"
        env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = _PROTOCOLS[tracing.urls.protocol]
    return {**env, **engine.spec.env}


def engine_unset_env(engine: Engine) -> tuple[str, ...]:
    """Variables that must not be inherited: on CPU one that would override ``--kv-cache-memory-bytes``."""
    return ("VLLM_CPU_KVCACHE_SPACE",) if engine.device == "cpu" else ()


def looks_like_folder(path: str) -> bool:
    """Whether ``path`` cannot be a hub id, which has at most one slash and none at its start."""
    return path.startswith(("/", ".")) or path.count("/") > 1 or path.endswith("/")


def _rendered(name: str, value: ArgValue) -> Iterator[str]:
    if value is False:
        return
    yield f"--{name}"
    if value is True:
        return
    if isinstance(value, list):
        yield from (str(item) for item in value)
    else:
        yield json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)
