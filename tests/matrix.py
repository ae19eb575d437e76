"""`make unit-matrix`: the unit tests under other instruction sets, alone, beside busy processes, and on one core.

    python -m tests.matrix [--sets native,avx2] [--loads idle,busy,one-core] [-- more arguments of pytest]

What a test may depend on (docs/testing.md) is neither the arithmetic nor the pace of the machine. Every run has to be
without failures; the last line is one JSON object with what failed in each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

SETS: dict[str, dict[str, str]] = {
    "native": {},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "scalar": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
}
"""What torch and oneDNN may use of the CPU. The project's own kernels need AVX-512 and are the same in all."""
LOADS = ("idle", "busy", "one-core")
ARGUMENTS = ("--forks", "6", "-q", "-m", "not cluster and not full and not gpu and not clients")
MOST_SECONDS = 3600
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_PASSED = re.compile(r"(\d+) passed")


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that compute without end."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def run_once(instructions: str, load: str, more: Sequence[str]) -> dict[str, object]:
    """One run of the suite."""
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "pytest", "tests", *ARGUMENTS, *more]
    if load == "one-core":
        command = ["taskset", "--cpu-list", str(cores[0]), *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SSL_CERT_FILE": os.path.abspath("tests/authority.pem")}
    began = time.monotonic()
    with busy_processes(len(cores) if load == "busy" else 0):
        ran = subprocess.run(
            command,
            check=False,
            env=environment | SETS[instructions],
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
        )
    seconds = time.monotonic() - began
    passed = _PASSED.search(ran.stdout)
    failed = sorted(set(_FAILED.findall(ran.stdout)))
    row = {
        "set": instructions, "load": load, "seconds": round(seconds), "status": ran.returncode,
        "passed": int(passed[1]) if passed else 0, "failed": failed,
    }  # fmt: skip
    print(f"{instructions:<8}{load:<10}{seconds:>7.0f} s  {row['passed']} passed, {len(failed)} failed", flush=True)
    if ran.returncode:
        print("\n".join([*ran.stdout.splitlines()[-200:], *ran.stderr.splitlines()[-100:]]), file=sys.stderr)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("more", nargs="*")
    options = parser.parse_args()
    sets, loads = options.sets.split(","), options.loads.split(",")
    for name in sets + loads:
        if name not in SETS and name not in LOADS:
            parser.error(f"{name} is none of {', '.join([*SETS, *LOADS])}")
    rows = [run_once(instructions, load, options.more) for load in loads for instructions in sets]
    print(json.dumps({"runs": rows, "met": all(row["status"] == 0 for row in rows)}))
    return 0 if all(row["status"] == 0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
