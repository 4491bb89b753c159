"""One point on a GPU machine: brings up what it needs, checks, measures, prints a short table, writes one JSON file.

    python3 bench/gpu/run.py POINT --site SITE --model PACK/model-8b --out OUT

POINT: rates, correct, ttft, store_cost, speed (the last two on one start), pd, pair (all that needs two engines, on one
start) or slabs. Each takes at most 8 minutes, start included, pair 10. Exits 1 where something failed or a limit was
missed. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path

from common import Failed, OutOfTime, Paths, Report, Stack, machine, say

POINTS = ("rates", "correct", "ttft", "store_cost", "speed", "pd", "pair", "slabs")
TIME_LIMIT_S, PAIR_TIME_LIMIT_S = 480, 700


def main() -> int:
    """Runs one point. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("point", choices=POINTS)
    parser.add_argument("--site", type=Path, help="folder with vLLM, as unpack.sh made it")
    parser.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[2] / "src")
    parser.add_argument("--model", type=Path, required=True, help="folder with the model's config.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and figures")
    parser.add_argument("--time-limit-s", type=int, help=f"{TIME_LIMIT_S}, for pair {PAIR_TIME_LIMIT_S}")
    parser.add_argument("--parts", default="", help="of pair: pd,load,flood,restart or some of them, in that order")
    given = parser.parse_args()
    time_limit_s = given.time_limit_s or (PAIR_TIME_LIMIT_S if given.point == "pair" else TIME_LIMIT_S)
    given.out.mkdir(parents=True, exist_ok=True)
    source = given.source if (given.source / "antiphon").is_dir() else None
    paths = Paths(given.site, source, given.model, given.out)
    for part in (given.site, source):
        if part is not None:
            sys.path.insert(0, str(part.resolve()))
    os.environ.update({name: value for name, value in paths.environment().items() if name.startswith(("VLLM", "HF_"))})
    report = Report(given.point, given.out)
    report.note("machine", machine())

    def out_of_time(*_unused: object) -> None:
        raise OutOfTime(f"it took longer than {time_limit_s} s")

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(time_limit_s)
    failure: str | None = None
    try:
        with Stack(paths) as stack:
            point = importlib.import_module(given.point)
            if given.parts:
                point.run(stack, report, tuple(given.parts.split(",")))
            else:
                point.run(stack, report)
    except (Failed, OutOfTime) as error:
        failure = str(error)
    except Exception as error:  # supervised: the figures so far are written, whatever happened
        import traceback

        say(traceback.format_exc())
        failure = repr(error)
    signal.alarm(0)
    return 0 if report.close(failure) else 1


if __name__ == "__main__":
    sys.exit(main())
