"""Chooses the next token of every sequence from its logits: with torch here, with kernels in `device_sampler`.

Order of effects: penalties, logit bias, minimum length, grammar; then greedy, or temperature, top-k, top-p, min-p and
a draw (`race`). Every row is computed from that row alone, with constants that do not depend on the batch, so a
request's tokens do not depend on what it is batched with. Logprobs are those of the model, before any of these effects.

Tokens are ranked by logit, and of equals the lower id comes first: greedy, top-k, top-p and the likeliest tokens of
logprobs all go by that one order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows

import numpy as np
import torch

from tandem_worker.engine.sample.contract import LEAST_TEMPERATURE, NO_TOKEN, CheckedRows
from tandem_worker.engine.sample.masks import MaskCredit
from tandem_worker.engine.sample.race import draw_words, find_first
from tandem_worker.engine.sample.state import SamplingState
from tandem_worker.engine.schedule.params import TokenLogprob
from tandem_worker.engine.schedule.request import Sequence
from tandem_worker.host.philox import DrawKey

_NUM_CANDIDATES = 256
"""Likeliest tokens that top-k and top-p look at before they sort the whole vocabulary."""

_EQUALS_SLACK = 1e-3
"""Share of a token's weight that top-p may fall short by among equals, so that rounding never decides their number."""


