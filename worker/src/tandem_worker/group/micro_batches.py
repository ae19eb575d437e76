"""Pieces of a step that follow one another through the stages of a pipeline, so that the stages work side by side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tandem_worker.engine.execute.batch import StepInput

_LEAST_TOKENS = 64
"""A micro-batch has at least as many: with fewer, reading the weights once more costs more than overlapping gains."""


def count_micro_batches(num_tokens: int, num_stages: int) -> int:
    """As many as keep `num_stages` stages busy for most of the time, none of them too small to be worth it.

    With M pieces over P stages a step takes M + P - 1 turns of 1/M of its work instead of P turns of all of it.
    """
    return 1 if num_stages == 1 else max(1, min(2 * num_stages, num_tokens // _LEAST_TOKENS))


def split_step(step: StepInput, count: int, block_size: int) -> list[StepInput]:
    """At most `count` pieces of nearly equal numbers of tokens; logits of the pieces are those of the step, in order.

    A prompt's chunk may be cut at a block boundary: its later tokens, in a later piece, find the KV of the earlier
    ones in the cache. A decode and its guesses stay together, because a draft head keeps their states when the step is
    over, too late for another piece. Copies and changes of the block table come with the first piece.
    """
    if count == 1:
        return [step]
    ends = _cut(step, count, block_size)
    pieces: list[StepInput] = []
    start = 0
    for end in ends:
        pieces.append(_take(step, start, end, first=start == 0))
        start = end
    return pieces


def _cut(step: StepInput, count: int, block_size: int) -> list[int]:
    """Tokens after which to cut, ascending; the last is the end of the step."""
    num_tokens = len(step.token_ids)
    stops = np.cumsum(step.query_lens)
    ends = {num_tokens}
    for index in range(1, count):
        wanted = num_tokens * index // count
        sequence = int(np.searchsorted(stops, wanted, side="right"))
        first = int(stops[sequence] - step.query_lens[sequence])
        position = int(step.context_lens[sequence] - stops[sequence]) + wanted
        ends.add(first if sequence < step.num_decodes else max(first, wanted - position % block_size))
    return sorted(ends - {0})


def _take(step: StepInput, start: int, end: int, *, first: bool) -> StepInput:
    """Tokens `start` to `end` of a step."""
    stops = np.cumsum(step.query_lens)
    starts = stops - step.query_lens
    kept = np.flatnonzero((starts < end) & (stops > start))
    tokens_before = np.maximum(start - starts[kept], 0)
    tokens_after = np.maximum(stops[kept] - end, 0)
    wanted = step.logits_rows[(step.logits_rows >= start) & (step.logits_rows < end)] - start
    return replace(
        step,
        copies=step.copies if first else step.copies[:0],
        token_ids=step.token_ids[start:end],
        rows=step.rows[kept],
        query_lens=step.query_lens[kept] - tokens_before - tokens_after,
        context_lens=step.context_lens[kept] - tokens_after,
        logits_rows=wanted,
        table_runs=step.table_runs if first else step.table_runs[:0],
        table_values=step.table_values if first else step.table_values[:0],
        num_decodes=int(np.count_nonzero(kept < step.num_decodes)),
    )
