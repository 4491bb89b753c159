"""vLLM's configuration and requests as plain objects, for one small model on a CPU or a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Dtype:
    """As ``torch.dtype``, as far as it is read."""

    def __init__(self, name: str, itemsize: int) -> None:
        self.name = name
        self.itemsize = itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"


DTYPES = {
    name: Dtype(name, size)
    for name, size in (("bfloat16", 2), ("float16", 2), ("float32", 4), ("uint8", 1), ("int8", 1))
}


class FullAttentionSpec:
    """As vLLM's of this name; every value can be set."""

    kv_factor = 2

    def __init__(self, **values: Any) -> None:
        self.block_size = 128
        self.num_kv_heads = 3
        self.head_size = 64
        self.dtype = DTYPES["bfloat16"]
        self.sliding_window: int | None = None
        self.attention_chunk_size: int | None = None
        self.non_causal = False
        self.padding_bytes = 0
        vars(self).update(values)

    @property
    def page_size_bytes(self) -> int:
        elements = self.block_size * self.num_kv_heads * self.head_size * self.kv_factor
        return elements * self.dtype.itemsize + self.padding_bytes


class MLAAttentionSpec(FullAttentionSpec):
    """One latent vector a token."""

    kv_factor = 1


class SlidingWindowSpec(FullAttentionSpec):
    """Blocks outside the window are dropped."""


class MambaSpec(FullAttentionSpec):
    """A state, not KV."""


class Engine:
    """An engine's configuration: change what a test is about."""

    def __init__(self, model: Path, device: str = "cuda") -> None:
        text = {"num_hidden_layers": 30, "rope_theta": 100000.0, "max_position_embeddings": 8192}
        self.text = text
        self.spec = FullAttentionSpec(block_size=128 if device == "cpu" else 16)
        self.layers = [f"model.layers.{index}.self_attn.attn" for index in range(30)]
        self.num_kv_heads = 3
        self.model_config = SimpleNamespace(
            model=f"{model}",
            served_model_name="smol",
            dtype=DTYPES["bfloat16"],
            revision=None,
            hf_text_config=SimpleNamespace(to_dict=lambda: dict(self.text)),
            hf_config=SimpleNamespace(to_dict=lambda: {"text": dict(self.text), "_name_or_path": f"{model}"}),
            hf_overrides={},
            quantization=None,
            max_model_len=4096,
            seed=0,
            get_total_num_kv_heads=lambda: self.num_kv_heads,
            get_num_layers=lambda parallel: 30,
        )
        self.cache_config = SimpleNamespace(cache_dtype="auto", block_size=self.spec.block_size)
        self.parallel_config = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, rank=0)
        self.device_config = SimpleNamespace(device_type=device)
        self.load_config = SimpleNamespace(load_format="auto", download_dir=None)
        self.compilation_config = SimpleNamespace(static_forward_context={})
        self.speculative_config: Any = None
        self.kv_transfer_config = SimpleNamespace(engine_id="prefill-0-0123456789ab", kv_connector_extra_config={})
        self.instance_id = "abcde"
        self.extra_groups: list[Any] = []

    def use_ranks(self, num_ranks: int) -> None:
        """Tensor parallelism."""
        self.parallel_config.tensor_parallel_size = num_ranks
        self.spec.num_kv_heads = max(1, self.num_kv_heads // num_ranks)

    def kv_cache(self) -> Any:
        """The ``KVCacheConfig``."""
        group = SimpleNamespace(layer_names=list(self.layers), kv_cache_spec=self.spec)
        return SimpleNamespace(num_blocks=364, kv_cache_groups=[group, *self.extra_groups])


class Tensor:
    """As ``torch.Tensor``, as far as it is read."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: str = "bfloat16") -> None:
        self.address = address
        self.shape = shape
        self.dtype = DTYPES[dtype]

    def data_ptr(self) -> int:
        return self.address


def request(**values: Any) -> Any:
    """A ``Request`` with nothing special about it."""
    fields: dict[str, Any] = {
        "request_id": "r1",
        "num_prompt_tokens": 600,
        "num_tokens": 600,
        "all_token_ids": list(range(600)),
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
        "pooling_params": None,
        "skip_reading_prefix_cache": False,
        "kv_transfer_params": None,
        "resumable": False,
        "status": SimpleNamespace(name="RUNNING"),
    }
    assert set(values) <= set(fields), values
    return SimpleNamespace(**{**fields, **values})


def adapter(path: Path, name: str = "poet", number: int = 1) -> Any:
    """A ``LoRARequest``."""
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=f"{path}", load_inplace=False)


def image(content_hash: str, offset: int = 10, length: int = 4) -> Any:
    """A ``MultiModalFeatureSpec``."""
    return SimpleNamespace(identifier=content_hash, mm_position=SimpleNamespace(offset=offset, length=length))
