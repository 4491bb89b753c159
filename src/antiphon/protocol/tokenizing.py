"""What an engine is asked to tokenize for a request, at ``POST /tokenize``.

Only what that route takes as the inference route does is asked: a field that changes the prompt in one and not in the
other would give tokens that the engine never sees. Then there is no question, and nothing precise to say.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec

from antiphon.core.errors import ProtocolError
from antiphon.protocol.body import Buffer, member

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

_COMPLETION_FIELDS: Final = ("model", "prompt", "add_special_tokens")
_CHAT_FIELDS: Final = (
    *("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "chat_template_kwargs"),
)
_UNLIKE: Final = (
    *("truncate_prompt_tokens", "prompt_embeds", "suffix", "documents", "reasoning_effort", "tool_choice"),
    *("mm_processor_kwargs", "media_io_kwargs"),
)
"""Fields that change a prompt and that ``/tokenize`` does not take, or not as the inference routes do."""
_IGNORED: Final = frozenset((b"null", b'"auto"'))
_MEDIA: Final = re.compile(rb'"(?:image|video|audio|input_audio|input_image|file)(?:_url|_embeds|_pil)?"')
"""An engine would fetch and process what such a part of a message names."""

_Token = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Answer(msgspec.Struct):
    tokens: list[_Token]


_answers = msgspec.json.Decoder(_Answer)
_token_lists = msgspec.json.Decoder(list[_Token])


def known_tokens(path: str, values: Mapping[str, Buffer]) -> Sequence[int] | None:
    """The tokens of a completion whose ``prompt`` is a list of token ids; None for any other request."""
    prompt = values.get("prompt") if path == COMPLETIONS else None
    if prompt is None or _first(prompt) != b"[" or _is_changed(values):
        return None
    try:
        return array("q", _token_lists.decode(prompt))
    except msgspec.DecodeError:
        return None


def tokenize_body(path: str, values: Mapping[str, Buffer]) -> bytes | None:
    """The body of the question for a request; None where there is none to ask.

    Args:
        path: of the request.
        values: the raw top-level values of its body (``body.Body.values``).
    """
    if _is_changed(values):
        return None
    fields: tuple[str, ...] = ()
    if path == COMPLETIONS:
        prompt = values.get("prompt")
        fields = _COMPLETION_FIELDS if prompt is not None and _first(prompt) == b'"' else ()
    elif path == CHAT:
        messages = values.get("messages")
        fields = _CHAT_FIELDS if messages is not None and not _MEDIA.search(bytes(messages)) else ()
    if not fields:
        return None
    present = [member(name, bytes(values[name])) for name in fields if name in values]
    return b"{%b}" % b",".join(present)


def decode_tokens(body: bytes) -> array[int]:
    """The tokens in an answer.

    Raises:
        ProtocolError: there are none.
    """
    try:
        return array("q", _answers.decode(body).tokens)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"this is no answer of /tokenize: {error}") from error


def _is_changed(values: Mapping[str, Buffer]) -> bool:
    return any(name in values and bytes(values[name]) not in _IGNORED for name in _UNLIKE)


def _first(value: Buffer) -> bytes:
    return bytes(memoryview(value)[:1])
