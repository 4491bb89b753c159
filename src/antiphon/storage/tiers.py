"""Opens the store of a tier that the spec names. Each kind is imported when it is opened, with the package it needs.

:func:`faults_of` finds what would refuse to open, without opening it, for a check before anything is started.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from antiphon.config.tier_spec import GB, TierSpec, parse_tier
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.core.extras import INSTALL_REMEDY
from antiphon.storage.tier import TierStore

if TYPE_CHECKING:
    from antiphon.storage.etcd_metadata import EtcdAccess

__all__ = ["faults_of", "mooncake_metadata", "open_tier", "try_tier"]


def open_tier(spec: TierSpec) -> TierStore:
    """The store of ``spec``. Only that of a disk waits: it looks through its folder. The others connect when called.

    Raises:
        ConfigError: a package is not installed, a secret cannot be read, the place belongs to somebody else, or
            ``local_host`` is no address of this machine.
        TierUnavailable, TierTimeout: the disk cannot be used.
    """
    _require_xxhash()
    match spec.kind:
        case "disk":
            return _disk(spec)
        case "redis":
            return _redis(spec)
        case "s3":
            return _s3(spec)
        case "mooncake":
            return _mooncake(spec)
        case kind:
            assert kind == "memory", kind
            from antiphon.storage.memory_tier import MemoryTier

            return MemoryTier(spec.tier_name, spec.capacity_bytes, spec.timeout_s)


def try_tier(spec: TierSpec) -> None:
    """Whether ``open_tier`` could open ``spec`` here, and use it as far as this machine is concerned.

    Nothing is started, left behind or asked over the network; but where ``local_host`` of Mooncake is a name, it is
    looked up.

    Raises:
        ConfigError, TierUnavailable: as ``open_tier``; the second too where that name cannot be looked up now.
    """
    _require_xxhash()
    if spec.kind == "disk":
        from antiphon.storage.disk_files import DiskFolder

        DiskFolder.try_out(Path(spec.path))
    elif spec.kind == "mooncake":
        from antiphon.storage.mooncake_loader import free_port
        from antiphon.storage.mooncake_tier import require_mooncake

        require_mooncake()
        mooncake_metadata(spec)
        free_port(spec.local_host)
    else:
        open_tier(spec).close()


def faults_of(texts: Iterable[str]) -> list[tuple[str, str, str]]:
    """Each of the tiers ``texts`` that could not be opened here: the text, what is wrong, and the remedy or nothing."""
    faults = []
    for text in texts:
        spec = parse_tier(text)
        try:
            try_tier(spec)
        except AntiphonError as error:
            faults.append((text, f"the tier {spec.tier_name}: {error.message}", error.remedy or ""))
    return faults


def _require_xxhash() -> None:
    try:
        import xxhash  # noqa: F401  # every record needs it
    except ImportError as error:
        raise ConfigError("the package xxhash is not installed", remedy=INSTALL_REMEDY) from error


def _num_threads(spec: TierSpec) -> int:
    """One for each chunk that may be on its way, and one for what is short: probes, questions, removals."""
    return spec.fetches_max + spec.publishes_max + 1


def _disk(spec: TierSpec) -> TierStore:
    from antiphon.storage.disk_tier import DiskTier, DiskTierOptions

    options = DiskTierOptions(spec.path, spec.capacity_bytes, spec.timeout_s, _num_threads(spec))
    return DiskTier(spec.tier_name, options)


def _redis(spec: TierSpec) -> TierStore:
    from antiphon.storage.redis_tier import RedisTier, RedisTierOptions

    return RedisTier(
        spec.tier_name,
        RedisTierOptions(
            url=spec.url,
            username=spec.username,
            password=spec.read_password(),
            ca_file=spec.ca_file,
            prefix=spec.prefix,
            timeout_s=spec.timeout_s,
            num_threads=_num_threads(spec),
        ),
    )


def _s3(spec: TierSpec) -> TierStore:
    from antiphon.storage.s3_tier import S3Tier, S3TierOptions

    parts = urlsplit(spec.url)
    access_key_id, secret_access_key, session_token = [*spec.read_credentials(), None, None, None][:3]
    return S3Tier(
        spec.tier_name,
        S3TierOptions(
            bucket=parts.netloc,
            prefix=parts.path.strip("/") or "antiphon",
            endpoint=spec.endpoint,
            region=spec.region or os.environ.get("AWS_REGION"),
            access_key_id=access_key_id,
            secret_access_key=secret_access_key,
            session_token=session_token,
            is_virtual_hosted=spec.virtual_host,
            timeout_s=spec.timeout_s,
            num_threads=_num_threads(spec),
        ),
    )


def mooncake_metadata(spec: TierSpec) -> str | EtcdAccess:
    """The metadata server of a Mooncake store.

    Raises:
        ConfigError: a password cannot be read.
    """
    if not spec.metadata_members:
        return spec.metadata.rstrip("/") if spec.metadata.startswith("etcd") else spec.metadata
    from antiphon.storage.etcd_metadata import EtcdAccess

    return EtcdAccess(
        endpoints=spec.metadata_members,
        is_tls=spec.metadata.startswith("etcds://"),
        user=spec.metadata_user or "",
        password=spec.read_metadata_password(),
        ca_file=spec.metadata_ca_file or "",
        cert_file=spec.metadata_cert_file or "",
        key_file=spec.metadata_key_file or "",
    )


def _mooncake(spec: TierSpec) -> TierStore:
    from antiphon.storage.mooncake_tier import MooncakeTier, MooncakeTierOptions

    return MooncakeTier(
        spec.tier_name,
        MooncakeTierOptions(
            master=urlsplit(spec.url).netloc,
            metadata=mooncake_metadata(spec),
            local_host=spec.local_host,
            segment_bytes=round(spec.segment_gb * GB),
            protocol=spec.protocol,
            devices=spec.devices,
            prefix=spec.prefix,
            timeout_s=spec.timeout_s,
            num_threads=_num_threads(spec),
            chunk_bytes_max=round(spec.chunk_gb_max * GB),
        ),
    )
