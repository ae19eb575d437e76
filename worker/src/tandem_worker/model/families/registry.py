"""Which family serves which published architecture."""

from __future__ import annotations

from importlib import import_module

from tandem_worker.host.errors import StartupError
from tandem_worker.model.families.family import Family

_FAMILIES = {
    "DeepseekV3ForCausalLM": "deepseek:DEEPSEEK",
    "GptOssForCausalLM": "gpt_oss:GPT_OSS",
    "KimiK25ForConditionalGeneration": "deepseek:KIMI_K25",
    "Llama4ForCausalLM": "llama4:LLAMA4",
    "Llama4ForConditionalGeneration": "llama4:LLAMA4_MULTIMODAL",
    "LlamaForCausalLM": "llama:LLAMA",
    "LlamaModel": "llama:LLAMA",
    "Qwen3ForCausalLM": "qwen3:QWEN3",
    "Qwen3Model": "qwen3:QWEN3",
    "Qwen3MoeForCausalLM": "qwen3:QWEN3_MOE",
}
"""Architecture, as `config.json` names it, to `module:family` of this package. Those called `...Model` have no output
matrix: they compute embeddings."""


def supported_architectures() -> tuple[str, ...]:
    """Names that `architectures` in a checkpoint's `config.json` may have, sorted."""
    return tuple(sorted(_FAMILIES))


def find_family(architecture: str) -> Family:
    """Raises StartupError for an architecture that no family serves."""
    entry = _FAMILIES.get(architecture)
    if entry is None:
        raise StartupError(
            "UnsupportedArchitecture",
            f"Models of architecture {architecture} are not supported. "
            f"Supported: {', '.join(supported_architectures())}.",
        )
    module, _, family = entry.partition(":")
    return getattr(import_module(f"tandem_worker.model.families.{module}"), family)
