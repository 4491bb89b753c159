"""``engine_kwargs``, which are vLLM's arguments, against the fields of the spec that set them; both ways.

What no field of the spec sets is passed to vLLM under ``args``. vLLM checks those names itself, at its start.
"""

from __future__ import annotations

from typing import Any

MODEL_FIELDS = {"dtype": "dtype", "max_model_len": "max_model_len", "load_format": "load_format"}
"""Argument to field of ``model``: one value for both pools."""
POOL_FIELDS = {
    "tensor_parallel_size": "tensor_parallel_size",
    "block_size": "block_size_tokens",
    "kv_cache_dtype": "kv_cache_dtype",
    "kv_cache_memory_bytes": "kv_memory_bytes",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "enforce_eager": "enforce_eager",
    "max_num_seqs": "max_num_seqs",
    "kv_transfer_config": "kv_transfer_config",
}
"""Argument to field of ``prefill`` or ``decode``."""
REFUSED = {
    "model": "write model_loading_config.model_id, or model_source",
    "served_model_name": "write model_loading_config.model_id: clients send it",
    "tokenizer": "write model_loading_config.tokenizer_source",
    "host": "remove it; a replica takes the address of its node",
    "port": "remove it; a replica takes a free port",
    "api_key": "write antiphon.router.worker_api_key_file, a file that every node has",
}
"""Arguments that are set from elsewhere, and where."""
ONE_ONLY = {
    "data_parallel_size": "write more replicas: each is an engine of its own",
    "pipeline_parallel_size": "write tensor_parallel_size: KV is not handed over between pipeline stages",
    "nnodes": "remove it; an engine runs on one node",
}
"""Arguments that may only be 1, and what to write instead."""
ALWAYS = {"enable_prompt_tokens_details": "it is always given"}
"""Arguments that change nothing, and why."""
EXECUTORS = ("mp", "uni")


def as_arg(name: str, value: Any) -> tuple[str, Any]:
    """A keyword argument as a flag of vLLM: ``enable_prefix_caching=False`` is ``--no-enable-prefix-caching``."""
    flag = name.replace("_", "-")
    return (f"no-{flag}", True) if value is False else (flag, value)


def as_kwarg(flag: str, value: Any) -> tuple[str, Any]:
    """The reverse of :func:`as_arg`."""
    if flag.startswith("no-") and value is True:
        return flag.removeprefix("no-").replace("-", "_"), False
    return flag.replace("-", "_"), value
