"""What is read of a prefill engine's answer. ``msgspec`` reads these declarations at run time, which keeps this module
Python where its neighbours are compiled.
"""

from __future__ import annotations

import msgspec


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Of any API: each names its counts differently."""

    prompt_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    input_tokens: int | None = None
    input_tokens_details: Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: Usage | None = None


class Params(msgspec.Struct):
    remote_engine_id: str | None = None


ANSWERS = msgspec.json.Decoder(Answer)
USAGES = msgspec.json.Decoder(Usage)
PARAMS = msgspec.json.Decoder(Params)
