"""The flags of vllm-router that are not the router's own, and what becomes of each: one table.

A flag that means the same as one of ours is replaced by it; one whose absence changes nothing that a client sees is
left out; any other is refused with the name of what to use. Each says so in a line; ``docs/routing.md`` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import click

from antiphon.config.router_spec import Policy

Fate = Literal["replaced", "ignored", "refused"]
Values = Literal["none", "one", "many"]

_NO_RETRIES = ("--retry-share", "0", "--retry-floor", "0")
_NONE: Mapping[str, tuple[str, ...]] = {}


@dataclass(frozen=True)
class Flag:
    """One flag of vllm-router.

    Args:
        name: with its dashes.
        fate: what becomes of it.
        note: of one that is ignored or refused, why, and what to use; of a replaced one, how it differs, if it does.
        ours: our flags that get its value; for a flag without a value, the whole words that replace it.
        values: how many values follow it.
        special: values for which it is replaced by these words instead, none where it says what is so anyway.
    """

    name: str
    fate: Fate
    note: str = ""
    ours: tuple[str, ...] = ()
    values: Values = "one"
    special: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _NONE)


_BY_BUDGET = "retries are bounded by --retry-share and --retry-floor"
_AT_ONCE = "another engine is tried at once; there is no wait to set"
_OF_CACHE_AWARE = "it belongs to the policy cache_aware, for which prefix_aware stands, and that has nothing to set"
_OF_KV_AWARE = "kv_aware weighs tokens still to be computed alone, and has no such setting"
_OF_EVENTS = "engines connect to --kv-events-port and say in their topic who they are: docs/kv-routing.md"
_NO_DISCOVERY = "engines are named with --prefill and --decode, or added at run time with POST /endpoints"
_NO_PROGRAMS = "there is no scheduling of agents' programs"
_NO_WASM = "there is no middleware: put a proxy before the router"
_NO_WAIT = "the router starts at once; engines that are not up are found by their health checks"
_NO_QUEUE = (
    "engines queue requests, and --first-token-timeout-s ends the wait; in the router only cold prompts wait "
    "(--cold-queue-max) and those whose tenant is at a limit (--tenants-file)"
)

FLAGS: tuple[Flag, ...] = (
    Flag("--max-payload-size", "replaced", ours=("--body-max-bytes",)),
    Flag(
        "--request-timeout-secs",
        "replaced",
        "for each stage; a stream that goes on is not cut",
        ("--prefill-timeout-s", "--first-token-timeout-s"),
    ),
    Flag("--health-failure-threshold", "replaced", ours=("--health-failures-max",)),
    Flag("--health-check-timeout-secs", "replaced", ours=("--health-timeout-s",)),
    Flag("--health-check-interval-secs", "replaced", ours=("--health-interval-s",)),
    Flag("--cb-failure-threshold", "replaced", ours=("--request-failures-max",)),
    Flag("--cb-timeout-duration-secs", "replaced", "the longest wait; the first is shorter", ("--probe-wait-max-s",)),
    Flag("--disable-retries", "replaced", ours=_NO_RETRIES, values="none"),
    Flag(
        "--max-concurrent-requests",
        "replaced",
        "client connections at once, of which each has one request at a time",
        ("--connections-max",),
    ),
    Flag(
        "--retry-max-retries",
        "ignored",
        f"{_BY_BUDGET}, and a request is prefilled three times at most",
        special={"0": _NO_RETRIES},
    ),
    Flag("--retry-initial-backoff-ms", "ignored", _AT_ONCE),
    Flag("--retry-max-backoff-ms", "ignored", _AT_ONCE),
    Flag("--retry-backoff-multiplier", "ignored", _AT_ONCE),
    Flag("--retry-jitter-factor", "ignored", _AT_ONCE),
    Flag("--cb-success-threshold", "ignored", "the first request that succeeds closes the breaker"),
    Flag("--cb-window-duration-secs", "ignored", "failures in a row count, and half of the last 20"),
    Flag(
        "--disable-circuit-breaker",
        "ignored",
        "the breaker never empties a pool: --request-failures-max 100 makes it patient",
        values="none",
    ),
    Flag("--health-success-threshold", "ignored", "two health checks bring an engine back"),
    Flag(
        "--health-check-endpoint",
        "refused",
        "engines are asked at /health, as vLLM answers",
        special={"/health": ()},
    ),
    Flag("--queue-size", "ignored", _NO_QUEUE),
    Flag("--queue-timeout-secs", "ignored", _NO_QUEUE),
    Flag(
        "--rate-limit-tokens-per-second",
        "refused",
        "rates are limited by tenant, with --tenants-file; --connections-max limits requests at once",
    ),
    Flag("--worker-startup-timeout-secs", "ignored", _NO_WAIT),
    Flag("--worker-startup-check-interval", "ignored", _NO_WAIT),
    Flag("--log-dir", "ignored", "logs go to standard error: redirect them"),
    Flag("--prometheus-port", "ignored", "metrics are at /metrics of the router's own --port"),
    Flag("--prometheus-host", "ignored", "metrics are at /metrics of the router's own --host"),
    Flag("--request-id-headers", "ignored", "x-request-id is read, and no other", values="many"),
    Flag("--cache-threshold", "ignored", _OF_CACHE_AWARE),
    Flag("--balance-abs-threshold", "ignored", _OF_CACHE_AWARE),
    Flag("--balance-rel-threshold", "ignored", _OF_CACHE_AWARE),
    Flag("--eviction-interval-secs", "ignored", _OF_CACHE_AWARE),
    Flag("--max-tree-size", "ignored", _OF_CACHE_AWARE),
    Flag("--router-temperature", "ignored", _OF_KV_AWARE),
    Flag("--kv-penalty-host", "ignored", _OF_KV_AWARE),
    Flag("--kv-penalty-external", "ignored", _OF_KV_AWARE),
    Flag("--kv-penalty-disk", "ignored", _OF_KV_AWARE),
    Flag("--kv-aware-session-affinity-ttl-secs", "ignored", _OF_KV_AWARE),
    Flag("--kv-event-block-size", "ignored", _OF_EVENTS),
    Flag("--kv-event-model", "ignored", _OF_EVENTS),
    Flag("--kv-event-source", "ignored", _OF_EVENTS),
    Flag("--kv-event-replay-source", "ignored", _OF_EVENTS),
    Flag("--pd-kv-events", "ignored", _OF_EVENTS),
    Flag(
        "--kv-connector",
        "refused",
        "the hand-over is NIXL's: start engines with NixlConnector",
        special={"nixl": ()},
    ),
    Flag(
        "--intra-node-data-parallel-size",
        "refused",
        "each data-parallel rank is an engine with its own URL: name each",
        special={"1": ()},
    ),
    Flag(
        "--worker-urls",
        "refused",
        "name engines with --decode, and with --prefill those that prefill; without these, a decode engine does both",
        values="many",
    ),
    Flag("--api-key", "refused", "command lines are visible to all: write keys into a file for --api-key-file"),
    Flag("--cors-allowed-origins", "refused", "the router sends no CORS fields: put a proxy before it", values="many"),
    Flag("--enable-igw", "refused", "a router serves one model: run one for each", values="none"),
    Flag("--mini-lb", "refused", "leave it out: this is the router", values="none"),
    Flag("--vllm-discovery-address", "refused", _NO_DISCOVERY),
    Flag("--service-discovery", "refused", _NO_DISCOVERY, values="none"),
    Flag("--selector", "refused", _NO_DISCOVERY, values="many"),
    Flag("--service-discovery-port", "refused", _NO_DISCOVERY),
    Flag("--service-discovery-namespace", "refused", _NO_DISCOVERY),
    Flag("--prefill-selector", "refused", _NO_DISCOVERY, values="many"),
    Flag("--decode-selector", "refused", _NO_DISCOVERY, values="many"),
    Flag("--enable-program-scheduling", "refused", _NO_PROGRAMS, values="none"),
    Flag("--program-scheduling-config-json", "refused", _NO_PROGRAMS),
    Flag("--wasm-middleware", "refused", _NO_WASM),
    Flag("--wasm-middleware-sha256", "refused", _NO_WASM),
    Flag("--wasm-middleware-route", "refused", _NO_WASM),
)

SAME_POLICIES: Mapping[str, tuple[Policy, str]] = {
    "cache_aware": ("prefix_aware", "by what each engine was sent before, and by its load"),
}
"""Policies of vllm-router that ours stand for, and how these go."""

POLICIES = {
    "sticky_least_loaded": "consistent_hash keeps sessions on one engine, and yields to load",
}
"""Policies of vllm-router for which none of ours stands, and what comes nearest."""

_BY_NAME = {flag.name: flag for flag in FLAGS}
_POLICY_FLAGS = frozenset(("--policy", "--prefill-policy", "--decode-policy"))


@dataclass(frozen=True)
class Translation:
    """A command line in our flags, and what there is to say about it."""

    args: list[str]
    notices: list[str]


def translate(args: Sequence[str]) -> Translation:
    """A command line of vllm-router, or of ours, in our flags.

    Raises:
        click.UsageError: it has a flag that is refused.
    """
    done = Translation([], [])
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        flag = _BY_NAME.get(name)
        if flag is not None:
            _translate_one(flag, _values_of(flag, has_value, value, rest), done)
            continue
        if name in _POLICY_FLAGS:
            _translate_policy(name, value if has_value else rest.pop(0) if rest else None, done)
            continue
        done.args.append(word)
        if name == "--prefill" and not has_value and rest:
            done.args.append(rest.pop(0))
            if rest and (rest[0] == "none" or rest[0].isdigit()):
                done.notices.append(f"--prefill URL {rest.pop(0)}: the bootstrap port is ignored: NIXL needs none")
    return done


def _values_of(flag: Flag, has_value: str, value: str, rest: list[str]) -> list[str]:
    """Takes the values of a flag off the ``rest`` of the command line."""
    if has_value:
        return [value]
    values: list[str] = []
    if flag.values == "one":
        if not rest:
            raise click.UsageError(f"Option '{flag.name}' requires an argument.")
        values.append(rest.pop(0))
    while flag.values == "many" and rest and not rest[0].startswith("-"):
        values.append(rest.pop(0))
    return values


def _translate_one(flag: Flag, values: list[str], done: Translation) -> None:
    shown = " ".join([flag.name, *values])
    special = flag.special.get(values[0]) if values else None
    if special is not None:
        done.args.extend(special)
        done.notices.append(f"{shown} became {' '.join(special)}" if special else f"{shown} is so anyway")
    elif flag.fate == "refused":
        raise click.UsageError(f"{flag.name} of vllm-router is not taken here: {flag.note}")
    elif flag.fate == "ignored":
        done.notices.append(f"{shown} is ignored: {flag.note}")
    else:
        words = list(flag.ours) if flag.values == "none" else [part for ours in flag.ours for part in (ours, values[0])]
        done.args.extend(words)
        done.notices.append(f"{shown} became {' '.join(words)}" + (f": {flag.note}" if flag.note else ""))


def _translate_policy(flag: str, value: str | None, done: Translation) -> None:
    done.args.append(flag)
    if value is None:
        return
    policy = value.lower().replace("-", "_")
    if policy in POLICIES:
        raise click.UsageError(f"{flag} {policy} of vllm-router is not one of ours: {POLICIES[policy]}")
    if policy in SAME_POLICIES:
        value, how = SAME_POLICIES[policy]
        done.notices.append(f"{flag} {policy} became {flag} {value}: {how}")
    done.args.append(value)


def flag_table() -> str:
    """The table as Markdown."""
    lines = ["| flag of vllm-router | here |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{flag.name}` | {_row(flag)} |" for flag in FLAGS)])


def _row(flag: Flag) -> str:
    if flag.fate == "replaced":
        ours = f"`{' '.join(flag.ours)}`" if flag.values == "none" else " and ".join(f"`{name}`" for name in flag.ours)
        return f"{ours}: {flag.note}" if flag.note else ours
    cases = [
        f"`{value}` is `{' '.join(words)}`; any other is" if words else f"`{value}` is so anyway; any other is"
        for value, words in flag.special.items()
    ]
    return f"{' '.join(cases)} {flag.fate}: {flag.note}".strip()
