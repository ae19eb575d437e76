"""Calls of `libtandem_cpu.so`. Tensors are bfloat16 on the CPU, their last dimension contiguous."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tandem_worker.host.environment import wants_native_kernels
from tandem_worker.host.philox import DrawKey, Words
from tandem_worker.model.checkpoint.split import (
    HEAD,
    IS_SPLIT,
    NUM_HIGHS,
    SplitPlaces,
    choose_values,
    is_worth,
    make_head,
)

LIBRARY = Path(__file__).with_name("libtandem_cpu.so")
COLUMNS = 64
"""Columns of a packed block, and what the width of a gated product must be a multiple of."""
LANES = 16
"""What a head's width must be a multiple of."""

Written = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_ssize_t)
"""Is told the number of a layer whose keys and values are written; whether the step ends there."""
_Address, _Index, _Float = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "tandem_linear": [_Address, _Index, _Index, _Address, _Index, _Index, _Address, _Address, _Address],
    "tandem_linear_float32": [_Address, _Index, _Index, _Address, _Index, _Index, _Address, _Address],
    "tandem_gate_up_silu": [_Address, _Index, _Index, _Address, _Index, _Index, _Address, _Address],
    "tandem_split_linear": [_Address, _Index, _Index, _Address, _Index, _Index, _Address, _Address, _Address],
    "tandem_split_linear_float32": [_Address, _Index, _Index, _Address, _Index, _Index, _Address, _Address],
    "tandem_split_gate_up_silu": [_Address, _Index, _Index, _Address, _Index, _Index, _Address, _Address],
    "tandem_split_count": [_Address, _Index, _Index, _Address],
    "tandem_split_pack": [_Address, _Index, _Index, _Address, _Index, _Address],
    "tandem_split_unpack": [_Address, _Index, _Index, _Address],
    "tandem_split_rows": [_Address, _Index, _Index, _Address, _Index, _Address],
    "tandem_rms_norm": [_Address, _Index, _Index, _Index, _Address, _Float, _Address],
    "tandem_silu_mul": [_Address, _Index, _Index, _Address],
    "tandem_place_heads": [
        *(_Address, _Index, _Index, _Index, _Index, _Address, _Address, _Float),
        *(_Address, _Address, _Address, _Address, _Index),
    ],
    "tandem_attention": [_Address],
    "tandem_layers": [_Address, _Index, _Address, _Address, _Address, _Address, Written],
    "tandem_head_write": [_Address, _Address, _Address, _Address],
    "tandem_head_advance": [_Address, _Address, _Address],
    "tandem_use_threads": [_Index],
    "tandem_format": [_Index, _Address],
    "tandem_pack": [_Address, _Index, _Index, _Address],
    "tandem_widen": [_Address, _Index, _Index, _Address],
    "tandem_draw_all": [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, _Index, _Address],
    "tandem_draw_some": [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, _Address, _Index, _Address],
}


class _Attention(ctypes.Structure):
    """`Attention` of attention.cpp."""

    _fields_ = (
        *((name, _Address) for name in ("q", "out", "layer", "tables", "query_start", "context_lens", "sinks")),
        *((name, _Index) for name in ("num_sequences", "table_width", "q_stride", "num_heads", "num_kv_heads")),
        *((name, _Index) for name in ("width", "block_size", "window", "chunk")),
        ("scale", _Float),
    )


@lru_cache(maxsize=1)
def find_obstacle() -> str | None:
    """Why the kernels cannot serve here, as a sentence; None when they can."""
    if not wants_native_kernels():
        return "TANDEM_NATIVE_KERNELS=0 turns them off."
    if not torch.cpu.get_capabilities().get("avx512_bf16", False):
        return "This CPU does not multiply bfloat16 in AVX-512 registers."
    if not LIBRARY.exists():
        return f"{LIBRARY.name} is not built: `make setup` does it, or `make` in {LIBRARY.parent}."
    try:
        load_library()
    except (OSError, AttributeError) as error:  # the latter: built from other sources
        return f"{LIBRARY.name} cannot be loaded: {error}."
    return None


