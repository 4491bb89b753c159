"""What is read of a request's prompt: where it stands in the body, what else makes its KV unequal, how long it is.

Owns the estimate of tokens, which learns from what engines count. It does not tokenize.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from antiphon.protocol.body import Body
from antiphon.routing.ask import Prompt
from antiphon.routing.token_estimate import TokenEstimate

_PROMPT_KEYS: Final = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/inference/v1/generate": "token_ids",
}
"""By route. What a client writes under the key of another route, its engine does not read."""
_TEXT_KEYS: Final = ("tools", "system", "instructions", "documents")
"""Text that is computed with messages, and does not stand among them."""
_SCOPE_KEYS: Final = (
    *("model", "tools", "tool_choice", "system", "instructions", "previous_response_id", "documents"),
    *("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "add_special_tokens"),
    *("reasoning_effort", "reasoning"),
)
"""Keys whose value is part of the prompt, or of what makes its KV."""
_SCOPE_BYTES: Final = 16


class Prompts:
    """The prompts of one router's requests."""

    def __init__(self) -> None:
        self.estimate = TokenEstimate()

    def read(self, path: str, body: Body, salt: str) -> Prompt | None:
        """The prompt of a request; None where it has none that is known.

        Args:
            path: its route.
            salt: under which engines look for its KV; empty where there is none.
        """
        key = _PROMPT_KEYS.get(path, "")
        data = body.get(key)
        if data is None:
            return None
        if _are_tokens(data):
            num_tokens = data.count(b",") + 1
        else:
            num_tokens = self.estimate.num_tokens(body.get("model") or b"", _num_bytes(body, data))
        return Prompt(scope_of(body, salt), data, num_tokens)

    def learn(self, body: Body, prompt: Prompt, num_tokens: int) -> None:
        """An engine has counted the prompt's tokens."""
        if not _are_tokens(prompt.data):
            self.estimate.observe(body.get("model") or b"", _num_bytes(body, prompt.data), num_tokens)


def _are_tokens(data: bytes) -> bool:
    return data[:1] == b"[" and data[1:64].lstrip()[:1].isdigit()


def _num_bytes(body: Body, data: bytes) -> int:
    """Of the text that becomes the prompt."""
    num_bytes = len(data)
    if data[:1] == b"[":  # messages
        for key in _TEXT_KEYS:
            if key in body.values:
                num_bytes += memoryview(body.values[key]).nbytes
    return num_bytes


def scope_of(body: Body, salt: str) -> bytes:
    """A digest of what makes the KV of two requests unequal though their prompts begin alike."""
    values = body.values
    digest = blake2b(salt.encode(), digest_size=_SCOPE_BYTES)
    for key in _SCOPE_KEYS:
        if key in values:
            value = bytes(values[key])
            digest.update(b"%b %d " % (key.encode(), len(value)))
            digest.update(value)
    return digest.digest()
