"""Llama 4's language model (Scout, Maverick): most layers attend within chunks under rotary positions, every fourth
attends to everything without positions, its queries sharpened as the context grows (arXiv:2501.19399)."""

from __future__ import annotations

from dataclasses import replace

import torch

from tandem_worker.host.errors import StartupError
from tandem_worker.model.assembly.attention import AttentionOptions, HeadShare, load_attention
from tandem_worker.model.assembly.build import Build
from tandem_worker.model.assembly.decoder import DecoderLM, build_rotary, load_layer
from tandem_worker.model.assembly.experts import load_stacked_experts
from tandem_worker.model.assembly.mlp import load_mlp
from tandem_worker.model.assembly.stages import stage_layers
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.families.family import Family, Ignorable
from tandem_worker.model.keys import DECODER_READS, REQUIRED, SILU, ConfigKeys
from tandem_worker.model.layers.attention import Rotate
from tandem_worker.model.layers.moe import MoE
from tandem_worker.model.layers.pre_norm import MLPPart
from tandem_worker.model.layers.routers import SigmoidRouter
from tandem_worker.model.layers.step import Step

KEYS = ConfigKeys(
    model_types=("llama4_text",),
    reads={
        **DECODER_READS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
        "intermediate_size_mlp": 16384,
        "num_local_experts": REQUIRED,
        "num_experts_per_tok": REQUIRED,
        "moe_layers": None,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "layer_types": None,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    fixed={"hidden_act": SILU},
    ignores={
        "router_jitter_noise": "of training only",
        "for_llm_compressor": "chooses among implementations of the same computation",
    },
    rope_theta=500000.0,
    rope_kinds=("default", "linear", "llama3"),  # yarn's factor would be lost in the norm, which is published as last
)
MULTIMODAL_KEYS = replace(
    KEYS,
    wrapper=ConfigKeys(
        model_types=("llama4",),
        reads={"text_config": REQUIRED, "tie_word_embeddings": False, "quantization_config": None},
        ignores=dict.fromkeys(
            ("vision_config", "image_token_index", "boi_token_index", "eoi_token_index", "image_token_id",
             "boi_token_id", "eoi_token_id", "dtype", "torch_dtype"),
            "of images, which are not taken, or repeated in text_config",
        ),
    ),
)  # fmt: skip
_FULL, _CHUNKED = "full_attention", "chunked_attention"


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


def _attention_options(config: ModelConfig, build: Build, layer: int) -> AttentionOptions:
    rotates = _has_rotary(config, layer)
    kinds = config.layer_kinds("layer_types", (_FULL, _CHUNKED))
    chunked = rotates if kinds is None else kinds[layer] == _CHUNKED
    chunk = config.need("attention_chunk_size", int) if chunked else None
    if rotates:
        norm = None
        if config.flag("use_qk_norm"):  # without weights, so it makes no difference that it is published as last
            share, ones = HeadShare.of(config, build.context), build.loader.place(torch.ones(config.head_dim))
            norm = build.backend.head_norm(ones, ones, share.num_heads, share.num_kv_heads, config.rms_norm_eps)
        return AttentionOptions(chunk=chunk, place=Rotate(norm, interleaved=True))
    if not config.flag("attn_temperature_tuning"):
        return AttentionOptions(chunk=chunk, place=_leave)
    place = TemperByPosition(config.need("floor_scale", float), config.need("attn_scale", float))
    return AttentionOptions(chunk=chunk, place=place)


def _has_rotary(config: ModelConfig, layer: int) -> bool:
    """`no_rope_layers` has 1 where a layer has rotary positions, in spite of the name; an empty one says nothing."""
    rotary = config.layer_numbers("no_rope_layers")
    if not rotary:
        return bool((layer + 1) % config.need("no_rope_layer_interval", int))
    if len(rotary) < config.num_layers:
        raise StartupError("ConfigInvalid", f"no_rope_layers is shorter than the model's {config.num_layers} layers.")
    return bool(rotary[layer])


def _load_moe(config: ModelConfig, build: Build, prefix: str) -> MoE:
    hidden, num_experts = config.hidden_size, config.need("num_local_experts", int)
    router = SigmoidRouter(
        build.loader.load(f"{prefix}router.weight", (num_experts, hidden)), config.need("num_experts_per_tok", int)
    )
    experts = load_stacked_experts(
        build,
        f"{prefix}experts.",
        num_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=config.intermediate_size,
        interleaved=False,
    )
    shared = load_mlp(build, f"{prefix}shared_expert.", hidden, config.intermediate_size)
    return MoE(build.backend.route(router), experts, shared, build.context.tp, weigh_input=True)


def load_llama4(config: ModelConfig, build: Build) -> DecoderLM:
    """Llama 4's language model on this rank."""
    every, named = config.need("interleave_moe_layer_step", int), config.layer_numbers("moe_layers")
    sparse = set(range(every - 1, config.num_layers, every) if named is None else named)
    layers = []
    for index, layer in enumerate(stage_layers(config.num_layers, build.context)):
        prefix = f"model.layers.{layer}.feed_forward."
        mlp: MLPPart
        if layer in sparse:
            mlp = _load_moe(config, build, prefix)
        else:
            width = config.need("intermediate_size_mlp", int)
            mlp = load_mlp(build, prefix, config.hidden_size, width)
        options = _attention_options(config, build, layer)
        attention = load_attention(config, build, layer=layer, index=index, options=options)
        layers.append(load_layer(config, build, layer, attention, mlp))
    rotary = build_rotary(config, build)
    return DecoderLM(config, build, layers, rotary)


def _vision(_config: ModelConfig) -> Ignorable:
    return {r"(vision_model|multi_modal_projector)\.": "of images, which are not taken"}


LLAMA4 = Family(load=load_llama4, keys=KEYS)
LLAMA4_MULTIMODAL = Family(load=load_llama4, keys=MULTIMODAL_KEYS, ignorable=_vision)
