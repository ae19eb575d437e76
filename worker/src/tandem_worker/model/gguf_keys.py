"""GGUF metadata in the words of a `config.json`, so that families read one spelling.

As with `config.json`, a key of the architecture that is not known here is refused unless it says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.contract import WeightSource
from tandem_worker.model.keys import refuse_keys
from tandem_worker.model.rope import SCALING_KEYS

GGUF_FAMILIES: Mapping[str, str] = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
NUM_TOKENS = "tokenizer.num_tokens"

READS: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Key without its architecture to that of `config.json`."""
ROPE_READS: Mapping[str, str] = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
IGNORES: Mapping[str, str] = {
    "rope.scaling.finetuned": "says how the model was trained",
    "tensor_data_layout": "names the order of rows that the architecture has anyway",
    "leading_dense_block_count": "counts layers before the first with experts, and there are none",
    "pooling_type": "of embedding models, which GGUF files are not served as",
    "interleave_moe_layer_step": "places layers with experts, and there are none",
}
FIXED: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "use_parallel_residual": (False,),
}
"""Values that say nothing; zero stands for "not used" in llama.cpp."""


def _head_dim(raw: Mapping[str, Any]) -> int:
    """One that cannot be told is 1; the keys it follows from are refused later."""
    given, width, heads = (raw.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if given:
        return int(given)
    return max(1, width // heads) if isinstance(width, int) and isinstance(heads, int) and heads else 1


DERIVED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "attention.value_length": _head_dim,
    "rope.dimension_count": _head_dim,
    "attention.scale": lambda raw: _head_dim(raw) ** -0.5,
}
"""Keys that must agree with others, as they do unless heads are rotated in part or values are wider than keys."""


def gguf_architecture(metadata: Mapping[str, Any]) -> str:
    """The published class that a GGUF file's architecture stands for. Raises StartupError where none is served."""
    name = str(metadata.get("general.architecture"))
    if name not in GGUF_FAMILIES:
        known = ", ".join(sorted(GGUF_FAMILIES))
        raise StartupError(
            "UnsupportedArchitecture",
            f"GGUF files of architecture {name!r} cannot be served; supported are {known}. "
            "Use the model's safetensors checkpoint instead.",
        )
    return GGUF_FAMILIES[name]


def translate_metadata(metadata: Mapping[str, Any], source: WeightSource) -> dict[str, Any]:
    """A `config.json` of the same meaning. Which layers have biases, and whether the output matrix is the embedding's,
    GGUF says by the tensors that are there. Raises StartupError for keys that are not known."""
    name = str(metadata.get("general.architecture"))
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    raw = {ours: own[key] for key, ours in READS.items() if key in own}
    raw.setdefault("vocab_size", metadata.get(NUM_TOKENS))
    problems = [f"{name}.{key} is {value!r:.60}{wanted}" for key, value, wanted in _find_unknown(own, raw)]
    if problems:
        raise refuse_keys(problems, architecture=GGUF_FAMILIES[name], where="The GGUF file's metadata")
    # llama.cpp's defaults, which are not those of every architecture in transformers
    raw.setdefault("num_key_value_heads", raw.get("num_attention_heads"))
    raw["head_dim"] = _head_dim(raw)
    raw["tie_word_embeddings"] = "lm_head.weight" not in source
    raw["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in source
    if name == "llama":
        raw["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in source
    return {**raw, "rope_scaling": _rope_scaling(own), "dtype": "bfloat16"}


def _rope_scaling(own: Mapping[str, Any]) -> dict[str, Any] | None:
    """llama.cpp takes a factor without a type for a linear one."""
    scaling = {ours: own[key] for key, ours in ROPE_READS.items() if key in own}
    kind = scaling.get("rope_type", "linear" if scaling.get("factor") else "none")
    if kind == "none":
        return None
    known = SCALING_KEYS.get(kind, tuple(scaling))
    return {"rope_type": kind, **{key: value for key, value in scaling.items() if key in known}}


def _find_unknown(own: Mapping[str, Any], raw: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """Key, value and what would do, for every key that changes the computation in a way that is not known."""
    found = []
    lists = [(key, value) for key, value in own.items() if key in READS and isinstance(value, list)]
    if lists:
        return [(key, value, " (known: one number for all layers)") for key, value in lists]
    for key, value in own.items():
        if key in FIXED:
            if value not in FIXED[key]:
                found.append((key, value, f" (known: {', '.join(map(repr, FIXED[key]))})"))
        elif key in DERIVED:
            wanted = DERIVED[key](raw)
            if not isinstance(value, (int, float)) or abs(value - wanted) > 1e-4 * wanted:
                found.append((key, value, f" (known: {wanted:g})"))
        elif key not in READS and key not in ROPE_READS and key not in IGNORES:
            found.append((key, value, " (not a key that is known)"))
    return found
