"""The frame of every family: embedding, layers, final norm, output projection, and the pipeline around them."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tandem_worker.model.assembly.build import Build
from tandem_worker.model.assembly.embedding import load_embedding, load_lm_head
from tandem_worker.model.assembly.stages import stage_layers
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.contract import ForwardBatch, KVCache, KVCacheSpec
from tandem_worker.model.layers.embedding import Embedding, LMHead
from tandem_worker.model.layers.norm import RMSNorm
from tandem_worker.model.layers.pre_norm import AttentionPart, DecoderLayer, MLPPart, PreNormLayer, Taps
from tandem_worker.model.layers.rotary import RotaryEmbedding
from tandem_worker.model.layers.step import Step


def load_layer(config: ModelConfig, build: Build, layer: int, attention: AttentionPart, mlp: MLPPart) -> PreNormLayer:
    """A layer around parts that are loaded already, with the norms of the checkpoint's layer `layer`."""
    backend, shape = build.backend, (config.hidden_size,)
    norms = [
        backend.norm(build.loader.load(f"model.layers.{layer}.{name}.weight", shape), config.rms_norm_eps)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    return backend.layer(norms[0], attention, norms[1], mlp)


def build_rotary(config: ModelConfig, build: Build, dim: int | None = None) -> RotaryEmbedding:
    """For heads of `dim`, by default the model's `head_dim`."""
    return RotaryEmbedding(
        config.rope,
        dim or config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        device=build.loader.device,
        rotation=build.backend.rotation,
    )


AddFeatures = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Makes of streams `[T, taps * hidden]` and the sum so far `[T, width]`, None at first, the sum with them."""


class PartSeconds(NamedTuple):
    """How long the parts of one step took."""

    enter: float
    """Embedding, and what the layers share."""
    layers: float
    """All layers of this stage."""
    leave: float
    """Final norm and output projection."""


class DecoderLM:
    """A causal language model from its layers; satisfies `CausalLM`.

    Under pipeline parallelism each stage has a model of its own layers: hidden states come from the stage before and
    go to the stage after, and only the last stage returns logits (others return none, `[0, vocab_size]`).
    """

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        layers: Sequence[DecoderLayer],
        rotary: RotaryEmbedding,
    ) -> None:
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self.device = build.loader.device
        self.dtype = build.loader.dtype
        self.is_lossless = build.loader.is_lossless
        """Whether its matrices take 12 bits a weight where they can."""
        self.embedding = config.embedding
        self.inexact_layers = build.backend.find_inexact([layer.kv_layer_spec(1) for layer in layers])
        """As `inexact`, whatever the group is."""
        self.inexact = self.inexact_layers
        self.exact_rows = sys.maxsize if self.inexact is None else build.backend.count_exact_rows(layers)
        if self.exact_rows > 1 and build.context.tp_size > 2:
            self.inexact = "more than two tensor ranks add their sums in an order that depends on the rows of a step"
            self.exact_rows = 1
        if self.exact_rows > 1 and build.context.ep_size > 1:
            self.inexact, self.exact_rows = "expert ranks compute the tokens of several lanes together", 1
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_layers
        self.num_prediction_layers = config.num_prediction_layers
        """Layers of the checkpoint behind these, which a draft head may be made of."""
        self.context = context = build.context
        self._stack = build.backend.stack(layers)
        self.is_one_call = self._stack.is_one_call
        self._backend = build.backend.attention()
        self._rotary = rotary
        shape = (config.vocab_size, config.hidden_size)
        self._embedding: Embedding | None = None
        self._norm: RMSNorm | None = None
        self._head: LMHead | None = None
        generates = context.is_last_stage and config.embedding is None
        tied = config.tie_word_embeddings and generates
        if context.is_first_stage or tied:
            self._embedding = load_embedding(build, "model.embed_tokens.weight", shape)
        if context.is_last_stage:
            weight = build.loader.load("model.norm.weight", (config.hidden_size,))
            self._norm = build.backend.norm(weight, config.rms_norm_eps)
        if generates:
            table = self._embedding.table if tied and self._embedding is not None else None
            self._head = load_lm_head(build, shape, tied=table)

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        specs = tuple(layer.kv_layer_spec(block_size) for layer in self._stack.layers)
        return KVCacheSpec(layers=specs, dtype=self.dtype, block_size=block_size)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """Logits `[N, vocab_size]` float32 of `batch.logits_rows`; an embedding model's hidden states instead."""
        hidden = self._enter(batch)
        step = self.begin_step(batch, kv_cache.spec.block_size)
        if batch.on_compute is not None:
            batch.on_compute()
        hidden = self._stack.forward(hidden, step, kv_cache.layers)
        return self._leave(hidden, batch)

    def forward_tapped(
        self, batch: ForwardBatch, kv_cache: KVCache, taps: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, with the residual streams before the layers `taps`, side by side: `[T, taps * hidden]`. A model
        of one stage. The number of layers stands for the stream behind the last one."""
        hidden, features = self._run_tapped(self._enter(batch), batch, kv_cache, taps)
        return self._leave(hidden, batch), features

    def forward_summed(
        self, batch: ForwardBatch, kv_cache: KVCache, taps: Sequence[int], add: AddFeatures, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward_tapped`, of any stage, with a sum `[T, width]` that travels along the stages: each adds what it
        makes of its layers' streams. `taps` count this stage's layers from 0."""
        context = self.context
        if context.is_first_stage:
            hidden, sums = self._enter(batch), None
        else:
            assert context.pp is not None
            shape = batch.token_ids.shape[0], self.hidden_size + width
            both = context.pp.receive(torch.empty(shape, dtype=self.dtype, device=self.device), context.pp_rank - 1)
            hidden, sums = (part.contiguous() for part in both.split([self.hidden_size, width], dim=-1))
        hidden, features = self._run_tapped(hidden, batch, kv_cache, taps)
        sums = add(features, sums)
        if context.is_last_stage:
            return self._leave(hidden, batch), sums
        assert context.pp is not None
        context.pp.send(torch.cat((hidden, sums), dim=-1), context.pp_rank + 1)
        return torch.empty(0, self.vocab_size, device=self.device), sums

    def _run_tapped(
        self, hidden: torch.Tensor, batch: ForwardBatch, kv_cache: KVCache, taps: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes out of this stage's layers, and the streams before `taps`, side by side."""
        step = self.begin_step(batch, kv_cache.spec.block_size)
        if batch.on_compute is not None:
            batch.on_compute()
        shape = hidden.shape[0], len(taps) * self.hidden_size
        features = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._stack.forward(hidden, step, kv_cache.layers, taps=Taps(taps, features)), features

    @property
    def embeds(self) -> bool:
        """Whether this stage has the embedding: the first one, and the last one where the output matrix is tied."""
        return self._embedding is not None

    @property
    def layers(self) -> range:
        """Layers of this stage."""
        return stage_layers(self.num_layers, self.context)

    @property
    def output(self) -> LMHead:
        """The output projection, on the last stage of a model that generates."""
        assert self._head is not None
        return self._head

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the output projection is given of the last layer's stream, `[T, hidden]`; on the last stage."""
        assert self._norm is not None
        return self._norm(hidden)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows `[T, hidden]` of the embedding, on a stage that `embeds`."""
        assert self._embedding is not None
        return self._embedding(token_ids)

    def time_parts(self, batch: ForwardBatch, kv_cache: KVCache) -> PartSeconds:
        """As `forward`, on a clock: how long each part takes once the device has finished the one before."""
        times = [self._clock()]
        hidden = self._enter(batch)
        step = self.begin_step(batch, kv_cache.spec.block_size)
        times.append(self._clock())
        hidden = self._stack.forward(hidden, step, kv_cache.layers)
        times.append(self._clock())
        self._leave(hidden, batch)
        times.append(self._clock())
        return PartSeconds(*(after - before for before, after in itertools.pairwise(times)))

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def begin_step(self, batch: ForwardBatch, block_size: int) -> Step:
        """What the layers share; families override it to add their own."""
        return Step(
            batch=batch,
            attention=self._backend.begin(batch, block_size),
            rotation=self._rotary.at(batch.positions, self.dtype),
            block_size=block_size,
        )

    def _enter(self, batch: ForwardBatch) -> torch.Tensor:
        context = self.context
        if context.is_first_stage:
            assert self._embedding is not None
            return self._embedding(batch.token_ids)
        assert context.pp is not None
        like = torch.empty(batch.token_ids.shape[0], self.hidden_size, dtype=self.dtype, device=self.device)
        return context.pp.receive(like, context.pp_rank - 1)

    def _leave(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        context = self.context
        if not context.is_last_stage:
            assert context.pp is not None
            context.pp.send(hidden, context.pp_rank + 1)
            return torch.empty(0, self.vocab_size, device=self.device)
        assert self._norm is not None
        if batch.logits_rows.shape[0] != hidden.shape[0]:
            hidden = hidden.index_select(0, batch.logits_rows)
        hidden = self._norm(hidden)
        return hidden.float() if self._head is None else self._head(hidden)
