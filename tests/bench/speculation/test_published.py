"""The draft head in the repository is one for the model that its folder names."""

from __future__ import annotations

from pathlib import Path

from tandem_worker.model.draft.load import check_draft
from tandem_worker.model.load import open_checkpoint

from e2e.model import find_model

HEAD = Path(__file__).parents[3] / "bench/speculation/smollm2"
MOST_BYTES = 24 << 20


def test_the_head_fits_smollm2() -> None:
    config, _ = open_checkpoint(find_model())
    check_draft(HEAD, config)
    assert sum(file.stat().st_size for file in HEAD.iterdir()) < MOST_BYTES
