"""From a step's plan to the tensors of one `ForwardBatch`, in two halves.

`describe` turns a plan into a `StepInput`: flat host arrays without anything that follows from the rest. `assemble`
turns that into tensors. Every rank of a group assembles the same description; only the first one describes.

The block table of every running sequence lives in one row of a table that persists between steps; a step writes only
the entries that are new. A step in which all running sequences decode uses the table in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from tandem_worker.engine.sample.contract import CheckedRows
from tandem_worker.engine.schedule.plan import Chunk, StepPlan
from tandem_worker.engine.schedule.request import Sequence
from tandem_worker.host.uploads import upload, upload_rows
from tandem_worker.model.contract import ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One step over B sequences with T new tokens. Positions and slots follow from lengths and the block table."""

    copies: np.ndarray  # [C, 2] int64, (source, target) blocks, copied before anything else
    token_ids: np.ndarray  # [T] int64; `~place` where only the device knows the token: see `BatchBuilder.assemble`
    rows: np.ndarray  # [B] int64, each sequence's row of the block table
    query_lens: np.ndarray  # [B] int64
    context_lens: np.ndarray  # [B] int64, new tokens included
    logits_rows: np.ndarray  # [N] int64, rows of T, ascending
    table_runs: np.ndarray  # [R, 3] int64: row, first column and end of what changed in the block table
    table_values: np.ndarray  # block ids of these runs, one run after another
    num_decodes: int  # leading sequences whose tokens are their newest ones and guesses behind it


Wave = dict[Sequence, tuple[int, int]]
"""The n-th guesses of a step, by sequence: the token, and the row of its logits."""


@dataclass(slots=True)
class LogitsLayout:
    """Which rows of the logits belong to whom. Decodes come first, in `sequences` order."""

    sequences: list[Sequence]
    """Those whose next token is to be chosen."""
    rows: list[int] | None
    """Logits row of each of `sequences`; None: row i belongs to sequence i."""
    scored: list[tuple[Chunk, int]]
    """Chunks all of whose positions have logits, and the row of the first."""
    waves: list[Wave]
    """The first guesses of all sequences that have any, then the second ones, and so on."""
    _checked: list[CheckedRows] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def checked(self) -> list[CheckedRows]:
        """The sequences and their guesses, in order. Made once: the launch of a step on a GPU asks, and its end."""
        if self._checked is None:
            guesses: dict[Sequence, tuple[int, ...]] = {}
            for wave in self.waves:
                for sequence, (guess, _) in wave.items():
                    guesses[sequence] = (*guesses.get(sequence, ()), guess)
            rows = range(len(self.sequences)) if self.rows is None else self.rows
            self._checked = [
                CheckedRows(sequence, row, guesses.get(sequence, ()))
                for sequence, row in zip(self.sequences, rows, strict=True)
            ]
        return self._checked


class BlockTable:
    """Rows of block ids, padded with 0; on a GPU a copy there receives the same changes."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.host = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self._filled = [0] * max_rows
        self._device = device
        self._shared = torch.from_numpy(self.host)
        self._tensor = self._shared if device.type == "cpu" else self._shared.to(device)

    def sync(self, sequences: list[Sequence]) -> list[tuple[int, int, int]]:
        """Write what changed in these sequences' blocks since their last step: `(row, first column, end)` each."""
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
        return dirty

    def read(self, runs: list[tuple[int, int, int]]) -> np.ndarray:
        """The block ids of these runs, one run after another."""
        if not runs:
            return np.zeros(0, dtype=np.int32)
        return np.concatenate([self.host[row, start:end] for row, start, end in runs])

    def write(self, runs: np.ndarray, values: np.ndarray) -> None:
        """Apply what another rank's `sync` found; where it was this table's own, only the device's copy lacks it."""
        if not len(runs):
            return
        width = self.host.shape[1]
        index = np.concatenate([np.arange(row * width + start, row * width + end) for row, start, end in runs])
        self.host.reshape(-1)[index] = values
        if self._tensor is not self._shared:
            target = self._tensor.view(-1)
            values = values.astype(np.int32, copy=False)
            target[upload(index, self._device)] = upload(values, self._device)

    def select(self, rows: np.ndarray, width: int) -> torch.Tensor:
        """`[len(rows), width]`; a view where the rows are the first ones in order."""
        if rows[-1] == len(rows) - 1 and bool((rows == np.arange(len(rows))).all()):
            return self._tensor[: len(rows), :width]
        return self._tensor[:, :width].index_select(0, upload(rows, self._device))


