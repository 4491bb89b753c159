"""What an engine is asked to tokenize, and when there is no question."""

from __future__ import annotations

import json
from typing import Any

import pytest

from antiphon.core.errors import ProtocolError
from antiphon.protocol.body import scan
from antiphon.protocol.tokenizing import CHAT, COMPLETIONS, decode_tokens, known_tokens, tokenize_body

MESSAGES = [{"role": "user", "content": "hello"}]


def question(path: str, **fields: Any) -> Any:
    body = tokenize_body(path, scan(json.dumps(fields).encode()).values)
    return None if body is None else json.loads(body)


def test_a_completion_is_asked_with_its_prompt() -> None:
    asked = question(COMPLETIONS, model="m", prompt="a\nb", max_tokens=3, add_special_tokens=False, temperature=0)
    assert asked == {"model": "m", "prompt": "a\nb", "add_special_tokens": False}


def test_a_chat_is_asked_with_everything_that_its_template_takes() -> None:
    fields = {"messages": MESSAGES, "tools": [{"type": "function"}], "chat_template_kwargs": {"a": 1}, "model": "m"}
    more = {"add_generation_prompt": False, "continue_final_message": True, "chat_template": "t"}
    assert question(CHAT, **fields, **more, stream=True, tool_choice="auto") == fields | more


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (COMPLETIONS, {"prompt": [1, 2]}),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 5}),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
        (COMPLETIONS, {}),
        (CHAT, {"messages": MESSAGES, "reasoning_effort": "low"}),
        (CHAT, {"messages": MESSAGES, "documents": [{"a": "b"}]}),
        (CHAT, {"messages": MESSAGES, "tool_choice": "none", "tools": []}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}),
        (CHAT, {"prompt": "a"}),
        ("/v1/messages", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_what_the_route_would_take_otherwise_is_not_asked(path: str, fields: dict[str, Any]) -> None:
    assert question(path, **fields) is None


def test_a_field_that_is_null_is_none() -> None:
    assert question(CHAT, messages=MESSAGES, documents=None) == {"messages": MESSAGES}


def test_a_prompt_of_tokens_is_known() -> None:
    def known(path: str, **fields: Any) -> Any:
        tokens = known_tokens(path, scan(json.dumps(fields).encode()).values)
        return None if tokens is None else list(tokens)

    assert known(COMPLETIONS, prompt=[1, 2**62]) == [1, 2**62]
    for prompt in ("a", ["a"], [[1]], [-1], [1.5], [2**63]):
        assert known(COMPLETIONS, prompt=prompt) is None
    assert known(COMPLETIONS, prompt=[1], truncate_prompt_tokens=1) is None
    assert known(CHAT, prompt=[1]) is None


def test_answers() -> None:
    assert list(decode_tokens(b'{"count":2,"max_model_len":9,"tokens":[3,4],"token_strs":null}')) == [3, 4]
    for body in (b"", b"{}", b'{"tokens":"x"}', b'{"tokens":[-1]}', b'{"tokens":[9223372036854775808]}'):
        with pytest.raises(ProtocolError):
            decode_tokens(body)
