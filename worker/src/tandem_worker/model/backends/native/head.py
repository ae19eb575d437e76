"""A draft head's layer in one call of the library: entries of tokens, and a pass over many chains of guesses."""

from __future__ import annotations

import ctypes
import logging
import sys
from array import array
from collections.abc import Sequence

import torch

from tandem_worker.model.backends.native import library
from tandem_worker.model.backends.native.layers import MAX_ROWS, NativeHead, NativeLinear, NativeMLP, NativeRMSNorm
from tandem_worker.model.backends.native.matrix import Matrix, describe_matrix
from tandem_worker.model.layers.draft import HeadParts

logger = logging.getLogger(__name__)

_Address, _Index, _Float = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_float
_PIECE = 1024
"""Positions whose rotations are computed at a time: in float32 they take several times what is kept of them."""
_SPARE = 8
"""Room is made for an eighth more positions than are there."""


class _Head(ctypes.Structure):
    """`Head` of head.cpp."""

    _fields_ = (
        *((name, _Address) for name in ("input_norm", "state_norm", "mlp_norm", "norm")),
        *((name, Matrix) for name in ("queries", "keys_values", "out", "gate_up", "down", "output")),
        *((name, _Index) for name in ("hidden", "num_heads", "num_kv_heads", "width", "block_size")),
        *((name, _Index) for name in ("adds_normed", "gives_normed")),
        *((name, _Float) for name in ("eps", "scale")),
    )


class _Entered(ctypes.Structure):
    """`Entered` of head.cpp."""

    _fields_ = (
        *((name, _Address) for name in ("embedded", "states", "positions", "cos", "sin", "working")),
        ("rows", _Index),
    )


class _Chains(ctypes.Structure):
    """`Chains` of head.cpp."""

    _fields_ = tuple((name, _Address) for name in ("contexts", "slots", "table", "made", "logits"))


def find_obstacle(parts: HeadParts) -> str | None:
    """Why the library does not take a head whole, as a part of a sentence; None when it does."""
    if sys.maxsize != MAX_ROWS:
        return "oneDNN multiplies many rows with AMX"
    norms = (parts.input_norm, parts.state_norm, parts.mlp_norm, parts.norm)
    if not all(isinstance(norm, NativeRMSNorm) and norm.weight is not None and norm.is_whole for norm in norms):
        return "its norms are not the library's"
    if len({norm.eps for norm in norms}) > 1:
        return "its norms differ in what they add"
    if not isinstance(parts.mlp, NativeMLP):
        return "its MLP is not the library's"
    output = _find_output(parts)
    matrices = (parts.queries, parts.keys_values, parts.out, parts.mlp.gate_up, parts.mlp.down, output)
    if not all(isinstance(matrix, NativeLinear) and matrix.address is not None for matrix in matrices):
        return "its matrices have another layout"
    if any(matrix.reduce is not None for matrix in (parts.out, parts.mlp.down)):
        return "its results are summed over ranks"
    if parts.head_dim % library.LANES:
        return f"the width of its heads is no multiple of {library.LANES}"
    if parts.mlp.gate_up.out_features // 2 % library.COLUMNS:
        return f"the width of its MLP is no multiple of {library.COLUMNS}"
    return None


def _find_output(parts: HeadParts) -> NativeLinear | None:
    """The output's matrix, where it is the library's and whole."""
    linear = parts.output.linear
    return linear.linear if isinstance(linear, NativeHead) and parts.output.gather is None else None


def build_head_calls(parts: HeadParts, block_size: int) -> NativeHeadCalls | None:
    """For blocks of so many tokens; None where there is an obstacle, which the log tells."""
    why = find_obstacle(parts)
    if why is not None:
        logger.info("the draft head is computed kernel by kernel", extra={"why": why})
        return None
    return NativeHeadCalls(parts, block_size)


