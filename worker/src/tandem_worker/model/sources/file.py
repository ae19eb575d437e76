"""`file:///path`: a folder or a GGUF file inside the container."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from tandem_api.launch import ModelSource

from tandem_worker.host.errors import StartupError

if TYPE_CHECKING:
    from tandem_worker.host.files.exchange import FileExchange


def resolve_file(source: ModelSource, token: str | None = None, exchange: FileExchange | None = None) -> Path:
    """`file:///PATH` in the worker's container. Raises StartupError ModelNotFound, UnsupportedModelURI."""
    path = Path(unquote(source.uri.removeprefix("file://")))
    if not path.is_absolute():
        raise StartupError("UnsupportedModelURI", f"{source.uri!r} must name an absolute path: file:///PATH.")
    if ".." in path.parts:
        raise StartupError(
            "UnsupportedModelURI", f"{source.uri!r} must not have '..' in its path: write it from the root."
        )
    if not path.exists():
        raise StartupError("ModelNotFound", f"There is no {path} in the worker's container.")
    return path
