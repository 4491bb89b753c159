"""The files that ``LMCACHE_CONFIG_FILE`` names, read as parts of the spec.

:data:`KEYS` says of each key whether it is mapped to a field of the spec, ignored with a notice, or refused; the page
in the docs is made from it. A value that asks for a part that is not built is refused with the name of that part.
Nothing is started and nothing connected to: a file is read, and that is all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from antiphon.config.explain import nearest
from antiphon.config.load import read_mapping
from antiphon.config.problems import Notice, Problem, SpecError
from antiphon.config.spec import Pool
from antiphon.config.tier_spec import TierSpec

Kind = Literal["bool", "int", "GiB", "text", "list", "any"]
GIB = 1 << 30
OTHER_REMOTE = "a remote store other than Mooncake"
MOONCAKE_SCHEME = "mooncakestore://"
MOONCAKE_OPTIONS = {
    "extra_config.local_hostname": "local_host",
    "extra_config.metadata_server": "metadata",
    "extra_config.protocol": "protocol",
    "extra_config.device_name": "devices",
    "extra_config.global_segment_size": "segment_gb",
    "extra_config.transfer_timeout": "timeout_s",
    "extra_config.metadata_user": "metadata_user",
    "extra_config.metadata_password_file": "metadata_password_file",
    "extra_config.metadata_ca_file": "metadata_ca_file",
    "extra_config.metadata_cert_file": "metadata_cert_file",
    "extra_config.metadata_key_file": "metadata_key_file",
}
"""Options of a Mooncake store, by the option of the tier that they are."""
MASTER = "extra_config.master_server_address"
DISK = "a disk behind the cache servers, which is written as cache.l2 under antiphon"
HANDOFF_ROLE = {"sender": "prefill", "receiver": "decode"}


@dataclass(frozen=True)
class Key:
    """What becomes of one key of a file."""

    fate: Literal["mapped", "ignored", "refused"]
    kind: Kind
    text: str
    """Ignored or refused: why. Mapped: what a reader should know of it."""
    to: str = ""
    """Mapped: the field of the spec."""
    harmless: tuple[Any, ...] = (None,)
    """Refused: values that ask for nothing. Other keys: values that are passed over in silence."""
    part: str = ""
    """Refused: the part that it asks for, which no file of LMCache's turns on."""


def _ignored(kind: Kind, text: str) -> Key:
    return Key("ignored", kind, text)


def _refused(kind: Kind, part: str, text: str, *harmless: Any) -> Key:
    return Key("refused", kind, text, harmless=(None, *harmless), part=part)


def _mooncake(kind: Kind, text: str) -> Key:
    return Key("mapped", kind, f"{text}; with remote_url", "cache.l2")


