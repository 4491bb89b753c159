"""The latency model of the simulated engine: every knob once, with its unit, range and reason. Imports pydantic only.

The same model is ``engine.simulated`` of the spec and the command line of ``antiphon sim-engine`` (field names are flag
names, with dashes).
"""

from __future__ import annotations

from pydantic import Field

from antiphon.config.model import SpecModel


class SimulatedSpec(SpecModel):
    """What the simulated engine pretends to cost."""

    prefill_tokens_per_s: float = Field(
        default=20000.0,
        gt=0,
        le=1e9,
        description="Prompt tokens computed a second, up to 1e9; about what one H200 does for an 8B model.",
    )
    prefill_overhead_ms: float = Field(
        default=2.0,
        ge=0,
        le=60000,
        description="Milliseconds added to each prefill whatever its length, 0 to 60000: scheduling and launch.",
    )
    decode_token_ms: float = Field(
        default=5.0, ge=0, le=60000, description="Milliseconds between two output tokens of a request, 0 to 60000."
    )
    transfer_gb_per_s: float = Field(
        default=10.0,
        gt=0,
        le=10000,
        description="KV gigabytes (1e9 bytes) pulled a second from a prefill engine, up to 10000.",
    )
    kv_blocks: int = Field(
        default=4096, ge=1, le=100000000, description="KV blocks that the engine has, 1 to 1e8; requests wait past it."
    )
    block_size_tokens: int = Field(default=16, ge=1, le=4096, description="Tokens in a KV block, 1 to 4096.")
    lease_s: float = Field(
        default=30.0,
        gt=0,
        le=86400,
        description="Seconds a prefill's KV is kept for the decode engine to pull, 0 to 86400.",
    )
    bytes_per_token: float = Field(
        default=4.0,
        ge=0.25,
        le=64,
        description="Text bytes that make a token of the simulated tokenizer, 0.25 to 64; English is about 4.",
    )
    max_model_len: int = Field(
        default=131072, ge=1, le=100000000, description="Longest prompt plus output in tokens, 1 to 1e8."
    )
    start_delay_s: float = Field(
        default=0.0,
        ge=0,
        le=3600,
        description="Seconds before the engine answers /health, 0 to 3600, to rehearse slow starts.",
    )
