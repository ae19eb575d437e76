"""Norms, rotary embedding, activations and the KV write."""

from __future__ import annotations

import pytest
import torch
from tandem_worker import kernels
from tandem_worker.kernels import reference


@pytest.mark.parametrize("shape", [(3, 64), (5, 96), (1, 576), (2, 3, 64), (0, 64)])
def test_rms_norm(randn, wide, assert_matches, dtype, shape):
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    assert_matches(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm_reference(*wide(x, weight), 1e-5))


def test_rms_norm_without_weight_on_strided_rows(randn, wide, assert_matches, dtype):
    x = randn(7, 4, 96, dtype=dtype)[:, 1, :64]
    assert_matches(kernels.rms_norm(x, None, 1e-6), reference.rms_norm_reference(wide(x), None, 1e-6))


@pytest.mark.parametrize("shape", [(4, 64), (3, 200)])
def test_residual_rms_norm_updates_the_residual(randn, wide, assert_matches, dtype, shape):
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    wide_x, wide_residual, wide_weight = wide(x, residual, weight)
    expected = reference.residual_rms_norm_reference(wide_x, wide_residual, wide_weight, 1e-5)
    assert_matches(kernels.residual_rms_norm(x, residual, weight, 1e-5), expected)
    assert_matches(residual, wide_residual)


def test_residual_rms_norm_may_write_over_its_input(randn, assert_matches, dtype):
    x, residual, weight = randn(3, 64, dtype=dtype), randn(3, 64, dtype=dtype), randn(64, dtype=dtype)
    expected = reference.residual_rms_norm_reference(x.clone(), residual.clone(), weight, 1e-5)
    kernels.residual_rms_norm(x, residual, weight, 1e-5, out=x)
    assert_matches(x, expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [32, 24])
@pytest.mark.parametrize("with_keys", [True, False])
def test_rope_rotates_views_of_the_projection(randn, wide, assert_matches, device, interleaved, rotated, with_keys):
    fused = randn(5, 9, 32, dtype=torch.float16)
    angles = randn(40, rotated // 2)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([0, 39, 7, 7, 21], device=device)
    expected = wide(fused)
    keys = expected[:, 5:7] if with_keys else None
    reference.rope_reference(expected[:, :5], keys, *wide(cos, sin), positions, interleaved=interleaved)
    kernels.rope(fused[:, :5], fused[:, 5:7] if with_keys else None, cos, sin, positions, interleaved=interleaved)
    assert_matches(fused, expected)


@pytest.mark.parametrize("shape", [(3, 64), (2, 2304), (4, 10)])
def test_gated_activations(randn, wide, assert_matches, dtype, shape):
    gate_up = randn(*shape, dtype=dtype, scale=4.0)
    assert_matches(kernels.silu_mul(gate_up), reference.silu_mul_reference(wide(gate_up)))
    assert_matches(kernels.swiglu_clamped(gate_up), reference.swiglu_clamped_reference(wide(gate_up)))


@pytest.mark.parametrize("slot_first", [False, True])
def test_kv_write_in_any_memory_order(randn, assert_matches, device, dtype, slot_first):
    fused = randn(6, 9, 48, dtype=dtype)
    k, v = fused[:, 3:6], fused[:, 6:9]
    cache = (
        randn(5, 2, 4, 3, 48, dtype=dtype).permute(0, 1, 3, 2, 4) if slot_first else randn(5, 2, 3, 4, 48, dtype=dtype)
    )
    slots = torch.tensor([4, 19, -1, 7, 8, 13], device=device)
    expected = cache.clone()
    reference.kv_write_reference(k, v, expected, slots)
    kernels.kv_write(k, v, cache, slots)
    assert torch.equal(cache, expected)


def test_latent_write(randn, device, dtype):
    latent, cache = randn(4, 72, dtype=dtype), randn(3, 4, 72, dtype=dtype)
    slots = torch.tensor([11, -1, 4, 6], dtype=torch.int32, device=device)
    expected = cache.clone()
    reference.latent_write_reference(latent, expected, slots)
    kernels.latent_write(latent, cache, slots)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("word", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize(("count", "width"), [(1, 5), (3, 2048), (7, 5000), (40, 300), (0, 8)])
def test_copied_rows_are_pieces_of_any_width(device, word, count, width):
    def table(rows, columns):
        return torch.randint(0, 255, (rows, columns), device=device).to(word)

    source, target = table(50, width + 3), table(45, width + 9)
    pairs = torch.stack([torch.randint(0, 50, (count,)), torch.randperm(45)[:count]], dim=1).to(device)
    expected = target.clone()
    reference.copy_rows_reference(pairs, source, 3, expected, 4, width)
    assert count == 0 or torch.equal(expected[pairs[0, 1], 4 : width + 4], source[pairs[0, 0], 3:])
    kernels.copy_rows(pairs, source, 3, target, 4, width)
    assert torch.equal(target, expected)


def test_rows_are_copied_within_their_tables_alone(device):
    pairs, table = (
        torch.zeros(1, 2, dtype=torch.int64, device=device),
        torch.zeros(2, 8, dtype=torch.int32, device=device),
    )
    with pytest.raises(ValueError, match="columns 4 to 9 are not in source, which has 8"):
        kernels.copy_rows(pairs, table, 4, table, 0, 5)
    with pytest.raises(ValueError, match="columns -1 to 4 are not in target"):
        kernels.copy_rows(pairs, table, 0, table, -1, 5)
    with pytest.raises(TypeError, match="target must be int32"):
        kernels.copy_rows(pairs, table, 0, table.long(), 0, 5)
    with pytest.raises(ValueError, match="must be contiguous"):
        kernels.copy_rows(pairs, table.t(), 0, table, 0, 1)
    with pytest.raises(TypeError, match="pairs must be int64"):
        kernels.copy_rows(pairs.int(), table, 0, table, 0, 5)


def test_launchers_refuse_what_they_would_misread(randn, device):
    x = randn(4, 64)
    with pytest.raises(ValueError, match=r"weight must have shape \[64\]"):
        kernels.rms_norm(x, randn(32), 1e-5)
    with pytest.raises(ValueError, match="contiguous along its last axis"):
        kernels.rms_norm(randn(64, 4).t(), randn(64), 1e-5)
    with pytest.raises(TypeError, match="x must be bfloat16 or float16 or float32, got float64"):
        kernels.rms_norm(x.double(), randn(64), 1e-5)
    with pytest.raises(ValueError, match="even last axis"):
        kernels.silu_mul(randn(2, 7))
    with pytest.raises(ValueError, match="rotates 128 dimensions, but heads have 64"):
        kernels.rope(
            randn(2, 2, 64), None, randn(8, 64), randn(8, 64), torch.zeros(2, dtype=torch.int64, device=device)
        )
    with pytest.raises(TypeError, match="slot_mapping must be int32 or int64"):
        kernels.kv_write(randn(1, 2, 16), randn(1, 2, 16), randn(2, 2, 2, 4, 16), randn(1))
