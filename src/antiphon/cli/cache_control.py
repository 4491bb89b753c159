"""The verbs of ``antiphon cache`` that change something: ``pin``, ``unpin``, ``quota``; ``cache_clear`` has ``clear``.

A prefix is named by the key of its last chunk, or by its tokens: then the keys are computed here, under every namespace
that the servers have of the tenant and model. A server has no tokenizer; an engine has, or a router that asks one.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import click

from antiphon.cli.addresses import http_host_port
from antiphon.cli.cache_clear import clear, count_text
from antiphon.cli.cache_client import (
    AdminClient,
    NotThere,
    ServerRefuses,
    admin_options,
    all_of,
    change_each,
    format_bytes,
    run,
    targets,
)
from antiphon.cli.shown import printable, table_lines
from antiphon.config.cache_server_spec import parse_quota
from antiphon.config.key_files import read_key
from antiphon.core.chunks import ChunkKey, chunk_keys
from antiphon.core.errors import ConfigError, ProtocolError
from antiphon.core.namespace import NamespaceDigest
from antiphon.core.tenants import NO_TENANT, tenant_of
from antiphon.protocol.tokenizing import CHAT, COMPLETIONS, decode_tokens, tokenize_body

KEY_DIGITS: Final = 64
KEY_DIGITS_MIN: Final = 8
KEYS_SENT_MAX: Final = 900
"""Of one pin; the chunks before them follow from the first. A server takes bodies of 64 KiB."""
KEYS_BEFORE_MAX: Final = 16_384
"""Chunks before those of one pin that a server follows back: more than any prompt has."""
FILE_MAX_BYTES: Final = 64 << 20
TOKENIZE_TIMEOUT_S: Final = 30.0
TENANTS_SHOWN: Final = 50


# ---- pin and unpin ---------------------------------------------------------------------------------------------------


@click.command()
@admin_options
@click.argument("key", required=False)
@click.option(
    "--tenant",
    help="Whose prompt it is: a cache_salt (default: that of --request-file, else default). Needed where the router "
    "has a tenants file: it stamps the tenant's salt from there into every request, whatever the client sent.",
)
@click.option("--model", help="As its engine is called; needed where several models are there.")
@click.option(
    "--tokens-file", type=click.Path(dir_okay=False, path_type=Path), help="JSON list of the prompt's token ids."
)
@click.option(
    "--request-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON body of a request that begins with the prompt: with prompt, or with messages.",
)
@click.option("--tokenizer-url", help="Router or engine that is asked for the tokens of --request-file.")
@click.option(
    "--tokenizer-key-file", help="File with the key that --tokenizer-url takes: an API key, or a tenant's key."
)
@click.option("--ttl-s", type=click.FloatRange(0, min_open=True), help="For so many seconds (default: until unpin).")
def pin(urls: tuple[str, ...], is_json: bool, key: str | None, ttl_s: float | None, **named: Any) -> None:
    """Keep a prefix in memory: its chunks are not evicted, whatever else comes.

    Name it by KEY, the last chunk as list --chunks shows it (all chunks before it in its prompt are meant), or by its
    tokens. What is in memory is pinned; what is not is said, and is not pinned when it comes: send the prompt first.
    A pin ends with unpin, its time, clear --pinned, or the server.
    """

    def act() -> int:
        if sum(value is not None for value in (key, named["tokens_file"], named["request_file"])) != 1:
            raise ConfigError("say what to pin, in one way: KEY, --tokens-file or --request-file")
        if named["request_file"] is None and named["tokenizer_url"] is not None:
            raise ConfigError("--tokenizer-url is asked for the tokens of --request-file")
        if named["tokenizer_url"] is None and named["tokenizer_key_file"] is not None:
            raise ConfigError("--tokenizer-key-file goes with --tokenizer-url")
        prefix = None if key is not None else _prefix_of(**named)

        def change(server: AdminClient) -> None:
            if key is not None:
                chains = [full_key(server, key)]
            else:
                assert prefix is not None
                chains = _chains(server, *prefix)
            for answer in _pinned(server, chains, ttl_s):
                click.echo(json.dumps(answer, indent=2) if is_json else pinned_line(server.url, answer))

        return change_each(targets(urls), change)

    run(act)


def _prefix_of(
    tenant: str | None,
    model: str | None,
    tokens_file: Path | None,
    request_file: Path | None,
    tokenizer_url: str | None,
    tokenizer_key_file: str | None,
) -> tuple[str, str | None, list[int]]:
    """Tenant, model and tokens of what is to be pinned."""
    if tokens_file is not None:
        tokens = _json_in(tokens_file)
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ConfigError(f"--tokens-file {tokens_file}: it must be a JSON list of token ids")
        return tenant or NO_TENANT, model, tokens
    assert request_file is not None
    body = _json_in(request_file)
    if not isinstance(body, dict):
        raise ConfigError(f"--request-file {request_file}: it must be a JSON object, as a client sends it")
    salt = body.get("cache_salt")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        tokens = prompt
    elif tokenizer_url is None:
        raise ConfigError(
            f"--request-file {request_file}: its prompt is text, and a cache server has no tokenizer",
            remedy="name a router or an engine with --tokenizer-url",
        )
    else:
        key = None if tokenizer_key_file is None else read_key(tokenizer_key_file, "--tokenizer-key-file")
        tokens = tokens_by(tokenizer_url, body, request_file, key)
    return tenant or tenant_of(salt if isinstance(salt, str) else None), model, tokens


def _json_in(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_MAX_BYTES + 1)
        if len(data) > FILE_MAX_BYTES:
            raise ConfigError(f"{path}: it is larger than {FILE_MAX_BYTES} bytes")
        return json.loads(data)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: it is not JSON") from None


def tokens_by(url: str, body: dict[str, Any], path: Path, key: bytes | None = None) -> list[int]:
    """The tokens that a router or engine makes of a request's prompt; ``key`` is shown to it.

    Raises:
        ConfigError: the request has no prompt that ``/tokenize`` takes, or ``url`` is none.
        ProtocolError: what answers there makes no tokens of it.
    """
    values = {name: json.dumps(value).encode() for name, value in body.items()}
    question = tokenize_body(CHAT if "messages" in body else COMPLETIONS, values)
    if question is None:
        raise ConfigError(f"--request-file {path}: no prompt or messages of text that can be tokenized alone")
    host, port = http_host_port("--tokenizer-url", url)
    headers: dict[str, str | bytes] = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = b"Bearer " + key
    connection = http.client.HTTPConnection(host, port, timeout=TOKENIZE_TIMEOUT_S)
    try:
        connection.request("POST", "/tokenize", question, headers)
        response = connection.getresponse()
        data = response.read(FILE_MAX_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise ProtocolError(
            f"{url} does not tokenize: {error}", remedy="name a router or an engine with --tokenizer-url"
        ) from error
    finally:
        connection.close()
    if response.status != HTTPStatus.OK:
        said = printable(data[:300].decode(errors="replace"))
        wants_key = response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        raise ProtocolError(
            f"{url} does not tokenize: status {response.status}: {said}",
            remedy="name a file with a key that it takes with --tokenizer-key-file" if wants_key else None,
        )
    return list(decode_tokens(data))


def full_key(server: AdminClient, text: str) -> list[ChunkKey]:
    """The key that begins with ``text``; the server is asked for all keys where it is not whole.

    Raises:
        ConfigError: it is no key, or two keys begin so.
        NotThere: none does.
    """
    text = text.lower()
    if not KEY_DIGITS_MIN <= len(text) <= KEY_DIGITS or set(text) - set("0123456789abcdef"):
        raise ConfigError(f"KEY {text}: not a chunk's key, {KEY_DIGITS_MIN} to {KEY_DIGITS} hex digits")
    if len(text) == KEY_DIGITS:
        return [ChunkKey(bytes.fromhex(text))]
    found: set[str] = set()
    after: int | None = 0
    while after is not None:
        page = server.get("/chunks", after=after)
        joined = [group["keys"] for group in page["chunks"]]
        keys = (each[start : start + KEY_DIGITS] for each in joined for start in range(0, len(each), KEY_DIGITS))
        found.update(key for key in keys if key.startswith(text))
        after = page["after"]
    return [ChunkKey(bytes.fromhex(_only(server, found, text)))]


def _only(server: AdminClient, found: set[str], text: str) -> str:
    if len(found) > 1:
        raise ConfigError(f"{server.url}: {len(found)} keys begin with {text}", remedy="write more of its digits")
    if not found:
        raise NotThere(f"{server.url}: no key begins with {text}")
    return found.pop()


def _chains(server: AdminClient, tenant: str, model: str | None, tokens: list[int]) -> list[list[ChunkKey]]:
    """The chunk keys of ``tokens``, under each namespace that the server has of the tenant and model."""
    names: dict[str, Any] = {"tenant": tenant} | ({} if model is None else {"model": model})
    answer = server.get("/namespaces", limit=1_000, **names)
    chunk_size = answer["chunk_size_tokens"]
    if len(tokens) < chunk_size:
        raise ConfigError(f"{len(tokens)} tokens are less than a chunk, which has {chunk_size}")
    models = sorted({each["model"] for each in answer["namespaces"]})
    if len(models) > 1:
        raise ConfigError(
            f"{server.url} has chunks of {', '.join(map(printable, models))}", remedy="say which with --model"
        )
    try:
        return [
            chunk_keys(NamespaceDigest(bytes.fromhex(each["namespace"])), tokens, chunk_size)
            for each in answer["namespaces"]
        ]
    except ValueError as error:
        raise ConfigError(f"these are no token ids: {error}") from error


def _pinned(server: AdminClient, chains: list[list[ChunkKey]], ttl_s: float | None) -> Iterator[dict[str, Any]]:
    """The server's answers for the chains of which it has something. A refused chain does not keep others from it.

    Raises:
        NotThere: it has nothing of any.
        ServerRefuses: it refused one; after the answers.
    """
    lacking: NotThere | None = None
    refused: list[ServerRefuses] = []
    num_pinned = 0
    for chain in chains:
        try:
            answer = pin_chain(server, chain, ttl_s)
        except NotThere as error:
            lacking = error
        except ServerRefuses as error:
            refused.append(error)
        else:
            num_pinned += 1
            yield answer
    if refused:
        raise all_of(refused)
    if not num_pinned:
        raise lacking or NotThere(f"{server.url}: it has no namespace of that tenant and model")


def pin_chain(server: AdminClient, chain: list[ChunkKey], ttl_s: float | None) -> dict[str, Any]:
    """Pins what the server has of ``chain`` in one piece from its start; its answer, counted against all of ``chain``.

    The keys of a long chain go by stretches of ``KEYS_SENT_MAX``, the last one first. A stretch whose first chunk is
    there stands for all before it, and where the one after it was not there, what is there ends in it. A question that
    finds nothing changes nothing, so that one pin is made.

    Raises:
        NotThere: not even its first chunk is there.
    """
    start = min(max(0, len(chain) - KEYS_SENT_MAX), KEYS_BEFORE_MAX)
    while True:
        sent = chain[start : start + KEYS_SENT_MAX]
        try:
            answer = server.post("/pin", {"keys": b"".join(sent).hex(), "ttl_s": ttl_s})
        except NotThere:
            if not start:
                raise
            start = max(0, start - KEYS_SENT_MAX)
        else:
            return answer | {"num_named": max(answer["num_named"], len(chain))}


def pinned_line(url: str, answer: dict[str, Any]) -> str:
    """What was pinned, for people."""
    whole = answer["num_chunks"] == answer["num_named"]
    named = count_text(answer["num_named"], "chunk")
    of = f"all {named}" if whole else f"{answer['num_chunks']} of {named}"
    rest = "" if whole else "; the rest is not in memory, and not pinned when it comes"
    kept, most = format_bytes(answer["pinned_bytes"]), format_bytes(answer["pinned_bytes_max"])
    return (
        f"{url}: {of} pinned, {format_bytes(answer['num_bytes'])}, up to {answer['key'][:16]}{rest} "
        f"({kept} of at most {most} pinned)"
    )


@click.command()
@admin_options
@click.argument("key", required=False)
@click.option("--all", "is_all", is_flag=True, help="All pins.")
def unpin(urls: tuple[str, ...], is_json: bool, key: str | None, is_all: bool) -> None:
    """End the pin up to the chunk KEY, as list shows it, or all. Its chunks may be evicted again."""

    def act() -> int:
        if (key is None) != is_all:
            raise ConfigError("say which pin: KEY, or --all")

        def change(server: AdminClient) -> None:
            order: dict[str, object] = {}
            if key is not None:
                text = key.lower()
                found = {each["key"] for each in server.get("/pins")["pins"] if each["key"].startswith(text)}
                order = {"key": _only(server, found, text)}
            answer = server.post("/unpin", order)
            left = format_bytes(answer["pinned_bytes"])
            line = f"{server.url}: {count_text(answer['num_pins'], 'pin')} ended, {left} still pinned"
            click.echo(json.dumps(answer, indent=2) if is_json else line)

        return change_each(targets(urls), change)

    run(act)


# ---- quota -----------------------------------------------------------------------------------------------------------


@click.command()
@admin_options
@click.argument("quotas", nargs=-1, metavar="[TENANT=GB | TENANT=none]...")
def quota(urls: tuple[str, ...], is_json: bool, quotas: tuple[str, ...]) -> None:
    """Show what each tenant occupies and may occupy; or give a tenant another quota, until the server ends.

    A tenant is a cache_salt, or default. With none it has no quota of its own any more. Where a tenant holds more than
    its new quota, its oldest chunks go at once, but those that are leased or pinned.
    """

    def act() -> int:
        orders = [_order(text) for text in quotas]

        def change(server: AdminClient) -> None:
            if not orders:
                answer = server.get("/quota")
                click.echo(json.dumps(answer, indent=2) if is_json else "\n".join(quota_lines(server.url, answer)))
            refused: list[ServerRefuses] = []
            for order in orders:
                try:
                    answer, line = _ordered(server, order)
                except ServerRefuses as error:
                    refused.append(error)
                else:
                    click.echo(json.dumps(answer, indent=2) if is_json else line)
            if refused:
                raise all_of(refused)

        return change_each(targets(urls), change)

    run(act)


def _ordered(server: AdminClient, order: dict[str, object]) -> tuple[dict[str, Any], str]:
    """What became of one order: the answer, and a line for people. What is so already counts as done."""
    tenant = str(order["tenant"])
    try:
        answer = server.put("/quota", order)
    except NotThere:
        if order["quota_bytes"] is not None:
            raise
        line = f"{server.url}: {printable(tenant)} had no quota of its own, nothing was taken away"
        return {"tenant": tenant, "is_own": False, "num_evicted": 0}, line
    except ServerRefuses as error:
        raise ServerRefuses(f"{printable(tenant)}: {error.message}") from error
    return answer, set_line(server.url, answer)


def _order(text: str) -> dict[str, object]:
    tenant, _, size = text.rpartition("=")
    if tenant and size.lower() == "none":
        return {"tenant": tenant, "quota_bytes": None}
    try:
        tenant, quota_bytes = parse_quota(text)
    except ValueError as error:
        raise ConfigError(f"{error}, or TENANT=none") from None
    return {"tenant": tenant, "quota_bytes": quota_bytes}


def set_line(url: str, answer: dict[str, Any]) -> str:
    """A quota that was set, for people."""
    quota_bytes, used_bytes = answer["quota_bytes"], answer["used_bytes"]
    may = "no quota" if quota_bytes is None else f"a quota of {format_bytes(quota_bytes)}"
    gone = f", {count_text(answer['num_evicted'], 'chunk')} evicted for it" if answer["num_evicted"] else ""
    over = "" if quota_bytes is None or used_bytes <= quota_bytes else "; the rest is in use or pinned"
    return f"{url}: {printable(answer['tenant'])} has {may} and holds {format_bytes(used_bytes)}{gone}{over}"


def quota_lines(url: str, answer: dict[str, Any]) -> list[str]:
    """All quotas, for people."""
    default = answer["default_quota_bytes"]
    head = "no quota" if default is None else format_bytes(default)
    shown = answer["quotas"][:TENANTS_SHOWN]
    lines = [f"{url}: tenants without a quota of their own may occupy: {head}"]
    if shown:
        rows = [(printable(each["tenant"]), format_bytes(each["used_bytes"]), _quota_text(each)) for each in shown]
        lines += table_lines([("tenant", "used", "quota"), *rows])
    num_left_out = answer["num_left_out"] + len(answer["quotas"]) - len(shown)
    return lines + ([f"and {num_left_out} more tenants (--json shows up to 1000)"] if num_left_out else [])


def _quota_text(row: dict[str, Any]) -> str:
    if row["quota_bytes"] is None:
        return "-"
    return format_bytes(row["quota_bytes"]) + ("" if row["is_own"] else " (default)")


VERBS: Final[tuple[click.Command, ...]] = (clear, pin, unpin, quota)
