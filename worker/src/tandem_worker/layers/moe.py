"""Mixture of experts: routing, and the routed experts themselves, split over expert and tensor ranks.

Expert ranks run batches of their own; around the experts each token travels to the ranks that hold its experts and
back (arXiv:2006.16668). Tensor ranks split each expert's intermediate width; their results are partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tandem_worker.errors import StartupError
from tandem_worker.layers.linear import Linear
from tandem_worker.layers.mlp import GatedMLP, silu_mul
from tandem_worker.parallel.collectives import Collective
from tandem_worker.parallel.context import ParallelContext
from tandem_worker.weights.base import Slice
from tandem_worker.weights.loader import Part, WeightLoader, shard

Activation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Routing:
    """Per token its experts `[T, k]` int64 and their weights `[T, k]`."""

    experts: torch.Tensor
    weights: torch.Tensor


Router = Callable[[torch.Tensor], Routing]


def expert_share(num_experts: int, context: ParallelContext) -> range:
    """Experts that this rank holds."""
    piece = shard(0, num_experts, context.ep_rank, context.ep_size, what="number of experts")
    return range(num_experts) if piece is None else range(piece.start, piece.stop)


class Experts:
    """Gated MLPs, each applied to the rows that are routed to it."""

    def __init__(
        self,
        gate_up: Sequence[Linear],
        down: Sequence[Linear],
        *,
        ep: Collective | None,
        activation: Activation = silu_mul,
    ) -> None:
        self._gate_up = gate_up
        self._down = down
        self._ep = ep
        self._activation = activation

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
        gate_up, down = [], []
        shape = (intermediate_size, hidden_size)
        for expert in expert_share(num_experts, context):
            names = (f"{prefix}{expert}.gate_proj.weight", f"{prefix}{expert}.up_proj.weight")
            gate_up.append(Linear(loader.stack([Part(name=name, shape=shape, piece=rows) for name in names])))
            name = f"{prefix}{expert}.down_proj.weight"
            down.append(Linear(loader.load(name, (hidden_size, intermediate_size), columns)))
        return cls(gate_up, down, ep=context.ep)

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
        activation: Activation = silu_mul,
    ) -> Experts:
        """Experts that are published as one tensor, `[expert, in, out]`, with biases where there are any.

        `interleaved` says that columns of gate and up alternate; otherwise gate is the first half.
        """
        rank, size = context.tp_rank, context.tp_size
        piece = shard(0, intermediate_size, rank, size, what="intermediate_size") or Slice(0, 0, intermediate_size)
        wide = torch.arange(2 * intermediate_size)
        order = torch.stack((wide[0::2], wide[1::2])) if interleaved else wide.view(2, -1)
        columns = order[:, piece.start : piece.stop].flatten()
        gate_up, down = [], []
        for expert in expert_share(num_experts, context):
            one = _StackedReader(loader, prefix, num_experts, expert)
            weight = one.read("gate_up_proj", hidden_size, 2 * intermediate_size)[:, columns]
            bias = one.read_bias("gate_up_proj_bias", 2 * intermediate_size)
            gate_up.append(Linear(loader.place(weight.t()), None if bias is None else loader.place(bias[columns])))
            weight = one.read("down_proj", intermediate_size, hidden_size)[piece.start : piece.stop]
            bias = one.read_bias("down_proj_bias", hidden_size) if rank == 0 else None
            down.append(Linear(loader.place(weight.t()), None if bias is None else loader.place(bias)))
        return cls(gate_up, down, ep=context.ep, activation=activation)

    def forward(self, x: torch.Tensor, routing: Routing, *, weigh_input: bool = False) -> torch.Tensor:
        """`[T, hidden]` to `[T, hidden]`, a partial sum under tensor parallelism.

        `weigh_input` scales what an expert is given instead of what it returns (Llama 4).
        """
        num_tokens, width = routing.experts.shape
        rows = x.repeat_interleave(width, dim=0)
        weights = routing.weights.reshape(-1, 1).to(x.dtype)
        if weigh_input:
            rows = rows * weights
        experts = routing.experts.flatten()
        out = self._apply(rows, experts) if self._ep is None else self._exchange(rows, experts, self._ep)
        if not weigh_input:
            out = out * weights
        return out.view(num_tokens, width, -1).sum(1)

    def _apply(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Each of `rows` `[R, hidden]` through its local expert."""
        order = torch.argsort(experts, stable=True)
        counts = torch.bincount(experts, minlength=len(self._gate_up)).tolist()
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
        local = len(self._gate_up)
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
        name = f"{self._prefix}{name}"
        return self._loader.read(Part(name=name, shape=(self._num_experts, *shape), piece=self._piece))[0]


