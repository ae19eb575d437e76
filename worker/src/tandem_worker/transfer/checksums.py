"""Sums over everything that travels between two workers: xxh3-64, so that what was damaged on the way is not used.

Each sum is seeded with what it belongs to. A block that lands under another transfer, layer or number fails its sum
even where every byte of it is right. These sums keep out accidents, not attackers: keys do that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial

from xxhash import xxh3_64, xxh3_64_intdigest

_HEADER_SEED = 0x54414E44454D4B56
_LOGITS = 0x4C4F47495453


class Damage(StrEnum):
    """What was not what the peer sent, or not what was ordered; a label of metrics."""

    HEADER = "header"
    BODY = "body"
    BLOCK = "block"
    LOGITS = "logits"
    PROMPT = "prompt"
    """The peer computed another prompt."""
    CACHED = "cached"
    """More tokens were cached than there are."""


sum_header: Callable[[bytes | bytearray | memoryview], int] = partial(xxh3_64_intdigest, seed=_HEADER_SEED)
"""XXH3 (64 bits) of a frame's header, with a seed of its own."""

sum_body: Callable[[bytes | bytearray | memoryview, int], int] = xxh3_64_intdigest
"""Sum of a frame's body, with its transfer: without the payload of blocks, which have sums of their own."""


def sum_logits(logits: bytes | memoryview, transfer: int) -> int:
    """XXH3 (64 bits) of the logits of one transfer, whose number is part of the seed."""
    return xxh3_64_intdigest(logits, transfer ^ _LOGITS)


def sum_blocks(blocks: Sequence[Sequence[memoryview]], transfer: int, layer: int, first: int) -> list[int]:
    """Sum of each of these consecutive blocks of the prompt in one layer, its runs one after another.

    All have equally many. Seeded with transfer, layer and number: another seed for each block that a transfer moves.
    """
    seed = transfer ^ layer << 32
    if len(blocks[0]) == 1:
        return [xxh3_64_intdigest(run, seed ^ index) for index, (run,) in enumerate(blocks, first)]
    return [_sum_runs(runs, seed ^ index) for index, runs in enumerate(blocks, first)]


def copy_out(
    blocks: Sequence[Sequence[memoryview]], room: memoryview, transfer: int, layer: int, first: int
) -> list[int]:
    """Copy these blocks into `room`, one after another; their sums, as `sum_blocks` has them.

    Block by block, so that each is summed while a core's cache has it; and in one loop, whose steps are most of what
    copying costs beside the bytes.
    """
    seed, start, sums = transfer ^ layer << 32, 0, list[int]()
    for index, runs in enumerate(blocks, first):
        for run in runs:
            end = start + len(run)
            room[start:end] = run
            start = end
        sums.append(xxh3_64_intdigest(runs[0], seed ^ index) if len(runs) == 1 else _sum_runs(runs, seed ^ index))
    return sums


def copy_in(
    source: memoryview, blocks: Sequence[Sequence[memoryview]], transfer: int, layer: int, first: int
) -> list[int]:
    """Copy what stands in `source` into these blocks, one after another; the sums of the copies, as `sum_blocks` has
    them: the source may change meanwhile."""
    seed, start, sums = transfer ^ layer << 32, 0, list[int]()
    for index, runs in enumerate(blocks, first):
        for run in runs:
            end = start + len(run)
            run[:] = source[start:end]
            start = end
        sums.append(xxh3_64_intdigest(runs[0], seed ^ index) if len(runs) == 1 else _sum_runs(runs, seed ^ index))
    return sums


def _sum_runs(runs: Sequence[memoryview], seed: int) -> int:
    digest = xxh3_64(seed=seed)
    for run in runs:
        digest.update(run)
    return digest.intdigest()
