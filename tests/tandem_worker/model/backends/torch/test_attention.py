"""CPU attention against the kernels' plain-torch twins, over random block orders, lengths and options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tandem_worker.kernels.reference import paged_prefill_attention_reference
from tandem_worker.model.attention import AttentionSpec
from tandem_worker.model.backends.torch import attention as cpu
from tandem_worker.model.backends.torch.attention import TorchAttention
from tandem_worker.model.backends.torch.layout import group_by_length
from tandem_worker.model.contract import ForwardBatch

NUM_BLOCKS, BLOCK_SIZE, DIM = 200, 4, 8


def make_batch(lengths: list[tuple[int, int]]) -> ForwardBatch:
    """Sequences of (new tokens, context) with blocks in random order."""
    generator = torch.Generator().manual_seed(len(lengths))
    order = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()
    width = max(-(-context // BLOCK_SIZE) for _, context in lengths)
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    positions, slots, starts = [], [], [0]
    for index, (new, context) in enumerate(lengths):
        blocks = [order.pop() for _ in range(-(-context // BLOCK_SIZE))]
        tables[index, : len(blocks)] = torch.tensor(blocks)
        for position in range(context - new, context):
            positions.append(position)
            slots.append(blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(starts[-1] + new)
    return ForwardBatch(
        token_ids=torch.zeros(starts[-1], dtype=torch.int64),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        block_tables=tables,
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32),
        logits_rows=torch.tensor(starts[1:]) - 1,
        query_lens_host=tuple(new for new, _ in lengths),
        context_lens_host=tuple(context for _, context in lengths),
    )


MIXED = [(1, 9), (1, 120), (5, 5), (1, 1), (70, 90), (1, 8), (3, 64), (130, 130)]
DECODES = [(1, 9), (1, 12), (1, 40)]
OPTIONS: list[dict[str, Any]] = [{}, {"window": 6}, {"window": 70}, {"chunk": 8}, {"chunk": 50}]


def poison(cache: torch.Tensor, batch: ForwardBatch, number: float) -> torch.Tensor:
    """A copy in which `number` stands wherever no sequence has a token."""
    slots = [
        int(block) * BLOCK_SIZE + offset
        for table, context in zip(batch.block_tables, batch.context_lens_host, strict=True)
        for index, block in enumerate(table)
        for offset in range(BLOCK_SIZE)
        if index * BLOCK_SIZE + offset < context
    ]
    poisoned = torch.full_like(cache, number)
    for slot in slots:
        block, offset = divmod(slot, BLOCK_SIZE)
        poisoned[block, :, :, offset] = cache[block, :, :, offset]
    return poisoned


def attend_both(
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    heads: tuple[int, int],
    options: dict[str, Any],
    garbage: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and the twin's output for random inputs; ours sees `garbage` where no sequence has a token."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    num_heads, num_kv_heads = heads
    batch = make_batch(lengths)
    total = batch.token_ids.shape[0]
    cache = torch.randn(NUM_BLOCKS, 2, num_kv_heads, BLOCK_SIZE, DIM).to(dtype)
    q = torch.randn(total, num_heads, DIM).to(dtype)
    kv = torch.randn(total, 2, num_kv_heads, DIM).to(dtype)
    spec = AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=DIM, scale=0.3, **options)
    step = TorchAttention().begin(batch, BLOCK_SIZE)
    step.write(kv, cache)
    ours = step.attend(q, kv, cache if garbage is None else poison(cache, batch, garbage), spec)
    twin = paged_prefill_attention_reference(
        q.float(),
        cache.float(),
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        scale=0.3,
        **{name: value for name, value in options.items() if name in {"window", "chunk", "sinks"}},
    )
    return ours.float(), twin.flatten(1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_twin(lengths, options, dtype) -> None:
    ours, twin = attend_both(lengths, dtype, (6, 2), options)
    assert float((ours - twin).norm() / twin.norm()) < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 3e38], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"window": 6}, {"chunk": 8}, {"sinks": torch.zeros(6)}], ids=["", "w", "c", "s"]
)
@pytest.mark.parametrize("lengths", [MIXED, DECODES, [(1, 300), (1, 301)]], ids=["mixed", "decodes", "long"])
def test_what_lies_past_a_context_has_no_say(lengths, options, garbage) -> None:
    ours, twin = attend_both(lengths, torch.float32, (6, 2), options, garbage)
    assert float((ours - twin).norm() / twin.norm()) < 1e-5


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_head_counts(heads) -> None:
    ours, twin = attend_both(MIXED, torch.float32, heads, {})
    assert float((ours - twin).norm() / twin.norm()) < 1e-5


@pytest.mark.parametrize("lengths", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_sinks(lengths) -> None:
    ours, twin = attend_both(lengths, torch.float32, (6, 2), {"sinks": torch.randn(6), "window": 20})
    assert float((ours - twin).norm() / twin.norm()) < 1e-5


def test_groups_that_outgrow_the_cache_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_GROUP_BYTES", 2 * 2 * DIM * 4 * 130)  # 130 keys
    ours, twin = attend_both([(1, 60)] * 9, torch.float32, (6, 2), {})
    assert float((ours - twin).norm() / twin.norm()) < 1e-5


def test_written_tokens_reach_their_slots_only() -> None:
    batch = make_batch(MIXED)
    cache = torch.zeros(NUM_BLOCKS, 2, 2, BLOCK_SIZE, DIM)
    kv = torch.randn(batch.token_ids.shape[0], 2, 2, DIM)
    TorchAttention().begin(batch, BLOCK_SIZE).write(kv, cache)
    rows = cache.permute(0, 3, 1, 2, 4).flatten(0, 1)
    assert torch.equal(rows[batch.slot_mapping], kv)
    rows[batch.slot_mapping] = 0
    assert not rows.any()


@pytest.mark.parametrize(
    ("lengths", "max_keys", "expected"),
    [
        ([], 1000, []),
        ([10, 10, 10], 1000, [[0, 1, 2]]),
        ([10, 5000, 4900], 100000, [[1, 2], [0]]),
        ([100, 100, 100], 200, [[0, 1], [2]]),
        ([300], 200, [[0]]),
    ],
)
def test_group_by_length(lengths, max_keys, expected) -> None:
    assert group_by_length(lengths, max_keys) == expected
