"""Which settings of a `quantization_config` the readers know. Others are refused, as in `config.json` itself.

Element types, group sizes and zero points are seen in the tensors, so most keys of these configurations say nothing
that decides how a weight is read. Activations and keys and values are never quantized here, whatever is said of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem_worker.host.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Keys of one `quant_method`."""

    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Key to the values that can be read."""
    ignores: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SCHEMES: Mapping[str, Scheme] = {
    "fp8": Scheme(
        reads=_words("weight_block_size"),
        ignores=_words(
            "activation_scheme fmt scale_fmt modules_to_not_convert ignored_layers dequantize kv_cache_scheme"
        ),
    ),
    "compressed-tensors": Scheme(
        reads=_words("config_groups"),
        fixed={
            "format": ("pack-quantized", "float-quantized", "naive-quantized", "dense"),
            "sparsity_config": ({}, {"format": "dense"}),
            "transform_config": ({},),
        },
        ignores=_words("ignore kv_cache_scheme global_compression_ratio quantization_status version"),
    ),
    "gptq": Scheme(
        reads=_words("bits checkpoint_format"),
        fixed={"bits": (2, 4, 8), "checkpoint_format": ("gptq", "gptq_v2"), "dynamic": ({},), "pack_dtype": ("int32",)},
        ignores=_words(
            "group_size desc_act sym damp_percent damp_auto_increment static_groups true_sequential lm_head "
            "model_name_or_path model_file_base_name meta quantizer dataset tokenizer version use_exllama "
            "disable_exllama exllama_config max_input_length block_name_to_quantize module_name_preceding_first_block "
            "modules_in_block_to_quantize cache_block_outputs batch_size pad_token_id use_cuda_fp16 backend "
            "model_seqlen modules_to_not_convert mse offload_to_disk act_group_aware hyb_act"
        ),
    ),
    "awq": Scheme(
        reads=_words("bits w_bit"),
        fixed={"bits": (4,), "w_bit": (4,), "version": ("gemm", "GEMM"), "zero_point": (True,)},
        ignores=_words(
            "group_size q_group_size backend do_fuse fuse_max_seq_len modules_to_fuse modules_to_not_convert "
            "exllama_config"
        ),
    ),
    "mxfp4": Scheme(ignores=_words("modules_to_not_convert dequantize")),
}
_GROUP_IGNORES = _words("targets input_activations output_activations format")
_WEIGHT_FIXED: Mapping[str, tuple[Any, ...]] = {
    "type": ("int", "float"),
    "dynamic": (False,),
    "strategy": ("tensor", "channel", "group"),
    "block_structure": (),
}
_WEIGHT_IGNORES = _words("symmetric group_size actorder observer observer_kwargs scale_dtype zp_dtype")
_FLOAT_BITS, _INT_BITS = (8,), (4, 8)


def check_scheme(quantization: Mapping[str, Any]) -> None:
    """Raises StartupError for a method, and for settings, by which weights cannot be read."""
    if not isinstance(quantization, Mapping):
        raise StartupError("ConfigInvalid", f"quantization_config is {quantization!r:.60}; it must be an object.")
    method = str(quantization.get("quant_method", ""))
    scheme = SCHEMES.get(method)
    if scheme is None:
        raise StartupError(
            "WeightsUnsupported",
            f"Weights quantized by {method!r} cannot be loaded. Supported: {', '.join(SCHEMES)}.",
        )
    problems = list(_find_problems(quantization, scheme.fixed, scheme.ignores | scheme.reads | {"quant_method"}))
    if method == "gptq" and quantization.get("bits") is None:
        problems.append("bits is missing")
    if method == "compressed-tensors":
        problems += _check_groups(quantization.get("config_groups"))
    if problems:
        raise StartupError(
            "WeightsUnsupported",
            f"Weights quantized by {method!r} cannot be loaded with these settings of quantization_config: "
            f"{'; '.join(problems)}. Choose a checkpoint that is quantized in another way, or not at all.",
        )


def _find_problems(
    settings: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], others: frozenset[str], prefix: str = ""
) -> list[str]:
    problems = []
    for key, value in settings.items():
        if key in fixed:
            if value is not None and value not in fixed[key]:
                known = ", ".join(map(repr, fixed[key])) or "null"
                problems.append(f"{prefix}{key} is {value!r:.60} (known: {known})")
        elif key not in others and value is not None:
            problems.append(f"{prefix}{key} is {value!r:.60} (not a key that is known)")
    return problems


def _check_groups(groups: Any) -> list[str]:
    """Problems of compressed-tensors' groups: all of them must be quantized alike."""
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        return [f"config_groups is {groups!r:.60} (known: an object of groups)"]
    problems, kinds = [], set()
    for name, group in groups.items():
        weights = group.get("weights")
        prefix = f"config_groups.{name}."
        problems += _find_problems(group, {}, _GROUP_IGNORES | {"weights"}, prefix)
        if not isinstance(weights, Mapping):
            problems.append(f"{prefix}weights is {weights!r:.60} (known: an object)")
            continue
        prefix += "weights."
        problems += _find_problems(weights, _WEIGHT_FIXED, _WEIGHT_IGNORES | {"num_bits"}, prefix)
        bits = _FLOAT_BITS if weights.get("type") == "float" else _INT_BITS
        if weights.get("num_bits") not in bits:
            problems.append(f"{prefix}num_bits is {weights.get('num_bits')!r} (known: {', '.join(map(str, bits))})")
        kinds.add((weights.get("num_bits"), weights.get("type")))
    if len(kinds) > 1:
        problems.append("config_groups differ in num_bits or type (known: one for all)")
    return problems
