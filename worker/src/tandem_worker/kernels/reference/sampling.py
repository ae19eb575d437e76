"""Twins of the sampling kernels."""

from __future__ import annotations

import torch

from tandem_worker.host.philox import DrawKey, draw_words

NO_TOKEN = -1
EQUALS_SLACK = 1e-3
"""As in the kernel: what top-p may fall short by among equals, in weights of one token."""


def apply_penalties_reference(
    logits: torch.Tensor,
    prompt_seen: torch.Tensor,
    output_counts: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Twin of `apply_penalties`: logits, prompt_seen, output_counts `[B, V]`, penalties `[B]`; in place."""
    emitted = output_counts > 0
    penalty = repetition[:, None]
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    adjusted = torch.where(emitted | (prompt_seen != 0), penalized, logits)
    adjusted = adjusted - frequency[:, None] * output_counts - presence[:, None] * emitted
    logits.copy_(adjusted)


def apply_logit_bias_reference(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Twin of `apply_logit_bias`: logits `[B, V]`, ids and values `[B, N]`, -1 for unused entries; in place."""
    used = ids >= 0
    rows = torch.arange(logits.shape[0], device=logits.device)[:, None].expand_as(ids)
    logits.index_put_((rows[used], ids[used].long()), values[used].to(logits.dtype), accumulate=True)


def apply_bitmask_reference(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Twin of `apply_bitmask`: logits `[B, V]`, bitmask `[B, ceil(V / 32)]` int32; in place."""
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask[..., None] >> shifts) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(~allowed, float("-inf"))


def sample_tokens_reference(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Twin of `sample_tokens`: logits `[B, V]`, the rest `[B]` -> tokens `[B]` int64."""
    tokens = []
    keys = map(DrawKey, seeds.tolist(), choices.tolist(), positions.tolist())
    for row, key, heat, k, p, low in zip(
        logits.double(), keys, temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True
    ):
        best, winner = row.max(dim=0)
        if not bool(best.isfinite()):
            tokens.append(NO_TOKEN)
        elif heat == 0.0 or k == 1 or p <= 0.0 or low >= 1.0:
            tokens.append(int(winner))
        else:
            weights = torch.exp((row - best) / heat)
            tokens.append(_draw((row - best) / heat, _kept(row, weights, k, p, low), key))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _kept(row: torch.Tensor, weights: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Which tokens may be drawn, bool `[V]`; of equals the lower id ranks first."""
    order = row.sort(descending=True, stable=True).indices
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        ordered = weights[order]
        wanted = top_p * ordered.sum()
        last = ordered[min(int((ordered.cumsum(dim=0) < wanted).sum()), len(order) - 1)]
        needed = torch.ceil((wanted - ordered[ordered > last].sum()) / last - EQUALS_SLACK).clamp(min=1)
        order = order[: int((ordered > last).sum() + torch.minimum(needed, (ordered == last).sum()))]
    kept = torch.zeros_like(weights, dtype=torch.bool)
    kept[order] = True
    return kept & (weights >= min_p) & (row > float("-inf"))


def _draw(scores: torch.Tensor, kept: torch.Tensor, key: DrawKey) -> int:
    v = (torch.from_numpy(draw_words(key, len(scores)).astype("float64")).to(scores.device) + 0.5) * 2.0**-32
    return int(torch.where(kept, scores - torch.log(-torch.log1p(-v)), -torch.inf).argmax())


def token_logprobs_reference(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Twin of `token_logprobs`: logits `[B, V]`, tokens `[B]` -> `[B]`, `[B, num_top]` and ids `[B, num_top]`."""
    scores = torch.log_softmax(logits.double(), dim=-1)
    own = scores.gather(1, tokens.long().clamp_min(0)[:, None])[:, 0]
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    return own.float(), scores.gather(1, ids).float(), ids
