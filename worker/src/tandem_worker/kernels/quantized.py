"""Weights in the forms that the kernels read other than plain, and their exact values in plain torch.

All forms are row-major `[..., N, K]` (output features, input features), with one leading axis for experts where there
are several. Loaders bring checkpoint layouts into these forms once; kernels widen tiles in registers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from . import split_byte

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the four-bit float of the OCP Microscaling Formats specification 1.0; bit 3 is the sign."""


def _spread(scale: torch.Tensor, axis: int, group: int, extent: int) -> torch.Tensor:
    return scale.repeat_interleave(group, dim=axis).narrow(axis, 0, extent)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp8Weight:
    """float8_e4m3fn with one float32 factor per tile (DeepSeek-V3's `weight_scale_inv`): value = data * scale."""

    data: torch.Tensor
    """`[..., N, K]` float8_e4m3fn."""
    scale: torch.Tensor
    """`[..., ceil(N / tile), ceil(K / tile)]` float32."""
    tile: int = 128

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., N, K]`, as of the weight that it stands for."""
        return tuple(self.data.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """`[..., N, K]` in `dtype`; computed in float32."""
        rows, columns = self.shape[-2:]
        scale = _spread(_spread(self.scale, -2, self.tile, rows), -1, self.tile, columns)
        return (self.data.float() * scale).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Int4Weight:
    """Eight 4-bit integers per int32 along K, lowest bits first: value = (nibble - zero) * scale."""

    packed: torch.Tensor
    """`[..., N, K / 8]` int32."""
    scale: torch.Tensor
    """`[..., N, K / group]` of a float dtype."""
    zero: torch.Tensor | None = None
    """`[..., N, K / group]` uint8; None: 8 everywhere (symmetric)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., N, K]` of the weight that it stands for; `packed` has an eighth of the columns."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 8)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """`[..., N, K]` in `dtype`; computed in float32."""
        shifts = torch.arange(0, 32, 4, device=self.packed.device, dtype=torch.int32)
        nibbles = ((self.packed[..., None] >> shifts) & 0xF).flatten(-2).float()
        columns = self.shape[-1]
        zero = 8.0 if self.zero is None else _spread(self.zero.float(), -1, self.group, columns)
        return ((nibbles - zero) * _spread(self.scale.float(), -1, self.group, columns)).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mxfp4Weight:
    """Two 4-bit floats per byte along K, low nibble first, one power of two per 32 (OCP MX, gpt-oss)."""

    packed: torch.Tensor
    """`[..., N, K / 2]` uint8."""
    scale: torch.Tensor
    """`[..., N, K / 32]` uint8: the factor is 2 ** (scale - 127)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., N, K]` of the weight that it stands for; `packed` has half of the columns."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 2)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """`[..., N, K]` in `dtype`; computed in float32."""
        nibbles = torch.stack((self.packed & 0xF, self.packed >> 4), dim=-1).flatten(-2).long()
        table = torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)), device=self.packed.device)
        factor = torch.exp2(self.scale.float() - 127.0)
        return (table[nibbles] * _spread(factor, -1, 32, self.shape[-1])).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitByteWeight:
    """bfloat16 in 12 bits a weight, every bit kept; `split_byte` has the layout."""

    low: torch.Tensor
    """`[..., N, K / 2]` int16: the low bytes of two weights."""
    codes: torch.Tensor
    """`[..., N, K / 2]` uint8: what their high bytes are."""
    beside: torch.Tensor
    """`[words]` int32: what codes stand for, and the weights that have none."""

    @classmethod
    def pack(cls, values: torch.Tensor) -> SplitByteWeight | None:
        """A plain weight `[N, K]` or `[E, N, K]`; None where `split_byte.encode` says that it stays one."""
        parts = split_byte.encode(values)
        return None if parts is None else cls(low=parts[0], codes=parts[1], beside=parts[2])

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., N, K]` of the weight that it stands for."""
        return (*self.low.shape[:-1], self.low.shape[-1] * 2)

    @property
    def nbytes(self) -> int:
        """Bytes of all three."""
        return self.low.nbytes + self.codes.nbytes + self.beside.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """`[..., N, K]` in `dtype`, which holds every value unless it is float16."""
        return split_byte.decode((self.low, self.codes, self.beside)).to(dtype)


Weight = torch.Tensor | Fp8Weight | Int4Weight | Mxfp4Weight | SplitByteWeight


class WeightStack:
    """Weights of one form, shape and device, copied one after another into one with a leading axis.

    Nothing is held twice: the whole is allocated when the first comes.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._filled = 0
        self._first: Weight | None = None
        self._parts: dict[str, torch.Tensor] = {}

    def append(self, weight: Weight) -> None:
        """Copy `weight` to the next place. Raises TypeError for one of another form than the first."""
        parts = _tensors(weight)
        if self._first is None:
            self._first = weight
            self._parts = {name: part.new_empty((self._count, *part.shape)) for name, part in parts.items()}
        if type(weight) is not type(self._first) or parts.keys() != self._parts.keys():
            raise TypeError(f"a {type(weight).__name__} cannot be stacked with a {type(self._first).__name__}")
        for name, part in parts.items():
            self._parts[name][self._filled].copy_(part)
        self._filled += 1

    def whole(self) -> Weight:
        """`[count, ...]`. Raises ValueError when another number of weights was appended."""
        if self._first is None or self._filled != self._count:
            raise ValueError(f"{self._filled} of {self._count} weights were stacked")
        if isinstance(self._first, torch.Tensor):
            return self._parts["data"]
        return replace(self._first, **self._parts)

    def tensor(self) -> torch.Tensor | None:
        """As `whole` for plain tensors; None when none was appended."""
        if self._first is None:
            return None
        whole = self.whole()
        assert isinstance(whole, torch.Tensor)
        return whole


def _tensors(weight: Weight) -> dict[str, torch.Tensor]:
    """The tensors a weight consists of, by field."""
    if isinstance(weight, torch.Tensor):
        return {"data": weight}
    values = {entry.name: getattr(weight, entry.name) for entry in fields(weight)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def dequantize(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight's values `[..., N, K]`, whatever its form."""
    return weight.to(dtype) if isinstance(weight, torch.Tensor) else weight.dequantize(dtype)
