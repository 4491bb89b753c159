"""When two builds of an application are the same to their replicas: a version, made of what they are given.

Pure but for the files of this Python, which it reads. Two builds have one version where every replica of one could have
been made by the other: the same settings, the same Antiphon, the same packages, the same files of keys, as they are
where it is built. When a build was made does not count, nor does between what bounds a pool is scaled, and by what. Not
looked at: what is in a model's folder, and the packages of another interpreter.

That a pool is scaled does: Serve has a replica report what it measures from its start on or never, and as often as it
was told then.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import antiphon
from antiphon.config.spec import Pool, Spec
from antiphon.ray.plans import AppSettings
from antiphon.ray.scaling import ReplicaSettings

CODE = ("*.py", "*.so")


def version_of(settings: AppSettings, pools: Mapping[Pool, ReplicaSettings]) -> str:
    """The version of an application whose replicas are given ``settings``, and measured as ``pools`` says."""
    spec = settings.spec
    scaled = {name: own for name, own in pools.items() if own.min_replicas < own.max_replicas}
    given = {
        "spec": spec.model_dump(mode="json"),
        "written": spec.model_dump(mode="json", exclude_unset=True),
        "pools": {name: [own.drain_timeout_s, own.files] for name, own in settings.pools.items()},
        "measured": {name: [own.metrics_interval_s, own.look_back_s] for name, own in scaled.items()},
        "keys": [_state_of(path) for path in _key_files(spec)],
        "packages": sorted({path.name for entry in sys.path for path in Path(entry).glob("*.dist-info")}),
    }
    digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode())
    for folder in antiphon.__path__:
        for path in sorted(path for pattern in CODE for path in Path(folder).rglob(pattern)):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"antiphon-{digest.hexdigest()}"


def _key_files(spec: Spec) -> list[str]:
    router = spec.router
    named = [router.api_key_file, router.worker_api_key_file, router.admin_key_file, router.tenants_file]
    return [path for path in (*named, spec.cache.cluster_secret_file) if path is not None]


def _state_of(path: str) -> list[int] | None:
    """Changes when the file does. Nothing of a key: Ray shows the version. None where it is not there."""
    try:
        found = Path(path).expanduser().stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]
