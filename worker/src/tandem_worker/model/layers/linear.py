"""Matrix products with weights that are laid out for the device once, at load.

On x86 CPUs weights are repacked into oneDNN's blocked layout: measured on AVX-512 with SmolLM2's shapes that is 1.2 to
3 times as fast as the plain layout for 4 to 64 rows, and lets a product take in the residual sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tandem_worker.parallel.collectives import Collective

if TYPE_CHECKING:
    from tandem_worker.kernels.quantized import Weight
    from tandem_worker.model.checkpoint.stored import PackedWeight

_PACK_ROWS = 64  # the layout that oneDNN picks for this many rows is the fastest for other counts too


def can_pack(weight: torch.Tensor) -> bool:
    """True where oneDNN's packed layout exists for the device and type of this weight `[N, K]`."""
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _packs_bfloat16()))
    )


def _packs_bfloat16() -> bool:
    """oneDNN has its bfloat16 layouts for CPUs with AVX-512 only; torch raises where it is asked for one elsewhere."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x W^T` for x `[T, K]` and W `[N, K]` of one type, summed in float32 and left so."""
    if x.dtype == torch.float32:
        return functional.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())


class Linear:
    """`y = x W^T + b` for x `[T, K]` and W `[N, K]`.

    With `reduce` the ranks hold slices of K: results are summed over them. The bias is then added by rank 0 alone, as
    is the residual of `add_to`.
    """

    __slots__ = ("bias", "in_features", "out_features", "packed", "reduce", "weight")

    def __init__(
        self, weight: Weight | PackedWeight, bias: torch.Tensor | None = None, *, reduce: Collective | None = None
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.reduce = reduce
        self.bias = None if reduce is not None and reduce.rank else bias
        self.packed = False
        self.weight: torch.Tensor = self._lay_out(weight)

    def _lay_out(self, weight: Weight | PackedWeight) -> torch.Tensor:
        """What is multiplied; sets `packed` where oneDNN does that."""
        assert isinstance(weight, torch.Tensor), "this backend multiplies plain weights"
        self.packed = can_pack(weight)
        return torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS) if self.packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, K]` to `[T, N]` of the same type, summed over ranks where they hold slices of K."""
        y = self._product(x)
        return y if self.reduce is None else self.reduce.all_reduce(y)

    def add_to(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """`residual + x W^T + b` for x `[T, K]` and residual `[T, N]`, as a new tensor; None adds nothing."""
        if residual is None:
            return self(x)
        if self.reduce is not None:
            partial = self._product(x) if self.reduce.rank else self.add_partial(x, residual)
            return self.reduce.all_reduce(partial)
        return self.add_partial(x, residual)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return functional.linear(x, self.weight, self.bias)

    def add_partial(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual + x W^T + b`, `[T, N]`, of this rank's slice of K, not summed over ranks."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        if self.bias is not None:
            residual = residual + self.bias
        return torch.addmm(residual, x, self.weight.t())


class HeadLinear:
    """`y = x W^T` in float32 for x of any type: logits, whose order half a type's precision would not keep.

    Torch has no product of half types with a float32 result on a CPU, so the weight is widened there once, at load.
    """

    __slots__ = ("weight", "wide")

    def __init__(self, weight: Weight | PackedWeight) -> None:
        assert isinstance(weight, torch.Tensor), "this backend multiplies plain weights"
        on_cpu = weight.device.type == "cpu"
        self.wide = Linear(weight.float()) if on_cpu else None
        self.weight = None if on_cpu else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, K]` of any floating type to `[T, N]` float32."""
        if self.wide is not None:
            return self.wide(x.float())
        assert self.weight is not None
        return float32_product(x, self.weight)
