"""A tier behind the arena, as the spec and ``--l2`` write it: a URL that says where it is, and options.

``disk:///var/kv?capacity_gb=100``, ``redis://host:6379/0``, ``rediss://host``, ``unix:///run/valkey.sock``,
``s3://bucket/prefix?endpoint=https://host``, ``mooncake://host:50051?metadata=http://host:8080/metadata``, and
``memory://?capacity_gb=1`` for tests. In a spec an option may stand beside ``url`` as well as in it.

Invariants: no secret is in it, only the name of a file or of a variable that has one, so that it can be shown; an
option that the kind of tier does not have is an error; ``parse_tier(spec.text()) == spec``.
"""

from __future__ import annotations

import os
from typing import Any, Final, Literal, Self
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from antiphon.config.explain import limit_of, nearest, split_fix
from antiphon.config.key_files import read_key, read_keys
from antiphon.config.model import SpecModel
from antiphon.core.errors import ConfigError

__all__ = ["TIER_SCHEMES", "TierSpec", "parse_tier"]

GB: Final = 10**9
TIER_SCHEMES: Final = ("disk", "redis", "rediss", "unix", "s3", "mooncake", "memory")
_REDIS: Final = ("redis", "rediss", "unix")
_KINDS: Final = {"rediss": "redis", "unix": "redis"}
_OPTION_SCHEMES: Final[dict[str, tuple[str, ...]]] = {
    "capacity_gb": ("disk", "memory"),
    "prefix": (*_REDIS, "mooncake"),
    "username": _REDIS,
    "password_file": _REDIS,
    "password_env": _REDIS,
    "ca_file": ("rediss",),
    "endpoint": ("s3",),
    "region": ("s3",),
    "credentials_file": ("s3",),
    "virtual_host": ("s3",),
    "metadata": ("mooncake",),
    "metadata_user": ("mooncake",),
    "metadata_password_file": ("mooncake",),
    "metadata_ca_file": ("mooncake",),
    "metadata_cert_file": ("mooncake",),
    "metadata_key_file": ("mooncake",),
    "local_host": ("mooncake",),
    "segment_gb": ("mooncake",),
    "protocol": ("mooncake",),
    "devices": ("mooncake",),
    "chunk_gb_max": ("mooncake",),
}
"""Options that not every kind of tier has."""
_SECRET_FILES: Final = ("password_file", "credentials_file", "metadata_password_file", "metadata_key_file")


