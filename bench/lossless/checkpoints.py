"""Packed checkpoints: bits a weight of values as training leaves them and of a real model's, and how fast a core packs
and gives back. `archive` is timed with its checksums, as a worker reads it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tandem_worker.model.backends import native
from tandem_worker.model.checkpoint import split_kernels
from tandem_worker.model.checkpoint.exponents import PackedNumbers, Words, pack_numbers
from tandem_worker.model.checkpoint.packed_folder import CHUNK, sum_of
from tandem_worker.model.checkpoint.split import SplitMatrix
from tandem_worker.model.load import open_checkpoint

from e2e.model import find_model

GOALS = {"fixed, bits": 12.15, "archive, bits": 10.75, "archive, packs GB/s": 0.7, "archive, unpacks GB/s": 2.0}
"""Bits a weight are at most those, GB of bfloat16 per second and core at least those."""


@dataclass(frozen=True, slots=True)
class Found:
    name: str
    value: float
    goal: float | None

    @property
    def met(self) -> bool:
        if self.goal is None:
            return True
        return self.value <= self.goal if "bits" in self.name else self.value >= self.goal


def trained() -> list[Words]:
    """Matrices as training leaves them, of an 8B layer's shapes."""
    generator = torch.Generator().manual_seed(1)
    return [
        _words(torch.randn(rows, columns, generator=generator).mul_(0.02).bfloat16())
        for rows, columns in ((6144, 4096), (4096, 4096), (4096, 14336))
    ]


def real(path: Path) -> list[Words]:
    """The matrices of a real model, which quantization has left its values and many zeros."""
    source = open_checkpoint(path)[1]
    names = [name for name in source.names() if len(source.shape(name)) == 2]
    return [_words(source.read(name).bfloat16()) for name in names]


def measure(rounds: int) -> list[Found]:
    """Every figure, printed as it is found."""
    found = []
    native.use_threads(1)
    torch.set_num_threads(1)
    for name, matrices in (("trained", trained()), ("SmolLM2", real(find_model()))):
        for figure, value in _measure(matrices, rounds).items():
            row = Found(f"{name}, {figure}", value, GOALS.get(figure))
            told = "" if row.goal is None else f"{'≤' if 'bits' in figure else '≥'}{row.goal:<6} "
            print(f"  {row.name:<48} {row.value:6.3f} {told}{'' if row.met else 'missed'}", flush=True)
            found.append(row)
    return found


def _measure(matrices: list[Words], rounds: int) -> dict[str, float]:
    weights = sum(matrix.size for matrix in matrices)
    packed = [b"".join(pack_numbers(matrix.reshape(-1), 1)) for matrix in matrices]
    plans = [split_kernels.plan(matrix) for matrix in matrices]
    fixed = sum(matrix.nbytes if plan is None else plan[1] for matrix, plan in zip(matrices, plans, strict=True))
    encoded = [
        (matrix, np.frombuffer(b"".join(piece.data for piece in split_kernels.encode(matrix, *plan)), np.uint8))
        for matrix, plan in zip(matrices, plans, strict=True)
        if plan is not None
    ]
    split = sum(matrix.nbytes for matrix, _ in encoded)

    def pack() -> None:
        for matrix in matrices:
            for piece in pack_numbers(matrix.reshape(-1), 1):
                sum_of(piece)

    def unpack() -> None:
        for matrix, memory in zip(matrices, packed, strict=True):
            for start in range(0, len(memory), CHUNK):
                sum_of(memory[start : start + CHUNK])
            PackedNumbers.parse(np.frombuffer(memory, np.uint8), matrix.size).read(0, matrix.size, 1)

    def check() -> None:
        for matrix, memory in encoded:
            for start in range(0, len(memory), CHUNK):
                sum_of(memory[start : start + CHUNK])
            target = np.empty(len(memory), np.uint8)
            SplitMatrix.parse(memory, *matrix.shape).write(target)

    return {
        "fixed, bits": 8 * fixed / weights,
        "fixed, checks and copies GB/s": split / _median(check, rounds) / 1e9,
        "archive, bits": 8 * sum(map(len, packed)) / weights,
        "archive, packs GB/s": 2 * weights / _median(pack, rounds) / 1e9,
        "archive, unpacks GB/s": 2 * weights / _median(unpack, rounds) / 1e9,
    }


def _median(work: Callable[[], None], rounds: int) -> float:
    """CPU seconds of this process: what other processes take of the core does not count."""
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def _words(values: torch.Tensor) -> Words:
    return values.contiguous().view(torch.int16).numpy().view(np.uint16)
