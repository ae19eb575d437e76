"""Checkpoints in safetensors files, memory-mapped, in one file or in shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.files import PACKED_LIST, PACKED_RECORD
from tandem_worker.model.checkpoint.stored import BF16, F16, F32, Slice, Stored

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
KINDS = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}
"""GGML's numbers of the types that kernels widen."""


class SafetensorsSource:
    """All `*.safetensors` files of a folder as one checkpoint."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._handles: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        for path in files:
            handle = _open(path)
            if PACKED_RECORD in (handle.metadata() or {}):
                raise StartupError(
                    "WeightsCorrupt",
                    f"{path.name} is a part of a packed checkpoint, but {PACKED_LIST} is not beside it: copy the whole "
                    "folder.",
                )
            for name in handle.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                self._handles[name], self._paths[name] = handle, path

    def names(self) -> Iterable[str]:
        return self._handles.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        code = self._handles[name].get_slice(name).get_dtype()
        if code not in DTYPES:
            raise StartupError("WeightsUnsupported", f"Tensor {name} has element type {code}, which cannot be loaded.")
        return DTYPES[code]

    def stored(self, name: str) -> Stored | None:
        kind = KINDS.get(self.dtype(name))
        shape = self.shape(name)
        if kind is None or len(shape) != 2:
            return None
        value = self._handles[name].get_tensor(name)
        return Stored(
            address=value.data_ptr(), kind=kind, rows=shape[0], columns=shape[1], num_bytes=value.nbytes, owner=value,
            place=(self._paths[name], name),
        )  # fmt: skip

    def read(self, name: str, part: Slice | None = None) -> torch.Tensor:
        handle = self._handles[name]
        if part is None:
            return handle.get_tensor(name)
        index = (slice(None),) * part.dim + (slice(part.start, part.stop),)
        return handle.get_slice(name)[index]


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise StartupError(
            "WeightsCorrupt",
            f"{path.name} is not a complete safetensors file ({error}). Download the model again.",
        ) from error
