"""Secrets of a plan are hidden where it is shown, and nothing else is."""

from __future__ import annotations

import pytest

from antiphon.config.masking import is_secret, masked
from antiphon.config.plan import ProcessPlan


@pytest.mark.parametrize(
    "name",
    ["--api-key", "api_key", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "--hf-token", "KEY"],
)
def test_names_that_look_like_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("--admin-key-file", "--ssl-keyfile", "HF_TOKEN_PATH", "--tokenizer", "--max-num-batched-tokens", "PATH"),
        *(
            "--long-prefill-token-threshold",
            "--decode-token-ms",
            "--kv-bytes-per-token",
            "kv_bytes_per_token",
            "--kv-transfer-config",
            "OMP_NUM_THREADS",
            "",
        ),
    ],
)
def test_names_that_do_not(name: str) -> None:
    assert not is_secret(name)


def test_every_value_of_a_secret_is_masked_and_the_plan_stays() -> None:
    argv = ("python", "-m", "x", "--api-key", "one", "two", "--port", "8001", "--hf-token=abc", "--eager", "last")
    plan = ProcessPlan("prefill-0", "prefill", "vllm", "127.0.0.1", argv, env={"HF_TOKEN": "hf_x", "OTHER": "y"})
    shown = masked(plan)
    expected = ("python", "-m", "x", "--api-key", "***", "***", "--port", "8001", "--hf-token=***", "--eager", "last")
    assert (shown.argv, shown.env) == (expected, {"HF_TOKEN": "***", "OTHER": "y"})
    assert (plan.argv, plan.env["HF_TOKEN"]) == (argv, "hf_x")
    assert masked(shown) == shown
