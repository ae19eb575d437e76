"""Decode steps as recorded graphs: one per number of rows, replayed without launching kernels one by one.

A recording reads and writes fixed tensors. A step copies its inputs into them, replays the smallest recording that is
large enough, and takes the first rows of its logits; where rows are exact up to some number (`CausalLM.exact_rows`), it
is not padded beyond that. Rows beyond the batch are padding: sequences of one token at position 0 that is written to
block 0 and read from there. Which rows belong to which sequence is in those tensors too, so a recording of as many rows
serves sequences with guesses behind their newest tokens. A model may be recorded when its forward pass on the device
depends on tensors alone, not on the batch's host-side lengths; those say the maximum while recording, so grids cover
any step.

A start waits for the sizes that its first requests need; the others are recorded between steps. A recording computes
its step twice before, on the same fixed tensors: they are made padding first, or what an earlier step left in them
would be written to blocks that hold something else by now.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from tandem_worker.host.collector import paused_collector
from tandem_worker.model.contract import CausalLM, ForwardBatch, KVCache


class Recorder(Protocol):
    """Records a function of fixed tensors; what it returns repeats the function on their present content."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """The replay, and the tensor that holds the result after each one."""
        ...

    def memory_bytes(self) -> int:
        """Bytes of the device's memory that everything together takes now."""
        ...


class CudaRecorder:
    """Recordings of one device share a memory pool: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        """One for all: cuBLAS keeps a workspace of 32 MiB for each stream that it was ever called on."""
        self._pool: Any = None

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and fills the allocator before anything is recorded
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads do on the device meanwhile, moving blocks for peers for one, is none of the recording's.
        # What the collector would free on this one is: a recording that ends meanwhile makes this one void.
        with (
            paused_collector(),
            torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
        ):
            result = run()
        self._pool = self._pool or graph.pool()
        return graph.replay, result

    def memory_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


@dataclass(frozen=True, slots=True)
class _Recording:
    batch: ForwardBatch
    replay: Callable[[], None]
    logits: torch.Tensor


def plan_batch_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 up to 64, of 16 up to 256, of 32 beyond: at most an eighth is padding above 64."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_rows + 32, 32)]
    kept = [size for size in sizes if size < max_rows]
    return [*kept, max_rows]


class DecodeGraphs:
    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        *,
        max_blocks: int,
        batch_sizes: Sequence[int],
        recorder: Recorder,
        num_later: int = 0,
    ) -> None:
        """Records the sizes, in rows, largest first so that smaller ones fit into its memory; the `num_later` largest
        of them are left to `record_next`. Under inference mode.

        All read the same tensors and leave their logits in the same one: block tables and logits of each would hold
        hundreds of MB for good.
        """
        ordered = sorted(batch_sizes)
        num_now = len(ordered) - num_later
        self.pending: list[int] = ordered[num_now:]
        """Sizes that are still to be recorded, in the reverse of their order."""
        self._sizes: list[int] = []
        self._recordings: dict[int, _Recording] = {}
        self._model, self._kv_cache, self._recorder = model, kv_cache, recorder
        largest = ordered[-1]
        self._inputs = build_static_batch(largest, max_blocks, kv_cache.spec.block_size, model.device)
        self._count = torch.arange(largest + 1, dtype=torch.int32, device=model.device)
        self._exact_rows = model.exact_rows if model.exact_rows > 1 else 0
        self._has_guesses = False
        """Sequences in the fixed tensors have several rows."""
        self._logits = torch.empty((largest, model.vocab_size), dtype=torch.float32, device=model.device)
        for size in reversed(ordered[:num_now]):
            self._record(size)

    def record_next(self) -> int:
        """Record one of the pending sizes, and say which; under inference mode. Even if it fails it pends no more.

        Raises what recording raises: for want of memory torch.OutOfMemoryError.
        """
        size = self.pending.pop()
        self._record(size)
        return size

    def _record(self, size: int) -> None:
        model, kv_cache = self._model, self._kv_cache
        batch, out = _first_rows(self._inputs, size), self._logits[:size]
        _clear(self._inputs, 0, 0)
        self._divide(self._inputs, None)
        replay, logits = self._recorder.record(lambda: out.copy_(model.forward(batch, kv_cache), non_blocking=True))
        self._recordings[size] = _Recording(batch, replay, logits)
        insort(self._sizes, size)

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Logits of a step of decodes and guesses, valid until the next call; None when no recording fits."""
        count = batch.token_ids.shape[0]
        index = bisect_left(self._sizes, count)
        if index == len(self._sizes) or not batch.is_decode_with_guesses or batch.logits_rows.shape[0] != count:
            return None
        if count <= self._exact_rows < self._sizes[index]:  # padding would make a row's bits others
            return None
        recording = self._recordings[self._sizes[index]]
        _fill(recording.batch, batch)
        self._divide(recording.batch, batch)
        recording.replay()
        return recording.logits[:count]

    def _divide(self, static: ForwardBatch, batch: ForwardBatch | None) -> None:
        """Say which rows of the fixed tensors belong to which sequence: as in `batch`, and one for each of the others.

        Sequences that have no rows left begin at the end.
        """
        ids, starts, count = static.sequence_ids, static.query_start, self._count
        assert ids is not None
        if batch is None or batch.is_decode:
            if self._has_guesses:
                self._inputs.query_start.copy_(count)
                assert self._inputs.sequence_ids is not None
                self._inputs.sequence_ids.copy_(count[:-1])
                self._has_guesses = False
            return
        self._has_guesses = True
        rows, sequences, size = batch.token_ids.shape[0], len(batch.query_lens_host), ids.shape[0]
        ids[:rows].copy_(batch.find_sequence_ids(), non_blocking=True)
        ids[rows:].copy_(count[sequences : sequences + size - rows], non_blocking=True)
        starts[: sequences + 1].copy_(batch.query_start, non_blocking=True)
        padding = sequences + 1 + size - rows
        starts[sequences + 1 : padding].copy_(count[rows + 1 : size + 1], non_blocking=True)
        starts[padding:].fill_(size)


