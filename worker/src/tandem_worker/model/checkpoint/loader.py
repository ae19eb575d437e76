"""From a checkpoint to tensors laid out as a rank wants them: fused, sharded, converted, on the device.

Each tensor is copied once, from the mapped file into its final place, so peak memory is the model plus one tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.contract import WeightSource
from tandem_worker.model.checkpoint.quantized import DequantizedSource
from tandem_worker.model.checkpoint.stored import PackedWeight, Packer, Slice, StoredPart
from tandem_worker.model.prepared.weights import PreparedWeights

if TYPE_CHECKING:
    from tandem_worker.kernels.quantized import Weight
    from tandem_worker.model.checkpoint.image import Image
    from tandem_worker.model.checkpoint.upload import Uploads

Made = TypeVar("Made", torch.Tensor, torch.Tensor | None)


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


@dataclass(slots=True)
class LosslessCount:
    """What a packer of 12 bits a weight made, or a prepared copy had of it."""

    matrices: int = 0
    weights: int = 0
    num_bytes: int = 0


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
        packer: Packer | None = None,
        prepared: PreparedWeights | None = None,
        shrink: Callable[[torch.Tensor], Weight | None] | None = None,
        uploads: Uploads | None = None,
        image: Image | None = None,
    ) -> None:
        """`keeps_packed`: quantized matrices stay as they are where there is a form that kernels multiply.

        `packer` makes matrices of bfloat16 on the CPU, where there are kernels for that; `prepared` has what it made at
        an earlier start, or keeps it for the next. `shrink` makes a plain matrix on the device one of 12 bits a weight,
        where it gets smaller by that. `uploads` fills large tensors on the device; `image` has some there already.
        """
        self.source = source
        self.dtype = dtype
        self.device = device
        self.forms: Counter[str] = Counter()
        """Matrices of a quantized checkpoint by the form they are kept in."""
        self.lossless = LosslessCount()
        self._keeps_packed = keeps_packed and isinstance(source, DequantizedSource)
        self._prefix = prefix
        self._packer = packer
        self._shrink = shrink
        self._uploads = uploads
        self._image = image
        self._prepared = prepared if packer is not None else None

    @property
    def is_lossless(self) -> bool:
        """Whether matrices take 12 bits a weight where they can."""
        return self._shrink is not None or (self._packer is not None and self._packer.lossless)

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
        chosen = dtype or self.dtype
        shape = _stacked_shape(parts)
        return self._once(_key("plain", parts), shape, chosen, lambda: self._stack(parts, shape, chosen))

    def _stack(self, parts: Sequence[Part], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        stored = self._stored(parts)
        if self._packer is not None and stored is not None and dtype == torch.bfloat16:
            widened = self._packer.widen(stored)
            if widened is not None:
                return widened
        there = [self._take(part) for part in parts]
        if len(there) == 1 and there[0] is not None and there[0].dtype is dtype and there[0].is_contiguous():
            return there[0]
        result = torch.empty(shape, dtype=dtype, device=self.device)
        start = 0
        for part, found in zip(parts, there, strict=True):
            rows = part.local_shape[0]
            target = result[start : start + rows]
            if found is not None or not self._upload(target, part):
                target.copy_(self.read(part) if found is None else found)
            start += rows
        if self._uploads is not None:
            self._uploads.settle()
        return result

    def _take(self, part: Part) -> torch.Tensor | None:
        """The part out of the image, where it is there."""
        if self._image is None:
            return None
        name = self._find(part)
        stored = self.source.stored(name)
        if stored is None or stored.place is None:
            return None
        whole, piece = self._image.take(stored.place, self.source.dtype(name), part.shape), part.piece
        return (
            whole if whole is None or piece is None else whole.narrow(piece.dim, piece.start, piece.stop - piece.start)
        )

    def _upload(self, target: torch.Tensor, part: Part) -> bool:
        """Whether the part is on its way to `target`."""
        if self._uploads is None:
            return False
        stored = self.source.stored(self._find(part))
        return stored is not None and self._uploads.fill(target, stored, part.piece)

    def matrix(self, parts: Sequence[Part], *, stacked: bool = False) -> Weight | PackedWeight:
        """As `stack`, for a matrix that is only multiplied with: packed where backend and layout allow.

        `stacked`: others come on top of it, and `shrink` takes all of them.
        """
        packer, stored, shape = self._packer, self._stored(parts), _stacked_shape(parts)
        if packer is not None and stored is not None:
            made = self._pack(_key("packed", parts), shape, lambda: packer.pack(stored))
            if made is not None:
                return made
        packed = None
        if self._keeps_packed:
            from tandem_worker.model.checkpoint.packing import concatenate

            packed = concatenate([self.packed(part) for part in parts])
            self.forms["plain" if packed is None else type(packed).__name__] += 1
        if packed is not None:
            return self.move(packed)
        made = self.pack_plain(_key("widened", parts), shape, lambda: self._stack(parts, shape, self.dtype))
        if made is not None:
            return made
        plain = self.stack(parts)
        return plain if stacked else self.shrink(plain)

    def shrink(self, weight: torch.Tensor) -> Weight:
        """A plain matrix `[N, K]`, or experts `[E, N, K]`, in 12 bits a weight where the backend multiplies such ones
        on the device; else as it is."""
        made = None if self._shrink is None else self._shrink(weight)
        if made is None or isinstance(made, torch.Tensor):
            return weight
        self._count_lossless(weight.numel(), sum(getattr(made, entry.name).nbytes for entry in fields(made)))
        return made

    def _count_lossless(self, weights: int, num_bytes: int) -> None:
        self.lossless.matrices += 1
        self.lossless.weights += weights
        self.lossless.num_bytes += num_bytes

    def lay_out(self, name: str, weight: torch.Tensor) -> Weight | PackedWeight:
        """The matrix `weight` `[N, K]`, which belongs to `name`, for a product: packed where the backend does that."""
        packer = self._packer
        if packer is None:
            return self.shrink(weight)
        made = self._pack(f"laid out {name}", tuple(weight.shape), lambda: packer.lay_out(weight))
        return weight if made is None else made

    def pack_plain(self, key: str, shape: tuple[int, ...], read: Callable[[], torch.Tensor]) -> PackedWeight | None:
        """The plain matrix of that shape `[N, K]` that `read` makes, as of a quantized one, in 12 bits a weight; None
        where matrices are not kept so in host memory. `key` says everything that decides it."""
        packer = self._packer
        if packer is None or not packer.lossless or self.dtype != torch.bfloat16:
            return None
        return self._pack(key, shape, lambda: packer.lay_out(read()))

    def _stored(self, parts: Sequence[Part]) -> list[StoredPart] | None:
        """Parts as they lie in the checkpoint, where kernels may take all of them from there."""
        packer = self._packer
        if packer is None or self.dtype != torch.bfloat16:
            return None
        found = [(self.source.stored(self._find(part)), part.piece) for part in parts]
        taken = [StoredPart(stored, piece) for stored, piece in found if stored is not None and packer.takes(stored)]
        return taken if len(taken) == len(found) else None

    def _pack(self, key: str, shape: tuple[int, ...], make: Callable[[], torch.Tensor | None]) -> PackedWeight | None:
        """What `make` packs, or the prepared copy of it; None where it cannot be packed."""
        assert self._packer is not None
        rows, columns = shape
        elements = self._packer.packed_elements(rows, columns)
        if elements is None:
            return None
        if self.is_lossless:
            memory = self._once(f"lossless {key}", None, torch.uint8, make)
            if memory is not None:
                self._count_lossless(rows * columns, memory.nbytes)
        else:
            memory = self._once(key, (elements,), torch.bfloat16, make)
        return None if memory is None else PackedWeight((rows, columns), memory)

    def _once(
        self, key: str, shape: tuple[int, ...] | None, dtype: torch.dtype, make: Callable[[], Made]
    ) -> torch.Tensor | Made:
        """The prepared copy of what `key` names, or what `make` does, which the next start may have a copy of.

        `shape` None: flat, as long as it is.
        """
        size = None if shape is None else math.prod(shape) * dtype.itemsize
        if self._prepared is None or size == 0:
            return make()
        key = f"{key} {dtype} {list(shape or ())}"
        found = self._prepared.take(key, size)
        if found is not None:
            memory, start, size = found
            whole = torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize, offset=start)
            return whole if shape is None else whole.view(shape)
        made = make()
        if made is not None:
            assert made.is_contiguous()
            assert size in {None, made.nbytes}
            self._prepared.put(key, made.data_ptr(), made.nbytes, made)
        return made

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


def _stacked_shape(parts: Sequence[Part]) -> tuple[int, ...]:
    shapes = [part.local_shape for part in parts]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _key(layout: str, parts: Sequence[Part]) -> str:
    """Everything that decides what comes of `parts`, the checkpoint and the element type apart."""
    return " ".join([layout, *(_describe(part) for part in parts)])


def _describe(part: Part) -> str:
    piece = part.piece
    taken = "" if piece is None else f"[{piece.dim}:{piece.start}:{piece.stop}]"
    return f"{part.name}{list(part.shape)}{taken}".replace(" ", "")
