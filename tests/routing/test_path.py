"""Every rule of the path choice, and what it must not catch."""

from __future__ import annotations

import pytest

from antiphon.protocol.body import scan
from antiphon.routing.path import REASONS, SINGLE_STAGE, choose_path


def path_of(body: str, *, is_enabled: bool = True, has_prefill_pool: bool = True) -> tuple[str, str]:
    choice = choose_path(scan(body.encode()).values, is_enabled=is_enabled, has_prefill_pool=has_prefill_pool)
    return choice.path, choice.reason


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        '{"prompt":"x"}',
        '{"prompt":"[\\"x\\"]"}',
        '{"prompt":[1,2,3]}',
        '{"prompt":[ 1 ]}',
        '{"prompt":[-1]}',
        '{"prompt":null}',
        '{"prompt":{}}',
        '{"messages":[{"role":"user","content":["a"]}]}',
        '{"prompt":"x","n":1}',
        '{"prompt":"x","n":null}',
        '{"prompt":"x","n": 1 ,"best_of":null}',
        '{"prompt":"x","best_of":1}',
        '{"prompt":"x","echo":false}',
        '{"prompt":"x","echo":null}',
        '{"prompt":"x","prompt_logprobs":null}',
        '{"prompt":"x","prompt_embeds":null}',
        '{"prompt":"x","use_beam_search":false}',
        '{"prompt":"x","use_beam_search":null}',
        '{"prompt":"x","logprobs":5,"top_logprobs":5}',
        '{"prompt":"x","x":{"n":2,"echo":true}}',
        '{"prompt":"\\"n\\":2"}',
        '{"n":2,"n":1}',
    ],
)
def test_one_sequence_of_one_prompt_is_split(body: str) -> None:
    assert path_of(body) == ("pd", "default")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"prompt":["x"]}', "prompt_list"),
        ('{"prompt":["x","y"]}', "prompt_list"),
        ('{"prompt":[ \\n "x"]}'.replace("\\n", "\n"), "prompt_list"),
        ('{"prompt":[[1,2]]}', "prompt_list"),
        ('{"prompt":[[1],[2]]}', "prompt_list"),
        ('{"prompt":[]}', "prompt_list"),
        ('{"prompt":[ ]}', "prompt_list"),
        ('{"prompt_embeds":"AAAA"}', "prompt_embeds"),
        ('{"prompt_embeds":["AAAA"]}', "prompt_embeds"),
        ('{"prompt":"x","n":2}', "n"),
        ('{"prompt":"x","n":0}', "n"),
        ('{"prompt":"x","n":10}', "n"),
        ('{"prompt":"x","n":1.0}', "n"),
        ('{"prompt":"x","n":"1"}', "n"),
        ('{"prompt":"x","\\u006e":2}', "n"),
        ('{"n":1,"n":2}', "n"),
        ('{"prompt":"x","best_of":2}', "best_of"),
        ('{"prompt":"x","use_beam_search":true}', "beam_search"),
        ('{"prompt":"x","echo":true}', "echo"),
        ('{"prompt":"x","echo":1}', "echo"),
        ('{"prompt":"x","prompt_logprobs":0}', "prompt_logprobs"),
        ('{"prompt":"x","prompt_logprobs":5}', "prompt_logprobs"),
    ],
)
def test_what_one_handle_cannot_serve_is_local(body: str, reason: str) -> None:
    assert path_of(body) == ("local", reason)
    assert reason in REASONS


def test_without_a_pool_or_switched_off_everything_is_local() -> None:
    assert path_of('{"prompt":"x"}', is_enabled=False) == ("local", "disabled")
    assert path_of('{"prompt":"x"}', has_prefill_pool=False) == ("local", "no_prefill_pool")
    assert path_of('{"prompt":"x","n":2}', is_enabled=False) == ("local", "n")


def test_routes_of_one_stage_have_their_own_reason() -> None:
    assert (SINGLE_STAGE.path, SINGLE_STAGE.reason) == ("local", "single_stage")
    assert len(set(REASONS)) == len(REASONS)