def build_static_batch(size: int, max_blocks: int, block_size: int, device: torch.device) -> ForwardBatch:
    """Decodes of `size` sequences at position 0 of block 0, whose host-side lengths are the longest there are.

    They may be fewer sequences with several rows each when it is replayed, so nothing may be recorded by their number.
    """
    return ForwardBatch(
        token_ids=torch.zeros(size, dtype=torch.int64, device=device),
        positions=torch.zeros(size, dtype=torch.int64, device=device),
        slot_mapping=torch.zeros(size, dtype=torch.int64, device=device),
        block_tables=torch.zeros((size, max_blocks), dtype=torch.int32, device=device),
        query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
        context_lens=torch.ones(size, dtype=torch.int32, device=device),
        logits_rows=torch.arange(size, dtype=torch.int64, device=device),
        query_lens_host=(1,) * size,
        context_lens_host=(max_blocks * block_size,) * size,
        has_padding=True,
        sequence_ids=torch.arange(size, dtype=torch.int32, device=device),
    )


def _first_rows(batch: ForwardBatch, size: int) -> ForwardBatch:
    """The first sequences of a batch of decodes: views."""
    return replace(
        batch,
        token_ids=batch.token_ids[:size],
        positions=batch.positions[:size],
        slot_mapping=batch.slot_mapping[:size],
        block_tables=batch.block_tables[:size],
        query_start=batch.query_start[: size + 1],
        context_lens=batch.context_lens[:size],
        logits_rows=batch.logits_rows[:size],
        query_lens_host=batch.query_lens_host[:size],
        context_lens_host=batch.context_lens_host[:size],
        sequence_ids=None if batch.sequence_ids is None else batch.sequence_ids[:size],
    )


def _fill(static: ForwardBatch, batch: ForwardBatch) -> None:
    """Copy a step's inputs. Entries of a table row beyond its context are never read, so old ones may stay."""
    rows, sequences = batch.token_ids.shape[0], batch.context_lens.shape[0]
    for target, source in (
        (static.token_ids, batch.token_ids),
        (static.positions, batch.positions),
        (static.slot_mapping, batch.slot_mapping),
    ):
        target[:rows].copy_(source, non_blocking=True)
    static.context_lens[:sequences].copy_(batch.context_lens, non_blocking=True)
    static.block_tables[:sequences, : batch.block_tables.shape[1]].copy_(batch.block_tables, non_blocking=True)
    _clear(static, rows, sequences)


def _clear(static: ForwardBatch, first_row: int, first_sequence: int) -> None:
    """Make padding of the rows and sequences from these on."""
    for target in (static.token_ids, static.positions, static.slot_mapping):
        target[first_row:].zero_()
    static.context_lens[first_sequence:].fill_(1)
    static.block_tables[first_sequence:, :1].zero_()
