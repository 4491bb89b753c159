"""What an engine's KV means: read from vLLM's configuration, turned into a model identity and a chunk layout. What a
request adds is in ``namespaces``.

Always true:

- Everything that changes the K and V of a token is in the identity: the weights as loaded, the KV type and its scales,
  attention, positions, adapter, multimodal items, salt. Nothing of how they are served is: no path, port, seed, block
  size or tensor-parallel size, except in the fingerprint of opaque bytes.
- What is not understood is a ``ConfigError`` that says why: reuse is off then, and never serving.
- The scheduler and the workers of an engine read the same facts from the same configuration; a worker holds them
  against its tensors (``EngineFacts.check_kv_caches``).

It imports no vLLM: vLLM's objects are arguments, and what differs between versions is in ``compat``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from antiphon.connector import compat, positional
from antiphon.connector.namespaces import Identifier
from antiphon.connector.requests import RequestIdentity
from antiphon.connector.settings import ConnectorSettings
from antiphon.connector.weights import DUMMY, Source, canonical_json, kv_scales, weights_revision
from antiphon.core.chunks_layout import ChunkLayout, head_major_layout, slabs_of_rank
from antiphon.core.errors import ConfigError
from antiphon.core.namespace import ModelIdentity

KNOWN_SPECS = {"FullAttentionSpec": "full", "MLAAttentionSpec": "mla"}
"""vLLM's classes of KV that reuse understands. Every other one keeps something else, or drops blocks on its own."""
PLAIN_KV_TYPES = frozenset({"bfloat16", "float16", "float32"})
FP8_KV_TYPES = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
DIGEST_LETTERS = 16

ENGINE_ID = re.compile(r"(.+)-([0-9a-f]{12})")
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
INCARNATION_LETTERS = 12


class VllmConfig(Protocol):
    """The parts of vLLM's configuration that are read."""

    model_config: Any
    cache_config: Any
    parallel_config: Any
    device_config: Any
    load_config: Any
    compilation_config: Any
    speculative_config: Any
    kv_transfer_config: Any
    instance_id: str


class KvCacheConfig(Protocol):
    """What vLLM tells about the KV blocks."""

    num_blocks: int
    kv_cache_groups: Sequence[Any]


@dataclass(frozen=True, slots=True)
class EngineKv:
    """How an engine keeps its KV, as far as its configuration tells it.

    Args:
        chunk_size_tokens: tokens of a chunk.
        block_size_tokens: tokens of a block.
        block_shape: KV heads of one rank, tokens, elements of K and V of a head.
        block_bytes: bytes of a block of one layer of one rank.
        dtype: element type of the tensors.
        layer_names: layers with KV, in vLLM's order.
        num_ranks: tensor-parallel ranks, each of which writes its own slabs.
        isa: instruction set for which a CPU engine packs; None where bytes are not opaque.
    """

    chunk_size_tokens: int
    block_size_tokens: int
    block_shape: tuple[int, int, int]
    block_bytes: int
    dtype: str
    layer_names: tuple[str, ...]
    num_ranks: int
    isa: str | None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the connector has to know of its engine: equal in its scheduler and its workers.

    Args:
        engine: its name, the same for all its processes and lives.
        incarnation: of this start of it, the same for all its processes.
        model: identity of its model.
        layout: the form of a chunk, over all ranks.
        kv: how it keeps its KV.
        identify: what a request's KV means, or the reason why it goes without reuse.
        notices: sentences for the operator.
    """

    engine: str
    incarnation: str
    model: ModelIdentity
    layout: ChunkLayout
    kv: EngineKv
    identify: Callable[[compat.RequestFields], RequestIdentity | str]
    notices: tuple[str, ...] = ()

    @property
    def chunk_size_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.kv.chunk_size_tokens

    @property
    def block_size_tokens(self) -> int:
        """Tokens of a block."""
        return self.kv.block_size_tokens

    @property
    def num_ranks(self) -> int:
        """Tensor-parallel ranks."""
        return self.kv.num_ranks

    def rank_slab(self, rank: int) -> int:
        """Place of a rank's part in a chunk, in parts of its size: the slabs of its heads, or its whole blocks."""
        own = self.slabs_of(rank)
        return own.start // len(own)

    def slabs_of(self, rank: int) -> range:
        """The slabs that a rank reads."""
        return slabs_of_rank(self.layout.num_slabs, rank % self.kv.num_ranks, self.kv.num_ranks)

    def slabs_written_by(self, rank: int) -> tuple[int, ...]:
        """The slabs that a rank writes: its own, unless an earlier rank holds the same head."""
        own = self.slabs_of(rank)
        is_repeated = rank % self.kv.num_ranks > 0 and self.slabs_of(rank - 1) == own
        return () if is_repeated else tuple(own)

    def check_kv_caches(self, config: VllmConfig, kv_caches: Mapping[str, Any], num_blocks: int) -> str | None:
        """Holds the tensors that vLLM registers in a worker against its configuration. Returns what differs, or None.

        Args:
            kv_caches: layer name to tensor ``[blocks, heads, tokens, elements]``.
            num_blocks: of the worker's KV cache configuration.
        """
        return _check_kv_caches(self.kv, config, kv_caches, num_blocks)


