"""The GPU backend can be imported anywhere, and hands the kernels what the CPU backend computes.

On a CPU the kernels' own dispatch runs their twins, so the adaptation is tested without a GPU.
"""

from __future__ import annotations

import pytest
import torch
from tandem_worker.attention.base import AttentionSpec
from tandem_worker.attention.cpu import CPUAttention
from tandem_worker.attention.triton import TritonAttention
from tandem_worker.models.base import ForwardBatch


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


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latents"])
@pytest.mark.parametrize("lengths", [[(1, 7), (1, 18)], [(3, 9), (1, 4), (6, 6)]], ids=["decodes", "mixed"])
def test_equals_the_cpu_backend(lengths, latent) -> None:
    torch.manual_seed(2)
    batch = make_batch(lengths)
    total = batch.token_ids.shape[0]
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=1 if latent else 2, head_dim=24, scale=0.2, value_dim=16 if latent else None
    )
    shape = (20, 4, 24) if latent else (20, 2, 2, 4, 24)
    cache = torch.randn(shape)
    kv = torch.randn(total, 1, 1, 24) if latent else torch.randn(total, 2, 2, 24)
    q = torch.randn(total, 4, 24)
    results = []
    for backend in (CPUAttention(), TritonAttention()):
        step, own = backend.begin(batch, 4), cache.clone()
        step.write(kv, own)
        results.append((step.attend(q, kv, own, spec), own))
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-5, rtol=1e-5)
    assert torch.equal(results[1][1], results[0][1])
