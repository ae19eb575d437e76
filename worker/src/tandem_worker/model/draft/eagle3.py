"""An EAGLE-3 head (arXiv:2503.01840): one decoder layer over a model's inner states and the token that followed.

The entry of (state t, token t + 1) is rotated for position t, and its output says token t + 2. In its own turn that
output is the state of the next entry, so a head guesses to any depth. The first state of a chain is `fc` of the model's
features; queries, keys and values are made of [norm(embedding), norm(state)], twice as wide as the layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from tandem_worker.host.errors import StartupError
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
from tandem_worker.model.draft.head import Embed
from tandem_worker.model.draft.weights import EMBEDDING, LAYER
from tandem_worker.model.layers.draft import HeadCalls, HeadParts
from tandem_worker.model.layers.linear import Linear
from tandem_worker.model.layers.norm import RMSNorm


class Fusion:
    """`fc`, which makes states of the model's features. Each stage of a pipeline has the columns for the features of
    its layers, and adds its part to the sum. Tensor-parallel ranks have the same ones: sharing them would cost an
    exchange in each step."""

    def __init__(self, config: HeadConfig, build: Build, layers: range) -> None:
        """`layers`: those of this stage."""
        self._config = config
        self.width = config.layer.hidden_size
        self._places = [place for place, layer in enumerate(config.feature_layers) if layer in layers]
        self.taps = tuple(config.feature_layers[place] - layers.start for place in self._places)
        """Layers of the stage, from 0, before which the features are taken."""
        self._norms = self._load_norms(build)
        self._bias: torch.Tensor | None = None
        if build.context.is_last_stage and build.loader.has("fc.bias"):
            self._bias = build.loader.load("fc.bias", (self.width,))
        self._fc = self._load_columns(build) if self._places else None

    @staticmethod
    def list_tensors(config: HeadConfig) -> set[str]:
        """Names of what the stages of a pipeline share."""
        count = len(config.feature_layers)
        return {"fc.weight", "fc.bias", "input_norm.weight", *(f"fc_norm.{index}.weight" for index in range(count))}

    def add(self, features: torch.Tensor, sums: torch.Tensor | None) -> torch.Tensor:
        """States `[T, hidden]`, or this stage's part of them and those of the stages before, from the features of its
        layers side by side, `[T, features * target_hidden]`."""
        if self._bias is not None:
            sums = self._bias.expand(features.shape[0], -1) if sums is None else sums + self._bias
        if self._fc is None:
            return features.new_zeros(features.shape[0], self.width) if sums is None else sums
        if self._config.norm_before_fc:
            features = self._norms[0](features)
        elif self._config.fc_norm:
            parts = zip(self._norms, features.chunk(len(self._norms), dim=-1), strict=True)
            features = torch.cat([norm(part.contiguous()) for norm, part in parts], -1)
        return self._fc(features) if sums is None else self._fc.add_to(features, sums.contiguous())

    def _load_norms(self, build: Build) -> list[RMSNorm]:
        config = self._config
        width = config.target_hidden_size
        if config.norm_before_fc:
            if build.context.pp_size > 1:
                raise StartupError(
                    "DraftUnsupported",
                    "The draft head cannot be computed: it has norm_before_fc, one norm over the states of all "
                    "pipeline stages. Leave pipeline parallelism at 1, or choose a head without it.",
                )
            return [_load_norm(build, config, "input_norm", width * len(self._places))]
        return [_load_norm(build, config, f"fc_norm.{place}", width) for place in self._places if config.fc_norm]

    def _load_columns(self, build: Build) -> Linear:
        width, count = self._config.target_hidden_size, len(self._config.feature_layers)
        first, end = self._places[0], self._places[-1] + 1
        piece = None if end - first == count else Slice(1, first * width, end * width)
        part = Part(name="fc.weight", shape=(self.width, count * width), piece=piece)
        return build.backend.linear(build.loader.matrix([part]))


def _load_norm(build: Build, config: HeadConfig, name: str, width: int) -> RMSNorm:
    weight = build.loader.load(f"{name}.weight", (width,))
    return build.backend.norm(weight, config.layer.rms_norm_eps)


class Eagle3Head:
    """Satisfies `DraftHead`."""

    def __init__(self, config: HeadConfig, build: Build, embed: Embed) -> None:
        """`embed`: the model's embedding, for heads that have none."""
        layer, loader = config.layer, build.loader
        self.config = config
        self.hidden_size = layer.hidden_size
        self._share = HeadShare.of(layer, build.context)
        self.num_heads, self.num_kv_heads = self._share.num_heads, self._share.num_kv_heads
        self.head_dim = layer.head_dim
        self.entry_width = 2 * self.num_kv_heads * self.head_dim
        self.dtype = loader.dtype
        self._embed = embed
        if loader.has(EMBEDDING):
            self._embed = load_embedding(build, EMBEDDING, (layer.vocab_size, layer.hidden_size))
        self._input_norm = _load_norm(build, config, f"{LAYER}input_layernorm", layer.hidden_size)
        self._state_norm = _load_norm(build, config, f"{LAYER}hidden_norm", layer.hidden_size)
        self._queries = self._load_projection(build, ("q",))
        self._keys_values = self._load_projection(build, ("k", "v"))
        self._out = self._load_out(build)
        self._mlp_norm = _load_norm(build, config, f"{LAYER}post_attention_layernorm", layer.hidden_size)
        self._mlp = load_mlp(
            build, f"{LAYER}mlp.", layer.hidden_size, layer.intermediate_size, bias=layer.flag("mlp_bias")
        )
        self._norm = _load_norm(build, config, "norm", layer.hidden_size)
        self._lm_head = load_lm_head(build, (config.draft_vocab_size, layer.hidden_size), tied=None)
        self._rotary = build_rotary(layer, build)
        self._build_calls, self._calls = build.backend.head_calls, dict[int, HeadCalls | None]()

    def _find_calls(self, block_size: int) -> HeadCalls | None:
        """The backend's, for blocks of so many tokens."""
        if block_size not in self._calls:
            parts = HeadParts(
                input_norm=self._input_norm,
                state_norm=self._state_norm,
                mlp_norm=self._mlp_norm,
                norm=self._norm,
                queries=self._queries,
                keys_values=self._keys_values,
                out=self._out,
                mlp=self._mlp,
                output=self._lm_head,
                rotary=self._rotary,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                adds_normed=self.config.norm_before_residual,
                gives_normed=self.config.norm_output,
            )
            self._calls[block_size] = self._build_calls(parts, block_size)
        return self._calls[block_size]

    def kv_layer_spec(self, block_size: int) -> KVLayerSpec:
        """Shape of a block of its entries' keys and values."""
        return kv_layer_spec(block_size, self.num_kv_heads, self.head_dim)

    def enter(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries `[T, 2 * hidden]` of tokens `[T]` with the states before them `[T, hidden]`, and what the layer adds
        to, `[T, hidden]`."""
        normed = self._state_norm(states)
        entries = torch.cat((self._input_norm(self._embed(tokens)), normed), dim=-1)
        return entries, normed if self.config.norm_before_residual else states

    def write(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        kv_layer: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        size = kv_layer.shape[3]
        calls = self._find_calls(size)
        if calls is not None:
            calls.write(self._embed(tokens), states, positions, kv_layer, slots)
            return
        entries, _ = self.enter(tokens, states)
        kv_layer[slots // size, :, :, slots % size] = self._make_keys_values(entries, positions)

    def gather(self, kv_layer: torch.Tensor, blocks: Sequence[int], memory: torch.Tensor) -> torch.Tensor:
        """`[2, num_kv_heads, span - 1, head_dim]`; for the library blocks as they are."""
        _, _, heads, size, dim = kv_layer.shape
        count = len(blocks)
        if self._find_calls(size) is not None:
            context = memory.view(-1, 2, heads, size, dim)
            places = context[:count]
            if not blocks:
                context[0] = 0.0  # what is not seen is multiplied by none
        else:
            context = memory.view(2, heads, -1, dim)
            places = context[:, :, : count * size].view(2, heads, count, size, dim).permute(2, 0, 1, 3, 4)
            context = context[:, :, 1:]
        if blocks:
            torch.index_select(kv_layer, 0, torch.tensor(blocks, device=kv_layer.device), out=places)
        return context

    def advance(
        self,
        tokens: Sequence[int],
        states: torch.Tensor,
        positions: Sequence[int],
        contexts: Sequence[torch.Tensor],
        lengths: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor(tokens, device=states.device)
        calls = self._find_calls(contexts[0].shape[3]) if contexts[0].dim() == 5 else None
        if calls is not None:
            return calls.advance(self._embed(ids), states, positions, contexts, [length + 1 for length in lengths])
        entries, residual = self.enter(ids, states)
        places = torch.tensor(positions, device=states.device)
        queries = self._make_queries(entries, places)
        made = self._make_keys_values(entries, places)
        attended = torch.empty(len(tokens), self.num_heads * self.head_dim, dtype=self.dtype, device=states.device)
        for row, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
            context[:, :, length] = made[row]
            keys, values = context[:, None, :, : length + 1]
            grouped = queries[row].view(1, self.num_kv_heads, -1, self.head_dim)
            attended[row] = functional.scaled_dot_product_attention(grouped, keys, values).flatten()
        return self._finish(attended, residual)

    def _make_keys_values(self, entries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[T, 2, num_kv_heads, head_dim]`, keys rotated for `positions` `[T]`, those of the states."""
        made = self._keys_values(entries).view(-1, 2, self.num_kv_heads, self.head_dim)
        self._rotary.at(positions, self.dtype).rotate_half_(made[:, 0])
        return made

    def _make_queries(self, entries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[T, num_heads, head_dim]`, rotated for `positions` `[T]`."""
        made = self._queries(entries).view(-1, self.num_heads, self.head_dim)
        self._rotary.at(positions, self.dtype).rotate_half_(made)
        return made

    def _finish(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[T, draft_vocab_size]` float32 and the states of the next depth `[T, hidden]`, from what attention
        gathered, `[T, num_heads * head_dim]`."""
        hidden = self._out.add_to(attended, residual)
        hidden = self._mlp.add_to(self._mlp_norm(hidden), hidden)
        normed = self._norm(hidden)
        return self._lm_head(normed), normed if self.config.norm_output else hidden

    # -- loading -------------------------------------------------------------------------------------------------

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