# ---- the engine ------------------------------------------------------------------------------------------------------


def engine_facts(config: VllmConfig, kv_cache: KvCacheConfig, settings: ConnectorSettings) -> EngineFacts:
    """Everything about an engine, in its scheduler or in a worker. Reads samples of the weight files.

    Raises:
        ConfigError: KV of this engine cannot be reused safely, and why.
    """
    reason = compat.supported_version(compat.engine_version())
    if reason is not None:
        raise ConfigError(reason, remedy="reuse needs one of these versions")
    name, notices = served_name(config.model_config)
    kv, model = _read_kv(config, kv_cache, settings.chunk_size_tokens, name)
    layout = _layout(config, kv, model)
    model = _with_weights(config, model, settings)
    if config.speculative_config is not None:
        notices.append("speculative decoding is on: only accepted tokens are stored")
    engine, incarnation = engine_life(config, settings.engine_name)
    identify = Identifier(model, layout, kv.chunk_size_tokens).identify
    return EngineFacts(engine, incarnation, model, layout, kv, identify, tuple(notices))


def engine_life(config: VllmConfig, engine_name: str | None) -> tuple[str, str]:
    """Name and incarnation of an engine, from what vLLM gives to all its processes.

    An ``engine_id`` that ends in an incarnation, as ours do, is taken apart. Any other one may be the same at the next
    start, so that vLLM's instance id, which is not, tells the lives apart.
    """
    engine_id = f"{config.kv_transfer_config.engine_id}"
    name, _, rank = engine_id.partition("_dp")
    is_random = UUID.fullmatch(name) is not None
    found = None if is_random else ENGINE_ID.fullmatch(name)
    if found is not None:
        name, incarnation = found[1], found[2]
    else:
        seed = f"{engine_id}\n{config.instance_id}"
        incarnation = hashlib.sha256(seed.encode()).hexdigest()[:INCARNATION_LETTERS]
        name = f"vllm-{name[:8]}" if is_random else name
    name = engine_name or name
    return (f"{name}-dp{rank}" if rank else name), incarnation


def _read_kv(
    config: VllmConfig, kv_cache: KvCacheConfig, chunk_size_tokens: int, model_name: str
) -> tuple[EngineKv, ModelIdentity]:
    """How KV is kept, and the identity of the model as far as no file is needed."""
    model, num_ranks = config.model_config, int(config.parallel_config.tensor_parallel_size)
    group = _only_group(kv_cache)
    spec = group.kv_cache_spec
    kind = KNOWN_SPECS.get(type(spec).__name__)
    if kind is None:
        raise ConfigError(f"KV of the kind {type(spec).__name__} is not understood")
    _refuse_parallelism(config.parallel_config)
    if getattr(spec, "non_causal", False):
        raise ConfigError("attention is not causal: the KV of a token depends on later tokens")
    if chunk_size_tokens % spec.block_size:
        raise ConfigError(
            f"a chunk of {chunk_size_tokens} tokens is not made of whole blocks of {spec.block_size}",
            remedy=f"start the engine with a --block-size that divides {chunk_size_tokens}",
        )
    num_heads = 1 if kind == "mla" else int(model.get_total_num_kv_heads())
    if spec.num_kv_heads != max(1, num_heads // num_ranks):
        raise ConfigError(f"a rank has {spec.num_kv_heads} KV heads, which is not {num_heads} over {num_ranks} ranks")
    kv = EngineKv(
        chunk_size_tokens=chunk_size_tokens,
        block_size_tokens=int(spec.block_size),
        block_shape=(int(spec.num_kv_heads), int(spec.block_size), int(spec.head_size) * (1 if kind == "mla" else 2)),
        block_bytes=int(spec.page_size_bytes),
        dtype=compat.dtype_name(spec.dtype),
        layer_names=tuple(dict.fromkeys(group.layer_names)),
        num_ranks=num_ranks,
        isa=_isa(config, spec),
    )
    dense_bytes = math.prod(kv.block_shape) * int(spec.dtype.itemsize)
    if kv.block_bytes != dense_bytes:
        raise ConfigError(f"a block has {kv.block_bytes} bytes, where K and V take {dense_bytes}")
    identity = ModelIdentity(
        model_name=model_name,
        weights_revision="",
        kv_dtype=_kv_dtype(config, spec),
        kv_scales="",
        attention_kind=positional.attention_kind(kind, model, spec),
        num_layers=len(kv.layer_names),
        num_kv_heads=num_heads,
        head_size=int(spec.head_size),
        positional=positional.settings_of(model),
    )
    return kv, identity


def _only_group(kv_cache: KvCacheConfig) -> Any:
    groups = kv_cache.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups})) or "none"
        raise ConfigError(f"the model has {len(groups)} groups of KV ({kinds}): one is understood")
    if not groups[0].layer_names:
        raise ConfigError("the model has no layer with KV")
    return groups[0]


