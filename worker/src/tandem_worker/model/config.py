"""What a model is made of, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from tandem_worker.host.errors import StartupError
from tandem_worker.model.keys import ConfigKeys, Settings, read_settings
from tandem_worker.model.pooling import EmbeddingSpec
from tandem_worker.model.rope import RopeConfig, parse_rope

Number = TypeVar("Number", int, float)

CONFIG_FILE = "config.json"
_PREDICTION_LAYERS = "num_nextn_predict_layers"
_MOST_PREDICTION_LAYERS = 64
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Figures that every family has. What only one family has stays in `raw` and is read with `need` and `get`."""

    architecture: str
    """Class name as published, for example `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    """The output matrix is the embedding's, unless the checkpoint holds one that differs."""
    dtype: torch.dtype
    """Element type of the checkpoint."""
    embedding: EmbeddingSpec | None = None
    """How a model that computes embeddings pools them (it has no output matrix); None: it generates."""
    raw: Settings = field(default_factory=dict, repr=False)
    """The keys that the family declares to read, with the architecture's defaults for absent ones."""

    def get(self, key: str) -> Any:
        """A family's own setting as published, or the architecture's default; null stays None."""
        assert key in self.raw, f"{self.architecture} reads {key} without declaring it"
        return self.raw[key]

    def flag(self, key: str) -> bool:
        """A setting that is on or off; null is off. Raises StartupError for what is neither."""
        self.get(key)
        return _flag(self.raw, key)

    def need(self, key: str, kind: type[Number]) -> Number:
        """A number that the family cannot do without. Raises StartupError when it is absent or not a number."""
        return _need(self.raw, key, kind)

    def layer_kinds(self, key: str, known: tuple[str, ...]) -> tuple[str, ...] | None:
        """One word per layer; None where the key is null or absent. Raises StartupError for other words."""
        kinds = self.get(key)
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != self.num_layers or not set(map(str, kinds)) <= set(known):
            raise StartupError(
                "UnsupportedConfig",
                f"The model's configuration: {key} must name one of {', '.join(known)} for each of the "
                f"{self.num_layers} layers, but is {kinds!r:.200}.",
            )
        return tuple(kinds)

    def layer_numbers(self, key: str) -> list[int] | None:
        """A list of whole numbers; None where the key is null or absent. Raises StartupError for anything else."""
        value = self.get(key)
        if value is None or (isinstance(value, list) and all(isinstance(item, int) for item in value)):
            return value
        raise StartupError(
            "ConfigInvalid", f"The model's configuration: {key} must be a list of whole numbers, but is {value!r:.200}."
        )

    @property
    def num_prediction_layers(self) -> int:
        """Layers behind the model's own that predict further tokens (arXiv:2412.19437, section 2.2); 0 for families
        without. Raises StartupError for a number that no model has."""
        if _PREDICTION_LAYERS not in self.raw:
            return 0
        count = self.need(_PREDICTION_LAYERS, int)
        if not 0 <= count <= _MOST_PREDICTION_LAYERS:
            raise StartupError(
                "ConfigInvalid",
                f"The model's configuration: {_PREDICTION_LAYERS} is {count}; it must be from 0 to "
                f"{_MOST_PREDICTION_LAYERS}.",
            )
        return count

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The checkpoint's `quantization_config`, if it is quantized."""
        return self.raw.get("quantization_config")


