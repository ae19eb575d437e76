"""The `gguf` package's reader, without the second it takes to make an array of every token of the vocabulary."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

_LONG = 1024  # items; shorter arrays are metadata that a model may need


class LeanGGUFReader(GGUFReader):
    """Long arrays keep their length and types, not their items: the tokenizer is read elsewhere."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        nptype = self.gguf_scalar_to_np.get(item_type)
        if count < _LONG or (nptype is None and item_type != GGUFValueType.STRING) or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        start = orig_offs + 12
        end = self._skip_strings(start, count) if nptype is None else start + count * np.dtype(nptype).itemsize
        if end > self.data.nbytes:
            raise ValueError("an array reaches beyond the end of the file")
        return end - orig_offs, [], [0] * count, [GGUFValueType.ARRAY, item_type]

    def _skip_strings(self, offset: int, count: int) -> int:
        """Offset behind `count` strings, each its length in 8 bytes and then its bytes."""
        view = self.data.data
        for _ in range(count):
            offset += 8 + struct.unpack_from("=Q", view, offset)[0]
        return offset
