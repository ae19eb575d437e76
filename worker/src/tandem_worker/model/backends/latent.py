"""Multi-head latent attention, in either of its two forms (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Absorbed: queries are brought into the latent space, attend to latents as they lie, and what they gather is brought out
again. Expanded: the context's latents become keys and values of every head first. Absorbed reads little and computes
much per pair of query and key; expanded computes little per pair, but must expand every token of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tandem_worker.model.backends.attention import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentSpec:
    """MLA of one layer on this rank."""

    attention: AttentionSpec
    """Of the absorbed form: `head_dim` is the latent's width, `value_dim` its part without positions (the rank)."""
    expand: torch.Tensor
    """`[num_heads, nope_dim + value width, rank]`: a latent's key part, then its value, for every head."""
    nope_dim: int
    _key_in: torch.Tensor = field(init=False)
    _value_out: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        key_in, value_out = self.expand[:, : self.nope_dim], self.expand[:, self.nope_dim :].transpose(1, 2)
        if self.expand.device.type == "cpu":  # its batched products prefer dense operands; a GPU takes views
            key_in, value_out = key_in.contiguous(), value_out.contiguous()
        object.__setattr__(self, "_key_in", key_in)
        object.__setattr__(self, "_value_out", value_out)

    @property
    def rank(self) -> int:
        return self.expand.shape[2]

    @property
    def rope_dim(self) -> int:
        return self.attention.head_dim - self.rank

    @property
    def value_width(self) -> int:
        """Of one head."""
        return self.expand.shape[1] - self.nope_dim

    def absorb(self, queries: torch.Tensor) -> torch.Tensor:
        """`[T, H, nope + rope]` to queries of latents, `[T, H, rank + rope]`."""
        inside = torch.bmm(queries[..., : self.nope_dim].transpose(0, 1), self._key_in).transpose(0, 1)
        return torch.cat((inside, queries[..., self.nope_dim :]), dim=-1)

    def bring_out(self, attended: torch.Tensor) -> torch.Tensor:
        """What absorbed queries gathered, `[T, H, rank]`, to the heads' values side by side, `[T, H * value]`."""
        return torch.bmm(attended.transpose(0, 1), self._value_out).transpose(0, 1).flatten(1)


def plan_expanded(
    query_lens: Sequence[int], context_lens: Sequence[int], spec: LatentSpec, *, max_tokens: int
) -> list[int]:
    """Sequences for which the expanded form needs fewer operations, first ones first, `max_tokens` of context in all.

    Per head, halved: a pair costs 2 rank + rope absorbed and nope + rope + value expanded; absorbing costs
    rank (nope + value) per query, expanding the same per token of context. A query sees half of its own chunk.
    """
    rank, rope, nope, value = spec.rank, spec.rope_dim, spec.nope_dim, spec.value_width
    chosen, room = [], max_tokens
    for index, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        pairs = queries * (context - (queries - 1) / 2)
        absorbed = queries * rank * (nope + value) + pairs * (2 * rank + rope)
        expanded = context * rank * (nope + value) + pairs * (nope + rope + value)
        if expanded < absorbed and context <= room:
            chosen.append(index)
            room -= context
    return chosen
