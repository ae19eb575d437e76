"""How the files of one commit are cut into chunks, the same in every worker. Pure.

Chunks are numbered through all files. Groups are neighbouring chunks of one file: what one request to a hub asks for.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

_MIN_CHUNK = 1 << 20
_MAX_CHUNK = 8 << 20
_CHUNKS_WANTED = 256
"""Chunks of a small model, so that several starters have something to do."""
_GROUPS_WANTED = 128
_MAX_GROUP = 8
"""64 MiB at most in one request: its round trips are few, and what dies with a connection is little."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    path: str
    """Inside the model's folder."""
    size: int
    digest: str
    """As the hub announces it: SHA-256 or the id of a git blob."""


@dataclass(frozen=True, slots=True)
class FileChunk:
    index: int
    file: int
    offset: int
    """Inside the file."""
    size: int


class Layout:
    """The chunks of a model. Equal fingerprints: equal repositories, commits, files, digests and chunks."""

    def __init__(self, repository: str, commit: str, files: Iterable[SharedFile]) -> None:
        self.files = tuple(sorted(files, key=lambda file: file.path))
        self.total_bytes = sum(file.size for file in self.files)
        self.chunk_bytes = _chunk_bytes(self.total_bytes)
        self._first = [0]
        for file in self.files:
            self._first.append(self._first[-1] + -(-file.size // self.chunk_bytes))
        self.num_chunks = self._first[-1]
        self.fingerprint = self._fingerprint(repository, commit)
        self.groups = tuple(self._groups())
        """The chunks' numbers of each group."""

    def chunk(self, index: int) -> FileChunk:
        """Raises IndexError when there is no such chunk."""
        if not 0 <= index < self.num_chunks:
            raise IndexError(index)
        file = bisect.bisect_right(self._first, index) - 1
        offset = (index - self._first[file]) * self.chunk_bytes
        return FileChunk(index, file, offset, min(self.chunk_bytes, self.files[file].size - offset))

    def chunks_of(self, file: int) -> range:
        """The numbers of a file's chunks; an empty file has none."""
        return range(self._first[file], self._first[file + 1])

    def _groups(self) -> Iterable[range]:
        size = max(1, min(_MAX_GROUP, self.num_chunks // _GROUPS_WANTED))
        for file in range(len(self.files)):
            chunks = self.chunks_of(file)
            yield from (chunks[start : start + size] for start in range(0, len(chunks), size))

    def _fingerprint(self, repository: str, commit: str) -> str:
        entries = [[file.path, file.size, file.digest] for file in self.files]
        text = json.dumps(["tandem-files 1", repository, commit, self.chunk_bytes, entries])
        return hashlib.sha256(text.encode()).hexdigest()


def _chunk_bytes(total: int) -> int:
    size = _MIN_CHUNK
    while size < _MAX_CHUNK and total > size * _CHUNKS_WANTED:
        size *= 2
    return size
