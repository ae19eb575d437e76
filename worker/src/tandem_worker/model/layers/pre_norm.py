"""A transformer layer around its two halves, attention and MLP, each behind a norm and added to the residual stream,
and the stack of such layers that a model is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from tandem_worker.model.contract import KVLayerSpec
from tandem_worker.model.layers.norm import RMSNorm
from tandem_worker.model.layers.step import LiveRows, Step


class DecoderLayer(Protocol):
    """One layer of a family."""

    def kv_layer_spec(self, block_size: int) -> KVLayerSpec:
        """Shape of one block of this layer, for `block_size` tokens."""
        ...

    def forward(self, hidden: torch.Tensor, step: Step, kv_layer: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]` to `[T, hidden]`; writes the layer's KV."""
        ...


class AttentionPart(Protocol):
    """The first half of a layer."""

    def kv_layer_spec(self, block_size: int) -> KVLayerSpec:
        """Shape of one block of this layer, for `block_size` tokens."""
        ...

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step, kv_layer: torch.Tensor
    ) -> torch.Tensor:
        """`residual + attention(x)` for `[T, hidden]`, where None adds nothing; writes the layer's KV."""
        ...


class MLPPart(Protocol):
    """The second half of a layer, dense or a mixture of experts."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor, step: LiveRows) -> torch.Tensor:
        """`residual + mlp(x)` for `[T, hidden]`, as a new tensor."""
        ...


class PreNormLayer:
    """Attention and MLP, each behind a norm and added to the residual stream: the layer of every family here."""

    def __init__(self, input_norm: RMSNorm, attention: AttentionPart, mlp_norm: RMSNorm, mlp: MLPPart) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def kv_layer_spec(self, block_size: int) -> KVLayerSpec:
        return self.attention.kv_layer_spec(block_size)

    def forward(self, hidden: torch.Tensor, step: Step, kv_layer: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]` to `[T, hidden]`, in the type it came in; writes the layer's KV."""
        hidden = self.attention.forward(self.input_norm(hidden), hidden, step, kv_layer)
        return self.mlp.forward(self.mlp_norm(hidden), hidden, step)


class Taps(NamedTuple):
    """Takes the streams between some layers out, side by side."""

    layers: Sequence[int]
    """Those before which a stream is taken; the number of layers: behind the last one."""
    features: torch.Tensor
    """`[T, taps * hidden]`, in the order of `layers`."""

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        """The stream `[T, hidden]` before a layer, which may be none of them."""
        if layer in self.layers:
            place = self.layers.index(layer) * hidden.shape[1]
            self.features[:, place : place + hidden.shape[1]] = hidden


class LayerStack:
    """Layers that are computed one by one. Backends may compute several in one call, with the same bits."""

    is_one_call = False
    """Whether `forward` is one call, in which other threads have the interpreter's lock."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self.layers = tuple(layers)

    def forward(
        self,
        hidden: torch.Tensor,
        step: Step,
        kv_layers: Sequence[torch.Tensor],
        first: int = 0,
        end: int | None = None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """`[T, hidden]` through the layers from `first` on, up to `end`, by default all; `hidden` stays as it is.

        `kv_layers` are those of all layers of the stack. `taps` get the streams between these layers that they want.
        """
        end = len(self.layers) if end is None else end
        for index in range(first, end):
            if taps is not None:
                taps.take(index, hidden)
            hidden = self.layers[index].forward(hidden, step, kv_layers[index])
        if taps is not None and end == len(self.layers):
            taps.take(end, hidden)
        return hidden
