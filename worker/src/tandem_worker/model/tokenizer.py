"""The model's tokenizer, chat template included. Loads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tandem_worker.host.errors import StartupError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the model at `path` (a folder or a GGUF file). Raises StartupError when there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    gguf = _gguf_beside(path)
    try:
        if gguf is not None:  # AutoTokenizer reads the weights' header as well and takes ten times as long
            folder, name = str(gguf.parent), gguf.name
            return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=name, local_files_only=True)
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise StartupError("TokenizerInvalid", f"The model's tokenizer cannot be loaded: {error}") from error


def _gguf_beside(path: Path) -> Path | None:
    """The GGUF file to take the tokenizer from; a folder's own tokenizer files come first."""
    if path.is_file():
        return path
    if any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    files = sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None
