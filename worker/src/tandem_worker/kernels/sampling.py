"""Choosing tokens on the device, without sorting and without waiting for the host.

Top-k and top-p need a threshold, not an order: it is found by bisection over the bits of the logits, each step one
pass over a row that stays in the L2 cache. The draw is a race of what is left (`host.philox`): each token's noise
depends on (seed, choice, position, token) only, so a stream continues the same after preemption or migration.
Of equal logits the lower id ranks first: at the threshold a quota of the first equals is kept.
"""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import INDEXES
from .dispatch import FUSED_MATH, with_twin
from .logit_edits import check_logits, require_row_values
from .reference.sampling import sample_tokens_reference, token_logprobs_reference

_BLOCK = 4096
_EQUALS_SLACK = tl.constexpr(1e-3)
"""Share of a token's weight that top-p may fall short by among equals, so that rounding never decides their number."""


@triton.jit
def _log_times(seed, choice, position, start, BLOCK: tl.constexpr):
    """Logarithms of -log(1 - v) for the BLOCK tokens from `start` on, a multiple of 4."""
    quads = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zeros = tl.zeros((BLOCK // 4,), tl.uint32)
    first, second, third, fourth = tl.philox(seed, zeros + position, zeros + choice, quads, zeros)
    words = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # Short times decide, and there 1 - v has lost what v has: a series, exact to 2e-7 up to 1/16.
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    return tl.log(tl.where(v < 0.0625, series, -tl.log(1.0 - v)))


@triton.jit
def ordered_bits(x):
    """int32 whose order is that of the float32 values: the bits of the magnitude with the value's sign."""
    bits = x.to(tl.int32, bitcast=True)
    sign = bits >> 31
    return ((bits & 0x7FFFFFFF) ^ sign) - sign


@triton.jit
def _from_ordered_bits(ordered):
    sign = ordered >> 31
    return (((ordered ^ sign) - sign) | (sign & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _mass_above(row_ptr, vocab, best, inverse_heat, threshold, BLOCK: tl.constexpr):
    """Number and summed weight of the tokens whose logits are at or above the ordered bits `threshold`, above -inf."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=4):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf"))
        kept = ordered_bits(logits) >= threshold.to(tl.int32)
        count += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp((logits - best) * inverse_heat), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _weight_at(threshold, best, inverse_heat):
    return tl.exp((_from_ordered_bits(threshold.to(tl.int32)) - best) * inverse_heat)


@triton.jit
def _bisect(
    row_ptr, vocab, best, inverse_heat, low, low_count, low_mass, high, wanted_count, wanted_mass, BLOCK: tl.constexpr
):
    """Highest threshold at or above which there are `wanted_count` tokens and `wanted_mass` weight.

    `low` has enough, `high` (int64, exclusive, above every token) has not. Stops early once one token separates the
    two; else the tokens between them are equals, and the threshold is their value.
    -> threshold, number and weight of the tokens at or above it, the same without those between.
    """
    high_count = low_count * 0
    high_mass = low_mass * 0.0
    while (high - low > 1) & (low_count - high_count > 1):
        middle = low + (high - low) // 2
        count, mass = _mass_above(row_ptr, vocab, best, inverse_heat, middle, BLOCK)
        enough = (count >= wanted_count) & (mass >= wanted_mass)
        low = tl.where(enough, middle, low)
        low_count = tl.where(enough, count, low_count)
        low_mass = tl.where(enough, mass, low_mass)
        high = tl.where(enough, high, middle)
        high_count = tl.where(enough, high_count, count)
        high_mass = tl.where(enough, high_mass, mass)
    return low, low_count, low_mass, high_count, high_mass


@triton.jit
def _find_edge(row_ptr, vocab, best, inverse_heat, top_k, top_p, floor, BLOCK: tl.constexpr):
    """Threshold that top-k, top-p and `floor` leave, and how many of the tokens at it are kept: the lowest ids."""
    threshold = (ordered_bits(tl.full((), float("-inf"), tl.float32)) + 1).to(tl.int64)
    high = ordered_bits(best).to(tl.int64) + 1
    count, mass = _mass_above(row_ptr, vocab, best, inverse_heat, threshold, BLOCK)
    quota = count * 0 + vocab
    if (top_k > 0) & (top_k < count):
        threshold, count, mass, above, mass_of_above = _bisect(
            row_ptr, vocab, best, inverse_heat, threshold, count, mass, high, top_k, 0.0, BLOCK
        )
        quota = top_k - above
        if count > top_k:
            mass = mass_of_above + quota * _weight_at(threshold, best, inverse_heat)
    if top_p < 1.0:
        edge = threshold
        wanted = top_p * mass
        threshold, count, mass, above, mass_of_above = _bisect(
            row_ptr, vocab, best, inverse_heat, threshold, count, mass, high, 1, wanted, BLOCK
        )
        needed = (wanted - mass_of_above) / tl.maximum(_weight_at(threshold, best, inverse_heat), 1e-37)
        needed = tl.maximum(tl.ceil(tl.minimum(needed - _EQUALS_SLACK, 1e9)).to(tl.int32), 1)
        needed = tl.where(count - above > 1, needed, vocab)
        quota = tl.where(threshold == edge, tl.minimum(quota, needed), needed)
    lowest = ordered_bits(floor).to(tl.int64)
    quota = tl.where(lowest > threshold, vocab, quota)
    return tl.maximum(threshold, lowest), quota


@triton.jit
def _sample_kernel(
    logits_ptr, seeds_ptr, choices_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, tokens_ptr,
    vocab, stride_logits, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits
    maxima = tl.full((BLOCK,), float("-inf"), tl.float32)
    winners = tl.zeros((BLOCK,), tl.int32)
    poisoned = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=4):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf"))
        is_nan = logits != logits  # noqa: PLR0124
        poisoned += (is_nan | (logits == float("inf"))).to(tl.int32)
        winners = tl.where(logits > maxima, columns, winners)
        maxima = tl.maximum(maxima, logits)
    best = tl.max(maxima, axis=0)
    if (best == float("-inf")) | (tl.sum(poisoned, axis=0) > 0):
        tl.store(tokens_ptr + row, tl.full((), -1, tl.int64))
        return
    heat = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if (heat == 0.0) | (top_k == 1) | (top_p <= 0.0) | (min_p >= 1.0):
        winner = tl.min(tl.where(maxima == best, winners, vocab), axis=0)
        tl.store(tokens_ptr + row, winner.to(tl.int64))
        return
    inverse_heat = 1.0 / heat
    # Nothing below min_p of the best weight is ever drawn; without min_p that is everything above -inf.
    floor = best + tl.maximum(tl.log(tl.maximum(min_p, 1e-37)), -85.0) * heat
    threshold, quota = _find_edge(row_ptr, vocab, best, inverse_heat, top_k, top_p, floor, BLOCK)
    seed = tl.load(seeds_ptr + row).to(tl.uint64)
    choice = tl.load(choices_ptr + row).to(tl.uint32)
    position = tl.load(positions_ptr + row).to(tl.uint32)
    scores = tl.full((BLOCK,), float("-inf"), tl.float32)
    passed = quota * 0
    for start in tl.range(0, vocab, BLOCK, num_stages=4):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf"))
        ranks = ordered_bits(logits)
        equal = (ranks == threshold.to(tl.int32)).to(tl.int32)
        place = passed + tl.cumsum(equal, axis=0)
        passed = tl.max(place, axis=0)
        kept = (ranks > threshold.to(tl.int32)) | ((equal > 0) & (place <= quota))
        score = (logits - best) * inverse_heat - _log_times(seed, choice, position, start, BLOCK)
        score = tl.where(kept, score, float("-inf"))
        winners = tl.where(score > scores, columns, winners)
        scores = tl.maximum(scores, score)
    winner = tl.min(tl.where(scores == tl.max(scores, axis=0), winners, vocab), axis=0)
    tl.store(tokens_ptr + row, winner.to(tl.int64))


@triton.jit
def _block_top_kernel(
    logits_ptr,
    sums_ptr,
    values_ptr,
    ids_ptr,
    vocab,
    num_blocks,
    stride_logits,
    NUM_TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride_logits + columns, mask=columns < vocab, other=float("-inf"))
    maximum = tl.max(logits, axis=0)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    slot = row * num_blocks + block
    tl.store(sums_ptr + 2 * slot, maximum)
    tl.store(sums_ptr + 2 * slot + 1, tl.sum(tl.exp(logits - shift), axis=0))
    for rank in range(NUM_TOP):
        winner = tl.argmax(logits, axis=0)
        here = tl.arange(0, BLOCK) == winner
        tl.store(values_ptr + slot * NUM_TOP + rank, tl.max(logits, axis=0))
        tl.store(ids_ptr + slot * NUM_TOP + rank, block * BLOCK + winner)
        logits = tl.where(here, float("-inf"), logits)


@triton.jit
def _logprobs_kernel(
    logits_ptr, tokens_ptr, sums_ptr, values_ptr, ids_ptr, own_ptr, top_ptr, top_ids_ptr, num_blocks, stride_logits,
    NUM_TOP: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCK_B)
    slots = row * num_blocks + blocks
    maxima = tl.load(sums_ptr + 2 * slots, mask=blocks < num_blocks, other=float("-inf"))
    sums = tl.load(sums_ptr + 2 * slots + 1, mask=blocks < num_blocks, other=0.0)
    best = tl.max(maxima, axis=0)
    total = best + tl.log(tl.sum(tl.where(maxima == float("-inf"), 0.0, sums * tl.exp(maxima - best)), axis=0))
    token = tl.load(tokens_ptr + row)
    own = tl.load(logits_ptr + row * stride_logits + tl.maximum(token, 0))
    tl.store(own_ptr + row, own - total)
    candidates = tl.arange(0, BLOCK_C)
    inside = candidates < num_blocks * NUM_TOP
    values = tl.load(values_ptr + row * num_blocks * NUM_TOP + candidates, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + row * num_blocks * NUM_TOP + candidates, mask=inside, other=0)
    for rank in range(NUM_TOP):
        winner = tl.argmax(values, axis=0)
        here = candidates == winner
        tl.store(top_ptr + row * NUM_TOP + rank, tl.max(values, axis=0) - total)
        tl.store(top_ids_ptr + row * NUM_TOP + rank, tl.sum(tl.where(here, ids, 0), axis=0).to(tl.int64))
        values = tl.where(here, float("-inf"), values)


@with_twin(sample_tokens_reference)
def sample_tokens(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """One token per row: temperature, then top-k, top-p of what is left, min-p, one draw.

    Temperature 0, top_k 1, top_p 0 and min_p 1 are greedy.

    logits `[B, V]` float32; seeds `[B]` int64, choices and positions `[B]` int32 or int64: what the noise of a draw is
    made of; temperature, top_p, min_p `[B]` float32, top_k `[B]` int32 or int64 (0: all). -> tokens `[B]` int64, -1 for
    rows with NaN, +inf or nothing allowed. Of equals the lower id ranks first: top-k keeps k tokens, and greedy takes
    the first of the likeliest.
    """
    num_rows, vocab = check_logits(logits)
    require_row_values("seeds", seeds, logits, torch.int64)
    for name, tensor in (("choices", choices), ("positions", positions), ("top_k", top_k)):
        require_row_values(name, tensor, logits, *INDEXES)
    for name, tensor in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        require_row_values(name, tensor, logits, torch.float32)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _sample_kernel[(num_rows,)](
            logits, seeds, choices, positions, temperature, top_k, top_p, min_p, tokens, vocab, logits.stride(0),
            BLOCK=min(_BLOCK, max(4, triton.next_power_of_2(vocab))), num_warps=16, **FUSED_MATH,
        )  # fmt: skip
    return tokens


@with_twin(token_logprobs_reference)
def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprob of each row's token and of the `num_top` likeliest; of equals the lower id comes first.

    logits `[B, V]` float32, tokens `[B]` int32 or int64 (a negative one reads token 0), num_top 0 to 20 as OpenAI has
    it. -> `[B]` and `[B, num_top]` float32, ids `[B, num_top]` int64.
    """
    num_rows, vocab = check_logits(logits)
    require_row_values("tokens", tokens, logits, *INDEXES)
    if not 0 <= num_top <= min(20, vocab):
        raise ValueError(f"num_top must be 0 to {min(20, vocab)}, got {num_top}")
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    num_blocks = triton.cdiv(vocab, block)
    device = logits.device
    sums = torch.empty((num_rows, num_blocks, 2), dtype=torch.float32, device=device)
    values = torch.empty((num_rows, num_blocks, num_top), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, num_blocks, num_top), dtype=torch.int32, device=device)
    own = torch.empty(num_rows, dtype=torch.float32, device=device)
    top = torch.empty((num_rows, num_top), dtype=torch.float32, device=device)
    top_ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=device)
    if num_rows:
        _block_top_kernel[(num_rows, num_blocks)](
            logits, sums, values, ids, vocab, num_blocks, logits.stride(0), NUM_TOP=num_top, BLOCK=block, num_warps=8,
            **FUSED_MATH,
        )  # fmt: skip
        _logprobs_kernel[(num_rows,)](
            logits, tokens, sums, values, ids, own, top, top_ids, num_blocks, logits.stride(0), NUM_TOP=num_top,
            BLOCK_B=triton.next_power_of_2(num_blocks), BLOCK_C=triton.next_power_of_2(max(1, num_blocks * num_top)),
            num_warps=4, **FUSED_MATH,
        )  # fmt: skip
    return own, top, top_ids
