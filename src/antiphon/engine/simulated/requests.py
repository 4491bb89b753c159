"""Request bodies of vLLM's HTTP API as the simulated engine understands them.

Owns what is accepted and what is refused, in vLLM's words; knows nothing of responses. Pure. Fields that change only
the sampling (temperature, ``stop``, ``seed`` …) are accepted and have no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from antiphon.core.errors import ProtocolError, RequestRefused
from antiphon.engine.simulated.sequence import RemoteKv
from antiphon.engine.simulated.tokenizer import TOKEN_ID_MAX, SimulatedTokenizer, decode, render_chat
from antiphon.protocol.cache_handoff import HandoffKey, is_asked_for, read_key
from antiphon.protocol.json import decode as decode_json
from antiphon.protocol.json import encode as encode_json

NATURAL_LENGTH_TOKENS = 64
"""Where the simulated model ends by itself when the request sets no limit."""

NUM_CHOICES_MAX = 1024
_COMPLETION_MAX_TOKENS = 16
_LOGPROBS_MAX = 20

Body = dict[str, object]
Kind = Literal["completion", "chat", "response", "message", "generate"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request of any API, ready to be run. ``prompts`` and ``texts`` have one entry a prompt."""

    kind: Kind
    prompts: list[list[int]]
    texts: list[str]
    max_tokens: int
    stops_naturally: bool
    num_choices: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    is_prompt_only: bool
    """``echo`` with ``max_tokens`` 0: the answer is the prompt."""
    num_logprobs: int | None
    returns_token_ids: bool
    hands_over: bool
    remote: RemoteKv | None
    stores: bool
    handed_over: HandoffKey | None
    is_remote_unusable: bool
    """``do_remote_prefill`` without a complete handle: vLLM's engine would crash or wait for ever; this one fails."""
    namespace: str
    request_id: str | None


def invalid(message: str, param: str | None = None) -> RequestRefused:
    """A body that vLLM's request model would not accept."""
    return RequestRefused(f"1 validation error:\n  {message}", status=400, kind="Bad Request", param=param)


def bad_request(message: str, param: str | None = None) -> RequestRefused:
    """A request that is well-formed and cannot be served."""
    return RequestRefused(message, status=400, kind="BadRequestError", param=param)


def parse_body(content_type: bytes | None, data: bytes | bytearray) -> Body:
    """The JSON object of a request body.

    Raises:
        RequestRefused: another media type, malformed JSON, or not an object.
    """
    media_type = (content_type or b"").split(b";", 1)[0].strip().lower()
    if media_type != b"application/json":
        raise invalid("Unsupported Media Type: Only 'application/json' is allowed")
    try:
        body = decode_json(data)
    except ProtocolError as error:
        detail = {"type": "json_invalid", "loc": "body", "msg": "JSON decode error", "ctx": {"error": error.message}}
        raise invalid(str(detail), "body") from error
    if not isinstance(body, dict):
        raise invalid("{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be an object'}", "body")
    return body