class HostSampler:
    """The sampler of CPUs, by torch's operations."""

    checks_at_once = False

    def __init__(self) -> None:
        self._credit = MaskCredit()

    def choose_tokens(self, logits: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
        return choose_tokens(logits, sequences, self._credit)

    def choose_checked(self, logits: torch.Tensor, checked: Rows[CheckedRows]) -> torch.Tensor:
        raise NotImplementedError("on a CPU guesses are checked wave by wave: most rows of a step are never looked at")

    def compute_logprobs(
        self, logits: torch.Tensor, sequences: Rows[Sequence], tokens: list[int]
    ) -> dict[int, TokenLogprob]:
        return compute_logprobs(logits, sequences, tokens)


def choose_tokens(logits: torch.Tensor, sequences: Rows[Sequence], credit: MaskCredit | None = None) -> torch.Tensor:
    """One token per row of `logits` `[N, vocab]`: `[N]` int64 on its device, NO_TOKEN where none is possible.

    Rows that take the likeliest token cost the host no waiting.
    """
    best, winners = _find_likeliest(logits)
    tokens = torch.where(best.abs() < torch.inf, winners, NO_TOKEN)
    special = [row for row, sequence in enumerate(sequences) if not sequence.sampler_state.is_plain_for(sequence)]
    if special:
        chosen = _sample_special(logits[special], [sequences[row] for row in special], credit or MaskCredit())
        tokens[special] = torch.where(tokens[special] == NO_TOKEN, NO_TOKEN, chosen)
    return tokens


def _find_likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest logit of each row of `[N, vocab]`, and the lowest id that has it; the first that is not a number."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # Ten times as fast in numpy, and on this thread alone: the kernels' threads have the cores.
        winners = torch.from_numpy(logits.numpy().argmax(axis=-1))
        return logits.gather(1, winners[:, None])[:, 0], winners
    best, winners = logits.max(dim=-1)
    return best, winners


def compute_logprobs(logits: torch.Tensor, sequences: Rows[Sequence], tokens: list[int]) -> dict[int, TokenLogprob]:
    """Logprobs of the chosen tokens, by row of `logits` `[N, vocab]`; of the rows that ask for them."""
    result: dict[int, TokenLogprob] = {}
    for row in [row for row, sequence in enumerate(sequences) if sequence.lockstep]:
        num_top = sequences[row].sampler_state.params.num_logprobs
        if num_top is not None and tokens[row] != NO_TOKEN:
            (result[row],) = score_prompt(logits[row : row + 1], [tokens[row]], num_top)
    return result


def score_prompt(logits: torch.Tensor, targets: list[int], num_top: int) -> list[TokenLogprob]:
    """Logprob and rank of token `targets[i]` after row i of `logits` `[N, vocab]`, and the `num_top` likeliest."""
    scores = torch.log_softmax(logits, dim=-1)
    tokens = torch.tensor(targets, device=logits.device)[:, None]
    own = scores.gather(1, tokens)[:, 0].tolist()
    ranks = _find_ranks(logits, tokens)
    if not num_top:
        return [
            TokenLogprob(token_id=token, logprob=value, rank=rank)
            for token, value, rank in zip(targets, own, ranks, strict=True)
        ]
    top = rank_tokens(logits, num_top)
    likeliest = zip(top.tolist(), scores.gather(1, top).tolist(), strict=True)
    return [
        TokenLogprob(token_id=token, logprob=value, top=tuple(zip(*each, strict=True)), rank=rank)
        for token, value, rank, each in zip(targets, own, ranks, likeliest, strict=True)
    ]


def _find_ranks(logits: torch.Tensor, tokens: torch.Tensor) -> list[int]:
    """Ranks from 1 of `tokens` `[N, 1]` in their rows of `logits` `[N, vocab]`; equals count by their ids."""
    values = logits.gather(1, tokens)
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # Counting is twenty times as fast in numpy; torch takes twice the time of the softmax for it.
        triples = zip(logits.numpy(), values[:, 0].numpy(), tokens[:, 0].tolist(), strict=True)
        return [
            1 + int(np.count_nonzero(row[:token] >= value) + np.count_nonzero(row[token:] > value))
            for row, value, token in triples
        ]
    equal_before = (logits == values) & (torch.arange(logits.shape[1], device=logits.device) < tokens)
    return (1 + (logits > values).sum(dim=1) + equal_before.sum(dim=1)).tolist()


def rank_tokens(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` likeliest tokens of each row of `[N, vocab]`, `[N, min(count, vocab)]`, best first."""
    ids, sure = _rank_candidates(logits, min(count + 1, logits.shape[-1]))
    for row, known in enumerate(sure):
        if known < count and ids.shape[-1] > count:
            ids[row, :count] = _rank_all(logits[row])[:count]
    return ids[:, :count]


def _rank_all(logits: torch.Tensor) -> torch.Tensor:
    return logits.sort(descending=True, stable=True).indices


def _rank_candidates(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, list[int]]:
    """Ids of `width` of the likeliest tokens in their order, `[N, width]`, and how many of each row are sure.

    Equals of the last one may be missing, in place of those that are there: topk takes any of them.
    """
    values, ids = logits.topk(width, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    if width == logits.shape[-1]:
        return ids.gather(1, order), [width] * len(ids)
    return ids.gather(1, order), (values > values[:, -1:]).sum(dim=-1).tolist()


def _sample_special(logits: torch.Tensor, sequences: list[Sequence], credit: MaskCredit) -> torch.Tensor:
    """`[N]`; `logits` is a copy that may be changed."""
    states: list[SamplingState] = [sequence.sampler_state for sequence in sequences]
    credit.fill([(state, state.prepare_mask(logits.shape[1])) for state in states if state.grammar is not None])
    for row, (sequence, state) in enumerate(zip(sequences, states, strict=True)):
        state.adjust(logits[row], sequence)
    best, winners = logits.max(dim=-1)
    tokens = torch.where(best.isfinite(), winners, NO_TOKEN)
    drawn = [row for row, state in enumerate(states) if not state.params.greedy]
    if drawn:
        possible = best[drawn].isfinite().tolist()
        drawn = [row for row, ok in zip(drawn, possible, strict=True) if ok]
    if drawn:
        chosen = _draw(logits[drawn], best[drawn], [sequences[row] for row in drawn])
        tokens[drawn] = torch.tensor(chosen, device=tokens.device)
    for row, state in enumerate(states):
        state.count(tokens[row])
    return tokens


def _draw(logits: torch.Tensor, best: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    params = [sequence.sampler_state.params for sequence in sequences]
    keys = [
        DrawKey(param.seed, sequence.choice, sequence.next_position)
        for param, sequence in zip(params, sequences, strict=True)
    ]
    temperatures = torch.tensor([max(param.temperature, LEAST_TEMPERATURE) for param in params], device=logits.device)
    # Relative to the best logit, so that a temperature near 0 cannot overflow.
    probs = torch.softmax((logits - best[:, None]) / temperatures[:, None], dim=-1).cpu()
    ordered = [row for row, param in enumerate(params) if param.top_k > 0 or param.top_p < 1.0]
    limits = [(params[row].top_k, params[row].top_p, params[row].min_p) for row in ordered]
    kept = dict(zip(ordered, find_kept(logits[ordered], probs[ordered], limits), strict=True)) if ordered else {}
    tokens: list[int] = []
    for row, key in enumerate(keys):
        if row in kept:
            ids = kept[row].numpy()
            tokens.append(int(ids[find_first(probs[row].numpy()[ids], draw_words(key, ids))]))
        else:
            weights = _apply_min_p(probs[row], params[row].min_p).numpy()
            tokens.append(find_first(weights, draw_words(key, len(weights))))
    return tokens


def find_kept(logits: torch.Tensor, probs: torch.Tensor, limits: list[tuple[int, float, float]]) -> list[torch.Tensor]:
    """Ids of the tokens that each row's (top-k, top-p, min-p) leave; `probs` are those of the `logits` `[N, vocab]`.

    Top-k and top-p need the tokens in order. The likeliest few nearly always suffice; else that row is sorted.
    """
    ids, sure = _rank_candidates(logits, min(_NUM_CANDIDATES, logits.shape[-1]))
    ids = ids.to(probs.device)
    values = probs.gather(1, ids)
    width = ids.shape[-1]
    mass = values.double().sum(dim=-1).tolist()
    kept: list[torch.Tensor] = []
    for row, (top_k, top_p, min_p) in enumerate(limits):
        row_values, row_ids = values[row], ids[row]
        enough = 0 < top_k <= width or (top_k == 0 and mass[row] >= top_p)
        count = _count_kept(row_values, top_k, top_p, min_p)
        if (not enough or count > sure[row]) and width < logits.shape[-1]:
            row_ids = _rank_all(logits[row]).to(probs.device)
            row_values = probs[row][row_ids]
            count = _count_kept(row_values, top_k, top_p, min_p)
        kept.append(row_ids[:count])
    return kept


def _count_kept(values: torch.Tensor, top_k: int, top_p: float, min_p: float) -> int:
    """How many of the ranked `values` top-k, then top-p of what that leaves, and min-p keep."""
    if top_k > 0:
        values = values[:top_k]
    if top_p < 1.0:
        values = values[: _count_top_p(values, top_p, 1.0 if top_k == 0 else None)]
    return int((values >= min_p * values[0]).sum())


def _count_top_p(values: torch.Tensor, top_p: float, total: float | None) -> int:
    """Length of the shortest prefix of ranked `values` that holds `top_p` of `total` (None: of their sum)."""
    running = values.double().cumsum(dim=-1)
    target = top_p * (float(running[-1]) if total is None else total)
    before = int((running < target).sum())
    if before == len(values):  # the sum of rounded weights falls short of it: whatever weighs anything
        return int((values > 0).sum())
    last = values[before]
    above = int((values > last).sum())
    missing = target - (float(running[above - 1]) if above else 0.0)
    equals = int((values == last).sum())
    return above + min(max(1, math.ceil(missing / float(last) - _EQUALS_SLACK)), equals)


def _apply_min_p(probs: torch.Tensor, min_p: float) -> torch.Tensor:
    return probs.masked_fill(probs < min_p * probs.max(), 0.0) if min_p else probs
