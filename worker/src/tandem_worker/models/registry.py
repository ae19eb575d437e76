"""Which family serves which published architecture."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from tandem_worker.errors import StartupError
from tandem_worker.models.base import CausalLM
from tandem_worker.models.config import ModelConfig
from tandem_worker.parallel.context import ParallelContext
from tandem_worker.weights.loader import WeightLoader

LoadFunction = Callable[[ModelConfig, WeightLoader, ParallelContext], CausalLM]

_FAMILIES = {
    "DeepseekV3ForCausalLM": "deepseek:load_deepseek",
    "GptOssForCausalLM": "gpt_oss:load_gpt_oss",
    "KimiK25ForConditionalGeneration": "deepseek:load_deepseek",
    "Llama4ForCausalLM": "llama4:load_llama4",
    "Llama4ForConditionalGeneration": "llama4:load_llama4",
    "LlamaForCausalLM": "llama:load_llama",
    "LlamaModel": "llama:load_llama",
    "Qwen3ForCausalLM": "qwen3:load_qwen3",
    "Qwen3Model": "qwen3:load_qwen3",
    "Qwen3MoeForCausalLM": "qwen3:load_qwen3_moe",
}
"""Architecture, as `config.json` names it, to `module:function` of this package. Those called `...Model` have no output
matrix: they compute embeddings."""


def supported_architectures() -> tuple[str, ...]:
    return tuple(sorted(_FAMILIES))


def find_family(architecture: str) -> LoadFunction:
    """The family's load function. Raises StartupError for an architecture that no family serves."""
    entry = _FAMILIES.get(architecture)
    if entry is None:
        raise StartupError(
            "UnsupportedArchitecture",
            f"Models of architecture {architecture} are not supported. "
            f"Supported: {', '.join(supported_architectures())}.",
        )
    module, _, function = entry.partition(":")
    return getattr(import_module(f"tandem_worker.models.{module}"), function)
