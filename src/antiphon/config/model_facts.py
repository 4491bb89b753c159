"""What lies at ``model.path``: the size of the weights, and what its ``config.json`` says, without loading the model.

Not known is a value: a hub id, a folder of another host or a model of a kind that is not known here has None.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from antiphon.config.model_shape import kv_values_per_token, longest_request_tokens
from antiphon.config.vllm_args import looks_like_folder

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


@dataclass(frozen=True)
class ModelFacts:
    """What lies at ``model.path``."""

    is_folder: bool = False
    num_bytes: int = 0
    """Size of the weight files."""
    saved_dtype: str | None = None
    """The dtype in ``config.json``."""
    kv_values_per_token: int | None = None
    """Numbers that the KV of one token has in all layers; None: not known."""
    longest_request_tokens: int | None = None
    """Most tokens of prompt and output that the model itself takes; None: not known."""

    def weight_bytes(self, dtype: str) -> int:
        """Memory of the weights once they are loaded as ``dtype``."""
        saved, wanted = _DTYPE_BYTES.get(self.saved_dtype or ""), _DTYPE_BYTES.get(dtype)
        return self.num_bytes * wanted // saved if saved and wanted else self.num_bytes

    def kv_token_bytes(self, dtype: str, kv_cache_dtype: str) -> int | None:
        """Memory of the KV of one token, stored as ``kv_cache_dtype`` by a model loaded as ``dtype``; None: not known.

        Where it depends on vLLM, it is the least: float32 that was saved is loaded as 16 bits unless it is asked for.
        """
        if self.kv_values_per_token is None:
            return None
        wanted = (dtype if dtype != "auto" else None) if kv_cache_dtype == "auto" else kv_cache_dtype
        if wanted is None:
            value_bytes = 2 if self.saved_dtype in _DTYPE_BYTES else None
        else:
            value_bytes = 1 if wanted.startswith(("fp8", "int8")) else _DTYPE_BYTES.get(wanted)
        return self.kv_values_per_token * value_bytes if value_bytes is not None else None


def model_facts(path: str) -> ModelFacts:
    """Look at ``path`` on this host."""
    folder = Path(path)
    if not folder.is_dir():
        # A hub id is resolved by the engine; only what is spelled like a folder has to be one.
        return ModelFacts(is_folder=not looks_like_folder(path))
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        config = {}
    saved = config.get("dtype") or config.get("torch_dtype") if isinstance(config, dict) else None
    known = config if isinstance(config, dict) else {}
    return ModelFacts(
        is_folder=True,
        num_bytes=_weight_bytes(folder),
        saved_dtype=saved if isinstance(saved, str) else None,
        kv_values_per_token=kv_values_per_token(known),
        longest_request_tokens=longest_request_tokens(known),
    )


def _weight_bytes(folder: Path) -> int:
    """Size of the weight files in ``folder``; 0 where they cannot be looked at: the engine says why, better."""
    try:
        return sum(file.stat().st_size for file in folder.iterdir() if file.suffix in _WEIGHT_SUFFIXES)
    except OSError:
        return 0
