"""Response bodies of vLLM's HTTP API: the keys, their order and their nulls as vLLM 0.32 writes them.

Owns the shapes; decides nothing. Pure: the time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from antiphon.engine.simulated.requests import GenerationRequest
from antiphon.engine.simulated.sequence import Sequence
from antiphon.engine.simulated.tokenizer import WORDS, decode_token
from antiphon.protocol.json import encode
from antiphon.protocol.openai import DONE_EVENT

VLLM_VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VLLM_VERSION}-simulated"

_WORD_BYTES = tuple(word.encode() for word in WORDS)
_EMBEDDING_SIZE = 8

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponseNames:
    """What every part of one response repeats."""

    response_id: str
    model_name: str
    created_s: int


def error_body(message: str, *, kind: str, status: int, param: str | None = None) -> bytes:
    """An error as vLLM writes it."""
    return encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


LOAD_FAILED = error_body("Internal server error", kind="InternalServerError", status=500)


def handover_params(sequence: Sequence, engine_id: str, host: str, port: int) -> Json:
    """``kv_transfer_params`` of a prefill that handed over, with every key that vLLM 0.32 sends."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [sequence.block_ids],
        "remote_engine_id": engine_id,
        "remote_request_id": sequence.request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": len(sequence.prompt) + len(sequence.output) - 1,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": sequence.num_cached_tokens,
    }


def count_usage(request: GenerationRequest, sequences: list[Sequence]) -> Json:
    """``usage`` of a whole response."""
    num_prompt = sum(map(len, request.prompts))
    num_output = 0 if request.is_prompt_only else sum(len(sequence.output) for sequence in sequences)
    return _usage(num_prompt, num_output) | {
        "prompt_tokens_details": {
            "cached_tokens": num_cached(sequences[-1]),
            "created_cache_tokens": None,
            "multimodal_tokens": None,
        }
    }