class RequestReader:
    """Turns bodies into requests.

    Args:
        model_name: the served model.
        tokenizer: counts and splits the prompts.
        max_model_len: prompt plus answer, in tokens.
    """

    def __init__(self, model_name: str, tokenizer: SimulatedTokenizer, max_model_len: int) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len

    def completion(self, body: Body) -> GenerationRequest:
        """The body of POST /v1/completions.

        Raises:
            RequestRefused: 404 for another model, 400 for the rest.
        """
        self.check_model(body)
        prompts, texts = self._prompts(body.get("prompt"))
        echo = _boolean(body, "echo")
        num_logprobs = _integer(body, "logprobs")
        if num_logprobs is not None and not 0 <= num_logprobs <= _LOGPROBS_MAX:
            raise bad_request(f"`logprobs` must be between 0 and {_LOGPROBS_MAX}, got {num_logprobs}.", "logprobs")
        limit = _integer(body, "max_tokens") if "max_tokens" in body else _COMPLETION_MAX_TOKENS
        return self._generation("completion", body, (prompts, texts), (limit, "max_tokens"), (echo, num_logprobs))

    def chat(self, body: Body) -> GenerationRequest:
        """The body of POST /v1/chat/completions.

        Raises:
            RequestRefused: 404 for another model, 400 for the rest.
        """
        self.check_model(body)
        text = self._conversation(body)
        num_logprobs = _integer(body, "top_logprobs") or 0 if _boolean(body, "logprobs") else None
        limit = _integer(body, "max_completion_tokens")
        param = "max_completion_tokens"
        if limit is None:
            limit, param = _integer(body, "max_tokens"), "max_tokens"
        prompts = [self.tokenizer.encode(text)]
        return self._generation("chat", body, (prompts, [text]), (limit, param), (False, num_logprobs))

    def tokenize(self, body: Body) -> list[int]:
        """The tokens for the body of POST /tokenize: a ``prompt`` or ``messages``.

        Raises:
            RequestRefused: 404 for another model, 400 for the rest.
        """
        self.check_model(body)
        if "messages" in body:
            return self.tokenizer.encode(self._conversation(body))
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise _wrong_type("prompt", "string")
        return self.tokenizer.encode(prompt)

    def detokenize(self, body: Body) -> list[int]:
        """The tokens in the body of POST /detokenize.

        Raises:
            RequestRefused: 404 for another model, 400 for the rest.
        """
        self.check_model(body)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not _are_tokens(tokens):
            raise _wrong_type("tokens", "list of token ids")
        return tokens

    def embedding(self, body: Body) -> list[list[int]]:
        """The inputs of POST /v1/embeddings, as tokens.

        Raises:
            RequestRefused: 404 for another model, 400 for the rest.
        """
        self.check_model(body)
        prompts, _ = self._prompts(body.get("input"), "input")
        for prompt in prompts:
            self._check_length(len(prompt))
        return prompts

    def check_model(self, body: Body) -> None:
        """Refuse a model that is not served; none at all means the served one."""
        model = body.get("model")
        if model is not None and not isinstance(model, str):
            raise _wrong_type("model", "string")
        if model and model != self.model_name:
            message = f"The model `{model}` does not exist. Valid aliases: {self.model_name}."
            raise RequestRefused(message, status=404, kind="NotFoundError", param="model")

    def _generation(
        self,
        kind: Kind,
        body: Body,
        prompts: tuple[list[list[int]], list[str]],
        limit: tuple[int | None, str],
        shape: tuple[bool, int | None],
    ) -> GenerationRequest:
        limit_tokens, limit_param = limit
        echo, num_logprobs = shape
        stream = _boolean(body, "stream")
        options = _object(body, "stream_options")
        if options is not None and not stream:
            raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
        include_usage = options is not None and _boolean(options, "include_usage")
        num_choices = _integer(body, "n")
        if num_choices is None:
            num_choices = 1
        if not 1 <= num_choices <= NUM_CHOICES_MAX:
            raise bad_request(f"n must be between 1 and {NUM_CHOICES_MAX}, got {num_choices}.", "n")
        is_prompt_only = echo and limit_tokens == 0
        if is_prompt_only:
            limit_tokens = 1
        if limit_tokens is not None and limit_tokens < 1:
            raise bad_request(f"max_tokens must be at least 1, got {limit_tokens}.", limit_param)
        room = self.max_model_len - max(self._check_length(len(prompt)) for prompt in prompts[0])
        if room < 1:
            raise bad_request("max_tokens must be at least 1, got 0.", limit_param)
        params = _object(body, "kv_transfer_params")
        hands_over, remote, is_unusable = _handover(params)
        return GenerationRequest(
            kind=kind,
            prompts=prompts[0],
            texts=prompts[1],
            max_tokens=min(room, NATURAL_LENGTH_TOKENS if limit_tokens is None else limit_tokens),
            stops_naturally=limit_tokens is None and room >= NATURAL_LENGTH_TOKENS,
            num_choices=num_choices,
            stream=stream,
            include_usage=include_usage,
            continuous_usage=include_usage and options is not None and _boolean(options, "continuous_usage_stats"),
            echo=echo,
            is_prompt_only=is_prompt_only,
            num_logprobs=num_logprobs,
            returns_token_ids=_boolean(body, "return_token_ids"),
            hands_over=hands_over,
            remote=remote,
            stores=is_asked_for(params),
            handed_over=read_key(params),
            is_remote_unusable=is_unusable,
            namespace=_string(body, "cache_salt") or "",
            request_id=_string(body, "request_id"),
        )

    def _prompts(self, value: object, name: str = "prompt") -> tuple[list[list[int]], list[str]]:
        """The tokens and the text of each prompt of a str, list[str], list[int] or list[list[int]]."""
        if isinstance(value, str):
            return [self.tokenizer.encode(value)], [value]
        if isinstance(value, list) and value:
            if all(isinstance(item, str) for item in value):
                return [self.tokenizer.encode(item) for item in value], value
            if _are_tokens(value):
                return [value], [decode(value)]
            if all(isinstance(item, list) and _are_tokens(item) for item in value):
                return value, [decode(item) for item in value]
        raise _wrong_type(name, "string or list of token ids")

    def _conversation(self, body: Body) -> str:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _wrong_type("messages", "list")
        turns: list[tuple[str, str]] = []
        if body.get("tools"):
            turns.append(("tools", encode_json(body["tools"]).decode()))
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise _wrong_type("messages.role", "string")
            turns.append((message["role"], _content(message)))
        add_prompt = "add_generation_prompt" not in body or _boolean(body, "add_generation_prompt")
        return render_chat(turns, add_generation_prompt=add_prompt)

    def _check_length(self, num_tokens: int) -> int:
        if not num_tokens:
            raise bad_request("The decoder prompt cannot be empty")
        if num_tokens > self.max_model_len:
            raise bad_request(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt contains "
                f"{num_tokens} input tokens, which exceeds this limit even without any output tokens. "
                f"Please reduce the length of the input prompt.",
                "input_tokens",
            )
        return num_tokens


