"""A GPU's first half hour.

    python -m bench.gpu [STAGE ...] --out FOLDER [--device cpu] [--tiny]

Stages, in their order: correctness, shapes, engine, start, lossless, variants, tools; without names the first three.
Each has a limit below 8 minutes and writes FOLDER/STAGE.json after each of its items, so a command that is ended early
leaves what it has found. Exit status 1 says that something is wrong, 2 that there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu import report
from bench.gpu.item import GOOD, Setting, Stage
from bench.gpu.meter import Meter
from bench.gpu.run import run_stage
from bench.gpu.stages import STAGES

_DEFAULT = ("correctness", "shapes", "engine")


def say(line: str) -> None:
    print(line, flush=True)


def run(stage: Stage, setting: Setting, out: Path) -> bool:
    """Whether everything in it is good."""
    began = time.monotonic()
    header = report.describe_run(stage, setting)
    path = out / f"{stage.name}.json"
    say(f"--- {stage.name}: {stage.what} (at most {stage.seconds:g} s)")

    def save(results: dict[str, Any]) -> None:
        report.save(path, {**header, "seconds": round(time.monotonic() - began, 1)}, results)

    with Meter() as meter:
        results = run_stage(stage, setting, save, say, meter)
    save(results)
    for line in report.build_table(header, results):
        say(line)
    good = all(outcome["status"] in GOOD for outcome in results.values())
    say(f"--- {stage.name}: {'good' if good else 'NOT GOOD'} after {time.monotonic() - began:.0f} s; {path}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--out", type=Path, required=True, help="folder for STAGE.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, with --tiny")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that everything runs")
    parser.add_argument("--commit", default="", help="of this tree, where it is not a git checkout")
    options = parser.parse_args()
    unknown = [name for name in options.stages if name not in STAGES]
    if unknown:
        parser.error(f"there is no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    if options.device == "cpu" and not options.tiny:
        parser.error("a CPU computes tiny shapes only: add --tiny")
    if options.device == "cuda" and report.read_device() is None and not os.path.exists("/dev/nvidiactl"):
        print("There is no GPU here. --device cpu --tiny is a dry run without one.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # lanes are ended on the way out
    options.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(device=options.device, tiny=options.tiny, commit=options.commit, out=str(options.out.resolve()))
    good = True
    for name in options.stages or _DEFAULT:
        good &= run(STAGES[name], setting, options.out)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
