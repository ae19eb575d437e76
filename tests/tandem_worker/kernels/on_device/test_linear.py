"""Products of few rows with plain and quantized weights."""

from __future__ import annotations

import pytest
import torch
from tandem_worker import kernels
from tandem_worker.kernels import reference
from tandem_worker.kernels.quantized import Int4Weight, dequantize

from tests.tandem_worker.kernels.quantizing import quantize_fp8, quantize_int4, quantize_mxfp4

FORMS = ["plain", "fp8", "int4 of 32", "int4 of 128", "int4 with zeros", "mxfp4"]


def in_form(form: str, weight: torch.Tensor, dtype: torch.dtype):
    match form:
        case "plain":
            return weight.to(dtype)
        case "fp8":
            return quantize_fp8(weight)
        case "mxfp4":
            return quantize_mxfp4(weight)
        case "int4 with zeros":
            symmetric = quantize_int4(weight, 32)
            zero = torch.arange(symmetric.scale.numel(), device=weight.device).view_as(symmetric.scale) % 16
            return Int4Weight(packed=symmetric.packed, scale=symmetric.scale.to(dtype), zero=zero.to(torch.uint8))
        case _:
            return quantize_int4(weight, int(form.rpartition(" ")[2]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_small_batch_linear(randn, wide, assert_matches, half_dtype, form, num_splits):
    x, bias = randn(3, 768, dtype=half_dtype), randn(128)
    weight = in_form(form, randn(128, 768, scale=0.1), half_dtype)
    expected = reference.small_batch_linear_reference(x.double(), weight, bias)
    assert_matches(kernels.small_batch_linear(x, weight, bias, num_splits=num_splits), expected)


@pytest.mark.parametrize("shape", [(1, 40, 72), (33, 65, 136), (70, 64, 64)])
def test_small_batch_linear_shapes(randn, wide, assert_matches, dtype, shape):
    rows, outputs, columns = shape
    x, weight = randn(rows, columns, dtype=dtype), randn(outputs, columns, dtype=dtype)
    assert_matches(kernels.small_batch_linear(x, weight), reference.small_batch_linear_reference(*wide(x, weight)))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_small_batch_linear_adds_a_residual(randn, wide, assert_matches, dtype, num_splits):
    x, weight, residual = randn(5, 72, dtype=dtype), randn(40, 72, dtype=dtype), randn(5, 50, dtype=dtype)[:, :40]
    expected = reference.small_batch_linear_reference(*wide(x, weight), residual=wide(residual))
    assert_matches(kernels.small_batch_linear(x, weight, residual=residual, num_splits=num_splits), expected)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_sums_are_left_in_float32_where_out_is(randn, wide, assert_matches, device, half_dtype, num_splits):
    """Logits: what the half type would round away decides between tokens."""
    x, weight = randn(3, 768, dtype=half_dtype), randn(70, 768, dtype=half_dtype, scale=0.1)
    out = torch.empty(3, 70, device=device)
    returned = kernels.small_batch_linear(x, weight, num_splits=num_splits, out=out)
    assert returned is out
    assert_matches(out, reference.small_batch_linear_reference(*wide(x, weight)), 2e-6)
    assert torch.equal(out.to(half_dtype), kernels.small_batch_linear(x, weight, num_splits=num_splits))
    twin = reference.small_batch_linear_reference(x, weight, out=torch.empty_like(out))
    assert_matches(out, twin.double(), 2e-6)


@pytest.mark.parametrize("form", ["plain", "fp8", "int4 of 32", "mxfp4"])
def test_gate_up_silu(randn, wide, assert_matches, half_dtype, form):
    x, bias = randn(5, 256, dtype=half_dtype), randn(256)
    weight = in_form(form, randn(256, 256, scale=0.2), half_dtype)
    expected = reference.gate_up_silu_reference(x.double(), weight, bias)
    assert_matches(kernels.gate_up_silu(x, weight, bias), expected)


@pytest.mark.parametrize("form", FORMS)
def test_widen(randn, half_dtype, form):
    weight = in_form(form, randn(128, 256, scale=0.2), half_dtype)
    assert torch.equal(kernels.widen(randn(1, dtype=half_dtype), weight), dequantize(weight, half_dtype))


@pytest.mark.parametrize(("form", "limit"), [("fp8", 0.04), ("int4 of 32", 0.12), ("mxfp4", 0.16)])
def test_quantized_forms_are_close_to_what_they_round(randn, form, limit):
    weight = randn(128, 256)
    error = (dequantize(in_form(form, weight, torch.float32), torch.float32) - weight).norm() / weight.norm()
    assert 0 < error < limit


def test_linear_refuses_what_it_would_misread(randn):
    with pytest.raises(ValueError, match=r"x must have shape \[any, 32\]"):
        kernels.small_batch_linear(randn(2, 64), randn(8, 32))
    with pytest.raises(TypeError, match="weight must be float32"):
        kernels.small_batch_linear(randn(2, 64), randn(8, 64, dtype=torch.float16))
    with pytest.raises(ValueError, match="groups of a power of two from 16, got 8"):
        kernels.small_batch_linear(randn(2, 64), quantize_int4(randn(8, 64), 8))
    with pytest.raises(ValueError, match="even number of rows"):
        kernels.gate_up_silu(randn(2, 64), randn(7, 64))


def test_splits_follow_the_weight_alone(half_dtype, device, generator):
    """One row and 32 are summed in the same pieces. Products of 256 columns have one of three magnitudes: sums of one
    are exact in any order, as the interpreter's depends on the processor, and sums of all are not."""
    magnitudes = 2 ** (6 * (torch.arange(2048) // 256 % 3))
    x = torch.randint(-1, 2, (32, 2048), generator=generator) * magnitudes
    weight = torch.randint(-8, 9, (40, 2048), generator=generator) * magnitudes
    x, weight = x.to(device, half_dtype), weight.to(device, half_dtype)

    def multiply(rows: torch.Tensor, num_splits: int | None = None) -> torch.Tensor:
        out = torch.empty(len(rows), 40, dtype=torch.float32, device=device)
        return kernels.small_batch_linear(rows, weight, num_splits=num_splits, out=out)

    together = multiply(x)
    assert all(torch.equal(multiply(x[i : i + 1])[0], together[i]) for i in range(0, 32, 5))
    assert len({tuple(multiply(x, num_splits).flatten().tolist()) for num_splits in (1, 2, 3)}) == 3
