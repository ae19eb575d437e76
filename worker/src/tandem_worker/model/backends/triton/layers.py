"""Layers made of the Triton kernels.

Products of few rows, which decode consists of, are bound by reading weights: they run in a kernel that reads each once,
widens packed ones in registers and splits K over the device. Products of many rows belong to cuBLAS, with packed
weights widened beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch.nn import functional

from tandem_worker import kernels
from tandem_worker.kernels.quantized import SplitByteWeight, Weight, WeightStack
from tandem_worker.model.backends.contract import Backend, BackendName, Lossless
from tandem_worker.model.backends.form import GPU_RATIOS
from tandem_worker.model.backends.triton.ahead import InOrder, SideStream, WidenAhead
from tandem_worker.model.backends.triton.attention import TritonAttention, TritonStepAttention
from tandem_worker.model.checkpoint.stored import PackedWeight
from tandem_worker.model.layers.attention import Rotate, SelfAttention
from tandem_worker.model.layers.embedding import Embedding
from tandem_worker.model.layers.linear import HeadLinear, Linear, float32_product
from tandem_worker.model.layers.mlp import GatedMLP
from tandem_worker.model.layers.moe import Experts, ExpertWeights
from tandem_worker.model.layers.norm import HeadNorm, RMSNorm
from tandem_worker.model.layers.pre_norm import DecoderLayer, PreNormLayer
from tandem_worker.model.layers.rotary import Rotation
from tandem_worker.model.layers.routers import Route, Router, Routing
from tandem_worker.model.layers.step import Step
from tandem_worker.model.weighing import walk
from tandem_worker.parallel.collectives import Collective

MAX_FEW_ROWS = 64
"""Rows up to which a product reads its weight in the split-K kernel."""
MAX_EXACT_ROWS = 32
"""Rows up to which it sums each as it sums one alone (`kernels.linear.block_shape`)."""


class TritonLinear(Linear):
    """A product with a weight in any form of `kernels.quantized`."""

    __slots__ = ("form", "widened")

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None, *, reduce: Collective | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.reduce = reduce
        self.bias = None if reduce is not None and reduce.rank else bias
        self.packed = False
        self.form = weight
        self.widened: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Gives the matrix in full, in the type of an x, where it is one of several that are widened ahead."""

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= MAX_FEW_ROWS:
            return kernels.small_batch_linear(x, self.form, self.bias)
        return functional.linear(x, self._wide(x), self.bias)

    def add_partial(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= MAX_FEW_ROWS:
            return kernels.small_batch_linear(x, self.form, self.bias, residual=residual)
        if self.bias is not None:
            residual = residual + self.bias
        return torch.addmm(residual, x, self._wide(x).t())

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.widen(x, self.form) if self.widened is None else self.widened(x)


class TritonHead(HeadLinear):
    """The kernel's sums and cuBLAS's are float32 already: they are stored as they are."""

    __slots__ = ("table",)

    def __init__(self, weight: Weight | PackedWeight) -> None:
        assert not isinstance(weight, PackedWeight), "those are the CPU kernels'"
        self.table = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > MAX_FEW_ROWS:
            return float32_product(x, kernels.widen(x, self.table))
        out = torch.empty((x.shape[0], self.table.shape[0]), dtype=torch.float32, device=x.device)
        return kernels.small_batch_linear(x, self.table, out=out)


class TritonEmbedding(Embedding):
    """Rows of a table in 12 bits a weight, which the head may multiply too."""

    def __init__(
        self, table: Weight | PackedWeight, first_row: int, reduce: Collective | None, dtype: torch.dtype
    ) -> None:
        assert isinstance(table, SplitByteWeight), "packed ones are the CPU kernels', and tables are never quantized"
        super().__init__(table, first_row, reduce)
        self._weight = table
        self._dtype = dtype

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        return kernels.look_up(ids, self._weight, self._dtype)


class TritonRMSNorm(RMSNorm):
    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def after_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The norm of `residual + x`; the sum is left in `residual`, the result in `x`."""
        assert self.weight is not None
        return kernels.residual_rms_norm(x, residual, self.weight, self.eps, out=x)


class TritonHeadNorm(HeadNorm):
    __slots__ = ()

    def normalize_(self, heads: torch.Tensor, num_heads: int) -> None:
        kernels.rms_norm(heads[:, :num_heads], self.query_weight, self.eps, out=heads[:, :num_heads])
        kernels.rms_norm(heads[:, num_heads:], self.key_weight, self.eps, out=heads[:, num_heads:])


class TritonRotation(Rotation):
    __slots__ = ("rows",)

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().__init__(cos, sin)
        self.rows = torch.arange(cos.shape[0], device=cos.device)
        """Row of the tables for each token of the step."""

    def rotate_half_(self, heads: torch.Tensor) -> None:
        kernels.rope(heads, None, self.cos, self.sin, self.rows)

    def rotate_interleaved_(self, heads: torch.Tensor) -> None:
        kernels.rope(heads, None, self.cos, self.sin, self.rows, interleaved=True)


class TritonSelfAttention(SelfAttention):
    """Norm, rotation and KV write are one kernel where the placement is one of rotations."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step, kv_layer: torch.Tensor
    ) -> torch.Tensor:
        if not isinstance(self.place, Rotate):
            return super().forward(x, residual, step, kv_layer)
        attention, rotation, norm = step.attention, step.rotation, self.place.norm
        assert isinstance(attention, TritonStepAttention)
        assert isinstance(rotation, TritonRotation)
        step.entering(self._index)
        q = kernels.fused_qkv_norm_rope_kv_write(
            self.qkv(x),
            rotation.cos,
            rotation.sin,
            rotation.rows,
            kv_layer,
            step.batch.slot_mapping,
            q_norm=None if norm is None else norm.query_weight,
            k_norm=None if norm is None else norm.key_weight,
            eps=0.0 if norm is None else norm.eps,
            interleaved=self.place.interleaved,
        )
        step.written(self._index)
        return self.out.add_to(attention.attend_cached(q, kv_layer, self.spec), residual)


