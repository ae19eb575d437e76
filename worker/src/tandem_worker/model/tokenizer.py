"""The way to a model's tokenizer, chat template included. Loads no weights, and no torch."""

from __future__ import annotations

from pathlib import Path

from tandem_worker.host.errors import StartupError
from tandem_worker.model.tokenization.conversion import PreparedFiles, convert
from tandem_worker.model.tokenization.folder import NAMES, read_folder
from tandem_worker.model.tokenization.gguf import build_tokenizer, read_metadata
from tandem_worker.model.tokenization.tokenizer import Tokenizer


def load_tokenizer(path: Path, prepared: PreparedFiles | None = None) -> Tokenizer:
    """The tokenizer of the model at `path` (a folder or a GGUF file).

    What only transformers can read it converts, in a process of its own; `prepared` keeps the result between starts.
    Any thread. Raises StartupError when there is no tokenizer.
    """
    try:
        gguf = _gguf_beside(path)
        if gguf is None:
            return read_folder(path) or convert(path, None, 0, prepared)
        metadata = read_metadata(gguf)
        # Files beside it are asked first, in ways that transformers knows.
        alone = not any((gguf.parent / name).exists() for name in NAMES)
        return (build_tokenizer(metadata.values) if alone else None) or convert(path, gguf, metadata.size, prepared)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError("TokenizerInvalid", f"The model's tokenizer cannot be loaded: {error}") from error


def _gguf_beside(path: Path) -> Path | None:
    """The GGUF file to take the tokenizer from; a folder's own tokenizer files come first."""
    if path.is_file():
        return path
    if any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    files = sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None
