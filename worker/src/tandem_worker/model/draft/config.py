"""What a published EAGLE-3 head says of itself: one decoder layer, and how it is joined to a model's layers.

Two layouts of `config.json` are in use: the flat one of EAGLE, and that of speculators, which nests the layer in
`transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tandem_worker.host.errors import StartupError
from tandem_worker.model.config import CONFIG_FILE, ModelConfig, parse_config, read_architecture
from tandem_worker.model.families.llama import KEYS
from tandem_worker.model.keys import ConfigKeys, read_settings

_LAYER = "transformer_layer_config"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_SWITCHES = {
    "draft_vocab_size": None,
    "target_hidden_size": None,
    "norm_before_residual": None,
    "norm_before_fc": None,
    "fc_norm": None,
    "norm_output": None,
    "eagle_config": None,
    _LAYER_IDS: None,
}
_HEAD_KEYS = replace(KEYS, reads={**KEYS.reads, **_SWITCHES})
_FOLDED = ConfigKeys(
    model_types=("speculator_model", "eagle3", "llama"),
    reads={_LAYER: None, **_SWITCHES},
    fixed={"speculators_model_type": ("eagle3",), "tie_word_embeddings": (False, None)},
    ignores={
        "speculators_config": "says how the publisher ran it",
        "speculators_version": "says which program wrote the file",
        "has_no_defaults_at_init": "of the program that wrote the file",
        "embed_requires_grad": "of training only",
        "dtype": "of the checkpoint's tensors, which say it themselves",
        "torch_dtype": "of the checkpoint's tensors, which say it themselves",
    },
)
_EAGLE_CONFIG = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}
"""What heads say there beside the layers' numbers, with what is computed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """What a head must fit to: figures of the model that it guesses for."""

    vocab_size: int
    hidden_size: int
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """An EAGLE-3 head (arXiv:2503.01840)."""

    layer: ModelConfig
    """Its decoder layer; `vocab_size` is the model's."""
    draft_vocab_size: int
    """Tokens that it can guess."""
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    """The residual stream is taken before these layers of the model, in this order."""
    norm_before_residual: bool
    """The layer adds to the normalized state, not to the state itself."""
    norm_before_fc: bool
    """One norm over the concatenated features."""
    fc_norm: bool
    """A norm for each of the features (EAGLE-3.1)."""
    norm_output: bool
    """The next depth goes on from the normalized state (EAGLE-3.1)."""


def parse_head_config(raw: Mapping[str, Any], target: TargetShape) -> HeadConfig:
    """Reads a head's `config.json`. Raises StartupError for what is not computed here, and where it does not fit."""
    where = f"the draft's {CONFIG_FILE}"
    is_nested = _LAYER in raw
    flat = _unfold(raw, where) if is_nested else raw
    layer = parse_config(flat, _HEAD_KEYS, architecture=read_architecture(raw), where=where)
    if layer.num_layers != 1:
        raise _unsupported(f"num_hidden_layers is {layer.num_layers}: heads of one layer are served")
    if layer.quantization is not None:
        raise _unsupported("it is quantized: publish it in bfloat16")
    if layer.vocab_size != target.vocab_size:
        raise _mismatch(f"its vocabulary has {layer.vocab_size} tokens, the model's {target.vocab_size}")
    own_width = layer.get("target_hidden_size")
    target_width = layer.hidden_size if own_width is None else layer.need("target_hidden_size", int)
    if target_width != target.hidden_size:
        raise _mismatch(f"it reads states of width {target_width}, the model's have {target.hidden_size}")
    vocabulary = layer.get("draft_vocab_size")
    size = layer.vocab_size if vocabulary is None else layer.need("draft_vocab_size", int)
    if not 0 < size <= layer.vocab_size:
        raise _unsupported(f"draft_vocab_size is {size}, of a vocabulary of {layer.vocab_size} tokens")
    before_residual = layer.get("norm_before_residual")
    return HeadConfig(
        layer=layer,
        draft_vocab_size=size,
        target_hidden_size=target_width,
        feature_layers=_read_layers(layer, target),
        norm_before_residual=is_nested if before_residual is None else layer.flag("norm_before_residual"),
        norm_before_fc=layer.flag("norm_before_fc"),
        fc_norm=layer.flag("fc_norm"),
        norm_output=layer.flag("norm_output"),
    )


def _unfold(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """speculators' layout as the flat one."""
    outer = read_settings(raw, _FOLDED, architecture=read_architecture(raw), where=where)
    layer = outer[_LAYER]
    if not isinstance(layer, Mapping):
        raise StartupError("ConfigInvalid", f"{where}: {_LAYER} must be an object.")
    switches = {key: outer[key] for key in _SWITCHES if outer[key] is not None}
    return {**layer, **switches, "num_hidden_layers": layer.get("num_hidden_layers", 1)}


def _read_layers(layer: ModelConfig, target: TargetShape) -> tuple[int, ...]:
    ids = layer.layer_numbers(_LAYER_IDS)
    extra = layer.get("eagle_config")
    if extra is not None:
        if not isinstance(extra, Mapping):
            raise _unsupported(f"eagle_config is {extra!r:.100}; it must be an object")
        for key, value in extra.items():
            if key != _LAYER_IDS and value is not None and value not in _EAGLE_CONFIG.get(key, ()):
                raise _unsupported(f"eagle_config.{key} is {value!r:.100}, which is not computed here")
        ids = ids if ids is not None else extra.get(_LAYER_IDS)
    count = target.num_layers
    if ids is None:
        ids = [2, count // 2, count - 3]
    whole = isinstance(ids, list) and bool(ids) and all(type(one) is int and 0 <= one < count for one in ids)
    if not whole or sorted(set(ids)) != ids:
        raise _mismatch(
            f"it reads the states before layers {ids!r:.100}, but they must be different ones of the model's {count}, "
            f"counted from 0, in ascending order ({_LAYER_IDS})"
        )
    return tuple(ids)


def _unsupported(what: str) -> StartupError:
    return StartupError("DraftUnsupported", f"The draft head cannot be computed: {what}.")


def _mismatch(what: str) -> StartupError:
    return StartupError(
        "DraftMismatch", f"The draft head belongs to another model: {what}. Name one that was trained for this model."
    )
