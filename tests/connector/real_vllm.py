"""Run as a program: the connector's class and the engine's facts with the installed vLLM, printed as JSON.

It makes vLLM's configuration of a tiny model with dummy weights in the folder given, and starts no engine.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "rope_theta": 5000.0,
    "torch_dtype": "bfloat16",
}
BLOCK_SIZE = 128
LAYERS = [f"model.layers.{index}.self_attn.attn" for index in range(2)]


def module(name: str) -> Any:
    """By name, so that reading this file asks for no vLLM."""
    return importlib.import_module(name)


def class_facts(compat: Any) -> dict[str, Any]:
    """What vLLM's factory makes of the connector."""
    factory = module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    base = module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    is_known = "AntiphonConnector" in factory._registry
    found = factory.get_connector_class_by_name("AntiphonConnector")
    connector = module("antiphon.connector.vllm_connector").AntiphonConnector
    return {
        "is_known": is_known,
        "is_same": found is connector,
        "is_registered_again": compat.register_connector_once("AntiphonConnector", "x", "y"),
        "is_connector": issubclass(connector, base.KVConnectorBase_V1) and base.supports_hma(connector),
        "abstract": sorted(connector.__abstractmethods__),
        "takes_kv_cache_config": module("vllm.utils.func_utils").supports_kw(connector, "kv_cache_config"),
        "source": getattr(connector._cache_hit_source, "value", None),
    }


def engine_config(folder: Path) -> Any:
    """vLLM's configuration of an engine on a CPU."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    transfer = module("vllm.config").KVTransferConfig(
        kv_connector="AntiphonConnector", kv_role="kv_both", engine_id="prefill-0-0123456789ab"
    )
    arguments = module("vllm.engine.arg_utils").EngineArgs(
        model=f"{folder}",
        served_model_name="tiny",
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=256,
        enforce_eager=True,
        kv_transfer_config=transfer,
    )
    return arguments.create_engine_config()


def engine_facts(compat: Any, config: Any) -> dict[str, Any]:
    """What the connector reads of it, and of a request."""
    interface, torch = module("vllm.v1.kv_cache_interface"), module("torch")
    spec = interface.FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    groups = [interface.KVCacheGroupSpec(LAYERS, spec)]
    kv_cache = interface.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    settings = module("antiphon.connector.settings").ConnectorSettings()
    facts = module("antiphon.connector.identity").engine_facts(config, kv_cache, settings)

    def request(**sampling: Any) -> Any:
        parameters = module("vllm.sampling_params").SamplingParams(**sampling)
        return module("vllm.v1.request").Request("r", list(range(300)), parameters, None, cache_salt="team")

    kv_caches = {name: torch.empty(8, 1, BLOCK_SIZE, 64, dtype=torch.bfloat16) for name in LAYERS}
    identity = facts.identify(request())
    return {
        "engine": [facts.engine, facts.incarnation],
        "model": [facts.model.model_name, facts.model.weights_revision.split()[:2], facts.model.kv_dtype],
        "positional": dict(facts.model.positional),
        "slab_bytes": facts.layout.slab_bytes,
        "isa": facts.kv.isa,
        "notices": list(facts.notices),
        "tenant": identity.tenant,
        "bypass": facts.identify(request(prompt_logprobs=1)),
        "tokens": list(request().all_token_ids[1:4]),
        "has_ended_early": compat.has_ended_early(request()),
        "tensors": facts.check_kv_caches(config, kv_caches, 8),
        "isa_of_small_blocks": compat.attention_isa(torch.bfloat16, 16, 32, "auto"),
        "unsupported": compat.supported_version(compat.engine_version()),
    }


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # it dies with the test
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    module("antiphon.connector.plugin").install()  # as vLLM does, before most of it is imported
    compat = module("antiphon.connector.compat")
    found = {**class_facts(compat), **engine_facts(compat, engine_config(Path(sys.argv[1])))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
