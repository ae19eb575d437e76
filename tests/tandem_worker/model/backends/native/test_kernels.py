"""The CPU kernels against float64."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.host import philox
from tandem_worker.host.philox import DrawKey
from tandem_worker.model.backends import native
from tandem_worker.model.backends.native.library import draw_words
from tandem_worker.model.backends.native.packing import lay_out
from tandem_worker.model.backends.visibility import visible_mask
from torch.nn import functional

from tests.tandem_worker.model.backends.onednn import lays_out_the_same, may_choose

BFLOAT16 = 2.0**-8
"""Relative error of one rounding."""

needs_kernels = pytest.mark.skipif(native.find_obstacle() is not None, reason=str(native.find_obstacle()))


def test_kernels_serve_where_the_cpu_can() -> None:
    """A gate on such a machine must not skip what follows."""
    if torch.cpu.get_capabilities().get("avx512_bf16"):
        assert native.find_obstacle() is None
        assert not may_choose or lays_out_the_same()


@pytest.fixture(autouse=True, scope="module")
def several_threads() -> None:
    """More than a machine may have cores: items are then taken in every order."""
    if native.find_obstacle() is None:
        native.use_threads(4)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Greatest error beside the greatest value."""
    return float((actual.double() - expected).abs().max() / expected.abs().max())


