"""What can go wrong between two workers."""

from __future__ import annotations

from tandem_worker.host.errors import WorkerError


class TransferError(WorkerError):
    """Blocks could not be moved: the peer is gone, refused, or sent data that fails its checksum."""


class IntegrityError(TransferError):
    """What arrived fails its sum, or is not what was ordered. `kind` is one word for metrics."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class QuotaError(TransferError):
    """A peer asks for more at a time than one peer, or all of them, may have."""
