"""The demo's questions, asked with the official ``openai`` client, and what an answer looks like on the screen."""

from __future__ import annotations

import asyncio
import json
import textwrap
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import openai

from antiphon.core.errors import StartError
from antiphon.engine.vllm import http_get

REQUEST_TIMEOUT_S = 600.0
_RECEIPT_TIMEOUT_S = 10.0
_RECEIPT_WAIT_S = 5.0
"""How long the router may hold a receipt back for its token reports; it gives them 2 s after the request's end."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question; ``text`` is a prompt or a user's message."""

    kind: Literal["completion", "chat"]
    text: str
    max_tokens: int
    stream: bool = False
    stop: str | None = None

    def shown(self) -> str:
        """The question on one line, a long one without its middle."""
        text = " ".join(self.text.split())
        if len(text) <= 100:
            return text
        return f"{textwrap.shorten(text, 44, placeholder='')} … {text[-56:].partition(' ')[2]}"


_STORY = (
    "Bread is one of the oldest prepared foods. Flour, water and time were enough for the first loaves, which "
    "were flat and baked on hot stones. Later bakers found that dough left to stand would rise, because wild "
    "yeast from the air and the grain lives on the sugar of the flour and gives off gas. They kept a piece of "
    "each dough to start the next, and so the first sourdough was made. In ancient Egypt bread was food and wages "
    "at once: workers were paid in loaves and beer. The Romans built mills that were turned by water, and public "
    "ovens for those who had none at home. In the Middle Ages the colour of a loaf showed the rank of those who "
    "ate it, white for the rich and dark for the poor. Today most bread is made in factories within a few hours, "
    "yet many people bake at home again. "
)

QUESTIONS = (
    Question("completion", "Paris is the capital of France. Rome is the capital of Italy. Madrid is the capital of", 2),
    Question("chat", "Name three fruits.", 24),
    Question(
        "chat",
        f"Here is a text: {_STORY}In which ancient country was bread food and wages at once?",
        max_tokens=32,
        stream=True,
        stop=".",
    ),
)

LONG_QUESTION = Question(
    "completion",
    f"{_STORY * 6}\nQuestion: In which ancient country was bread food and wages at once?\nAnswer:",
    max_tokens=12,
    stream=True,
    stop="\n",
)
"""Several chunks of the cache, and a tail."""

_SOURCES = {
    "l1": "from the cache server",
    "l2": "from a tier behind it",
    "peer": "from another cache server",
    "computed": "computed",
    "device": "from the engine's own cache",
    "unknown": "unknown",
}


@dataclass(slots=True)
class Answer:
    """What came back for one question."""

    question: Question
    text: str
    id: str
    receipt: dict[str, Any]

    def shown(self) -> str:
        """The text, its further lines indented."""
        return self.text.strip().replace("\n", "\n           ")

    @property
    def first_token_ms(self) -> float:
        """From the router's receipt of the request to the first token of a streamed answer."""
        return float(self.receipt["ms"]["first_token"])

    def is_tagged(self) -> bool:
        """Whether the ``id`` names the prefill and the decode engine that the receipt names."""
        tag = f"___prefill_addr_{self.receipt['prefill']}___decode_addr_{self.receipt['decode']}_"
        return tag in self.id

    def receipt_lines(self) -> list[str]:
        """The receipt as the demo prints it."""
        receipt, times = self.receipt, self.receipt["ms"]
        if times["handover"] is None:
            after = "hand-over and first token not visible in a whole answer"
        else:
            after = f"hand-over {times['handover']:.0f} ms, first token {times['first_token']:.0f} ms"
        return [
            (
                f"  receipt  path {receipt['path']} ({receipt['reason']}), "
                f"prefill on {receipt['prefill']}, decode on {receipt['decode']}"
            ),
            f"           prefill {times['prefill']:.0f} ms, {after}, total {times['total']:.0f} ms",
            f"           {_tokens_line(receipt['tokens'])}",
        ]


