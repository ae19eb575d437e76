"""Removes the GPU libraries that importing torch does not load: for a worker image that only ever meets CPUs.

Run by the Dockerfile in the environment it slims. What the process has mapped after the imports stays, so nothing that
torch links against can be missing; the imports are repeated afterwards in a new process.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

IMPORTS = "import torch, transformers; torch.ones(2, 2) @ torch.ones(2, 2)"
FOLDERS = ("nvidia", "triton/backends")
SMALLEST = 1_000_000
"""Bytes; smaller files are left alone: Python sources, headers."""


def mapped_files() -> set[Path]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[5]).resolve() for line in lines if line.count("/")}


def main() -> None:
    exec(IMPORTS)
    packages = Path(sysconfig.get_path("purelib"))
    kept = mapped_files()
    freed = 0
    for folder in FOLDERS:
        for path in (packages / folder).rglob("*"):
            if path.is_file() and path.stat().st_size >= SMALLEST and path.resolve() not in kept:
                freed += path.stat().st_size
                path.unlink()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    sys.stdout.write(f"removed {freed / 1e9:.1f} GB of GPU libraries that no CPU needs\n")


if __name__ == "__main__":
    main()
