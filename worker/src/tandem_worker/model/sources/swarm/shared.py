"""A commit's files as workers share them: downloaded together, offered when they are there."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem_worker.host.files.exchange import FileExchange
from tandem_worker.host.files.layout import Layout, SharedFile
from tandem_worker.host.files.share import SharedFiles
from tandem_worker.host.files.wire import MAX_CHUNKS
from tandem_worker.model.sources.digest import MANIFEST
from tandem_worker.model.sources.selection import RepositoryFile
from tandem_worker.model.sources.swarm.download import HubFailedError, SharedDownload
from tandem_worker.model.sources.swarm.hub import HubRanges, NoRangesError
from tandem_worker.model.sources.swarm.parts import read_sums

logger = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Without one a file cannot be told from what somebody else says it is: it comes from the hub."""


def download(
    files: Sequence[RepositoryFile],
    folder: Path,
    exchange: FileExchange,
    ranges: HubRanges,
    *,
    verify: Callable[[Path, RepositoryFile], bool],
    on_progress: Callable[[int], None],
    check: Callable[[], None],
) -> list[RepositoryFile]:
    """Get files from other workers and the hub, each verified. Returns those that only the hub can give.

    Raises StartupError, OSError of the disk, ThreadStartError, and what the hub's client raises.
    """
    ours = {file.path: file for file in files if _DIGEST.fullmatch(file.sha256 or file.git_blob or "")}
    layout = Layout(ranges.repository, ranges.commit, [_shared(file) for file in ours.values()])
    if layout.num_chunks > MAX_CHUNKS:
        return list(files)
    task = SharedDownload(
        layout,
        folder,
        exchange,
        ranges,
        verify=lambda number, path: verify(path, ours[layout.files[number].path]),
        on_progress=on_progress,
        check=check,
    )
    try:
        task.run()
    except HubFailedError as error:
        raise (error.__cause__ or error) from error
    except NoRangesError as error:
        logger.warning("%s: the hub alone is asked, for whole files", error)
        return list(files)
    logger.info(
        "%.1f MB came from other workers, %.1f MB from the hub",
        task.received["peer"] / 1e6, task.received["hub"] / 1e6,
    )  # fmt: skip
    return [file for file in files if file.path not in ours]


def offer_folder(exchange: FileExchange, folder: Path, repository: str, commit: str) -> None:
    """Offer a complete download to other workers. What cannot be read of it is told and not offered."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        found = [
            SharedFile(path, (folder / path).stat().st_size, digest)
            for path, digest in manifest["files"].items()
            if isinstance(digest, str) and _DIGEST.fullmatch(digest)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s is offered to no other worker, its manifest cannot be read: %s", folder, error)
        return
    layout = Layout(repository, commit, found)
    if exchange.offers(layout):
        return
    share = SharedFiles(layout, {number: folder / file.path for number, file in enumerate(layout.files)})
    for number in range(len(layout.files)):
        sums = read_sums(layout, folder, number)
        for place, index in enumerate(layout.chunks_of(number)):
            if sums is None:
                share.add(index)
            else:
                share.add(index, sums[place])
    exchange.offer(share)


def _shared(file: RepositoryFile) -> SharedFile:
    return SharedFile(file.path, file.size, file.sha256 or file.git_blob or "")
