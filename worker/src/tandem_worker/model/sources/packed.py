"""A download becomes a packed copy of itself, which alone stays in the cache.

COMMIT.FORM/.original/    what was downloaded, until the packed copy is complete
COMMIT.FORM/.packed/      the packed copy while it is made and verified
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from tandem_api.launch import PackedForm

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.packed_folder import DamagedError, Form, read_list
from tandem_worker.model.lossless.contract import DifferentError, UsageError
from tandem_worker.model.lossless.packing import pack
from tandem_worker.model.lossless.unpacking import verify
from tandem_worker.model.sources.digest import MANIFEST

logger = logging.getLogger(__name__)

_PACKED = ".packed"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LEASE = "lease."


def pack_download(
    plain: Path, folder: Path, pack_form: PackedForm, digests: Mapping[str, str], repository: str
) -> None:
    """Pack the complete download in `plain` into `folder`, verified against the hub's `digests`. What an earlier try
    left there is removed. A model without safetensors files, or one that is packed already, is taken as it is.

    Raises StartupError WeightsCorrupt or DiskFull, and OSError.
    """
    for path in folder.iterdir():
        if path != plain and not path.name.startswith(_LEASE):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    started, form = time.monotonic(), cast("Form", pack_form.lower())
    scratch = folder / _PACKED
    try:
        report = pack(plain, scratch, form, leave_out=_is_of_the_cache)
        verify(scratch)
        _compare(scratch, digests)
    except UsageError as error:
        logger.info("%s is kept as it is: %s", repository, error)
        _copy(plain, scratch)
    except (DamagedError, DifferentError) as error:
        raise StartupError(
            "WeightsCorrupt", f"{repository} cannot be packed: {error} Set spec.model.cache.pack to None to load it."
        ) from error
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise StartupError(
            "DiskFull",
            f"The model cache has no room for {repository} and its packed copy, which are both there while it is "
            "packed: give spec.model.cache a larger claim, or set spec.model.cache.pack to None.",
        ) from error
    else:
        seconds = max(time.monotonic() - started, 1e-3)
        extra = {key: value for key, value in report.line(seconds).items() if value is not None}
        logger.info("packed and verified %s", repository, extra=extra)
    for path in scratch.iterdir():
        path.rename(folder / path.name)
    scratch.rmdir()


def _compare(packed: Path, digests: Mapping[str, str]) -> None:
    for name, record in read_list(packed).files.items():
        if _SHA256.fullmatch(digests.get(name, "")) and digests[name] != record.sha256:
            raise DamagedError(f"{name} is not what was downloaded.")


def _is_of_the_cache(name: str) -> bool:
    """Whether a file in a download's folder is the cache's own, and no part of the model."""
    return name == MANIFEST or name.startswith((_LEASE, ".cache/"))


def _copy(plain: Path, scratch: Path) -> None:
    shutil.copytree(
        plain,
        scratch,
        dirs_exist_ok=True,
        ignore=lambda _, names: [name for name in names if _is_of_the_cache(name)],
        copy_function=_link_or_copy,
    )


def _link_or_copy(source: str, target: str) -> None:
    """A second name, for what is complete is never written to; a copy where the file system has no such names."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
