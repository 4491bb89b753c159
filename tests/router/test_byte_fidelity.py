"""Two hundred request bodies as odd as JSON allows: the engines get the client's bytes, except for the keys that the
router owns. What must arrive is built from the parts that the body was made of, and never parsed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from tests.router.apis import ALL, CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, Spoken
from tests.router.failing import Script, Sight, decodes, fleet
from tests.router.scripted import Reply, Wire, connected

NUM_BODIES = 200
OWNED_BY_DECODE = frozenset(("kv_transfer_params",))
CHUNKS = {"max_tokens": 1, "min_tokens": 1, "stream": False}
ALWAYS: dict[str, dict[str, Any]] = {
    COMPLETIONS.path: CHUNKS,
    CHAT.path: CHUNKS,
    RESPONSES.path: {"max_output_tokens": 1, "stream": False, "store": False},
    MESSAGES.path: {"max_tokens": 1, "stream": False},
    GENERATE.path: {"stream": False},
}
ONE_IF_PRESENT = {each.path: frozenset(("max_completion_tokens", "n")) for each in (COMPLETIONS, CHAT)}
MAY_BE_NULL = {each.path: frozenset(("stream_options",)) for each in (COMPLETIONS, CHAT, GENERATE)}
NAMES = {each.path: each.path.rpartition("/")[2] for each in ALL}

FLOATS = (
    "0.7",
    "1.10",
    "0.30000000000000004",
    "1E+05",
    "2e00",
    "-0.0",
    "-0",
    "0.1e-7",
    "1e-400",
    "5e-324",
    "0.950",
    "-Infinity",
)
INTEGERS = ("9007199254740993", "18446744073709551616", "-170141183460469231731687303715884105728", "1" * 60)
STRINGS = (
    '"caf\\u00e9 café"',
    '"\\ud83d\\ude00 😀"',
    '"\\/ / \\\\ \\" \\n \\t \\b \\f"',
    '"\\u0000\\u001f"',
    '"\\ud800 \\\\ud800 \\udc00\\ud800"',
    '"שלום مرحبا 你好"',
    '"data: [DONE]\\n\\n"',
    '"\\"stream\\":true,\\"kv_transfer_params\\":{}"',
    '"}{][,:"',
    '""',
)
NESTED = (
    '{"stream" : true, "max_tokens": 7, "kv_transfer_params": {"a": [1.0, 1.00]}}',
    '[[], {}, [{"b": [null , true,false]}], -0.0]',
    '{"b": 1, "a": 2, "b": 1.50, "\\u0061": 3}',
    "[ 1.0,2.50 ,\t3e0\n]",
    '{"": {"": {"": []}}}',
)
UNKNOWN = ("x", "reasoning_content", "clé", "\\u006bv_x", "a\\/b", "Stream", "max_tokens ", "", "🗝")
LITERALS = ("null", "true", "false")
SPACES = ("", "", " ", "\n  ", "\t", "\r\n")


@dataclass(frozen=True)
class Made:
    """One body: its members as (key as it is written, key, text of the value), and the white space around them."""

    api: Spoken
    is_stream: bool
    members: tuple[tuple[str, str, str], ...]
    spaces: tuple[tuple[str, str, str, str], ...]
    head: str
    tail: str
    features: frozenset[str]
    nested: str
    """What the nested limits of a prefill are, as they are written."""

    @property
    def path(self) -> str:
        return self.api.path

    def text(self, replace: dict[str, str] | None = None) -> bytes:
        """The body with the values of some keys replaced wherever they stand, and the absent ones added at the end."""
        replace = replace or {}
        pieces = []
        for (written, key, value), (before, after_key, before_value, after) in zip(
            self.members, self.spaces, strict=True
        ):
            pieces.append(f"{before}{written}{after_key}:{before_value}{replace.get(key, value)}{after}")
        present = {key for _, key, _ in self.members}
        added = "".join(f',"{key}":{value}' for key, value in replace.items() if key not in present)
        return f"{self.head}{{{','.join(pieces)}{added}}}{self.tail}".encode()


def made(seed: int) -> Made:
    """Body number ``seed``: all of them together have every feature many times."""
    chance = Random(seed)
    api, is_stream = ALL[seed % 5], seed // 5 % 2 == 0
    prompt, nested = chance.choice(STRINGS), ""
    if api is COMPLETIONS:
        members = [("prompt", prompt if chance.random() < 0.7 else "[1,2 , 3]")]
    elif api is RESPONSES:
        members = [("input", prompt)]
    elif api is GENERATE:
        limit = chance.choice(("5", "null", " 16 "))
        odd = f'"temperature" : {chance.choice(FLOATS)},"x":{chance.choice(NESTED + STRINGS)}, "seed":{INTEGERS[0]}'
        nested = f'{{ "max_tokens":{"1" if limit != " 16 " else " 1 "},{odd},"min_tokens":1}}'
        members = [("token_ids", "[1,2 , 3]"), ("sampling_params", f'{{ "max_tokens":{limit},{odd}}}')]
    else:
        extra = f', "name": {chance.choice(STRINGS)}, "x_unknown": {chance.choice(NESTED)}'
        members = [("messages", f'[{{"role": "user" , "content":{prompt}{extra}}}]')]
    if is_stream or chance.random() < 0.5:
        members.append(("stream", "true" if is_stream else "false"))
    if is_stream and chance.random() < 0.5:
        members.append(("stream_options", '{ "include_usage":true}'))
    features = {NAMES[api.path], "stream" if is_stream else "whole"}
    for feature, key, values, share in (
        ("float", "temperature", FLOATS, 0.6),
        ("float", "top_p", FLOATS, 0.4),
        ("integer", "seed", INTEGERS, 0.5),
        ("unicode", "user", STRINGS, 0.5),
        ("nested", "logit_bias", NESTED, 0.4),
        ("owned", "max_tokens", ("5", "16", "null"), 0.6),
        ("owned", "max_output_tokens", ("5", "null"), 0.4),
        ("owned", "store", ("true", "false"), 0.2),
        ("owned", "max_completion_tokens", ("5", "007".lstrip("0")), 0.3),
        ("owned", "n", ("1",), 0.2),
        ("owned", "min_tokens", ("0", "2"), 0.2),
        ("null", "kv_transfer_params", ("null",), 0.2),
    ):
        if chance.random() < share:
            members.append((key, chance.choice(values)))
            features.add(feature)
    for _ in range(chance.randrange(4)):
        members.append((chance.choice(UNKNOWN), chance.choice(FLOATS + INTEGERS + STRINGS + NESTED + LITERALS)))
        features.add("unknown")
    if chance.random() < 0.4:  # a key twice, whether it is ours or not
        key, value = chance.choice([each for each in members if each[0] != "kv_transfer_params"])
        other = chance.choice(FLOATS) if key in ("temperature", "top_p") else value
        members.append((key, other))
        features.add("duplicate")
    chance.shuffle(members)
    written = [(escaped(key, chance), json.loads(f'"{key}"'), value) for key, value in members]
    if any("\\" in each for each, _, _ in written):
        features.add("escape")
    spaces = tuple(tuple(chance.choice(SPACES) for _ in range(4)) for _ in members)
    return Made(
        api,
        is_stream,
        tuple(written),
        spaces,
        chance.choice(SPACES),
        chance.choice(SPACES),
        frozenset(features),
        nested,
    )


def escaped(key: str, chance: Random) -> str:
    """A key in quotes, at times with its first letter as an escape: it stays the same key."""
    if key.isascii() and key[:1].isalpha() and chance.random() < 0.1:
        return f'"\\u{ord(key[0]):04x}{key[1:]}"'
    return f'"{key}"'


def values_of(body: bytes) -> list[tuple[str, Any]]:
    """The top-level members of a body as they arrived: for the values of our own keys only."""
    pairs: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=lambda found: found)
    return pairs


def replaced_by(sight: Sight, owned: frozenset[str]) -> dict[str, str]:
    """Our own keys in what an engine got, and what they hold."""
    pairs = [(key, as_text(value)) for key, value in values_of(sight.body) if key in owned]
    return dict(pairs)


def as_text(value: Any) -> str:
    return json.dumps(dict(value) if isinstance(value, list) and value else value, separators=(",", ":"))


def check_prefill(body: Made, sight: Sight) -> None:
    always, if_present = ALWAYS[body.path], ONE_IF_PRESENT.get(body.path, frozenset())
    may_be_null = MAY_BE_NULL.get(body.path, frozenset())
    ours = replaced_by(sight, OWNED_BY_DECODE | if_present | may_be_null | frozenset(always))
    present = {key for _, key, _ in body.members}
    for key, value in always.items():
        assert json.loads(ours[key]) == value
    for key in if_present & present:
        assert ours[key] == "1"
    if body.is_stream:
        for key in may_be_null & present:
            assert ours[key] == "null"  # without a stream there can be none
    params = json.loads(ours["kv_transfer_params"])
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert set(ours) <= present | set(always) | OWNED_BY_DECODE
    check_bytes(sight.body, body.text(ours | ({"sampling_params": body.nested} if body.nested else {})))


def check_decode(body: Made, sight: Sight, prefill: Sight) -> None:
    ours = replaced_by(sight, OWNED_BY_DECODE)
    params = sight.json["kv_transfer_params"]
    assert params["remote_request_id"].endswith(prefill.request_id)
    # The handle is passed on as the prefill engine wrote it, white space and all.
    assert json.loads(ours["kv_transfer_params"]) == params
    check_bytes(sight.body, body.text({"kv_transfer_params": json.dumps(params)}))


def check_bytes(got: bytes, wanted: bytes) -> None:
    """White space after the object is nobody's."""
    assert got.rstrip() == wanted.rstrip()


