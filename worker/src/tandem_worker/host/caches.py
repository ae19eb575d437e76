"""How much of the processor's caches this process has at a time, by what the kernel tells of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tandem_worker.host.environment import observe_threads

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@cache
def observe_cache_bytes() -> int:
    """Bytes of the last-level caches that as many threads as this process computes on reach; 0 where nothing is told.

    What the processor says of itself (`sysconf`) is no help: in a virtual machine it may be the whole socket's.
    """
    return add_caches(os.sched_getaffinity(0), observe_threads())


def add_caches(cpus: Iterable[int], num_threads: int, devices: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of the largest `num_threads` last-level caches that `cpus` have, of which neighbours share one."""
    sizes: list[int] = []
    seen: set[int] = set()
    for cpu in cpus:
        if cpu in seen:
            continue
        told = _read_last(devices / f"cpu{cpu}" / "cache")
        if told is not None:
            shared, size = told
            sizes.append(size)
            seen |= shared
    return sum(sorted(sizes, reverse=True)[:num_threads])


def _read_last(folder: Path) -> tuple[set[int], int] | None:
    """The CPUs that share the cache next to memory, and its bytes; None where the kernel does not tell."""
    found: list[tuple[int, int, str]] = []
    try:
        for index in folder.glob("index[0-9]*"):
            level, size, shared = ((index / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
            found.append((int(level), int(size[:-1]) * _UNITS[size[-1]], shared))
        num_bytes, sharing = max(found)[1:]
        cpus = _parse_cpus(sharing)
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return (cpus, num_bytes) if cpus else None


def _parse_cpus(text: str) -> set[int]:
    """The numbers in a list as the kernel writes it: `0-3,8`."""
    numbers: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if first.isdigit():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers
