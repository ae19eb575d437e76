"""How the CPU attends over a step's sequences: groups, gather lists, masks. Built once per step, used by all layers.

Gather lists name runs of `block_size` keys or values of one head, so that gathering also brings each head's keys
together: `[2, sequences, num_kv_heads, blocks]` runs (MLA: `[1, sequences, 1, blocks]`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem_worker.model.attention import AttentionSpec
from tandem_worker.model.backends.visibility import first_visible, visible_mask
from tandem_worker.model.contract import ForwardBatch

_QUERY_TILES = ((1000, 128), (0, 64))  # keys from which so many queries are attended together; measured in bfloat16
_MAX_PADDING = 0.25  # share of a group's keys that may be padding
_MIN_SAVING = 512  # keys; a further group costs about as much as attending over this many


def group_by_length(lengths: Sequence[int], max_keys: int) -> list[list[int]]:
    """Indexes into `lengths`, longest first, split where padding would waste much or a group outgrows `max_keys`."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    groups: list[list[int]] = []
    longest = padding = 0
    for index in order:
        length = lengths[index]
        if groups:
            members = len(groups[-1]) + 1
            waste = padding + longest - length
            if members * longest <= max_keys and waste <= max(_MIN_SAVING, _MAX_PADDING * longest * members):
                groups[-1].append(index)
                padding = waste
                continue
        groups.append([index])
        longest, padding = length, 0
    return groups


@dataclass(slots=True)
class DecodeGroup:
    """Sequences with one new token each."""

    rows: torch.Tensor | None  # [G] their tokens in T; None: the whole batch, in order
    runs: torch.Tensor  # gather list
    mask: torch.Tensor | None  # [G, 1, num_keys] additive; None when nothing is hidden
    size: int
    num_keys: int  # per sequence, padding included
    unwritten: torch.Tensor | None  # rows of what is gathered, seen as [*, D], that lie past their sequence's context


@dataclass(slots=True)
class QueryTile:
    """Queries `start` to `stop` of a sequence's new tokens over its gathered keys `first` to `last`.

    `mask` `[stop - start, 1, M]` is added to the scores of the last M keys; None when nothing is hidden.
    """

    start: int
    stop: int
    first: int
    last: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class PrefillSequence:
    """A sequence with several new tokens, tokens `start` to `stop` of T."""

    start: int
    stop: int
    runs: torch.Tensor | None  # gather list; None: the whole context is in this batch
    length: int  # keys
    skipped: int  # positions before the first gathered key
    tiles: list[QueryTile]


@dataclass(slots=True)
class Layout:
    decodes: list[DecodeGroup]
    prefills: list[PrefillSequence]


