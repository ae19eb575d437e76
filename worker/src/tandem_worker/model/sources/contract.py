"""The contract of a weight source: from a `ModelSource` to a folder or file on this machine.

Reasons of the `StartupError`s that sources raise (they become conditions of the InferenceModel):

    ModelNotFound       there is no such repository, claim path or file
    RevisionNotFound    the repository has no such branch, tag or commit
    AccessDenied        the hub wants a token, or refuses the one it was given
    HubUnreachable      the hub cannot be reached or fails
    DiskFull            the cache folder has no room for the download
    CacheNotWritable    the cache folder cannot be written to
    HubAnswerInvalid    the hub's answer names a commit or a file that is none
    CacheInvalid        a file of the cache folder is a link that leads out of it
    DownloadCorrupt     what arrived is not what the hub announced, twice in a row
    WeightsCorrupt      what was downloaded cannot be packed, because its files are none
    NoWeights           the repository has neither safetensors nor GGUF files
    WeightsUnreadable   a file of the model cannot be read
    UnsupportedModelURI the scheme of the URI is none of ours
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tandem_api.launch import ModelSource

if TYPE_CHECKING:
    from tandem_worker.host.files.exchange import FileExchange


class WeightOrigin(Protocol):
    """One URI scheme."""

    def __call__(self, source: ModelSource, token: str | None, exchange: FileExchange | None) -> Path:
        """Make the model available locally: a folder, or a GGUF file. Blocks; safe to be killed at any point.

        What is downloaded comes from other workers too, and is offered to them, where there is an `exchange`.

        Raises StartupError with one of the reasons above.
        """
        ...