class TierSpec(SpecModel):
    """One tier."""

    model_config = ConfigDict(hide_input_in_errors=True)

    url: str = Field(
        min_length=1,
        max_length=2048,
        description="Where it is: disk:///folder, redis://host:port/db, rediss:// with TLS, unix:///socket, "
        "s3://bucket/prefix, mooncake://host:port. No password stands in it.",
    )
    name: str | None = Field(
        default=None,
        pattern=r"^[a-z][a-z0-9_-]{0,31}$",
        description="For people and metrics. Default: disk, redis, s3, mooncake.",
    )
    store: Literal["through", "back", "none"] = Field(
        default="through",
        description="When chunks are stored in it: through, as soon as they are whole; back, when they are to be "
        "evicted; none, never: it is only read.",
    )
    promotion_hits: int = Field(
        default=2,
        ge=0,
        le=1000,
        description="Reads from a slower tier after which a chunk is stored in this one; 0: never.",
    )
    timeout_s: float = Field(
        default=2.0, gt=0, le=60, description="Seconds after which a call counts as failed, up to 60."
    )
    fetches_max: int = Field(default=4, ge=1, le=64, description="Chunks read from it at once, 1 to 64.")
    publishes_max: int = Field(default=2, ge=1, le=64, description="Chunks stored in it at once, 1 to 64.")
    capacity_gb: float | None = Field(
        default=None, gt=0, le=1_000_000, description="Disk, memory: most GB (10^9 bytes) that it takes. Must be given."
    )
    prefix: str = Field(
        default="antiphon",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Redis, Mooncake: begins the name of every key. Servers that share chunks have the same.",
    )
    username: str | None = Field(default=None, min_length=1, description="Redis: user (default: its default user).")
    password_file: str | None = Field(default=None, min_length=1, description="Redis: file with the password.")
    password_env: str | None = Field(
        default=None, min_length=1, description="Redis: variable of the environment with the password."
    )
    ca_file: str | None = Field(
        default=None,
        min_length=1,
        description="rediss: certificates to check the server against (default: the system's).",
    )
    endpoint: str | None = Field(
        default=None, pattern=r"^https?://[^\s/@]+/?$", description="S3: URL of the service (default: Amazon's)."
    )
    region: str | None = Field(default=None, min_length=1, description="S3: region of the bucket.")
    credentials_file: str | None = Field(
        default=None,
        min_length=1,
        description="S3: file with the access key id, the secret key and perhaps a session token, one a line (default: "
        "what the environment says, as AWS_ACCESS_KEY_ID).",
    )
    virtual_host: bool = Field(
        default=False, description="S3: the bucket is named in the host (bucket.host) rather than in the path."
    )
    metadata: str = Field(
        default="P2PHANDSHAKE",
        min_length=1,
        max_length=2048,
        description="Mooncake: its metadata server, http://host:port/metadata or etcd://host:port, or P2PHANDSHAKE for "
        "none. etcds:// is etcd over TLS; the members of an etcd are separated by commas. No password stands in it.",
    )
    metadata_user: str | None = Field(default=None, min_length=1, description="Mooncake: user of etcd.")
    metadata_password_file: str | None = Field(
        default=None, min_length=1, description="Mooncake: file with the password of that user."
    )
    metadata_ca_file: str | None = Field(
        default=None,
        min_length=1,
        description="Mooncake, etcds: certificates to check etcd against (default: the system's).",
    )
    metadata_cert_file: str | None = Field(
        default=None, min_length=1, description="Mooncake, etcds: certificate that etcd knows this client by."
    )
    metadata_key_file: str | None = Field(
        default=None, min_length=1, description="Mooncake, etcds: key of that certificate."
    )
    local_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Mooncake: address of this machine for the other nodes of the store. In a deployment on several "
        "hosts each cache server has the address of its own host instead.",
    )
    segment_gb: float = Field(
        default=0.0, ge=0, le=16_384, description="Mooncake: GB of this machine's memory given to the store."
    )
    protocol: Literal["tcp", "rdma"] = Field(default="tcp", description="Mooncake: how its bytes travel.")
    devices: str = Field(default="", description="Mooncake: RDMA devices, separated by commas.")
    chunk_gb_max: float = Field(
        default=0.25,
        gt=0,
        le=16,
        description="Mooncake: GB of the largest chunk, for which room is laid out for each call.",
    )

    @model_validator(mode="before")
    @classmethod
    def _options_of_url(cls, value: Any) -> Any:
        """Takes text for a URL, and the options out of the URL."""
        given = {"url": value} if isinstance(value, str) else value
        if not isinstance(given, dict) or not isinstance(given.get("url"), str):
            return given
        url, _, query = given["url"].partition("?")
        options = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        names = [name for name, _ in options]
        if twice := sorted(name for name in set(names) if names.count(name) > 1 or name in given):
            raise ValueError(f"{twice[0]} is given twice")
        return {**given, **dict(options), "url": url}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        parts = urlsplit(self.url)
        if parts.scheme not in TIER_SCHEMES:
            raise ValueError(f"{parts.scheme or 'nothing'}:// is no tier: write {_meant_scheme(parts.scheme)}")
        if "@" in parts.netloc:
            raise ValueError("a URL is shown in logs: write username, and password_file or password_env, instead")
        for name in sorted(self.model_fields_set & set(_OPTION_SCHEMES)):
            if parts.scheme not in _OPTION_SCHEMES[name]:
                raise ValueError(f"{name} is no option of {parts.scheme}://: leave it out")
        if parts.fragment:
            raise ValueError("a URL of a tier has no #")
        for text in (_wrong_place(self), _wrong_metadata(self)):
            if text is not None:
                raise ValueError(text)
        if self.password_file is not None and self.password_env is not None:
            raise ValueError("password_file and password_env are both given: give one")
        return self

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @property
    def kind(self) -> str:
        """``disk``, ``redis``, ``s3``, ``mooncake`` or ``memory``."""
        return _KINDS.get(self.scheme, self.scheme)

    @property
    def tier_name(self) -> str:
        return self.name or self.kind

    @property
    def is_shared(self) -> bool:
        """Whether other servers may use the same place."""
        return self.kind not in ("disk", "memory")

    @property
    def path(self) -> str:
        """Of a folder or a socket."""
        return unquote(urlsplit(self.url).path)

    @property
    def metadata_members(self) -> list[str]:
        """Host and port of each member of an etcd that Mooncake's own client cannot speak to; of others none."""
        parts = urlsplit(self.metadata)
        is_ours = parts.scheme == "etcds" or (parts.scheme == "etcd" and self.metadata_user is not None)
        return parts.netloc.split(",") if is_ours else []

    @property
    def capacity_bytes(self) -> int:
        assert self.capacity_gb is not None, self.url
        return round(self.capacity_gb * GB)

    def text(self) -> str:
        """It as one URL, for a command line. Default values are left out."""
        options = {
            name: str(getattr(self, name)).lower() if name == "virtual_host" else getattr(self, name)
            for name in type(self).model_fields
            if name != "url" and getattr(self, name) != type(self).model_fields[name].default
        }
        return f"{self.url}?{urlencode(options, quote_via=quote)}" if options else self.url

    @property
    def secret_files(self) -> dict[str, str]:
        """The files with secrets that it names, by option."""
        paths = {name: getattr(self, name) for name in _SECRET_FILES}
        return {name: path for name, path in paths.items() if path is not None}

    def read_metadata_password(self) -> str:
        """Of the user of etcd; empty where none is named.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self.metadata_password_file is None:
            return ""
        return read_key(self.metadata_password_file, "metadata_password_file").decode()

    def read_password(self) -> str | None:
        """Of a Redis server; None where none is named.

        Raises:
            ConfigError: the file cannot be read, or the variable is not set.
        """
        if self.password_file is not None:
            return read_key(self.password_file, "password_file").decode()
        if self.password_env is None:
            return None
        password = os.environ.get(self.password_env)
        if not password:
            raise ConfigError(f"the variable {self.password_env} is not set", field="password_env")
        return password

    def read_credentials(self) -> list[str]:
        """Access key id, secret key and perhaps a session token; none where no file is named.

        Raises:
            ConfigError: the file cannot be read, or has another number of lines.
        """
        if self.credentials_file is None:
            return []
        found = [line.decode() for line in read_keys(self.credentials_file, "credentials_file")]
        if len(found) not in (2, 3):
            raise ConfigError(
                f"{self.credentials_file} has {len(found)} lines",
                field="credentials_file",
                remedy="write the access key id, the secret key and perhaps a session token, one a line",
            )
        return found


def _meant_scheme(scheme: str) -> str:
    """What was meant by a scheme that is none; that of tests is not named."""
    known = [each for each in TIER_SCHEMES if each != "memory"]
    near = nearest(scheme, known)
    return f"{near}://" if near else f"one of {', '.join(known)}"


def _wrong_place(spec: TierSpec) -> str | None:
    """What is wrong with the place that a URL names."""
    parts = urlsplit(spec.url)
    scheme, is_path = parts.scheme, parts.path not in ("", "/")
    if scheme in ("disk", "memory") and spec.capacity_gb is None:
        return f"{scheme}:// needs a capacity: add ?capacity_gb=10"
    if scheme in ("disk", "unix") and (parts.netloc or not is_path):
        return f"write an absolute path: {scheme}:///path"
    if scheme == "memory":
        return "memory:// has no place" if parts.netloc or is_path else None
    if scheme in ("redis", "rediss") and is_path and not parts.path[1:].isdecimal():
        return f"after the host of {scheme}:// stands the number of a database"
    if scheme in ("redis", "rediss", "s3", "mooncake") and not parts.netloc:
        return f"{scheme}:// needs a {'bucket' if scheme == 's3' else 'host'}"
    try:
        port = parts.port
    except ValueError:
        return "the port is none"
    if scheme == "mooncake" and (port is None or is_path):
        return "write host and port of the master: mooncake://host:50051"
    if scheme == "s3" and port is not None:
        return "the host of an S3 service stands in endpoint"
    return None


def _wrong_metadata(spec: TierSpec) -> str | None:
    """What is wrong with Mooncake's metadata server and its options; shows no value, which may hold a password."""
    is_etcd = spec.metadata.startswith(("etcd://", "etcds://"))
    given = [name for name in sorted(spec.model_fields_set) if name.startswith("metadata_")]
    if spec.metadata != "P2PHANDSHAKE":
        text = _wrong_metadata_url(spec.metadata, is_etcd=is_etcd)
        if text is not None:
            return text
    if given and not is_etcd:
        return f"{given[0]} is for an etcd: write metadata=etcd://host:port, or etcds://"
    if (spec.metadata_user is None) != (spec.metadata_password_file is None):
        return "metadata_user and metadata_password_file are given together"
    if (spec.metadata_cert_file is None) != (spec.metadata_key_file is None):
        return "metadata_cert_file and metadata_key_file are given together"
    is_tls = spec.metadata.startswith("etcds://")
    for name in ("metadata_ca_file", "metadata_cert_file"):
        if getattr(spec, name) is not None and not is_tls:
            return f"{name} is for TLS: write metadata=etcds://host:port"
    return None


