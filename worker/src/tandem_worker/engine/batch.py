"""From a step's plan to the tensors of one `ForwardBatch`.

The block table of every running sequence lives in one row of a table that persists between steps; a step writes only
the entries that are new. A step in which all running sequences decode uses the table in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tandem_worker.control.plan import Chunk, StepPlan
from tandem_worker.control.request import Sequence
from tandem_worker.models.base import ForwardBatch


@dataclass(frozen=True, slots=True)
class LogitsLayout:
    """Which rows of the logits belong to whom. Decodes come first, in `sequences` order."""

    sequences: list[Sequence]
    """Whose next token is to be chosen."""
    rows: list[int] | None
    """Logits row of each of `sequences`; None: row i belongs to sequence i."""
    scored: list[tuple[Chunk, int]]
    """Chunks all of whose positions have logits, and the row of the first."""


class BlockTable:
    """Rows of block ids, padded with 0; on a GPU a copy there receives the same changes."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.host = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self._filled = [0] * max_rows
        self._device = device
        self._shared = torch.from_numpy(self.host)
        self._tensor = self._shared if device.type == "cpu" else self._shared.to(device)

    def sync(self, sequences: list[Sequence]) -> None:
        """Write what changed in these sequences' blocks since their last step."""
        dirty: list[tuple[int, int, int]] = []
        host, filled = self.host, self._filled
        for sequence in sequences:
            count, synced = len(sequence.block_ids), sequence.num_synced
            if count == synced:
                continue
            row = sequence.row
            host[row, synced:count] = sequence.block_ids[synced:]
            end = count
            if synced == 0:  # the row may have belonged to a longer sequence
                end = max(count, filled[row])
                host[row, count:end] = 0
            filled[row] = count
            sequence.num_synced = count
            dirty.append((row, synced, end))
        if dirty and self._tensor is not self._shared:
            self._upload(dirty)

    def _upload(self, dirty: list[tuple[int, int, int]]) -> None:
        width = self.host.shape[1]
        index = np.concatenate([np.arange(row * width + start, row * width + end) for row, start, end in dirty])
        values = self.host.reshape(-1)[index]
        target = self._tensor.view(-1)
        target[torch.from_numpy(index).to(self._device)] = torch.from_numpy(values).to(self._device)

    def select(self, rows: list[int], width: int) -> torch.Tensor:
        """`[len(rows), width]`; a view where the rows are the first ones in order."""
        if rows[-1] == len(rows) - 1 and rows == list(range(len(rows))):
            return self._tensor[: len(rows), :width]
        index = torch.tensor(rows, device=self._device)
        return self._tensor[:, :width].index_select(0, index)


class BatchBuilder:
    def __init__(self, *, max_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.table = BlockTable(max_rows, max_blocks, device)
        self._block_size = block_size
        self._device = device

    def build(
        self, plan: StepPlan, on_layer: Callable[[int], None] | None, chosen: torch.Tensor | None = None
    ) -> tuple[ForwardBatch, LogitsLayout]:
        """`chosen`: `[N]` tokens of the step under way, each at its sequence's `chosen_at`."""
        decodes = sorted(plan.decodes, key=_row_of)
        sequences = decodes + [chunk.sequence for chunk in plan.chunks]
        self.table.sync(sequences)
        tokens, positions, slots = self._decode_arrays(decodes)
        query_lens = [1] * len(decodes)
        context_lens = [position + 1 for position in positions]
        arrays = [np.array([tokens, positions, slots], dtype=np.int64)]
        for chunk in plan.chunks:
            arrays.append(self._chunk_arrays(chunk))
            query_lens.append(chunk.length)
            context_lens.append(chunk.end)
        layout, logits_rows = self._layout(decodes, plan.chunks)
        inputs = self._to_device(np.concatenate(arrays, axis=1) if plan.chunks else arrays[0])
        if min(tokens, default=0) < 0:
            assert chosen is not None
            self._fill_late(inputs[0], arrays[0][0], chosen)
        lengths = np.zeros((2, len(sequences) + 1), dtype=np.int32)
        np.cumsum(query_lens, out=lengths[0, 1:])
        lengths[1, :-1] = context_lens
        shape = self._to_device(lengths)
        batch = ForwardBatch(
            token_ids=inputs[0],
            positions=inputs[1],
            slot_mapping=inputs[2],
            block_tables=self.table.select(
                [sequence.row for sequence in sequences], -(-max(context_lens) // self._block_size)
            ),
            query_start=shape[0],
            context_lens=shape[1, :-1],
            logits_rows=self._to_device(np.array(logits_rows, dtype=np.int64)),
            query_lens_host=tuple(query_lens),
            context_lens_host=tuple(context_lens),
            on_layer=on_layer,
        )
        return batch, layout

    def _decode_arrays(self, decodes: list[Sequence]) -> tuple[list[int], list[int], list[int]]:
        size = self._block_size
        positions = [sequence.num_planned - 1 for sequence in decodes]
        tokens = [
            sequence.output[-1] if position < sequence.num_prompt + len(sequence.output) else ~sequence.chosen_at
            for sequence, position in zip(decodes, positions, strict=True)
        ]
        slots = [
            sequence.block_ids[position // size] * size + position % size
            for sequence, position in zip(decodes, positions, strict=True)
        ]
        return tokens, positions, slots

    def _fill_late(self, token_ids: torch.Tensor, known: np.ndarray, chosen: torch.Tensor) -> None:
        """Take the tokens that the host does not know yet from where they were chosen; `known` has `~place` there."""
        rows = np.flatnonzero(known < 0)
        places, count = ~known[rows], len(rows)
        if rows[-1] == count - 1 and np.array_equal(places, rows):
            token_ids[:count].copy_(chosen[:count])
        else:
            index = self._to_device(np.stack([rows, places]))
            token_ids[index[0]] = chosen[index[1]]

    def _chunk_arrays(self, chunk: Chunk) -> np.ndarray:
        """`[3, length]`: token ids, positions, slots. Chunks begin at a block boundary."""
        size = self._block_size
        arrays = np.empty((3, chunk.length), dtype=np.int64)
        arrays[0] = chunk.sequence.slice_tokens(chunk.start, chunk.end)
        positions = np.arange(chunk.start, chunk.end)
        arrays[1] = positions
        arrays[2] = self.table.host[chunk.sequence.row, positions // size] * np.int64(size) + positions % size
        return arrays

    @staticmethod
    def _layout(decodes: list[Sequence], chunks: list[Chunk]) -> tuple[LogitsLayout, list[int]]:
        """Who gets which logits, and the rows of T they come from."""
        sequences = list(decodes)
        rows = list(range(len(decodes)))
        logits_rows = list(rows)
        scored: list[tuple[Chunk, int]] = []
        first = len(decodes)
        for chunk in chunks:
            if chunk.sequence.request.reads_every_position and not chunk.sequence.output:
                scored.append((chunk, len(logits_rows)))
                logits_rows.extend(range(first, first + chunk.length))
            elif chunk.final:
                logits_rows.append(first + chunk.length - 1)
            if chunk.final:
                sequences.append(chunk.sequence)
                rows.append(len(logits_rows) - 1)
            first += chunk.length
        identity = rows == list(range(len(logits_rows)))
        return LogitsLayout(sequences, None if identity else rows, scored), logits_rows

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(array)
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)


def _row_of(sequence: Sequence) -> int:
    return sequence.row
