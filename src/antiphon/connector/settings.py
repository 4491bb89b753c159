"""The connector's options: read from ``kv_connector_extra_config``, checked, with a notice for what is ignored.

Always true: every option of ours has a default that works beside a cache server with its own defaults; a wrong option
of ours is refused with a remedy; nothing that belongs to somebody else is refused.

vLLM's dotted command line (``--kv-transfer-config.kv_connector_extra_config.antiphon.port 6555``) nests the keys; both
forms are read. ``lmcache.mp.host`` and ``lmcache.mp.port`` are read as aliases, so that a configuration written for
LMCache works with the connector's name changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from antiphon.core.chunks import CHUNK_SIZE_TOKENS
from antiphon.core.errors import ConfigError

OWN = "antiphon"
FOREIGN = "lmcache"
ALIASES = {"lmcache.mp.host": "antiphon.host", "lmcache.mp.port": "antiphon.port"}
PORT_MAX = 65535
LOOKUP_TIMEOUT_MAX_MS = 10_000
ONBOARD_MAX_MS = 600_000
"""A request that waits longer for an answer has lost more than most hits are worth."""
STORE_QUEUE_MAX = 65_536
CHUNK_SIZE_MAX_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The options of one connector.

    Args:
        host: ``antiphon.host``, where the cache server listens; ``tcp://`` in front of it is cut off.
        port: ``antiphon.port``, its TCP port.
        chunk_size_tokens: ``antiphon.chunk_size``, the ``--chunk-size`` of that server.
        weights_revision: ``antiphon.weights_revision``, what stands for the weights instead of their digest.
        engine_name: ``antiphon.engine_name``, for people; None: the name that vLLM has.
        lookup_timeout_ms: ``antiphon.lookup_timeout_ms``, how long a request waits for the answer to its lookup.
        onboard_max_ms: ``antiphon.onboard_max_ms``, how long a request waits at most for chunks of the server's
            tiers; the server has a limit of its own (``--onboard-max-s``), so that this one need not be given.
        can_load: ``antiphon.load``.
        can_store: ``antiphon.store``.
        store_queue_max: ``antiphon.store_queue_max``, stores that may run at a time; further chunks are offered later.
    """

    host: str = "127.0.0.1"
    port: int = 6555
    chunk_size_tokens: int = CHUNK_SIZE_TOKENS
    weights_revision: str | None = None
    engine_name: str | None = None
    lookup_timeout_ms: int = 50
    onboard_max_ms: int = ONBOARD_MAX_MS
    can_load: bool = True
    can_store: bool = True
    store_queue_max: int = 64


DEFAULTS = ConnectorSettings()
KNOWN = (
    "antiphon.chunk_size",
    "antiphon.engine_name",
    "antiphon.host",
    "antiphon.load",
    "antiphon.lookup_timeout_ms",
    "antiphon.onboard_max_ms",
    "antiphon.port",
    "antiphon.store",
    "antiphon.store_queue_max",
    "antiphon.weights_revision",
)


def read_settings(extra: Mapping[str, object]) -> tuple[ConnectorSettings, tuple[str, ...]]:
    """The options in ``kv_connector_extra_config``, and what to tell the operator.

    Returns:
        The settings, and one sentence for each key that was replaced or ignored.

    Raises:
        ConfigError: an unknown ``antiphon.*`` key, or a value that cannot be used.
    """
    given = dict(_flat(extra))
    notices = []
    own: dict[str, object] = {}
    for key, value in given.items():
        if key in ALIASES:
            target = ALIASES[key]
            if target in given:
                notices.append(f"{key} is ignored: {target} is given too")
            else:
                own[target] = value
                notices.append(f"{key} is read as {target}")
        elif key.partition(".")[0] == OWN:
            if key not in KNOWN:
                raise _unknown(key)
            own[key] = value
        else:
            notices.append(f"{key} is ignored: it is not an option of Antiphon")
    settings = ConnectorSettings(
        host=_host(own),
        port=_number(own, "antiphon.port", DEFAULTS.port, PORT_MAX),
        chunk_size_tokens=_number(own, "antiphon.chunk_size", DEFAULTS.chunk_size_tokens, CHUNK_SIZE_MAX_TOKENS),
        weights_revision=_text(own, "antiphon.weights_revision"),
        engine_name=_text(own, "antiphon.engine_name"),
        lookup_timeout_ms=_number(own, "antiphon.lookup_timeout_ms", DEFAULTS.lookup_timeout_ms, LOOKUP_TIMEOUT_MAX_MS),
        onboard_max_ms=_number(own, "antiphon.onboard_max_ms", DEFAULTS.onboard_max_ms, ONBOARD_MAX_MS),
        can_load=_flag(own, "antiphon.load"),
        can_store=_flag(own, "antiphon.store"),
        store_queue_max=_number(own, "antiphon.store_queue_max", DEFAULTS.store_queue_max, STORE_QUEUE_MAX),
    )
    return settings, tuple(notices)


def _flat(extra: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys for what is nested below ``antiphon`` and ``lmcache``; anything else is left as it is."""
    for key, value in extra.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name.partition(".")[0] in (OWN, FOREIGN):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _unknown(key: str) -> ConfigError:
    names = [name.removeprefix(f"{OWN}.") for name in KNOWN]
    near = difflib.get_close_matches(key.removeprefix(f"{OWN}."), names, n=1)
    remedy = f"did you mean {OWN}.{near[0]}?" if near else f"the options are {', '.join(KNOWN)}"
    return ConfigError(f"{key} is not an option of the connector", field=key, remedy=remedy)


def _text(own: Mapping[str, object], key: str) -> str | None:
    value = own.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{value!r} is not a text", field=key, remedy="give a text, or leave the option out")
    return value.strip()


def _host(own: Mapping[str, object]) -> str:
    host = (_text(own, "antiphon.host") or DEFAULTS.host).removeprefix("tcp://").rstrip("/")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1]  # an IPv6 address in brackets
    has_port = host.count(":") == 1 or host.startswith("[")
    if has_port or not host or "/" in host or any(letter.isspace() for letter in host):
        remedy = "give a host name or address, with or without tcp://, and its port in antiphon.port"
        raise ConfigError(f"{own.get('antiphon.host')!r} is not a host", field="antiphon.host", remedy=remedy)
    return host


def _number(own: Mapping[str, object], key: str, default: int, most: int) -> int:
    """A whole number from 1 to ``most``, as a number or as its digits."""
    value = own.get(key, default)
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{value!r} cannot be used", field=key, remedy=f"give a whole number from 1 to {most}")
    return value


def _flag(own: Mapping[str, object], key: str) -> bool:
    value = own.get(key, True)
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    if not isinstance(value, bool):
        raise ConfigError(f"{value!r} is neither true nor false", field=key, remedy="give true or false")
    return value