def reorder(weight: torch.Tensor, rows: int = 64) -> torch.Tensor:
    """oneDNN's layout for so many rows. It has one of bfloat16 only where it may use AVX-512, whatever the CPU can."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN may not use AVX-512 and has no layout of bfloat16")
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    packed = lay_out(weight)
    assert packed is not None
    return packed, packed.data_ptr()


@needs_kernels
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 64])
@pytest.mark.parametrize(("columns", "inner"), [(960, 576), (576, 1536), (64, 32), (100, 64), (49, 96)])
def test_linear(columns: int, inner: int, rows: int) -> None:
    weight, x = random(columns, inner), random(rows, inner)
    bias, residual = random(columns, seed=1), random(rows, columns, seed=2)
    _packed, address = pack(weight)
    product = x.double() @ weight.double().T
    assert error(native.linear(address, columns, x, None), product) < BFLOAT16
    whole = product + bias.double() + residual.double()
    assert error(native.linear(address, columns, x, bias, residual), whole) < BFLOAT16
    strided = random(rows, inner + 8)[:, :inner].copy_(x)
    assert torch.equal(native.linear(address, columns, strided, None), native.linear(address, columns, x, None))


@needs_kernels
@pytest.mark.parametrize("rows", [1, 6, 7, 64])
@pytest.mark.parametrize(("columns", "inner"), [(960, 576), (100, 64), (49, 96)])
def test_linear_in_float32(columns: int, inner: int, rows: int) -> None:
    weight, x, bias = random(columns, inner), random(rows, inner), random(columns, seed=1)
    _packed, address = pack(weight)
    product = x.double() @ weight.double().T
    y = native.linear(address, columns, x, None, dtype=torch.float32)
    assert error(y, product) < 1e-5
    assert torch.equal(y.bfloat16(), native.linear(address, columns, x, None))
    assert error(native.linear(address, columns, x, bias, dtype=torch.float32), product + bias.double()) < 1e-5


@needs_kernels
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    weight, x = random(128, 64), random(17, 64)
    _packed, address = pack(weight)
    together = native.linear(address, 128, x, None)
    assert all(torch.equal(native.linear(address, 128, x[i : i + 1], None)[0], together[i]) for i in range(17))


@needs_kernels
def test_threads_that_call_at_once_do_not_meet() -> None:
    weight, x = random(6400, 64), random(3, 64)
    _packed, address = pack(weight)
    expected = native.linear(address, 6400, x, None)

    def call(_: int) -> bool:
        return torch.equal(native.linear(address, 6400, x, None), expected)

    with ThreadPoolExecutor(3) as callers:
        assert all(callers.map(call, range(3000)))


@needs_kernels
@pytest.mark.parametrize("rows", [1, 6, 7, 20])
def test_gate_up_silu(rows: int) -> None:
    weight, x, bias = random(384, 96) * 0.3, random(rows, 96), random(384)
    _packed, address = pack(weight)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, -1)
    assert error(native.gate_up_silu(address, 192, x, bias), functional.silu(gate) * up) < BFLOAT16


@needs_kernels
def test_a_layout_of_another_kind_is_refused() -> None:
    weight = random(96, 64)
    plain = reorder(weight, 1)  # for one row oneDNN keeps the plain layout
    assert native.packed_address(plain, weight) is None
    odd = random(96, 70)
    assert native.packed_address(reorder(odd), odd) is None
    assert native.packed_address(reorder(weight.float()), weight.float()) is None


@needs_kernels
@pytest.mark.parametrize("width", [16, 31, 577])
@pytest.mark.parametrize("rows", [1, 90])
def test_rms_norm_and_silu_mul(rows: int, width: int) -> None:
    x, weight = random(rows, width + 3)[:, :width], random(width)
    expected = functional.rms_norm(x.double(), (width,), None, 1e-5)
    assert error(native.rms_norm(x, None, 1e-5), expected) < BFLOAT16
    assert error(native.rms_norm(x, weight, 1e-5), expected * weight.double()) < BFLOAT16
    both = random(rows, 2 * width) * 4
    gate, up = both.double().chunk(2, -1)
    assert error(native.silu_mul(both), functional.silu(gate) * up) < BFLOAT16


@needs_kernels
def test_activations_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 1e30, float("nan"), float("inf")]).bfloat16()
    both = torch.cat((gate, torch.ones_like(gate)))[None]
    expected = functional.silu(gate.double())
    torch.testing.assert_close(native.silu_mul(both)[0].double(), expected, rtol=1e-2, atol=1e-30, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 16), (40, 128)])
def test_place_heads(rows: int, width: int, normed: bool) -> None:
    num_heads, num_kv_heads, block_size = 6, 2, 4
    heads = random(rows, num_heads + 2 * num_kv_heads, width)
    angles = torch.rand(rows, width // 2) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    layer = random(30, 2, num_kv_heads, block_size, width)
    slots = torch.randperm(30 * block_size)[:rows]
    norms = (random(width, seed=1), random(width, seed=2), 1e-6) if normed else None

    placed = heads[:, : num_heads + num_kv_heads].double()
    if norms is not None:
        placed = functional.rms_norm(placed, (width,), None, 1e-6)
        placed = placed * torch.cat((norms[0].expand(num_heads, -1), norms[1].expand(num_kv_heads, -1))).double()
    first, second = placed.chunk(2, -1)
    c, s = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    turned = torch.cat((first * c - second * s, second * c + first * s), -1)
    values = heads[:, num_heads + num_kv_heads :].clone()

    before = layer.clone()
    native.place_heads(heads, num_heads, norms, cos, sin, slots, layer)
    assert error(heads[:, : num_heads + num_kv_heads], turned) < 2 * BFLOAT16  # a norm is rounded before it is turned
    for row, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        assert torch.equal(layer[block, 0, :, offset], heads[row, num_heads : num_heads + num_kv_heads])
        assert torch.equal(layer[block, 1, :, offset], values[row])
        before[block, :, :, offset] = layer[block, :, :, offset]
    assert torch.equal(layer, before)


@dataclass(frozen=True)
class Case:
    """Sequences as new tokens and whole context, and a layer's kind."""

    sequences: Sequence[tuple[int, int]]
    num_kv_heads: int = 2
    group: int = 3
    width: int = 64
    block_size: int = 16
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False


