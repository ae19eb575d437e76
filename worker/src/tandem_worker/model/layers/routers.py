"""Which experts a token goes to. A router is its scores and a rule; the rule is torch's here, or a kernel's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tandem_worker.host.errors import StartupError


@dataclass(frozen=True, slots=True)
class Routing:
    """Per token its experts `[T, k]`, int32 or int64, and their weights `[T, k]`."""

    experts: torch.Tensor
    weights: torch.Tensor
    has_padding: bool = False
    """There may be rows whose experts are all -1: they go to none."""

    def only(self, live: torch.Tensor | None) -> Routing:
        """With the rows that `live` `[T]` bool leaves out going nowhere; None leaves all in."""
        if live is None:
            return self
        dead = ~live[:, None]
        return Routing(self.experts.masked_fill(dead, -1), self.weights.masked_fill(dead, 0.0), True)


Route = Callable[[torch.Tensor, torch.Tensor | None], Routing]
"""Routes `[T, hidden]`. The second argument, `[T]` bool, says which rows belong to a sequence; None: all do."""


class Router(ABC):
    """Chooses `top_k` experts for each row of `[T, hidden]`."""

    top_k: int
    weight: torch.Tensor
    """`[num_experts, hidden]`."""
    bias: torch.Tensor | None = None
    """`[num_experts]`, added to the scores; not the one that takes part in the choice alone."""

    @abstractmethod
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Scores before any rule, `[T, num_experts]`."""

    @abstractmethod
    def choose(self, logits: torch.Tensor) -> Routing:
        """The rule: scores `[T, num_experts]` to experts and weights `[T, top_k]`, the weights float32."""
        ...

    @abstractmethod
    def rule(self) -> dict[str, Any] | None:
        """`choose` as options of the routing kernel; None where the kernel has no such rule."""

    def __call__(self, x: torch.Tensor, live: torch.Tensor | None = None) -> Routing:
        return self.choose(self.logits(x)).only(live)


class SoftmaxRouter(Router):
    """Top k of a softmax over all experts, optionally normalized to sum 1 (Qwen3-MoE)."""

    def __init__(self, weight: torch.Tensor, top_k: int, *, normalize: bool) -> None:
        self.weight = weight
        self.top_k = top_k
        self._normalize = normalize

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()

    def choose(self, logits: torch.Tensor) -> Routing:
        weights, experts = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self._normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts, weights)

    def rule(self) -> dict[str, Any]:
        return {"scoring": "softmax", "renormalize": self._normalize}


class GroupedSigmoidRouter(Router):
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
        self.weight = weight.float()
        self._bias = bias.float()
        self.top_k = top_k
        self._num_groups = num_groups
        self._top_groups = top_groups
        self._normalize = normalize
        self._scale = scale

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() @ self.weight.t()

    def choose(self, logits: torch.Tensor) -> Routing:
        scores = torch.sigmoid(logits)
        choice = scores + self._bias
        if self._top_groups < self._num_groups:
            groups = choice.view(choice.shape[0], self._num_groups, -1)
            best = groups.topk(2, dim=-1).values.sum(-1).topk(self._top_groups, dim=-1).indices
            hidden = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
            choice = groups.masked_fill(hidden.unsqueeze(-1), float("-inf")).flatten(1)
        experts = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if self._normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * self._scale)

    def rule(self) -> dict[str, Any] | None:
        rule = {"scoring": "sigmoid", "bias": self._bias, "renormalize": self._normalize, "scale": self._scale}
        if self._top_groups == self._num_groups:
            return rule
        if any(count & (count - 1) for count in (self._bias.shape[0], self._num_groups)):
            return None  # the kernel's groups are powers of two
        return rule | {"num_groups": self._num_groups, "top_groups": self._top_groups}


class ChosenSoftmaxRouter(Router):
    """Top k of the logits, then a softmax over these alone (gpt-oss)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, top_k: int) -> None:
        self.weight = weight
        self.bias = bias
        self.top_k = top_k

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        return torch.addmm(self.bias, x, self.weight.t())

    def choose(self, logits: torch.Tensor) -> Routing:
        chosen, experts = logits.topk(self.top_k, dim=-1)
        return Routing(experts, chosen.softmax(-1, dtype=torch.float32))

    def rule(self) -> dict[str, Any]:
        return {"scoring": "softmax", "renormalize": True}


class SigmoidRouter(Router):
    """Top k of the logits, each weighted by its own sigmoid (Llama 4)."""

    def __init__(self, weight: torch.Tensor, top_k: int) -> None:
        self.weight = weight
        self.top_k = top_k

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()

    def choose(self, logits: torch.Tensor) -> Routing:
        experts = logits.topk(self.top_k, dim=-1).indices
        # Of whole rows: torch rounds the last few numbers of a tensor, those beyond its registers, otherwise.
        return Routing(experts, logits.float().sigmoid().gather(1, experts))

    def rule(self) -> dict[str, Any]:
        return {"scoring": "sigmoid", "renormalize": False}
