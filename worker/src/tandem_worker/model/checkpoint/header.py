"""Headers of safetensors files, read and checked byte by byte: a packed checkpoint gives back the file that it was."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LENGTH = 8
"""Bytes that say how long the header is, little-endian."""
MOST = 100_000_000
"""Bytes of a header; readers refuse longer ones."""
METADATA = "__metadata__"
_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip


class HeaderError(ValueError):
    """A file is no safetensors file. The message says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as a header tells it; `start` and `stop` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return self.stop - self.start

    @property
    def elements(self) -> int:
        """Numbers that it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    text: str
    """As it stands in the file, without its length."""
    entries: tuple[Entry, ...]
    """In the order of their data, which leaves no gaps."""
    metadata: Mapping[str, str]


def header_length(start: bytes, file_size: int) -> int:
    """Bytes of the header of a file of `file_size` bytes that begins with `start`. Raises HeaderError."""
    length = int.from_bytes(start[:LENGTH], "little")
    if len(start) < LENGTH or length > min(MOST, file_size - LENGTH):
        raise HeaderError(f"its header would have {length} bytes, of {file_size} of the file")
    return length


def parse_header(content: bytes, data_bytes: int) -> Header:
    """The header `content`, which `data_bytes` bytes of tensors follow. Raises HeaderError.

    Every offset lies within the data, and every size is what dtype and shape make.
    """
    try:
        text = content.decode()
        raw = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"its header cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise HeaderError("its header is no JSON object")
    metadata = raw.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError("its metadata are not strings")
    entries = sorted((_entry(name, told) for name, told in raw.items()), key=lambda e: (e.start, e.stop, e.name))
    end = 0
    for entry in entries:
        if entry.start != end:
            raise HeaderError(f"tensor {entry.name} begins at byte {entry.start}, where {end} was to be expected")
        end = entry.stop
    if end != data_bytes:
        raise HeaderError(f"its tensors have {end} bytes, and the file {data_bytes}")
    return Header(text, tuple(entries), metadata)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _entry(name: str, told: Any) -> Entry:
    try:
        dtype, shape, (start, stop) = told["dtype"], told["shape"], told["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise HeaderError(f"tensor {name} is not described: {error!r}") from error
    numbers = [*shape, start, stop] if isinstance(shape, list) else [None]
    if not isinstance(dtype, str) or not all(_is_count(number) for number in numbers) or stop < start:
        raise HeaderError(f"tensor {name} has no proper type, shape or place")
    entry = Entry(name, dtype, tuple(shape), start, stop)
    if dtype in _SIZES and entry.elements * _SIZES[dtype] != entry.nbytes:
        raise HeaderError(f"tensor {name} has {entry.nbytes} bytes, which are not those of {dtype} {list(shape)}")
    return entry
