"""Llama 4's language model (Scout, Maverick): most layers attend within chunks under rotary positions, every fourth
attends to everything without positions, its queries sharpened as the context grows (arXiv:2501.19399)."""

from __future__ import annotations

import torch

from tandem_worker.layers.attention import AttentionOptions, HeadShare, Rotate, load_attention
from tandem_worker.layers.mlp import GatedMLP
from tandem_worker.layers.moe import Experts, MoE
from tandem_worker.layers.rotary import RotaryEmbedding
from tandem_worker.layers.routers import SigmoidRouter
from tandem_worker.layers.step import Step
from tandem_worker.models.config import ModelConfig
from tandem_worker.models.decoder import DecoderLM, MLPPart, PreNormLayer, stage_layers
from tandem_worker.parallel.context import ParallelContext
from tandem_worker.weights.loader import WeightLoader


class TemperByPosition:
    """No rotation; queries grow with the logarithm of their position."""

    def __init__(self, floor_scale: float, attn_scale: float) -> None:
        self._floor_scale = floor_scale
        self._attn_scale = attn_scale

    def __call__(self, heads: torch.Tensor, num_heads: int, step: Step) -> None:
        scales = step.extras.get("temperature")
        if scales is None:
            steps = torch.floor((step.batch.positions.float() + 1.0) / self._floor_scale)
            scales = step.extras["temperature"] = (torch.log1p(steps) * self._attn_scale + 1.0).view(-1, 1, 1)
        queries = heads[:, :num_heads]
        queries.copy_(queries * scales)


def _leave(heads: torch.Tensor, num_heads: int, step: Step) -> None:
    """No positions at all."""


def _attention_options(
    config: ModelConfig, loader: WeightLoader, context: ParallelContext, layer: int
) -> AttentionOptions:
    rotary = config.get("no_rope_layers", [])  # 1 where a layer has rotary positions, in spite of the name
    interval = int(config.get("no_rope_layer_interval", 4))
    if rotary[layer] if rotary else (layer + 1) % interval:
        norm = None
        if config.get("use_qk_norm", True):  # without weights, so it makes no difference that it is published as last
            share, ones = HeadShare.of(config, context), loader.place(torch.ones(config.head_dim))
            norm = loader.backend.head_norm(ones, ones, share.num_heads, share.num_kv_heads, config.rms_norm_eps)
        return AttentionOptions(chunk=config.get("attention_chunk_size", None), place=Rotate(norm, interleaved=True))
    if not config.get("attn_temperature_tuning", True):
        return AttentionOptions(place=_leave)
    place = TemperByPosition(float(config.get("floor_scale", 8192)), float(config.get("attn_scale", 0.1)))
    return AttentionOptions(place=place)


def _load_moe(config: ModelConfig, loader: WeightLoader, context: ParallelContext, prefix: str) -> MoE:
    hidden, num_experts = config.hidden_size, config.need("num_local_experts", int)
    router = SigmoidRouter(
        loader.load(f"{prefix}router.weight", (num_experts, hidden)), config.need("num_experts_per_tok", int)
    )
    experts = Experts.load_stacked(
        loader,
        context,
        f"{prefix}experts.",
        num_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=config.intermediate_size,
        interleaved=False,
    )
    shared = GatedMLP.load(loader, context, f"{prefix}shared_expert.", hidden, config.intermediate_size)
    return MoE(loader.backend.route(router), experts, shared, context.tp, weigh_input=True)


def load_llama4(config: ModelConfig, loader: WeightLoader, context: ParallelContext) -> DecoderLM:
    """Llama 4's language model on this rank."""
    every = int(config.get("interleave_moe_layer_step", 1))
    sparse = set(config.get("moe_layers", range(every - 1, config.num_layers, every)))
    layers = []
    for index, layer in enumerate(stage_layers(config.num_layers, context)):
        prefix = f"model.layers.{layer}.feed_forward."
        mlp: MLPPart
        if layer in sparse:
            mlp = _load_moe(config, loader, context, prefix)
        else:
            width = config.need("intermediate_size_mlp", int)
            mlp = GatedMLP.load(loader, context, prefix, config.hidden_size, width)
        options = _attention_options(config, loader, context, layer)
        attention = load_attention(config, loader, context, layer=layer, index=index, options=options)
        layers.append(PreNormLayer.load(config, loader, layer, attention, mlp))
    rotary = RotaryEmbedding.of(config, loader)
    return DecoderLM(config, loader, context, layers, rotary)
