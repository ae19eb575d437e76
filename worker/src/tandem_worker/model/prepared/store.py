"""A folder of things that were prepared from models, each named by everything that it was made from.

It only saves time. What cannot be read or written is told once in the log, and the caller does without: a folder that
is read-only or full is no error. What is damaged is told, removed and made anew by the caller. Entries are written
beside their place and renamed, so a process that dies leaves nothing that is believed; what it leaves is removed later.
Any number of processes on any number of machines may share a folder: two that prepare the same write the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from xxhash import xxh64

from tandem_worker.host.folders import sync_folder
from tandem_worker.model.prepared.entry import CHUNK, DamagedError, Entry, file_size, make_tail, open_entry, sum_of

logger = logging.getLogger(__name__)

FOLDER = ".prepared"
"""Within the folder of models."""
MOST_BYTES = 64 << 30
"""Bytes of all entries together, unless the store is told otherwise."""
FREE_SHARE = 0.5
"""So much of what is free on the disk goes into one entry at most."""
_SMALL = 256 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,199}")
_UNFINISHED = ".unfinished-"
_ABANDONED_SECONDS = 3600.0
"""A file under way that nobody has written to for so long is nobody's."""
_SYNC_BYTES = 32 << 20
"""Written before the disk is waited for, so that what others write does not wait for all of a large entry."""

Value = TypeVar("Value")


class Room(NamedTuple):
    """Bytes that the store may still hold, and that are free on its disk."""

    left: int
    free: int

    def takes(self, size: int, free_share: float) -> bool:
        """Whether an entry of `size` bytes fits."""
        return size <= self.left and size <= self.free * free_share


def open_store(cache_dir: str | Path) -> PreparedStore:
    """The store of the models in `cache_dir`."""
    return PreparedStore(Path(cache_dir) / FOLDER)


