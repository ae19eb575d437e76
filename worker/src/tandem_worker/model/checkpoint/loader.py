"""From a checkpoint to tensors laid out as a rank wants them: fused, sharded, converted, on the device.

Each tensor is copied once, from the mapped file into its final place, so peak memory is the model plus one tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.contract import Slice, WeightSource
from tandem_worker.model.checkpoint.quantized import DequantizedSource

if TYPE_CHECKING:
    from tandem_worker.kernels.quantized import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of a fused matrix: its name, its whole shape and what this rank takes of it."""

    name: str
    shape: tuple[int, ...]
    piece: Slice | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what this rank takes; the whole shape where it takes everything."""
        if self.piece is None:
            return self.shape
        extents = list(self.shape)
        extents[self.piece.dim] = self.piece.stop - self.piece.start
        return tuple(extents)


def shard(dim: int, extent: int, rank: int, size: int, *, what: str) -> Slice | None:
    """Equal share `rank` of `size` along `dim`; None for the whole. Raises StartupError when it does not divide."""
    if size == 1:
        return None
    if extent % size:
        raise StartupError(
            "ParallelismInvalid", f"{what} ({extent}) cannot be split over {size} ranks: choose a divisor of {extent}."
        )
    share = extent // size
    return Slice(dim, rank * share, (rank + 1) * share)


class WeightLoader:
    """Reads parts of a checkpoint into tensors of `dtype` on `device`."""

    def __init__(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keeps_packed: bool,
        prefix: str = "",
    ) -> None:
        """`keeps_packed`: quantized matrices stay as they are where there is a form that kernels multiply."""
        self.source = source
        self.dtype = dtype
        self.device = device
        self.forms: Counter[str] = Counter()
        """Matrices of a quantized checkpoint by the form they are kept in."""
        self._keeps_packed = keeps_packed and isinstance(source, DequantizedSource)
        self._prefix = prefix

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return self._prefix + name in self.source

    def load(
        self, name: str, shape: tuple[int, ...], piece: Slice | None = None, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """One tensor, or this rank's piece of it. Raises StartupError when it is missing or has another shape."""
        return self.stack([Part(name=name, shape=shape, piece=piece)], dtype=dtype)

    def stack(self, parts: Sequence[Part], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Tensors one after another along their first axis."""
        shapes = [part.local_shape for part in parts]
        rows = sum(shape[0] for shape in shapes)
        result = torch.empty((rows, *shapes[0][1:]), dtype=dtype or self.dtype, device=self.device)
        start = 0
        for part, shape in zip(parts, shapes, strict=True):
            result[start : start + shape[0]].copy_(self.read(part))
            start += shape[0]
        return result

    def matrix(self, parts: Sequence[Part]) -> Weight:
        """As `stack`, for a matrix that is only multiplied with: packed where backend and layout allow."""
        packed = None
        if self._keeps_packed:
            from tandem_worker.model.checkpoint.packing import concatenate

            packed = concatenate([self.packed(part) for part in parts])
            self.forms["plain" if packed is None else type(packed).__name__] += 1
        return self.stack(parts) if packed is None else self.move(packed)

    def packed(self, part: Part) -> Weight | None:
        """A quantized matrix as kernels multiply it, `[N, K]`, in host memory; None where it has no such form.

        Of a stacked tensor `[E, K, N]` the one expert that `part` cuts out.
        """
        if not self._keeps_packed:
            return None
        assert isinstance(self.source, DequantizedSource)
        return self.source.packed(self._find(part), part.piece)

    def move(self, weight: Weight) -> Weight:
        """A packed weight on the model's device."""
        if isinstance(weight, torch.Tensor):
            return self.place(weight)
        values = {entry.name: getattr(weight, entry.name) for entry in fields(weight)}
        moved = {name: value.to(self.device) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(weight, **moved)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that was put together from `read` ones, in the model's type on its device, contiguous."""
        return tensor.to(device=self.device, dtype=self.dtype).contiguous()

    def read(self, part: Part) -> torch.Tensor:
        """The part as the source has it: own element type, possibly sharing the file's memory."""
        return self.source.read(self._find(part), part.piece)

    def _find(self, part: Part) -> str:
        """The source's name of a tensor that is there, in the shape that is expected."""
        name = self._prefix + part.name
        if name not in self.source:
            raise StartupError(
                "WeightsIncomplete",
                f"The checkpoint lacks tensor {name}. It is not complete, or config.json belongs to another model.",
            )
        found = self.source.shape(name)
        if found != part.shape:
            raise StartupError(
                "WeightsShapeMismatch",
                f"Tensor {name} has shape {list(found)}, but the configuration asks for {list(part.shape)}. "
                "config.json and weights belong to different models.",
            )
        return name
