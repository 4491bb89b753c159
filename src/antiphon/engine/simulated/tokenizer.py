"""The simulated tokenizer: deterministic, without a vocabulary file, reversible for all but very long tokens.

Owns how text becomes token ids and back. Two kinds of token:

- a *word*, id 0 to 4095: what the simulated model generates, a space and two syllables (`` kato``). The same letters
  in a prompt become the same id, so that an answer sent back in the next turn hits the prefix cache;
- a *group* of the UTF-8 bytes between words, ``bytes_per_token`` of them on average.

Tokens of a text are, but for the last one, also the first tokens of every longer text that begins with it. Pure.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from hashlib import blake2b

NUM_WORDS = 4096
TOKEN_ID_MAX = 2**63 - 1

_SYLLABLES = [consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeio"]
WORDS = tuple(f" {_SYLLABLES[token >> 6]}{_SYLLABLES[token & 63]}" for token in range(NUM_WORDS))
"""The text of each generated token, by id."""

_WORD_IDS = {word.encode(): token for token, word in enumerate(WORDS)}
_WORD = re.compile(rb"( [bdfghjklmnprstvz][aeio][bdfghjklmnprstvz][aeio])")

_LENGTH_SHIFT = 48
_GROUP_BYTES_MAX = 6
"""Longer groups do not fit an id with their length and become a digest, which cannot be turned back into text."""
_DIGEST_FLAG = 1 << 62
_FOUR_BYTES = 5 << _LENGTH_SHIFT


def encode_group(group: bytes) -> int:
    """The id of one group of bytes: its bytes, little-endian, and its length plus one above bit 48."""
    if len(group) > _GROUP_BYTES_MAX:
        return _DIGEST_FLAG | int.from_bytes(blake2b(group, digest_size=7).digest(), "little")
    return (len(group) + 1) << _LENGTH_SHIFT | int.from_bytes(group, "little")


def decode_token(token: int) -> bytes:
    """The bytes of one token; a placeholder for ids that stand for no known bytes."""
    if token < NUM_WORDS:
        return WORDS[token].encode()
    length = (token >> _LENGTH_SHIFT) - 1
    if token & _DIGEST_FLAG or not 0 <= length <= _GROUP_BYTES_MAX or (token & (1 << _LENGTH_SHIFT) - 1) >> 8 * length:
        return b"<%d>" % token
    return (token & (1 << _LENGTH_SHIFT) - 1).to_bytes(_GROUP_BYTES_MAX, "little")[:length]


def decode(tokens: Sequence[int]) -> str:
    """The text of ``tokens``."""
    return b"".join(map(decode_token, tokens)).decode("utf-8", "replace")


class SimulatedTokenizer:
    """Turns text into token ids.

    Args:
        bytes_per_token: bytes of text that make a token; below 1, several tokens share a byte.
    """

    def __init__(self, bytes_per_token: float) -> None:
        assert bytes_per_token > 0, bytes_per_token
        self.bytes_per_token = bytes_per_token

    def encode(self, text: str) -> list[int]:
        """The token ids of ``text``; an empty text has none."""
        parts = _WORD.split(text.encode("utf-8", "replace"))
        tokens = self._groups(parts[0])
        for index in range(1, len(parts), 2):
            tokens.append(_WORD_IDS[parts[index]])
            if parts[index + 1]:
                tokens += self._groups(parts[index + 1])
        return tokens

    def _groups(self, data: bytes) -> list[int]:
        size = len(data)
        if self.bytes_per_token == 4:  # the default, and ten times faster than the general case
            count = size // 4
            tokens = [value | _FOUR_BYTES for value in struct.unpack_from(f"<{count}I", data)]
            if size % 4:
                tokens.append(encode_group(data[4 * count :]))
            return tokens
        tokens = []
        start = 0
        while start < size:
            # The borders do not depend on the length of the text, or a longer text would share no tokens with it.
            begin, end = int(len(tokens) * self.bytes_per_token), int((len(tokens) + 1) * self.bytes_per_token)
            tokens.append(encode_group(data[begin:end]))
            start = end
        return tokens


def render_chat(messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool) -> str:
    """The prompt text of a conversation of (role, content): the simulated model's chat template."""
    turns = "".join([f"<|{role}|>\n{content}\n" for role, content in messages])
    return turns + "<|assistant|>\n" if add_generation_prompt else turns