def _refuse_parallelism(parallel: Any) -> None:
    for field in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, field, 1) > 1:
            raise ConfigError(f"{field} is {getattr(parallel, field)}: KV is reused with tensor parallelism only")


def served_name(model: Any) -> tuple[str, list[str]]:
    """The served model name, never a path, and a notice where it had to be made up."""
    served = model.served_model_name
    name = served if isinstance(served, str) else (served[0] if served else "")
    name = name or model.model
    path = Path(name)
    is_path = name.startswith(("/", ".", "~")) or (name == model.model and path.exists())
    if not is_path:
        return name, []
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        short = path.parent.parent.name.removeprefix("models--").replace("--", "/")
    else:
        short = Path(os.path.abspath(name)).name
    return short, [f"the model has no served name: {short!r} stands for it in the cache; set --served-model-name"]


def _kv_dtype(config: VllmConfig, spec: Any) -> str:
    given, stored = f"{config.cache_config.cache_dtype}", compat.dtype_name(spec.dtype)
    if getattr(config.cache_config, "kv_cache_dtype_skip_layers", None):
        raise ConfigError("layers have different KV types (--kv-cache-dtype-skip-layers)")
    if given in FP8_KV_TYPES:
        if compat.has_first_batch_scales(config.cache_config):
            raise ConfigError("KV scales are computed from the first batch, so that no other engine has the same")
        return FP8_KV_TYPES[given]
    wanted = compat.dtype_name(config.model_config.dtype) if given == "auto" else given
    if wanted not in PLAIN_KV_TYPES:
        raise ConfigError(f"the KV type {wanted} is not understood")
    if stored != wanted:
        raise ConfigError(f"the KV type is {wanted}, but the blocks hold {stored}")
    return wanted


def _isa(config: VllmConfig, spec: Any) -> str | None:
    """The instruction set that a CPU engine packs for; None for a GPU, whose bytes are not opaque."""
    device = config.device_config.device_type
    if device == "cuda":
        return None
    if device != "cpu":
        raise ConfigError(f"the KV layout of the device {device!r} is not understood")
    cache_dtype = f"{config.cache_config.cache_dtype}"
    return compat.attention_isa(config.model_config.dtype, int(spec.block_size), int(spec.head_size), cache_dtype)