def _tokens_line(tokens: dict[str, Any]) -> str:
    """The prompt tokens of a receipt by source, in words."""
    by_source = tokens["by_source"]
    sources = [f"{by_source[source]} {words}" for source, words in _SOURCES.items() if source in by_source]
    prompt = "unknown" if tokens["prompt"] is None else tokens["prompt"]
    line = f"{prompt} prompt tokens: {', '.join(sources) or 'sources unknown'}"
    missing = tokens.get("missing")
    if missing:
        line += f" (no report of {' and '.join(missing)})"
    if tokens.get("sum_ok") is False:
        line += " (the reports do not add up)"
    return line


class Asker:
    """Asks through the router, and the decode engine alone for comparison. An async context manager."""

    def __init__(self, router_url: str, decode_url: str, model: str) -> None:
        self._router_url = router_url
        self._model = model
        options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": REQUEST_TIMEOUT_S}
        self._router = openai.AsyncOpenAI(base_url=f"{router_url}/v1", **options)
        self._decode = openai.AsyncOpenAI(base_url=f"{decode_url}/v1", **options)
        self._num_salts = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._router.close()
        await self._decode.close()

    async def warm(self) -> None:
        """One short request, so that the engines exchange their NIXL metadata before anything is timed."""
        await self._router.completions.create(model=self._model, prompt="Hello", max_tokens=1, temperature=0)

    async def ask(self, question: Question) -> Answer:
        """Ask through the router.

        Raises:
            openai.OpenAIError: as the client raises it.
            StartError: the router keeps no receipt of the answer.
        """
        text, answer_id, headers = await self._create(self._router, question, {})
        receipt = await self._receipt(headers["x-antiphon-receipt"])
        return Answer(question, text, answer_id, receipt)

    async def ask_decode(self, answer: Answer) -> str:
        """The same question to the decode engine alone, which computes the prompt itself: the salt keeps it from using
        the blocks that were handed over."""
        self._num_salts += 1
        text, _, _ = await self._create(self._decode, answer.question, {"cache_salt": f"alone-{self._num_salts}"})
        return text

    async def _create(
        self, client: openai.AsyncOpenAI, question: Question, extra: dict[str, str]
    ) -> tuple[str, str, Any]:
        options: dict[str, Any] = {
            "model": self._model,
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "stream": question.stream,
            "stop": question.stop,
            "extra_body": extra,
        }
        if question.kind == "chat":
            options["messages"] = [{"role": "user", "content": question.text}]
            raw = await client.chat.completions.with_raw_response.create(**options)
        else:
            options["prompt"] = question.text
            raw = await client.completions.with_raw_response.create(**options)
        parsed: Any = raw.parse()
        if question.stream:
            pieces = [(event.id, _text(event.choices[0])) async for event in parsed if event.choices]
            return "".join(piece for _, piece in pieces), pieces[0][0], raw.headers
        return _text(parsed.choices[0]), parsed.id, raw.headers

    async def _receipt(self, receipt_id: str) -> dict[str, Any]:
        """The receipt, once it is closed and its token reports are there, a moment after the last byte; reports that do
        not come are not waited for longer than the router does."""
        deadline = asyncio.get_running_loop().time() + _RECEIPT_TIMEOUT_S
        while True:
            url = f"{self._router_url}/receipts/{receipt_id}?wait_s={_RECEIPT_WAIT_S:g}"
            status, body = await http_get(url, timeout_s=_RECEIPT_WAIT_S + _RECEIPT_TIMEOUT_S)
            receipt: dict[str, Any] = json.loads(body)
            if status == 200 and receipt["outcome"] is not None:
                return receipt
            if status != 200 or asyncio.get_running_loop().time() > deadline:
                raise StartError(f"the router has no closed receipt {receipt_id}: {body[:200]!r}")
            await asyncio.sleep(0.02)


def _text(choice: Any) -> str:
    """The text of a choice of any of the four answer shapes."""
    if hasattr(choice, "text"):
        return choice.text or ""
    message = choice.delta if hasattr(choice, "delta") else choice.message
    return message.content or ""
