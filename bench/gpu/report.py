"""A stage's results as one JSON file, written anew after each item, and its table."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu.item import GOOD, Setting, Stage

ROOT = Path(__file__).parents[2]
MAX_BYTES = 16 << 20
"""Of a file that comes back from such a machine."""
_SHOWN = 20
"""Things that are not good, in the table; the file has all of them."""
_MAIN = {
    "us": "us", "gain": "x", "tokens_per_s": "tokens/s", "milliseconds": "ms", "copy_tb_per_s": "TB/s copied",
    "read_tb_per_s": "TB/s read", "matmul_tflop_per_s": "TFLOP/s", "passed": "tests", "bytes": "bytes",
    "limit_tokens_per_s": "tokens/s at most",
    "seconds": "s", "seconds of weights": "s reading weights", "memory_percent": "% memory", "issue_percent": "% issue",
}  # fmt: skip
"""Figures that the table shows, and their units."""


def describe_run(stage: Stage, setting: Setting) -> dict[str, Any]:
    """Where and of what the figures are."""
    return {
        "bench": f"gpu/{stage.name}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": read_device(),
        "dry_run": setting.tiny or setting.device != "cuda",
        "commit": setting.commit or read_commit(),
        "sources": digest_sources(),
        "cores": os.cpu_count(),
    }


def read_device() -> dict[str, str] | None:
    """The GPU as its driver describes it; None without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    fields = (
        "name",
        "driver_version",
        "memory.total",
        "clocks.max.sm",
        "clocks.max.mem",
        "power.limit",
        "mig.mode.current",
    )
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except subprocess.TimeoutExpired:
        return {"error": "nvidia-smi does not answer"}
    if found.returncode:
        return {"error": found.stdout[-300:] + found.stderr[-300:]}
    return dict(zip(fields, (value.strip() for value in found.stdout.split(",")), strict=False))


def read_commit() -> str | None:
    """Of the checkout, with a mark when it was changed; None where there is no git."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return None
    command = [git, "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def digest_sources() -> str:
    """Of what is measured, whether git is there or not: the worker's and this benchmark's Python files."""
    digest = hashlib.sha256()
    for folder in ("worker/src", "bench", "api/src"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def save(path: Path, header: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Whole or not at all: the command may be ended while it writes."""
    counts = Counter(str(outcome["status"]) for outcome in results.values())
    text = json.dumps({**header, "counts": counts, "items": results}, indent=1, default=str, ensure_ascii=False)
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"{path.name} would take {len(text)} bytes; an item's figures are too large")
    written = path.with_suffix(".part")
    written.write_text(text + "\n", encoding="utf-8")
    written.replace(path)


def build_table(header: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    """What was measured, and at the end, which is what comes back of a long output, what is not good."""
    device = header["device"] or {}
    lines = [f"{header['bench']}: {device.get('name', 'no GPU')}, commit {header['commit']}"]
    good = {name: outcome for name, outcome in results.items() if outcome["status"] in GOOD}
    lines += [f"  {name[:62]:<62} {figures}" for name, outcome in good.items() if (figures := _figures(outcome))]
    counts = Counter(str(outcome["status"]) for outcome in results.values())
    lines.append("  " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    wrong = [(name, outcome) for name, outcome in results.items() if name not in good]
    for name, outcome in wrong[:_SHOWN]:
        why = str(outcome.get("why", "")).strip().splitlines()
        lines.append(f"  {outcome['status']:<8} {name[:70]}: {why[-1][:160] if why else ''}")
    if len(wrong) > _SHOWN:
        lines.append(f"  and {len(wrong) - _SHOWN} more that are not good")
    return lines


def _figures(outcome: Mapping[str, Any]) -> str:
    """The main figure and its share of the limit; empty for what was only checked."""
    figures = outcome.get("figures") or {}
    main = [
        f"{_short(figures[key])} {unit}" for key, unit in _MAIN.items() if isinstance(figures.get(key), int | float)
    ]
    if not main:
        return ""
    ratio = f"{figures['ratio']:6.1%} of {figures['of']}" if isinstance(figures.get("ratio"), float) else ""
    return f"{'  '.join(main)}  {ratio}".rstrip()


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