def check_attention(case: Case) -> None:
    generator = torch.Generator().manual_seed(len(case.sequences) + case.sequences[0][1])
    size, num_heads = case.block_size, case.num_kv_heads * case.group
    lengths = [context for _, context in case.sequences]
    per_sequence = max(-(-length // size) for length in lengths)
    num_blocks = len(lengths) * per_sequence + 1
    layer = torch.randn(num_blocks, 2, case.num_kv_heads, size, case.width, generator=generator).bfloat16()
    tables = (torch.randperm(num_blocks - 1, generator=generator) + 1).view(len(lengths), per_sequence).int()
    contexts = []
    for table, length in zip(tables, lengths, strict=True):
        flat = layer[table.long()].permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, Hk, keys, D]
        contexts.append(flat[:, :, :length].double())
        for place in range(length, per_sequence * size):  # what nobody wrote may be anything
            layer[table[place // size], :, :, place % size] = float("nan")
    queries = [new for new, _ in case.sequences]
    qkv = torch.randn(sum(queries), num_heads + 3, case.width, generator=generator).bfloat16()
    q = qkv[:, :num_heads]
    scale = case.width**-0.5
    sinks = torch.randn(num_heads, generator=generator) if case.sinks else None
    start = torch.tensor([0, *queries]).cumsum(0).int()
    step = native.AttentionStep(
        tables,
        start,
        torch.tensor(lengths, dtype=torch.int32),
        num_heads=num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.width,
        block_size=size,
        scale=scale,
        window=case.window,
        chunk=case.chunk,
    )
    actual = step.attend(q, layer, sinks)
    for index, (new, length) in enumerate(case.sequences):
        rows = slice(int(start[index]), int(start[index + 1]))
        keys, values = contexts[index].repeat_interleave(case.group, dim=1)
        mask = visible_mask(
            torch.arange(length - new, length), torch.arange(length), case.window, case.chunk, torch.float64
        )
        scores = torch.einsum("thd,hkd->htk", q[rows].double(), keys) * scale + mask
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, new, 1)), -1)
        shares = scores.softmax(-1)[..., :length]
        expected = torch.einsum("htk,hkd->thd", shares, values).flatten(1)
        assert error(actual[rows], expected) < 2 * BFLOAT16, f"sequence {index}"


@needs_kernels
@pytest.mark.parametrize(
    "case",
    [
        Case([(1, 1)]),
        Case([(1, 128), (1, 129), (1, 5)]),
        Case([(1, 1024), (1, 1025), (1, 2500), (1, 3)]),  # a lone query's keys are split
        Case([(300, 300), (1, 40), (129, 700)]),
        Case([(1, 2500), (90, 200)], window=70),
        Case([(1, 2500), (90, 200)], window=1500, sinks=True),
        Case([(1, 2500), (90, 200)], chunk=64),
        Case([(1, 2500), (90, 200)], chunk=1200, sinks=True),
        Case([(1, 1500), (70, 130)], num_kv_heads=1, group=128, width=16),  # one query has more heads than a tile
        Case([(1, 200), (20, 30)], num_kv_heads=9, group=1),
    ],
    ids=str,
)
def test_attention(case: Case) -> None:
    check_attention(case)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sequences = []
    for _ in range(draw(st.integers(1, 4))):
        new = draw(st.one_of(st.just(1), st.integers(1, 60)))
        sequences.append((new, new + draw(st.integers(0, 300))))
    return Case(
        sequences,
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 8)),
        width=draw(st.sampled_from([16, 32, 48, 64, 80, 128, 256])),
        block_size=draw(st.sampled_from([1, 8, 16, 32])),
        window=draw(st.none() | st.integers(1, 200)),
        chunk=draw(st.none() | st.integers(1, 200)),
        sinks=draw(st.booleans()),
    )


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(cases())
def test_attention_of_any_mix(case: Case) -> None:
    check_attention(case)


@needs_kernels
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 2**32),
    position=st.integers(0, 2**31),
    count=st.integers(1, 300),
    tokens=st.lists(st.integers(0, 2**31), min_size=1, max_size=40),
)
def test_noise_of_draws_is_philoxs(seed: int, choice: int, position: int, count: int, tokens: list[int]) -> None:
    key, some = DrawKey(seed, choice, position), np.array(tokens)
    assert (draw_words(key, count) == philox.draw_words(key, count)).all()
    assert (draw_words(key, some) == philox.draw_words(key, some)).all()
