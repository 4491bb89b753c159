"""Which way a request takes: ``pd`` (prefill on one engine, decode on another), ``local`` (a decode engine alone), or
``cached`` (a decode engine alone, one that holds most of the prompt or whose cache server does).

A prefill's KV is handed over once, to one reader: NIXL frees the blocks as soon as one decode request has pulled them,
and a second pull reads other people's KV with no error. So whatever has more than one sequence, or needs logits of the
prompt on the engine that answers, is served by a decode engine alone, and the reason is said.

What a request's form allows is decided here; ``placement`` decides by what is where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

_BRACKET: Final = 91

Path = Literal["pd", "local", "cached"]


@dataclass(frozen=True, slots=True)
class PathChoice:
    """A path and why it was chosen; reasons are few and fixed, since they label a metric."""

    path: Path
    reason: str


PD: Final = PathChoice("pd", "default")

REASONS = (
    "default",
    "disabled",
    "no_prefill_pool",
    "single_stage",
    "prompt_list",
    "prompt_embeds",
    "n",
    "best_of",
    "beam_search",
    "echo",
    "prompt_logprobs",
    "truncation",
    "builtin_tools",
    "tool_choice",
    "prefill_fallback",
    "short",
    "held_by_engine",
    "held_by_server",
)


def _more_than_one(value: bytes) -> bool:
    # Anything but a plain 1 goes to the engine that will judge it.
    return value not in (b"1", b"null")


def _is_set(value: bytes) -> bool:
    return value not in (b"null", b"false")


def _is_negative(value: bytes) -> bool:
    """The prompt is cut to what the limit of tokens leaves room for, which differs between the two engines."""
    return value.startswith(b"-")


def _is_not_disabled(value: bytes) -> bool:
    """The same, of a response: whatever is not disabled, null too, is on."""
    return value != b'"disabled"'


def _begins_list(value: Any) -> bool:
    """Of a prompt, which is long and seldom a list: it is not copied to be looked at."""
    view = memoryview(value)
    return len(view) > 0 and view[0] == _BRACKET


def _is_list_of_prompts(value: bytes) -> bool:
    """A list of strings or of token lists; a flat list of token ids is one prompt."""
    if not value.startswith(b"["):
        return False
    inner = value[1:64].lstrip() or value[1:].lstrip()
    return inner.startswith((b'"', b"[", b"]"))


_RULES: tuple[tuple[str, str, Callable[[bytes], bool]], ...] = (
    ("prompt", "prompt_list", _is_list_of_prompts),
    ("prompt_embeds", "prompt_embeds", _is_set),
    ("n", "n", _more_than_one),
    ("best_of", "best_of", _more_than_one),
    ("use_beam_search", "beam_search", _is_set),
    ("echo", "echo", _is_set),
    ("prompt_logprobs", "prompt_logprobs", _is_set),
    ("prompt_logprob_token_ids", "prompt_logprobs", _is_set),
    ("truncate_prompt_tokens", "truncation", _is_negative),
    ("truncation", "truncation", _is_not_disabled),
)
_RARE_KEYS: Final = frozenset(key for key, _, _ in _RULES if key != "prompt")
_LOCAL: Final = {reason: PathChoice("local", reason) for reason in REASONS}


def reason_alone(values: Mapping[str, Any]) -> str | None:
    """Why one handle cannot serve a request, or None.

    Args:
        values: the raw JSON of each key that stands beside the limit of tokens, as bytes or another buffer.
    """
    if not _RARE_KEYS.isdisjoint(values) or ("prompt" in values and _begins_list(values["prompt"])):
        for key, reason, applies in _RULES:
            if key in values and applies(bytes(values[key])):
                return reason
    return None


def choose_path(values: Mapping[str, Any], *, is_enabled: bool, has_prefill_pool: bool) -> PathChoice:
    """The path of a request.

    Args:
        values: see :func:`reason_alone`.
        is_enabled: whether P/D is on at all.
        has_prefill_pool: whether any prefill engine is configured.
    """
    reason = reason_alone(values)
    if reason is not None:
        return _LOCAL[reason]
    if not is_enabled:
        return _LOCAL["disabled"]
    if not has_prefill_pool:
        return _LOCAL["no_prefill_pool"]
    return PD


def served_alone(reason: str) -> PathChoice:
    """A decode engine alone, for one of the ``REASONS``."""
    return _LOCAL[reason]


HELD_BY_ENGINE = PathChoice("cached", "held_by_engine")
HELD_BY_SERVER = PathChoice("cached", "held_by_server")
SINGLE_STAGE = _LOCAL["single_stage"]
