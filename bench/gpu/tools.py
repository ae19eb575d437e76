"""Memory and race checkers over tiny cases, and hardware counters of the kernels that fall shortest of their limit.

A tool that the machine lacks is reported as absent.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gpu.item import AbsentError, Figures, Item, Setting, WrongError

ROOT = Path(__file__).parents[2]
_TAIL = 1500
_CHECKER_SECONDS = 75.0
_COUNTER_SECONDS = 60.0
_WORST = 3
CHECKED = ("decode", "products", "experts", "prefill", "sampling")
"""Themes whose cases are run under the checkers."""
METRICS = {
    "gpu__time_duration.sum": "nanoseconds",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory_percent",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue_percent",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers",
}
"""Counters, by what they are called here."""
FALLBACK = ("paged_decode_attention", "small_batch_linear int4 M=1", "fused_moe int4 T=32")


def tool_items(setting: Setting) -> Iterator[Item]:
    for theme in CHECKED[: 1 if setting.tiny else None]:
        for tool in ("memcheck", "racecheck"):
            yield Item(
                name=f"{tool} of {theme}", seconds=_CHECKER_SECONDS,
                run=lambda tool=tool, theme=theme: run_checker(setting, tool, theme),
            )  # fmt: skip
    for case in find_worst(setting):
        yield Item(name=f"counters of {case}", seconds=_COUNTER_SECONDS, run=lambda case=case: count(setting, case))


def find_tool(name: str) -> str:
    """Raises AbsentError where it is not installed."""
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin:/opt/nvidia/nsight-compute")
    if found is None:
        raise AbsentError(f"{name} is not installed")
    return found


def run_checker(setting: Setting, tool: str, theme: str) -> Figures:
    """Tiny cases of a theme under `compute-sanitizer`."""
    program = find_tool("compute-sanitizer")
    if setting.device != "cuda":
        raise AbsentError(f"{tool} needs a GPU")
    command = [program, f"--tool={tool}", "--error-exitcode=9", "--print-limit=5", *cases_command(theme, "", tiny=True)]
    # torch's allocator hands out pieces of its blocks: a read behind a tensor's end shows only without it.
    done = run(command, _CHECKER_SECONDS - 5, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {})
    output = done.stdout + done.stderr
    if done.returncode == 9 or re.search(r"ERROR SUMMARY: [1-9]", output):
        raise WrongError(f"{tool} found errors", {"tail": output[-_TAIL:]})
    if done.returncode or "ERROR SUMMARY: 0" not in output:
        raise RuntimeError(f"{tool} did not end well ({done.returncode}):\n{output[-_TAIL:]}")
    return {"errors": 0}


def count(setting: Setting, case: str) -> Figures:
    """Hardware counters of the longest kernel of a case."""
    program = find_tool("ncu")
    if setting.device != "cuda":
        raise AbsentError("ncu needs a GPU")
    theme = next((theme for theme, names in THEME_OF.items() if case.startswith(names)), "")
    command = [
        program, "--clock-control", "none", "--csv", "--metrics", ",".join(METRICS), "--kernel-name",
        "regex:^_.*_kernel", "--launch-count", "6", *cases_command(theme, case, tiny=setting.tiny),
    ]  # fmt: skip
    done = run(command, _COUNTER_SECONDS - 5, {})  # names of Triton's kernels begin with an underscore, torch's do not
    kernels = read_counters(done.stdout)
    if not kernels:
        raise RuntimeError(f"ncu counted nothing ({done.returncode}):\n{(done.stdout + done.stderr)[-_TAIL:]}")
    longest = max(kernels, key=lambda kernel: kernel.get("nanoseconds", 0.0))
    return {**longest, "kernels": [kernel["kernel"] for kernel in kernels]}


THEME_OF = {
    "decode": ("paged_decode", "mla_decode"),
    "prefill": ("paged_prefill", "mla_prefill", "latent_gather"),
    "products": ("small_batch_linear", "gate_up_silu", "widen"),
    "experts": ("fused_moe", "moe_route"),
    "sampling": ("apply_", "draw_", "sample_", "token_"),
    "elementwise": ("",),
}


def cases_command(theme: str, beginning: str, *, tiny: bool) -> list[str]:
    command = [sys.executable, "-m", "bench.gpu.tools", theme, beginning]
    return [*command, "--tiny"] if tiny else command


def run(command: list[str], seconds: float, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Raises TimeoutExpired."""
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=seconds
    )


def read_counters(text: str) -> list[dict[str, Any]]:
    """Of ncu's CSV, whose rows are one metric of one launch each: launches in their order."""
    start = text.find('"ID"')
    launches: dict[str, dict[str, Any]] = {}
    if start < 0:
        return []
    for row in csv.DictReader(io.StringIO(text[start:])):
        name = METRICS.get(row.get("Metric Name") or "")
        if name is not None:
            launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
            launch[name] = read_number(row["Metric Value"])
    return list(launches.values())


def read_number(text: str) -> float | None:
    """ncu groups thousands; what it could not count is no number."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def find_worst(setting: Setting) -> list[str]:
    """Cases that reached the smallest share of their limit, if the stage of shapes has left its file."""
    path = Path(setting.out, "shapes.json")
    if setting.tiny or not path.exists():
        return list(FALLBACK[: 1 if setting.tiny else None])
    items = json.loads(path.read_text())["items"]
    ratios = {
        name.removeprefix("time "): outcome["figures"]["ratio"]
        for name, outcome in items.items()
        if name.startswith("time ") and outcome["status"] == "passed" and outcome["figures"]["us"] > 20
    }
    return sorted(ratios, key=ratios.__getitem__)[:_WORST] or list(FALLBACK)


def main(theme: str, beginning: str, *, tiny: bool) -> None:
    """Run the theme's cases whose names begin so, twice each, for a tool to look at."""
    import torch

    from bench.kernels.case import SERVED, TINY, Place
    from bench.kernels.cases import THEMES

    place = Place(device=torch.device("cuda", 0), sizes=TINY if tiny else SERVED)
    found = [case for case in THEMES[theme](place) if case.name.startswith(beginning)]
    for case in found if not beginning else found[:1]:
        inputs = case.make()
        for _ in range(2):
            case.run(*inputs)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], tiny="--tiny" in sys.argv)
