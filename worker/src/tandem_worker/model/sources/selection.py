"""Which files of a hub repository are needed. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.files import PACKED_LIST

_SIDE_FILES = frozenset(
    {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "tiktoken.model",
        "chat_template.json", "chat_template.jinja", "model.safetensors.index.json", "modules.json", PACKED_LIST,
    }
)  # fmt: skip
_POOLING = re.compile(r"\d+_Pooling/config\.json")
"""How an embedding model pools. `modules.json` names the folder."""
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_GGUF_PREFERENCE = (
    "BF16", "F16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "F32",
)  # fmt: skip
"""The most exact first; F32 is twice the size of the published weights and no better."""


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    path: str
    size: int
    sha256: str | None = None
    """The content's digest; the hub announces it for large files."""
    git_blob: str | None = None
    """Git's SHA-1, for the others."""


def select_files(files: Iterable[RepositoryFile], repository: str) -> list[RepositoryFile]:
    """Configuration, tokenizer, and one set of weights: safetensors when there are any, else one GGUF file.

    Raises StartupError NoWeights.
    """
    files = list(files)
    top = [file for file in files if "/" not in file.path]
    weights = _select_safetensors(top) or _select_gguf(top)
    if not weights:
        raise StartupError(
            "NoWeights", f"The repository {repository} has neither *.safetensors nor *.gguf files at its top level."
        )
    names = {file.path for file in weights}
    side = [file for file in top if file.path in _SIDE_FILES and file.path not in names]
    side += (file for file in files if _POOLING.fullmatch(file.path))
    return sorted(side, key=lambda file: file.path) + weights


def _select_safetensors(files: list[RepositoryFile]) -> list[RepositoryFile]:
    """One file or the shards of the index; other layouts of the same weights and adapters are left out."""
    candidates = sorted((file for file in files if file.path.endswith(".safetensors")), key=lambda file: file.path)
    for wanted in (lambda name: name == "model.safetensors", _SHARD.fullmatch):
        if chosen := [file for file in candidates if wanted(file.path)]:
            return chosen
    return [file for file in candidates if not file.path.startswith(("consolidated", "adapter_"))]


def _select_gguf(files: list[RepositoryFile]) -> list[RepositoryFile]:
    candidates = [file for file in files if file.path.endswith(".gguf") and not file.path.startswith("mmproj")]
    return sorted(candidates, key=lambda file: (_preference(file.path), file.size, file.path))[:1]


def _preference(name: str) -> int:
    upper = name.upper()
    for rank, kind in enumerate(_GGUF_PREFERENCE):
        if re.search(rf"(?<![A-Z0-9]){kind}(?![A-Z0-9_])", upper):
            return rank
    return len(_GGUF_PREFERENCE)
