"""The source of a packed folder back, and whether it would come back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from tandem_worker.model.checkpoint.files import is_packed
from tandem_worker.model.checkpoint.packed_file import PackedFile
from tandem_worker.model.checkpoint.packed_folder import (
    LIST,
    DamagedError,
    FileRecord,
    PackedList,
    read_list,
)
from tandem_worker.model.lossless.contract import (
    DifferentError,
    Report,
    UsageError,
    check_folders,
    complete_or_not_at_all,
    copy_file,
    hash_file,
    list_files,
)


def unpack(source: Path, target: Path) -> Report:
    """Every file that was packed into the folder `source`, with its SHA-256, to `target`: complete, or not at all.

    Raises UsageError, DamagedError, OSError.
    """
    check_folders(source, target)
    told = _open(source)
    with complete_or_not_at_all(target) as scratch:
        for name, record in told.files.items():
            path, to = source / name, scratch / name
            if record.packed is None:
                found = copy_file(_present(path, name), to).sha256
            else:
                to.parent.mkdir(parents=True, exist_ok=True)
                with to.open("xb") as out:
                    found = _give_back(path, name, record, told, out.write)
                    out.flush()
                    os.fsync(out.fileno())
            if found != record.sha256:
                raise DamagedError(f"{name} does not come back as it was: its SHA-256 is another one.")
    return _report(source, told)


def verify(folder: Path, against: Path | None = None) -> Report:
    """Check every byte of the packed checkpoint in `folder`, and that `against`, where given, is what was packed.

    Raises UsageError, DamagedError, DifferentError, OSError.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: name a packed one.")
    told = _open(folder)
    for name in list_files(folder):
        if name.endswith(".safetensors") and "/" not in name and name not in told.files:
            raise DamagedError(f"{name} does not belong to this packed checkpoint, and would be read.")
    for name, record in told.files.items():
        path = _present(folder / name, name)
        found = hash_file(path) if record.packed is None else _give_back(path, name, record, told)
        if found != record.sha256:
            raise DamagedError(f"{name} is not what was packed: its SHA-256 is another one.")
    if against is not None:
        _compare(told, against)
    return _report(folder, told)


def _open(folder: Path) -> PackedList:
    if not is_packed(folder):
        raise UsageError(f"{folder} holds no packed checkpoint: there is no {LIST}.")
    return read_list(folder)


def _present(path: Path, name: str) -> Path:
    if not path.is_file():
        raise DamagedError(f"{name} is missing.")
    return path


def _give_back(
    path: Path, name: str, record: FileRecord, told: PackedList, take: Callable[[memoryview], object] = len
) -> str:
    """Hand the source's file to `take` in pieces; its SHA-256."""
    digest = hashlib.sha256()
    for piece in PackedFile(_present(path, name), name, record, told.form).source_bytes():
        digest.update(piece)
        take(piece)
    return digest.hexdigest()


def _compare(told: PackedList, original: Path) -> None:
    if not original.is_dir():
        raise UsageError(f"{original} is no folder: name the one that was packed.")
    found = list_files(original)
    for name in sorted(found.keys() ^ told.files.keys()):
        where = "is in the original only" if name in found else "is missing in the original"
        raise DifferentError(f"{name} {where}.")
    for name, path in found.items():
        if hash_file(path) != told.files[name].sha256:
            raise DifferentError(f"{name} of the original is not the file that was packed.")


def _report(folder: Path, told: PackedList) -> Report:
    report = Report(told.form)
    for record in told.files.values():
        report.add(record)
    report.packed_bytes += (folder / LIST).stat().st_size
    return report