def answers_as(body: Made) -> Script:
    """An engine that answers in the API of a body."""

    async def script(_: Sight, wire: Wire) -> None:
        if body.is_stream:
            wire.begin()
            wire.piece(body.api.stream)
            wire.end()
        else:
            wire.whole(b"{}")

    return script


async def send(router: Any, body: Made) -> Reply:
    async with connected(router) as client:
        data = body.text()
        head = f"POST {body.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        client.writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        return await client.reply()


def test_the_bodies_are_as_odd_as_they_are_meant_to_be() -> None:
    bodies = [made(seed) for seed in range(NUM_BODIES)]
    assert len({body.text() for body in bodies}) == NUM_BODIES
    counts = Counter(feature for body in bodies for feature in body.features)
    wanted = " ".join(NAMES.values()) + " stream whole float integer unicode nested owned null unknown duplicate escape"
    assert set(counts) == set(wanted.split())
    assert all(number >= 20 for number in counts.values()), counts
    for body in bodies:
        values = {key: json.loads(value) for _, key, value in body.members}
        assert json.loads(body.text()) == values


async def test_two_hundred_bodies_reach_both_engines_byte_for_byte() -> None:
    async with fleet(1, 1) as engines:
        (p,), (d,) = engines.prefill, engines.decode
        for seed in range(NUM_BODIES):
            body = made(seed)
            d.script = answers_as(body)
            reply = await send(engines.router, body)
            assert reply.status == 200, (seed, reply.body)
            assert len(p.sights) == len(d.sights) == seed + 1
            assert p.sights[-1].path == d.sights[-1].path == body.path
            check_prefill(body, p.sights[-1])
            check_decode(body, d.sights[-1], p.sights[-1])
            is_event_stream = reply.headers["content-type"].startswith("text/event-stream")
            assert is_event_stream is body.is_stream
            assert reply.body == (body.api.stream if body.is_stream else b"{}")


