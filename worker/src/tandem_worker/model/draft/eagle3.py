"""An EAGLE-3 head (arXiv:2503.01840): one decoder layer over a model's inner states and the token that followed.

The entry of (state t, token t + 1) is rotated for position t, and its output says token t + 2. In its own turn that
output is the state of the next entry, so a head guesses to any depth. The first state of a chain is `fc` of the model's
features; queries, keys and values are made of [norm(embedding), norm(state)], twice as wide as the layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem_worker.model.assembly.attention import HeadShare
from tandem_worker.model.assembly.build import Build
from tandem_worker.model.assembly.decoder import build_rotary
from tandem_worker.model.assembly.embedding import load_embedding, load_lm_head
from tandem_worker.model.assembly.mlp import load_mlp
from tandem_worker.model.attention import kv_layer_spec
from tandem_worker.model.checkpoint.loader import Part
from tandem_worker.model.checkpoint.stored import Slice
from tandem_worker.model.contract import KVLayerSpec
from tandem_worker.model.draft.config import HeadConfig
from tandem_worker.model.draft.weights import EMBEDDING, LAYER
from tandem_worker.model.layers.linear import Linear
from tandem_worker.model.layers.norm import RMSNorm

Embed = Callable[[torch.Tensor], torch.Tensor]


class Eagle3Head:
    """Weights of a head on one device, and its arithmetic, row by row. Attention is its callers'.

    Tensor-parallel ranks share it as they share the model, but for `fc`, which each has whole: a step would wait for
    one exchange more. They make the same calls, and each has all logits.
    """

    def __init__(self, config: HeadConfig, build: Build, vocabulary: torch.Tensor | None, embed: Embed) -> None:
        """`vocabulary` as in `read_vocabulary`. `embed`: the model's embedding, for heads that have none."""
        layer, loader = config.layer, build.loader
        self.config = config
        self.hidden_size = layer.hidden_size
        self._share = HeadShare.of(layer, build.context)
        self.num_heads, self.num_kv_heads = self._share.num_heads, self._share.num_kv_heads
        self.head_dim = layer.head_dim
        self.dtype = loader.dtype
        self._vocabulary = None if vocabulary is None else vocabulary.to(loader.device)
        self._embed = embed
        if loader.has(EMBEDDING):
            self._embed = load_embedding(build, EMBEDDING, (layer.vocab_size, layer.hidden_size))
        self._fc_norms, self._fc = self._load_fusion(build)
        self._input_norm = self._load_norm(build, f"{LAYER}input_layernorm", layer.hidden_size)
        self._state_norm = self._load_norm(build, f"{LAYER}hidden_norm", layer.hidden_size)
        self._queries = self._load_projection(build, ("q",))
        self._keys_values = self._load_projection(build, ("k", "v"))
        self._out = self._load_out(build)
        self._mlp_norm = self._load_norm(build, f"{LAYER}post_attention_layernorm", layer.hidden_size)
        self._mlp = load_mlp(
            build, f"{LAYER}mlp.", layer.hidden_size, layer.intermediate_size, bias=layer.flag("mlp_bias")
        )
        self._norm = self._load_norm(build, "norm", layer.hidden_size)
        self._lm_head = load_lm_head(build, (config.draft_vocab_size, layer.hidden_size), tied=None)
        self._rotary = build_rotary(layer, build)

    def kv_layer_spec(self, block_size: int) -> KVLayerSpec:
        """Shape of a block of its entries' keys and values."""
        return kv_layer_spec(block_size, self.num_kv_heads, self.head_dim)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """States `[T, hidden]` from the model's features side by side, `[T, layers * target_hidden]`."""
        if self.config.norm_before_fc:
            features = self._fc_norms[0](features)
        elif self.config.fc_norm:
            parts = features.chunk(len(self._fc_norms), dim=-1)
            features = torch.cat(
                [norm(part.contiguous()) for norm, part in zip(self._fc_norms, parts, strict=True)], -1
            )
        return self._fc(features)

    def enter(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries `[T, 2 * hidden]` of tokens `[T]` with the states before them `[T, hidden]`, and what the layer adds
        to, `[T, hidden]`."""
        normed = self._state_norm(states)
        entries = torch.cat((self._input_norm(self._embed(tokens)), normed), dim=-1)
        return entries, normed if self.config.norm_before_residual else states

    def make_keys_values(self, entries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[T, 2, num_kv_heads, head_dim]`, keys rotated for `positions` `[T]`, those of the states."""
        made = self._keys_values(entries).view(-1, 2, self.num_kv_heads, self.head_dim)
        self._rotary.at(positions, self.dtype).rotate_half_(made[:, 0])
        return made

    def make_queries(self, entries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[T, num_heads, head_dim]`, rotated for `positions` `[T]`."""
        made = self._queries(entries).view(-1, self.num_heads, self.head_dim)
        self._rotary.at(positions, self.dtype).rotate_half_(made)
        return made

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[T, draft_vocab_size]` float32 and the states of the next depth `[T, hidden]`, from what attention
        gathered, `[T, num_heads * head_dim]`."""
        hidden = self._out.add_to(attended, residual)
        hidden = self._mlp.add_to(self._mlp_norm(hidden), hidden)
        normed = self._norm(hidden)
        return self._lm_head(normed), normed if self.config.norm_output else hidden

    @property
    def vocabulary(self) -> torch.Tensor | None:
        """`[draft_vocab_size]` int64, the model's numbers of the tokens that are guessed; None: they are the same."""
        return self._vocabulary

    # -- loading -------------------------------------------------------------------------------------------------

    def _load_norm(self, build: Build, name: str, width: int) -> RMSNorm:
        weight = build.loader.load(f"{name}.weight", (width,))
        return build.backend.norm(weight, self.config.layer.rms_norm_eps)

    def _load_fusion(self, build: Build) -> tuple[list[RMSNorm], Linear]:
        config, count = self.config, len(self.config.feature_layers)
        width = count * config.target_hidden_size
        norms: list[RMSNorm] = []
        if config.norm_before_fc:
            norms = [self._load_norm(build, "input_norm", width)]
        elif config.fc_norm:
            norms = [self._load_norm(build, f"fc_norm.{index}", config.target_hidden_size) for index in range(count)]
        fused = Part(name="fc.weight", shape=(self.hidden_size, width))
        bias = build.loader.load("fc.bias", (self.hidden_size,)) if build.loader.has("fc.bias") else None
        return norms, build.backend.linear(build.loader.matrix([fused]), bias)

    def _load_projection(self, build: Build, kinds: tuple[str, ...]) -> Linear:
        weights: list[Part] = []
        biases: list[Part] = []
        layer, share, dim = self.config.layer, self._share, self.head_dim
        for kind in kinds:
            total, first, count = layer.num_kv_heads, share.first_kv_head, share.num_kv_heads
            if kind == "q":
                total, first, count = layer.num_heads, share.first_head, share.num_heads
            piece = None if count == total else Slice(0, first * dim, (first + count) * dim)
            name = f"{LAYER}self_attn.{kind}_proj"
            weights.append(Part(name=f"{name}.weight", shape=(total * dim, 2 * self.hidden_size), piece=piece))
            biases.append(Part(name=f"{name}.bias", shape=(total * dim,), piece=piece))
        bias = build.loader.stack(biases) if self.config.layer.flag("attention_bias") else None
        return build.backend.linear(build.loader.matrix(weights), bias)

    def _load_out(self, build: Build) -> Linear:
        share, dim, total = self._share, self.head_dim, self.config.layer.num_heads
        name, piece = f"{LAYER}self_attn.o_proj", None
        if share.num_heads != total:
            piece = Slice(1, share.first_head * dim, (share.first_head + share.num_heads) * dim)
        has_bias = self.config.layer.flag("attention_bias")
        bias = build.loader.load(f"{name}.bias", (self.hidden_size,)) if has_bias else None
        part = Part(name=f"{name}.weight", shape=(self.hidden_size, total * dim), piece=piece)
        return build.backend.linear(build.loader.matrix([part]), bias, reduce=build.context.tp)
