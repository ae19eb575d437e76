"""Llama 3.x and what shares its structure (SmolLM2): grouped-query attention, SwiGLU, RMSNorm (arXiv:2407.21783)."""

from __future__ import annotations

import torch

from tandem_worker.model.checkpoint.loader import WeightLoader
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.families.decoder import DecoderLM, PreNormLayer, stage_layers
from tandem_worker.model.families.family import Family
from tandem_worker.model.keys import DECODER_READS, SILU, ConfigKeys
from tandem_worker.model.layers.attention import load_attention
from tandem_worker.model.layers.mlp import GatedMLP
from tandem_worker.model.layers.rotary import RotaryEmbedding
from tandem_worker.parallel.context import ParallelContext

KEYS = ConfigKeys(
    model_types=("llama",),
    reads={
        **DECODER_READS,
        "num_key_value_heads": None,
        "head_dim": None,
        "attention_bias": False,
        "mlp_bias": False,
    },
    fixed={
        "hidden_act": SILU,
        "activation": ("swiglu", None),
        "rope_interleaved": (False, None),
    },
    ignores={
        "is_llama_config": "a remark of the publisher",
        "max_sequence_length": "an older name of max_position_embeddings, which is read",
    },
)
_ROPE_DIVISORS = "rope_freqs.weight"  # GGUF files of Llama 3.1 carry their rope scaling as a tensor


def load_llama(config: ModelConfig, loader: WeightLoader, context: ParallelContext) -> DecoderLM:
    """A Llama model on this rank."""
    layers = [
        PreNormLayer.load(
            config,
            loader,
            layer,
            load_attention(config, loader, context, layer=layer, index=index),
            GatedMLP.load(
                loader,
                context,
                f"model.layers.{layer}.mlp.",
                config.hidden_size,
                config.intermediate_size,
                bias=config.flag("mlp_bias"),
            ),
        )
        for index, layer in enumerate(stage_layers(config.num_layers, context))
    ]
    rotary = RotaryEmbedding.of(config, loader)
    if loader.has(_ROPE_DIVISORS):
        rotary.scale_frequencies(loader.load(_ROPE_DIVISORS, (config.head_dim // 2,), dtype=torch.float32))
    return DecoderLM(config, loader, context, layers, rotary)


LLAMA = Family(load=load_llama, keys=KEYS)
