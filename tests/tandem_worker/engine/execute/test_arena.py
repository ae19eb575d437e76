"""What activations take, counted while a forward pass runs."""

from __future__ import annotations

import subprocess
import sys

import torch
from tandem_worker.engine.execute.arena import AllocationCounter, measure_arena, measure_recordings

from tests.tandem_worker.engine.execute.test_cuda_graphs import PaddedModel
from tests.tandem_worker.engine.history_model import HistoryModel


def test_the_peak_counts_what_is_held_at_once() -> None:
    with AllocationCounter() as counter:
        kept = torch.zeros(1000)  # 4000 bytes
        for _ in range(5):
            kept = kept + 1  # the old and the new one at a time
        view = kept[:10]
        del kept
        more = torch.zeros(500)
        more.add_(1)
    assert counter.peak == 8000
    assert view.numel() + more.numel() == 510


def test_what_was_there_before_is_not_counted() -> None:
    before = torch.zeros(1000)
    with AllocationCounter() as counter:
        before.mul_(2)
        before[:10].add_(1)
        before.view(10, 100)
    assert counter.peak == 0


class WideModel(HistoryModel):
    """Allocates 100 bytes per token."""

    def _check(self, batch: object) -> None: ...

    def forward(self, batch, kv_cache):
        scratch = torch.empty(batch.token_ids.shape[0], 25)
        logits = super().forward(batch, kv_cache)
        del scratch
        return logits


def test_the_arena_grows_with_tokens_and_holds_the_logits() -> None:
    def measure(model: HistoryModel, tokens: int, rows: int) -> int:
        return measure_arena(model, max_batch_tokens=tokens, max_rows=rows, block_size=4)

    plain, wide = HistoryModel(), WideModel()
    extra = measure(wide, 3200, 8) - measure(plain, 3200, 8)
    assert 300_000 <= extra <= 320_000
    row = plain.vocab_size * 4
    assert measure(plain, 64, 16) - measure(plain, 64, 8) == 8 * row


def test_recordings_hold_their_inputs_and_logits_beside_their_activations() -> None:
    def measure(model: HistoryModel, rows: int, length: int = 64) -> int:
        return measure_recordings(model, max_rows=rows, max_model_len=length, block_size=4)

    plain, wide = PaddedModel(), WideModel()
    assert measure(wide, 80) - measure(plain, 80) == 80 * 100
    row = plain.vocab_size * 4
    assert measure(plain, 80) - measure(plain, 40) > 40 * 2 * row, "the recording's own logits and the shared ones"
    table = measure(plain, 8, 6400) - measure(plain, 8, 64)
    assert table >= 8 * (6400 - 64), "one int32 for four tokens"


COUNT = """
import sys, torch
from tandem_worker.engine.execute.arena import AllocationCounter
with AllocationCounter() as counter:
    torch.zeros(1000) + 1
assert counter.peak == 8000, counter.peak
sys.exit("torch._dynamo" in sys.modules)
"""


def test_counting_does_not_load_the_compiler() -> None:
    """It would take seconds of every worker's start, and memory for as long as it runs."""
    assert subprocess.run([sys.executable, "-c", COUNT], check=False).returncode == 0