def read_remote(params: dict[str, object]) -> RemoteKv | None:
    """The handle in the ``kv_transfer_params`` of a decode request; None when a part is missing or malformed."""
    engine_id, request_id, host = (params.get(key) for key in ("remote_engine_id", "remote_request_id", "remote_host"))
    port, groups, cached = (params.get(k) for k in ("remote_port", "remote_block_ids", "remote_prefill_cached_tokens"))
    if not (isinstance(engine_id, str) and isinstance(request_id, str) and isinstance(host, str)):
        return None
    if type(port) is not int or not 0 < port < 65536 or not isinstance(groups, list) or len(groups) != 1:
        return None
    if not isinstance(groups[0], list) or not groups[0] or not _are_tokens(groups[0]):
        return None
    num_cached = cached if type(cached) is int and cached >= 0 else None
    return RemoteKv(engine_id, request_id, host, port, tuple(groups[0]), num_cached)


def _handover(params: Body | None) -> tuple[bool, RemoteKv | None, bool]:
    """(hands over, remote handle, the handle cannot be used)."""
    if params is None:
        return False, None, False
    if not _boolean(params, "do_remote_prefill"):
        return _boolean(params, "do_remote_decode"), None, False
    remote = read_remote(params)
    return False, remote, remote is None


def _content(message: Body) -> str:
    content = message.get("content")
    calls = encode_json(message["tool_calls"]).decode() if message.get("tool_calls") else ""
    if content is None:
        return calls
    if isinstance(content, str):
        return content + calls
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "\n".join(map(str, texts)) + calls
        raise bad_request("At most 0 image(s) may be provided in one prompt.")
    raise _wrong_type("messages.content", "string")


def _are_tokens(values: list[object]) -> bool:
    return all(type(value) is int and 0 <= value <= TOKEN_ID_MAX for value in values)


def _integer(body: Body, key: str) -> int | None:
    value = body.get(key)
    if value is None or type(value) is int:
        return value
    raise _wrong_type(key, "integer")


def _boolean(body: Body, key: str) -> bool:
    value = body.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise _wrong_type(key, "boolean")


def _string(body: Body, key: str) -> str | None:
    value = body.get(key)
    if value is None or isinstance(value, str):
        return value
    raise _wrong_type(key, "string")


def _object(body: Body, key: str) -> Body | None:
    value = body.get(key)
    if value is None or isinstance(value, dict):
        return value
    raise _wrong_type(key, "object")


def _wrong_type(key: str, expected: str) -> RequestRefused:
    detail = {"type": f"{expected.split()[0]}_type", "loc": f"body.{key}", "msg": f"Input should be a valid {expected}"}
    return invalid(str(detail), f"body.{key}")
