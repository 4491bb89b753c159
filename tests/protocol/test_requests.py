"""What a response or a message asks for that one hand-over cannot serve."""

from __future__ import annotations

import pytest

from antiphon.core.errors import RequestRefused
from antiphon.protocol.body import scan
from antiphon.protocol.requests import judge_message, judge_response

FUNCTION = '{"type":"function","name":"f","parameters":{"type":"object","properties":{"type":{"type":"mcp"}}}}'


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ("", None),
        (',"tools":null', None),
        (',"tools":[]', None),
        (f',"tools":[{FUNCTION},{FUNCTION}]', None),
        (f',"tools":[{FUNCTION},{{"type":"code_interpreter"}}]', "builtin_tools"),
        (',"tools":[{"type":"mcp","server_label":"x"}]', "builtin_tools"),
        (',"tools":[{"type":"\\u0066unction"}]', None),
        (',"tools":[{"name":"x"}]', "builtin_tools"),
        (',"tools":"what no engine takes"', None),
        (',"tools":[7]', None),
        (',"previous_response_id":null,"background":false,"store":true', None),
    ],
)
def test_response(fields: str, reason: str | None) -> None:
    assert judge_response(scan(f'{{"input":"x"{fields}}}'.encode())) == reason


@pytest.mark.parametrize("field", ['"previous_response_id":"resp_1"', '"background":true'])
def test_response_that_builds_on_what_an_engine_keeps_is_refused(field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        judge_response(scan(f'{{"input":"x",{field}}}'.encode()))
    assert (caught.value.status, caught.value.code) == (400, "stateful_response_refused")
    assert caught.value.param == field.split('"')[1]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("null", None),
        ('{"type":"auto"}', None),
        ('{"type":"any","disable_parallel_tool_use":true}', None),
        ('{"type":"none"}', None),
        ('{"type":"tool","name":"f"}', "tool_choice"),
        ('{"type":"t\\u006fol","name":"f"}', "tool_choice"),
    ],
)
def test_message(choice: str, reason: str | None) -> None:
    assert judge_message(scan(f'{{"messages":[],"tool_choice":{choice}}}'.encode())) == reason
    assert judge_message(scan(b'{"messages":[]}')) is None
