"""What works in a router's knobs and surprises: knobs that do less than they say without another one."""

from __future__ import annotations

from collections.abc import Iterator

from antiphon.config.problems import Notice
from antiphon.config.router_spec import RouterSpec


def router_notices(router: RouterSpec) -> Iterator[Notice]:
    """Of the knobs of one router, as it is started."""
    is_kv_aware = "kv_aware" in router.policies
    if is_kv_aware and router.kv_events_port is None:
        text = "kv_aware acts as prefix_aware without kv_events_port, since no engine tells what it holds"
        yield Notice("router.policy", text)
    elif is_kv_aware and not router.tokenize_timeout_s:
        text = "0: kv_aware acts as prefix_aware, but for prompts that are token ids already"
        yield Notice("router.tokenize_timeout_s", text)
    if router.local_max_tokens and router.kv_events_port is None and not router.cache_servers:
        text = (
            "takes effect on short prompts only: without kv_events_port and cache_servers nothing is known to be held"
        )
        yield Notice("router.local_max_tokens", text)
    if not router.kv_bytes_per_token:
        cold = sorted(name for name in router.model_fields_set if name.startswith("cold_"))
        if cold:
            text = "without kv_bytes_per_token no request waits for its admission"
            yield Notice(f"router.{cold[0]}", text)
