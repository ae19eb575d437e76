"""Whether a checkpoint computes embeddings, from the files that sentence-transformers lays beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.files import is_inner_path
from tandem_worker.model.pooling import EmbeddingSpec, Pooling

MODULES = "modules.json"
_POOLINGS = {
    "pooling_mode_lasttoken": Pooling.LAST, "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS, "lasttoken": Pooling.LAST, "mean": Pooling.MEAN, "cls": Pooling.CLS,
}  # fmt: skip


def _is_folder_name(name: str) -> bool:
    return "/" not in name and is_inner_path(name)


def read_embedding_spec(folder: Path, hidden_size: int) -> EmbeddingSpec | None:
    """None for a model that generates text. Raises StartupError for a pipeline that cannot be served as it is."""
    path = folder / MODULES
    if not path.is_file():
        return None
    modules = _read(path, list)
    try:
        kinds = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (KeyError, TypeError) as error:
        raise StartupError("ConfigInvalid", f"{MODULES} must list modules with `type` and `path`.") from error
    if leading := [folder_name for _, folder_name in kinds if folder_name and not _is_folder_name(folder_name)]:
        raise StartupError("ConfigInvalid", f"{MODULES} names {leading[0]!r}, which is not a folder beside it.")
    names = [kind for kind, _ in kinds]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or kinds[0][1]:
        raise StartupError(
            "UnsupportedEmbedding",
            f"{MODULES} chains {', '.join(names)}. Supported is a Transformer at the top level, a Pooling and at most "
            "a Normalize module.",
        )
    config = _read(folder / kinds[1][1] / "config.json", dict)
    return EmbeddingSpec(pooling=_parse_pooling(config), normalize="Normalize" in names, size=hidden_size)


def _parse_pooling(config: Mapping[str, Any]) -> Pooling:
    """Two layouts are in use: a flag for each mode, and `pooling_mode` with the name of one."""
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if "pooling_mode" in config:
        chosen = [str(config["pooling_mode"])]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise StartupError(
            "UnsupportedEmbedding",
            f"The pooling configuration chooses {', '.join(chosen) or 'nothing'}. "
            "Supported is one of the last token, the mean, or the first token (cls).",
        )
    return _POOLINGS[chosen[0]]


def _read(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError("ConfigInvalid", f"{path.parent.name}/{path.name} cannot be read: {error}") from error
    if not isinstance(value, kind):
        raise StartupError("ConfigInvalid", f"{path.parent.name}/{path.name} must be a JSON {kind.__name__}.")
    return value
