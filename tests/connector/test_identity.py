"""What separates keys and what does not: read from configurations that differ in one thing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.connector import compat, namespaces
from antiphon.connector.identity import EngineFacts, engine_facts, engine_life, served_name
from antiphon.connector.requests import RequestIdentity
from antiphon.connector.settings import ConnectorSettings
from antiphon.core.chunks import chunk_keys
from antiphon.core.errors import ConfigError
from antiphon.core.namespace import Namespace
from tests.connector import fake_vllm
from tests.connector.fake_vllm import DTYPES, Engine, adapter, image, request

SETTINGS = ConnectorSettings()


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the installed vLLM and machine."""
    monkeypatch.setattr(compat, "engine_version", lambda: "0.32.0")
    monkeypatch.setattr(compat, "attention_isa", lambda dtype, block_size, head_size, cache_dtype: "amx")
    monkeypatch.setattr(compat, "cpu_flags", lambda: "x86_64+amx_tile+avx2")


def write_model(folder: Path, content: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(content)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def facts_of(model: Path) -> Callable[..., EngineFacts]:
    def build(change: Callable[[Engine], None] | None = None, device: str = "cuda") -> EngineFacts:
        engine = Engine(model, device)
        if change is not None:
            change(engine)
        return engine_facts(engine, engine.kv_cache(), SETTINGS)

    return build


def identified(facts: EngineFacts, wanted: Any) -> RequestIdentity:
    found = facts.identify(wanted)
    assert isinstance(found, RequestIdentity), found
    return found


def key_of(facts: EngineFacts, wanted: Any | None = None) -> bytes:
    """The key of the first chunk of a request."""
    wanted = wanted if wanted is not None else request()
    found = identified(facts, wanted)
    return chunk_keys(found.namespace, wanted.all_token_ids, facts.chunk_size_tokens, found.items)[0]


# ---- what separates --------------------------------------------------------------------------------------------------


def fp8(engine: Engine) -> None:
    engine.cache_config.cache_dtype = "fp8"
    engine.spec.dtype = DTYPES["uint8"]


def half(engine: Engine) -> None:
    engine.model_config.dtype = engine.spec.dtype = DTYPES["float16"]


def half_on_bfloat(engine: Engine) -> None:
    engine.model_config.dtype = DTYPES["float16"]
    engine.cache_config.cache_dtype = "bfloat16"


def heads(engine: Engine) -> None:
    engine.num_kv_heads = engine.spec.num_kv_heads = 9


def fine_tune(engine: Engine) -> None:
    (Path(engine.model_config.model) / "pytorch_model.bin").write_bytes(b"weightz")


def drafter(engine: Engine) -> None:
    engine.layers.append("draft.layers.0.self_attn.attn")
    engine.speculative_config = SimpleNamespace(draft_model_config=engine.model_config)


MODEL_CHANGES: dict[str, Callable[[Engine], object]] = {
    "model name": lambda engine: vars(engine.model_config).update(served_model_name=["other", "smol"]),
    "weights": fine_tune,
    "dummy weights": lambda engine: vars(engine.load_config).update(load_format="dummy"),
    "KV type": half,
    "fp8": fp8,
    "type of the computation": half_on_bfloat,
    "quantization": lambda engine: vars(engine.model_config).update(quantization="fp8"),
    "KV heads": heads,
    "head size": lambda engine: vars(engine.spec).update(head_size=128),
    "layers": lambda engine: engine.layers.append("model.layers.30.self_attn.attn"),
    "rope": lambda engine: engine.text.update(rope_theta=10000.0),
    "rope scaling": lambda engine: engine.text.update(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "rope by layer": lambda engine: engine.text.update(rope_local_base_freq=1e4),
    "part of a head": lambda engine: engine.text.update(partial_rotary_factor=0.5),
    "positions": lambda engine: engine.text.update(max_position_embeddings=16384),
    "window": lambda engine: vars(engine.spec).update(sliding_window=1024),
    "local chunks": lambda engine: vars(engine.spec).update(attention_chunk_size=1024),
    "overrides": lambda engine: vars(engine.model_config).update(hf_overrides={"rms_norm_eps": 1}),
    "image settings": lambda engine: vars(engine.model_config).update(
        multimodal_config=SimpleNamespace(mm_processor_kwargs={"max_pixels": 100})
    ),
    "drafter": drafter,
}


def test_every_part_of_a_model_separates_keys(facts_of: Callable[..., EngineFacts], model: Path) -> None:
    keys = {"nothing": key_of(facts_of())}
    for name, change in MODEL_CHANGES.items():
        keys[name] = key_of(facts_of(change))
        (model / "pytorch_model.bin").write_bytes(b"weights")
    assert len(set(keys.values())) == len(keys)


def test_mla_separates_keys(facts_of: Callable[..., EngineFacts]) -> None:
    def mla(engine: Engine) -> None:
        engine.spec = fake_vllm.MLAAttentionSpec(num_kv_heads=1, head_size=576, block_size=16)

    facts = facts_of(mla)
    assert facts.model.attention_kind == "mla"
    assert facts.layout.num_slabs == 1
    assert facts.layout.slab_bytes == 30 * 256 * 576 * 2
    assert key_of(facts) != key_of(facts_of())


def test_layers_with_a_window_are_named(facts_of: Callable[..., EngineFacts]) -> None:
    kinds = set()
    for types in (["full", "sliding"], ["sliding", "full"]):

        def change(engine: Engine, types: list[str] = types) -> None:
            engine.spec.sliding_window = 512
            engine.text["layer_types"] = types

        kinds.add(facts_of(change).model.attention_kind)
    assert len(kinds) == 2
    assert all(kind.startswith("sliding:512:layers=") for kind in kinds)


def test_long_rope_depends_on_the_length_of_the_engine(facts_of: Callable[..., EngineFacts]) -> None:
    def of_length(length: int) -> bytes:
        def change(engine: Engine) -> None:
            engine.model_config.max_model_len = length
            engine.text["rope_parameters"] = {"rope_type": "longrope", "original_max_position_embeddings": 4096}

        return key_of(facts_of(change))

    assert of_length(2048) == of_length(4096)
    assert of_length(4097) == of_length(8192)
    assert of_length(4096) != of_length(4097)


def test_requests_are_separated(facts_of: Callable[..., EngineFacts], tmp_path: Path) -> None:
    facts = facts_of()
    poet = write_model(tmp_path / "poet", b"poet")
    other = write_model(tmp_path / "other", b"other")
    requests = {
        "plain": request(),
        "salt": request(cache_salt="a"),
        "other salt": request(cache_salt="b"),
        "lora": request(lora_request=adapter(poet)),
        "lora name": request(lora_request=adapter(poet, "bard", 2)),
        "lora weights": request(lora_request=adapter(other, "poet", 3)),
        "image": request(mm_features=[image("cat")]),
        "other image": request(mm_features=[image("dog")]),
        "image elsewhere": request(mm_features=[image("cat", offset=11)]),
        "larger image": request(mm_features=[image("cat", length=5)]),
        "two images": request(mm_features=[image("cat"), image("dog", offset=20)]),
    }
    keys = {name: key_of(facts, wanted) for name, wanted in requests.items()}
    assert len(set(keys.values())) == len(keys)
    assert key_of(facts, request(request_id="r2")) == keys["plain"]
    assert key_of(facts, request(lora_request=adapter(poet, number=9))) == keys["lora"]


def test_an_adapter_is_its_content_wherever_it_lies(facts_of: Callable[..., EngineFacts], tmp_path: Path) -> None:
    poet = write_model(tmp_path / "poet", b"poet")
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(poet, copy)
    facts = facts_of()
    assert key_of(facts, request(lora_request=adapter(poet))) == key_of(
        facts, request(lora_request=adapter(copy, number=2))
    )
    found = facts.identify(request(lora_request=adapter(tmp_path / "gone", "ghost", 4)))
    assert isinstance(found, str)
    assert "ghost" in found


def test_a_fingerprint_separates_keys(facts_of: Callable[..., EngineFacts], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"gpu": key_of(facts_of()), "cpu": key_of(facts_of(device="cpu"))}
    keys["block size"] = key_of(facts_of(lambda engine: vars(engine.spec).update(block_size=64), "cpu"))
    keys["ranks"] = key_of(facts_of(lambda engine: engine.use_ranks(3), "cpu"))
    with monkeypatch.context() as patched:
        patched.setattr(compat, "engine_version", lambda: "0.31.2")
        keys["version"] = key_of(facts_of(device="cpu"))
        assert key_of(facts_of()) == keys["gpu"]
    with monkeypatch.context() as patched:
        patched.setattr(compat, "cpu_flags", lambda: "x86_64+avx2")
        keys["machine"] = key_of(facts_of(device="cpu"))
        assert key_of(facts_of()) == keys["gpu"]
    monkeypatch.setattr(compat, "attention_isa", lambda *facts: "vec")
    keys["packing"] = key_of(facts_of(device="cpu"))
    assert key_of(facts_of()) == keys["gpu"]
    assert len(set(keys.values())) == len(keys)


def test_a_patch_release_packs_as_its_minor(
    facts_of: Callable[..., EngineFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = facts_of(device="cpu").layout
    monkeypatch.setattr(compat, "engine_version", lambda: "0.32.4+cpu")
    assert facts_of(device="cpu").layout == before
    assert before.fingerprint is not None
    assert before.fingerprint.startswith("cpu amx/vllm 0.32/30x[3,128,128] bfloat16/ranks 1/")


def test_chunk_size_separates_keys(model: Path) -> None:
    engine = Engine(model)
    keys = {
        key_of(engine_facts(engine, engine.kv_cache(), ConnectorSettings(chunk_size_tokens=size)))
        for size in (256, 512)
    }
    assert len(keys) == 2


# ---- what does not separate ------------------------------------------------------------------------------------------


def many_ranks(engine: Engine) -> None:
    engine.num_kv_heads = 3
    engine.use_ranks(3)


SERVING_CHANGES: dict[str, Callable[[Engine], object]] = {
    "block size": lambda engine: vars(engine.spec).update(block_size=64),
    "ranks": many_ranks,
    "seed": lambda engine: vars(engine.model_config).update(seed=7),
    "longest prompt": lambda engine: vars(engine.model_config).update(max_model_len=100),
    "engine id": lambda engine: vars(engine.kv_transfer_config).update(engine_id="decode-3-ffffffffffff"),
    "instance": lambda engine: vars(engine).update(instance_id="zzzzz"),
    "second served name": lambda engine: vars(engine.model_config).update(served_model_name=["smol", "alias"]),
    "data parallelism": lambda engine: vars(engine.parallel_config).update(data_parallel_size=4, rank=3),
    "guesses without KV": lambda engine: vars(engine).update(speculative_config=SimpleNamespace(method="ngram")),
}


@pytest.mark.parametrize("name", SERVING_CHANGES)
def test_how_it_is_served_does_not_separate_keys(facts_of: Callable[..., EngineFacts], name: str) -> None:
    assert key_of(facts_of(SERVING_CHANGES[name])) == key_of(facts_of())


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_path_and_port_do_not_separate_keys(model: Path, tmp_path: Path, device: str) -> None:
    copy = tmp_path / "elsewhere" / "under-another-name"
    shutil.copytree(model, copy)
    keys = set()
    for folder, port in ((model, 6555), (copy, 7000)):
        engine = Engine(folder, device)
        engine.kv_transfer_config.kv_connector_extra_config = {"antiphon.port": port}
        keys.add(key_of(engine_facts(engine, engine.kv_cache(), ConnectorSettings(port=port))))
    assert len(keys) == 1


CHILD = """
import sys
from pathlib import Path
from antiphon.connector import compat
from antiphon.connector.identity import engine_facts
from antiphon.connector.settings import ConnectorSettings
from tests.connector.fake_vllm import Engine, adapter, image, request
compat.engine_version = lambda: "0.32.0"
compat.attention_isa = lambda *facts: "amx"
compat.cpu_flags = lambda: "x86_64+amx_tile+avx2"
engine = Engine(Path(sys.argv[1]), "cpu")
facts = engine_facts(engine, engine.kv_cache(), ConnectorSettings())
found = facts.identify(request(cache_salt="s", lora_request=adapter(Path(sys.argv[1])), mm_features=[image("cat")]))
print(found.namespace.hex(), found.tenant, facts.engine, facts.incarnation)
"""


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_another_process_has_the_same_namespace(facts_of: Callable[..., EngineFacts], model: Path, seed: str) -> None:
    facts = facts_of(device="cpu")
    here = identified(facts, request(cache_salt="s", lora_request=adapter(model), mm_features=[image("cat")]))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, f"{model}"],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [here.namespace.hex(), "s", facts.engine, facts.incarnation]


# ---- layouts ---------------------------------------------------------------------------------------------------------


def test_a_gpu_has_a_slab_for_each_head(facts_of: Callable[..., EngineFacts]) -> None:
    facts = facts_of()
    assert (facts.layout.num_slabs, facts.layout.fingerprint) == (3, None)
    assert facts.layout.slab_bytes == 30 * 256 * 2 * 64 * 2
    assert facts.slabs_written_by(0) == (0, 1, 2)


def test_ranks_that_repeat_a_head_write_it_once(facts_of: Callable[..., EngineFacts]) -> None:
    def change(engine: Engine) -> None:
        engine.num_kv_heads = 2
        engine.use_ranks(4)

    facts = facts_of(change)
    assert [list(facts.slabs_of(rank)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [facts.slabs_written_by(rank) for rank in range(4)] == [(0,), (), (1,), ()]


def test_a_cpu_has_a_slab_of_whole_blocks_for_each_rank(facts_of: Callable[..., EngineFacts]) -> None:
    facts = facts_of(lambda engine: engine.use_ranks(3), "cpu")
    assert facts.layout.num_slabs == 3
    assert facts.layout.slab_bytes == 30 * 2 * 128 * 1 * 2 * 64 * 2
    assert [facts.rank_slab(rank) for rank in range(4)] == [0, 1, 2, 0]
    assert [facts.slabs_written_by(rank) for rank in range(3)] == [(0,), (1,), (2,)]
    assert (facts.block_size_tokens, facts.chunk_size_tokens, facts.num_ranks) == (128, 256, 3)


# ---- what disables reuse ---------------------------------------------------------------------------------------------


def unlike_spec(engine: Engine, kind: type[fake_vllm.FullAttentionSpec]) -> None:
    engine.spec = kind(block_size=16)


def first_batch(engine: Engine) -> None:
    fp8(engine)
    engine.cache_config.calculate_kv_scales = True


UNSAFE: dict[str, tuple[Callable[[Engine], object], str]] = {
    "two groups": (lambda engine: engine.extra_groups.append(SimpleNamespace(kv_cache_spec=engine.spec)), "2 groups"),
    "no layer": (lambda engine: engine.layers.clear(), "no layer with KV"),
    "mamba": (lambda engine: unlike_spec(engine, fake_vllm.MambaSpec), "MambaSpec"),
    "blocks that are dropped": (lambda engine: unlike_spec(engine, fake_vllm.SlidingWindowSpec), "SlidingWindowSpec"),
    "pipeline": (lambda engine: vars(engine.parallel_config).update(pipeline_parallel_size=2), "pipeline_parallel"),
    "context": (
        lambda engine: vars(engine.parallel_config).update(decode_context_parallel_size=2),
        "decode_context_parallel_size is 2",
    ),
    "not causal": (lambda engine: vars(engine.spec).update(non_causal=True), "not causal"),
    "block size": (lambda engine: vars(engine.spec).update(block_size=48), "--block-size"),
    "padded blocks": (lambda engine: vars(engine.spec).update(padding_bytes=64), "where K and V take"),
    "heads": (lambda engine: vars(engine.spec).update(num_kv_heads=2), "2 KV heads"),
    "device": (lambda engine: vars(engine.device_config).update(device_type="xpu"), "'xpu'"),
    "KV type": (lambda engine: vars(engine.cache_config).update(cache_dtype="nvfp4"), "nvfp4"),
    "other blocks": (lambda engine: vars(engine.spec).update(dtype=DTYPES["int8"]), "the blocks hold int8"),
    "mixed types": (
        lambda engine: vars(engine.cache_config).update(kv_cache_dtype_skip_layers=["0"]),
        "different KV types",
    ),
    "scales of the first batch": (first_batch, "first batch"),
    "weights": (
        lambda engine: vars(engine.model_config).update(model="org/nowhere-at-all"),
        "antiphon.weights_revision",
    ),
    "a setting without text": (
        lambda engine: vars(engine.model_config).update(quantization_config={"a": object()}),
        "no text that is the same",
    ),
    "unknown drafter": (
        lambda engine: (engine.layers.append("draft"), vars(engine).update(speculative_config=SimpleNamespace())),
        "speculates",
    ),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_what_is_not_understood_disables_reuse(facts_of: Callable[..., EngineFacts], name: str) -> None:
    change, reason = UNSAFE[name]
    with pytest.raises(ConfigError) as caught:
        facts_of(change)
    assert reason in f"{caught.value}"


def test_a_version_that_is_not_known_disables_reuse(
    facts_of: Callable[..., EngineFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "engine_version", lambda: "0.33.0")
    with pytest.raises(ConfigError, match=r"0\.33\.0"):
        facts_of()


def test_a_given_revision_stands_for_weights_that_are_elsewhere(model: Path) -> None:
    engine = Engine(model)
    engine.model_config.model = "org/nowhere-at-all"
    keys = {
        key_of(engine_facts(engine, engine.kv_cache(), ConnectorSettings(weights_revision=text))) for text in ("a", "b")
    }
    assert len(keys) == 2


def test_speculation_is_said(facts_of: Callable[..., EngineFacts]) -> None:
    facts = facts_of(lambda engine: vars(engine).update(speculative_config=SimpleNamespace()))
    assert facts.notices == ("speculative decoding is on: only accepted tokens are stored",)


# ---- tensors ---------------------------------------------------------------------------------------------------------


def tensors(engine: Engine, shape: tuple[int, ...], dtype: str = "bfloat16") -> dict[str, Any]:
    return {name: fake_vllm.Tensor(index, shape, dtype) for index, name in enumerate(engine.layers)}


@pytest.fixture
def checked(model: Path) -> Callable[..., str | None]:
    def check(change: Callable[[Engine, dict[str, Any]], object], device: str, shape: tuple[int, ...]) -> str | None:
        engine = Engine(model, device)
        facts = engine_facts(engine, engine.kv_cache(), SETTINGS)
        kv_caches = tensors(engine, shape)
        change(engine, kv_caches)
        return facts.check_kv_caches(engine, kv_caches, 364)

    return check


def nothing(engine: Engine, kv_caches: dict[str, Any]) -> None:
    return None


@pytest.mark.parametrize(
    ("device", "shape"), [("cpu", (364, 3, 128, 128)), ("cuda", (364, 3, 16, 128)), ("cuda", (728, 3, 8, 128))]
)
def test_tensors_as_configured_pass(checked: Callable[..., str | None], device: str, shape: tuple[int, ...]) -> None:
    assert checked(nothing, device, shape) is None


def isa_in_use(isa: str) -> Callable[[Engine, dict[str, Any]], object]:
    def change(engine: Engine, kv_caches: dict[str, Any]) -> None:
        engine.compilation_config.static_forward_context[engine.layers[3]] = SimpleNamespace(isa=isa)

    return change


@pytest.mark.parametrize(
    ("change", "shape", "reason"),
    [
        (nothing, (364, 3, 64, 256), r"not bfloat16 \(364, 3, 128, 128\)"),
        (nothing, (363, 3, 128, 128), "is bfloat16"),
        (nothing, (728, 3, 64, 128), "is bfloat16"),
        (lambda engine, kv: kv.popitem(), (364, 3, 128, 128), "layers with KV differ"),
        (lambda engine, kv: vars(kv[engine.layers[1]]).update(address=0), (364, 3, 128, 128), "share"),
        (lambda engine, kv: vars(kv[engine.layers[1]]).update(dtype=DTYPES["float16"]), (364, 3, 128, 128), "float16"),
        (lambda engine, kv: kv.update({engine.layers[0]: [1]}), (364, 3, 128, 128), "several tensors"),
        (isa_in_use("vec"), (364, 3, 128, 128), "packed for vec, where amx"),
    ],
)
def test_tensors_that_are_not_as_configured_disable_reuse(
    checked: Callable[..., str | None], change: Any, shape: tuple[int, ...], reason: str
) -> None:
    found = checked(change, "cpu", shape)
    assert found is not None
    assert re.search(reason, found), found


def test_the_packing_in_use_is_the_one_that_was_read(checked: Callable[..., str | None]) -> None:
    assert checked(isa_in_use("amx"), "cpu", (364, 3, 128, 128)) is None


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("served", "path", "name", "has_notice"),
    [
        ("smol", "/models/x", "smol", False),
        (["smol", "b"], "/models/x", "smol", False),
        ("org/name", "org/name", "org/name", False),
        ("/models/x", "/models/x", "x", True),
        ("/models/x/", "/models/x/", "x", True),
        (None, "org/name", "org/name", False),
        ([], "./x", "x", True),
        ("/c/models--org--name/snapshots/abc", "/c/models--org--name/snapshots/abc", "org/name", True),
    ],
)
def test_the_served_name_is_never_a_path(served: Any, path: str, name: str, has_notice: bool) -> None:
    found, notices = served_name(SimpleNamespace(served_model_name=served, model=path))
    assert found == name
    assert bool(notices) is has_notice
    assert all("--served-model-name" in notice for notice in notices)


def life(engine_id: str, instance_id: str = "abcde", engine_name: str | None = None) -> tuple[str, str]:
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine_id), instance_id=instance_id)
    return engine_life(config, engine_name)


def test_an_engine_id_of_ours_holds_name_and_incarnation() -> None:
    assert life("prefill-0-0123456789ab") == ("prefill-0", "0123456789ab")
    assert life("prefill-0-0123456789ab", "other") == ("prefill-0", "0123456789ab")
    assert life("prefill-0-0123456789ab_dp2") == ("prefill-0-dp2", "0123456789ab")
    assert life("prefill-0-0123456789ab", engine_name="mine")[0] == "mine"


@pytest.mark.parametrize("engine_id", ["fixed", "0b6e7a0e-4d5c-4c55-9d3c-0123456789ab"])
def test_another_engine_id_gets_an_incarnation_for_each_start(engine_id: str) -> None:
    name, incarnation = life(engine_id)
    assert name in {"fixed", "vllm-0b6e7a0e"}
    assert len(incarnation) == 12
    assert life(engine_id) == (name, incarnation)
    assert life(engine_id, "another start")[1] != incarnation
    assert life(f"{engine_id}_dp1")[1] != incarnation


def test_namespaces_and_adapters_are_bounded(
    facts_of: Callable[..., EngineFacts], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(namespaces, "NAMESPACES_MAX", 3)
    monkeypatch.setattr(namespaces, "ADAPTERS_MAX", 2)
    facts = facts_of()
    owner = facts.identify.__self__  # type: ignore[attr-defined]
    first = identified(facts, request(cache_salt="0")).namespace
    folder = write_model(tmp_path / "poet")
    for number in range(1, 6):
        facts.identify(request(cache_salt=f"{number}", lora_request=adapter(folder, number=number)))
    assert len(owner._namespaces) == 3
    assert len(owner._adapters) == 2
    assert identified(facts, request(cache_salt="0")).namespace == first


def test_a_namespace_holds_no_path(facts_of: Callable[..., EngineFacts], model: Path) -> None:
    facts = facts_of(device="cpu")
    namespace: Namespace = facts.identify.__self__.namespace_of(None, "")  # type: ignore[attr-defined]
    text = json.dumps(namespace.fields())
    assert f"{model}" not in text
    assert "/tmp" not in text
