"""DeepSeek-V3 (arXiv:2412.19437), Kimi K2 and the language model of Kimi K2.5.

A token's cached latent is its key and its value for every head (arXiv:2405.04434, section 2.1); whether it is attended
to as it lies or expanded first is the attention backend's choice (`backends.latent`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tandem_worker.model.assembly.build import Build
from tandem_worker.model.assembly.decoder import DecoderLM, build_rotary, load_layer
from tandem_worker.model.assembly.experts import load_experts
from tandem_worker.model.assembly.mlp import load_mlp
from tandem_worker.model.assembly.stages import stage_layers
from tandem_worker.model.attention import AttentionSpec, LatentSpec, latent_layer_spec
from tandem_worker.model.checkpoint.loader import Part, shard
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.contract import KVLayerSpec
from tandem_worker.model.families.family import Family, Ignorable
from tandem_worker.model.keys import DECODER_READS, REQUIRED, SILU, ConfigKeys, Settings
from tandem_worker.model.layers.latent import LatentLayer
from tandem_worker.model.layers.linear import Linear
from tandem_worker.model.layers.moe import MoE
from tandem_worker.model.layers.pre_norm import MLPPart
from tandem_worker.model.layers.rotary import Rotation, yarn_mscale
from tandem_worker.model.layers.routers import GroupedSigmoidRouter
from tandem_worker.model.layers.step import Step


def _query_dim(settings: Settings) -> int | None:
    parts = [settings.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")]
    known = [part for part in parts if isinstance(part, int)]
    return sum(known) if len(known) == len(parts) else None


KEYS = ConfigKeys(
    model_types=("deepseek_v3", "kimi_k2"),
    reads={
        **DECODER_READS,
        "attention_bias": False,
        "q_lora_rank": 1536,
        "kv_lora_rank": REQUIRED,
        "qk_rope_head_dim": REQUIRED,
        "qk_nope_head_dim": REQUIRED,
        "v_head_dim": REQUIRED,
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": REQUIRED,
        "n_routed_experts": REQUIRED,
        "n_shared_experts": 1,
        "num_experts_per_tok": REQUIRED,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    },
    fixed={
        "hidden_act": SILU,
        "moe_layer_freq": (1, None),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    },
    derived={
        "head_dim": lambda settings: settings.get("qk_rope_head_dim"),
        "qk_head_dim": _query_dim,
        "num_key_value_heads": lambda settings: settings.get("num_attention_heads"),
    },
    ignores={
        "ep_size": "how the publisher spread training",
        "aux_loss_alpha": "of training only",
        "seq_aux": "of training only",
    },
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)
KIMI_K25_KEYS = replace(
    KEYS,
    wrapper=ConfigKeys(
        model_types=("kimi_k25",),
        reads={"text_config": REQUIRED, "tie_word_embeddings": True, "quantization_config": None},
        ignores=dict.fromkeys(
            ("vision_config", "media_placeholder_token_id", "video_placeholder", "use_unified_vision_chunk",
             "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "ignore_index",
             "projection_hidden_size", "projection_layer_norm_eps", "dtype", "torch_dtype"),
            "of images, which are not taken, or repeated in text_config",
        ),
    ),
)  # fmt: skip
_LATENT_NORM_EPS = 1e-6  # of every published model's code, whatever rms_norm_eps its configuration gives the others


class LatentAttention:
    """Multi-head latent attention; tensor ranks split the heads and hold the latents whole."""

    def __init__(self, config: ModelConfig, build: Build, *, layer: int, index: int) -> None:
        self._index = index
        self._nope = config.need("qk_nope_head_dim", int)
        self._rope = config.need("qk_rope_head_dim", int)
        self._rank = config.need("kv_lora_rank", int)
        self._interleaved = config.flag("rope_interleave")
        self._heads = shard(0, config.num_heads, build.context.tp_rank, build.context.tp_size, what="attention heads")
        self._num_heads = config.num_heads // build.context.tp_size
        self._load(config, build, f"model.layers.{layer}.self_attn.")

    def _load(self, config: ModelConfig, build: Build, prefix: str) -> None:
        loader, context = build.loader, build.context
        hidden, heads, eps = config.hidden_size, config.num_heads, _LATENT_NORM_EPS
        linear, norm = build.backend.linear, build.backend.norm
        value_dim = config.need("v_head_dim", int)
        query_rank = 0 if config.get("q_lora_rank") is None else config.need("q_lora_rank", int)
        down = [Part(name=f"{prefix}kv_a_proj_with_mqa.weight", shape=(self._rank + self._rope, hidden))]
        width = heads * (self._nope + self._rope)
        rows = shard(0, width, context.tp_rank, context.tp_size, what="query width")
        if query_rank:
            down.insert(0, Part(name=f"{prefix}q_a_proj.weight", shape=(query_rank, hidden)))
            self._query_norm = norm(loader.load(f"{prefix}q_a_layernorm.weight", (query_rank,)), eps)
            self._query = linear(
                loader.matrix([Part(name=f"{prefix}q_b_proj.weight", shape=(width, query_rank), piece=rows)])
            )
        else:
            self._query_norm = None
            self._query = linear(
                loader.matrix([Part(name=f"{prefix}q_proj.weight", shape=(width, hidden), piece=rows)])
            )
        self._query_rank = query_rank
        biases = [Part(name=part.name.replace(".weight", ".bias"), shape=part.shape[:1]) for part in down]
        biased = config.flag("attention_bias")
        self._down = linear(loader.matrix(down), loader.stack(biases) if biased else None)
        self._latent_norm = norm(loader.load(f"{prefix}kv_a_layernorm.weight", (self._rank,)), eps)
        expand = (heads * (self._nope + value_dim), self._rank)
        piece = shard(0, expand[0], context.tp_rank, context.tp_size, what="key and value width")
        expanded = loader.load(f"{prefix}kv_b_proj.weight", expand, piece).view(self._num_heads, -1, self._rank)
        self.spec = LatentSpec(
            attention=AttentionSpec(
                num_heads=self._num_heads,
                num_kv_heads=1,
                head_dim=self._rank + self._rope,
                scale=_attention_scale(config, self._nope + self._rope),
                value_dim=self._rank,
            ),
            expand=expanded,
            nope_dim=self._nope,
        )
        columns = shard(1, heads * value_dim, context.tp_rank, context.tp_size, what="value width")
        out = loader.matrix([Part(name=f"{prefix}o_proj.weight", shape=(hidden, heads * value_dim), piece=columns)])
        bias = loader.load(f"{prefix}o_proj.bias", (hidden,)) if biased else None
        self.out: Linear = linear(out, bias, reduce=context.tp)

    def kv_layer_spec(self, block_size: int) -> KVLayerSpec:
        return latent_layer_spec(block_size, self._rank + self._rope)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step, kv_layer: torch.Tensor
    ) -> torch.Tensor:
        """`residual + attention(x)` for `[T, hidden]`; None adds nothing. Writes this layer's latents."""
        down = self._down(x)
        queries = self._make_queries(x, down, step.rotation)
        kv = self._make_latents(down, step.rotation).unsqueeze(1)
        step.entering(self._index)
        step.attention.write(kv, kv_layer)
        step.written(self._index)
        return self.out.add_to(step.attention.attend_latents(queries, kv, kv_layer, self.spec), residual)

    def make_latents(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """What is cached of `x` `[T, hidden]`, `[T, 1, rank + rope]`."""
        return self._make_latents(self._down(x), rotation)

    def make_both(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries `[T, num_heads, nope + rope]` of `x` `[T, hidden]`, and its latents."""
        down = self._down(x)
        return self._make_queries(x, down, rotation), self._make_latents(down, rotation)

    def _make_queries(self, x: torch.Tensor, down: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        queries = x
        if self._query_norm is not None:
            queries = self._query_norm(down[:, : self._query_rank])
        queries = self._query(queries).view(x.shape[0], self._num_heads, -1)
        self._rotate_(queries[..., self._nope :], rotation)
        return queries

    def _make_latents(self, down: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        compressed = down[:, self._query_rank :]
        latents = torch.cat((self._latent_norm(compressed[:, : self._rank]), compressed[:, self._rank :]), dim=-1)
        latents = latents.view(-1, 1, self._rank + self._rope)
        self._rotate_(latents[..., self._rank :], rotation)
        return latents

    def _rotate_(self, heads: torch.Tensor, rotation: Rotation) -> None:
        if self._interleaved:
            rotation.rotate_interleaved_(heads)
        else:
            rotation.rotate_half_(heads)


def _attention_scale(config: ModelConfig, head_dim: int) -> float:
    """1 / sqrt(d), times YaRN's temperature squared when the context is extended."""
    scale = head_dim**-0.5
    mscale = config.rope.scaling.get("mscale_all_dim")
    if config.rope.kind != "default" and mscale:
        scale *= yarn_mscale(float(config.rope.scaling.get("factor", 1.0)), float(mscale)) ** 2
    return scale


def _load_moe(config: ModelConfig, build: Build, prefix: str) -> MoE:
    hidden = config.hidden_size
    num_experts = config.need("n_routed_experts", int)
    intermediate = config.need("moe_intermediate_size", int)
    router = GroupedSigmoidRouter(
        build.loader.load(f"{prefix}gate.weight", (num_experts, hidden), dtype=torch.float32),
        build.loader.load(f"{prefix}gate.e_score_correction_bias", (num_experts,), dtype=torch.float32),
        top_k=config.need("num_experts_per_tok", int),
        num_groups=config.need("n_group", int),
        top_groups=config.need("topk_group", int),
        normalize=config.flag("norm_topk_prob"),
        scale=config.need("routed_scaling_factor", float),
    )
    experts = load_experts(
        build,
        f"{prefix}experts.",
        num_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
    )
    num_shared = config.need("n_shared_experts", int)
    shared = None
    if num_shared:
        shared = load_mlp(build, f"{prefix}shared_experts.", hidden, intermediate * num_shared)
    return MoE(build.backend.route(router), experts, shared, build.context.tp)


def load_deepseek(config: ModelConfig, build: Build) -> DecoderLM:
    """A DeepSeek-V3 or Kimi K2 model on this rank, without its modules for multi-token prediction."""
    numbers = stage_layers(config.num_layers, build.context)
    layers = [
        load_layer(config, build, layer, *_load_parts(config, build, layer, index))
        for index, layer in enumerate(numbers)
    ]
    rotary = build_rotary(config, build, config.need("qk_rope_head_dim", int))
    return DecoderLM(config, build, layers, rotary)


def load_prediction_layer(config: ModelConfig, build: Build, layer: int) -> LatentLayer:
    """The layer inside the module for multi-token prediction that is number `layer` of the checkpoint."""
    attention, mlp = _load_parts(config, build, layer, 0)
    whole = load_layer(config, build, layer, attention, mlp)
    return LatentLayer(input_norm=whole.input_norm, attention=attention, mlp_norm=whole.mlp_norm, mlp=mlp)


def _load_parts(config: ModelConfig, build: Build, layer: int, index: int) -> tuple[LatentAttention, MLPPart]:
    """Halves of the checkpoint's layer `layer`, which is number `index` of this rank."""
    prefix = f"model.layers.{layer}.mlp."
    mlp: MLPPart
    if layer < config.need("first_k_dense_replace", int):
        mlp = load_mlp(build, prefix, config.hidden_size, config.intermediate_size)
    else:
        mlp = _load_moe(config, build, prefix)
    return LatentAttention(config, build, layer=layer, index=index), mlp


def _prediction_layers(config: ModelConfig) -> Ignorable:
    """DeepSeek's layers that predict further tokens stand behind the others."""
    first = config.num_layers
    return {
        rf"model\.layers\.{layer}\.": "predicts further tokens, which a draft head may do"
        for layer in range(first, first + config.num_prediction_layers)
    }


def _prediction_layers_and_vision(config: ModelConfig) -> Ignorable:
    return {
        **_prediction_layers(config),
        r"(vision_tower|mm_projector|multi_modal_projector)\.": "of images, which are not taken",
    }


DEEPSEEK = Family(
    load=load_deepseek, keys=KEYS, ignorable=_prediction_layers, load_prediction_layer=load_prediction_layer
)
KIMI_K25 = replace(DEEPSEEK, keys=KIMI_K25_KEYS, ignorable=_prediction_layers_and_vision)
