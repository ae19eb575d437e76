"""Matrices as they lie in a checkpoint's file, for kernels that take them from there in one pass, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from tandem_worker.model.checkpoint.split import SplitMatrix

F32, F16, BF16 = 0, 1, 30
"""GGML's numbers of the plain types."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `start` to `stop` along axis `dim`."""

    dim: int
    start: int
    stop: int


class PackedMatrix(Protocol):
    """A matrix `[rows, columns]` of a packed checkpoint. Nothing is read before it is asked for."""

    def split(self) -> SplitMatrix | None:
        """Its 12 bits a weight, checked; None where it is not kept in those. Raises StartupError for a damaged one."""
        ...

    def read(self, piece: Slice | None) -> torch.Tensor:
        """Plain rows of it, or of a piece of it. Raises StartupError for a damaged one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A matrix `[rows, columns]` in a file that is mapped, or in memory."""

    address: int
    """Address of the first row; the others follow without gaps."""
    kind: int
    """GGML's number of the type."""
    rows: int
    columns: int
    num_bytes: int
    half: int = 0
    """Rows of half a head where both halves are stored interleaved, as in Llama's query and key projections."""
    owner: object
    """What the memory lives as long as."""
    place: tuple[Path, str] | None = None
    """The safetensors file in which it lies as it is, and its name there."""
    packed: PackedMatrix | None = None
    """What gives a matrix of a packed checkpoint, which has no address."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What is taken of a stored matrix; None for all."""

    matrix: Stored
    piece: Slice | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A bfloat16 matrix as the CPU kernels multiply it: `[N / 64][K / 2][64][2]`, or the same in 12 bits a weight."""

    shape: tuple[int, int]
    """`(N, K)`."""
    memory: torch.Tensor
    """Flat. bfloat16, N padded to a multiple of 64 with zeros; or uint8, as `split.h` of the CPU kernels describes."""


class Packer(Protocol):
    """Kernels that make matrices of a model from stored ones; None where they cannot, and another way must be gone."""

    lossless: bool
    """Whether matrices for products take 12 bits a weight where that is smaller: bytes, of a number that follows from
    the values."""

    def takes(self, matrix: Stored) -> bool:
        """Whether it is of a type that `pack` and `widen` read. Where not, neither is asked: what was asked for in vain
        is in no prepared copy, and is not to be looked for in one."""
        ...

    def pack(self, parts: Sequence[StoredPart]) -> torch.Tensor | None:
        """Parts below each other, as the memory of a `PackedWeight`."""
        ...

    def widen(self, parts: Sequence[StoredPart]) -> torch.Tensor | None:
        """Parts below each other, as plain bfloat16 rows `[N, K]`."""
        ...

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor | None:
        """A plain bfloat16 matrix `[N, K]`, as the memory of a `PackedWeight`."""
        ...

    def packed_elements(self, rows: int, columns: int) -> int | None:
        """Elements of the bfloat16 layout; None where a matrix of this shape cannot be packed."""
        ...
