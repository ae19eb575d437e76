"""The contract of a checkpoint reader.

A reader maps tensor names, always those of the Hugging Face checkpoint of the family, to tensors. It reads lazily: what
a rank does not ask for is never copied into memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from tandem_worker.model.checkpoint.stored import Slice, Stored

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """A checkpoint on disk. Every method may raise StartupError."""

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that is there."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Element type that `read` returns."""
        ...

    def stored(self, name: str) -> Stored | None:
        """The tensor as it lies there, for kernels that widen it themselves; None where it is no matrix that does."""
        ...

    def read(self, name: str, part: Slice | None = None) -> torch.Tensor:
        """The tensor, or a part of it. It may share memory with the file: copy before writing to it."""
        ...