def _layout(config: VllmConfig, kv: EngineKv, model: ModelIdentity) -> ChunkLayout:
    """The form of a chunk: slabs by head, or whole blocks by rank with a fingerprint of who can read them."""
    if kv.isa is None:
        return head_major_layout(model, kv.chunk_size_tokens, kv.block_bytes // math.prod(kv.block_shape))
    version = compat.minor_version(compat.engine_version())
    assert version is not None, "a version that is not known is refused before"
    parts = (
        f"cpu {kv.isa}",
        "vllm {}.{}".format(*version),
        f"{model.num_layers}x[{','.join(map(str, kv.block_shape))}] {kv.dtype}",
        f"ranks {kv.num_ranks}",
    )
    # Readable in front, exact behind: the flags of a CPU are too many to be read.
    exact = hashlib.sha256("/".join((*parts, compat.cpu_flags())).encode()).hexdigest()[:DIGEST_LETTERS]
    slab_bytes = model.num_layers * (kv.chunk_size_tokens // kv.block_size_tokens) * kv.block_bytes
    return ChunkLayout(kv.num_ranks, slab_bytes, "/".join((*parts, exact)))


def _check_kv_caches(kv: EngineKv, config: VllmConfig, kv_caches: Mapping[str, Any], num_blocks: int) -> str | None:
    if set(kv_caches) != set(kv.layer_names):
        other = sorted(set(kv_caches) ^ set(kv.layer_names))
        return f"layers with KV differ from the configuration: {', '.join(other[:4])}"
    wanted = (num_blocks, *kv.block_shape)
    for name, tensor in kv_caches.items():
        if not hasattr(tensor, "data_ptr"):
            return f"{name} has several tensors: its KV is not understood"
        shape = tuple(int(size) for size in tensor.shape)
        if len(shape) == 3 and kv.block_shape[0] == 1:
            shape = (shape[0], 1, *shape[1:])
        if kv.isa is None and len(shape) == 4 and shape[0] % num_blocks == 0:
            # A GPU's kernels may see a block as several; their tokens lie one after the other.
            shape = (num_blocks, shape[1], shape[2] * (shape[0] // num_blocks), shape[3])
        if shape != wanted or compat.dtype_name(tensor.dtype) != kv.dtype:
            return f"{name} is {compat.dtype_name(tensor.dtype)} {shape}, not {kv.dtype} {wanted}"
    if len({tensor.data_ptr() for tensor in kv_caches.values()}) != len(kv_caches):
        return "layers share their KV"
    in_use = compat.isas_in_use(config, kv.layer_names)
    if kv.isa is not None and in_use and in_use != {kv.isa}:
        return f"the layers are packed for {', '.join(sorted(in_use))}, where {kv.isa} is expected"
    return None


# ---- the model -------------------------------------------------------------------------------------------------------


def _with_weights(config: VllmConfig, model: ModelIdentity, settings: ConnectorSettings) -> ModelIdentity:
    """The whole identity. Reads the weight files, seconds the first time, then milliseconds (``weights_digests``)."""
    source = _source_of(config.model_config, config.load_config)
    revision = settings.weights_revision or weights_revision(source)
    scales = kv_scales(source) if model.kv_dtype.startswith("fp8") else ""
    qualifiers = (revision, *_as_loaded(config.model_config, source.load_format), *_drafter(config, model.num_layers))
    return replace(model, weights_revision=" ".join(qualifiers), kv_scales=scales)


def _source_of(model: Any, load_config: Any) -> Source:
    load_format = getattr(load_config.load_format, "value", load_config.load_format)
    return Source(
        model=getattr(model, "model_weights", "") or model.model,
        load_format=f"{load_format}",
        revision=model.revision,
        download_dir=load_config.download_dir,
    )


def _as_loaded(model: Any, load_format: str) -> list[str]:
    """What was done to the weights and to the model's configuration when they were loaded, as far as K and V see it.

    The configuration itself is named where the weights' files do not hold it: overridden, or with dummy weights.
    """
    done = [f"dtype={compat.dtype_name(model.dtype)}"]
    given = {field: getattr(model, field, None) for field in ("quantization", "quantization_config")}
    done += [
        f"{field}={value if isinstance(value, str) else _digest(value)}" for field, value in given.items() if value
    ]
    is_overridden = getattr(model, "hf_overrides", None) or getattr(model, "hf_config_path", None)
    if is_overridden or load_format == DUMMY:
        done.append(f"config={_digest(model.hf_config.to_dict())}")
    return done


def _digest(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    try:
        text = canonical_json(value)
    except TypeError as error:
        raise ConfigError(f"a setting of the model has no text that is the same in every process: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LETTERS]


def _drafter(config: VllmConfig, num_layers: int) -> list[str]:
    """Names the model that speculates, where the blocks hold its KV too."""
    speculative = config.speculative_config
    if speculative is None or num_layers <= config.model_config.get_num_layers(config.parallel_config):
        return []
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        raise ConfigError("the model that speculates is not known", remedy="start without --speculative-config")
    return [f"draft={weights_revision(_source_of(draft, config.load_config))}"]
