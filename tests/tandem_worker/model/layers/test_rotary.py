from __future__ import annotations

from typing import Any

import pytest
import torch
from tandem_worker.host.errors import StartupError
from tandem_worker.model.layers.rotary import RotaryEmbedding, Rotation, build_inverse_frequencies
from tandem_worker.model.rope import RopeConfig
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.tandem_worker.model.layers.closeness import assert_near, random

LONGEST = 4096
SCALINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {"factor": 4.0}),
    "llama3": (
        "llama3",
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    ),
    "llama3 of Llama 3.2": (
        "llama3",
        {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
    "yarn": ("yarn", {"factor": 4.0, "original_max_position_embeddings": 1024}),
    "yarn of DeepSeek-V3": (
        "yarn",
        {
            "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    ),
    "yarn with two scales": (
        "yarn", {"factor": 16.0, "original_max_position_embeddings": 256, "mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    "yarn of gpt-oss": (
        "yarn",
        {
            "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False,
        },
    ),
    "yarn with its factor given": (
        "yarn", {"factor": 2.0, "original_max_position_embeddings": 2048, "attention_factor": 1.25},
    ),
}  # fmt: skip


def ask_transformers(kind: str, scaling: dict[str, Any], theta: float, dim: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **scaling},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("dim", [8, 64, 128])
@pytest.mark.parametrize(("kind", "scaling"), SCALINGS.values(), ids=SCALINGS)
def test_frequencies_are_those_of_transformers(kind: str, scaling: dict[str, Any], dim: int, theta: float) -> None:
    expected, factor = ask_transformers(kind, scaling, theta, dim)
    found, found_factor = build_inverse_frequencies(
        RopeConfig(theta=theta, kind=kind, scaling=scaling), dim, max_position_embeddings=LONGEST
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found_factor == pytest.approx(factor)


def test_frequencies_without_scaling() -> None:
    frequencies, factor = build_inverse_frequencies(RopeConfig(theta=5e5), 64)
    assert_near(frequencies, 5e5 ** (-torch.arange(32).double() / 32))
    assert factor == 1.0


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaling_that_lacks_a_value_is_named(kind: str) -> None:
    with pytest.raises(StartupError, match=f"type {kind} lacks"):
        build_inverse_frequencies(RopeConfig(theta=1e4, kind=kind, scaling={}), 8)


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(StartupError, match="'dynamic' is not supported"):
        build_inverse_frequencies(RopeConfig(theta=1e4, kind="dynamic"), 8)


def rotate(heads: torch.Tensor, positions: torch.Tensor, *, interleaved: bool, theta: float = 1e4) -> torch.Tensor:
    """Each pair of elements as a complex number, turned in float64."""
    dim = heads.shape[-1]
    angles = positions.double()[:, None] / theta ** (torch.arange(0, dim, 2).double() / dim)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    wide = heads.double()
    pairs = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = torch.complex(*pairs) * turn
    parts = torch.stack((turned.real, turned.imag), dim=-1 if interleaved else -2)
    return parts.flatten(-2)


def build_rotary(dim: int, rope: RopeConfig | None = None) -> RotaryEmbedding:
    return RotaryEmbedding(
        rope or RopeConfig(theta=1e4), dim, max_position_embeddings=LONGEST, device=torch.device("cpu"),
        rotation=Rotation,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [2, 16, 64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(dtype: torch.dtype, dim: int, interleaved: bool) -> None:
    positions = torch.tensor([0, 1, 17, 300])
    heads = random(4, 3, dim, dtype=dtype)
    exact = rotate(heads, positions, interleaved=interleaved)
    rotation = build_rotary(dim).at(positions, dtype)
    (rotation.rotate_interleaved_ if interleaved else rotation.rotate_half_)(heads)
    assert_near(heads, exact, within=3e-5 if dtype == torch.float32 else None)  # angles are products in float32


def test_every_layer_of_a_step_gets_the_same_rotation() -> None:
    """What `rotate_half_` widens once, it uses again."""
    rotation = build_rotary(16).at(torch.tensor([3, 9]), torch.float32)
    first, second = random(2, 2, 16), random(2, 2, 16)
    rotation.rotate_half_(first)
    rotation.rotate_half_(second)
    assert torch.equal(first, second)


def test_position_zero_turns_nothing() -> None:
    heads = random(1, 2, 8)
    before = heads.clone()
    build_rotary(8).at(torch.tensor([0]), torch.float32).rotate_half_(heads)
    assert torch.equal(heads, before)


def test_attention_factor_scales_what_is_rotated() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.5}
    heads = random(1, 2, 8)
    scaled = build_rotary(8, RopeConfig(theta=1e4, kind="yarn", scaling=scaling)).at(torch.tensor([0]), torch.float32)
    before = heads.clone()
    scaled.rotate_half_(heads)
    torch.testing.assert_close(heads, before * 1.5)


def test_divisors_of_a_gguf_file_are_llama3s_scaling() -> None:
    scaling = SCALINGS["llama3"][1]
    scaled = build_rotary(64, RopeConfig(theta=1e4, kind="llama3", scaling=scaling))
    plain = build_rotary(64)
    plain.scale_frequencies(plain.inverse_frequencies / scaled.inverse_frequencies)
    torch.testing.assert_close(plain.inverse_frequencies, scaled.inverse_frequencies)
