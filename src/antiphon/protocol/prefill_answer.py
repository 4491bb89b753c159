"""What the router reads of a prefill engine's answer, whatever the API.

The declarations that ``msgspec`` reads at run time keep this module Python where its neighbours are compiled.
"""

from __future__ import annotations

import msgspec

from antiphon.core.errors import ProtocolError


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Of any API: each names its counts differently."""

    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: _Usage | None = None


class _Params(msgspec.Struct):
    remote_engine_id: str | None = None


_answers = msgspec.json.Decoder(_Answer)
_params = msgspec.json.Decoder(_Params)


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
        answer = _answers.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        raise ProtocolError("the prefill engine's answer is not a completion") from None
    params = bytes(answer.kv_transfer_params)
    prompt_tokens, cached_tokens = _counts(answer.usage or _Usage())
    if params == b"null":
        return PrefillAnswer(None, prompt_tokens, cached_tokens)
    return PrefillAnswer(params, prompt_tokens, cached_tokens, _engine_id_of(params))


def _counts(usage: _Usage) -> tuple[int | None, int | None]:
    """(prompt tokens, those of them that were cached), each None where the engine does not say."""
    if usage.input_tokens is None:
        details = usage.prompt_tokens_details or _Details()
        return usage.prompt_tokens, details.cached_tokens
    if usage.input_tokens_details is not None:
        return usage.input_tokens, usage.input_tokens_details.cached_tokens
    # A message's input tokens are those that no cache had a part in.
    read, created = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    return usage.input_tokens + (read or 0) + (created or 0), read


def _engine_id_of(params: bytes) -> str:
    """What the handle says of the life of its engine. Its other keys are skipped, not read."""
    try:
        return _params.decode(params).remote_engine_id or ""
    except msgspec.ValidationError:  # another connector's: what it means is not known here
        return ""
