"""From exec to the first token of SmolLM2, step by step: fresh processes, with and without a prepared copy.

    python -m bench.start [--rounds 10] [--against CHECKOUT] [--record bench/results]

Each round starts a worker whose cache folder is empty, one that finds there what an earlier start prepared, and, with
`--against`, one of another checkout (whose CPU kernels are built) with the same model: in turns, everything at its
defaults, the model's files in the page cache. A client asks for one token until it gets one. The machine should be
idle: there are as many cores in a start as it is given. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.start.process import Start, run
from e2e.model import find_model

HERE = Path(__file__).parents[2]
GOALS = {"prepared": 2.0, "unprepared": 2.4}
"""Seconds from exec to the first token, two idle cores."""
RESIDENT_GOAL_BYTES = 1.3e9


def _describe(values: Sequence[float]) -> str:
    return f"{statistics.median(values):7.2f} {min(values):7.2f} {max(values):7.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="starts of each kind; default 10")
    parser.add_argument("--against", type=Path, help="checkout of another version")
    parser.add_argument("--record", type=Path, help="folder for the figures")
    options = parser.parse_args()
    model = find_model()
    model.read_bytes()  # into the page cache
    found: dict[str, list[Start]] = {"unprepared": [], "prepared": []}
    if options.against:
        found["other"] = []
    with tempfile.TemporaryDirectory() as folder:
        kept, other = Path(folder, "kept"), Path(folder, "other")
        run(HERE, model, kept)  # prepares, and brings the libraries into the page cache
        for number in range(options.rounds):
            fresh = Path(folder, f"fresh-{number}")
            found["unprepared"].append(run(HERE, model, fresh))
            found["prepared"].append(run(HERE, model, kept))
            if options.against:
                found["other"].append(run(options.against.resolve(), model, other))
            shutil.rmtree(fresh, ignore_errors=True)
    _report(found, options.record)


def _report(found: dict[str, list[Start]], record: Path | None) -> None:
    print(f"{'':12} {'first token':>23}   {'CPU seconds':>23}   resident GB   (median, least, most of each)")
    rows: dict[str, dict[str, Any]] = {}
    for kind, starts in found.items():
        first, cpu = [one.first_token for one in starts], [one.cpu for one in starts]
        resident = statistics.median(one.resident_bytes for one in starts)
        print(f"{kind:12} {_describe(first)}   {_describe(cpu)}   {resident / 1e9:11.2f}")
        steps = {name: statistics.median(one.steps.get(name, 0.0) for one in starts) for name in starts[-1].steps}
        value, goal = round(statistics.median(first), 2), GOALS.get(kind)
        rows[kind] = {"value": value, "goal": goal, "met": goal is None or value <= goal, "steps": steps}
        if goal is not None:
            rows[f"{kind} resident bytes"] = {
                "value": int(resident), "goal": int(RESIDENT_GOAL_BYTES), "met": resident <= RESIDENT_GOAL_BYTES,
            }  # fmt: skip
    for kind, row in rows.items():
        for name, seconds in dict(row.get("steps") or {}).items():
            print(f"  {kind:12} {name:24} {seconds:7.3f}")
    line = json.dumps({"cores": len(os.sched_getaffinity(0)), "seconds from exec to the first token": rows})
    if record is not None:
        record.mkdir(parents=True, exist_ok=True)
        Path(record, f"start-{datetime.now(UTC):%Y-%m-%d}.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
