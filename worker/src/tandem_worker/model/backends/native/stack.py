"""Runs of plain decoder layers in one call of the library; the others are computed one by one, kernel by kernel.

`tandem_layers` does what the layers' own `forward` does, kernel by kernel in the same order, so all bits are the
same. Which layers it takes is decided once, when the model is built.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from tandem_worker.model.backends.native import library
from tandem_worker.model.backends.native.layers import (
    MAX_ROWS,
    NativeLinear,
    NativeMLP,
    NativeRMSNorm,
    NativeSelfAttention,
)
from tandem_worker.model.backends.native.matrix import Matrix, describe_matrix
from tandem_worker.model.layers.attention import Rotate
from tandem_worker.model.layers.pre_norm import DecoderLayer, LayerStack, PreNormLayer, Taps
from tandem_worker.model.layers.step import Step

logger = logging.getLogger(__name__)

_Address, _Index, _Float = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_float


class _Layer(ctypes.Structure):
    """`Layer` of layers.cpp."""

    _fields_ = (
        *((name, _Address) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm", "sinks")),
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _Index) for name in ("num_heads", "num_kv_heads", "width", "window", "chunk")),
        *((name, _Float) for name in ("scale", "input_eps", "mlp_eps", "head_eps")),
    )


class _SharedStep(ctypes.Structure):
    """`SharedStep` of layers.cpp."""

    _fields_ = (
        *((name, _Address) for name in ("cos", "sin", "slots", "tables", "query_start", "context_lens")),
        *((name, _Address) for name in ("normed", "wide", "taps", "features")),
        *((name, _Index) for name in ("rows", "num_sequences", "table_width", "block_size", "feature_stride")),
    )


def find_obstacle(layer: DecoderLayer) -> str | None:
    """Why the library does not take this layer whole, as a part of a sentence; None when it does."""
    if sys.maxsize != MAX_ROWS:
        return "oneDNN multiplies many rows with AMX"
    if type(layer) is not PreNormLayer:
        return "it is no pair of attention and MLP behind norms"
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, NativeSelfAttention):
        return "its attention is another kind (latents)"
    if type(mlp) is not NativeMLP:
        return "its MLP is a mixture of experts"
    if not isinstance(attention.place, Rotate) or attention.place.interleaved:
        return "its heads are not rotated half by half"
    if attention.spec.head_dim % library.LANES:
        return f"the width of its heads is no multiple of {library.LANES}"
    if mlp.gate_up.out_features // 2 % library.COLUMNS:
        return f"the width of its MLP is no multiple of {library.COLUMNS}"
    if not all(isinstance(norm, NativeRMSNorm) and norm.is_whole for norm in (layer.input_norm, layer.mlp_norm)):
        return "its norms are not over all of a row"
    matrices = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    if not all(isinstance(matrix, NativeLinear) and matrix.address is not None for matrix in matrices):
        return "its matrices have another layout"
    if any(matrix.reduce is not None for matrix in matrices):
        return "its results are summed over ranks"
    return None


def _describe(layer: DecoderLayer) -> _Layer:
    """Addresses and shapes of a layer without obstacle; they hold as long as the layer lives."""
    assert isinstance(layer, PreNormLayer)
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, NativeSelfAttention)
    assert isinstance(mlp, NativeMLP)
    assert isinstance(attention.place, Rotate)
    spec, head_norm = attention.spec, attention.place.norm
    return _Layer(
        input_norm=library.address_of(layer.input_norm.weight),
        mlp_norm=library.address_of(layer.mlp_norm.weight),
        q_norm=None if head_norm is None else head_norm.query_weight.data_ptr(),
        k_norm=None if head_norm is None else head_norm.key_weight.data_ptr(),
        sinks=library.address_of(spec.sinks),
        qkv=describe_matrix(attention.qkv),
        out=describe_matrix(attention.out),
        gate_up=describe_matrix(mlp.gate_up),
        down=describe_matrix(mlp.down),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        width=spec.head_dim,
        window=spec.window or 0,
        chunk=spec.chunk or 0,
        scale=spec.scale,
        input_eps=layer.input_norm.eps,
        mlp_eps=layer.mlp_norm.eps,
        head_eps=0.0 if head_norm is None else head_norm.eps,
    )


def _wide(layer: _Layer) -> int:
    """Elements of working memory that a row needs beside its norm."""
    return max(layer.qkv.columns + layer.num_heads * layer.width, layer.gate_up.columns // 2)


class _Run:
    """Neighbouring layers that are one call."""

    def __init__(self, first: int, layers: Sequence[DecoderLayer]) -> None:
        described = [_describe(layer) for layer in layers]
        self.first, self.end = first, first + len(layers)
        self.wide = max(map(_wide, described))
        self._layers = (_Layer * len(layers))(*described)

    def address(self, index: int) -> int:
        """Address of the description of the stack's layer `index`."""
        return ctypes.addressof(self._layers) + (index - self.first) * ctypes.sizeof(_Layer)


