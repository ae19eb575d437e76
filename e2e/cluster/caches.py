"""Keeps the cache folder small: what is cheapest to make again goes first, and nothing that a living cluster uses.

Runs when a cluster has been stopped. Figures of what each part costs are in docs/cluster.md.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .progress import say

LIMIT = 10 * 2**30
"""Bytes of one cache folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPart:
    """Something in the cache that can be made again."""

    name: str
    size: Callable[[], int]
    remove: Callable[[], None]
    costs: str
    """What it takes to have it again, for a person."""


def measure(folder: Path) -> int:
    """Bytes on the disk, links to one file counted once; other file systems and what links lead to are not counted."""
    seen: set[int] = set()
    total, pending = 0, [folder]
    device = folder.stat().st_dev if folder.exists() else None
    while pending:
        try:
            entries = list(os.scandir(pending.pop()))
        except OSError:  # it went away, or was none
            continue
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if found.st_dev != device:
                continue
            if entry.is_dir(follow_symlinks=False):
                pending.append(Path(entry.path))
            elif found.st_ino not in seen:
                seen.add(found.st_ino)
                total += 512 * found.st_blocks
    return total


def bound(whole: Callable[[], int], parts: Sequence[CachedPart], limit: int = LIMIT) -> list[str]:
    """Remove parts in their order until the whole is within its limit. What was done, a line each."""
    told: list[str] = []
    size = whole()
    for part in parts:
        if size <= limit:
            return told
        if before := part.size():
            part.remove()
            freed = before - part.size()
            size -= freed
            told.append(f"removed {part.name}, {_gib(freed)} ({part.costs})")
    if size > limit:
        told.append(f"caches still take {_gib(size)}, more than {_gib(limit)}: `make clean` removes them all")
    return told


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def folder_part(folder: Path, name: str, costs: str) -> CachedPart:
    return CachedPart(name=name, size=lambda: measure(folder), remove=lambda: shutil.rmtree(folder), costs=costs)


def bound_cache(cache: Path, parts: Sequence[CachedPart]) -> None:
    """Of one cache folder, and say what went."""
    for line in bound(lambda: measure(cache), parts):
        say(line)
