"""``--kv-transfer-config``: made from ``handoff``, or taken from a user's and put right.

Invariants of what :func:`transfer_of` returns: the roles suit the pool, ``kv_load_failure_policy`` is at the top level
(vLLM reads it nowhere else), ``engine_id`` is new at each start, and every connector in it is one of this version.
The cache connector in it is made in ``transfer_cache.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from antiphon.config.cache_servers import CACHE_CONNECTOR, CACHE_CONNECTORS, CacheServer, server_of
from antiphon.config.explain import nearest
from antiphon.config.problems import Notice, Problem
from antiphon.config.resolve import Engine
from antiphon.config.spec import HandoffSpec
from antiphon.config.transfer_cache import PORT, cache_connector, own_connectors
from antiphon.core.ids import INCARNATION_PLACEHOLDER

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
LEASE_MARGIN_S = 5
POLICIES = ("fail", "recompute")
NEAR_NAME = 0.8
"""How near (0 to 1) a name is to the one that it misspells: all end in Connector, so that any two are rather near."""
NIXL, MULTI = "NixlConnector", "MultiConnector"
MOONCAKE_STORE = "MooncakeStoreConnector"
IGNORED = frozenset({"kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port", "engine_id"})
"""Keys that NIXL does not use, most of which newer vLLM refuses; and ``engine_id``, which is ours."""
KNOWN = frozenset(
    {"kv_connector", "kv_role", "kv_buffer_device", "kv_load_failure_policy", "kv_connector_extra_config"}
    | {"enable_permute_local_kv"}
)


@dataclass
class Transfer:
    """The configuration of one pool, and what was found on the way to it."""

    config: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    def of_engine(self, name: str) -> dict[str, Any]:
        """The configuration of the engine ``name``, whose id holds the placeholder of its incarnation."""
        head = {key: self.config[key] for key in ("kv_connector", "kv_role")}
        return {**head, "engine_id": f"{name}-{INCARNATION_PLACEHOLDER}", **self.config}


def transfer_of(engine: Engine, handoff: HandoffSpec, servers: list[CacheServer]) -> Transfer:
    """The transfer configuration of ``engine``; with problems, one that holds what could be kept."""
    raw = engine.spec.kv_transfer_config
    where = f"{engine.pool}.kv_transfer_config"
    if raw is None:
        raw = own_connectors(server_of(engine, servers), handoff.kind)
    transfer = Transfer(config={})
    around = _Around(engine, handoff, servers, transfer)
    policy = _policy(raw, where, transfer) or handoff.kv_load_failure_policy
    config = _connector(raw, where, around)
    transfer.config = {**config, "kv_load_failure_policy": policy}
    return transfer


@dataclass(frozen=True)
class _Around:
    """What every connector of one configuration shares."""

    engine: Engine
    handoff: HandoffSpec
    servers: list[CacheServer]
    transfer: Transfer


def lease_s(config: dict[str, Any]) -> int:
    """The lease in seconds that the NIXL connector of ``config`` holds KV for."""
    for part in _parts(config):
        if part.get("kv_connector") == NIXL:
            lease = part.get("kv_connector_extra_config", {}).get("kv_lease_duration", 30)
            return lease if isinstance(lease, int) else 30
    return 30


def cache_port(config: dict[str, Any]) -> int | None:
    """The port of the cache server that the cache connector of ``config`` speaks to; None without such a connector."""
    for part in _parts(config):
        if part.get("kv_connector") == CACHE_CONNECTOR:
            port = part["kv_connector_extra_config"][PORT]
            assert isinstance(port, int), port
            return port
    return None


def handover_max_s(lease: int) -> float:
    """The longest ``router.handover_timeout_s`` for a lease in seconds.

    It leaves a margin of 5 s, of half the lease where that is short: the lease begins before the router hears of the
    KV, and a hand-over that begins last needs time to reach the prefill engine.
    """
    return max(float(lease - LEASE_MARGIN_S), lease / 2)


def _parts(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """``raw`` and the children of a MultiConnector, as far as they are mappings."""
    yield raw
    extra = raw.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, dict) else None
    if isinstance(children, list):
        yield from (child for child in children if isinstance(child, dict))


def _policy(raw: dict[str, Any], where: str, transfer: Transfer) -> str | None:
    """The load failure policy that ``raw`` asks for, hoisted from a child where it is written there."""
    top = raw.get("kv_load_failure_policy")
    nested = [part["kv_load_failure_policy"] for part in list(_parts(raw))[1:] if "kv_load_failure_policy" in part]
    for value in [top, *nested]:
        if value is not None and value not in POLICIES:
            fix = "write fail or recompute"
            transfer.problems.append(Problem(where, f"kv_load_failure_policy {value!r} does not exist", fix))
            return None
    if nested:
        chosen = top or nested[0]
        text = (
            f"kv_load_failure_policy in a child connector has no effect in vLLM; {chosen!r} is set at the top level"
            if set(nested) == {chosen}
            else f"child connectors ask for kv_load_failure_policy {', '.join(nested)}, which has no effect in vLLM; "
            f"{chosen!r} is set at the top level"
        )
        transfer.notices.append(Notice(where, text))
        return str(chosen)
    return top


def _connector(raw: dict[str, Any], where: str, around: _Around) -> dict[str, Any]:
    """One connector of ``raw``, put right, without its load failure policy."""
    engine, handoff, transfer = around.engine, around.handoff, around.transfer
    name = raw.get("kv_connector")
    extra = raw.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        fix = "write a mapping, or leave it out"
        transfer.problems.append(Problem(f"{where}.kv_connector_extra_config", "is not a mapping", fix))
        extra = {}
    if handoff.kind == "cache":
        return _through_cache(raw, where, around)
    config: dict[str, Any] = {"kv_connector": name, "kv_role": _role(raw, where, engine, transfer)}
    config.update(_kept(raw, where, transfer))
    if name == MULTI:
        config["kv_connector_extra_config"] = {**extra, "connectors": _children(extra, where, around)}
        return config
    if name != NIXL:
        transfer.problems.append(_refused(name, where))
        return config
    if "connectors" in extra:
        path = f"{where}.kv_connector_extra_config.connectors"
        fix = f"write kv_connector: {MULTI} to run several, or remove it"
        transfer.problems.append(Problem(path, f"{NIXL} has no connectors of its own", fix))
    buffer = engine.device if handoff.kv_buffer_device == "auto" else handoff.kv_buffer_device
    config.setdefault("kv_buffer_device", buffer)
    if config["kv_buffer_device"] not in ("cpu", engine.device):
        field_name = f"{where}.kv_buffer_device" if "kv_buffer_device" in raw else "handoff.kv_buffer_device"
        message = f"{config['kv_buffer_device']!r} on an engine that runs on {engine.device}"
        transfer.problems.append(Problem(field_name, message, "write cpu, or leave it out"))
    config["kv_connector_extra_config"] = {
        "backends": list(handoff.backends),
        "kv_lease_duration": handoff.lease_s,
        **extra,
    }
    _check_lease(config["kv_connector_extra_config"]["kv_lease_duration"], where, transfer)
    return config


def _through_cache(raw: dict[str, Any], where: str, around: _Around) -> dict[str, Any]:
    """The connector of an engine whose KV is handed over by cache servers: ours alone."""
    name = raw.get("kv_connector")
    if _is_cache(name):
        return _child(raw, where, around)
    fix = f"leave kv_transfer_config out, write {CACHE_CONNECTOR} alone, or handoff.kind: nixl"
    message = f"{name!r}, but handoff.kind is cache, for which an engine has {CACHE_CONNECTOR} and no other"
    around.transfer.problems.append(Problem(f"{where}.kv_connector", message, fix))
    return {"kv_connector": CACHE_CONNECTOR, "kv_role": "kv_both"}


def _children(extra: dict[str, Any], where: str, around: _Around) -> list[dict[str, Any]]:
    """The children of a MultiConnector, each put right."""
    transfer = around.transfer
    children = extra.get("connectors")
    path = f"{where}.kv_connector_extra_config.connectors"
    fix = "list a NixlConnector there, or leave kv_transfer_config out"
    if not isinstance(children, list) or not all(isinstance(child, dict) for child in children):
        transfer.problems.append(Problem(path, "is not a list of connectors", fix))
        return []
    names = [child.get("kv_connector") for child in children]
    if names.count(NIXL) != 1:
        message = f"holds {names.count(NIXL)} NixlConnectors; prefill and decode need one"
        transfer.problems.append(Problem(path, message, fix))
    if MULTI in names:
        transfer.problems.append(Problem(path, "holds a MultiConnector inside a MultiConnector", "write one list"))
        return []
    num_caches = sum(_is_cache(name) for name in names)
    if num_caches > 1:
        message = f"holds {num_caches} cache connectors; an engine has one cache server"
        transfer.problems.append(Problem(path, message, f"keep one {CACHE_CONNECTOR}"))
        return []
    return [_child(child, f"{path}[{index}]", around) for index, child in enumerate(children)]


def _child(raw: dict[str, Any], where: str, around: _Around) -> dict[str, Any]:
    """One child of a MultiConnector, put right."""
    if not _is_cache(raw.get("kv_connector")):
        return _connector(raw, where, around)
    config, found = cache_connector(raw, where, around.engine, around.servers)
    around.transfer.problems.extend(item for item in found if isinstance(item, Problem))
    around.transfer.notices.extend(item for item in found if isinstance(item, Notice))
    return config


def _role(raw: dict[str, Any], where: str, engine: Engine, transfer: Transfer) -> str:
    """The role that suits the pool; a role that contradicts it is a problem."""
    wanted, found = ROLES[engine.pool], raw.get("kv_role")
    if _is_cache(raw.get("kv_connector")) or found is None or found == wanted:
        return wanted
    if found == "kv_both":
        transfer.notices.append(Notice(f"{where}.kv_role", f"kv_both is deprecated with NIXL; {wanted} is used"))
    else:
        message = f"{found!r} in the {engine.pool} pool"
        transfer.problems.append(Problem(f"{where}.kv_role", message, f"write {wanted}, or leave it out"))
    return wanted


def _is_cache(name: object) -> bool:
    return isinstance(name, str) and name in CACHE_CONNECTORS


def _kept(raw: dict[str, Any], where: str, transfer: Transfer) -> dict[str, Any]:
    """The keys of ``raw`` that are passed on as they are."""
    kept = {}
    for key, value in raw.items():
        if key in ("kv_buffer_device", "enable_permute_local_kv"):
            kept[key] = value
        elif key == "engine_id":
            text = f"{value!r} is replaced: an engine id is new at each start, so that stale handles are refused"
            transfer.notices.append(Notice(f"{where}.engine_id", text))
        elif key in IGNORED:
            transfer.notices.append(Notice(f"{where}.{key}", "is left out: NIXL does not use it"))
        elif key not in KNOWN:
            fix = f"remove it; known here: {', '.join(sorted(KNOWN))}"
            transfer.problems.append(Problem(f"{where}.{key}", "is not a key that can be used here", fix))
    return kept


def _refused(name: object, where: str) -> Problem:
    if _is_cache(name):
        message = f"{name} alone reuses KV but hands none from prefill to decode"
        fix = (
            f"put it beside a {NIXL} in a {MULTI}, leave kv_transfer_config out, which does the same, or write "
            "handoff.kind: cache"
        )
    elif name == MOONCAKE_STORE:
        message = f"{name}: Mooncake as a cache is not part of this version"
        fix = f"write {CACHE_CONNECTOR}, or leave that connector out"
    elif not isinstance(name, str):
        message, fix = "names no connector", f"write {NIXL}, or leave kv_transfer_config out"
    else:
        near = nearest(name, (NIXL, MULTI, CACHE_CONNECTOR), cutoff=NEAR_NAME)
        message = f"{name!r} is not a connector of this version"
        fix = f"did you mean {near}?" if near else f"leave it out; there are {NIXL}, {MULTI} and {CACHE_CONNECTOR}"
    return Problem(f"{where}.kv_connector", message, fix)


def _check_lease(lease: object, where: str, transfer: Transfer) -> None:
    if not isinstance(lease, int) or isinstance(lease, bool) or lease < 6:
        path = f"{where}.kv_connector_extra_config.kv_lease_duration"
        transfer.problems.append(Problem(path, f"{lease!r} is not a lease", "write whole seconds, at least 6"))
