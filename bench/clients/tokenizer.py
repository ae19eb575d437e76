"""The demo model's tokenizer as files, which other people's programs read."""

from __future__ import annotations

from pathlib import Path

from e2e.model import find_model


def save_tokenizer(folder: Path) -> None:
    """Writes it to `folder` as transformers would."""
    from transformers import PreTrainedTokenizerFast

    path = find_model()
    found = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    found.save_pretrained(folder)
