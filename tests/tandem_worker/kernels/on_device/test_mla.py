"""Multi-head latent attention: absorbed decode over the paged latents, expanded prefill."""

from __future__ import annotations

import pytest
import torch
from tandem_worker import kernels
from tandem_worker.kernels import reference


@pytest.mark.parametrize(("num_heads", "num_splits"), [(5, 1), (5, 3), (5, None), (70, 2)])
def test_mla_decode(randn, wide, assert_matches, device, half_dtype, num_splits, num_heads):
    cache = randn(9, 16, 64 + 16, dtype=half_dtype)
    tables = torch.tensor([[3, 0, 0, 0, 0], [1, 8, 2, 5, 7], [0, 0, 0, 0, 0]], dtype=torch.int32, device=device)
    lens = torch.tensor([7, 66, 0], dtype=torch.int32, device=device)
    cache[[0, 4, 6]] = float("nan")
    q = randn(3, num_heads, 80, dtype=half_dtype)
    options = {"latent_dim": 64, "scale": 0.1}
    expected = reference.mla_decode_attention_reference(*wide(q, cache), tables, lens, **options)
    actual = kernels.mla_decode_attention(q, cache, tables, lens, num_splits=num_splits, **options)
    assert_matches(actual, expected)
    assert not actual[2].any()


def test_mla_decodes_have_the_same_bits_in_every_batch(randn, device, half_dtype):
    cache = randn(80, 16, 32 + 16, dtype=half_dtype)
    tables = torch.randperm(78, generator=torch.Generator().manual_seed(1))[:76].view(2, 38).int().to(device)
    lens = torch.tensor([600, 257], dtype=torch.int32, device=device)
    q = randn(2, 2, 48, dtype=half_dtype)
    together = kernels.mla_decode_attention(q, cache, tables, lens, latent_dim=32, scale=0.1)
    for row, blocks in enumerate((38, 17)):
        own = tables[row : row + 1, :blocks].contiguous()
        alone = kernels.mla_decode_attention(
            q[row : row + 1], cache, own, lens[row : row + 1], latent_dim=32, scale=0.1
        )
        assert torch.equal(alone[0], together[row])


def test_absorbed_equals_expanded(randn, assert_matches, device):
    """Both forms compute the same attention: the product of query and key up-projection may be taken on either side."""
    length, heads, nope, rope, latent = 9, 2, 32, 16, 32
    latents = randn(length, latent + rope)
    up = randn(heads, nope + nope, latent)
    q = randn(1, heads, nope + rope)
    kv = torch.einsum("hdl,cl->chd", up, latents[:, :latent]).contiguous()
    starts = [torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 1], [0, length])]
    expanded = kernels.mla_prefill_attention(q, kv, latents[:, latent:], *starts, scale=0.1)
    absorbed_q = torch.cat((torch.einsum("thd,hdl->thl", q[..., :nope], up[:, :nope]), q[..., nope:]), dim=-1)
    tables = torch.tensor([[0]], dtype=torch.int32, device=device)
    cache = torch.zeros(1, 16, latent + rope, device=device)
    cache[0, :length] = latents
    out = kernels.mla_decode_attention(absorbed_q, cache, tables, starts[1][1:], latent_dim=latent, scale=0.1)
    assert_matches(torch.einsum("thl,hdl->thd", out, up[:, nope:]), expanded, 1e-5)


def test_latent_gather(randn, device, dtype):
    cache = randn(6, 4, 24, dtype=dtype)
    tables = torch.tensor([[5, 2], [0, 0], [1, 3]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 7, 7, 10], dtype=torch.int32, device=device)
    expected = reference.latent_gather_reference(cache, tables, starts, 12)
    assert torch.equal(kernels.latent_gather(cache, tables, starts, 12), expected)


def test_mla_prefill(randn, wide, assert_matches, device, dtype):
    q, kv, k_rope = randn(70, 2, 48, dtype=dtype), randn(130, 2, 32 + 24, dtype=dtype), randn(130, 16, dtype=dtype)
    query_start = torch.tensor([0, 1, 1, 69], dtype=torch.int32, device=device)
    kv_start = torch.tensor([0, 40, 40, 130], dtype=torch.int32, device=device)
    expected = reference.mla_prefill_attention_reference(*wide(q, kv, k_rope), query_start, kv_start, scale=0.2)
    actual = kernels.mla_prefill_attention(q, kv, k_rope, query_start, kv_start, scale=0.2)
    assert_matches(actual[:69], expected[:69])


def test_mla_refuses_what_it_would_misread(randn, device):
    tables, lens = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="latent_dim must be a power of two from 16, got 24"):
        kernels.mla_decode_attention(randn(1, 2, 40), randn(1, 4, 40), tables, lens, latent_dim=24, scale=1.0)
    with pytest.raises(ValueError, match="no room for key or value"):
        kernels.mla_prefill_attention(randn(1, 2, 16), randn(1, 2, 16), randn(1, 16), lens, lens, scale=1.0)
