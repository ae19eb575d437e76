"""A share of `make soak-kv`: damage anywhere between two workers changes no answer and fails no request."""

from __future__ import annotations

import torch

from tests.tandem_worker.transfer.flip_soak import run_flips


def test_flipped_bits_change_no_answer() -> None:
    torch.set_num_threads(1)
    outcome = run_flips(400, seed=3, every_bytes=20_000)
    assert (outcome.wrong, outcome.failed) == (0, 0)
    assert outcome.flips >= 10, "the proxy damages"
    assert outcome.remote >= 40, "what is not damaged is used"
    assert outcome.decode is not None
    assert outcome.prefill is not None
    found = [outcome.decode.integrity_failures[kind] for kind in ("header", "body", "block")]
    assert sum(found) + sum(outcome.prefill.integrity_failures.values()) > 0
