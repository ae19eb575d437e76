"""Matrices in 12 bits a weight decoded and made by the CPU kernels where these run, else by numpy: the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType

import numpy as np
import numpy.typing as npt

from tandem_worker.model.checkpoint import split
from tandem_worker.model.checkpoint.split import COLUMNS, SplitMatrix, SplitPlaces, Words

_AT_ONCE = 16 << 20
"""Weights that are taken at a time."""


@cache
def _kernels() -> ModuleType | None:
    from tandem_worker.model.backends.native import library

    return library if library.find_lossless_obstacle() is None else None


def decode_rows(matrix: SplitMatrix, start: int, stop: int) -> Words:
    """The bits of rows `start` to `stop`, `[stop - start, K]`."""
    first = start // COLUMNS
    part = matrix.blocks(first, -(-stop // COLUMNS))
    kernels = _kernels()
    if kernels is None:
        return part.decode()[start - first * COLUMNS : stop - first * COLUMNS]
    import torch

    memory = np.empty(part.nbytes, np.uint8)
    part.write(memory)
    packed = torch.empty(len(part.groups) * COLUMNS * part.columns, dtype=torch.bfloat16)
    kernels.unsplit_to(memory, part.rows, part.columns, packed)
    pairs = packed.view(torch.int32).numpy().reshape(len(part.groups), part.columns // 2, COLUMNS)
    rows = np.ascontiguousarray(pairs.transpose(0, 2, 1)).view(np.uint16).reshape(-1, part.columns)
    return rows[start - first * COLUMNS : stop - first * COLUMNS]


def plan(bits: Words) -> tuple[npt.NDArray[np.uint8], int] | None:
    """Values that take codes in the matrix `bits` `[N, K]`, and the bytes that it takes with them; None where that is
    not a fifth less."""
    rows, columns = bits.shape
    if columns % 2 or not rows or not columns:
        return None
    counts = np.zeros(split.NUM_HIGHS, np.int64)
    for start, stop in _strips(rows, columns):
        counts += _count(bits[start:stop])
    values, num_beside = split.choose_values(counts)
    size = SplitPlaces(rows, columns).size(num_beside)
    return (values, size) if split.is_worth(size, bits.nbytes) else None


def encode(bits: Words, values: npt.NDArray[np.uint8], size: int) -> Iterator[npt.NDArray[np.uint8]]:
    """The pieces that follow each other of the matrix, `size` bytes in all."""
    rows, columns = bits.shape
    yield split.make_head(size, (size - SplitPlaces(rows, columns).beside) // 4)
    parts: list[SplitMatrix] = []
    before = 0
    for start, stop in _strips(rows, columns):
        part = _encode(bits[start:stop], values)
        yield np.ascontiguousarray(part.groups).reshape(-1)
        # What follows all groups is kept, and is small.
        empty = np.empty((0, *part.groups.shape[1:]), np.uint8)
        parts.append(
            SplitMatrix(
                part.rows, columns, empty, part.values.copy(), part.flags.copy(), part.starts + before,
                part.beside.copy(),
            )
        )  # fmt: skip
        before += len(part.beside)
    yield np.concatenate([part.values for part in parts]).reshape(-1)
    yield np.concatenate([part.flags for part in parts]).reshape(-1)
    yield np.concatenate([part.starts[:-1] for part in parts]).astype("<u4").view(np.uint8)
    yield np.concatenate([part.beside for part in parts]).astype("<u4").view(np.uint8)


def _strips(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, _AT_ONCE // columns // COLUMNS) * COLUMNS
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _count(bits: Words) -> npt.NDArray[np.int64]:
    kernels = _kernels()
    if kernels is None:
        return split.count_highs(bits)
    return kernels.count_highs(_lay_out(bits), *bits.shape)


def _encode(bits: Words, values: npt.NDArray[np.uint8]) -> SplitMatrix:
    kernels = _kernels()
    if kernels is None:
        return split.encode(bits, values)
    packed = _lay_out(bits)
    counts = kernels.count_highs(packed, *bits.shape)
    num_beside = int(counts.sum() - counts[values].sum())
    memory = np.empty(SplitPlaces(*bits.shape).size(num_beside), np.uint8)
    kernels.split_pack(packed, *bits.shape, values, num_beside, memory.ctypes.data)
    return SplitMatrix.parse(memory, *bits.shape)


def _lay_out(bits: Words):
    import torch

    from tandem_worker.model.backends.native.packing import lay_out

    packed = lay_out(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
    assert packed is not None
    return packed
