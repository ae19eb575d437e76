"""Mixture of experts: routing, and the routed experts themselves, split over expert and tensor ranks.

Expert ranks run batches of their own; around the experts each token travels to the ranks that hold its experts and
back (arXiv:2006.16668). Tensor ranks split each expert's intermediate width; their results are partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from tandem_worker.model.layers.linear import Linear
from tandem_worker.model.layers.mlp import GatedMLP, silu_mul, swiglu_clamped
from tandem_worker.model.layers.routers import Route, Routing
from tandem_worker.parallel.collectives import Collective

if TYPE_CHECKING:
    from tandem_worker.kernels.quantized import Weight
    from tandem_worker.model.checkpoint.stored import PackedWeight
    from tandem_worker.model.layers.step import LiveRows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One expert: gate rows before up rows, `[2 I, hidden]`, and down `[hidden, I]`."""

    gate_up: Weight | PackedWeight
    down: Weight | PackedWeight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


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
        shrink: Callable[[torch.Tensor], Weight] | None = None,
    ) -> None:
        """`num_local` experts of this rank. `swiglu_limit` selects gpt-oss's clamped activation. `shrink` makes of
        plain experts, where they lie in one tensor, what is multiplied; here each has a matrix of its own."""
        del shrink
        self._num_local = num_local
        self._ep = ep
        self._activation = silu_mul if swiglu_limit is None else partial(swiglu_clamped, limit=swiglu_limit)
        self._gate_up: list[Linear] = []
        self._down: list[Linear] = []
        for weight in weights:
            self._gate_up.append(self.linear(weight.gate_up, weight.gate_up_bias))
            self._down.append(self.linear(weight.down, weight.down_bias))

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
        return residual + out.view(num_tokens, width, x.shape[1]).sum(1)

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

    def forward(self, x: torch.Tensor, residual: torch.Tensor, step: LiveRows) -> torch.Tensor:
        """`residual + moe(x)` for `[T, hidden]`, as a new tensor; padding rows of `step` meet no routed expert."""
        if self._tp is not None and self._tp.rank:
            residual = torch.zeros_like(residual)  # rank 0 alone brings the residual into the sum
        if self._shared is not None:
            residual = self._shared.forward_partial(x, residual)
        out = self._experts.add_to(x, self._route(x, step.live), residual, weigh_input=self._weigh_input)
        return out if self._tp is None else self._tp.all_reduce(out)