class NativeHeadCalls:
    """Satisfies `HeadCalls`, for a head without obstacle."""

    def __init__(self, parts: HeadParts, block_size: int) -> None:
        """`block_size`: tokens of a block."""
        output = _find_output(parts)
        assert output is not None, "it has an obstacle"
        self._parts = parts  # they must live as long as their addresses are used
        self._hidden, self._num_guessed = parts.queries.in_features // 2, output.out_features
        self._head = _Head(
            input_norm=library.address_of(parts.input_norm.weight),
            state_norm=library.address_of(parts.state_norm.weight),
            mlp_norm=library.address_of(parts.mlp_norm.weight),
            norm=library.address_of(parts.norm.weight),
            queries=describe_matrix(parts.queries),
            keys_values=describe_matrix(parts.keys_values),
            out=describe_matrix(parts.out),
            gate_up=describe_matrix(parts.mlp.gate_up),
            down=describe_matrix(parts.mlp.down),
            output=describe_matrix(output),
            hidden=self._hidden,
            num_heads=parts.num_heads,
            num_kv_heads=parts.num_kv_heads,
            width=parts.head_dim,
            block_size=block_size,
            adds_normed=int(parts.adds_normed),
            gives_normed=int(parts.gives_normed),
            eps=parts.norm.eps,
            scale=parts.head_dim**-0.5,
        )
        written = 2 * self._hidden + parts.head_dim + parts.keys_values.out_features
        self._written_width = written
        wide = 2 * parts.queries.out_features + 3 * self._hidden + parts.mlp.down.in_features
        self._advanced_width = written + wide
        self._cos = self._sin = torch.empty(0, parts.head_dim // 2, dtype=torch.bfloat16)
        self._table = torch.empty(0, dtype=torch.int32)

    def write(
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        kv_layer: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        entered = self._enter(embedded, states, positions.data_ptr(), int(positions.max()), self._written_width)
        library.load_library().tandem_head_write(
            ctypes.addressof(self._head), ctypes.addressof(entered[0]), slots.data_ptr(), kv_layer.data_ptr()
        )

    def advance(
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        positions: Sequence[int],
        contexts: Sequence[torch.Tensor],
        slots: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(contexts)
        places, free = array("q", positions), array("q", slots)
        entered = self._enter(embedded, states, places.buffer_info()[0], max(positions), self._advanced_width)
        most = max(map(len, contexts))
        if len(self._table) < most:
            self._table = torch.arange(2 * most, dtype=torch.int32)
        made, logits = states.new_empty(rows, self._hidden), torch.empty(rows, self._num_guessed)
        addresses = array("Q", (context.data_ptr() for context in contexts))
        chains = _Chains(
            contexts=addresses.buffer_info()[0],
            slots=free.buffer_info()[0],
            table=self._table.data_ptr(),
            made=made.data_ptr(),
            logits=logits.data_ptr(),
        )
        library.load_library().tandem_head_advance(
            ctypes.addressof(self._head), ctypes.addressof(entered[0]), ctypes.addressof(chains)
        )
        return logits, made

    def _enter(
        self, embedded: torch.Tensor, states: torch.Tensor, positions: int, last: int, width: int
    ) -> tuple[_Entered, torch.Tensor]:
        """The description, and the working memory, which must live as long."""
        if last >= len(self._cos):
            self._extend(last)
        rows = len(embedded)
        working = embedded.new_empty(rows * width)
        entered = _Entered(
            embedded=embedded.data_ptr(),
            states=states.data_ptr(),
            positions=positions,
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
            working=working.data_ptr(),
            rows=rows,
        )
        return entered, working

    def _extend(self, last: int) -> None:
        """Rotations of positions up to this one, and some more, beside those that are known."""
        end = last + 1 + max(_PIECE, last // _SPARE)
        pieces = torch.arange(len(self._cos), end).split(_PIECE)
        made = [self._parts.rotary.at(piece, torch.bfloat16) for piece in pieces]
        self._cos = torch.cat([self._cos, *(rotation.cos for rotation in made)])
        self._sin = torch.cat([self._sin, *(rotation.sin for rotation in made)])
