"""What packing, unpacking and verifying have in common."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tandem_worker.host.errors import WorkerError
from tandem_worker.host.folders import sync_folder
from tandem_worker.model.checkpoint.files import is_inner_path
from tandem_worker.model.checkpoint.packed_folder import FileRecord, Form

PIECE = 4 << 20


class UsageError(WorkerError):
    """What was asked for cannot be done. The message says what to do instead."""


class DifferentError(WorkerError):
    """A file is not what it was said to be. The message names it."""


@dataclass(slots=True)
class Report:
    """What was done, as the tool's last line has it."""

    form: Form
    original_bytes: int = 0
    packed_bytes: int = 0
    tensors: int = 0
    packed_tensors: int = 0
    weights: int = field(default=0, repr=False)
    bytes_of_weights: int = field(default=0, repr=False)

    def add(self, record: FileRecord) -> None:
        """Count a file."""
        self.original_bytes += record.size
        self.packed_bytes += record.size_here
        if record.packed is not None:
            self.tensors += record.packed.tensors
            self.packed_tensors += record.packed.packed_tensors
            self.weights += record.packed.packed_weights
            self.bytes_of_weights += record.packed.packed_bytes

    def line(self, seconds: float) -> dict[str, object]:
        """`bitsPerWeight` is of packed tensors; null where there are none."""
        return {
            "form": self.form,
            "originalBytes": self.original_bytes,
            "packedBytes": self.packed_bytes,
            "tensors": self.tensors,
            "packedTensors": self.packed_tensors,
            "bitsPerWeight": round(8 * self.bytes_of_weights / self.weights, 4) if self.weights else None,
            "seconds": round(seconds, 3),
        }


def list_files(folder: Path) -> dict[str, Path]:
    """Every file in `folder` by its path there, sorted. Links to files count as files, as in a hub's cache.

    Raises UsageError for what could not be given back: links to folders, sockets, names that are no plain path.
    """
    found: dict[str, Path] = {}
    for root, folders, files in os.walk(folder, onerror=_refuse):
        for name in sorted(folders):
            if Path(root, name).is_symlink():
                raise UsageError(f"{Path(root, name)} is a link to a folder: copy what is there in its place.")
        for name in files:
            path = Path(root, name)
            inside = path.relative_to(folder).as_posix()
            if not path.is_file():
                raise UsageError(f"{path} is no file: remove it from the model's folder.")
            if not is_inner_path(inside):
                raise UsageError(f"The name of {path} cannot be kept: rename the file.")
            found[inside] = path
    return dict(sorted(found.items()))


def _refuse(error: OSError) -> None:
    raise error


def check_folders(source: Path, target: Path) -> None:
    """Raises UsageError unless `source` is a folder and `target` is empty or not there, neither within the other,
    and another folder can take the place of `target`."""
    if not source.is_dir():
        raise UsageError(f"{source} is no folder: name the one that holds the model.")
    inner, outer = source.resolve(), target.resolve()
    if target.is_symlink() or (outer.exists() and not outer.is_dir()):
        raise UsageError(f"{target} is there already and no folder: name another target.")
    if outer.is_dir() and any(outer.iterdir()):
        raise UsageError(f"{target} is not empty: name a folder that is empty or not there yet.")
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise UsageError(f"{source} and {target} must not lie within each other.")
    if outer == Path.cwd() or outer.is_mount():
        raise UsageError(
            f"{target} is a volume, or where you are, and cannot be replaced: name a new folder within it."
        )


@contextlib.contextmanager
def complete_or_not_at_all(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place once the block is left without an exception; else it is removed."""
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        scratch.chmod(0o755)
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            if path.is_dir():
                sync_folder(path)
        scratch.rename(target)  # an empty folder is replaced
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def copy_file(source: Path, target: Path) -> FileRecord:
    """Copy it, and hash what was copied."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as file, target.open("xb") as copy:
        while piece := file.read(PIECE):
            digest.update(piece)
            copy.write(piece)
            size += len(piece)
        copy.flush()
        os.fsync(copy.fileno())
    return FileRecord(size=size, sha256=digest.hexdigest())


def hash_file(path: Path) -> str:
    """SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
