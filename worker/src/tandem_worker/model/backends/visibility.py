"""Which keys a query sees: causal, and within a window or a chunk."""

from __future__ import annotations

import torch


def first_visible(position: int, window: int | None, chunk: int | None) -> int:
    """Position of the oldest key that the query at `position` sees."""
    first = 0
    if window is not None:
        first = max(first, position - window + 1)
    if chunk is not None:
        first = max(first, position // chunk * chunk)
    return first


def visible_mask(
    queries: torch.Tensor, keys: torch.Tensor, window: int | None, chunk: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask, 0 where seen and -inf elsewhere: positions `[..., Q]` and `[..., K]` to `[..., Q, K]`."""
    q, k = queries.unsqueeze(-1), keys.unsqueeze(-2)
    hidden = k > q
    if window is not None:
        hidden = hidden | (k <= q - window)
    if chunk is not None:
        hidden = hidden | (k < q.div(chunk, rounding_mode="floor") * chunk)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