def _wrong_metadata_url(url: str, *, is_etcd: bool) -> str | None:
    parts = urlsplit(url)
    if "@" in url:
        return "metadata is shown in logs: write metadata_user and metadata_password_file instead"
    if any(letter.isspace() for letter in url) or parts.scheme not in ("http", "https", "etcd", "etcds"):
        return "metadata is none: write http://host:port/metadata, etcd://host:port, etcds://host:port or P2PHANDSHAKE"
    if not is_etcd:
        return None if parts.netloc else "metadata needs a host"
    members = [urlsplit(f"//{member}") for member in parts.netloc.split(",")]
    try:
        is_whole = all(member.hostname and member.port for member in members)
    except ValueError:
        is_whole = False
    if not is_whole or parts.path not in ("", "/") or parts.query or parts.fragment:
        return "metadata names no etcd: write etcd://host:port or etcds://host:port, members separated by commas"
    return None


def parse_tier(text: str, field: str = "--l2") -> TierSpec:
    """The tier of one ``--l2``.

    Raises:
        ConfigError: it cannot be; the message shows none of the values.
    """
    try:
        return TierSpec.model_validate({"url": text})
    except ValidationError as error:
        message, fix = _complaint(error.errors(include_input=False, include_url=False)[0], urlsplit(text).scheme)
        raise ConfigError(
            message, field=field, remedy=fix or "write for example disk:///var/kv?capacity_gb=100"
        ) from None


def _complaint(detail: ErrorDetails, scheme: str) -> tuple[str, str | None]:
    """What is wrong with a tier, and what to do where that can be said. Shows no value."""
    where, kind, ctx = ".".join(map(str, detail["loc"])), detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        options = [name for name in TierSpec.model_fields if name != "url"]
        known = [name for name in options if name not in _OPTION_SCHEMES or scheme in _OPTION_SCHEMES[name]]
        near = nearest(where, known)
        return f"{where} is no option of {scheme}://", f"write {near or 'one of ' + ', '.join(known)}"
    if kind == "literal_error":
        return f"{where} is none of its values", f"write {ctx['expected']}".replace("'", "")
    if (limit := limit_of(kind, ctx)) is not None:
        return f"{where} is out of range", f"write {limit}"
    if kind == "value_error":
        message, fix = split_fix(str(ctx["error"]))
        return (f"{where}: {message}" if where else message), fix
    return f"{where}: {detail['msg'][:1].lower()}{detail['msg'][1:]}", "write what docs/tiers.md says of it"
