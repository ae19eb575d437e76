"""Mixture of experts: routing, and the routed experts themselves, split over expert and tensor ranks.

Expert ranks run batches of their own; around the experts each token travels to the ranks that hold its experts and
back (arXiv:2006.16668). Tensor ranks split each expert's intermediate width; their results are partial sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from tandem_worker.model.checkpoint.contract import Slice
from tandem_worker.model.checkpoint.loader import Part, WeightLoader, shard
from tandem_worker.model.layers.linear import Linear
from tandem_worker.model.layers.mlp import GatedMLP, silu_mul, swiglu_clamped
from tandem_worker.model.layers.routers import Route, Routing
from tandem_worker.parallel.collectives import Collective
from tandem_worker.parallel.context import ParallelContext

if TYPE_CHECKING:
    from tandem_worker.kernels.quantized import Weight
    from tandem_worker.model.layers.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One expert: gate rows before up rows, `[2 I, hidden]`, and down `[hidden, I]`."""

    gate_up: Weight
    down: Weight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def expert_share(num_experts: int, context: ParallelContext) -> range:
    """Experts that this rank holds."""
    piece = shard(0, num_experts, context.ep_rank, context.ep_size, what="number of experts")
    return range(num_experts) if piece is None else range(piece.start, piece.stop)


