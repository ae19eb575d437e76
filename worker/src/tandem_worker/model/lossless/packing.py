"""A folder of safetensors files to a packed one, file by file and tensor by tensor."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import xxhash

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint import split_kernels
from tandem_worker.model.checkpoint.exponents import Bytes, Words, pack_numbers
from tandem_worker.model.checkpoint.files import find_safetensors
from tandem_worker.model.checkpoint.header import (
    LENGTH,
    METADATA,
    MOST,
    Entry,
    Header,
    HeaderError,
    header_length,
    parse_header,
)
from tandem_worker.model.checkpoint.mapping import map_file
from tandem_worker.model.checkpoint.packed_file import matrix_shape
from tandem_worker.model.checkpoint.packed_folder import (
    CHUNK,
    LIST,
    RECORD,
    FileNote,
    FileRecord,
    Form,
    PackedList,
    PackedRecord,
    num_sums,
)
from tandem_worker.model.lossless.contract import (
    DifferentError,
    Report,
    UsageError,
    check_folders,
    complete_or_not_at_all,
    copy_file,
    list_files,
)

_ALIGNMENT = 64
_LEAST_NUMBERS = 1024
"""Numbers of a tensor below which an archive keeps it as it is."""
_PIECE = 64 << 20


def pack(source: Path, target: Path, form: Form, *, leave_out: Callable[[str], bool] = lambda name: False) -> Report:
    """Pack the model in the folder `source` into `target`, which is there complete afterwards, or not at all.

    `leave_out` names files of the source that are not part of the model. Raises UsageError, DifferentError where the
    source itself is damaged, OSError.
    """
    check_folders(source, target)
    files = {name: path for name, path in list_files(source).items() if not leave_out(name)}
    weights = _weights(source, files)
    report = Report(form)
    with complete_or_not_at_all(target) as scratch:
        records = {}
        for name, path in files.items():
            to = scratch / name
            records[name] = _pack_file(path, name, to, form) if name in weights else copy_file(path, to)
            report.add(records[name])
        text = PackedList(form, records).write()
        with (scratch / LIST).open("xb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    report.packed_bytes += len(text)
    return report


def _weights(source: Path, files: dict[str, Path]) -> set[str]:
    """Files of tensors: those at the top, and those that the index names."""
    if LIST in files:
        raise UsageError(f"{source} is packed already ({LIST}): unpack it first for another form.")
    found = {name for name in files if name.endswith(".safetensors") and "/" not in name}
    try:
        found |= {path.relative_to(source).as_posix() for path in find_safetensors(source)}
    except StartupError as error:
        raise DifferentError(f"{source} is not complete: {error}") from error
    if not found:
        raise UsageError(f"{source} holds no *.safetensors file: only those can be packed.")
    return found


def _pack_file(path: Path, name: str, target: Path, form: Form) -> FileRecord:
    target.parent.mkdir(parents=True, exist_ok=True)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise DifferentError(f"{name} is empty: download the model again.")
        memory = map_file(file)
    try:
        end = LENGTH + header_length(memory[:LENGTH].tobytes(), size)
        header = parse_header(memory[LENGTH:end].tobytes(), size - end)
    except HeaderError as error:
        raise DifferentError(f"{name} is no complete safetensors file: {error}. Download the model again.") from error
    if RECORD in header.metadata:
        raise UsageError(f"{name} is packed already: unpack it first for another form.")
    digest = hashlib.sha256(memory[:end].data)
    with target.open("x+b") as out:
        writer = _FileWriter(out, header, form)
        for entry in header.entries:
            data = memory[end + entry.start : end + entry.stop]
            for start in range(0, len(data), _PIECE):
                digest.update(data[start : start + _PIECE].data)
            writer.write(entry, data)
        record = writer.finish()
    return FileRecord(size=size, sha256=digest.hexdigest(), packed=record)


@dataclass(slots=True)
class _FileWriter:
    """Writes tensors one after the other, and then the header, for which it has left room."""

    out: IO[bytes]
    header: Header
    form: Form
    room: int = 0
    end: int = 0
    """Bytes of tensors so far."""
    places: dict[str, dict[str, object]] = field(default_factory=dict)
    sums: dict[str, tuple[str, ...]] = field(default_factory=dict)
    packed: dict[str, int] = field(default_factory=dict)
    """Weights of packed tensors."""
    packed_bytes: int = 0

    def __post_init__(self) -> None:
        self.room = _room(self.header)
        if self.room > MOST:
            raise UsageError(f"The header of {self.out.name} would be longer than readers take: {self.room} bytes.")
        self.out.seek(LENGTH + self.room)

    def write(self, entry: Entry, data: Bytes) -> None:
        """A tensor of the source with its bytes: packed where that makes it smaller."""
        start = self.end
        pieces = _packed_pieces(entry, data, self.form)
        sums = None if pieces is None else self._put(pieces, most=_most(len(data)))
        if sums is not None:
            self.packed[entry.name] = entry.elements
            self.packed_bytes += self.end - start
            dtype, shape = "U8", [self.end - start]
        else:
            self.out.seek(LENGTH + self.room + start)
            self.out.truncate()
            self.end = start
            sums = self._put((data[at : at + CHUNK].data for at in range(0, len(data), CHUNK)), most=len(data))
            dtype, shape = entry.dtype, list(entry.shape)
            assert sums is not None
        self.sums[entry.name] = sums
        self.places[entry.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, self.end]}

    def _put(self, pieces: Iterator[memoryview], most: int) -> tuple[str, ...] | None:
        """Sums of what was written; None where it would have become longer than `most`."""
        sums, size = _Sums(), 0
        for piece in pieces:
            size += len(piece)
            if size > most:
                return None
            sums.update(piece)
            self.out.write(piece)
        self.end += size
        return sums.finish()

    def finish(self) -> PackedRecord:
        note = FileNote(self.form, self.header.text, frozenset(self.packed), self.sums)
        text = json.dumps(
            {METADATA: {**self.header.metadata, RECORD: note.write()}, **self.places}, separators=(",", ":")
        )
        start = self.room.to_bytes(LENGTH, "little") + text.encode().ljust(self.room)
        assert len(start) == LENGTH + self.room
        self.out.seek(0)
        self.out.write(start)
        self.out.flush()
        os.fsync(self.out.fileno())
        return PackedRecord(
            size=len(start) + self.end,
            header=hashlib.sha256(start).hexdigest(),
            tensors=len(self.places),
            packed_tensors=len(self.packed),
            packed_weights=sum(self.packed.values()),
            packed_bytes=self.packed_bytes,
        )


def _most(nbytes: int) -> int:
    """Bytes that a packed tensor may take instead of `nbytes`: it is not worth its decoding else."""
    return nbytes * 9 // 10


def _room(header: Header) -> int:
    """Bytes that the header takes at most, so that the tensors begin at a multiple of 64."""
    end = max((entry.stop for entry in header.entries), default=0)  # packed tensors are not longer than they were
    names = frozenset(entry.name for entry in header.entries)
    sums = {entry.name: ("0" * 32,) * num_sums(entry.nbytes) for entry in header.entries}
    places = {
        entry.name: {"dtype": entry.dtype + "U8", "shape": [*entry.shape, end], "data_offsets": [end, end]}
        for entry in header.entries
    }
    note = FileNote("archive", header.text, names, sums)
    text = json.dumps({METADATA: {**header.metadata, RECORD: note.write()}, **places}, separators=(",", ":"))
    return -(-(len(text) + LENGTH) // _ALIGNMENT) * _ALIGNMENT - LENGTH


def _packed_pieces(entry: Entry, data: Bytes, form: Form) -> Iterator[memoryview] | None:
    """What a tensor becomes; None where it stays as it is."""
    if entry.dtype != "BF16" or not entry.elements:
        return None
    words = _words(data)
    if form == "archive":
        return None if entry.elements < _LEAST_NUMBERS else pack_numbers(words)
    if len(entry.shape) < 2:
        return None
    matrix = words.reshape(matrix_shape(entry.shape))
    plan = split_kernels.plan(matrix)
    return None if plan is None else _padded(split_kernels.encode(matrix, *plan), plan[1])


def _words(data: Bytes) -> Words:
    return data.view(np.uint16) if data.ctypes.data % 2 == 0 else data.copy().view(np.uint16)


def _padded(pieces: Iterator[Bytes], size: int) -> Iterator[memoryview]:
    for piece in pieces:
        yield piece.data
    yield memoryview(bytes(-size % _ALIGNMENT))


class _Sums:
    """Sums of every `CHUNK` bytes of what comes in pieces of any length."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._running, self._left = xxhash.xxh3_128(), CHUNK

    def update(self, view: memoryview) -> None:
        while view:
            part = view[: self._left]
            self._running.update(part)
            self._left -= len(part)
            if not self._left:
                self._done.append(self._running.hexdigest())
                self._running, self._left = xxhash.xxh3_128(), CHUNK
            view = view[len(part) :]

    def finish(self) -> tuple[str, ...]:
        if self._left < CHUNK:
            self._done.append(self._running.hexdigest())
        return tuple(self._done)