class LayoutBuilder:
    """Layouts of one batch for a window, a chunk length and a number of KV heads."""

    def __init__(self, batch: ForwardBatch, block_size: int, spec: AttentionSpec, dtype: torch.dtype) -> None:
        self._batch = batch
        self._tables = batch.block_tables.to(torch.int64)
        self._block_size = block_size
        self._spec = spec
        self._dtype = dtype
        planes = 2 if spec.value_dim is None else 1  # keys and values, or latents that are both
        self._heads = torch.arange(planes * spec.num_kv_heads).view(planes, 1, -1, 1)

    def build(self, max_keys: int) -> Layout:
        """`max_keys` bounds the keys, padding included, that a decode group gathers."""
        decodes: list[tuple[int, int]] = []
        prefills: list[PrefillSequence] = []
        start = 0
        for index, queries in enumerate(self._batch.query_lens_host):
            if queries == 1:
                decodes.append((index, start))
            elif queries > 1:
                prefills.append(self._plan_prefill(index, start, start + queries))
            start += queries
        firsts = [self._first_key(self._batch.context_lens_host[index] - 1) for index, _ in decodes]
        lengths = [
            self._batch.context_lens_host[index] - first // self._block_size * self._block_size
            for (index, _), first in zip(decodes, firsts, strict=True)
        ]
        groups = [sorted(group) for group in group_by_length(lengths, max_keys)]
        whole = len(groups) == 1 and not prefills
        return Layout(
            [
                self._plan_decodes([decodes[member] for member in group], [firsts[member] for member in group], whole)
                for group in groups
            ],
            prefills,
        )

    def _first_key(self, position: int) -> int:
        return first_visible(position, self._spec.window, self._spec.chunk)

    def _runs(self, blocks: torch.Tensor) -> torch.Tensor:
        """Gather list of blocks `[G, blocks]`."""
        return (blocks.view(1, blocks.shape[0], 1, -1) * self._heads.numel() + self._heads).flatten()

    def _plan_decodes(self, members: list[tuple[int, int]], firsts: list[int], whole: bool) -> DecodeGroup:
        size = self._block_size
        skipped = [first // size for first in firsts]
        ends = [
            self._batch.context_lens_host[index] - skip * size
            for (index, _), skip in zip(members, skipped, strict=True)
        ]
        num_blocks = -(-max(ends) // size)
        tables = self._tables if whole else self._tables[torch.tensor([index for index, _ in members])]
        if any(skipped):
            columns = torch.tensor(skipped).unsqueeze(1) + torch.arange(num_blocks)
            blocks = tables.gather(1, columns.clamp_(max=tables.shape[1] - 1))
        else:
            blocks = tables[:, :num_blocks]
        heads = [first - skip * size for first, skip in zip(firsts, skipped, strict=True)]
        return DecodeGroup(
            rows=None if whole else torch.tensor([row for _, row in members]),
            runs=self._runs(blocks),
            mask=self._decode_mask(heads, ends, num_blocks * size),
            size=len(members),
            num_keys=num_blocks * size,
            unwritten=self._unwritten(ends, num_blocks * size),
        )

    def _unwritten(self, ends: list[int], num_keys: int) -> torch.Tensor | None:
        """What lies there may be no number, which no mask hides: nothing times NaN is NaN."""
        if all(end == num_keys for end in ends):
            return None
        sequences, keys = (torch.arange(num_keys) >= torch.tensor(ends).unsqueeze(1)).nonzero(as_tuple=True)
        num_heads = self._spec.num_kv_heads
        planes = torch.arange(self._heads.shape[0]).view(-1, 1) * (len(ends) * num_heads)
        heads = planes + torch.arange(num_heads)
        return ((sequences * num_heads + heads.unsqueeze(-1)) * num_keys + keys).flatten()

    def _decode_mask(self, starts: list[int], ends: list[int], num_keys: int) -> torch.Tensor | None:
        """Keys outside `starts` to `ends` hidden, `[G, 1, num_keys]`."""
        if not any(starts) and all(end == num_keys for end in ends):
            return None
        keys = torch.arange(num_keys)
        hidden = keys >= torch.tensor(ends).unsqueeze(1)
        if any(starts):
            hidden |= keys < torch.tensor(starts).unsqueeze(1)
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf")).unsqueeze(1)

    def _plan_prefill(self, index: int, start: int, stop: int) -> PrefillSequence:
        context = self._batch.context_lens_host[index]
        position = context - (stop - start)
        skip = self._first_key(position) // self._block_size
        runs = None
        if position > 0:
            runs = self._runs(self._tables[index : index + 1, skip : -(-context // self._block_size)])
        skipped = skip * self._block_size
        size = next(tile for keys, tile in _QUERY_TILES if context - skipped >= keys)
        tiles = [
            self._plan_tile(offset, min(offset + size, stop - start), position, skipped)
            for offset in range(0, stop - start, size)
        ]
        return PrefillSequence(start, stop, runs, context - skipped, skipped, tiles)

    def _plan_tile(self, start: int, stop: int, position: int, skipped: int) -> QueryTile:
        """Tile of queries `start` to `stop`, the first new token being at `position`."""
        first, last = self._first_key(position + start), position + stop
        narrowest = self._first_key(last - 1)
        covered = position + start if narrowest <= first else first  # all queries see the keys before this one
        mask = visible_mask(
            torch.arange(position + start, last),
            torch.arange(covered, last),
            self._spec.window,
            self._spec.chunk,
            self._dtype,
        )
        return QueryTile(start, stop, first - skipped, last - skipped, mask.unsqueeze(1))
