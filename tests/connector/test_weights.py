"""The digest of weights: equal for equal files anywhere, different for every fine-tune."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from antiphon.connector import weights
from antiphon.connector.weights import Source, find_files, kv_scales, weights_revision
from antiphon.connector.weights_digests import PIECE_BYTES
from antiphon.core.errors import ConfigError

LAYERS = 24
LAYER_BYTES = 512 << 10


def write_safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [start, start + len(data)]}
        start += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def tensors_of(seed: int) -> dict[str, bytes]:
    return {f"model.layers.{layer}.k_proj.weight": bytes([seed + layer]) * LAYER_BYTES for layer in range(LAYERS)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 12 MiB in one file."""
    folder = tmp_path / "a" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 1e4, "_name_or_path": "/x"}))
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", tensors_of(0))
    return folder


def revision_of(folder: Path, **options: str) -> str:
    return weights_revision(Source(f"{folder}", **options))


def test_a_copy_elsewhere_is_the_same(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "b" / "renamed"
    shutil.copytree(model, copy)
    os.utime(copy / "model.safetensors", (1, 1))
    (copy / "tokenizer.json").write_text('{"other": 1}')
    (copy / "training_args.bin").write_bytes(b"x")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps({**config, "_name_or_path": "/y", "transformers_version": "9"}, indent=3)
    )
    assert revision_of(copy) == revision_of(model)
    assert revision_of(model).startswith("sha256:")


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_change_of_one_layer_is_another_revision(model: Path, layer: int) -> None:
    before = revision_of(model)
    tensors = tensors_of(0)
    name = f"model.layers.{layer}.k_proj.weight"
    middle = LAYER_BYTES // 2
    tensors[name] = tensors[name][:middle] + b"\xff" + tensors[name][middle + 1 :]
    write_safetensors(model / "model.safetensors", tensors)
    assert revision_of(model) != before


@pytest.mark.parametrize("change", ["config", "name", "size", "tensor name", "shard"])
def test_other_changes_are_other_revisions(model: Path, change: str) -> None:
    before = revision_of(model)
    file = model / "model.safetensors"
    if change == "config":
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 2e4}))
    elif change == "name":
        file.rename(model / "model-00001.safetensors")
    elif change == "size":
        file.write_bytes(file.read_bytes() + b"\0")
    elif change == "tensor name":
        write_safetensors(file, {name.replace("k_", "q_"): data for name, data in tensors_of(0).items()})
    else:
        write_safetensors(model / "model-2.safetensors", {"b": b"1"})
    assert revision_of(model) != before


@pytest.mark.parametrize("place", [0, 1, LAYER_BYTES // 2, LAYER_BYTES - 1])
def test_a_change_of_one_byte_in_place_is_another_revision(model: Path, place: int) -> None:
    """A few rows that were trained again: same names, same size, and times that a copy has put back."""
    before = revision_of(model)
    file = model / "model.safetensors"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    tensors = tensors_of(0)
    name = "model.layers.7.k_proj.weight"
    tensors[name] = tensors[name][:place] + b"\xff" + tensors[name][place + 1 :]
    write_safetensors(file, tensors)
    os.utime(file, ns=times)
    assert revision_of(model) != before


def test_files_without_tensors_count_wholly(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    data = bytearray(PIECE_BYTES * 2 + 5)
    seen = set()
    for place in (None, 0, PIECE_BYTES - 1, PIECE_BYTES, len(data) - 1):
        changed = bytearray(data)
        if place is not None:
            changed[place] = 1
        file.write_bytes(changed)
        seen.add(revision_of(tmp_path))
    file.write_bytes(bytes(len(data) + 1))
    seen.add(revision_of(tmp_path))
    assert len(seen) == 6


def test_safetensors_stand_for_the_other_files_beside_them(model: Path) -> None:
    before = revision_of(model)
    (model / "pytorch_model.bin").write_bytes(b"the same again")
    assert revision_of(model) == before
    assert revision_of(model, load_format="pt") != before


def test_a_single_file_is_its_content(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert revision_of(tmp_path / "a.gguf") == revision_of(tmp_path / "b.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUG")
    assert revision_of(tmp_path / "a.gguf") != revision_of(tmp_path / "b.gguf")


def test_dummy_weights_are_dummy(model: Path) -> None:
    assert revision_of(model, load_format="dummy") == "dummy"
    assert kv_scales(Source("nowhere/model", load_format="dummy")) == "dummy"


def snapshot_in(cache: Path, model: Path, commit: str) -> None:
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    for file in model.iterdir():
        blob = repository / "blobs" / f"{commit}-{file.name}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))


def test_a_snapshot_of_the_hub_cache_is_found(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    cache, commit = tmp_path / "hf" / "hub", "0" * 40
    snapshot_in(cache, model, commit)
    references = cache / "models--org--name" / "refs"
    references.mkdir()
    (references / "main").write_text(commit)
    monkeypatch.setenv("HF_HOME", f"{tmp_path / 'hf'}")
    wanted = revision_of(model)
    assert weights_revision(Source("org/name")) == wanted
    assert weights_revision(Source("org/name", revision=commit)) == wanted
    assert weights_revision(Source("org/name", revision="v9")) == "revision:v9"
    monkeypatch.setenv("HF_HUB_CACHE", f"{tmp_path / 'empty'}")
    assert find_files(Source("org/name")) is None
    assert weights_revision(Source("org/name", download_dir=f"{cache}")) == wanted


@pytest.mark.parametrize("name", ["org/missing", "/no/such/folder", "s3://bucket/model", "./nothing", "a/b/c"])
def test_nothing_found_is_an_error_with_a_remedy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", f"{tmp_path}")
    with pytest.raises(ConfigError, match="not on this machine") as caught:
        weights_revision(Source(name))
    assert caught.value.remedy is not None
    assert "antiphon.weights_revision" in caught.value.remedy


def test_what_cannot_be_read_is_an_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no weight files"):
        revision_of(tmp_path / "empty")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-LAYER_BYTES])
    with pytest.raises(ConfigError, match="cut off"):
        revision_of(model)
    for garbage in (b"", b"\xff" * 16, (4).to_bytes(8, "little") + b"[12]", (2).to_bytes(8, "little") + b"??"):
        file.write_bytes(garbage)
        with pytest.raises(ConfigError):
            revision_of(model)
    file.unlink()
    file.symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError):
        revision_of(model)


def test_scales_of_the_kv_cache(model: Path) -> None:
    source = Source(f"{model}")
    assert kv_scales(source) == "unit"
    found = set()
    for scale in (b"\0\0\x80\x3f", b"\0\0\0\x40"):
        scales = {"model.layers.0.self_attn.attn.k_scale": scale, "model.layers.0.k_proj.weight_scale": b"1234"}
        write_safetensors(model / "model.safetensors", {**tensors_of(0), **scales})
        found.add(kv_scales(source))
    assert len(found) == 2
    assert all(text.startswith("checkpoint:") for text in found)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"1")
    assert kv_scales(source) == "as-weights"
    assert kv_scales(Source("org/nowhere-to-be-found")) == "as-weights"


def test_canonical_json_has_no_text_for_objects() -> None:
    with pytest.raises(TypeError):
        weights.canonical_json({"a": object()})
    assert (
        weights.canonical_json({"b": (1, {"_name_or_path": "/x", "c": 2.0}), "a": None})
        == '{"a":null,"b":[1,{"c":2.0}]}'
    )
