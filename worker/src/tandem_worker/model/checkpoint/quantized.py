"""A quantized checkpoint seen as a plain one: each matrix is dequantized when it is read, or handed out packed.

Which layout a matrix has is told by the names beside it; the checkpoint's `quantization_config` settles the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint import unpacking
from tandem_worker.model.checkpoint.contract import WeightSource
from tandem_worker.model.checkpoint.schemes import check_scheme
from tandem_worker.model.checkpoint.stored import Slice, Stored

if TYPE_CHECKING:
    from tandem_worker.kernels.quantized import Weight

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PACKED_SUFFIXES = ((".weight_packed", ".weight"), (".qweight", ".weight"), ("_blocks", ""))
"""End of the name that holds a matrix's values, and the end that the matrix goes by."""
_SIDES = {
    ".weight_packed": (".weight_scale", ".weight_shape", ".weight_zero_point"),
    ".qweight": (".qzeros", ".scales", ".g_idx"),
    "_blocks": ("_scales",),
    ".weight": (".weight_scale", ".weight_scale_inv"),
}
"""End of the name that holds a matrix's values to those of the tensors that are read with it."""


def dequantize_source(source: WeightSource, quantization: Mapping[str, Any] | None) -> WeightSource:
    """The source itself when nothing is quantized. Raises StartupError for what cannot be read."""
    if not quantization:
        return source
    check_scheme(quantization)
    return DequantizedSource(source, quantization)


