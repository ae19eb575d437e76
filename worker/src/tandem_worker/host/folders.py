"""Folders on the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NOT_SYNCED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
"""What file systems say that do not let a folder be synced."""


def sync_folder(folder: Path) -> None:
    """Have names in `folder` survive a crash of the machine, where its file system can. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SYNCED:
            raise
    finally:
        os.close(descriptor)
