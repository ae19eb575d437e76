"""Which keys of a `config.json` a family knows, and the refusal of all others.

A key that is read over changes answers without a word, so every key is one of three kinds: read, fixed (the family
computes with one value of it only), or ignored for a stated reason. What is left must be null, or the model is refused.
`tests/tandem_worker/model/test_keys.py` holds the declarations against transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tandem_worker.host.errors import StartupError

REQUIRED: Final = object()
"""In place of a default: the family cannot do without the key."""

Settings = Mapping[str, Any]

_BOOKKEEPING = "says where the file comes from and which programs wrote it"
_GENERATION = "a default for requests, which bring their own"
_OUTPUTS = "chooses what transformers returns, not what it computes"
_TRAINING = "of training only"
_CLASSIFIER = "of classification heads, which are not served"
_TOKENIZER = "of the tokenizer, which has files of its own"
_EXECUTION = "chooses among implementations of the same computation"

_GROUPS: dict[str, str] = {
    _BOOKKEEPING: "_name_or_path name_or_path _commit_hash transformers_version auto_map model_type architectures "
    "tokenizer_class prefix task_specific_params unsloth_version unsloth_fixed transformers.js_config",
    _GENERATION: "bos_token_id pad_token_id sep_token_id decoder_start_token_id use_cache "
    "cache_implementation assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens "
    "diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty "
    "epsilon_cutoff eta_cutoff exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id "
    "length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_assistant_tokens "
    "num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_scores "
    "remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens target_lookbehind temperature "
    "top_k top_p typical_p",
    _OUTPUTS: "output_attentions output_hidden_states output_router_logits return_dict torchscript",
    _TRAINING: "attention_dropout initializer_range router_aux_loss_coef gradient_checkpointing neftune_noise_alpha",
    _CLASSIFIER: "id2label label2id num_labels problem_type finetuning_task",
    _TOKENIZER: "tokenizer_model_max_length tokenizer_padding_side bos_token eos_token pad_token unk_token",
    _EXECUTION: "_attn_implementation attn_implementation _attn_implementation_autoset _attn_implementation_internal "
    "experts_implementation _experts_implementation _experts_implementation_internal _flash_attn_2_enabled "
    "chunk_size_feed_forward pretraining_tp use_bfloat16 tf_legacy_loss use_flash_attention",
    "ends answers where `generation_config.json` names no such token": "eos_token_id",
    "the families here are decoders whatever it says": "is_decoder",
}
COMMON_IGNORES: Final[Mapping[str, str]] = {key: reason for reason, keys in _GROUPS.items() for key in keys.split()}
COMMON_FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "is_causal": (True, None),
    "partial_rotary_factor": (1.0, None),
    "use_sliding_window": (False, None),
    "bias": (False, None),
}
SILU: Final = ("silu", "swish")
"""Both are transformers' names of one function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKeys:
    """What one family says about the keys of its configuration. Defaults are those of transformers' class."""

    model_types: tuple[str, ...]
    """`model_type`s whose computation this is; transformers chooses its class by them."""
    reads: Mapping[str, Any]
    """Key to what stands for it where it is absent, or REQUIRED."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Key to the values that the family computes with, the default first."""
    ignores: Mapping[str, str] = field(default_factory=dict)
    """Key to the reason why it cannot change an answer."""
    derived: Mapping[str, Callable[[Settings], Any]] = field(default_factory=dict)
    """Key to what it must equal, computed from what is read."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Another published name to the key it stands for."""
    rope_theta: float = 10000.0
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    """What stands for absent or null `rope_parameters`."""
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    wrapper: ConfigKeys | None = None
    """The keys around `text_config`, in multimodal checkpoints."""

    def kind(self, key: str) -> str:
        """`read`, `fixed`, `ignored`, or `unknown`."""
        if key in self.reads or key in self.aliases:
            return "read"
        if key in self.fixed or key in self.derived or key in COMMON_FIXED:
            return "fixed"
        return "ignored" if key in self.ignores or key in COMMON_IGNORES else "unknown"


DECODER_READS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "rms_norm_eps", "max_position_embeddings"), REQUIRED
    ),
    "tie_word_embeddings": False,
    "rope_theta": None,
    "rope_parameters": None,
    "rope_scaling": None,
    "dtype": None,
    "torch_dtype": None,
    "quantization_config": None,
}  # fmt: skip
"""What every family reads."""


def read_settings(raw: Mapping[str, Any], keys: ConfigKeys, *, architecture: str, where: str) -> Settings:
    """What the family reads of `raw`, defaults filled in. Null stays null.

    `where` names `raw` to people. Raises StartupError naming every key that changes the computation in a way that the
    family does not know.
    """
    raw = _resolve_aliases(raw, keys, where)
    settings = {key: raw.get(key, default) for key, default in keys.reads.items()}
    settings = {key: value for key, value in settings.items() if value is not REQUIRED}
    problems = [*_check_model_type(raw, keys), *_check_values(raw, keys, settings)]
    if problems:
        raise refuse_keys(problems, architecture=architecture, where=where)
    return settings


def refuse_keys(problems: list[str], *, architecture: str, where: str) -> StartupError:
    """The refusal of a configuration; each problem names a key, its value and what would do."""
    return StartupError(
        "UnsupportedConfig",
        f"{where} asks for what {architecture} is not computed with here: {'; '.join(problems)}. Choose another "
        f"checkpoint; where a key is a leftover that changes nothing, remove it from a copy of the model.",
    )


def _resolve_aliases(raw: Mapping[str, Any], keys: ConfigKeys, where: str) -> dict[str, Any]:
    resolved = dict(raw)
    for alias, key in keys.aliases.items():
        value = resolved.pop(alias, None)
        if value is None:
            continue
        if resolved.get(key, value) != value:
            raise StartupError("ConfigInvalid", f"{where}: {alias} and {key} mean the same, but differ.")
        resolved[key] = value
    return resolved


def _check_model_type(raw: Mapping[str, Any], keys: ConfigKeys) -> list[str]:
    found = raw.get("model_type")
    if found is None or found in keys.model_types:
        return []
    return [f"model_type is {_show(found)} (known: {', '.join(keys.model_types)})"]


def _check_values(raw: Mapping[str, Any], keys: ConfigKeys, settings: Settings) -> list[str]:
    problems = []
    for key, value in raw.items():
        if key in keys.reads or key in keys.ignores:
            continue
        if key in keys.derived:
            wanted = keys.derived[key](settings)
            if value is not None and value != wanted:
                problems.append(f"{key} is {_show(value)} (known: {_show(wanted)})")
        elif (allowed := keys.fixed.get(key, COMMON_FIXED.get(key))) is not None:
            if value not in allowed:
                problems.append(f"{key} is {_show(value)} (known: {', '.join(_show(one) for one in allowed)})")
        elif value is not None and key not in COMMON_IGNORES:
            problems.append(f"{key} is {_show(value)} (not a key that is known)")
    return problems


def _show(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
