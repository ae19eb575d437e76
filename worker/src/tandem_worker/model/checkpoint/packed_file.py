"""One file of a packed checkpoint, mapped: its tensors as they are kept, and as they were."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tandem_worker.model.checkpoint.exponents import CHUNK as NUMBERS
from tandem_worker.model.checkpoint.exponents import Bytes, ExponentsError, PackedNumbers, Words
from tandem_worker.model.checkpoint.header import LENGTH, Entry, HeaderError, header_length, parse_header
from tandem_worker.model.checkpoint.mapping import map_file
from tandem_worker.model.checkpoint.packed_folder import (
    CHUNK,
    RECORD,
    DamagedError,
    FileNote,
    FileRecord,
    num_sums,
    read_note,
    sum_of,
)
from tandem_worker.model.checkpoint.split import SplitError, SplitMatrix
from tandem_worker.model.checkpoint.split_kernels import decode_rows

AT_ONCE = 16 << 20
"""Weights that are decoded at a time where a whole file comes back."""


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns as which a tensor of several axes is packed in 12 bits a weight."""
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    return rows, shape[-1]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it was, and where it lies now."""

    entry: Entry
    """In the source's file."""
    here: Entry
    packed: bool
    sums: tuple[str, ...]


class PackedFile:
    """Satisfies readers of tensors by name. All methods raise DamagedError for what is not as it was written."""

    def __init__(self, path: Path, name: str, record: FileRecord, form: str) -> None:
        """`name`: the path within the folder. Raises OSError when the file cannot be opened."""
        assert record.packed is not None
        self.name = name
        self._memory = _map(path, name, record.packed.size)
        try:
            self._read_header(record, form)
        except HeaderError as error:
            raise DamagedError(f"{name}: {error}.") from error
        self._last: tuple[str, SplitMatrix | None] = "", None
        self._checked = {tensor: bytearray(len(told.sums)) for tensor, told in self.tensors.items()}

    def _read_header(self, record: FileRecord, form: str) -> None:
        assert record.packed is not None
        end = LENGTH + header_length(self._memory[:LENGTH].tobytes(), len(self._memory))
        if hashlib.sha256(self._memory[:end].data).hexdigest() != record.packed.header:
            raise HeaderError("its header is not the one that belongs to this checkpoint")
        header = parse_header(self._memory[LENGTH:end].tobytes(), len(self._memory) - end)
        self._data = self._memory[end:]
        self.note = read_note(header.metadata.get(RECORD, ""))
        if self.note.form != form:
            raise HeaderError(f"it is of the form {self.note.form}, and the checkpoint of the form {form}")
        self.header = self.note.header.encode()
        source = parse_header(self.header, record.size - LENGTH - len(self.header))
        here = {entry.name: entry for entry in header.entries}
        if here.keys() != self.note.sums.keys() or here.keys() != {entry.name for entry in source.entries}:
            raise HeaderError("its tensors are not those of the source")
        self.tensors = {entry.name: _pair(entry, here[entry.name], self.note) for entry in source.entries}

    def stored(self, name: str, start: int = 0, stop: int | None = None) -> Bytes:
        """Bytes of a tensor as it lies here, `start` to `stop`, checked."""
        tensor = self.tensors[name]
        stop = tensor.here.nbytes if stop is None else stop
        data = self._data[tensor.here.start : tensor.here.stop]
        checked = self._checked[name]
        for number in range(start // CHUNK, num_sums(stop)):
            if not checked[number]:
                if sum_of(data[number * CHUNK : (number + 1) * CHUNK]) != tensor.sums[number]:
                    raise self._damaged(name, f"its bytes from {number * CHUNK} on do not have their sum")
                checked[number] = True
        return data[start:stop]

    def split(self, name: str) -> SplitMatrix:
        """A packed matrix of the form `fixed`, `[rows, columns]`, all of it checked."""
        last, matrix = self._last
        if last != name or matrix is None:  # of stacked experts one is asked for after the other
            try:
                matrix = SplitMatrix.parse(self.stored(name), *matrix_shape(self.tensors[name].entry.shape))
            except SplitError as error:
                raise self._damaged(name, str(error)) from error
            self._last = name, matrix
        return matrix

    def bits(self, name: str, start: int, stop: int) -> Words:
        """Weights `start` to `stop` of a packed tensor, in the order of the source."""
        entry = self.tensors[name].entry
        if self.note.form == "fixed":
            columns = entry.shape[-1]
            first, last = start // columns, -(-stop // columns)
            rows = decode_rows(self.split(name), first, last).reshape(-1)
            return rows[start - first * columns : stop - first * columns]
        numbers = self._numbers(name)
        self.stored(name, *numbers.bytes_of(start, stop))
        try:
            return numbers.read(start, stop)
        except ExponentsError as error:
            raise self._damaged(name, str(error)) from error

    def _numbers(self, name: str) -> PackedNumbers:
        tensor = self.tensors[name]
        count, size = tensor.entry.elements, tensor.here.nbytes
        try:
            numbers = PackedNumbers.parse(self._data[tensor.here.start : tensor.here.stop], count)
        except ExponentsError as error:
            raise self._damaged(name, str(error)) from error
        self.stored(name, min(int(numbers.offsets[-1]), size), size)
        return numbers

    def source_bytes(self) -> Iterator[memoryview]:
        """The source's file from its first byte to its last, in pieces."""
        start = len(self.header).to_bytes(LENGTH, "little") + self.header
        yield memoryview(start)
        for name, tensor in self.tensors.items():
            if not tensor.packed:
                for at in range(0, tensor.entry.nbytes, CHUNK):
                    yield self.stored(name, at, min(at + CHUNK, tensor.entry.nbytes)).data
            elif self.note.form == "fixed":
                yield from self._rows(name)
            else:
                step = NUMBERS * max(1, AT_ONCE // NUMBERS)
                count = tensor.entry.elements
                for at in range(0, count, step):
                    yield self.bits(name, at, min(at + step, count)).view(np.uint8).data

    def _rows(self, name: str) -> Iterator[memoryview]:
        matrix = self.split(name)
        step = max(1, AT_ONCE // matrix.columns // 64) * 64
        for row in range(0, matrix.rows, step):
            rows = decode_rows(matrix, row, min(row + step, matrix.rows))
            yield rows.reshape(-1).view(np.uint8).data

    def _damaged(self, name: str, why: str) -> DamagedError:
        return DamagedError(f"{self.name}: tensor {name} is damaged: {why}.")


def _map(path: Path, name: str, size: int) -> Bytes:
    with path.open("rb") as file:
        found = file.seek(0, 2)
        if found != size or not size:
            raise DamagedError(f"{name} has {found} bytes, and {size} were written.")
        return map_file(file)


def _pair(entry: Entry, here: Entry, note: FileNote) -> Tensor:
    """Raises HeaderError where a tensor's two descriptions contradict each other."""
    packed, sums = entry.name in note.packed, note.sums[entry.name]
    if len(sums) != num_sums(here.nbytes):
        raise HeaderError(f"tensor {entry.name} has {len(sums)} sums for {here.nbytes} bytes")
    as_packed = (here.dtype, here.shape) == ("U8", (here.nbytes,)) and entry.dtype == "BF16" and entry.elements > 0
    as_plain = (here.dtype, here.shape, here.nbytes) == (entry.dtype, entry.shape, entry.nbytes)
    if not (as_packed if packed else as_plain):
        raise HeaderError(f"tensor {entry.name} is described in two ways")
    if packed and note.form == "fixed" and len(entry.shape) < 2:
        raise HeaderError(f"tensor {entry.name} is no matrix")
    return Tensor(entry, here, packed, sums)
