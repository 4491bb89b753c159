"""A small model with weights of its own: the attention of the 8B shape, fewer layers.

Engines of different tensor-parallel sizes load the same weights from it, each rank its part, as they do from any
checkpoint. Scaled as ``lively_weights`` are: every token depends on the KV of every layer and head.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lively_scales import scale_of

LAYERS = 4
SEED = 20_261


def make(model: Path, folder: Path) -> Path:
    """Writes it, 2.5 GB in bf16, beside the tokenizer of ``model``. Returns the folder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shape = {**json.loads((model / "config.json").read_text()), "num_hidden_layers": LAYERS}
    for path in model.iterdir():
        if path.is_file() and path.name != "config.json":
            shutil.copy(path, folder / path.name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(SEED)
    weights = {}
    for name, size in tensors(shape).items():
        if "norm" in name:
            weights[name] = torch.ones(size, dtype=torch.bfloat16)
            continue
        values = torch.empty(size, dtype=torch.float32, device=device).normal_(0.0, scale_of(name), generator=generator)
        weights[name] = values.to(torch.bfloat16).cpu().contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape))
    if device == "cuda":
        torch.cuda.empty_cache()
    return folder


def tensors(shape: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Name and size of each tensor of a Llama, in a fixed order."""
    hidden, inner, vocabulary = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(shape["num_hidden_layers"]):
        found |= {f"model.layers.{number}.{name}.weight": size for name, size in layer.items()}
    return {**found, "model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
