"""Ray is an extra: nothing imports it before it is used, and its absence is said with what to install."""

from __future__ import annotations

import subprocess
import sys

from antiphon.core.extras import install_remedy

PROGRAM = """
import sys
import antiphon.cli.main, antiphon.ray.mapping, antiphon.ray.plans, antiphon.ray.listeners
from antiphon.ray import LLMConfig, build_pd_openai_app
assert "ray" not in sys.modules, "imported"
sys.modules["ray"] = None
config = LLMConfig(model_loading_config={"model_id": "m"})
try:
    build_pd_openai_app({"prefill_config": config, "decode_config": config})
except Exception as error:
    print(type(error).__name__, error)
"""


def test_without_ray_the_builder_says_what_to_install() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("ConfigError"), ran.stdout
    assert f"({install_remedy('ray')})" in ran.stdout