def read_raw_config(path: Path) -> dict[str, Any]:
    """Content of a `config.json`. Raises StartupError for what a person must fix."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(
            "ConfigMissing", f"The model has no readable {path.name}. It must lie beside the weights."
        ) from error
    except ValueError as error:
        raise StartupError("ConfigInvalid", f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise StartupError("ConfigInvalid", f"{path.name} must be a JSON object.")
    return raw


def read_architecture(raw: Mapping[str, Any]) -> str:
    """The class that a `config.json` names. Raises StartupError when it names none."""
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise StartupError("ConfigInvalid", f"{CONFIG_FILE} names no architecture (key `architectures`).")
    return str(architectures[0])


def parse_config(
    raw: Mapping[str, Any], keys: ConfigKeys, *, architecture: str, where: str = CONFIG_FILE
) -> ModelConfig:
    """ModelConfig from the content of a `config.json`; a multimodal one yields its language model's.

    Raises StartupError for values that cannot be computed with, and for every key that `keys` does not know.
    """
    if keys.wrapper is not None:
        raw = _unwrap(raw, keys.wrapper, architecture, where)
        where = f"{where}, text_config"
    settings = read_settings(raw, keys, architecture=architecture, where=where)
    hidden_size = _need(settings, "hidden_size", int)
    num_heads = _need(settings, "num_attention_heads", int)
    if num_heads <= 0 or hidden_size <= 0:
        raise StartupError("ConfigInvalid", f"{where}: hidden_size and num_attention_heads must be positive.")
    num_kv_heads = _optional(settings, "num_key_value_heads", num_heads)
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise StartupError("ConfigInvalid", f"{where}: {num_heads} heads cannot share {num_kv_heads} key-value heads.")
    max_position_embeddings = _need(settings, "max_position_embeddings", int)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_need(settings, "vocab_size", int),
        hidden_size=hidden_size,
        num_layers=_need(settings, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_optional(settings, "head_dim", hidden_size // num_heads),
        intermediate_size=_need(settings, "intermediate_size", int),
        rms_norm_eps=_need(settings, "rms_norm_eps", float),
        max_position_embeddings=max_position_embeddings,
        rope=parse_rope(
            settings, keys, architecture=architecture, max_position_embeddings=max_position_embeddings, where=where
        ),
        tie_word_embeddings=_flag(settings, "tie_word_embeddings"),
        dtype=_parse_dtype(settings["dtype"] or settings["torch_dtype"], where),
        raw=settings,
    )


def _unwrap(raw: Mapping[str, Any], keys: ConfigKeys, architecture: str, where: str) -> dict[str, Any]:
    """The language model's part, with what the part around it says about weights."""
    outer = read_settings(raw, keys, architecture=architecture, where=where)
    text = outer.get("text_config")
    if not isinstance(text, dict):
        raise StartupError("ConfigInvalid", f"{where} has no text_config, which describes the language model.")
    tied = _flag(text, "tie_word_embeddings") or _flag(outer, "tie_word_embeddings")
    return {
        **text,
        "tie_word_embeddings": tied,
        "dtype": text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or raw.get("torch_dtype"),
        "quantization_config": text.get("quantization_config") or outer["quantization_config"],
    }


def _parse_dtype(name: object, where: str) -> torch.dtype:
    """The checkpoint's dtype: float32 where the configuration does not say. Raises StartupError."""
    if name is None:
        return torch.float32
    if not isinstance(name, str) or name not in _DTYPES:
        raise StartupError(
            "UnsupportedConfig",
            f"{where}: dtype is {name!r:.80}; it must be one of {', '.join(_DTYPES)}, the element type of the weights "
            "that are not quantized. Write the right one in a copy of the model.",
        )
    return _DTYPES[name]


def _flag(settings: Settings, key: str) -> bool:
    value = settings.get(key)
    if value is not None and not isinstance(value, int):
        raise StartupError("ConfigInvalid", f"The model's configuration: {key} is {value!r}; it must be a boolean.")
    return bool(value)


def _optional(settings: Settings, key: str, default: int) -> int:
    """As `_need`, where null or nothing at all stand for `default`."""
    return default if settings.get(key) is None else _need(settings, key, int)


def _need(settings: Settings, key: str, kind: type[Number]) -> Number:
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        problem = "is missing" if value is None else f"is {value!r}"
        raise StartupError("ConfigInvalid", f"The model's configuration: {key} {problem}; it must be a number.")
    if kind is int and value != int(value):
        raise StartupError("ConfigInvalid", f"The model's configuration: {key} is {value!r}; it must be whole.")
    return kind(value)
