"""`make test`: runs the parts of the gate one after another and fails where one fails, or takes more than its share.

    python -m tests.shares [--make MAKE]

A share is what a part may take on two idle cores with caches. Machines differ and caches may be cold, so a part fails
beyond three times its share; `TANDEM_SHARE_FACTOR` is another factor, and 0 only tells. What each run took is kept in
`.cache/gate.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SHARES = {"check": 150.0, "unit": 240.0, "test-clients": 150.0, "e2e": 1260.0}
"""Seconds by target, in the order that they run in: half an hour together."""
FACTOR = 3.0
LEDGER = Path(".cache/gate.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    seconds: float
    cpu_seconds: float
    """Of all its processes that it waited for."""
    status: int


def read_factor(text: str | None) -> float:
    """Of `TANDEM_SHARE_FACTOR`. Raises ValueError."""
    if text is None:
        return FACTOR
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise ValueError(f"TANDEM_SHARE_FACTOR is {text!r}: write a number, such as 2 or 3.5, or 0 to only tell")
    return factor


def judge(parts: Sequence[Part], factor: float) -> list[str]:
    """A sentence for each part that failed or took too long."""
    problems: list[str] = []
    for part in parts:
        most = SHARES[part.name] * factor
        if part.status:
            problems.append(f"{part.name} failed")
        elif factor and part.seconds > most:
            problems.append(
                f"{part.name} took {part.seconds:.0f} s, and its share is {SHARES[part.name]:.0f} s: at most "
                f"{most:.0f} s are allowed; TANDEM_SHARE_FACTOR allows a slow machine more"
            )
    return problems


def render(parts: Sequence[Part]) -> str:
    """The table that the run ends with."""
    lines = [f"{'part':<14}{'seconds':>9}{'CPU':>9}{'share':>9}"]
    lines += [f"{part.name:<14}{part.seconds:>9.0f}{part.cpu_seconds:>9.0f}{SHARES[part.name]:>9.0f}" for part in parts]
    total = sum(part.seconds for part in parts), sum(part.cpu_seconds for part in parts)
    return "\n".join([*lines, f"{'together':<14}{total[0]:>9.0f}{total[1]:>9.0f}{sum(SHARES.values()):>9.0f}"])


def run_parts(make: Sequence[str], run: Callable[[Sequence[str]], int]) -> list[Part]:
    """Those after one that fails are not run."""
    parts: list[Part] = []
    for name in SHARES:
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        status = run([*make, name])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        parts.append(Part(name=name, seconds=time.monotonic() - began, cpu_seconds=cpu, status=status))
        if status:
            break
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", default="make --no-print-directory", help="how make is called")
    make = shlex.split(parser.parse_args().make)
    try:
        factor = read_factor(os.environ.get("TANDEM_SHARE_FACTOR"))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    parts = run_parts(make, lambda command: subprocess.run(command, check=False).returncode)
    LEDGER.parent.mkdir(exist_ok=True)
    with LEDGER.open("a") as ledger:
        entry = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "parts": [asdict(part) for part in parts]}
        ledger.write(json.dumps(entry) + "\n")
    print(render(parts))
    problems = judge(parts, factor)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
