"""What stands for a model's weights in the identity of its KV: a digest of the files.

Always true:

- Equal files give equal digests, wherever they lie: a local folder, a snapshot in the Hugging Face cache, a copy of
  either. No path, owner or time enters.
- Weights that differ in one byte have another digest. Every byte is read, once; ``weights_digests`` keeps that.

It uses no network, and does not know which model vLLM has loaded: weights that are replaced inside a running engine
(reinforcement learning) are not seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from antiphon.connector.weights_digests import file_digests
from antiphon.core.errors import ConfigError
from antiphon.core.namespace import encode_value

HEADER_BYTES_MAX = 100_000_000
"""The limit of the safetensors format."""
CONFIG_BYTES_MAX = 16 << 20
DIGEST_LETTERS = 32

DUMMY = "dummy"
"""Stands for vLLM's dummy weights, which are equal in every engine."""

CONFIG_FILES = ("adapter_config.json", "config.json", "hf_quant_config.json", "params.json")
VOLATILE = frozenset({"_name_or_path", "_model_name_or_path", "base_model_name_or_path", "transformers_version"})
"""Fields of configuration files that say where something lies or who wrote it, not what it is."""
OTHER_SUFFIXES = (".bin", ".gguf", ".pt", ".pth")
NOT_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt"})
TORCH_FORMATS = frozenset({"pt", "npcache"})
KV_SCALE = re.compile(r"(^|[._])(k|v|kv)_scale(_float)?$|\.(k|v|qkv)_proj\.output_scale$")

REMEDY = "set antiphon.weights_revision to a text that is the same for the same weights only"


@dataclass(frozen=True, slots=True)
class Source:
    """Where weights are looked for.

    Args:
        model: a folder, a file, or the name of a model in the Hugging Face cache.
        load_format: vLLM's ``--load-format``.
        revision: branch, tag or commit, where one is given.
        download_dir: vLLM's ``--download-dir``, which takes the place of the Hugging Face cache.
    """

    model: str
    load_format: str = "auto"
    revision: str | None = None
    download_dir: str | None = None


def weights_revision(source: Source) -> str:
    """The digest of the weights, ``DUMMY`` for dummy weights, or the given revision where no file can be found.

    Raises:
        ConfigError: there are no files and no revision, or the files cannot be read.
    """
    if source.load_format == DUMMY:
        return DUMMY
    place = find_files(source)
    if place is None:
        if source.revision:
            return f"revision:{source.revision}"
        raise ConfigError(f"the weights of {source.model!r} are not on this machine", remedy=REMEDY)
    try:
        return _digest_of(place, source.load_format)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the weights of {source.model!r} cannot be read: {error}", remedy=REMEDY) from error


def kv_scales(source: Source) -> str:
    """What stands for the scales of a quantised KV cache, which come from the checkpoint or are 1.

    Returns:
        ``dummy``; ``checkpoint:`` with a digest of the scale tensors; ``unit`` where the checkpoint has none;
        ``as-weights`` where that cannot be told apart from the weights' revision.

    Raises:
        ConfigError: the files cannot be read.
    """
    if source.load_format == DUMMY:
        return DUMMY
    place = find_files(source)
    files = [] if place is None else _weight_files(place, source.load_format)
    if not files or any(path.suffix != ".safetensors" for path in files):
        return "as-weights"
    sha = hashlib.sha256()
    has_scales = False
    try:
        for path in files:
            for tensor in sorted(_tensors(path), key=lambda tensor: tensor.name):
                if KV_SCALE.search(tensor.name):
                    has_scales = True
                    with path.open("rb") as file:
                        sha.update(encode_value((tensor.name, _read(file.fileno(), tensor.start, tensor.num_bytes))))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the KV scales of {source.model!r} cannot be read: {error}", remedy=REMEDY) from error
    return f"checkpoint:{sha.hexdigest()[:DIGEST_LETTERS]}" if has_scales else "unit"