class TritonMLP(GatedMLP):
    __slots__ = ()

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up
        assert isinstance(gate_up, TritonLinear)
        if x.shape[0] <= MAX_FEW_ROWS:
            return kernels.gate_up_silu(x, gate_up.form, gate_up.bias)
        return kernels.silu_mul(gate_up(x))


class TritonExperts(Experts):
    """All experts of the rank in one tensor, computed by one operation."""

    def __init__(
        self,
        weights: Iterable[ExpertWeights],
        *,
        num_local: int,
        ep: Collective | None,
        swiglu_limit: float | None = None,
        shrink: Callable[[torch.Tensor], Weight] | None = None,
    ) -> None:
        self._num_local = num_local
        self._ep = ep
        self._swiglu_limit = swiglu_limit
        gate_up, down = WeightStack(num_local), WeightStack(num_local)
        gate_up_bias, down_bias = WeightStack(num_local), WeightStack(num_local)
        for weight in weights:
            assert not isinstance(weight.gate_up, PackedWeight), "those are the CPU kernels'"
            assert not isinstance(weight.down, PackedWeight), "those are the CPU kernels'"
            gate_up.append(weight.gate_up)
            down.append(weight.down)
            if weight.gate_up_bias is not None:
                gate_up_bias.append(weight.gate_up_bias)
            if weight.down_bias is not None:
                down_bias.append(weight.down_bias)
        self._stacked_gate_up = _shrunk(gate_up, shrink)
        del gate_up
        self._stacked_down = _shrunk(down, shrink)
        self._gate_up_bias, self._down_bias = gate_up_bias.tensor(), down_bias.tensor()

    def add_to(
        self, x: torch.Tensor, routing: Routing, residual: torch.Tensor, *, weigh_input: bool = False
    ) -> torch.Tensor:
        if self._ep is not None:
            return super().add_to(x, routing, residual, weigh_input=weigh_input)
        if not weigh_input:
            return self._fused(x, routing.experts, routing.weights, residual)
        num_tokens, width = routing.experts.shape
        rows = x.repeat_interleave(width, dim=0) * routing.weights.reshape(-1, 1).to(x.dtype)
        if width == 1:
            return self._fused(rows, routing.experts, torch.ones_like(routing.weights), residual)
        return residual + self._apply(rows, routing.experts.flatten()).view(num_tokens, width, -1).sum(1)

    def _apply(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        ones = torch.ones((rows.shape[0], 1), dtype=torch.float32, device=rows.device)
        return self._fused(rows, experts.int().unsqueeze(1), ones, None)

    def _fused(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return kernels.fused_moe(
            x,
            self._stacked_gate_up,
            self._stacked_down,
            weights,
            experts,
            gate_up_bias=self._gate_up_bias,
            down_bias=self._down_bias,
            swiglu_limit=self._swiglu_limit,
            residual=residual,
        )


def _shrunk(stack: WeightStack, shrink: Callable[[torch.Tensor], Weight] | None) -> Weight:
    whole = stack.whole()
    return shrink(whole) if shrink is not None and isinstance(whole, torch.Tensor) else whole


class TritonRouter:
    """A router's rule in one kernel."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._rule = router.rule()

    def __call__(self, x: torch.Tensor, live: torch.Tensor | None = None) -> Routing:
        logits = self._router.logits(x)
        if self._rule is None:
            routing = self._router.choose(logits)
            return Routing(routing.experts.int(), routing.weights.float()).only(live)
        weights, experts = kernels.moe_route(logits, self._router.top_k, live=live, **self._rule)
        return Routing(experts, weights, live is not None)


def build_route(router: Router) -> Route:
    """Routing by `router`: in one kernel where `Router.rule` has options for it, else by its `choose`."""
    return TritonRouter(router)


class TritonLayer(PreNormLayer):
    """A layer whose second norm takes in the sum before it.

    The sum after the MLP belongs to the next layer's norm; it is left to the product, which adds it as it writes.
    """

    def forward(self, hidden: torch.Tensor, step: Step, kv_layer: torch.Tensor) -> torch.Tensor:
        """Overwrites `hidden`, which nobody else holds."""
        assert isinstance(self.mlp_norm, TritonRMSNorm)
        attended = self.attention.forward(self.input_norm(hidden), None, step, kv_layer)
        return self.mlp.forward(self.mlp_norm.after_sum(attended, hidden), hidden, step)


def find_lossless_obstacle(dtype: torch.dtype) -> str | None:
    """Why weights cannot be kept in 12 bits on a GPU, as a sentence; None when they can.

    float32 holds what a checkpoint of bfloat16 has.
    """
    if torch.version.hip is not None:
        return "The kernels that decode them are made of instructions of NVIDIA's GPUs."
    if dtype not in {torch.bfloat16, torch.float32}:
        return f"They are for weights of bfloat16, and the model's are {str(dtype).removeprefix('torch.')}."
    return None


def connect(model: object) -> None:
    """Lets a model's matrices of 12 bits be widened ahead of each other where products have many rows."""
    linears = [part for part in walk(model) if isinstance(part, TritonLinear)]
    split = [(linear, linear.form) for linear in linears if isinstance(linear.form, SplitByteWeight)]
    if split:
        device = split[0][1].low.device
        lane = SideStream(device) if device.type == "cuda" else InOrder()
        ahead = WidenAhead([form for _, form in split], lane)
        for number, (linear, _) in enumerate(split):
            linear.widened = partial(ahead.take, number)


def count_exact_rows(layers: Sequence[DecoderLayer]) -> int:
    """As `Backend.count_exact_rows`: cuBLAS scores experts, and brings latents in and out."""
    exact = all(
        isinstance(layer, TritonLayer)
        and isinstance(layer.mlp, TritonMLP)
        and layer.kv_layer_spec(1).head_dim_index is not None
        for layer in layers
    )
    return MAX_EXACT_ROWS if exact else 1


TRITON = Backend(
    name=BackendName.TRITON,
    keeps_packed=True,
    attention=TritonAttention,
    linear=TritonLinear,
    head=TritonHead,
    norm=TritonRMSNorm,
    head_norm=TritonHeadNorm,
    rotation=TritonRotation,
    self_attention=TritonSelfAttention,
    mlp=TritonMLP,
    experts=TritonExperts,
    route=build_route,
    find_inexact=lambda layers: "products of more rows, prompts, latents (MLA) and experts sum in another order",
    count_exact_rows=count_exact_rows,
    layer=TritonLayer,
    lossless=Lossless(
        embedding=TritonEmbedding,
        find_obstacle=find_lossless_obstacle,
        ratios=GPU_RATIOS,
        shrink=SplitByteWeight.pack,
        connect=connect,
    ),
)
