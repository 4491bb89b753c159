"""What the router reads of a prefill engine's answer, whatever the API; and of one by an engine that served alone.

``kv_transfer_params`` is passed on unread, but for the life of the engine that it names.
"""

from __future__ import annotations

import re

import msgspec

from antiphon.core.errors import ProtocolError
from antiphon.protocol.body import Buffer
from antiphon.protocol.prefill_fields import ANSWERS, PARAMS, USAGES, Details, Usage
from antiphon.protocol.usage import USAGE_MAX_BYTES

_USAGE = re.compile(rb'"usage"\s*:\s*(\{(?:[^{}]|\{[^{}]*+\})*+\})')
"""A usage object: a text cannot contain it, since its quotes are escaped."""


class PrefillAnswer:
    """What the router needs of a prefill engine's answer."""

    __slots__ = ("cached_tokens", "engine_id", "kv_transfer_params", "prompt_tokens")

    def __init__(
        self,
        kv_transfer_params: bytes | None,
        prompt_tokens: int | None,
        cached_tokens: int | None,
        engine_id: str = "",
    ) -> None:
        self.kv_transfer_params = kv_transfer_params
        """Raw JSON to pass on, or None where the engine returned none."""
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        """Prompt tokens that its own prefix cache held; None if it does not say."""
        self.engine_id = engine_id
        """Of the life of the engine that made the handle; empty if it does not say."""


def read_prefill_answer(raw: bytes) -> PrefillAnswer:
    """Read a prefill engine's answer.

    Raises:
        ProtocolError: it is not the JSON object that vLLM answers with.
    """
    try:
        answer = ANSWERS.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        raise ProtocolError("the prefill engine's answer is not a completion") from None
    params = bytes(answer.kv_transfer_params)
    prompt_tokens, cached_tokens = _counts(answer.usage or Usage())
    if params == b"null":
        return PrefillAnswer(None, prompt_tokens, cached_tokens)
    return PrefillAnswer(params, prompt_tokens, cached_tokens, _engine_id_of(params))


def prompt_counts(answer: Buffer) -> tuple[int | None, int | None]:
    """Tokens of the prompt, and those of them that were cached, by the last usage object at the end of an answer: a
    whole one, or the last events of a stream. Each None where it does not say, or nothing that can be."""
    found = _USAGE.findall(bytes(memoryview(answer)[-USAGE_MAX_BYTES:]))
    if not found:
        return None, None
    try:
        prompt_tokens, cached_tokens = _counts(USAGES.decode(found[-1]))
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        return None, None
    if prompt_tokens is None or prompt_tokens < 0:
        return None, None
    if cached_tokens is not None and not 0 <= cached_tokens <= prompt_tokens:
        cached_tokens = None
    return prompt_tokens, cached_tokens


def _counts(usage: Usage) -> tuple[int | None, int | None]:
    """(prompt tokens, those of them that were cached), each None where the engine does not say."""
    if usage.input_tokens is None:
        details = usage.prompt_tokens_details or Details()
        return usage.prompt_tokens, details.cached_tokens
    if usage.input_tokens_details is not None:
        return usage.input_tokens, usage.input_tokens_details.cached_tokens
    # A message's input tokens are those that no cache had a part in.
    read, created = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    return usage.input_tokens + (read or 0) + (created or 0), read


def _engine_id_of(params: bytes) -> str:
    """What the handle says of the life of its engine. Its other keys are skipped, not read."""
    try:
        return PARAMS.decode(params).remote_engine_id or ""
    except msgspec.ValidationError:  # another connector's: what it means is not known here
        return ""
