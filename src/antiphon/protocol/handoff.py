"""vLLM's hand-over fields: what is asked of the prefill engine, and what its answer holds.

``kv_transfer_params`` of the answer is passed on unread, as the bytes that arrived: its keys differ between vLLM
versions.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from antiphon.core.errors import ProtocolError
from antiphon.protocol.body import Body, Buffer, member

PREFILL_PARAMS = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
"""What a prefill request carries in ``kv_transfer_params`` (vLLM, NixlConnector)."""

_ONE_TOKEN = {"max_tokens": b"1", "min_tokens": b"1", "stream": b"false"}
_IF_PRESENT = {
    "max_completion_tokens": b"1",
    "n": b"1",
}
_IF_STREAMED = {"stream_options": b"null"}
"""vLLM refuses them without ``stream``: then the prefill engine is to refuse them too, before it computes anything."""


REPLACED = frozenset((*_ONE_TOKEN, *_IF_PRESENT, *_IF_STREAMED, "kv_transfer_params", "cache_salt"))
"""Every key of a body that a request to an engine may replace."""

_PREFILL: dict[str, bytes] = {**_ONE_TOKEN, "kv_transfer_params": PREFILL_PARAMS}
_PREFILL_MEMBERS = {key: member(key, value) for key, value in _PREFILL.items()}
_NOT_PLAIN = frozenset((*_IF_PRESENT, *_IF_STREAMED))


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


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


def prefill_fields(body: Body) -> Mapping[str, bytes]:
    """The fields that turn a client's request into a prefill: one token, one sequence, a whole answer, and a handle.

    ``min_tokens`` is 1 so that an end-of-sequence token cannot end the request in a way that frees the blocks at once.
    """
    if _NOT_PLAIN.isdisjoint(body.values):
        return _PREFILL
    fields = {key: value for key, value in _IF_PRESENT.items() if key in body.values}
    if body.get("stream") == b"true":
        fields.update((key, value) for key, value in _IF_STREAMED.items() if key in body.values)
    return fields | _PREFILL


def prefill_body(body: Body) -> list[Buffer]:
    """The client's request as a prefill: see :func:`prefill_fields`."""
    return body.splice(prefill_fields(body), _PREFILL_MEMBERS)


def decode_body(body: Body, params: bytes) -> list[Buffer]:
    """The client's request to a decode engine, with the handle that the prefill engine answered."""
    return body.splice({"kv_transfer_params": params}, {"kv_transfer_params": b'"kv_transfer_params":' + params})


def drain_fields(body: Body, params: bytes) -> dict[str, bytes]:
    """The fields of a decode request whose only use is to pull the KV, since the client has left."""
    return {**prefill_fields(body), "kv_transfer_params": params}


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
    usage = answer.usage or _Usage()
    details = usage.prompt_tokens_details or _Details()
    if params == b"null":
        return PrefillAnswer(None, usage.prompt_tokens, details.cached_tokens)
    return PrefillAnswer(params, usage.prompt_tokens, details.cached_tokens, _engine_id_of(params))


def _engine_id_of(params: bytes) -> str:
    """What the handle says of the life of its engine. Its other keys are skipped, not read."""
    try:
        return _params.decode(params).remote_engine_id or ""
    except msgspec.ValidationError:  # another connector's: what it means is not known here
        return ""