class PreparedStore:
    """Entries are bytes under names of letters, digits and `. _ = + -`. Safe to use from any thread."""

    def __init__(self, folder: Path, *, max_bytes: int = MOST_BYTES, free_share: float = FREE_SHARE) -> None:
        """The folder is made by the first write."""
        self.folder = folder
        self._max_bytes = max_bytes
        self._free_share = free_share
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def read(self, name: str) -> bytes | None:
        """What was written under `name`, up to 256 MiB; None where there is nothing that can be used."""
        entry = self.open(name, _SMALL)
        if entry is None:
            return None
        try:
            return self._try_reading(name, entry.read, entry)
        finally:
            entry.close()

    def write(self, name: str, payload: bytes) -> bool:
        """Keep `payload` under `name`. False, and told in the log, where that is not possible."""
        return self.stream(name, len(payload), [memoryview(payload)])

    def open(self, name: str, limit: int | None = None) -> Entry | None:
        """An entry whose payload, at most `limit` bytes, the caller reads and checks; it closes it in the end. While
        it is open this machine's other processes remove it for no other's sake. Report damage to `discard`."""
        path = self._path(name)
        most = self._max_bytes if limit is None else min(limit, self._max_bytes)
        entry = self._try_reading(name, lambda: open_entry(path, name, most))
        if entry is not None:
            with contextlib.suppress(OSError):  # file systems without locks: an open file stays readable all the same
                fcntl.flock(entry.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            with contextlib.suppress(OSError):  # the time of use; a read-only folder keeps none
                os.utime(entry.descriptor)
        return entry

    def stream(self, name: str, size: int, pieces: Iterable[memoryview]) -> bool:
        """As `write`, for `size` bytes that come in pieces, none of which is kept longer than until the next."""
        path = self._path(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            if not self._make_room(path, file_size(size)):
                return False
            self._write_file(path, name, size, pieces)
        except OSError as error:
            self._tell("write", "%s cannot be kept in %s, so each start prepares it anew: %s", name, self.folder, error)
            return False
        return True

    def discard(self, entry: Entry, why: object) -> None:
        """Remove an entry that turned out to be damaged, unless another has taken its place."""
        logger.warning("%s in %s is damaged and is prepared anew: %s", entry.name, self.folder, why)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(entry.descriptor), entry.path.stat(follow_symlinks=False)):
                entry.path.unlink()

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an entry")
        return self.folder / name

    def _try_reading(self, name: str, read: Callable[[], Value], entry: Entry | None = None) -> Value | None:
        try:
            return read()
        except FileNotFoundError:
            return None
        except DamagedError as error:
            if entry is not None:
                self.discard(entry, error)
                return None
            logger.warning("%s in %s is damaged and is prepared anew: %s", name, self.folder, error)
            with contextlib.suppress(OSError):
                self._path(name).unlink()
        except OSError as error:
            self._tell("read", "%s in %s cannot be read, so it is prepared anew: %s", name, self.folder, error)
        return None

    def _write_file(self, path: Path, name: str, size: int, pieces: Iterable[memoryview]) -> None:
        unfinished = self.folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                sums = bytearray()
                for chunk in _write_chunks(descriptor, pieces):
                    sums += chunk
                written = os.lseek(descriptor, 0, os.SEEK_CUR)
                if written != size:
                    raise ValueError(f"{written} bytes came for the {size} of {name}")
                _write_all(descriptor, memoryview(make_tail(name, size, bytes(sums))))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            unfinished.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        with contextlib.suppress(OSError):  # what is lost is prepared anew
            sync_folder(self.folder)

    def _make_room(self, path: Path, size: int) -> bool:
        """Whether `size` bytes may be written to `path`, entries that nobody has used for longest being removed."""
        disk = os.statvfs(self.folder)
        files = [(file, status) for file, status in self._files() if file != path]
        finished = [(file, status) for file, status in files if not file.name.startswith(_UNFINISHED)]
        # A file that takes another's place does so in the end: until then both lie on the disk.
        room = Room(self._max_bytes - sum(status.st_size for _, status in files), disk.f_bavail * disk.f_frsize)
        for file, status in sorted(finished, key=lambda entry: entry[1].st_mtime):
            if room.takes(size, self._free_share):
                break
            if size <= self._max_bytes and _remove_unused(file):
                room = Room(room.left + status.st_size, room.free + status.st_size)
        if not room.takes(size, self._free_share):
            self._tell(
                f"room {path.name}",
                "%s is not kept, so each start prepares it anew: %.1f MB are wanted, %s may hold %.1f MB in all and an "
                "entry %.0f%% of the %.1f MB that are free on its disk",
                path.name, size / 1e6, self.folder, self._max_bytes / 1e6, self._free_share * 100, room.free / 1e6,
            )  # fmt: skip
            return False
        return True

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for file in self.folder.iterdir():
            with contextlib.suppress(OSError):
                yield file, file.stat(follow_symlinks=False)

    def _remove_abandoned(self) -> None:
        for file, status in self._files():
            if file.name.startswith(_UNFINISHED) and abs(time.time() - status.st_mtime) > _ABANDONED_SECONDS:
                with contextlib.suppress(OSError):
                    file.unlink()

    def _tell(self, what: str, message: str, *values: object) -> None:
        with self._lock:
            if what in self._told:
                return
            self._told.add(what)
        logger.warning(message, *values)


def _write_chunks(descriptor: int, pieces: Iterable[memoryview]) -> Iterator[bytes]:
    """Writes all pieces; yields the sum of each chunk."""
    running, room, unsynced = xxh64(), CHUNK, 0
    for whole in pieces:
        piece = whole.cast("B")
        while piece:
            part, piece = piece[:room], piece[room:]
            running.update(part)
            _write_all(descriptor, part)
            room -= len(part)
            if not room:
                yield sum_of(running)
                running, room, unsynced = xxh64(), CHUNK, unsynced + CHUNK
                if unsynced >= _SYNC_BYTES:
                    os.fdatasync(descriptor)
                    unsynced = 0
    if room < CHUNK:
        yield sum_of(running)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _remove_unused(file: Path) -> bool:
    """Whether the entry is gone; one that a process of this machine is reading stays."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with contextlib.suppress(OSError):  # file systems without locks: whoever reads it keeps what it has opened
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        file.unlink()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
