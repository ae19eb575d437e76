"""Llama 3.x and what shares its structure (SmolLM2): grouped-query attention, SwiGLU, RMSNorm (arXiv:2407.21783)."""

from __future__ import annotations

import torch

from tandem_worker.model.assembly.attention import load_attention
from tandem_worker.model.assembly.build import Build
from tandem_worker.model.assembly.decoder import DecoderLM, build_rotary, load_layer
from tandem_worker.model.assembly.mlp import load_mlp
from tandem_worker.model.assembly.stages import stage_layers
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.families.family import Family
from tandem_worker.model.keys import DECODER_READS, SILU, ConfigKeys

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


def load_llama(config: ModelConfig, build: Build) -> DecoderLM:
    """A Llama model on this rank."""
    layers = [
        load_layer(
            config,
            build,
            layer,
            load_attention(config, build, layer=layer, index=index),
            load_mlp(
                build,
                f"model.layers.{layer}.mlp.",
                config.hidden_size,
                config.intermediate_size,
                bias=config.flag("mlp_bias"),
            ),
        )
        for index, layer in enumerate(stage_layers(config.num_layers, build.context))
    ]
    rotary = build_rotary(config, build)
    if build.loader.has(_ROPE_DIVISORS):
        rotary.scale_frequencies(build.loader.load(_ROPE_DIVISORS, (config.head_dim // 2,), dtype=torch.float32))
    return DecoderLM(config, build, layers, rotary)


LLAMA = Family(load=load_llama, keys=KEYS)