KEYS: dict[str, Key] = {
    "chunk_size": Key("mapped", "int", "tokens in a chunk", "cache.chunk_size_tokens"),
    "local_cpu": Key(
        "mapped", "bool", "true with enable_nixl, enable_p2p or remote_url, which move KV through L1", "cache.enabled"
    ),
    "max_local_cpu_size": Key(
        "mapped", "GiB", "in GiB; the larger of it and nixl_buffer_size", "cache.l1_size_bytes", harmless=(None, 0)
    ),
    "nixl_buffer_size": Key(
        "mapped", "int", "in bytes; L1 is the memory that KV is handed over from", "cache.l1_size_bytes"
    ),
    "nixl_buffer_device": Key(
        "mapped", "text", "cpu; cuda is auto there, the device of the engine", "handoff.kv_buffer_device"
    ),
    "nixl_receiver_port": Key(
        "mapped", "int", "the base: a replica takes the first free port from there on", "decode.side_channel_port"
    ),
    "nixl_backends": Key("mapped", "list", "in order of preference", "handoff.backends"),
    "enable_nixl": Key(
        *("mapped", "bool", "true is cache: P stores and D loads, through cache servers", "handoff.kind"),
        harmless=(None, False),
    ),
    "nixl_role": Key("mapped", "text", "sender in prefill_config, receiver in decode_config; checked", "the pool"),
    "nixl_receiver_host": _ignored("text", "the router tells each engine where its KV is"),
    "nixl_proxy_host": _ignored("text", "the router speaks to the engines"),
    "nixl_proxy_port": _ignored("int", "the router speaks to the engines"),
    "nixl_enable_gc": _ignored("bool", "leases say when KV may go"),
    "kv_buffer_size": _ignored("int", "KV is moved by blocks and chunks, without a buffer of its own"),
    "pipelined_backend": _ignored("bool", "loads and stores are always asynchronous"),
    "save_decode_cache": _ignored("bool", "decode chunks are always stored"),
    "blocking_timeout_secs": _ignored("int", "no call of the cache blocks an engine"),
    "local_device": _refused("text", "a cache in GPU memory", "L1 is memory of the host", "cpu"),
    "local_disk": _refused("any", DISK, "L2 on a disk", False),
    "max_local_disk_size": _refused("GiB", DISK, "L2 on a disk", 0),
    "remote_url": Key("mapped", "text", "mooncakestore:// is a Mooncake tier; anything else is refused", "cache.l2"),
    "remote_serde": _refused("text", "a compressed store", "chunks are stored as they are, which is naive", "naive"),
    "enable_p2p": Key(
        *("mapped", "bool", "true: the nodes' cache servers share, as docs/peers.md says", "cache.peers"),
        harmless=(None, False),
    ),
    "p2p_host": _ignored("text", "a cache server tells others the address of its node"),
    "p2p_init_ports": _ignored("list", "the port is cache.peer_port"),
    "p2p_lookup_ports": _ignored("list", "the coordinator knows who holds what"),
    "lookup_url": _ignored("text", "the coordinator knows who holds what"),
    "distributed_url": _ignored("text", "a cache server tells others the address of its node"),
    "enable_blending": _refused("bool", "reuse of what is no prefix", "blending", False),
    "extra_config.local_hostname": _mooncake("text", "its local_host; another node has its own address"),
    "extra_config.metadata_server": _mooncake("text", "its metadata: http, etcd, etcds or P2PHANDSHAKE"),
    "extra_config.protocol": _mooncake("text", "its protocol: tcp or rdma"),
    "extra_config.device_name": _mooncake("text", "its devices"),
    "extra_config.master_server_address": _mooncake("text", "its master, which goes before the host in remote_url"),
    "extra_config.global_segment_size": _mooncake("int", "its segment_gb, in bytes"),
    "extra_config.local_buffer_size": _ignored("int", "room is laid out for the chunks of a call"),
    "extra_config.transfer_timeout": _mooncake("int", "its timeout_s"),
    "extra_config.metadata_user": _mooncake("text", "the user of etcd; no key of LMCache's"),
    "extra_config.metadata_password_file": _mooncake("text", "file with its password; no key of LMCache's"),
    "extra_config.metadata_ca_file": _mooncake("text", "to check etcd by, with etcds://; no key of LMCache's"),
    "extra_config.metadata_cert_file": _mooncake("text", "to be known by, with etcds://; no key of LMCache's"),
    "extra_config.metadata_key_file": _mooncake("text", "key of that certificate; no key of LMCache's"),
}
"""Every key that is known, those inside ``extra_config`` by their path."""
CONNECTOR_KEYS: dict[str, Key] = {
    "discard_partial_chunks": _ignored(
        "bool", "chunks are whole; what fills none at the end of a prompt is computed by the decode engine"
    ),
    "lmcache_rpc_port": _ignored("text", "an engine is told the socket of its cache server"),
}
"""The keys of ``kv_connector_extra_config`` beside LMCacheConnectorV1."""
ENV_KEYS: dict[str, Key] = {
    "LMCACHE_CONFIG_FILE": Key("mapped", "text", "the file whose keys are in the table below"),
    "LMCACHE_USE_EXPERIMENTAL": _ignored("text", "there is one implementation"),
}
"""The environment variables of LMCache."""
_TYPES: dict[Kind, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "GiB": (int, float),
    "text": (str,),
    "list": (list,),
    "any": (object,),
}
_WORDS: dict[Kind, str] = {
    "bool": "true or false",
    "int": "a whole number",
    "GiB": "a number",
    "text": "text",
    "list": "a list",
    "any": "a value",
}


@dataclass
class LmcacheFile:
    """What a file means: values for fields of the spec, and what was found on the way."""

    values: dict[str, Any] = field(default_factory=dict)
    """Dotted path of the spec to value."""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """The parts that it asks for and that are not built, each with the keys that ask for it."""
    problems: list[Problem] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)


def unreadable(path: Path, where: str) -> Problem | None:
    """The problem that ``path``, named at ``where``, cannot be read on this host; None where it can."""
    try:
        with path.open("rb"):
            return None
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}"
        return Problem(where, message, "put the file there on every node that an engine of this pool may run on")