class BatchBuilder:
    def __init__(self, *, max_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.table = BlockTable(max_rows + 1, max_blocks, device)  # the last row stays 0
        self._block_size = block_size
        self._device = device

    def describe(self, plan: StepPlan) -> tuple[StepInput, LogitsLayout]:
        """The plan as arrays: what is computed, and which rows of logits belong to whom.

        Decodes come before chunks. Takes the sequences' new blocks into the block table, so each plan is described
        once, in the order of the steps.
        """
        decodes = sorted(plan.decodes, key=_row_of)
        chunks = plan.chunks
        sequences = decodes + [chunk.sequence for chunk in chunks]
        runs = self.table.sync(sequences)
        ends, guesses = [sequence.num_planned for sequence in decodes], plan.guesses
        widths = [1 + len(guesses.get(sequence, ())) for sequence in decodes] if guesses else [1] * len(decodes)
        newest = _newest_tokens(decodes, [end - width for end, width in zip(ends, widths, strict=True)])
        if guesses:
            pairs = zip(decodes, newest, strict=True)
            newest = [token for each, first in pairs for token in (first, *guesses.get(each, ()))]
        tokens = [np.array(newest, dtype=np.int64)]
        tokens += [np.asarray(chunk.sequence.slice_tokens(chunk.start, chunk.end), dtype=np.int64) for chunk in chunks]
        layout, logits_rows = self._layout(decodes, widths, chunks, guesses)
        step = StepInput(
            copies=np.array(plan.copies, dtype=np.int64).reshape(-1, 2),
            token_ids=np.concatenate(tokens) if chunks else tokens[0],
            rows=np.array([sequence.row for sequence in sequences], dtype=np.int64),
            query_lens=np.array(widths + [chunk.length for chunk in chunks], dtype=np.int64),
            context_lens=np.array(ends + [chunk.end for chunk in chunks], dtype=np.int64),
            logits_rows=np.array(logits_rows, dtype=np.int64),
            table_runs=np.array(runs, dtype=np.int64).reshape(-1, 3),
            table_values=self.table.read(runs),
            num_decodes=len(decodes),
        )
        return step, layout

    def describe_padding(self) -> StepInput:
        """One token that is written to block 0 and whose logits nobody wants."""
        none = np.zeros(0, dtype=np.int64)
        return StepInput(
            copies=none.reshape(0, 2),
            token_ids=np.zeros(1, dtype=np.int64),
            rows=np.array([len(self.table.host) - 1]),
            query_lens=np.ones(1, dtype=np.int64),
            context_lens=np.ones(1, dtype=np.int64),
            logits_rows=none,
            table_runs=none.reshape(0, 3),
            table_values=none,
            num_decodes=0,
        )

    def assemble(
        self,
        step: StepInput,
        on_layer: Callable[[int], None] | None = None,
        chosen: torch.Tensor | None = None,
        *,
        before_layer: Callable[[int], None] | None = None,
        on_compute: Callable[[], None] | None = None,
    ) -> ForwardBatch:
        """`chosen`: `[N]` tokens of the step under way, each at its sequence's `chosen_at`."""
        self.table.write(step.table_runs, step.table_values)
        size, query_lens, context_lens = self._block_size, step.query_lens, step.context_lens
        num_tokens, num_sequences = len(step.token_ids), len(query_lens)
        query_start = np.zeros(num_sequences + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start[1:])
        positions, rows = context_lens - 1, step.rows
        if num_tokens != num_sequences:
            positions = np.arange(num_tokens) + np.repeat(context_lens - query_start[1:], query_lens)
            rows = np.repeat(rows, query_lens)
        slots = self.table.host[rows, positions // size] * np.int64(size) + positions % size
        token_ids, there, slot_mapping = upload_rows([step.token_ids, positions, slots], np.int64, self._device)
        starts, contexts, *ids = upload_rows(
            [query_start, context_lens] + ([] if self._device.type == "cpu" else [_sequence_ids(query_lens)]),
            np.int32,
            self._device,
        )
        if int(step.token_ids.min()) < 0:
            assert chosen is not None
            self._fill_late(token_ids, step.token_ids, chosen)
        return ForwardBatch(
            token_ids=token_ids,
            positions=there,
            slot_mapping=slot_mapping,
            block_tables=self.table.select(step.rows, -(-int(context_lens.max()) // size)),
            query_start=starts,
            context_lens=contexts,
            logits_rows=upload(step.logits_rows, self._device),
            query_lens_host=tuple(query_lens.tolist()),
            context_lens_host=tuple(context_lens.tolist()),
            has_padding=bool((slots < size).any()),
            num_decodes=step.num_decodes,
            sequence_ids=ids[0] if ids else None,
            before_layer=before_layer,
            on_layer=on_layer,
            on_compute=on_compute,
        )

    def _fill_late(self, token_ids: torch.Tensor, known: np.ndarray, chosen: torch.Tensor) -> None:
        """Take the tokens that the host does not know yet from where they were chosen; `known` has `~place` there."""
        rows = np.flatnonzero(known < 0)
        places, count = ~known[rows], len(rows)
        if rows[-1] == count - 1 and np.array_equal(places, rows):
            token_ids[:count].copy_(chosen[:count])
        else:
            index = upload(np.stack([rows, places]), self._device)
            token_ids[index[0]] = chosen[index[1]]

    @staticmethod
    def _layout(
        decodes: list[Sequence], widths: list[int], chunks: list[Chunk], guesses: dict[Sequence, tuple[int, ...]]
    ) -> tuple[LogitsLayout, list[int]]:
        """Who gets which logits, and the rows of T they come from."""
        sequences = list(decodes)
        *rows, first = itertools.accumulate(widths, initial=0)
        waves = _find_waves(decodes, rows, guesses) if guesses else []
        logits_rows = list(range(first))
        scored: list[tuple[Chunk, int]] = []
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
        return LogitsLayout(sequences, None if identity else rows, scored, waves), logits_rows


def _newest_tokens(decodes: list[Sequence], positions: list[int]) -> list[int]:
    """The token at each position; `~place` where the host does not know it yet."""
    return [
        sequence.output[-1] if position < sequence.num_prompt + len(sequence.output) else ~sequence.chosen_at
        for sequence, position in zip(decodes, positions, strict=True)
    ]


def _sequence_ids(query_lens: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(query_lens)), query_lens)


def _find_waves(decodes: list[Sequence], rows: list[int], guesses: dict[Sequence, tuple[int, ...]]) -> list[Wave]:
    """`rows` has those of the newest tokens, whose guesses follow them."""
    waves: list[Wave] = []
    for sequence, row in zip(decodes, rows, strict=True):
        for depth, token in enumerate(guesses.get(sequence, ()), start=1):
            if depth > len(waves):
                waves.append({})
            waves[depth - 1][sequence] = token, row + depth
    return waves


def _row_of(sequence: Sequence) -> int:
    return sequence.row