async def test_bodies_that_one_engine_serves_alone_are_not_touched_at_all() -> None:
    async with fleet(0, 1) as engines:
        for seed in range(0, NUM_BODIES, 2):
            body = made(seed)
            engines.decode[0].script = answers_as(body)
            assert (await send(engines.router, body)).status == 200
            assert engines.decode[0].sights[-1].body == body.text()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_answer_bytes_reach_the_client_untouched(stream: bool) -> None:
    """Odd numbers, escapes and keys of the engine's answer, as they were written."""
    answer = '{"id":"d" ,"choices":[{"index":0,"text":"caf\\u00e9 \\/ é","logprobs":-0.30000000000000004e0}],"x":1.10}'

    async def answers(sight: Sight, wire: Wire) -> None:
        if not stream:
            wire.whole(answer.encode())
            return
        wire.begin()
        for piece in (f"data: {answer}\n\n".encode(), b": a comment\n\n", b"data: [DONE]\n\n"):
            wire.piece(piece)
        wire.end()

    async with fleet(1, 1) as engines:
        assert engines.decode[0].script is decodes
        engines.decode[0].script = answers
        reply = await engines.ask(stream=stream)
        wanted = f"data: {answer}\n\n: a comment\n\ndata: [DONE]\n\n" if stream else answer
        assert reply.body == wanted.encode()
