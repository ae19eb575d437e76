"""QK norm, rotary embedding and KV write in one kernel."""

from __future__ import annotations

import pytest
import torch
from tandem_worker import kernels
from tandem_worker.kernels import reference


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [48, 20])
@pytest.mark.parametrize("with_norm", [False, True])
def test_fused_qkv(randn, wide, assert_matches, device, half_dtype, interleaved, rotated, with_norm):
    num_heads, num_kv_heads, head_dim = 5, 2, 48
    qkv = randn(4, (num_heads + 2 * num_kv_heads) * head_dim, dtype=half_dtype)
    norms = {"q_norm": randn(head_dim), "k_norm": randn(head_dim)} if with_norm else {}
    angles = randn(30, rotated // 2)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([29, 0, 7, 8], device=device)
    slots = torch.tensor([3, -1, 9, 4], device=device)
    cache = randn(3, 4, 2, num_kv_heads, head_dim, dtype=half_dtype).permute(0, 2, 3, 1, 4)
    wide_cache = wide(cache.clone())
    expected = reference.fused_qkv_norm_rope_kv_write_reference(
        *wide(qkv, cos, sin), positions, wide_cache, slots, interleaved=interleaved,
        **{name: wide(weight) for name, weight in norms.items()},
    )  # fmt: skip
    actual = kernels.fused_qkv_norm_rope_kv_write(
        qkv, cos, sin, positions, cache, slots, interleaved=interleaved, **norms
    )
    assert_matches(actual, expected)
    assert_matches(cache, wide_cache)


def test_equals_the_separate_kernels(randn, assert_matches, device):
    qkv = randn(3, 6 * 32, dtype=torch.float16)
    cos, sin = randn(8, 16), randn(8, 16)
    positions, slots = torch.tensor([5, 6, 7], device=device), torch.tensor([4, 5, 6], device=device)
    fused_cache, cache = (torch.zeros(2, 2, 1, 8, 32, dtype=torch.float16, device=device) for _ in range(2))
    fused = kernels.fused_qkv_norm_rope_kv_write(qkv, cos, sin, positions, fused_cache, slots)
    heads = qkv.view(3, 6, 32)
    kernels.rope(heads[:, :4], heads[:, 4:5], cos, sin, positions)
    kernels.kv_write(heads[:, 4:5], heads[:, 5:], cache, slots)
    assert_matches(fused, heads[:, :4], 1e-3)
    assert_matches(fused_cache, cache, 1e-3)


def test_refuses_half_a_norm(randn, device):
    positions = torch.zeros(1, dtype=torch.int64, device=device)
    cache, table = randn(2, 2, 1, 8, 32), randn(4, 16)
    with pytest.raises(ValueError, match="both or not at all"):
        kernels.fused_qkv_norm_rope_kv_write(randn(1, 96), table, table, positions, cache, positions, q_norm=randn(32))
    with pytest.raises(ValueError, match=r"not \(Hq \+ 2 \* 1\) \* 32"):
        kernels.fused_qkv_norm_rope_kv_write(randn(1, 64), table, table, positions, cache, positions)
