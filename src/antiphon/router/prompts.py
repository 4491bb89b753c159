"""What is read of a request's prompt: where it stands in the body, what else makes its KV unequal, how long it is.

Owns the estimate of tokens, which learns from what engines count. It does not tokenize.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from antiphon.protocol.body import Body
from antiphon.routing.ask import Prompt
from antiphon.routing.token_estimate import TokenEstimate

_PROMPT_KEYS: Final = ("prompt", "messages", "input", "token_ids")
_SCOPE_KEYS: Final = (
    *("model", "tools", "tool_choice", "system", "instructions", "previous_response_id", "documents"),
    *("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "add_special_tokens"),
)
"""Keys whose value is part of the prompt, or of what makes its KV."""
_SCOPE_BYTES: Final = 16


class Prompts:
    """The prompts of one router's requests."""

    def __init__(self) -> None:
        self.estimate = TokenEstimate()

    def read(self, body: Body, salt: str) -> Prompt | None:
        """The prompt of a request; None where it has none that is known.

        Args:
            salt: under which engines look for its KV; empty where there is none.
        """
        values = body.values
        for key in _PROMPT_KEYS:
            if key in values:
                data = bytes(values[key])
                break
        else:
            return None
        model = body.get("model") or b""
        return Prompt(scope_of(body, salt), data, self._num_tokens(model, data))

    def learn(self, body: Body, prompt: Prompt, num_tokens: int) -> None:
        """An engine has counted the prompt's tokens."""
        if prompt.data[:1] == b'"' or prompt.data[:2] in (b"[{", b"[ "):  # text, not token ids
            self.estimate.observe(body.get("model") or b"", len(prompt.data), num_tokens)

    def _num_tokens(self, model: bytes, data: bytes) -> int:
        if data[:1] == b"[" and data[1:64].lstrip()[:1].isdigit():
            return data.count(b",") + 1  # token ids
        return self.estimate.num_tokens(model, len(data))


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
