"""A stage's results as one JSON file, written anew after each item, and its table."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu.item import GOOD, Setting, Stage

ROOT = Path(__file__).parents[2]
MAX_BYTES = 16 << 20
"""Of a file that comes back from such a machine."""
_COLUMNS = ("us", "GB/s", "TFLOP/s", "ratio", "of", "tokens_per_s", "milliseconds", "error", "seconds", "bytes")


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
    """Items and their main figures, the ones that are not good first."""
    device = header["device"] or {}
    lines = [f"{header['bench']}: {device.get('name', 'no GPU')}, commit {header['commit']}"]
    ordered = sorted(results.items(), key=lambda pair: pair[1]["status"] in GOOD)
    for name, outcome in ordered:
        lines.append(f"  {outcome['status']:<8} {name[:70]:<70} {_figures(outcome)}".rstrip())
    return lines


def _figures(outcome: Mapping[str, Any]) -> str:
    figures = outcome.get("figures") or {}
    shown: Sequence[str] = [
        f"{_short(figures[name])} {name}" for name in _COLUMNS if isinstance(figures.get(name), int | float | str)
    ]
    return "  ".join(shown)


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}" if abs(value) < 1e5 else f"{value:.3e}"
