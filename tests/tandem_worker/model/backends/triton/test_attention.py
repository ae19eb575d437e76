"""The GPU backend can be imported anywhere, and hands the kernels what the CPU backend computes.

On a CPU the kernels' own dispatch runs their twins, so the adaptation is tested without a GPU.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from tandem_worker.model.attention import AttentionSpec, LatentSpec
from tandem_worker.model.backends.latent import plan_expanded
from tandem_worker.model.backends.torch.attention import TorchAttention
from tandem_worker.model.backends.triton import attention as triton
from tandem_worker.model.backends.triton.attention import TritonAttention, TritonStepAttention
from tandem_worker.model.contract import ForwardBatch


def make_batch(lengths: list[tuple[int, int]]) -> ForwardBatch:
    """Sequences of (new tokens, context), sequence i in blocks 5 i + 1 and following of 4 tokens."""
    positions = [position for new, context in lengths for position in range(context - new, context)]
    owners = [index for index, (new, _) in enumerate(lengths) for _ in range(new)]
    tables = torch.arange(len(lengths) * 5, dtype=torch.int32).view(-1, 5) + 1
    slots = [
        int(tables[owner, position // 4]) * 4 + position % 4 for owner, position in zip(owners, positions, strict=True)
    ]
    starts = torch.tensor([0, *(new for new, _ in lengths)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ForwardBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        block_tables=tables,
        query_start=starts,
        context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32),
        logits_rows=starts[1:].long() - 1,
        query_lens_host=tuple(new for new, _ in lengths),
        context_lens_host=tuple(context for _, context in lengths),
    )


@pytest.mark.parametrize("lengths", [[(1, 7), (1, 18)], [(3, 9), (1, 4), (6, 6)]], ids=["decodes", "mixed"])
def test_equals_the_cpu_backend(lengths) -> None:
    torch.manual_seed(2)
    batch = make_batch(lengths)
    total = batch.token_ids.shape[0]
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=24, scale=0.2)
    cache = torch.randn(20, 2, 2, 4, 24)
    kv, q = torch.randn(total, 2, 2, 24), torch.randn(total, 4, 24)
    results = []
    for backend in (TorchAttention(), TritonAttention()):
        step, own = backend.begin(batch, 4), cache.clone()
        step.write(kv, own)
        results.append((step.attend(q, kv, own, spec), own))
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-5, rtol=1e-5)
    assert torch.equal(results[1][1], results[0][1])


def latent_spec() -> LatentSpec:
    """Rank 16, 8 rotated dimensions, heads with 6 others and values of 10."""
    attention = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=24, scale=0.2, value_dim=16)
    return LatentSpec(attention=attention, expand=torch.randn(4, 16, 16), nope_dim=6)


@pytest.mark.parametrize(
    ("lengths", "room", "expanded"),
    [
        ([(1, 7), (1, 18)], 1000, []),
        ([(8, 9), (1, 4), (6, 6)], 1000, [0, 2]),
        ([(8, 9), (1, 4), (6, 6)], 8, [2]),
        ([(8, 9), (1, 4), (6, 6)], 0, []),
        ([(6, 6), (20, 20)], 1000, [0, 1]),
    ],
    ids=["decodes", "mixed", "little room", "no room", "prompts"],
)
def test_latents_attend_alike_in_either_form(lengths, room, expanded, monkeypatch) -> None:
    torch.manual_seed(2)
    batch, spec = make_batch(lengths), latent_spec()
    monkeypatch.setattr(triton, "_MAX_EXPANDED_BYTES", room * spec.expand[..., 0].nbytes)
    cache = torch.randn(20, 4, 24)
    total = batch.token_ids.shape[0]
    kv, queries = torch.randn(total, 1, 1, 24), torch.randn(total, 4, 14)
    results = []
    for backend in (TorchAttention(), TritonAttention()):
        step, own = backend.begin(batch, 4), cache.clone()
        step.write(kv, own)
        results.append((step.attend_latents(queries, kv, own, spec), own))
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-4, rtol=1e-4)
    assert torch.equal(results[1][1], results[0][1])
    assert isinstance(step, TritonStepAttention)
    rows = None if step._latent_plan is None else step._latent_plan.rows
    starts = [0, *itertools.accumulate(new for new, _ in lengths)]
    chosen = [] if rows is None else rows.tolist()
    assert chosen == [row for index in expanded for row in range(starts[index], starts[index + 1])]


@pytest.mark.parametrize(
    ("queries", "context", "expand"),
    [(1, 100_000, False), (64, 100_000, False), (256, 100_000, True), (2048, 2048, True), (4, 4, True)],
)
def test_the_form_with_fewer_operations_is_chosen_at_deepseeks_sizes(queries, context, expand) -> None:
    attention = AttentionSpec(num_heads=128, num_kv_heads=1, head_dim=576, scale=0.1, value_dim=512)
    spec = LatentSpec(attention=attention, expand=torch.empty(128, 256, 512, device="meta"), nope_dim=128)
    assert plan_expanded([queries], [context], spec, max_tokens=1 << 30) == ([0] if expand else [])
