"""Packed checkpoints as a source of weights: `python -m tandem_worker.model.lossless pack` makes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.packed_file import PackedFile
from tandem_worker.model.checkpoint.packed_folder import DamagedError, PackedList, read_list
from tandem_worker.model.checkpoint.safetensors import DTYPES, KINDS
from tandem_worker.model.checkpoint.split import SplitMatrix
from tandem_worker.model.checkpoint.stored import Slice, Stored

_READ = 64 << 20
"""Bytes of a file beside the weights up to which it is checked: what is read at a start is shorter."""


class LosslessSource:
    """Tensors of a packed checkpoint as they were; satisfies `WeightSource`. What is damaged is told as such when it is
    read; nothing is decoded before."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        """`files`: those of `find_safetensors`. Raises StartupError."""
        self._files: dict[str, PackedFile] = {}
        try:
            told = read_list(folder)
            _check_others(folder, told)
            for path in files:
                file = _open(folder, path, told)
                self._files.update(dict.fromkeys(file.tensors, file))
        except DamagedError as error:
            raise _corrupt(error) from error
        except OSError as error:
            raise StartupError("WeightsUnreadable", f"A file of the model cannot be read: {error}.") from error

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].tensors[name].entry.shape

    def dtype(self, name: str) -> torch.dtype:
        code = self._files[name].tensors[name].entry.dtype
        if code not in DTYPES:
            raise StartupError("WeightsUnsupported", f"Tensor {name} has element type {code}, which cannot be loaded.")
        return DTYPES[code]

    def stored(self, name: str) -> Stored | None:
        kind, shape = KINDS.get(self.dtype(name)), self.shape(name)
        if kind is None or len(shape) != 2:
            return None
        size = self._files[name].tensors[name].entry.nbytes
        matrix = _Matrix(self, name)
        return Stored(
            address=0, kind=kind, rows=shape[0], columns=shape[1], num_bytes=size, owner=matrix, packed=matrix
        )

    def read(self, name: str, part: Slice | None = None) -> torch.Tensor:
        try:
            return self._read(name, part)
        except DamagedError as error:
            raise _corrupt(error) from error

    def split(self, name: str) -> SplitMatrix | None:
        """A matrix's 12 bits a weight, checked; None where it is not kept in those. Raises StartupError."""
        file = self._files[name]
        if not file.tensors[name].packed or file.note.form != "fixed":
            return None
        try:
            return file.split(name)
        except DamagedError as error:
            raise _corrupt(error) from error

    def _read(self, name: str, part: Slice | None) -> torch.Tensor:
        file, shape = self._files[name], self.shape(name)
        by_rows = part is not None and part.dim == 0
        start, stop = (part.start, part.stop) if part is not None and part.dim == 0 else (0, shape[0] if shape else 1)
        row = file.tensors[name].entry.elements // shape[0] if shape and shape[0] else 1
        taken = (stop - start, *shape[1:]) if shape else ()
        if not file.tensors[name].packed:
            size = row * self.dtype(name).itemsize
            value = _plain(file.stored(name, start * size, stop * size), self.dtype(name)).view(taken)
        elif start == stop:
            value = torch.empty(taken, dtype=torch.bfloat16)
        else:
            bits = file.bits(name, start * row, stop * row)
            value = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(taken)
        return value if part is None or by_rows else value.narrow(part.dim, part.start, part.stop - part.start)


class _Matrix:
    """Satisfies `PackedMatrix`."""

    def __init__(self, source: LosslessSource, name: str) -> None:
        self._source, self._name = source, name

    def split(self) -> SplitMatrix | None:
        return self._source.split(self._name)

    def read(self, piece: Slice | None) -> torch.Tensor:
        return self._source.read(self._name, piece)


def _open(folder: Path, path: Path, told: PackedList) -> PackedFile:
    name = path.relative_to(folder).as_posix()
    record = told.files.get(name)
    if record is None or record.packed is None:
        raise DamagedError(f"{name} does not belong to this packed checkpoint.")
    return PackedFile(path, name, record, told.form)


def _plain(stored: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    if stored.size == 0:
        return torch.empty(0, dtype=dtype)
    if stored.ctypes.data % dtype.itemsize:  # the source did not align it either
        stored = stored.copy()
    return torch.from_numpy(stored).view(dtype)


def _check_others(folder: Path, told: PackedList) -> None:
    """Files beside the weights that may be read. Some may not have been downloaded: who needs one says so."""
    for name, record in told.files.items():
        path = folder / name
        if record.packed is not None or record.size > _READ or not path.is_file():
            continue
        if hashlib.sha256(path.read_bytes()).hexdigest() != record.sha256:
            raise DamagedError(f"{name} is not the file that was packed.")


def _corrupt(error: DamagedError) -> StartupError:
    return StartupError(
        "WeightsCorrupt",
        f"{error} This is a packed checkpoint: download or copy it again, or look for what else is damaged with "
        "`python -m tandem_worker.model.lossless verify FOLDER`.",
    )
