"""Says before it starts whether the disk is large enough."""

from __future__ import annotations

import shutil
from pathlib import Path

from .errors import ClusterError
from .progress import say

WHOLE_GIB = 30
"""An upper bound of the whole set-up: virtual environment, Go caches, build results, image layers, running cluster."""
NEEDED_GIB = {"cold": 22, "images": 12, "warm": 3}
"""By what is ahead: a first set-up; its images alone; a set-up with full caches, which still writes logs, containers'
own files and downloaded models. Below it the disk would run full on the way."""
GIB = 2**30


def judge(free_gib: float, ahead: str) -> tuple[bool, str | None]:
    """(whether to go on, what to tell)."""
    needed = NEEDED_GIB[ahead]
    if free_gib < needed:
        return False, f"the set-up still needs {needed} GB of disk, and {free_gib:.1f} GB are free"
    if ahead == "cold" and free_gib < WHOLE_GIB:
        return True, f"{free_gib:.0f} GB of disk are free; the whole set-up can take up to {WHOLE_GIB} GB"
    return True, None


def check_disk(cache: Path, ahead: str) -> None:
    """Raise ClusterError when the disk is too small, say so when it is tight."""
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    go_on, message = judge(shutil.disk_usage(place).free / GIB, ahead)
    if not go_on:
        raise ClusterError(f"{message} in {place}: free some, or set TANDEM_CACHE to a folder on a larger disk")
    if message:
        say(message)


def is_warm(cache: Path) -> bool:
    """Whether the cache has been filled by a whole set-up."""
    return (cache / "warm").exists()