class DequantizedSource:
    """`X.weight` (or, for stacked experts, `X`) for every quantized matrix; other tensors pass through."""

    def __init__(self, source: WeightSource, quantization: Mapping[str, Any]) -> None:
        self._source = source
        self._quantization = quantization
        self._method = str(quantization.get("quant_method"))
        self._bits = _weight_bits(quantization)

    def names(self) -> Iterable[str]:
        """Every stored tensor: as part of the matrix that is read from it, else under its own name."""
        return self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        found = set(self._source.names())
        matrices, used = set(), set()
        for name in found:
            suffix = next((suffix for suffix in _SIDES if name.endswith(suffix)), None)
            if suffix is None:
                continue
            stem = name.removesuffix(suffix)
            sides = [stem + side for side in _SIDES[suffix] if stem + side in found]
            if suffix == ".weight":
                if sides and self._source.dtype(name) in _FLOAT8:
                    used.add(sides[0])
                continue
            matrices.add(stem + dict(_PACKED_SUFFIXES)[suffix])
            used.update((name, *sides))
        return frozenset((found - used) | matrices)

    def __contains__(self, name: str) -> bool:
        stem = name.removesuffix(".weight")
        packed = (f"{stem}.weight_packed", f"{stem}.qweight", f"{name}_blocks")
        return name in self._source or any(other in self._source for other in packed)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._source:
            return self._source.shape(name)
        stem = name.removesuffix(".weight")
        if f"{name}_blocks" in self._source:
            *leading, rows, groups, size = self._source.shape(f"{name}_blocks")
            return (*leading, groups * size * 2, rows)
        if f"{stem}.weight_packed" in self._source:
            return self._packed_shape(stem)
        rows, columns = self._source.shape(f"{stem}.qweight")
        per_word = 32 // self._bits
        return (columns * per_word, rows) if self._method == "awq" else (columns, rows * per_word)

    def dtype(self, name: str) -> torch.dtype:
        if name in self._source and self._source.dtype(name) not in _FLOAT8:
            return self._source.dtype(name)
        return torch.float32

    def stored(self, name: str) -> Stored | None:
        plain = name in self._source and f"{name}_blocks" not in self._source
        return self._source.stored(name) if plain and self._source.dtype(name) not in _FLOAT8 else None

    def read(self, name: str, part: Slice | None = None) -> torch.Tensor:
        if f"{name}_blocks" in self._source:
            return self._read_mxfp4(name, part)
        if name in self._source and self._source.dtype(name) not in _FLOAT8:
            return self._source.read(name, part)
        stem = name.removesuffix(".weight")
        if name in self._source:
            value = self._read_float8(name, stem)
        elif f"{stem}.weight_packed" in self._source:
            value = self._read_packed(stem)
        else:
            value = self._read_words(stem)
        return value if part is None else value.narrow(part.dim, part.start, part.stop - part.start)

    def packed(self, name: str, part: Slice | None = None) -> Weight | None:
        """The matrix as kernels multiply it, `[N, K]` (stacked experts: one, by a part of length 1 along them).

        None where it is not quantized, or its layout has no such form: `read` then dequantizes it.
        """
        from tandem_worker.model.checkpoint import packing

        if f"{name}_blocks" in self._source:
            assert part is not None
            blocks, scales = (self._source.read(f"{name}_{kind}", part)[0] for kind in ("blocks", "scales"))
            return packing.mxfp4(blocks, scales)
        stem = name.removesuffix(".weight")
        whole: Weight | None = None
        if name in self._source:
            if self._source.dtype(name) in _FLOAT8 and f"{stem}.weight_scale_inv" in self._source:
                scale = self._side(f"{stem}.weight_scale_inv")
                if scale.dim() == 2:
                    whole = packing.fp8_blocks(self._source.read(name), scale, self._fp8_block())
        elif self._bits != 4:
            return None
        elif f"{stem}.weight_packed" in self._source:
            zeros = self._optional(f"{stem}.weight_zero_point")
            packed, scale = self._side(f"{stem}.weight_packed"), self._side(f"{stem}.weight_scale")
            if packed.shape[1] * 8 == self._packed_shape(stem)[1]:
                whole = packing.int4_groups(packed, scale, zeros)
        else:
            words, zeros = self._side(f"{stem}.qweight"), self._side(f"{stem}.qzeros")
            scales = self._side(f"{stem}.scales")
            if self._method == "awq":
                whole = packing.awq(words, zeros, scales)
            else:
                groups = self._optional(f"{stem}.g_idx")
                whole = packing.gptq(words, zeros, scales, groups, offset=self._gptq_offset())
        return None if whole is None else packing.narrow(whole, part)

    def _fp8_block(self) -> tuple[int, int]:
        rows, columns = self._quantization.get("weight_block_size") or (128, 128)
        return int(rows), int(columns)

    def _gptq_offset(self) -> int:
        """What stored zero points lack."""
        return 0 if self._quantization.get("checkpoint_format") == "gptq_v2" else 1

    def _side(self, name: str) -> torch.Tensor:
        if name not in self._source:
            raise StartupError("WeightsIncomplete", f"The checkpoint is quantized but lacks tensor {name}.")
        return self._source.read(name)

    def _optional(self, name: str) -> torch.Tensor | None:
        return self._source.read(name) if name in self._source else None

    def _packed_shape(self, stem: str) -> tuple[int, int]:
        rows, columns = self._side(f"{stem}.weight_shape").tolist()
        return int(rows), int(columns)

    def _read_float8(self, name: str, stem: str) -> torch.Tensor:
        weight = self._source.read(name)
        if f"{stem}.weight_scale" in self._source:
            return unpacking.scaled(weight, self._side(f"{stem}.weight_scale"))
        scale = self._side(f"{stem}.weight_scale_inv")
        if scale.dim() < 2:
            return unpacking.scaled(weight, scale)
        return unpacking.fp8_blocks(weight, scale, self._fp8_block())

    def _read_packed(self, stem: str) -> torch.Tensor:
        zeros = self._optional(f"{stem}.weight_zero_point")
        packed, scale = self._side(f"{stem}.weight_packed"), self._side(f"{stem}.weight_scale")
        return unpacking.int_groups(packed, scale, zeros, self._packed_shape(stem), self._bits)

    def _read_words(self, stem: str) -> torch.Tensor:
        words, zeros = self._side(f"{stem}.qweight"), self._side(f"{stem}.qzeros")
        scales = self._side(f"{stem}.scales")
        if self._method == "awq":
            return unpacking.awq(words, zeros, scales)
        groups = self._optional(f"{stem}.g_idx")
        return unpacking.gptq(words, zeros, scales, groups, self._bits, offset=self._gptq_offset())

    def _read_mxfp4(self, name: str, part: Slice | None) -> torch.Tensor:
        """Stacked experts `[E, in, out]`; a part along the experts reads no others."""
        by_expert = part if part is not None and part.dim == 0 else None
        blocks = self._source.read(f"{name}_blocks", by_expert)
        value = unpacking.mxfp4(blocks, self._source.read(f"{name}_scales", by_expert)).transpose(-1, -2)
        if part is None or by_expert is not None:
            return value
        return value.narrow(part.dim, part.start, part.stop - part.start)


def _weight_bits(quantization: Mapping[str, Any]) -> int:
    """Bits per weight: 4 unless the configuration says otherwise."""
    groups = quantization.get("config_groups") or {}
    for group in groups.values():
        bits = (group.get("weights") or {}).get("num_bits")
        if bits:
            return int(bits)
    return int(quantization.get("bits") or quantization.get("w_bit") or 4)
