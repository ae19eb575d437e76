"""Edits of logits, draws, choices and log-probabilities over whole vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from tandem_worker import kernels
from tandem_worker.host.philox import DrawKey, draw_words
from tandem_worker.kernels import reference

from bench.kernels.case import Case, Place, Tensors

_SPREAD = 4.0
"""Of the logits: a few hundred tokens carry most of the probability, as in a model's."""
_DRAW_LIMIT = 1e-4
"""What the logarithm of a token's time may miss that of the first one by."""


def sampling(place: Place) -> Iterator[Case]:
    vocabulary, rows = place.sizes.vocabulary, max(place.sizes.sampled)
    size = rows * vocabulary * 4

    def logits(count: int = rows) -> torch.Tensor:
        return place.randn(count, vocabulary, dtype=torch.float32) * _SPREAD

    def penalized() -> tuple:
        seen = torch.rand(rows, vocabulary, device=place.device) < 0.1
        counts = place.integers(0, 3, (rows, vocabulary), torch.int32)
        return logits(), seen, counts, *(torch.full((rows,), value, device=place.device) for value in (0.1, 0.1, 1.1))

    def biased() -> tuple:
        ids = torch.stack([torch.randperm(vocabulary, device=place.device)[:64] for _ in range(rows)]).int()
        return logits(), ids, place.randn(*ids.shape, dtype=torch.float32)

    def masked() -> tuple:
        words = place.integers(-(2**31), 2**31 - 1, (rows, -(-vocabulary // 32)), torch.int32)
        return logits(), words

    longs = torch.arange(rows, device=place.device)
    yield _edit("apply_penalties", 2 * size + 5 * rows * vocabulary, penalized)
    yield _edit("apply_logit_bias", rows * 64 * 16, biased)
    yield _edit("apply_bitmask", rows * vocabulary / 8, masked)
    for count in place.sizes.sampled:
        for name, heat, top_k, top_p in (
            ("greedy", 0.0, 0, 1.0),
            ("plain", 1.0, 0, 1.0),
            ("top_k", 1.0, 50, 1.0),
            ("top_p", 1.0, 0, 0.9),
            ("top_k and top_p", 1.0, 50, 0.9),
        ):
            yield _choice(place, logits, name, count, (heat, top_k, top_p))
    yield Case(
        name=f"token_logprobs 20 [{rows}, {vocabulary}]", bytes=size, make=lambda: (logits(), longs % vocabulary),
        run=lambda x, tokens: kernels.token_logprobs(x, tokens, 20),
        expect=lambda x, tokens: reference.token_logprobs_reference(x, tokens, 20),
    )  # fmt: skip


def _edit(name: str, num_bytes: float, make: Callable[[], tuple]) -> Case:
    twin = getattr(reference, f"{name}_reference")

    def expect(logits: torch.Tensor, *rest: torch.Tensor) -> Tensors:
        twin(logits, *rest)
        return (logits,)

    return Case(
        name=name, bytes=num_bytes, make=make, run=getattr(kernels, name), writes=(0,),
        outputs=lambda result, logits, *rest: (logits,), expect=expect, limit=1e-6,
    )  # fmt: skip


def _choice(
    place: Place, logits: Callable[[int], torch.Tensor], name: str, rows: int, how: tuple[float, int, float]
) -> Case:
    heat, top_k, top_p = how

    def make() -> tuple:
        def per_row(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=place.device)

        keys = torch.randint(1 << 40, (3, rows), device=place.device).unbind()
        return logits(rows), *keys, per_row(heat), per_row(top_k, torch.int32), per_row(top_p), per_row(0.0)

    size = rows * place.sizes.vocabulary * 4
    return Case(
        name=f"sample_tokens {name} [{rows}, {place.sizes.vocabulary}]", bytes=size, make=make,
        run=kernels.sample_tokens,
        expect=lambda *values: (reference.sample_tokens_reference(*values),),
        error=None if heat == 0.0 else _draw_error, limit=0.0 if heat == 0.0 else _DRAW_LIMIT,
    )  # fmt: skip


def _draw_error(outputs: Tensors, inputs: tuple) -> float:
    """By how much the logarithm of a chosen token's time is above that of the first one, at the most.

    Tokens are not compared: of two of 150,000 that are there at nearly the same time, float32 may take the other one.
    """
    (tokens,), (logits, seeds, choices, positions, temperature, top_k, top_p, _) = outputs, inputs
    if int(tokens.min()) < 0 or int(tokens.max()) >= logits.shape[1]:
        return float("inf")
    worst = 0.0
    keys = map(DrawKey, seeds.tolist(), choices.tolist(), positions.tolist())
    for row, (token, key) in enumerate(zip(tokens.tolist(), keys, strict=True)):
        scores = logits[row].double() / float(temperature[row])
        weights = torch.exp(scores - scores.max())
        ordered = weights.sort(descending=True).values
        kept = weights >= 0.0
        if 0 < int(top_k[row]) < len(weights):
            kept &= weights >= ordered[int(top_k[row]) - 1]
            ordered = ordered[: int(top_k[row])]
        if float(top_p[row]) < 1.0:
            running = ordered.cumsum(0)
            last = int((running < float(top_p[row]) * running[-1]).sum())
            kept &= weights >= ordered[min(last, len(ordered) - 1)]
        v = (torch.from_numpy(draw_words(key, len(scores)).astype("float64")).to(scores.device) + 0.5) * 2.0**-32
        times = torch.where(kept, torch.log(-torch.log1p(-v)) - scores, torch.inf)
        worst = max(worst, float(times[token] - times.min()))
    return worst
