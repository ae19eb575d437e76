"""A row of a whole model has the bits of a decoded one where it is a guess, alone and with others."""

from __future__ import annotations

import pytest
import torch
from tandem_worker.model.backends.triton.layers import MAX_EXACT_ROWS
from tandem_worker.model.contract import allocate_kv_cache

from bench.gpu.random_model import SMALL, build_random_model
from bench.gpu.steps import BLOCK_SIZE, build_decode_batch

WIDTHS, LENGTHS = [5, 1, 2], [258, 40, 18]
"""Together fewer rows than are exact; one sequence's guesses are on both sides of a cut."""


@pytest.mark.usefixtures("rows_alike")
def test_checked_rows_have_the_bits_of_decoded_ones(half_dtype, device):
    model = build_random_model({**SMALL, "num_hidden_layers": 1, "vocab_size": 64}, device, half_dtype)
    assert model.exact_rows == MAX_EXACT_ROWS >= sum(WIDTHS)
    generator = torch.Generator().manual_seed(3)
    per_sequence = -(-max(LENGTHS) // BLOCK_SIZE)
    tables = (torch.randperm(3 * per_sequence, generator=generator) + 1).view(3, per_sequence)
    cache = allocate_kv_cache(model.kv_cache_spec(BLOCK_SIZE), 3 * per_sequence + 1, device)
    with torch.inference_mode():
        for layer in cache.layers:
            layer.copy_(torch.randn(layer.shape, generator=generator).to(layer))
        batch = build_decode_batch(model, tables, LENGTHS, generator, WIDTHS)
        checked = model.forward(batch, cache)
        lengths = (batch.positions + 1).tolist()
        owners = torch.arange(len(WIDTHS)).repeat_interleave(torch.tensor(WIDTHS))
        for rows in ([*range(sum(WIDTHS))], [1], [4]):  # each as a sequence of its own
            own = build_decode_batch(model, tables[owners[rows]], [lengths[row] for row in rows], generator)
            own.token_ids.copy_(batch.token_ids[rows])
            assert torch.equal(model.forward(own, cache), checked[rows]), rows
