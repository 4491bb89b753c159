"""What a model's ``config.json`` says about its KV and its longest request, without loading the model.

Only what is certain is said: a model of a kind that is not known here has None, and no check refuses anything for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_OTHER_STATE = ("hybrid_override_pattern", "layers_block_type", "attn_layer_period", "mamba_d_state", "ssm_cfg")
"""Keys of models some of whose layers keep a state that is no KV."""


def kv_values_per_token(config: Mapping[str, Any]) -> int | None:
    """Numbers that the KV of one token has in all layers together, or None where that is not known."""
    text = _text(config)
    kinds = text.get("layer_types")
    if any(text.get(key) for key in _OTHER_STATE) or (isinstance(kinds, list) and set(kinds) - _ATTENTION_LAYERS):
        return None
    layers, heads = _count(text, "num_hidden_layers"), _count(text, "num_attention_heads")
    if layers is None:
        return None
    latent, rope = _count(text, "kv_lora_rank"), _count(text, "qk_rope_head_dim")
    if latent is not None:
        # One compressed vector stands for the keys and the values of all heads.
        return layers * (latent + rope) if rope is not None else None
    width = _count(text, "hidden_size")
    head_values = _count(text, "head_dim") or (width // heads if width is not None and heads is not None else None)
    kv_heads = _count(text, "num_key_value_heads") or heads
    return 2 * layers * kv_heads * head_values if kv_heads is not None and head_values is not None else None


def longest_request_tokens(config: Mapping[str, Any]) -> int | None:
    """Most tokens of prompt and output, scaled positions included, or None where that is not known."""
    text = _text(config)
    positions = _count(text, "max_position_embeddings")
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    if positions is None or not isinstance(factor, int | float) or factor <= 1:
        return positions
    return int(positions * factor)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about text: a model that sees or hears has one of its own."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _count(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
