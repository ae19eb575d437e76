"""A dense model of any size whose weights are drawn on the device: nothing is read or carried anywhere."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tandem_api.launch import WeightsForm
from tandem_worker.model.assembly.build import Build
from tandem_worker.model.backends.contract import BackendName
from tandem_worker.model.backends.select import find_backend
from tandem_worker.model.checkpoint.loader import WeightLoader
from tandem_worker.model.checkpoint.stored import Slice
from tandem_worker.model.config import ModelConfig, parse_config, read_architecture
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.families.registry import find_family
from tandem_worker.parallel.context import SINGLE

QWEN3_8B: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SMALL: Mapping[str, Any] = dict(QWEN3_8B) | {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip


class RandomSource:
    """`WeightSource` of a dense Qwen3: normal weights that keep activations near 1, the same for the same name."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self._shapes = plan_shapes(config)
        self._device = device
        self._dtype = dtype

    def names(self) -> Iterable[str]:
        return self._shapes

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def stored(self, name: str) -> None:
        """No tensor lies anywhere."""
        del name

    def read(self, name: str, part: Slice | None = None) -> torch.Tensor:
        shape = self._shapes[name]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)
        whole = whole.mul_(0.05).add_(1.0) if len(shape) == 1 else whole.mul_(shape[1] ** -0.5)
        return whole if part is None else whole.narrow(part.dim, part.start, part.stop - part.start)


def plan_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of every tensor of a dense Qwen3 checkpoint."""
    hidden, width, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden), "mlp.down_proj": (hidden, width),
    }  # fmt: skip
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def build_random_model(
    raw: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    weights: WeightsForm = "Plain",
) -> CausalLM:
    """On Triton's kernels, which on a CPU are their twins."""
    config = parse(raw)
    source = RandomSource(config, device, dtype)
    parts = find_backend(BackendName.TRITON)
    with torch.inference_mode():
        lossless = parts.lossless if weights == "Lossless" else None
        shrink = None if lossless is None else lossless.shrink
        loader = WeightLoader(source, dtype=dtype, device=device, keeps_packed=parts.keeps_packed, shrink=shrink)
        model = find_family(config.architecture).load(config, Build(loader=loader, backend=parts, context=SINGLE))
        if lossless is not None and lossless.connect is not None:
            lossless.connect(model)
        return model


def count_step_weights(raw: Mapping[str, Any]) -> int:
    """Weights that every step reads: all but the table of embeddings."""
    shapes = plan_shapes(parse(raw))
    total = 0
    for name, shape in shapes.items():
        if name != "model.embed_tokens.weight":
            product = 1
            for extent in shape:
                product *= extent
            total += product
    return total


def parse(raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of `raw`, as a worker reads it from `config.json`."""
    architecture = read_architecture(raw)
    return parse_config(raw, find_family(architecture).keys, architecture=architecture)
