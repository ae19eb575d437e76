"""Llama 3.x and what shares its structure (SmolLM2): grouped-query attention, SwiGLU, RMSNorm (arXiv:2407.21783)."""

from __future__ import annotations

import torch

from tandem_worker.attention.base import AttentionSpec, kv_layer_spec, select_backend
from tandem_worker.layers.attention import HeadShare, SelfAttention, load_output, load_qkv
from tandem_worker.layers.mlp import GatedMLP
from tandem_worker.layers.norm import RMSNorm
from tandem_worker.layers.rotary import RotaryEmbedding
from tandem_worker.layers.step import Step
from tandem_worker.models.base import KVLayerSpec
from tandem_worker.models.config import ModelConfig
from tandem_worker.models.decoder import DecoderLM, stage_layers
from tandem_worker.parallel.context import ParallelContext
from tandem_worker.weights.loader import WeightLoader

_ROPE_DIVISORS = "rope_freqs.weight"  # GGUF files of Llama 3.1 carry their rope scaling as a tensor


class LlamaLayer:
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, loader: WeightLoader, context: ParallelContext, index: int) -> None:
        prefix = f"model.layers.{index}."
        hidden = (config.hidden_size,)
        self.input_norm = RMSNorm(loader.load(f"{prefix}input_layernorm.weight", hidden), config.rms_norm_eps)
        self.attention = _load_attention(config, loader, context, index)
        self.mlp_norm = RMSNorm(loader.load(f"{prefix}post_attention_layernorm.weight", hidden), config.rms_norm_eps)
        self.mlp = GatedMLP.load(loader, context, f"{prefix}mlp.", config.hidden_size, config.intermediate_size)

    def kv_layer_spec(self, block_size: int) -> KVLayerSpec:
        spec = self.attention.spec
        return kv_layer_spec(block_size, spec.num_kv_heads, spec.head_dim)

    def forward(self, hidden: torch.Tensor, step: Step, kv_layer: torch.Tensor) -> torch.Tensor:
        hidden = self.attention.forward(self.input_norm(hidden), hidden, step, kv_layer)
        return self.mlp.forward(self.mlp_norm(hidden), hidden)


def _load_attention(config: ModelConfig, loader: WeightLoader, context: ParallelContext, index: int) -> SelfAttention:
    share = HeadShare.of(config, context)
    prefix = f"model.layers.{index}.self_attn."
    spec = AttentionSpec(
        num_heads=share.num_heads,
        num_kv_heads=share.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
    )
    qkv = load_qkv(config, loader, share, prefix)
    return SelfAttention(qkv, load_output(config, loader, share, context, prefix), spec, index=index)


def load_llama(config: ModelConfig, loader: WeightLoader, context: ParallelContext) -> DecoderLM:
    """A Llama model on this rank."""
    layers = [LlamaLayer(config, loader, context, index) for index in stage_layers(config.num_layers, context)]
    rotary = RotaryEmbedding(
        config.rope,
        config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        device=loader.device,
    )
    if loader.has(_ROPE_DIVISORS):
        rotary.scale_frequencies(loader.load(_ROPE_DIVISORS, (config.head_dim // 2,), dtype=torch.float32))
    return DecoderLM(config, loader, context, layers, select_backend(loader.device), rotary)
