"""The model's tokenizer, chat template included. Loads no weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_worker.host.errors import StartupError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def leave_torch_out() -> None:
    """Let transformers find no torch in this process, from now on. Others import it as before.

    Its tokenizers do without. Where it finds torch it loads compilers, sharding and kernels along with the first
    configuration: two seconds of computing and 150 MB in every worker, for nothing.
    """
    from transformers.utils.import_utils import is_torch_available

    torch = sys.modules.get("torch")
    is_torch_available.cache_clear()
    sys.modules["torch"] = None  # type: ignore[assignment] - "not installed", to whoever looks for it
    try:
        is_torch_available()  # remembers what it found
    finally:
        del sys.modules["torch"]
        if torch is not None:
            sys.modules["torch"] = torch


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
