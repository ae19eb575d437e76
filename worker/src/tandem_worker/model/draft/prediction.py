"""A module for multi-token prediction, which DeepSeek-V3 publishes behind the model's layers, as a draft head.

From the model's state h of token t and the embedding of token t + 1 it makes `eh_proj [enorm(embedding); hnorm(h)]`,
takes that through one more layer of the model and says token t + 2 by `shared_head.norm` and the model's output matrix
(arXiv:2412.19437, section 2.2; the order of the two is that of the published matrix). Modules beyond the first were not
published: for further tokens it is asked again, with its own output for h.

Which of the two states that a layer's norm stands between is meant the report does not say. The model's state is the
one behind its last norm, and the own one that behind `shared_head.norm`, as in SGLang (`deepseek_nextn.py`); vLLM goes
on from the one before it, with which DeepSeek-R1 was right less often (61.4 against 64.6% of three guesses,
ROCm/ATOM#1764).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from tandem_worker.model.assembly.build import Build
from tandem_worker.model.assembly.decoder import DecoderLM, build_rotary
from tandem_worker.model.checkpoint.loader import Part
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.contract import KVLayerSpec
from tandem_worker.model.draft.head import Embed, Output
from tandem_worker.model.layers.latent import LatentLayer
from tandem_worker.model.layers.step import AllLive


class LastStates:
    """The model's states behind its last norm, which the last stage of a pipeline has; satisfies `head.States`."""

    width = 0

    def __init__(self, model: DecoderLM) -> None:
        self._model = model
        self.taps = (len(model.layers),) if model.context.is_last_stage else ()

    def add(self, features: torch.Tensor, sums: torch.Tensor | None) -> torch.Tensor:
        """The states `[T, hidden]` of the last layer's streams; `[T, 0]` on the stages before."""
        del sums
        return self._model.normalize(features) if self.taps else features


class PredictionHead:
    """Satisfies `DraftHead`."""

    def __init__(self, config: ModelConfig, build: Build, layer: LatentLayer, embed: Embed, output: Output) -> None:
        """`layer`, `embed` and `output`: what is inside the module, loaded already or shared with the model."""
        self.hidden_size = config.hidden_size
        self._attention, self._layer = layer.attention, layer
        self.entry_width = layer.attention.spec.attention.head_dim
        self._embed, self._output = embed, output
        name, hidden = name_module(config), self.hidden_size
        self._embedding_norm, self._state_norm, self._norm = (
            build.backend.norm(build.loader.load(f"{name}{norm}.weight", (hidden,)), config.rms_norm_eps)
            for norm in ("enorm", "hnorm", "shared_head.norm")
        )
        part = Part(name=f"{name}eh_proj.weight", shape=(hidden, 2 * hidden))
        self._join = build.backend.linear(build.loader.matrix([part]))
        self._dtype = build.loader.dtype
        self._rotary = build_rotary(config, build, layer.attention.spec.rope_dim)

    def kv_layer_spec(self, block_size: int) -> KVLayerSpec:
        return self._attention.kv_layer_spec(block_size)

    def write(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        kv_layer: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        x = self._layer.input_norm(self._enter(tokens, states))
        entries = self._attention.make_latents(x, self._rotary.at(positions, self._dtype)).squeeze(1)
        kv_layer.view(-1, self.entry_width).index_copy_(0, slots, entries)

    def gather(self, kv_layer: torch.Tensor, blocks: Sequence[int], memory: torch.Tensor) -> torch.Tensor:
        """`[span - 1, rank + rope]`."""
        context = memory.view(-1, self.entry_width)
        if blocks:
            size = kv_layer.shape[1]
            places = context[: len(blocks) * size].view(len(blocks), size, self.entry_width)
            torch.index_select(kv_layer, 0, torch.tensor(blocks, device=kv_layer.device), out=places)
        return context[1:]

    def advance(
        self,
        tokens: Sequence[int],
        states: torch.Tensor,
        positions: Sequence[int],
        contexts: Sequence[torch.Tensor],
        lengths: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer, spec = self._layer, self._attention.spec
        residual = self._enter(torch.tensor(tokens, device=states.device), states)
        rotation = self._rotary.at(torch.tensor(positions, device=states.device), self._dtype)
        queries, made = self._attention.make_both(layer.input_norm(residual), rotation)
        absorbed = spec.absorb(queries)
        attended = absorbed.new_empty(*absorbed.shape[:2], spec.rank)
        for row, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
            context[length] = made[row, 0]
            keys = context[None, : length + 1]
            attended[row] = functional.scaled_dot_product_attention(
                absorbed[row : row + 1], keys, keys[..., : spec.rank], scale=spec.attention.scale
            )[0]
        hidden = self._attention.out.add_to(spec.bring_out(attended), residual)
        hidden = layer.mlp.forward(layer.mlp_norm(hidden), hidden, AllLive())
        made_states = self._norm(hidden)
        return self._output(made_states), made_states

    def _enter(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The stream `[T, hidden]` that the layer reads and adds to."""
        joined = torch.cat((self._embedding_norm(self._embed(tokens)), self._state_norm(states)), dim=-1)
        return self._join(joined)


def name_module(config: ModelConfig) -> str:
    """What the names of the first module's tensors begin with."""
    return f"model.layers.{config.num_layers}."
