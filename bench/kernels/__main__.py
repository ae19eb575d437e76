"""How far every kernel stands from the device's limits: `python -m bench.kernels [--theme NAME] [--out DIRECTORY]`.

A case is timed only if it is right: it runs twice, its results are compared with float64 or its twin and its bits with
each other. Prints a table, then one JSON object as the last line. With --out both that object and a plot of the
achieved shares are written, named after device and date. `--plot FILE` draws an earlier run's object again, which needs
no GPU; measuring does, and says so without one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from bench.kernels.case import Case, Place
from bench.kernels.cases import THEMES
from bench.kernels.check import check
from bench.kernels.measure import Ceilings, Result, measure, measure_ceilings
from bench.kernels.plot import draw_achieved


def report(results: list[Result], failures: dict[str, str], ceilings: Ceilings) -> dict[str, object]:
    """Everything a reader of the numbers needs to place them."""
    return {
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "ceilings": asdict(ceilings),
        "kernels": [asdict(result) | {"achieved": round(result.achieved, 3)} for result in results],
        "failures": failures,
    }


def write(found: dict[str, object], line: str, folder: Path) -> Path:
    """The report and its plot, named after device and date."""
    folder.mkdir(parents=True, exist_ok=True)
    device = re.sub(r"[^a-z0-9]+", "-", str(found["device"]).lower()).strip("-")
    path = folder / f"kernels-{device}-{found['date']}.json"
    path.write_text(line + "\n")
    path.with_suffix(".svg").write_text(draw_achieved(found))
    return path


def check_and_measure(case: Case, ceilings: Ceilings, device: torch.device) -> Result:
    """Raises ArithmeticError, with the first differing values, for a case whose results are wrong."""
    found = check(case)
    if not found.passed:
        raise ArithmeticError(
            f"error {found.error:.1e}, of the worst row {found.worst_row:.1e}, where {found.limit:.1e} is allowed; "
            f"{'equal' if found.repeats else 'other'} bits the second time; {found.evidence}"
        )
    return measure(case, ceilings, device)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure every kernel against copy bandwidth and matmul rate.")
    parser.add_argument("--theme", choices=sorted(THEMES), action="append", help="measure only these (repeatable)")
    parser.add_argument("--out", type=Path, help="directory for kernels-DEVICE-DATE.json and .svg")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the results in this file, beside it")
    arguments = parser.parse_args()
    if arguments.plot:
        target = arguments.plot.with_suffix(".svg")
        target.write_text(draw_achieved(json.loads(arguments.plot.read_text())))
        print(target)
        return 0
    if not torch.cuda.is_available():
        print("The kernel benchmark needs a CUDA device: none is visible.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    device = torch.device("cuda")
    ceilings = measure_ceilings(device)
    print(f"{torch.cuda.get_device_name()}: copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, ", end="")
    print(f"bf16 matmul {ceilings.matmul_flops_per_s / 1e12:.0f} TFLOP/s")
    print(f"{'kernel':<64}{'us':>10}{'GB/s':>9}{'TFLOP/s':>9}{'limit us':>10}{'achieved':>10}  bound by")
    results: list[Result] = []
    failures: dict[str, str] = {}
    for theme in arguments.theme or THEMES:
        for case in THEMES[theme](Place(device=device)):
            try:
                result = check_and_measure(case, ceilings, device)
            except Exception as error:  # one kernel that fails must not hide the others' numbers
                failures[case.name] = f"{type(error).__name__}: {error}"
                print(f"{case.name:<64}  failed: {failures[case.name][:160]}")
                continue
            results.append(result)
            print(
                f"{result.name:<64}{result.microseconds:>10.1f}{result.gigabytes_per_s:>9.0f}"
                f"{result.teraflops_per_s:>9.1f}{result.limit_microseconds:>10.1f}{result.achieved:>10.0%}"
                f"  {result.bound_by}"
            )
    found = report(results, failures, ceilings)
    line = json.dumps(found)
    if arguments.out:
        print(f"written: {write(found, line, arguments.out)}")
    print(line)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