class MoE:
    """Router, routed experts and, where there are any, shared experts that see every token."""

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: GatedMLP | None,
        tp: Collective | None,
        *,
        weigh_input: bool = False,
    ) -> None:
        self._router = router
        self._experts = experts
        self._shared = shared
        self._tp = tp
        self._weigh_input = weigh_input

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual + moe(x)`."""
        out = self._experts.forward(x, self._router(x), weigh_input=self._weigh_input)
        if self._tp is not None and self._tp.rank:
            residual = torch.zeros_like(residual)  # rank 0 alone brings the residual into the sum
        out = residual + out if self._shared is None else self._shared.forward_partial(x, residual) + out
        return out if self._tp is None else self._tp.all_reduce(out)


class SoftmaxRouter:
    """Top k of a softmax over all experts, optionally normalized to sum 1 (Qwen3-MoE)."""

    def __init__(self, weight: torch.Tensor, top_k: int, *, normalize: bool) -> None:
        self._weight = weight
        self._top_k = top_k
        self._normalize = normalize

    def __call__(self, x: torch.Tensor) -> Routing:
        probabilities = torch.softmax(x @ self._weight.t(), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self._top_k, dim=-1)
        if self._normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts, weights)


class GroupedSigmoidRouter:
    """DeepSeek-V3's routing without auxiliary loss (arXiv:2412.19437): sigmoid scores, a bias that only takes part in
    the choice, and first a choice of groups by the sum of each group's two best."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor,
        *,
        top_k: int,
        num_groups: int,
        top_groups: int,
        normalize: bool,
        scale: float,
    ) -> None:
        if bias.shape[0] % num_groups:
            raise StartupError("ConfigInvalid", f"{bias.shape[0]} experts do not divide into n_group = {num_groups}.")
        self._weight = weight.float()
        self._bias = bias.float()
        self._top_k = top_k
        self._num_groups = num_groups
        self._top_groups = top_groups
        self._normalize = normalize
        self._scale = scale

    def __call__(self, x: torch.Tensor) -> Routing:
        scores = torch.sigmoid(x.float() @ self._weight.t())
        choice = scores + self._bias
        if self._top_groups < self._num_groups:
            groups = choice.view(choice.shape[0], self._num_groups, -1)
            best = groups.topk(2, dim=-1).values.sum(-1).topk(self._top_groups, dim=-1).indices
            hidden = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
            choice = groups.masked_fill(hidden.unsqueeze(-1), float("-inf")).flatten(1)
        experts = choice.topk(self._top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if self._normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * self._scale)


class ChosenSoftmaxRouter:
    """Top k of the logits, then a softmax over these alone (gpt-oss)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, top_k: int) -> None:
        self._weight = weight
        self._bias = bias
        self._top_k = top_k

    def __call__(self, x: torch.Tensor) -> Routing:
        logits, experts = torch.addmm(self._bias, x, self._weight.t()).topk(self._top_k, dim=-1)
        return Routing(experts, logits.softmax(-1, dtype=torch.float32))


class SigmoidRouter:
    """Top k of the logits, each weighted by its own sigmoid (Llama 4)."""

    def __init__(self, weight: torch.Tensor, top_k: int) -> None:
        self._weight = weight
        self._top_k = top_k

    def __call__(self, x: torch.Tensor) -> Routing:
        logits, experts = (x @ self._weight.t()).topk(self._top_k, dim=-1)
        return Routing(experts, logits.float().sigmoid())
