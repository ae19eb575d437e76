"""Checkpoints in one GGUF file: names mapped to Hugging Face's, blocks dequantized on reading.

The Llama converter stores the rows of the query and key projections in the order of interleaved rotary pairs; reading
them restores the half-split order that every family here computes with.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.stored import Slice, Stored

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor

_PLAIN_NAMES = {
    "rope_freqs": "rope_freqs",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOKENIZER = "tokenizer."
_STRETCH = 8192
"""Bytes that are dequantized as one row: the library computes 16 rows at a time, and what it does fits a cache then."""
_BLOCK_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def open_gguf(path: Path) -> GGUFReader:
    """Parse a GGUF file. Raises StartupError when it is truncated or not GGUF."""
    from tandem_worker.model.checkpoint.gguf_reader import LeanGGUFReader

    try:
        return LeanGGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError, struct.error) as error:
        raise StartupError(
            "WeightsCorrupt", f"{path.name} is not a complete GGUF file ({error}). Download the model again."
        ) from error


def gguf_metadata(reader: GGUFReader) -> dict[str, Any]:
    """Metadata of the file without the tokenizer's arrays, plus the number of tokens as `tokenizer.num_tokens`.

    An array that says the same of every layer becomes that one value.
    """
    from gguf import GGUFValueType

    metadata: dict[str, Any] = {}
    for key, part in reader.fields.items():
        if part.types and part.types[0] == GGUFValueType.ARRAY:
            if key == "tokenizer.ggml.tokens":
                metadata["tokenizer.num_tokens"] = len(part.data)
            elif not key.startswith(_TOKENIZER):
                items = part.contents() if part.data else []
                metadata[key] = items[0] if items and all(item == items[0] for item in items) else items
        else:
            metadata[key] = part.contents()
    return metadata


def huggingface_name(name: str) -> str:
    """Name of the tensor in the family's Hugging Face checkpoint; its own where it has none there."""
    stem, _, suffix = name.rpartition(".")
    if stem in _PLAIN_NAMES:
        return f"{_PLAIN_NAMES[stem]}.{suffix}"
    match = _BLOCK_PATTERN.fullmatch(name)
    if match and match[2] in _BLOCK_NAMES:
        return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"
    return name


class GGUFSource:
    """A GGUF file as a checkpoint; every tensor reads as float32, or as its own type when that is a float type."""

    def __init__(self, path: Path, reader: GGUFReader, metadata: dict[str, Any]) -> None:
        self._path = path
        self._swapped = reader.byte_order != "I"
        architecture = metadata.get("general.architecture")
        self._permuted = architecture == "llama"
        self._num_heads = metadata.get(f"{architecture}.attention.head_count", 1)
        self._num_kv_heads = metadata.get(f"{architecture}.attention.head_count_kv", self._num_heads)
        self._tensors: dict[str, ReaderTensor] = {}
        size = path.stat().st_size
        for tensor in reader.tensors:
            if tensor.data_offset + tensor.n_bytes > size:
                raise StartupError(
                    "WeightsCorrupt", f"{path.name} ends before tensor {tensor.name}. Download it again."
                )
            self._tensors[huggingface_name(tensor.name)] = tensor

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(extent) for extent in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> torch.dtype:
        types = {"F16": torch.float16, "BF16": torch.bfloat16}
        return types.get(self._tensors[name].tensor_type.name, torch.float32)

    def stored(self, name: str) -> Stored | None:
        shape, data = self.shape(name), self._tensors[name].data
        if len(shape) != 2 or self._swapped or not data.flags.c_contiguous:
            return None
        heads = self._permuted_heads(name)
        if heads and shape[0] % (2 * heads):
            return None
        return Stored(
            address=data.ctypes.data,
            kind=self._tensors[name].tensor_type.value,
            rows=shape[0],
            columns=shape[1],
            num_bytes=data.nbytes,
            half=shape[0] // heads // 2 if heads else 0,
            owner=data,
        )

    def read(self, name: str, part: Slice | None = None) -> torch.Tensor:
        tensor = self._tensors[name]
        permuted_heads = self._permuted_heads(name)
        by_rows = part is not None and part.dim == 0 and not permuted_heads
        rows = tensor.data[part.start : part.stop] if part is not None and by_rows else tensor.data
        value = self._decode(name, tensor, rows)
        if permuted_heads:
            value = _unpermute(value, permuted_heads)
        if part is not None and not by_rows:
            value = value.narrow(part.dim, part.start, part.stop - part.start)
        return value

    def _permuted_heads(self, name: str) -> int:
        """Heads whose rows are stored in interleaved order; 0 when the tensor is not permuted."""
        if not self._permuted:
            return 0
        if name.endswith(("q_proj.weight", "q_proj.bias")):
            return int(self._num_heads)
        return int(self._num_kv_heads) if name.endswith(("k_proj.weight", "k_proj.bias")) else 0

    def _decode(self, name: str, tensor: ReaderTensor, rows: np.ndarray) -> torch.Tensor:
        kind = tensor.tensor_type.name
        if kind == "F32":
            return torch.from_numpy(np.array(rows, dtype=np.float32))
        if kind == "F16":
            return torch.from_numpy(np.array(rows, dtype=np.float16))
        if kind == "BF16":
            return torch.from_numpy(np.array(rows).view(np.int16)).view(torch.bfloat16)
        try:
            return torch.from_numpy(_dequantize(rows, tensor.tensor_type))
        except (NotImplementedError, ValueError) as error:
            raise StartupError(
                "WeightsUnsupported", f"Tensor {name} of {self._path.name} has type {kind}, which cannot be read."
            ) from error


def _dequantize(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Bytes `[..., num_bytes]` as float32 `[..., num_elements]`: rows hold whole blocks, so several make one."""
    from gguf.quants import dequantize

    num_rows, num_bytes = rows.size // rows.shape[-1], rows.shape[-1]
    together = next(
        count for count in range(max(1, min(_STRETCH // num_bytes, num_rows)), 0, -1) if num_rows % count == 0
    )
    # A view of the map's memory that is no map: slices of maps cost as much as what is computed of them.
    values = dequantize(rows.view(np.ndarray).reshape(-1, together * num_bytes), kind)
    return values.reshape(*rows.shape[:-1], -1)


def _unpermute(value: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows `[head, pair, half]` back to `[head, half, pair]`."""
    head_dim = value.shape[0] // num_heads
    pairs = value.reshape(num_heads, head_dim // 2, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)