@lru_cache(maxsize=1)
def find_lossless_obstacle() -> str | None:
    """Why weights cannot be kept in 12 bits here, as a sentence; None when they can."""
    obstacle = find_obstacle()
    if obstacle is not None:
        return obstacle
    capabilities = torch.cpu.get_capabilities()
    if not capabilities.get("avx512_vbmi", False):
        return "This CPU does not permute bytes in AVX-512 registers (VBMI)."
    if capabilities.get("amx_bf16", False):
        return "On a CPU with AMX oneDNN multiplies the matrices, in a layout of its own."
    return None


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The library with its kernels declared. Raises OSError, and AttributeError when it lacks a kernel."""
    library = ctypes.CDLL(str(LIBRARY))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.tandem_format.restype = _Index
    library.tandem_use_threads(torch.get_num_threads())
    return library


def use_threads(count: int) -> None:
    """Let kernels use up to `count` threads, the caller's included. At first it is as many as torch has.

    They are the kernels' own: a region of OpenMP waits for all its threads, and on a core that other processes want
    too, one may be away for milliseconds.
    """
    load_library().tandem_use_threads(count)


def packed_address(packed: torch.Tensor, weight: torch.Tensor) -> int | None:
    """Find where oneDNN keeps `weight` `[N, K]`, if `packed` has the layout that the kernels read; else None.

    oneDNN chooses layouts by shape and type and does not promise them: the first and the last block are compared.
    """
    num_columns, width = weight.shape
    num_blocks = -(-num_columns // COLUMNS)
    size = COLUMNS * width
    if weight.dtype != torch.bfloat16 or width % 2 or torch.ops.mkldnn._nbytes(packed) != num_blocks * size * 2:
        return None
    address: int = torch.ops.mkldnn.data_ptr(packed)
    for block in {0, num_blocks - 1}:
        columns = weight[block * COLUMNS : (block + 1) * COLUMNS]
        expected = columns.new_zeros(width // 2, COLUMNS, 2)
        expected[:, : columns.shape[0]] = columns.unflatten(1, (-1, 2)).transpose(0, 1)
        memory = (ctypes.c_char * (size * 2)).from_address(address + block * size * 2)
        if not torch.equal(torch.frombuffer(memory, dtype=torch.int16), expected.view(torch.int16).flatten()):
            return None
    return address


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Its address; None for none."""
    return None if tensor is None else tensor.data_ptr()


def linear(
    weight: int,
    out_features: int,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    is_split: bool = False,
) -> torch.Tensor:
    """`x W^T + bias + residual`, `[T, N]`, for x `[T, K]` and a `packed_address`. `residual` is contiguous.

    In float32, where there is no residual, the sums are not rounded. With `is_split` the weight is one of `split`.
    """
    rows, inner = x.shape
    library = load_library()
    out = x.new_empty(rows, out_features, dtype=dtype)
    if dtype == torch.float32:
        assert residual is None
        product = library.tandem_split_linear_float32 if is_split else library.tandem_linear_float32
        product(weight, out_features, inner, x.data_ptr(), x.stride(0), rows, address_of(bias), out.data_ptr())
        return out
    product = library.tandem_split_linear if is_split else library.tandem_linear
    product(
        weight,
        out_features,
        inner,
        x.data_ptr(),
        x.stride(0),
        rows,
        address_of(bias),
        address_of(residual),
        out.data_ptr(),
    )
    return out


def gate_up_silu(
    weight: int, width: int, x: torch.Tensor, bias: torch.Tensor | None, *, is_split: bool = False
) -> torch.Tensor:
    """`silu(x Wg^T + bg) * (x Wu^T + bu)`, `[T, width]`; `width` is a multiple of `COLUMNS`, gate comes first."""
    rows, inner = x.shape
    out = x.new_empty(rows, width)
    library = load_library()
    product = library.tandem_split_gate_up_silu if is_split else library.tandem_gate_up_silu
    product(weight, width, inner, x.data_ptr(), x.stride(0), rows, address_of(bias), out.data_ptr())
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight` for `[T, D]`."""
    rows, width = x.shape
    out = x.new_empty(rows, width)
    load_library().tandem_rms_norm(x.data_ptr(), x.stride(0), rows, width, address_of(weight), eps, out.data_ptr())
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` for contiguous `[T, 2I]`, gate first."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    load_library().tandem_silu_mul(gate_up.data_ptr(), rows, width, out.data_ptr())
    return out


def place_heads(
    heads: torch.Tensor,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv_layer: torch.Tensor,
) -> None:
    """Rotate queries and keys of contiguous `[T, Hq + 2 Hk, D]` in place and write keys and values to their slots.

    `norms` are weights of query and key heads with their eps, applied before; `cos` and `sin` `[T, D / 2]`.
    `kv_layer` is `[N, 2, Hk, S, D]`.
    """
    _, _, num_kv_heads, block_size, width = kv_layer.shape
    query_norm, key_norm, eps = norms or (None, None, 0.0)
    load_library().tandem_place_heads(
        heads.data_ptr(),
        heads.shape[0],
        num_heads,
        num_kv_heads,
        width,
        address_of(query_norm),
        address_of(key_norm),
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        slots.data_ptr(),
        kv_layer.data_ptr(),
        block_size,
    )


