"""Qwen3, dense and mixture of experts: Llama's structure with a norm on each query and key head (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Callable

from tandem_worker.host.errors import StartupError
from tandem_worker.model.assembly.attention import AttentionOptions, HeadShare, load_attention
from tandem_worker.model.assembly.build import Build
from tandem_worker.model.assembly.decoder import DecoderLM, build_rotary, load_layer
from tandem_worker.model.assembly.experts import load_experts
from tandem_worker.model.assembly.mlp import load_mlp
from tandem_worker.model.assembly.stages import stage_layers
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.families.family import Family
from tandem_worker.model.keys import DECODER_READS, REQUIRED, SILU, ConfigKeys
from tandem_worker.model.layers.attention import Rotate, SelfAttention
from tandem_worker.model.layers.moe import MoE
from tandem_worker.model.layers.pre_norm import MLPPart
from tandem_worker.model.layers.routers import SoftmaxRouter

_READS = {
    **DECODER_READS,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
KEYS = ConfigKeys(
    model_types=("qwen3",),
    reads={**_READS, "num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28, "layer_types": None},
    fixed={"hidden_act": SILU},
)
MOE_KEYS = ConfigKeys(
    model_types=("qwen3_moe",),
    reads={
        **_READS,
        "num_key_value_heads": 4,
        "head_dim": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": REQUIRED,
        "norm_topk_prob": False,
        "num_experts": REQUIRED,
        "num_experts_per_tok": REQUIRED,
    },
    fixed={
        "hidden_act": SILU,
        "qkv_bias": (False, None),
        "shared_expert_intermediate_size": (0, None),
        "use_qk_norm": (True, None),
    },
    ignores={"max_window_layers": "with use_sliding_window all layers of this architecture have a window"},
    aliases={"num_local_experts": "num_experts"},
)
_FULL, _SLIDING = "full_attention", "sliding_attention"


def load_qwen3(config: ModelConfig, build: Build) -> DecoderLM:
    """A dense Qwen3 model on this rank."""

    def mlp(layer: int) -> MLPPart:
        prefix = f"model.layers.{layer}.mlp."
        return load_mlp(build, prefix, config.hidden_size, config.intermediate_size)

    return _load(config, build, mlp)


def load_qwen3_moe(config: ModelConfig, build: Build) -> DecoderLM:
    """A Qwen3-MoE model on this rank. Layers of `mlp_only_layers`, or off the sparse step, are dense."""
    dense = set(config.layer_numbers("mlp_only_layers") or [])
    step = config.need("decoder_sparse_step", int)

    def mlp(layer: int) -> MLPPart:
        prefix = f"model.layers.{layer}.mlp."
        if layer in dense or (layer + 1) % step:
            return load_mlp(build, prefix, config.hidden_size, config.intermediate_size)
        return _load_moe(config, build, prefix)

    return _load(config, build, mlp)


def _load_moe(config: ModelConfig, build: Build, prefix: str) -> MoE:
    num_experts = config.need("num_experts", int)
    router = SoftmaxRouter(
        build.loader.load(f"{prefix}gate.weight", (num_experts, config.hidden_size)),
        config.need("num_experts_per_tok", int),
        normalize=config.flag("norm_topk_prob"),
    )
    experts = load_experts(
        build,
        f"{prefix}experts.",
        num_experts=num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.need("moe_intermediate_size", int),
    )
    return MoE(build.backend.route(router), experts, None, build.context.tp)


def _load(config: ModelConfig, build: Build, mlp: Callable[[int], MLPPart]) -> DecoderLM:
    layers = [
        load_layer(config, build, layer, _attention(config, build, layer, index), mlp(layer))
        for index, layer in enumerate(stage_layers(config.num_layers, build.context))
    ]
    rotary = build_rotary(config, build)
    return DecoderLM(config, build, layers, rotary)


def _attention(config: ModelConfig, build: Build, layer: int, index: int) -> SelfAttention:
    share = HeadShare.of(config, build.context)
    prefix, shape = f"model.layers.{layer}.self_attn.", (config.head_dim,)
    norm = build.backend.head_norm(
        build.loader.load(f"{prefix}q_norm.weight", shape),
        build.loader.load(f"{prefix}k_norm.weight", shape),
        share.num_heads,
        share.num_kv_heads,
        config.rms_norm_eps,
    )
    options = AttentionOptions(window=_window(config, layer), place=Rotate(norm))
    return load_attention(config, build, layer=layer, index=index, options=options)


def _window(config: ModelConfig, layer: int) -> int | None:
    """Tokens that the layer attends to, its own included; None for all.

    Qwen3 has windows from layer `max_window_layers` on, unless `layer_types` says where; Qwen3-MoE in every layer.
    """
    slides = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    if "layer_types" in config.raw:
        kinds = config.layer_kinds("layer_types", (_FULL, _SLIDING))
        if kinds is not None:
            if kinds[layer] == _FULL:
                return None
            if not slides:
                raise StartupError(
                    "ConfigInvalid", f"layer_types gives layer {layer} a sliding window, but use_sliding_window is off."
                )
        elif layer < config.need("max_window_layers", int):
            return None
    return config.need("sliding_window", int) if slides else None


QWEN3 = Family(load=load_qwen3, keys=KEYS)
QWEN3_MOE = Family(load=load_qwen3_moe, keys=MOE_KEYS)
