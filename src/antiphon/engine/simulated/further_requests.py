"""Requests to vLLM's further APIs, as the simulated engine understands them: responses, messages, tokens in and out.

Like vLLM it makes a chat of a response and of a message, and looks at the chat. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from antiphon.core.errors import RequestRefused
from antiphon.engine.simulated.requests import Body, GenerationRequest, RequestReader, bad_request, invalid
from antiphon.protocol.json import encode

_PASSED_ON = ("model", "stream", "kv_transfer_params", "cache_salt", "request_id")


def read_response(reader: RequestReader, body: Body) -> GenerationRequest:
    """The body of POST /v1/responses.

    Raises:
        RequestRefused: 404 for another model or a response that is not kept, 400 for the rest.
    """
    if body.get("previous_response_id") is not None:
        raise RequestRefused(
            f"Response with id '{body['previous_response_id']}' not found.", status=404, kind="invalid_request_error"
        )
    if body.get("background"):
        raise bad_request("This vLLM engine does not support `store=True`", "background")
    chat: Body = {key: body[key] for key in _PASSED_ON if key in body}
    messages: list[object] = []
    if body.get("instructions") is not None:
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        messages += [_item(each) for each in given]
    else:
        raise invalid("{'type': 'missing', 'loc': 'body.input', 'msg': 'Field required'}", "body.input")
    chat |= {"messages": messages, "tools": body.get("tools"), "max_completion_tokens": body.get("max_output_tokens")}
    return replace(reader.chat(chat), kind="response")


def read_message(reader: RequestReader, body: Body) -> GenerationRequest:
    """The body of POST /v1/messages.

    Raises:
        RequestRefused: 404 for another model, 400 for the rest.
    """
    limit = body.get("max_tokens")
    if type(limit) is not int or limit < 1:
        raise invalid("{'type': 'value_error', 'loc': 'body.max_tokens', 'msg': 'must be positive'}", "body.max_tokens")
    params = body.get("kv_transfer_params")
    is_prefill = isinstance(params, dict) and bool(params.get("do_remote_decode"))
    thinking = body.get("thinking")
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
    if type(budget) is int and budget >= limit and not is_prefill:
        raise invalid("{'type': 'value_error', 'msg': 'thinking.budget_tokens must be less than max_tokens'}", "body")
    chat: Body = {key: body[key] for key in _PASSED_ON if key in body}
    given = body.get("messages")
    if not isinstance(given, list):
        raise invalid("{'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required'}", "body.messages")
    system: list[object] = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    chat |= {"messages": system + given, "tools": body.get("tools"), "max_completion_tokens": limit}
    return replace(reader.chat(chat), kind="message", include_usage=True)


def read_generate(reader: RequestReader, body: Body) -> GenerationRequest:
    """The body of POST /inference/v1/generate.

    Raises:
        RequestRefused: 404 for another model, 400 for the rest.
    """
    sampling = body.get("sampling_params")
    if not isinstance(sampling, dict):
        raise invalid("{'type': 'missing', 'loc': 'body.sampling_params', 'msg': 'Field required'}", "body")
    completion: Body = {key: body[key] for key in (*_PASSED_ON, "stream_options") if key in body}
    if not body.get("stream"):
        completion.pop("stream_options", None)
    completion |= {"prompt": body.get("token_ids"), "max_tokens": sampling.get("max_tokens"), "n": sampling.get("n")}
    request = reader.completion(completion)
    if len(request.prompts) != 1 or request.prompts[0] is not body.get("token_ids"):
        raise invalid("{'type': 'list_type', 'loc': 'body.token_ids', 'msg': 'Input should be a valid list'}", "body")
    return replace(request, kind="generate")


def _item(item: object) -> object:
    """An item of a response's input as a message of a chat."""
    if not isinstance(item, dict) or "role" in item:
        return _with_plain_parts(item)
    if item.get("type") == "function_call_output":
        return {"role": "tool", "content": item.get("output")}
    return {"role": "assistant", "content": encode(item).decode()}


def _with_plain_parts(item: object) -> object:
    if isinstance(item, dict) and isinstance(item.get("content"), list):
        parts = [{**part, "type": "text"} if isinstance(part, dict) else part for part in item["content"]]
        return {**item, "content": parts}
    return item
