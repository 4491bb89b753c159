"""The file that says who the tenants are: their keys, the salt of their KV, their limits and their shares.

A file of its own, beside the spec: ``router.tenants_file`` names it, from the spec's folder where it stands in a spec
file. It names files with keys and holds none, for the reasons of ``key_files``. Relative paths in it are meant from its
own folder.

Always true of a table that was read: names, salts and keys are each one tenant's alone, except for tenants without a
salt, who share KV with each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, ValidationError

from antiphon.config.explain import explain
from antiphon.config.key_files import KEYS_MAX, read_keys, shown_to_others
from antiphon.config.model import SpecModel
from antiphon.config.problems import Problem, SpecError
from antiphon.config.router_spec import RouterSpec
from antiphon.core.errors import ConfigError

TENANTS_MAX: Final = 1000
"""Each has a place in what is looked at when a place becomes free, and series of metrics."""
AUTO: Final = "auto"
NONE: Final = "none"

_SALT_MAX_LETTERS: Final = 31
"""With a client's own salt behind it, it still is a name at the cache server, of at most 64 letters."""
_AUTO_DIGEST_LETTERS: Final = 24
_LETTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_RESERVED: Final = ("tenant-", "salt-", "antiphon", "default")


def auto_salt(name: str) -> str:
    """The salt of a tenant that is given none: the same at every router, and nobody else's."""
    digest = hashlib.sha256(b"antiphon tenant salt\0" + name.encode()).hexdigest()
    return f"tenant-{digest[:_AUTO_DIGEST_LETTERS]}"


def _salt(text: str) -> str:
    if not 0 < len(text) <= _SALT_MAX_LETTERS or not _LETTERS.issuperset(text):
        raise ValueError(
            f"{text[:100]!r} is no salt: write auto, none, or 1 to {_SALT_MAX_LETTERS} letters, digits, dashes and "
            "underscores"
        )
    if text.startswith(_RESERVED):
        raise ValueError(f"{text!r} is a name of Antiphon's own: write one that begins otherwise, or auto")
    return text


