"""Qwen3, dense and mixture of experts: Llama's structure with a norm on each query and key head (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Callable

from tandem_worker.layers.attention import AttentionOptions, HeadShare, Rotate, SelfAttention, load_attention
from tandem_worker.layers.mlp import GatedMLP
from tandem_worker.layers.moe import Experts, MoE
from tandem_worker.layers.rotary import RotaryEmbedding
from tandem_worker.layers.routers import SoftmaxRouter
from tandem_worker.models.config import ModelConfig
from tandem_worker.models.decoder import DecoderLM, MLPPart, PreNormLayer, stage_layers
from tandem_worker.parallel.context import ParallelContext
from tandem_worker.weights.loader import WeightLoader


def load_qwen3(config: ModelConfig, loader: WeightLoader, context: ParallelContext) -> DecoderLM:
    """A dense Qwen3 model on this rank."""

    def mlp(layer: int) -> MLPPart:
        prefix = f"model.layers.{layer}.mlp."
        return GatedMLP.load(loader, context, prefix, config.hidden_size, config.intermediate_size)

    return _load(config, loader, context, mlp)


def load_qwen3_moe(config: ModelConfig, loader: WeightLoader, context: ParallelContext) -> DecoderLM:
    """A Qwen3-MoE model on this rank. Layers of `mlp_only_layers`, or off the sparse step, are dense."""
    dense = set(config.get("mlp_only_layers", []))
    step = int(config.get("decoder_sparse_step", 1))

    def mlp(layer: int) -> MLPPart:
        prefix = f"model.layers.{layer}.mlp."
        if layer in dense or (layer + 1) % step:
            return GatedMLP.load(loader, context, prefix, config.hidden_size, config.intermediate_size)
        return _load_moe(config, loader, context, prefix)

    return _load(config, loader, context, mlp)


def _load_moe(config: ModelConfig, loader: WeightLoader, context: ParallelContext, prefix: str) -> MoE:
    num_experts = config.need("num_experts", int, alias="num_local_experts")
    router = SoftmaxRouter(
        loader.load(f"{prefix}gate.weight", (num_experts, config.hidden_size)),
        config.need("num_experts_per_tok", int),
        normalize=bool(config.get("norm_topk_prob", False)),
    )
    experts = Experts.load(
        loader,
        context,
        f"{prefix}experts.",
        num_experts=num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.need("moe_intermediate_size", int),
    )
    return MoE(loader.backend.route(router), experts, None, context.tp)


def _load(
    config: ModelConfig, loader: WeightLoader, context: ParallelContext, mlp: Callable[[int], MLPPart]
) -> DecoderLM:
    layers = [
        PreNormLayer.load(config, loader, layer, _attention(config, loader, context, layer, index), mlp(layer))
        for index, layer in enumerate(stage_layers(config.num_layers, context))
    ]
    rotary = RotaryEmbedding.of(config, loader)
    return DecoderLM(config, loader, context, layers, rotary)


def _attention(
    config: ModelConfig, loader: WeightLoader, context: ParallelContext, layer: int, index: int
) -> SelfAttention:
    share = HeadShare.of(config, context)
    prefix, shape = f"model.layers.{layer}.self_attn.", (config.head_dim,)
    norm = loader.backend.head_norm(
        loader.load(f"{prefix}q_norm.weight", shape),
        loader.load(f"{prefix}k_norm.weight", shape),
        share.num_heads,
        share.num_kv_heads,
        config.rms_norm_eps,
    )
    options = AttentionOptions(place=Rotate(norm))
    return load_attention(config, loader, context, layer=layer, index=index, options=options)