def read_lmcache_file(path: Path, pool: Pool, where: str) -> LmcacheFile:
    """The file at ``path`` as parts of the spec.

    Args:
        path: a YAML file of at most 1 MB.
        pool: the pool whose engines it is for.
        where: the place that names the file, for the messages.
    """
    found = LmcacheFile()
    problem = unreadable(path, where)
    if problem is not None:
        found.problems.append(problem)
        return found
    try:
        raw = read_mapping(path)
    except SpecError as error:
        fix = "correct the file; it is a mapping of LMCache's keys"
        found.problems += [replace(item, field=f"{where}: {item.field}", fix=fix) for item in error.problems]
        return found
    return interpret(raw, pool, f"{where}: {path.name}")


def interpret(raw: dict[str, Any], pool: Pool, where: str) -> LmcacheFile:
    """As :func:`read_lmcache_file`, for what has been read; ``where`` is put before each key."""
    found = LmcacheFile()
    store: dict[str, Any] = {}
    for name, value in _flat(raw):
        key, place = KEYS.get(name), f"{where}: {name}"
        if key is None:
            found.problems.append(_unknown(name, place))
        elif _is_harmless(value, key):
            continue
        elif not _is_of(value, key.kind):
            message = f"is {value!r} ({type(value).__name__}), but must be {_WORDS[key.kind]}"
            found.problems.append(Problem(place, message, f"correct it ({key.text})"))
        elif key.fate == "ignored":
            found.notices.append(Notice(place, f"is ignored: {key.text}"))
        elif key.fate == "refused":
            found.missing.setdefault(key.part, []).append(name)
        elif key.to == "cache.l2":
            store[name] = value
        elif name == "nixl_role":
            found.problems += _wrong_role(value, pool, place)
        else:
            _put(found.values, key.to, _of_spec(name, key, value))
    _put_store(found, store, where)
    if not {"handoff.kind", "cache.l2", "cache.peers"}.isdisjoint(found.values) and "cache.enabled" in found.values:
        found.values["cache.enabled"] = True  # KV moves through L1, whatever else it is for
    return found


def _put_store(found: LmcacheFile, store: dict[str, Any], where: str) -> None:
    """The Mooncake store as a tier; options without a store are ignored."""
    url = store.pop("remote_url", None)
    if url is None:
        found.notices += [Notice(f"{where}: {name}", "is ignored: there is no remote_url") for name in store]
        return
    if not url.startswith(MOONCAKE_SCHEME):
        found.missing.setdefault(OTHER_REMOTE, []).append("remote_url")
        return
    master = store.pop(MASTER, None) or url.removeprefix(MOONCAKE_SCHEME).rstrip("/")
    options = {MOONCAKE_OPTIONS[name]: value for name, value in store.items()}
    if "segment_gb" in options:
        options["segment_gb"] /= 10**9
    try:
        found.values["cache.l2"] = [TierSpec.model_validate({"url": f"mooncake://{master}", **options}).text()]
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        message = f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"
        found.problems.append(Problem(f"{where}: remote_url", message, "correct it and what stands in extra_config"))


def not_built(found: LmcacheFile, where: str) -> list[Problem]:
    """A problem at ``where`` for each part that ``found`` asks for and that is not mapped."""
    return [
        Problem(where, f"{', '.join(names)}: {part}; not mapped", "remove the keys that ask for it")
        for part, names in found.missing.items()
    ]


def _is_of(value: Any, kind: Kind) -> bool:
    """Whether ``value`` is of ``kind``; true and false are no numbers."""
    return isinstance(value, _TYPES[kind]) and (kind in ("bool", "any") or not isinstance(value, bool))


def _is_harmless(value: Any, key: Key) -> bool:
    return value is None or (value in key.harmless and _is_of(value, key.kind))


def _flat(raw: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in raw.items():
        if name == "extra_config" and isinstance(value, dict):
            pairs += [(f"{name}.{inner}", item) for inner, item in value.items()]
        else:
            pairs.append((str(name), value))
    return pairs


def _unknown(name: str, place: str) -> Problem:
    near = nearest(name, list(KEYS))
    fix = f"did you mean {near}?" if near else "remove it; docs/ray.md lists what is known"
    return Problem(place, "is not a known key", fix)


def _wrong_role(value: str, pool: Pool, place: str) -> list[Problem]:
    wanted = next(role for role, each in HANDOFF_ROLE.items() if each == pool)
    if value == wanted:
        return []
    return [Problem(place, f"{value!r} in {pool}_config", f"write {wanted}")]


def _of_spec(name: str, key: Key, value: Any) -> Any:
    """``value`` in the unit and words of the spec."""
    if name == "enable_nixl":
        return "cache"
    if name == "nixl_buffer_device" and value == "cuda":
        return "auto"
    return round(value * GIB) if key.kind == "GiB" else value


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    """Two keys may mean one size: the larger is kept."""
    values[path] = max(values[path], value) if path in values else value
