"""Matrices from a checkpoint's stored rows to what the kernels read, in one pass over both (`pack.cpp`)."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch

from tandem_worker.model.backends.native import library
from tandem_worker.model.checkpoint.split import SplitMatrix, join
from tandem_worker.model.checkpoint.stored import BF16, Slice, Stored, StoredPart
from tandem_worker.model.prepared.memory import Arena, map_memory


class _PackPart(ctypes.Structure):
    """`Part` of pack.cpp."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_ssize_t) for name in ("type", "row_bytes", "first_row", "num_rows", "first_column", "half")),
    )


@cache
def block_of(kind: int) -> tuple[int, int] | None:
    """Elements and bytes of a block of GGML's type; None where the kernels do not widen it."""
    size = ctypes.c_ssize_t()
    elements = library.load_library().tandem_format(kind, ctypes.addressof(size))
    return (elements, size.value) if elements else None


class NativePacker:
    """Satisfies `Packer`. Results of one packer lie side by side in memory."""

    lossless = False

    def __init__(self) -> None:
        self._arena = Arena()

    def takes(self, matrix: Stored) -> bool:
        """Whether it is of a type that is widened here."""
        return matrix.packed is not None or _row_bytes(matrix) is not None

    def pack(self, parts: Sequence[StoredPart]) -> torch.Tensor | None:
        """Parts below each other, packed, flat; None for odd widths and for types that are not widened here."""
        kept = _kept_split(parts)
        if kept is not None and library.find_lossless_obstacle() is None:
            split = np.empty(kept.nbytes, np.uint8)
            kept.write(split)
            memory = self._memory((kept.rows + -kept.rows % library.COLUMNS) * kept.columns)
            library.unsplit_to(split, kept.rows, kept.columns, memory)
            return memory
        described = _describe(parts)
        elements = None if described is None else packed_elements(described.rows, described.columns)
        if described is None or elements is None:
            return None
        memory = self._memory(elements)
        described.call(library.load_library().tandem_pack, memory)
        return memory

    def widen(self, parts: Sequence[StoredPart]) -> torch.Tensor | None:
        """Parts below each other, as plain bfloat16 rows `[N, K]`; None for types that are not widened here."""
        described = _describe(parts)
        if described is None:
            return None
        memory = self._memory(described.rows * described.columns)
        described.call(library.load_library().tandem_widen, memory)
        return memory.view(described.rows, described.columns)

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor | None:
        """As the function of that name, within this packer's memory."""
        return lay_out(weight, self._memory)

    def packed_elements(self, rows: int, columns: int) -> int | None:
        """As the function of that name."""
        return packed_elements(rows, columns)

    def _memory(self, elements: int) -> torch.Tensor:
        whole, start = self._arena.take(2 * elements)
        return torch.frombuffer(whole, dtype=torch.bfloat16, count=elements, offset=start)


