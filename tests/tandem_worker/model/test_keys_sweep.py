"""Every key of every family's configuration class, changed, against transformers' model of the same file.

A changed key either changes the worker's answer as it changes transformers', or changes neither, or is refused by name.
A few of each kind run in the gate, all of them with `-m full`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tandem_worker.host.errors import StartupError
from tandem_worker.model.keys import COMMON_IGNORES

from tests.tandem_worker.model.specimens import (
    ABSENT,
    SPECIMENS,
    Specimen,
    ask_reference,
    ask_worker,
    build_reference,
    with_changes,
)
from tests.tandem_worker.model.test_keys import change, class_keys

LIMIT = 1e-4
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_OLD_YARN = {"type": "yarn", **{key: value for key, value in _YARN.items() if not key.startswith("rope_")}}
_EXPERTS: list[Any] = [
    {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 16},
    {"num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16},
    {"num_experts": 6, "num_local_experts": 8, "n_routed_experts": 6},
]
PER_LAYER = ("layer_types", "no_rope_layers", "moe_layers")
CHANGES: dict[str, list[Any]] = {
    "vocab_size": [101],
    "hidden_size": [40],
    "intermediate_size": [{"intermediate_size": 72, "mlp_only_layers": [1]}],
    "num_hidden_layers": [{"num_hidden_layers": 2} | dict.fromkeys(PER_LAYER, ABSENT), 2],
    "num_attention_heads": [2, {"num_attention_heads": 8, "num_key_value_heads": 8}],
    "num_key_value_heads": [1, 4, None],
    "head_dim": [8, None, ABSENT],
    "rms_norm_eps": [0.05],
    "max_position_embeddings": [512],
    "tie_word_embeddings": [True, ABSENT],
    "rope_parameters": [
        ABSENT,
        None,
        {"rope_type": "default", "rope_theta": 77.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {key: value for key, value in _LLAMA3.items() if key != "original_max_position_embeddings"},
        _LLAMA3,
        _YARN,
        {**_YARN, "truncate": False, "attention_factor": 1.3},
        {**_YARN, "truncate": None, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 8, "beta_slow": 2},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
    "rope_theta": [{"rope_theta": 77.0, "rope_parameters": ABSENT}, {"rope_theta": 77.0}],
    "rope_scaling": [
        {"rope_scaling": _OLD_YARN, "rope_theta": 300.0, "rope_parameters": ABSENT},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": ABSENT},
        {"rope_scaling": _OLD_YARN},
        {"rope_scaling": None, "rope_parameters": ABSENT, "rope_theta": 300.0},
    ],
    "attention_bias": [True, False, ABSENT],
    "mlp_bias": [True, ABSENT],
    "use_sliding_window": [
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ABSENT, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 5},
        {"use_sliding_window": False, "sliding_window": 5, "layer_types": ABSENT},
        ABSENT,
    ],
    "sliding_window": [
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ABSENT, "max_window_layers": 0},
        7, None, ABSENT, {"use_sliding_window": True, "sliding_window": None},
    ],
    "max_window_layers": [
        1, {"use_sliding_window": True, "sliding_window": 5, "layer_types": ABSENT, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ABSENT, "max_window_layers": ABSENT},
    ],
    "moe_intermediate_size": [16],
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "num_experts_per_tok": [1, 3],
    "decoder_sparse_step": [2, ABSENT],
    "mlp_only_layers": [[1], None, ABSENT],
    "norm_topk_prob": [False, True, ABSENT],
    "kv_lora_rank": [12],
    "q_lora_rank": [None, 16],
    "qk_rope_head_dim": [{"qk_rope_head_dim": 4, "head_dim": ABSENT, "qk_head_dim": ABSENT},
                         {"qk_rope_head_dim": 4, "head_dim": 4, "qk_head_dim": 16}],
    "qk_nope_head_dim": [{"qk_nope_head_dim": 8, "qk_head_dim": ABSENT}],
    "v_head_dim": [6],
    "rope_interleave": [False, ABSENT],
    "first_k_dense_replace": [0, 2],
    "n_shared_experts": [2, ABSENT],
    "n_group": [2],
    "topk_group": [1],
    "routed_scaling_factor": [1.0, ABSENT],
    "num_mtp_layers": [0],
    "num_nextn_predict_layers": [0, 1],
    "swiglu_limit": [0.5, ABSENT],
    "intermediate_size_mlp": [{"intermediate_size_mlp": 40, "moe_layers": [1]}],
    "moe_layers": [[0, 2], ABSENT, None],
    "interleave_moe_layer_step": [2, {"interleave_moe_layer_step": 2, "moe_layers": ABSENT}],
    "use_qk_norm": [False, ABSENT],
    "no_rope_layers": [[1, 0, 1, 0], [], None, ABSENT,
                       {"no_rope_layers": [1, 0, 1, 0], "layer_types": ABSENT}],
    "no_rope_layer_interval": [2, {"no_rope_layer_interval": 2, "no_rope_layers": ABSENT, "layer_types": ABSENT}],
    "attention_chunk_size": [5, None],
    "attn_temperature_tuning": [False, ABSENT],
    "floor_scale": [3],
    "attn_scale": [0.7, ABSENT],
}  # fmt: skip
LAYER_TYPES = {
    "qwen3": [["full_attention"] * 3, ["sliding_attention", "full_attention", "full_attention"], ABSENT,
              {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "use_sliding_window": True,
               "sliding_window": 5}],
    "llama4": [["full_attention"] * 4, ["full_attention", "chunked_attention"] * 2, ABSENT, None],
    "gpt-oss": [["full_attention"] * 4, ["full_attention", "sliding_attention"] * 2, ABSENT, None],
}  # fmt: skip
NO_CHANGE = {"max_position_embeddings", "num_nextn_predict_layers", "num_mtp_layers", "dtype", "torch_dtype"}
"""Read, but not for computing: they limit requests, say which tensors are ignorable, or how weights are kept."""
EXTRA_IGNORES = {
    "num_labels": 3,
    "id2label": {"0": "x"},
    "label2id": {"x": 0},
    "problem_type": None,
    "dtype": "float32",
    "torch_dtype": "float32",
    "initializer_range": 0.5,
    "return_dict": None,  # transformers' own models break on False
}
GATE = {
    ("llama3", "mlp_bias"), ("llama3", "attention_bias"), ("llama3", "rope_scaling"), ("qwen3", "use_sliding_window"),
    ("qwen3-moe", "use_sliding_window"), ("deepseek-v3", "rms_norm_eps"), ("llama4", "layer_types"),
    ("gpt-oss", "rope_parameters"), ("gpt-oss", "attention_dropout"),
}  # fmt: skip


def cases() -> list[Any]:
    found = []
    for specimen in SPECIMENS.values():
        for key in sorted(class_keys(specimen.config_class) | set(specimen.keys.reads) | set(specimen.keys.ignores)):
            marks = [] if (specimen.family, key) in GATE else [pytest.mark.full]
            if key not in ("architectures", "model_type", "quantization_config"):
                found.append(pytest.param(specimen, key, id=f"{specimen.family}-{key}", marks=marks))
    return found


def changes_of(specimen: Specimen, key: str) -> list[dict[str, Any]]:
    values = LAYER_TYPES[specimen.family] if key == "layer_types" else CHANGES.get(key)
    if specimen.keys.kind(key) == "ignored":
        values = None
    if values is None:
        assert specimen.keys.kind(key) != "read" or key in EXTRA_IGNORES | {"torch_dtype": 0}, "say how to change it"
        small = specimen.small()
        values = [EXTRA_IGNORES[key]] if key in EXTRA_IGNORES else [change(small.get(key))]
    own = {*class_keys(specimen.config_class), *specimen.keys.reads}
    named = [value if isinstance(value, dict) and key in value else {key: value} for value in values]
    return [{name: value for name, value in one.items() if name in own} for one in named]


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).norm() / other.norm())


def try_reference(folder: Path, raw: dict[str, Any]) -> torch.Tensor | None:
    """None where transformers cannot compute such a model, for whatever reason."""
    try:
        return ask_reference(build_reference(folder, raw))
    except Exception:
        return None


def try_worker(folder: Path, paged_sequences: Any) -> torch.Tensor | StartupError:
    try:
        return ask_worker(folder, paged_sequences)
    except StartupError as error:
        return error


@pytest.mark.parametrize(("specimen", "key"), cases())
def test_a_changed_key(specimen: Specimen, key: str, paged_sequences: Any, tmp_path: Path) -> None:
    raw = specimen.small()
    plain = ask_reference(build_reference(tmp_path / "plain", raw))
    kind, moved, refused = specimen.keys.kind(key), 0.0, False
    for number, changes in enumerate(changes_of(specimen, key)):
        folder = tmp_path / str(number)
        expected = try_reference(folder, with_changes(raw, changes))
        answer = try_worker(folder, paged_sequences)
        if isinstance(answer, StartupError):
            refused = True
            named = answer.reason in ("UnsupportedConfig", "ConfigInvalid") and any(
                one in str(answer) for one in changes
            )
            assert named or expected is None, f"{changes}: {answer}"
            continue
        assert expected is not None, f"{changes} was answered, but transformers cannot"
        assert difference(answer, expected) < LIMIT, changes
        moved = max(moved, difference(expected, plain))
    if kind == "read" and key not in NO_CHANGE:
        assert moved > 1e-3, "no change of it changed an answer: is it ignorable, or are the changes too small?"
    elif kind == "fixed":
        assert refused
    else:
        assert moved == 0.0
        assert not refused


@pytest.mark.full
@pytest.mark.parametrize("specimen", SPECIMENS.values(), ids=SPECIMENS)
def test_keys_that_no_family_reads_change_nothing(specimen: Specimen, paged_sequences: Any, tmp_path: Path) -> None:
    """All at once, as published configurations of earlier releases bring them."""
    values = {key: 3 for key in COMMON_IGNORES if "token_id" in key} | {
        "_name_or_path": "somewhere", "transformers_version": "4.20.0", "auto_map": {"AutoConfig": "code.Config"},
        "tokenizer_class": "LlamaTokenizer", "torchscript": True, "do_sample": True, "temperature": 0.3, "top_k": 5,
        "max_length": 20, "num_beams": 3, "repetition_penalty": 1.5, "use_cache": False, "is_decoder": True,
        "pretraining_tp": 2, "use_bfloat16": True, "tf_legacy_loss": True, "task_specific_params": {"a": 1},
        "finetuning_task": "x", "prefix": "y", "gradient_checkpointing": True, "neftune_noise_alpha": 5,
        "_attn_implementation_autoset": True, "cache_implementation": "hybrid", "unsloth_version": "1",
    }  # fmt: skip
    raw = specimen.small()
    plain = ask_reference(build_reference(tmp_path / "plain", raw))
    expected = ask_reference(build_reference(tmp_path / "changed", {**raw, **values}))
    assert difference(expected, plain) == 0.0
    assert difference(ask_worker(tmp_path / "changed", paged_sequences), plain) < LIMIT