def draw_words(key: DrawKey, tokens: int | npt.NDArray[np.int64]) -> Words:
    """As `host.philox.draw_words`."""
    masked = key.seed & (1 << 64) - 1, key.choice & 0xFFFFFFFF, key.position & 0xFFFFFFFF
    if isinstance(tokens, int):
        out = np.empty(tokens, np.uint32)
        load_library().tandem_draw_all(*masked, tokens, out.ctypes.data)
        return out
    tokens = np.ascontiguousarray(tokens, np.int64)
    out = np.empty(len(tokens), np.uint32)
    load_library().tandem_draw_some(*masked, tokens.ctypes.data, len(tokens), out.ctypes.data)
    return out


class AttentionStep:
    """Attention of one step for layers of one kind: the sequences are described once."""

    __slots__ = ("_call", "_reference", "_tensors")

    def __init__(
        self,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        scale: float,
        window: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """int32 tensors as in `ForwardBatch`; the rest as in `AttentionSpec`."""
        self._tensors = block_tables, query_start, context_lens  # they must live as long as their addresses are used
        self._call = _Attention(
            tables=block_tables.data_ptr(),
            query_start=query_start.data_ptr(),
            context_lens=context_lens.data_ptr(),
            num_sequences=query_start.shape[0] - 1,
            table_width=block_tables.stride(0),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            width=head_dim,
            block_size=block_size,
            window=window or 0,
            chunk=chunk or 0,
            scale=scale,
        )
        self._reference = ctypes.addressof(self._call)

    def attend(self, q: torch.Tensor, kv_layer: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """`q` `[T, Hq, D]`, each token's heads contiguous, to `[T, Hq * D]`; `sinks` `[Hq]` float32."""
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        call = self._call
        call.q, call.q_stride, call.out, call.layer = q.data_ptr(), q.stride(0), out.data_ptr(), kv_layer.data_ptr()
        call.sinks = address_of(sinks)
        load_library().tandem_attention(self._reference)
        return out


def split(packed: torch.Tensor, rows: int, columns: int, memory: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """The packed matrix of `rows` x `columns` in 12 bits a weight, bit for bit, as uint8 that `memory` gives.

    Behind its head it stays bfloat16 where it would not get smaller by a fifth.
    """
    values, num_beside = choose_values(count_highs(packed, rows, columns))
    places = SplitPlaces(rows, columns)
    size = places.size(num_beside)
    if is_worth(size, packed.nbytes):
        made = memory(size)
        split_pack(packed, rows, columns, values, num_beside, made.data_ptr())
        return made
    made = memory(HEAD + packed.nbytes)
    made[:HEAD] = torch.from_numpy(make_head(made.nbytes, 0, is_split=False))
    made[HEAD:] = packed.view(torch.uint8)
    return made


def count_highs(packed: torch.Tensor, rows: int, columns: int) -> npt.NDArray[np.int64]:
    """How many weights of the packed matrix, with its padding, have each value of the high byte without its sign."""
    counts = np.zeros(NUM_HIGHS, np.int64)
    load_library().tandem_split_count(packed.data_ptr(), rows, columns, counts.ctypes.data)
    return counts


def split_pack(
    packed: torch.Tensor, rows: int, columns: int, values: npt.NDArray[np.uint8], num_beside: int, address: int
) -> None:
    """The packed matrix in 12 bits a weight to `address`, with `num_beside` weights that have none of `values`."""
    load_library().tandem_split_pack(packed.data_ptr(), rows, columns, values.ctypes.data, num_beside, address)


def is_split(memory: torch.Tensor) -> bool:
    """Whether memory that `split` made has 12 bits a weight; else the packed matrix begins `HEAD` bytes on."""
    return bool(memory[IS_SPLIT])


def unsplit(memory: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """What `split` was given, flat."""
    blocks = -(-rows // COLUMNS)
    if not is_split(memory):
        return memory[HEAD:].view(torch.bfloat16)
    packed = torch.empty(blocks * COLUMNS * columns, dtype=torch.bfloat16)
    unsplit_to(memory.numpy(), rows, columns, packed)
    return packed


def unsplit_to(memory: npt.NDArray[np.uint8], rows: int, columns: int, packed: torch.Tensor) -> None:
    """A matrix of `rows` x `columns` in 12 bits a weight, in the layout of products to `packed`."""
    load_library().tandem_split_unpack(memory.ctypes.data, rows, columns, packed.data_ptr())


def split_rows(memory: torch.Tensor, rows: int, columns: int, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` int64 `[T]`, each below `rows`, of a matrix that `split` made: plain, `[T, columns]`."""
    if not is_split(memory):
        blocks = memory[HEAD:].view(torch.bfloat16).view(-1, columns // 2, COLUMNS, 2)
        return blocks[ids // COLUMNS, :, ids % COLUMNS].reshape(-1, columns)
    ids = ids.contiguous()
    out = torch.empty(ids.shape[0], columns, dtype=torch.bfloat16)
    load_library().tandem_split_rows(memory.data_ptr(), rows, columns, ids.data_ptr(), ids.shape[0], out.data_ptr())
    return out