def find_files(source: Source) -> Path | None:
    """The folder or file that holds the weights; None where it is not on this machine."""
    path = Path(source.model).expanduser()
    if path.exists():
        return path
    if source.model.count("/") > 1 or source.model.startswith((".", "/", "~")) or ":" in source.model:
        return None  # a path, or an address of a remote store
    name = "models--" + source.model.replace("/", "--")
    for root in _hub_caches(source.download_dir):
        repository = root / name
        wanted = source.revision or "main"
        reference = repository / "refs" / wanted
        try:
            commit = reference.read_text().strip() if reference.is_file() else wanted
        except OSError:
            continue
        snapshot = repository / "snapshots" / commit
        if snapshot.is_dir():
            return snapshot
    return None


def _hub_caches(download_dir: str | None) -> Iterator[Path]:
    """Where the Hugging Face hub keeps its files, in the order in which it looks."""
    if download_dir:
        yield Path(download_dir).expanduser()
        return
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if given := os.environ.get(variable):
            yield Path(given).expanduser()
            return
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    yield Path(home).expanduser() / "hub"


def _weight_files(place: Path, load_format: str) -> list[Path]:
    """The files with weights, by name. Where there are safetensors, other files hold the same again."""
    if place.is_file():
        return [place]
    names = sorted(path for path in place.iterdir() if path.is_file())
    safetensors = [path for path in names if path.suffix == ".safetensors"]
    if safetensors and load_format not in TORCH_FORMATS:
        return safetensors
    return [path for path in names if path.suffix in OTHER_SUFFIXES and path.name not in NOT_WEIGHTS]


def _digest_of(place: Path, load_format: str) -> str:
    files = _weight_files(place, load_format)
    if not files:
        raise ValueError(f"there are no weight files in {place}")
    sha = hashlib.sha256(b"antiphon.weights.2")
    if place.is_dir():
        for name in CONFIG_FILES:
            path = place / name
            if path.is_file():
                sha.update(encode_value((name, _canonical_config(path))))
    for path in files:
        if path.suffix == ".safetensors":
            _check_complete(path)
    for path, digest in zip(files, file_digests(files), strict=True):
        # A single file is named by whoever saved it; in a folder the names are part of the format.
        sha.update(encode_value(("" if place.is_file() else path.name, digest)))
    return f"sha256:{sha.hexdigest()[:DIGEST_LETTERS]}"


def _check_complete(path: Path) -> None:
    """A download that was broken off is no model, whatever its digest."""
    end = max((tensor.start + tensor.num_bytes for tensor in _tensors(path)), default=0)
    if path.stat().st_size < end:
        raise ValueError(f"{path.name} is cut off: its tensors end at byte {end}")


def _read(descriptor: int, start: int, num_bytes: int) -> bytes:
    data = os.pread(descriptor, num_bytes, start)
    if len(data) != num_bytes:
        raise ValueError(f"a weight file is cut off at byte {start + len(data)}")
    return data


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a safetensors file: ``num_bytes`` from ``start`` on."""

    name: str
    start: int
    num_bytes: int


def _tensors(path: Path) -> list[_Tensor]:
    """The tensors of a safetensors file, in the order of its header."""
    with path.open("rb") as file:
        length = int.from_bytes(_read(file.fileno(), 0, 8), "little")
        if length > HEADER_BYTES_MAX:
            raise ValueError(f"{path.name} is not a safetensors file")
        try:
            header = json.loads(_read(file.fileno(), 8, length))
            offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
            return [_Tensor(name, 8 + length + int(at[0]), int(at[1]) - int(at[0])) for name, at in offsets.items()]
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{path.name} is not a safetensors file") from error


def _canonical_config(path: Path) -> str:
    if path.stat().st_size > CONFIG_BYTES_MAX:
        raise ValueError(f"{path.name} is larger than {CONFIG_BYTES_MAX} bytes")
    return canonical_json(json.loads(path.read_bytes()))


def canonical_json(value: object) -> str:
    """``value`` as JSON text that depends on what it means only: without ``VOLATILE`` fields, in a fixed order.

    Raises:
        TypeError: something in it has no text that is the same in every process.
    """
    return json.dumps(_stripped(value), sort_keys=True, separators=(",", ":"))


def _stripped(value: object) -> object:
    if isinstance(value, dict):
        return {f"{key}": _stripped(item) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, list | tuple):
        return [_stripped(item) for item in value]
    return value
