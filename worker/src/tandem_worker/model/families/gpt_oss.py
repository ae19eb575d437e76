"""gpt-oss (arXiv:2508.10925): attention sinks, every other layer a sliding window, experts with biases."""

from __future__ import annotations

import torch

from tandem_worker.model.assembly.attention import AttentionOptions, HeadShare, load_attention
from tandem_worker.model.assembly.build import Build
from tandem_worker.model.assembly.decoder import DecoderLM, build_rotary, load_layer
from tandem_worker.model.assembly.experts import load_stacked_experts
from tandem_worker.model.assembly.stages import stage_layers
from tandem_worker.model.checkpoint.stored import Slice
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.families.family import Family
from tandem_worker.model.keys import DECODER_READS, REQUIRED, ConfigKeys
from tandem_worker.model.layers.moe import MoE
from tandem_worker.model.layers.routers import ChosenSoftmaxRouter

KEYS = ConfigKeys(
    model_types=("gpt_oss",),
    reads={
        **DECODER_READS,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "layer_types": None,
        "sliding_window": 128,
        "num_local_experts": REQUIRED,
        "num_experts_per_tok": REQUIRED,
        "swiglu_limit": 7.0,
    },
    fixed={"swiglu_alpha": (1.702,)},
    ignores={
        "hidden_act": "experts have an activation of their own",
        "initial_context_length": "repeats original_max_position_embeddings of the rotary settings, which is read",
        "experts_per_token": "repeats num_experts_per_tok, which is read",
    },
    aliases={"num_experts": "num_local_experts"},
    rope_theta=150000.0,
    rope_parameters={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
)
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _attention_options(config: ModelConfig, build: Build, layer: int) -> AttentionOptions:
    share, loader = HeadShare.of(config, build.context), build.loader
    heads = Slice(0, share.first_head, share.first_head + share.num_heads)
    kinds = config.layer_kinds("layer_types", (_FULL, _SLIDING))
    sliding = kinds[layer] == _SLIDING if kinds is not None else layer % 2 == 0
    return AttentionOptions(
        window=config.need("sliding_window", int) if sliding else None,
        sinks=loader.load(f"model.layers.{layer}.self_attn.sinks", (config.num_heads,), heads, dtype=torch.float32),
    )


def _load_moe(config: ModelConfig, build: Build, prefix: str) -> MoE:
    num_experts = config.need("num_local_experts", int)
    router = ChosenSoftmaxRouter(
        build.loader.load(f"{prefix}router.weight", (num_experts, config.hidden_size)),
        build.loader.load(f"{prefix}router.bias", (num_experts,)),
        config.need("num_experts_per_tok", int),
    )
    experts = load_stacked_experts(
        build,
        f"{prefix}experts.",
        num_experts=num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        interleaved=True,
        swiglu_limit=config.need("swiglu_limit", float),
    )
    return MoE(build.backend.route(router), experts, None, build.context.tp)


def load_gpt_oss(config: ModelConfig, build: Build) -> DecoderLM:
    """A gpt-oss model on this rank."""
    layers = []
    for index, layer in enumerate(stage_layers(config.num_layers, build.context)):
        options = _attention_options(config, build, layer)
        attention = load_attention(config, build, layer=layer, index=index, options=options)
        moe = _load_moe(config, build, f"model.layers.{layer}.mlp.")
        layers.append(load_layer(config, build, layer, attention, moe))
    rotary = build_rotary(config, build)
    return DecoderLM(config, build, layers, rotary)


GPT_OSS = Family(load=load_gpt_oss, keys=KEYS)
