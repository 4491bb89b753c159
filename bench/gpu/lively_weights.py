"""Random weights with which every token depends on the whole prompt: for tests of what KV means.

vLLM's own dummy weights are so small that attention adds less to a token than bf16 can hold: an engine gives the same
tokens with any KV. These are scaled as a model's are at the start of its training, attention stronger than the rest.

Named as ``--worker-extension-cls lively_weights.LivelyWeights``, this file is imported before the weights are made. The
same name and shape have the same weights in every engine.
"""

from __future__ import annotations

import zlib

import torch
from lively_scales import scale_of
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader


def load_weights(_self: object, model: torch.nn.Module, _config: object) -> None:
    """Instead of the loader's own."""
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" in name:
                weights.fill_(1.0)
                continue
            generator = torch.Generator(device=weights.device).manual_seed(zlib.crc32(name.encode()))
            weights.normal_(0.0, scale_of(name), generator=generator)


DummyModelLoader.load_weights = load_weights


class LivelyWeights:
    """Adds nothing to a worker."""
