"""What the kernel tells of the processor's caches."""

from __future__ import annotations

from pathlib import Path

import pytest
from tandem_worker.host.caches import add_caches


def tell(devices: Path, cpu: int, *caches: tuple[int, str, str]) -> None:
    for index, (level, size, shared) in enumerate(caches):
        folder = devices / f"cpu{cpu}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
            (folder / name).write_text(f"{text}\n")


def two_chiplets(devices: Path) -> None:
    """CPUs 0, 1, 4, 5 share 32 MB, CPUs 2 and 3 share 96."""
    for cpu in range(6):
        last = (3, "98304K", "2-3") if cpu in {2, 3} else (3, "32M", "0-1,4-5")
        tell(devices, cpu, (1, "48K", str(cpu)), (2, "1024K", str(cpu)), last)


@pytest.mark.parametrize(
    ("cpus", "num_threads", "megabytes"),
    [
        ((0, 1), 2, 32),
        ((0, 5), 2, 32),
        ((0, 2), 2, 128),
        ((0, 1, 2, 3), 1, 96),  # one thread is on one of them at a time
        ((0, 1, 2, 3), 8, 128),
        ((2, 7), 2, 96),  # of CPU 7 nothing is told
        ((), 2, 0),
    ],
)
def test_each_last_cache_counts_once(tmp_path: Path, cpus: tuple[int, ...], num_threads: int, megabytes: int) -> None:
    two_chiplets(tmp_path)
    assert add_caches(cpus, num_threads, tmp_path) == megabytes << 20


def test_a_cpu_without_a_third_level_has_its_second(tmp_path: Path) -> None:
    tell(tmp_path, 0, (1, "32K", "0"), (2, "512K", "0-3"))
    assert add_caches(range(4), 4, tmp_path) == 512 << 10


@pytest.mark.parametrize("size", ["", "K", "many", "12Q"])
def test_what_cannot_be_read_is_nothing(tmp_path: Path, size: str) -> None:
    tell(tmp_path, 0, (3, size, "0"))
    assert add_caches([0, 1], 2, tmp_path) == 0


@pytest.mark.parametrize("shared", ["0-x", "0-1-2", "all", ""])
def test_a_list_of_cpus_that_cannot_be_read_is_nothing(tmp_path: Path, shared: str) -> None:
    tell(tmp_path, 0, (3, "32M", shared))
    tell(tmp_path, 1, (3, "32M", shared))
    assert add_caches([0, 1], 2, tmp_path) == 0