class Experts:
    """Gated MLPs, each applied to the rows that are routed to it."""

    linear = Linear

    def __init__(
        self,
        weights: Iterable[ExpertWeights],
        *,
        num_local: int,
        ep: Collective | None,
        swiglu_limit: float | None = None,
    ) -> None:
        """`num_local` experts of this rank. `swiglu_limit` selects gpt-oss's clamped activation."""
        self._num_local = num_local
        self._ep = ep
        self._activation = silu_mul if swiglu_limit is None else partial(swiglu_clamped, limit=swiglu_limit)
        self._gate_up: list[Linear] = []
        self._down: list[Linear] = []
        for weight in weights:
            self._gate_up.append(self.linear(weight.gate_up, weight.gate_up_bias))
            self._down.append(self.linear(weight.down, weight.down_bias))

    @classmethod
    def load(
        cls,
        loader: WeightLoader,
        context: ParallelContext,
        prefix: str,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
    ) -> Experts:
        """Experts that are published one by one, as `{prefix}{expert}.gate_proj` and so on."""
        rank, size, what = context.tp_rank, context.tp_size, "moe_intermediate_size"
        rows = shard(0, intermediate_size, rank, size, what=what)
        columns = shard(1, intermediate_size, rank, size, what=what)
        shape = (intermediate_size, hidden_size)
        share = expert_share(num_experts, context)

        def read() -> Iterator[ExpertWeights]:
            for expert in share:
                one = f"{prefix}{expert}."
                gate_up = [Part(name=f"{one}{name}_proj.weight", shape=shape, piece=rows) for name in ("gate", "up")]
                down = Part(name=f"{one}down_proj.weight", shape=shape[::-1], piece=columns)
                yield ExpertWeights(gate_up=loader.matrix(gate_up), down=loader.matrix([down]))

        return loader.backend.experts(read(), num_local=len(share), ep=context.ep)

    @classmethod
    def load_stacked(
        cls,
        loader: WeightLoader,
        context: ParallelContext,
        prefix: str,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        interleaved: bool,
        swiglu_limit: float | None = None,
    ) -> Experts:
        """Experts that are published as one tensor, `[expert, in, out]`, with biases where there are any.

        `interleaved` says that columns of gate and up alternate; otherwise gate is the first half.
        """
        rank, size = context.tp_rank, context.tp_size
        piece = shard(0, intermediate_size, rank, size, what="intermediate_size") or Slice(0, 0, intermediate_size)
        wide = torch.arange(2 * intermediate_size)
        order = torch.stack((wide[0::2], wide[1::2])) if interleaved else wide.view(2, -1)
        columns = order[:, piece.start : piece.stop].flatten()
        share = expert_share(num_experts, context)

        def read() -> Iterator[ExpertWeights]:
            for expert in share:
                one = _StackedReader(loader, prefix, num_experts, expert)
                gate_up_bias = one.read_bias("gate_up_proj_bias", 2 * intermediate_size)
                down_bias = one.read_bias("down_proj_bias", hidden_size) if rank == 0 else None
                yield ExpertWeights(
                    gate_up=one.matrix("gate_up_proj", hidden_size, 2 * intermediate_size, outputs=columns),
                    down=one.matrix("down_proj", intermediate_size, hidden_size, inputs=piece),
                    gate_up_bias=None if gate_up_bias is None else loader.place(gate_up_bias[columns]),
                    down_bias=None if down_bias is None else loader.place(down_bias),
                )

        return loader.backend.experts(read(), num_local=len(share), ep=context.ep, swiglu_limit=swiglu_limit)

    def add_to(
        self, x: torch.Tensor, routing: Routing, residual: torch.Tensor, *, weigh_input: bool = False
    ) -> torch.Tensor:
        """`residual + experts(x)` for `[T, hidden]`, a partial sum under tensor parallelism.

        `weigh_input` scales what an expert is given instead of what it returns (Llama 4).
        """
        num_tokens, width = routing.experts.shape
        rows = x.repeat_interleave(width, dim=0)
        weights = routing.weights.reshape(-1, 1).to(x.dtype)
        if weigh_input:
            rows = rows * weights
        out = self._route_rows(rows, routing.experts.flatten(), routing.has_padding)
        if not weigh_input:
            out = out * weights
        return residual + out.view(num_tokens, width, -1).sum(1)

    def _route_rows(self, rows: torch.Tensor, experts: torch.Tensor, has_padding: bool) -> torch.Tensor:
        """Each of `rows` `[R, hidden]` through its expert, wherever that is; 0 where it has none."""
        if has_padding:
            live = (experts >= 0).nonzero()[:, 0]
            return torch.zeros_like(rows).index_copy_(0, live, self._route_rows(rows[live], experts[live], False))
        return self._apply(rows, experts) if self._ep is None else self._exchange(rows, experts, self._ep)

    def _apply(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Each of `rows` `[R, hidden]` through its local expert."""
        order = torch.argsort(experts, stable=True)
        counts = torch.bincount(experts, minlength=self._num_local).tolist()
        pieces = []
        for gate_up, down, piece in zip(self._gate_up, self._down, rows[order].split(counts), strict=True):
            if piece.shape[0]:
                pieces.append(down(self._activation(gate_up(piece))))
        if not pieces:
            return torch.empty_like(rows)
        out = torch.empty_like(rows)
        return out.index_copy_(0, order, torch.cat(pieces))

    def _exchange(self, rows: torch.Tensor, experts: torch.Tensor, ep: Collective) -> torch.Tensor:
        """As `_apply`, with experts on all expert ranks. Ranks without tokens take part with none."""
        local = self._num_local
        order = torch.argsort(experts, stable=True)
        sent = torch.bincount(experts, minlength=local * ep.size).view(ep.size, local)
        received = ep.all_to_all(sent, [1] * ep.size, [1] * ep.size)
        send_counts, receive_counts = sent.sum(1).tolist(), received.sum(1).tolist()
        arrived = ep.all_to_all(rows[order], send_counts, receive_counts)
        owners = torch.arange(local, device=rows.device).repeat(ep.size).repeat_interleave(received.flatten())
        returned = ep.all_to_all(self._apply(arrived, owners), receive_counts, send_counts)
        return torch.empty_like(rows).index_copy_(0, order, returned)


class _StackedReader:
    """Reads one expert out of tensors that hold all of them."""

    def __init__(self, loader: WeightLoader, prefix: str, num_experts: int, expert: int) -> None:
        self._loader = loader
        self._prefix = prefix
        self._num_experts = num_experts
        self._piece = Slice(0, expert, expert + 1)

    def read_bias(self, name: str, width: int) -> torch.Tensor | None:
        """As `read`; None where the checkpoint has no such bias."""
        return self.read(name, width) if self._loader.has(f"{self._prefix}{name}") else None

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """The expert's `shape`, as stored."""
        return self._loader.read(self._part(name, *shape))[0]

    def matrix(
        self,
        name: str,
        num_inputs: int,
        num_outputs: int,
        *,
        inputs: Slice | None = None,
        outputs: torch.Tensor | None = None,
    ) -> Weight:
        """The expert's `[outputs, inputs]` from what is stored the other way round; None takes all."""
        packed = self._loader.packed(self._part(name, num_inputs, num_outputs))
        if packed is not None:
            from tandem_worker.model.checkpoint.packing import narrow, select_rows

            part = None if inputs is None else Slice(1, inputs.start, inputs.stop)
            cut = narrow(packed if outputs is None else select_rows(packed, outputs), part)
            if cut is not None:
                return self._loader.move(cut)
        weight = self.read(name, num_inputs, num_outputs)
        if inputs is not None:
            weight = weight[inputs.start : inputs.stop]
        return self._loader.place((weight if outputs is None else weight[:, outputs]).t())

    def _part(self, name: str, *shape: int) -> Part:
        return Part(name=f"{self._prefix}{name}", shape=(self._num_experts, *shape), piece=self._piece)


class MoE:
    """Router, routed experts and, where there are any, shared experts that see every token."""

    def __init__(
        self,
        route: Route,
        experts: Experts,
        shared: GatedMLP | None,
        tp: Collective | None,
        *,
        weigh_input: bool = False,
    ) -> None:
        self._route = route
        self._experts = experts
        self._shared = shared
        self._tp = tp
        self._weigh_input = weigh_input

    def forward(self, x: torch.Tensor, residual: torch.Tensor, step: Step) -> torch.Tensor:
        """`residual + moe(x)`; padding rows of `step` meet no routed expert."""
        if self._tp is not None and self._tp.rank:
            residual = torch.zeros_like(residual)  # rank 0 alone brings the residual into the sum
        if self._shared is not None:
            residual = self._shared.forward_partial(x, residual)
        out = self._experts.add_to(x, self._route(x, step.live), residual, weigh_input=self._weigh_input)
        return out if self._tp is None else self._tp.all_reduce(out)