class TenantSpec(SpecModel):
    """One tenant of a tenants file."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
        description="What the tenant is called in metrics, receipts and logs: 1 to 64 letters, digits, dots, dashes "
        "and underscores. The salt follows from it where cache_salt is auto.",
    )
    api_key_files: list[str] = Field(
        min_length=1,
        max_length=64,
        description="Files with the tenant's API keys, one a line; lines that begin with # are left out. Relative to "
        "the folder of the tenants file. Read at start.",
    )
    cache_salt: Annotated[str, AfterValidator(_salt)] = Field(
        default=AUTO,
        description="What keeps the tenant's KV apart from that of others: auto follows from the name; a text (1 to 31 "
        "letters, digits, dashes, underscores) is a tenant's own; none shares KV with all tenants that have none.",
    )
    may_salt: bool = Field(
        default=False,
        description="Whether its clients may send a cache_salt, to keep KV apart among themselves. It is combined with "
        "the tenant's, so that it never reaches another tenant's KV.",
    )
    weight: float = Field(
        default=1.0,
        ge=0.001,
        le=1000,
        description="Its share of the work under overload, relative to the others that wait, 0.001 to 1000.",
    )
    requests_per_s: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Requests a second that are admitted in the long run, 0 to 1000000 (default: no limit).",
    )
    burst: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Requests admitted at once after a pause, 1 to 1000000 (default: those of one second, at least 1).",
    )
    tokens_per_s: float | None = Field(
        default=None,
        gt=0,
        le=1e12,
        description="Tokens a second, of prompts and answers, in the long run, 0 to 1e12 (default: no limit).",
    )
    tokens_burst: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000_000,
        description="Tokens admitted at once after a pause, 1 to 1e12 (default: those of ten seconds). A request that "
        "is larger needs a full allowance, and takes it into debt.",
    )
    concurrent_max: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Requests in flight, 1 to 1000000 (default: no limit)."
    )
    queue_max: int = Field(
        default=64,
        ge=0,
        le=100_000,
        description="Requests that wait for a place or for the rate, 0 to 100000; more get 429, or 503 where all "
        "tenants together are too many.",
    )


class TenantsSpec(SpecModel):
    """A tenants file, less the tenants."""

    in_flight_max: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Requests in flight of all tenants together, 1 to 1000000; past it they wait, and are admitted by "
        "fair share. Without it (the default) shares mean nothing: a little more than the engines can batch is right.",
    )
    wait_max_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Seconds that a request may wait for a place, above 0, to 3600; then 429 or 503 with Retry-After.",
    )


@dataclass(frozen=True)
class TenantEntry:
    """One tenant as it is served.

    Args:
        salt: of its KV; None: it has none.
        keys: of its clients; not shown where this is printed.
        key_paths: the files that hold them.
    """

    spec: TenantSpec
    salt: str | None
    keys: tuple[bytes, ...] = field(repr=False)
    key_paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class TenantTable:
    """All tenants, at least one."""

    tenants: tuple[TenantEntry, ...]
    spec: TenantsSpec

    def open_files(self) -> Iterator[str]:
        """What to say of each file of keys that other users of this host could read."""
        for path in dict.fromkeys(path for entry in self.tenants for path in entry.key_paths):
            if (text := shown_to_others(path)) is not None:
                yield text


def refuse_both(router: RouterSpec) -> None:
    """Clients' keys have one source.

    Raises:
        SpecError: both a file of keys and one of tenants are named.
    """
    if router.tenants_file is not None and router.api_key_file is not None:
        fix = "remove it, and name the file in api_key_files of a tenant"
        raise SpecError([Problem("router.api_key_file", "with tenants_file, every key is a tenant's", fix)])


def beside(spec_path: Path, raw: dict[str, Any]) -> None:
    """Make ``router.tenants_file`` of what stands in the spec file at ``spec_path`` mean a file beside that one, in
    place. What is no text, or no section, is left for who checks it."""
    router = raw.get("router")
    if not isinstance(router, dict):
        return
    path = router.get("tenants_file")
    if isinstance(path, str) and path and not path.startswith("~"):
        router["tenants_file"] = str(spec_path.parent / path)


def read_tenants(path: str, field: str = "router.tenants_file") -> TenantTable:
    """The tenants in the YAML file at ``path``, with their keys.

    Raises:
        SpecError: with every problem found; each names the file, and the tenant and its field by their place in it.
    """
    raw = _mapping(path, field)
    listed = raw.pop("tenants", None)
    problems = [Problem(f"{path}: {each.field}", each.message, each.fix) for each in _model_problems(raw)]
    if not isinstance(listed, list) or not 0 < len(listed) <= TENANTS_MAX:
        message = f"must be a list of 1 to {TENANTS_MAX} tenants"
        problems.append(Problem(f"{path}: tenants", message, "write - name: and api_key_files: for each tenant"))
        raise SpecError(problems)
    entries: list[tuple[int, TenantEntry]] = []
    for number, value in enumerate(listed):
        entry = _entry(f"{path}: tenants[{number}]", value, Path(path).expanduser().parent, problems)
        if entry is not None:
            entries.append((number, entry))
    problems += _clashes(path, entries)
    if problems:
        raise SpecError(problems)
    return TenantTable(tuple(entry for _, entry in entries), TenantsSpec.model_validate(raw))


def _mapping(path: str, field: str) -> dict[str, Any]:
    from antiphon.config.load import read_mapping  # it loads all of the spec, which a router without tenants needs not

    try:
        return read_mapping(Path(path).expanduser())
    except SpecError as error:
        message = f"{path}: {error.problems[0].message}"
        fix = "name a readable YAML file with tenants: in it (docs/tenants.md)"
        raise SpecError([Problem(field, message, fix)]) from error


def _model_problems(raw: dict[str, Any]) -> list[Problem]:
    try:
        TenantsSpec.model_validate(raw)
    except ValidationError as error:
        return explain(error, TenantsSpec)
    return []


def _entry(where: str, value: object, folder: Path, problems: list[Problem]) -> TenantEntry | None:
    """One tenant; None where it cannot be used, which ``problems`` then says."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        problems.append(Problem(where, "is not a mapping", "write name: and api_key_files: in it"))
        return None
    if "api_key" in value or "api_keys" in value:
        fix = "write the keys into a file, one a line, and name it in api_key_files"
        problems.append(Problem(where, "holds a key, and this file is no place for secrets", fix))
        return None
    try:
        spec = TenantSpec.model_validate(value)
    except ValidationError as error:
        problems += [Problem(f"{where}.{each.field}", each.message, each.fix) for each in explain(error, TenantSpec)]
        return None
    for limit, burst in (("requests_per_s", "burst"), ("tokens_per_s", "tokens_burst")):
        if getattr(spec, burst) is not None and getattr(spec, limit) is None:
            message = f"is set without {limit}, so that it limits nothing"
            problems.append(Problem(f"{where}.{burst}", message, f"add {limit}, or remove it"))
    keys: dict[bytes, None] = {}
    paths = tuple(str(folder / Path(name).expanduser()) for name in spec.api_key_files)
    for number, path in enumerate(paths):
        place = f"{where}.api_key_files[{number}]"
        try:
            keys.update(dict.fromkeys(read_keys(path, place)))
        except ConfigError as error:
            problems.append(Problem(place, error.message, error.remedy or "name another file"))
    salt = auto_salt(spec.name) if spec.cache_salt == AUTO else spec.cache_salt
    return TenantEntry(spec, None if salt == NONE else salt, tuple(keys), paths)


def _clashes(path: str, entries: list[tuple[int, TenantEntry]]) -> Iterator[Problem]:
    """What belongs to two tenants."""
    names: dict[str, int] = {}
    salts: dict[str, str] = {}
    owners: dict[bytes, str] = {}
    for number, entry in entries:
        name, where = entry.spec.name, f"{path}: tenants[{number}]"
        if name in names:
            message = f"{name} is the name of tenants[{names[name]}] too"
            yield Problem(f"{where}.name", message, "give each tenant a name of its own")
            continue
        names[name] = number
        if entry.salt is not None and salts.setdefault(entry.salt, name) != name:
            message = f"is the salt of {salts[entry.salt]} too, which would share their KV"
            yield Problem(f"{where}.cache_salt", message, "write auto, or none for both where they are to share it")
        others = dict.fromkeys(owner for key in entry.keys if (owner := owners.setdefault(key, name)) != name)
        for other in others:
            message = f"{other} and {name} have a key in common"
            yield Problem(f"{where}.api_key_files", message, "remove the key from the files of one of them")
    if len(owners) > KEYS_MAX:
        yield Problem(f"{path}: tenants", f"have more than {KEYS_MAX} keys in all", "remove some")