class NativeStack(LayerStack):
    """Runs of layers without obstacle are one call each."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        super().__init__(layers)
        obstacles = [find_obstacle(layer) for layer in layers]
        self.obstacles = Counter(obstacle for obstacle in obstacles if obstacle is not None)
        """How many layers are computed apart, by the reason."""
        self._runs: list[_Run] = []
        first = 0
        for whole, group in itertools.groupby(obstacle is None for obstacle in obstacles):
            end = first + len(list(group))
            if whole:
                self._runs.append(_Run(first, self.layers[first:end]))
            first = end
        self.is_one_call = len(self._runs) == 1 and not self.obstacles
        together = len(self.layers) - self.obstacles.total()
        logger.info("layers are computed together", extra={"layers": together, "apart": dict(self.obstacles)})

    def forward(
        self,
        hidden: torch.Tensor,
        step: Step,
        kv_layers: Sequence[torch.Tensor],
        first: int = 0,
        end: int | None = None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        end = len(self.layers) if end is None else end
        at = first
        for run in self._runs:
            start, stop = max(run.first, at), min(run.end, end)
            if start >= stop:
                continue
            hidden = super().forward(hidden, step, kv_layers, at, start, taps)
            hidden = self._together(run, hidden, step, kv_layers, start, stop, taps)
            at = stop
        return super().forward(hidden, step, kv_layers, at, end, taps)

    def _together(
        self,
        run: _Run,
        hidden: torch.Tensor,
        step: Step,
        kv_layers: Sequence[torch.Tensor],
        first: int,
        end: int,
        taps: Taps | None,
    ) -> torch.Tensor:
        """The stream before the layer `end` is not taken here."""
        batch, rotation = step.batch, step.rotation
        rows, width = hidden.shape
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        places = (_Address * (end - first))(*(layer.data_ptr() for layer in kv_layers[first:end]))
        working = hidden.new_empty(rows * (width + run.wide))
        tapped = None if taps is None else _place_taps(taps, first, end)
        shared = _SharedStep(
            cos=rotation.cos.data_ptr(),
            sin=rotation.sin.data_ptr(),
            slots=batch.slot_mapping.data_ptr(),
            tables=batch.block_tables.data_ptr(),
            query_start=batch.query_start.data_ptr(),
            context_lens=batch.context_lens.data_ptr(),
            normed=working.data_ptr(),
            wide=working.data_ptr() + rows * width * working.itemsize,
            taps=None if tapped is None else ctypes.addressof(tapped),
            features=None if taps is None else taps.features.data_ptr(),
            rows=rows,
            num_sequences=batch.query_start.shape[0] - 1,
            table_width=batch.block_tables.stride(0),
            block_size=step.block_size,
            feature_stride=0 if taps is None else taps.features.stride(0),
        )
        errors: list[BaseException] = []
        for layer in range(first, end):
            step.entering(layer)
        library.load_library().tandem_layers(
            run.address(first),
            end - first,
            ctypes.addressof(shared),
            hidden.data_ptr(),
            out.data_ptr(),
            ctypes.addressof(places),
            _tell_of_layers(step, first, errors),
        )
        if errors:
            raise errors.pop()
        return out


def _place_taps(taps: Taps, first: int, end: int) -> ctypes.Array[ctypes.c_ssize_t]:
    """For each layer from `first` to `end` the place of the stream before it among the features; -1: it has none."""
    return (_Index * (end - first))(
        *(taps.layers.index(layer) if layer in taps.layers else -1 for layer in range(first, end))
    )


def _tell_of_layers(step: Step, first: int, errors: list[BaseException]) -> Any:
    """What the library calls for each layer that is written, counted from `first`; null where nobody listens.

    What a listener raises goes to `errors`, since nothing may be raised through the library, and ends the call.
    """
    if step.batch.on_layer is None:
        return library.Written()

    def written(layer: int) -> int:
        try:
            step.written(first + layer)
        except BaseException as error:
            errors.append(error)
        return len(errors)

    return library.Written(written)