def whole_body(
    request: GenerationRequest, names: ResponseNames, sequences: list[Sequence], handover: Json | None
) -> bytes:
    """The body of a response that is not streamed."""
    is_chat = request.kind == "chat"
    choices = []
    for index, sequence in enumerate(sequences):
        prompt_index = index // request.num_choices
        tokens = [] if request.is_prompt_only else sequence.output
        text = "".join([WORDS[token] for token in tokens])
        shown = tokens
        if request.echo:
            text, shown = request.texts[prompt_index] + text, [*sequence.prompt, *tokens]
        logprobs = None if request.num_logprobs is None else _logprobs(shown, 0, is_chat)
        choice: Json = {"index": index}
        if is_chat:
            message = {"role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None}
            choice["message"] = message | {"function_call": None, "reasoning": None}
        else:
            choice["text"] = text
        choice |= {"logprobs": logprobs, "finish_reason": sequence.finish_reason, "stop_reason": None}
        choice["token_ids"] = tokens if request.returns_token_ids else None
        if not is_chat:
            choice["prompt_logprobs"] = None
            choice["prompt_token_ids"] = sequence.prompt if request.returns_token_ids else None
        choice["routed_experts"] = None
        choices.append(choice)
    body: Json = {
        "id": names.response_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": names.created_s,
        "model": names.model_name,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": count_usage(request, sequences) | {"completion_tokens_details": None},
    }
    if is_chat:
        prompt_ids = sequences[0].prompt if request.returns_token_ids else None
        body |= {"prompt_logprobs": None, "prompt_token_ids": prompt_ids, "prompt_text": None}
    body |= {"kv_transfer_params": handover, "ec_transfer_params": None, "metrics": None}
    return encode(body)


class StreamShape:
    """The events of one streamed response.

    A token of a plain stream is spliced from prepared bytes; whatever needs more is encoded.
    """

    begins_at_once = False

    def __init__(self, request: GenerationRequest, names: ResponseNames) -> None:
        self._request = request
        self._is_chat = request.kind == "chat"
        self._head: Json = {
            "id": names.response_id,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": names.created_s,
            "model": names.model_name,
        }
        self._prefix = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":'
        if self._is_chat:
            self._middle = b',"delta":{"content":"'
            self._suffix = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        else:
            self._middle = b',"text":"'
            nulls = b'"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null'
            self._suffix = b'",' + nulls + b"}]}\n\n"
        self._is_plain = not (
            request.echo or request.continuous_usage or request.returns_token_ids or request.num_logprobs is not None
        )

    def opening(self) -> list[bytes]:
        """The events before the first token: the role of each choice, for chat."""
        if not self._is_chat:
            return []
        events = []
        for index in range(len(self._request.prompts) * self._request.num_choices):
            delta = {"role": "assistant", "content": ""}
            choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = self._head | {"choices": [choice]}
            if self._request.continuous_usage:
                chunk["usage"] = _usage(len(self._request.prompts[0]), 0)
            prompt_ids = self._request.prompts[0] if self._request.returns_token_ids else None
            events.append(_event(chunk | {"prompt_token_ids": prompt_ids, "prompt_text": None}))
        return events

    def token(self, index: int, sequence: Sequence, position: int, finish_reason: str | None) -> bytes:
        """The event of the token at ``position`` of a sequence's output; ``index`` is the choice."""
        token = sequence.output[position]
        if self._is_plain and finish_reason is None:
            return b"%b%d%b%b%b" % (self._prefix, index, self._middle, _WORD_BYTES[token], self._suffix)
        request = self._request
        tokens = [] if request.is_prompt_only else [token]
        text, shown = "".join([WORDS[item] for item in tokens]), tokens
        is_first = position == 0
        if request.echo and is_first:
            text, shown = request.texts[index // request.num_choices] + text, [*sequence.prompt, *tokens]
        choice: Json = {"index": index}
        choice |= {"delta": {"content": text}} if self._is_chat else {"text": text}
        choice["logprobs"] = None if request.num_logprobs is None else _logprobs(shown, position, self._is_chat)
        choice["finish_reason"] = finish_reason
        if not self._is_chat or finish_reason is not None:
            choice["stop_reason"] = None
        if not self._is_chat:
            choice["prompt_token_ids"] = sequence.prompt if request.returns_token_ids and is_first else None
        choice["token_ids"] = tokens if request.returns_token_ids else None
        chunk = self._head | {"choices": [choice]}
        if request.continuous_usage:
            chunk["usage"] = _usage(len(sequence.prompt), 0 if request.is_prompt_only else position + 1)
        if finish_reason is not None and not request.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        return _event(chunk)

    def closing(self, sequences: list[Sequence]) -> bytes:
        """The end of a stream that is complete: the usage event if it was asked for, and ``[DONE]``."""
        if not self._request.include_usage:
            return DONE_EVENT
        usage = count_usage(self._request, sequences)
        usage["prompt_tokens_details"] = {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]}
        chunk = self._head | {"choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}
        return _event(chunk) + DONE_EVENT

    @staticmethod
    def failure() -> bytes:
        """The end of a stream whose KV could not be loaded."""
        return b"data: " + LOAD_FAILED + b"\n\n" + DONE_EVENT


def models_body(model_name: str, max_model_len: int, created_s: int) -> bytes:
    """GET /v1/models."""
    permission = {
        "id": f"modelperm-{_name_digest(model_name)}",
        "object": "model_permission",
        "created": created_s,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {"id": model_name, "object": "model", "created": created_s, "owned_by": "vllm", "root": model_name}
    card |= {"parent": None, "max_model_len": max_model_len, "permission": [permission]}
    return encode({"object": "list", "data": [card]})


def tokenize_body(tokens: list[int], max_model_len: int, *, with_strings: bool) -> bytes:
    """POST /tokenize."""
    strings = [decode_token(token).decode("utf-8", "replace") for token in tokens] if with_strings else None
    return encode({"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": strings})


def embeddings_body(names: ResponseNames, prompts: list[list[int]]) -> bytes:
    """POST /v1/embeddings: a vector of unit-sized numbers that depends on every token."""
    data = []
    for index, prompt in enumerate(prompts):
        digest = blake2b(encode(prompt), digest_size=_EMBEDDING_SIZE).digest()
        vector = [round(byte / 127.5 - 1, 6) for byte in digest]
        data.append({"index": index, "object": "embedding", "embedding": vector})
    usage = _usage(sum(map(len, prompts)), 0) | {"prompt_tokens_details": None, "completion_tokens_details": None}
    head = {"id": names.response_id, "object": "list", "created": names.created_s, "model": names.model_name}
    return encode(head | {"data": data, "usage": usage})


def _usage(num_prompt: int, num_output: int) -> Json:
    return {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_output, "completion_tokens": num_output}


def num_cached(sequence: Sequence) -> int:
    """Prompt tokens that were not computed for this request: by the prefill engine, where there was one that says."""
    if sequence.remote is not None and sequence.remote.num_cached_tokens is not None:
        return sequence.remote.num_cached_tokens
    return sequence.num_cached_tokens + sequence.num_pulled_tokens


def _event(chunk: Json) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"


def _logprobs(tokens: list[int], offset: int, is_chat: bool) -> Json:
    """Log probabilities that depend on the token and mean nothing."""
    texts = [decode_token(token).decode("utf-8", "replace") for token in tokens]
    values = [-(token % 1000) / 1000 for token in tokens]
    if is_chat:
        content = []
        for text, value in zip(texts, values, strict=True):
            content.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content}
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = [{text: value} for text, value in zip(texts, values, strict=True)]
    return {"text_offset": offsets, "token_logprobs": values, "tokens": texts, "top_logprobs": tops}


def _name_digest(name: str) -> str:
    return blake2b(name.encode(), digest_size=16).hexdigest()
