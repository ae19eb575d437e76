"""Layers made of the CPU kernels, where weights and heads have the shapes that these take; torch has the rest."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from tandem_worker.model.backends import native
from tandem_worker.model.backends.native import library
from tandem_worker.model.backends.native.packing import lay_out
from tandem_worker.model.checkpoint.split import HEAD
from tandem_worker.model.checkpoint.stored import PackedWeight
from tandem_worker.model.layers.attention import Rotate, SelfAttention
from tandem_worker.model.layers.embedding import Embedding
from tandem_worker.model.layers.linear import HeadLinear, Linear
from tandem_worker.model.layers.mlp import GatedMLP
from tandem_worker.model.layers.moe import Experts
from tandem_worker.model.layers.norm import RMSNorm
from tandem_worker.model.layers.routers import Route, Router, Routing
from tandem_worker.model.layers.step import Step
from tandem_worker.parallel.collectives import Collective

if TYPE_CHECKING:
    from tandem_worker.kernels.quantized import Weight  # its package brings Triton, a fifth of a second


def most_rows(capabilities: Mapping[str, bool]) -> int:
    """Rows up to which a product is the kernels': all, unless oneDNN has AMX, which multiplies many rows faster."""
    return 32 if capabilities.get("amx_bf16", False) else sys.maxsize


MAX_ROWS = most_rows(torch.cpu.get_capabilities())
PACKS = sys.maxsize == MAX_ROWS
"""Whether weights are packed here; else oneDNN, which multiplies some of them, packs all of them."""


class NativeLinear(Linear):
    """A product of packed weights; where oneDNN multiplies many rows, the packing is its own, read here for few."""

    __slots__ = ("address", "is_split")

    address: int | None
    """None where the layout is another one."""
    is_split: bool
    """Whether it is in 12 bits a weight."""

    def _lay_out(self, weight: Weight | PackedWeight) -> torch.Tensor:
        self.is_split = False
        if isinstance(weight, PackedWeight):
            self.address = weight.memory.data_ptr()
            if weight.memory.dtype == torch.uint8:
                self.is_split = library.is_split(weight.memory)
                self.address += 0 if self.is_split else HEAD
            return weight.memory
        assert isinstance(weight, torch.Tensor), "this backend multiplies plain weights"
        own = lay_out(weight) if PACKS else None
        if own is not None:
            self.address = own.data_ptr()
            return own
        placed = super()._lay_out(weight)
        self.address = native.packed_address(placed, weight) if self.packed else None
        return placed

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.address is None or x.shape[0] > MAX_ROWS:
            return super()._product(x)
        return native.linear(self.address, self.out_features, x, self.bias, is_split=self.is_split)

    def add_partial(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self.address is None or x.shape[0] > MAX_ROWS:
            return super().add_partial(x, residual)
        return native.linear(self.address, self.out_features, x, self.bias, residual, is_split=self.is_split)


class NativeHead(HeadLinear):
    """The kernel at any number of rows: where oneDNN multiplies many faster, it has no float32 result."""

    __slots__ = ("linear",)

    def __init__(self, weight: Weight | PackedWeight) -> None:
        linear = NativeLinear(weight)
        self.linear = None if linear.address is None else linear
        if self.linear is None:
            super().__init__(weight)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 sums of the products, `[T, N]`; a `bias` `[N]` only where `linear` is the kernel's."""
        if self.linear is None or self.linear.address is None:
            assert bias is None
            return super().__call__(x)
        address, is_split = self.linear.address, self.linear.is_split
        return native.linear(address, self.linear.out_features, x, bias, dtype=torch.float32, is_split=is_split)


class NativeEmbedding(Embedding):
    """Rows of a matrix in 12 bits a weight, which the head may multiply too."""

    def __init__(
        self, weight: Weight | PackedWeight, first_row: int, reduce: Collective | None, dtype: torch.dtype
    ) -> None:
        del dtype
        super().__init__(weight, first_row, reduce)
        assert isinstance(weight, PackedWeight), "other forms are Triton's"
        self._weight = weight

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        return library.split_rows(self._weight.memory, *self._weight.shape, ids)


class NativeRMSNorm(RMSNorm):
    __slots__ = ()

    @property
    def is_whole(self) -> bool:
        """Whether a row is normalized as one and scaled by a weight of its width, or by none."""
        return self.weight is None or self.weight.shape == self.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2 or not self.is_whole:
            return super().__call__(x)
        return native.rms_norm(x, self.weight, self.eps)


class NativeMLP(GatedMLP):
    __slots__ = ()

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up
        assert isinstance(gate_up, NativeLinear)
        width = gate_up.out_features // 2
        if gate_up.address is None or width % native.COLUMNS or x.shape[0] > MAX_ROWS:
            return native.silu_mul(gate_up(x))
        return native.gate_up_silu(gate_up.address, width, x, gate_up.bias, is_split=gate_up.is_split)


class NativeSelfAttention(SelfAttention):
    """Norm, rotation and KV write are one kernel where the placement is a rotation of halves."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step, kv_layer: torch.Tensor
    ) -> torch.Tensor:
        place, spec = self.place, self.spec
        if not isinstance(place, Rotate) or place.interleaved:
            return super().forward(x, residual, step, kv_layer)
        norms = None if place.norm is None else (place.norm.query_weight, place.norm.key_weight, place.norm.eps)
        heads = self.qkv(x).view(x.shape[0], -1, spec.head_dim)
        rotation = step.rotation
        step.entering(self._index)
        native.place_heads(heads, spec.num_heads, norms, rotation.cos, rotation.sin, step.batch.slot_mapping, kv_layer)
        step.written(self._index)
        kv = heads[:, spec.num_heads :].unflatten(1, (2, spec.num_kv_heads))
        return self.out.add_to(step.attention.attend(heads[:, : spec.num_heads], kv, kv_layer, spec), residual)


def build_route(router: Router) -> Route:
    """Routing by `router`, its scores float32 sums of the kernel: torch's depend on how many rows there are."""
    if router.weight.dtype != torch.bfloat16:
        return router
    scores = NativeHead(router.weight)
    if scores.linear is None or (router.bias is not None and router.bias.dtype != torch.bfloat16):
        return router

    def route(x: torch.Tensor, live: torch.Tensor | None) -> Routing:
        return router.choose(scores(x, router.bias)).only(live)

    return route


class NativeExperts(Experts):
    linear = NativeLinear
