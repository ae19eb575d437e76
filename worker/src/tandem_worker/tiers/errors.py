"""Errors of tiers.

WorkerError
└── TierError      the tier cannot be used now; `reason` says why in a word, the message in a sentence
"""

from __future__ import annotations

import errno

from tandem_worker.host.errors import WorkerError

VOLUME_FULL, VOLUME_READ_ONLY, VOLUME_GONE = "VolumeFull", "VolumeReadOnly", "VolumeGone"
VOLUME_IN_USE, VOLUME_TOO_SMALL, VOLUME_FAILED = "VolumeInUse", "VolumeTooSmall", "VolumeFailed"
VOLUME_SLOW, VOLUME_FROZEN = "VolumeSlow", "VolumeFrozen"
STORE_UNREACHABLE, STORE_FROZEN, STORE_FULL = "StoreUnreachable", "StoreFrozen", "StoreFull"
STORE_SLOW, STORE_FAILED, STORE_MISSING = "StoreSlow", "StoreFailed", "MooncakeMissing"
PEERS_FAILING = "PeersFailing"
STORE_HOLDER_FAILED, STORE_DISK_FULL = "StoreHolderFailed", "StoreDiskFull"
_REASONS = {
    errno.ENOSPC: VOLUME_FULL,
    errno.EDQUOT: VOLUME_FULL,
    errno.EFBIG: VOLUME_FULL,
    errno.EROFS: VOLUME_READ_ONLY,
    errno.EACCES: VOLUME_READ_ONLY,
    errno.EPERM: VOLUME_READ_ONLY,
    errno.ENOENT: VOLUME_GONE,
    errno.ENOTDIR: VOLUME_GONE,
    errno.ESTALE: VOLUME_GONE,
    errno.ENODEV: VOLUME_GONE,
}


class TierError(WorkerError):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def describe(error: OSError, what: str) -> TierError:
    """`what` failed: an error with the reason that goes with the system's number."""
    reason = _REASONS.get(error.errno or 0, VOLUME_FAILED)
    return TierError(reason, f"{what}: {error.strerror or error}")
