"""One point on a GPU machine: brings up what it needs, checks, measures, prints a short table, writes one JSON file.

    python3 bench/gpu/run.py POINT --site SITE --model PACK/model-8b --out OUT

POINT: rates, correct, ttft, store_cost, speed (the last two on one start), start, pd, pair (all that needs two engines,
on one start; a JSON file for each part) or slabs. Each takes at most 8 minutes, start included, and so does one part of
pair; several parts of pair take 12.
Exits 1 where something failed or a limit was missed, 2 where it cannot begin. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

from common import Report
from processes import Failed, OutOfTime, Paths, Stack, machine, say, stop_at

POINTS = ("rates", "correct", "ttft", "store_cost", "speed", "start", "pd", "pair", "slabs")
PARTS = ("pd", "load", "flood", "restart")
TIME_LIMIT_S, PAIR_TIME_LIMIT_S = 480, 720


def main() -> int:
    """Runs one point. Returns the exit status."""
    given = arguments(sys.argv[1:])
    given.out.mkdir(parents=True, exist_ok=True)
    paths = Paths(given.site, given.source, given.model, given.out, given.memory_grows)
    os.environ.update({name: value for name, value in paths.environment().items() if name.startswith(("VLLM", "HF_"))})
    report = Report("pair-start" if given.point == "pair" else given.point, given.out)
    failure: str | None = None
    try:
        stop_at(given.time_limit_s)
        report.note("machine", machine())
        with Stack(paths) as stack:
            point = importlib.import_module(given.point)
            if given.point == "pair":
                point.run(stack, report, given.parts)
            else:
                point.run(stack, report)
    except (Failed, OutOfTime) as error:
        failure = str(error)
    except Exception as error:  # supervised: the figures so far are written, whatever happened
        import traceback

        say(traceback.format_exc())
        failure = repr(error)
    return 0 if report.close(failure) else 1


def arguments(argv: list[str]) -> argparse.Namespace:
    """What was asked for, checked; ends with status 2 and a sentence where it cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("point", choices=POINTS)
    parser.add_argument("--site", type=Path, help="folder with vLLM, as unpack.sh made it; without it an installed one")
    parser.add_argument("--source", type=Path, help="folder with Antiphon's source; without it the one beside bench/")
    parser.add_argument("--model", type=Path, required=True, help="folder with the model's config.json and tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and figures")
    parser.add_argument(
        "--time-limit-s", type=int, help=f"{TIME_LIMIT_S}; for pair with several parts {PAIR_TIME_LIMIT_S}"
    )
    parser.add_argument(
        "--memory-grows",
        action="store_true",
        help="the machine has more memory than it says, and gets it as it is used",
    )
    parser.add_argument("--parts", help=f"of pair: {','.join(PARTS)} or some of them; they run in this order")
    given = parser.parse_args(argv)
    given.parts = _parts(parser, given)
    if given.time_limit_s is None:
        given.time_limit_s = PAIR_TIME_LIMIT_S if given.point == "pair" and len(given.parts) > 1 else TIME_LIMIT_S
    if given.time_limit_s <= 0:
        parser.error(f"--time-limit-s is above 0, not {given.time_limit_s}")
    if given.site is not None and not (given.site / "vllm").is_dir():
        parser.error(f"--site {given.site}: there is no vllm in it; unpack.sh makes such a folder")
    if given.source is None:
        beside = Path(__file__).resolve().parents[2] / "src"
        given.source = beside if (beside / "antiphon").is_dir() else None
    elif not (given.source / "antiphon").is_dir():
        parser.error(f"--source {given.source}: there is no antiphon in it")
    sys.path[:0] = [str(part.resolve()) for part in (given.source, given.site) if part is not None]
    for package in ("vllm", "antiphon", "torch"):
        if importlib.util.find_spec(package) is None:
            parser.error(f"there is no {package} here: give --site and --source, or install it")
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if given.point != "rates" and not any(plugin.value.startswith("antiphon.") for plugin in plugins):
        parser.error("Antiphon is not installed here or in --site: vLLM finds its plug-in by that, not in --source")
    if given.out.exists() and not given.out.is_dir():
        parser.error(f"--out {given.out}: it is no folder")
    _check_model(parser, given)
    return given


def _parts(parser: argparse.ArgumentParser, given: argparse.Namespace) -> tuple[str, ...]:
    if given.parts is None:
        return PARTS if given.point == "pair" else ()
    if given.point != "pair":
        parser.error(f"--parts is for pair, not for {given.point}")
    found = tuple(given.parts.split(","))
    unknown = [part for part in found if part not in PARTS]
    if unknown or len(set(found)) < len(found):
        parser.error(f"--parts {given.parts}: each of {', '.join(PARTS)} at most once, with commas")
    return tuple(part for part in PARTS if part in found)


def _check_model(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    config = given.model / "config.json"
    try:
        shape = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--model {given.model}: no config.json of a model ({error})")
    heads = (shape.get("num_key_value_heads"), shape.get("head_dim"), shape.get("num_hidden_layers"))
    if heads != (8, 128, 32):
        parser.error(f"--model {given.model}: 8 KV heads of 128 in 32 layers are measured, these are {heads}")
    if given.point != "rates" and not (given.model / "tokenizer.json").is_file():
        parser.error(
            f"--model {given.model}: no tokenizer.json, without which vLLM does not start; give pack.sh a TOKENIZER_DIR"
        )


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads and client processes that wait for an answer which does not come are not waited for
