"""What a model does with positions and windows: read from its configuration, as text for its identity.

Always true: settings that change K by position, or what a token sees, are here, whatever their name in a model's
configuration: every field about rope or rotary embedding is taken, so that an unknown one separates keys rather than
merges them. Equal settings give equal text in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from antiphon.connector.weights import canonical_json

OTHER_FIELDS = frozenset(
    {
        *("alibi", "attention_multiplier", "attn_temperature_tuning", "floor_scale", "max_position_embeddings"),
        *("original_max_position_embeddings", "position_embedding_type", "use_alibi"),
    }
)
LONG_ROPE = frozenset({"longrope", "su"})
DIGEST_LETTERS = 16


def settings_of(model: Any) -> tuple[tuple[str, str], ...]:
    """(name, value) of every setting of the model configuration ``model`` that changes K by position."""
    fields = _fields(model.hf_text_config)
    found = {
        name: canonical_json(value)
        for name, value in fields.items()
        if value is not None and ("rope" in name or "rotary" in name or name in OTHER_FIELDS)
    }
    if (reach := _long_rope_reach(fields, model)) is not None:
        found["longrope_factors"] = reach
    if multimodal := _multimodal(model):
        found["multimodal"] = canonical_json(multimodal)
    return tuple(sorted(found.items()))


def attention_kind(kind: str, model: Any, spec: Any) -> str:
    """``full`` or ``mla``, or with a window: ``sliding:4096``, and which layers have it where not all do."""
    fields = _fields(model.hf_text_config)
    window = getattr(spec, "sliding_window", None)
    chunk = getattr(spec, "attention_chunk_size", None)
    if getattr(model, "disable_sliding_window", False):
        window = None
    if window is None and chunk is None:
        return kind
    text = f"sliding:{window}" if window is not None else f"chunked:{chunk}"
    layers = {name: fields[name] for name in ("layer_types", "sliding_window_pattern") if fields.get(name) is not None}
    if layers:
        text += f":layers={hashlib.sha256(canonical_json(layers).encode()).hexdigest()[:DIGEST_LETTERS]}"
    return text if kind == "full" else f"{kind}:{text}"


def _fields(config: Any) -> Mapping[str, Any]:
    """The fields of a Transformers configuration."""
    if hasattr(config, "to_dict"):
        fields: Mapping[str, Any] = config.to_dict()
        return fields
    plain: Mapping[str, Any] = vars(config)
    return plain


def _rope_types(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every group of rope parameters: one, or one for each type of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        group = fields.get(name)
        if isinstance(group, Mapping):
            yield group
            yield from (inner for inner in group.values() if isinstance(inner, Mapping))


def _long_rope_reach(fields: Mapping[str, Any], model: Any) -> str | None:
    """Which factors vLLM applies under LongRoPE: it takes the long ones for all tokens where ``--max-model-len``
    exceeds the original length, so that K depends on a setting of the engine."""
    for group in _rope_types(fields):
        if group.get("rope_type", group.get("type")) in LONG_ROPE:
            original = group.get("original_max_position_embeddings", fields.get("original_max_position_embeddings"))
            if original is None:
                return f"max_model_len={model.max_model_len}"
            return "long" if model.max_model_len > original else "short"
    return None


def _multimodal(model: Any) -> dict[str, Any]:
    """Settings of the engine that change what an image or video becomes, beside the item's own hash."""
    config = getattr(model, "multimodal_config", None)
    names = ("mm_processor_kwargs", "video_pruning_rate", "video_pruning_method")
    found = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in found.items() if value}
