"""`pvc://CLAIM/path`: a folder or a GGUF file on a persistent volume claim, which the operator mounts read-only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from tandem_api import names
from tandem_api.launch import ModelSource

from tandem_worker.host.errors import StartupError

if TYPE_CHECKING:
    from tandem_worker.host.files.exchange import FileExchange


def resolve_claim(
    source: ModelSource,
    token: str | None = None,
    exchange: FileExchange | None = None,
    *,
    claims: str = names.MODEL_CLAIMS_PATH,
) -> Path:
    """`pvc://CLAIM/PATH`: the path inside the mounted claim. Raises StartupError ModelNotFound, UnsupportedModelURI."""
    claim, _, inside = unquote(source.uri.removeprefix("pvc://")).partition("/")
    root = Path(claims, claim)
    if not claim or not root.is_dir():
        raise StartupError("ModelNotFound", f"The claim {claim!r} is not mounted in the worker's container.")
    path = root / inside.strip("/")
    if ".." in path.parts:
        raise StartupError("UnsupportedModelURI", f"{source.uri!r} must not lead out of the claim with '..'.")
    if not path.exists():
        raise StartupError("ModelNotFound", f"The claim {claim!r} has no {inside!r}.")
    return path
