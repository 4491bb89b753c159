"""What docs/kv-routing.md tells people to type is what the code would."""

from __future__ import annotations

import json
import re
from pathlib import Path

from antiphon.cli.vllm_router_flags import translate
from antiphon.config.kv_events import kv_events_config
from antiphon.config.router_spec import RouterSpec

TEXT = (Path(__file__).parents[2] / "docs" / "kv-routing.md").read_text()


def test_the_events_of_an_engine_that_is_started_by_hand() -> None:
    (shown,) = re.findall(r"--kv-events-config '([^']*)'", TEXT)
    assert json.loads(shown) == kv_events_config("http://10.0.0.1:8001", "tcp://10.0.0.9:5557", 5657, "0.0.0.0")


def test_the_router_that_hears_them() -> None:
    (shown,) = re.findall(r"^antiphon router (--policy kv_aware (?:.*\\\n)*.*)$", TEXT, re.MULTILINE)
    words = shown.replace("\\\n", " ").split()
    assert translate(words).args == words
    knobs = {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    assert (
        knobs == {"policy", "kv_events_host", "kv_events_port", "prefill", "decode"} <= RouterSpec.model_fields.keys()
    )
    assert (words[3], words[5], words[7]) == ("10.0.0.9", "5557", "http://10.0.0.1:8001")


def test_knobs_and_defaults_of_the_admission() -> None:
    begin = TEXT.index("### Knobs")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", TEXT[begin : TEXT.index("### The measured rate")], re.MULTILINE)
    assert {name for name, _ in rows} == {
        name
        for name in RouterSpec.model_fields
        if name.startswith("cold_") or name in ("kv_bytes_per_token", "transfer_bytes_per_s")
    }
    units = {"MiB": 1 << 20}
    for name, default in rows:
        number, _, unit = default.partition(" ")
        if name != "kv_bytes_per_token":
            assert float(number) * units.get(unit, 1) == RouterSpec.model_fields[name].default, name
