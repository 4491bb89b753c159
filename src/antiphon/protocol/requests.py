"""What a request asks for that one hand-over cannot serve, where reading its top-level keys is not enough to tell.

Each function takes the body of a request to one API, and gives the reason for which a decode engine has to serve it
alone, or None. Values that no engine would take are left for an engine to refuse.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from antiphon.core.errors import RequestRefused
from antiphon.protocol.body import Body

Reason = Literal["builtin_tools", "tool_choice"]


class _Tool(msgspec.Struct):
    type: str | None = None


_tools = msgspec.json.Decoder(list[_Tool])


def judge_response(body: Body) -> Reason | None:
    """A request to ``/v1/responses``.

    An engine that runs tools itself generates several times with one handle: the KV behind it is freed after the first.

    Raises:
        RequestRefused: it builds on what an engine is to remember. Another engine serves the next request.
    """
    values = body.values
    for key, wants in (("previous_response_id", "a response that was kept"), ("background", "an answer for later")):
        if key in values and body.get(key) not in (b"null", b"false"):
            raise RequestRefused(
                f"{key} asks for {wants}, and none are kept: send the whole conversation as input, and wait for the "
                "answer",
                code="stateful_response_refused",
                param=key,
            )
    tools = body.get("tools")
    if tools is None or tools == b"null":
        return None
    try:
        are_functions = all(tool.type == "function" for tool in _tools.decode(tools))
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return None if are_functions else "builtin_tools"


def judge_message(body: Body) -> Reason | None:
    """A request to ``/v1/messages``.

    vLLM reads the arguments of a tool that has to be called as JSON when it makes an answer of them: those of a prefill
    end after one token, and it would fail.
    """
    choice = body.get("tool_choice")
    if choice is None or (b'"tool"' not in choice and b"\\" not in choice):
        return None
    return "tool_choice"