class LosslessPacker(NativePacker):
    """Satisfies `Packer`: the same layout, then kept in 12 bits a weight."""

    lossless = True

    def __init__(self) -> None:
        super().__init__()
        self._passage: mmap.mmap | None = None
        """Matrices are here in 16 bits on their way, one at a time: malloc keeps what it gets back of so many sizes."""

    def pack(self, parts: Sequence[StoredPart]) -> torch.Tensor | None:
        kept = _kept_split(parts)
        if kept is not None:
            memory = self._bytes(kept.nbytes)
            kept.write(memory.numpy())
            return memory
        described = _describe(parts)
        elements = None if described is None else packed_elements(described.rows, described.columns)
        if described is None or elements is None:
            return None
        packed = self._pass(elements)
        described.call(library.load_library().tandem_pack, packed)
        return self._split(packed, described.rows, described.columns)

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor | None:
        packed = lay_out(weight, self._pass)
        return None if packed is None else self._split(packed, *weight.shape)

    def _pass(self, elements: int) -> torch.Tensor:
        if self._passage is None or len(self._passage) < 2 * elements:
            self._passage = None  # before there is the next
            self._passage = map_memory(2 * elements)
        return torch.frombuffer(self._passage, dtype=torch.bfloat16, count=elements)

    def _split(self, packed: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return library.split(packed, rows, columns, self._bytes)

    def _bytes(self, size: int) -> torch.Tensor:
        whole, start = self._arena.take(size)
        return torch.frombuffer(whole, dtype=torch.uint8, count=size, offset=start)


def _kept_split(parts: Sequence[StoredPart]) -> SplitMatrix | None:
    """Parts below each other, where all of them are kept in 12 bits a weight and their blocks need not be cut."""
    cut = []
    for part in parts:
        whole = None if part.matrix.packed is None else part.matrix.packed.split()
        taken = None if whole is None else _cut(whole, part.piece)
        if taken is None:
            return None
        cut.append(taken)
    return join(cut)


def _cut(matrix: SplitMatrix, piece: Slice | None) -> SplitMatrix | None:
    if piece is None:
        return matrix
    take = matrix.take_rows if piece.dim == 0 else matrix.take_columns
    return take(piece.start, piece.stop)


def _read(part: StoredPart) -> StoredPart:
    """A part of a packed checkpoint as plain rows in memory; any other as it is."""
    packed = part.matrix.packed
    if packed is None:
        return part
    values = packed.read(part.piece).contiguous()
    rows, columns = values.shape
    plain = Stored(
        address=values.data_ptr(), kind=part.matrix.kind, rows=rows, columns=columns, num_bytes=values.nbytes,
        owner=values,
    )  # fmt: skip
    return StoredPart(plain)


def packed_elements(rows: int, columns: int) -> int | None:
    """Elements of a packed matrix with its padding; None for odd widths, which products do not take."""
    return None if columns % 2 or not rows or not columns else -(-rows // library.COLUMNS) * library.COLUMNS * columns


def lay_out(weight: torch.Tensor, memory: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor | None:
    """A plain matrix `[N, K]`, packed, flat, in memory that `memory` gives for so many elements.

    None for odd widths and other types than bfloat16.
    """
    rows, columns = weight.shape
    elements = packed_elements(rows, columns)
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or elements is None:
        return None
    plain = weight.contiguous()
    stored = Stored(
        address=plain.data_ptr(), kind=BF16, rows=rows, columns=columns, num_bytes=plain.nbytes, owner=plain
    )
    described = _describe([StoredPart(stored)])
    assert described is not None
    target = torch.empty(elements, dtype=torch.bfloat16) if memory is None else memory(elements)
    described.call(library.load_library().tandem_pack, target)
    return target


class _Described:
    """Parts as the kernels take them."""

    def __init__(self, parts: Sequence[StoredPart], rows: int, columns: int, structures: list[_PackPart]) -> None:
        self._owners = parts  # their memory must live as long as their addresses are used
        self.rows, self.columns = rows, columns
        self._count = len(structures)
        self._structures = (_PackPart * len(structures))(*structures)

    def call(self, kernel: Callable[..., None], target: torch.Tensor) -> None:
        kernel(ctypes.addressof(self._structures), self._count, self.columns, target.data_ptr())


def _row_bytes(matrix: Stored) -> int | None:
    """Bytes of a row in whole blocks; None for a type that the kernels do not widen."""
    block = block_of(matrix.kind)
    if block is None or matrix.columns % block[0]:
        return None
    row_bytes = matrix.columns // block[0] * block[1]
    if row_bytes * matrix.rows != matrix.num_bytes or (matrix.half and matrix.rows % (2 * matrix.half)):
        return None
    return row_bytes


def _describe(parts: Sequence[StoredPart]) -> _Described | None:
    structures, rows, widths = [], 0, set()
    parts = [_read(part) for part in parts]
    for part in parts:
        matrix, piece = part.matrix, part.piece
        row_bytes = _row_bytes(matrix)
        if row_bytes is None:
            return None
        taken = [(0, matrix.rows), (0, matrix.columns)]
        if piece is not None:
            taken[piece.dim] = piece.start, piece.stop
        (first_row, last_row), (first_column, last_column) = taken
        assert 0 <= first_row <= last_row <= matrix.rows
        assert 0 <= first_column <= last_column <= matrix.columns
        rows += last_row - first_row
        widths.add(last_column - first_column)
        structures.append(
            _PackPart(
                rows=matrix.address,
                type=matrix.kind,
                row_bytes=row_bytes,
                first_row=first_row,
                num_rows=last_row - first_row,
                first_column=first_column,
                half=matrix.half,
            )
        )
    assert len(widths) == 1, "parts have one width"
    (columns,) = widths
    return _Described(parts, rows, columns, structures) if rows and columns else None
