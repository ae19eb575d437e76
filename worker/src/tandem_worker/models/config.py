"""What a model is made of, read from a Hugging Face `config.json` or from GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from tandem_worker.control.params import EmbeddingSpec
from tandem_worker.errors import StartupError

Number = TypeVar("Number", int, float)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float32}
_GGUF_FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and scaling. `scaling` is empty for the plain kind."""

    theta: float
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)


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
    dtype: torch.dtype
    """Element type of the checkpoint."""
    embedding: EmbeddingSpec | None = None
    """Of a model that computes embeddings: such a one has no output matrix."""
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def get(self, key: str, default: Any) -> Any:
        """A family's own setting; the default also stands in for null."""
        value = self.raw.get(key)
        return default if value is None else value

    def need(self, key: str, kind: type[Number], *, alias: str = "") -> Number:
        """A number that the family cannot do without; `alias` is its other published name.

        Raises StartupError when it is absent or not a number.
        """
        return _need(self.raw, alias if alias in self.raw else key, kind)

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The checkpoint's `quantization_config`, if it is quantized."""
        return self.raw.get("quantization_config")


def read_config(path: Path) -> ModelConfig:
    """Configuration from a `config.json`. Raises StartupError for what a person must fix."""
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
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig from the content of a `config.json`; a multimodal one yields its language model's."""
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise StartupError("ConfigInvalid", "config.json names no architecture (key `architectures`).")
    text = raw.get("text_config")
    if isinstance(text, dict):
        raw = {**text, "quantization_config": text.get("quantization_config") or raw.get("quantization_config")}
        raw.setdefault("tie_word_embeddings", False)
    hidden_size = _need(raw, "hidden_size", int)
    num_heads = _need(raw, "num_attention_heads", int)
    if num_heads <= 0 or hidden_size <= 0:
        raise StartupError("ConfigInvalid", "config.json: hidden_size and num_attention_heads must be positive.")
    return ModelConfig(
        architecture=str(architectures[0]),
        vocab_size=_need(raw, "vocab_size", int),
        hidden_size=hidden_size,
        num_layers=_need(raw, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
        intermediate_size=_need(raw, "intermediate_size", int),
        rms_norm_eps=_need(raw, "rms_norm_eps", float),
        max_position_embeddings=_need(raw, "max_position_embeddings", int),
        rope=_parse_rope(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=_DTYPES.get(str(raw.get("dtype") or raw.get("torch_dtype")), torch.float32),
        raw=raw,
    )


def parse_gguf_metadata(metadata: Mapping[str, Any], *, tied: bool) -> ModelConfig:
    """ModelConfig from GGUF metadata. `tied` says that the file has no output matrix of its own."""
    name = str(metadata.get("general.architecture"))
    if name not in _GGUF_FAMILIES:
        known = ", ".join(sorted(_GGUF_FAMILIES))
        raise StartupError(
            "UnsupportedArchitecture",
            f"GGUF files of architecture {name!r} cannot be served; supported are {known}. "
            "Use the model's safetensors checkpoint instead.",
        )
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    hidden_size = _need(own, "embedding_length", int)
    num_heads = _need(own, "attention.head_count", int)
    theta = float(own.get("rope.freq_base", 10000.0))
    vocab_size = own.get("vocab_size") or metadata.get("tokenizer.num_tokens")
    return ModelConfig(
        architecture=_GGUF_FAMILIES[name],
        vocab_size=_need({"vocab_size": vocab_size}, "vocab_size", int),
        hidden_size=hidden_size,
        num_layers=_need(own, "block_count", int),
        num_heads=num_heads,
        num_kv_heads=int(own.get("attention.head_count_kv", num_heads)),
        head_dim=int(own.get("attention.key_length") or hidden_size // num_heads),
        intermediate_size=_need(own, "feed_forward_length", int),
        rms_norm_eps=_need(own, "attention.layer_norm_rms_epsilon", float),
        max_position_embeddings=_need(own, "context_length", int),
        rope=_parse_gguf_rope(own, theta),
        tie_word_embeddings=tied,
        dtype=torch.bfloat16,
        raw=own,
    )


def _parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Both layouts in use: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""
    parameters = dict(raw.get("rope_parameters") or {})
    parameters.update(raw.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    return RopeConfig(theta=float(theta), kind=str(kind), scaling=parameters)


def _parse_gguf_rope(own: Mapping[str, Any], theta: float) -> RopeConfig:
    kind = str(own.get("rope.scaling.type", "none"))
    if kind == "none":
        return RopeConfig(theta=theta)
    scaling = {
        "factor": own.get("rope.scaling.factor", 1.0),
        "original_max_position_embeddings": own.get("rope.scaling.original_context_length"),
    }
    return RopeConfig(theta=theta, kind=kind, scaling=scaling)


def _need(raw: Mapping[str, Any], key: str, kind: type[Number]) -> Number:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        problem = "is missing" if value is None else f"is {value!r}"
        raise StartupError("ConfigInvalid", f"The model's configuration: {key} {problem}; it must be a number.")
    return kind(value)
