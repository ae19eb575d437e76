"""The way in: which scheme a model URI has, and who serves it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tandem_api.launch import ModelSource, WorkerConfig

from tandem_worker.host.errors import StartupError
from tandem_worker.model.sources.claim import resolve_claim
from tandem_worker.model.sources.contract import WeightOrigin
from tandem_worker.model.sources.file import resolve_file
from tandem_worker.model.sources.huggingface import resolve_hub

if TYPE_CHECKING:
    from tandem_worker.host.files.exchange import FileExchange

_ORIGINS: dict[str, WeightOrigin] = {"hf": resolve_hub, "pvc": resolve_claim, "file": resolve_file}


def resolve_model(source: ModelSource, token: str | None = None, exchange: FileExchange | None = None) -> Path:
    """The folder or file that `source` names, downloaded if need be, from other workers too where there is an
    `exchange`. Raises StartupError."""
    scheme, separator, _ = source.uri.partition("://")
    if not separator or scheme not in _ORIGINS:
        known = ", ".join(f"{name}://" for name in _ORIGINS)
        raise StartupError("UnsupportedModelURI", f"The model URI {source.uri!r} must begin with one of {known}.")
    return _ORIGINS[scheme](source, token, exchange)


def resolve_draft(config: WorkerConfig, token: str | None = None) -> Path | None:
    """The files of the draft head that `config` names; None where it names none. Raises StartupError."""
    head = config.speculative.head
    if head is None:
        return None
    try:
        return resolve_model(head.model_copy(update={"cache_dir": config.model.cache_dir}), token)
    except StartupError as error:
        said = str(error).replace("spec.model.", "spec.engine.speculative.draft.")
        raise StartupError(error.reason, f"The draft head cannot be fetched: {said}") from error
