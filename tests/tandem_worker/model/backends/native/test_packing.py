"""One pass from stored rows to packed ones, against the reference in numpy: every bit is the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.model.backends import native
from tandem_worker.model.checkpoint.stored import Slice, Stored, StoredPart

if (obstacle := native.find_obstacle()) is not None:
    pytest.skip(obstacle, allow_module_level=True)

from tandem_worker.model.backends.native.packing import NativePacker, block_of, lay_out, packed_elements

from tests.tandem_worker.model.backends.onednn import needs_onednn

_NAMES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
KINDS = [GGMLQuantizationType[name] for name in _NAMES]
PLAIN = KINDS[:3]


@pytest.fixture(autouse=True, scope="module")
def several_threads() -> None:
    native.use_threads(4)


class Matrix:
    """Random bits as a stored matrix, and what today's dequantization makes of them."""

    def __init__(self, kind: GGMLQuantizationType, rows: int, columns: int, seed: int = 0, heads: int = 0) -> None:
        elements, size = GGML_QUANT_SIZES[kind]
        self.columns = columns
        data = np.random.default_rng(seed).integers(0, 256, (rows, columns // elements * size), dtype=np.uint8)
        self._data = np.ascontiguousarray(data)
        self.stored = Stored(
            address=self._data.ctypes.data, kind=kind.value, rows=rows, columns=columns, num_bytes=data.nbytes,
            half=rows // heads // 2 if heads else 0, owner=self._data,
        )  # fmt: skip
        with np.errstate(all="ignore"):
            wide = dequantize(data, kind).reshape(rows, columns)
            self.values = torch.from_numpy(np.ascontiguousarray(wide)).bfloat16()
        if kind == GGMLQuantizationType.BF16:  # copied, what is no number too
            self.values = torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
        if heads:
            pairs = self.values.view(heads, rows // heads // 2, 2, columns)
            self.values = pairs.transpose(1, 2).reshape(rows, columns)

    def part(self, piece: Slice | None = None) -> tuple[StoredPart, torch.Tensor]:
        values = self.values
        return StoredPart(self.stored, piece), (
            values if piece is None else values.narrow(piece.dim, piece.start, piece.stop - piece.start)
        )


def packed(values: torch.Tensor) -> torch.Tensor:
    """The layout of linear.cpp by its definition."""
    rows, columns = values.shape
    padded = values.new_zeros(-(-rows // 64) * 64, columns)
    padded[:rows] = values
    return padded.view(-1, 64, columns // 2, 2).transpose(1, 2).flatten()


def assert_same_bits(actual: torch.Tensor | None, expected: torch.Tensor) -> None:
    """Any bits that are not a number are as good as any other."""
    assert actual is not None
    assert actual.shape == expected.shape
    differ = actual.view(torch.int16) != expected.view(torch.int16)
    assert not bool((differ & ~(actual.isnan() & expected.isnan())).any())


def check(parts: Sequence[tuple[StoredPart, torch.Tensor]]) -> None:
    packer, stored = NativePacker(), [part for part, _ in parts]
    expected = torch.cat([values for _, values in parts])
    assert_same_bits(packer.widen(stored), expected)
    if expected.shape[1] % 2:
        assert packer.pack(stored) is None
    else:
        assert_same_bits(packer.pack(stored), packed(expected))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 63, 64, 200])
def test_every_type_and_height(kind: GGMLQuantizationType, rows: int) -> None:
    for columns in (256, 768):
        check([Matrix(kind, rows, columns, seed=rows).part()])


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.name)
@pytest.mark.parametrize("columns", [1, 2, 31, 50, 255, 258, 577, 600])
def test_odd_widths(kind: GGMLQuantizationType, columns: int) -> None:
    check([Matrix(kind, 70, columns).part()])


@pytest.mark.parametrize("kind", KINDS[3:8], ids=lambda kind: kind.name)
@pytest.mark.parametrize("columns", [32, 96, 576, 1536])
def test_widths_of_small_blocks(kind: GGMLQuantizationType, columns: int) -> None:
    check([Matrix(kind, 100, columns).part()])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_interleaved_heads(kind: GGMLQuantizationType) -> None:
    matrix = Matrix(kind, 96, 256, heads=3)
    check([matrix.part(), Matrix(kind, 64, 256, 1, heads=2).part(), Matrix(kind, 64, 256, 2).part()])
    check([matrix.part(Slice(0, 32, 64))])


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_fused_and_cut_in_any_way(data: st.DataObject) -> None:
    columns, width = 512, data.draw(st.integers(1, 512))
    parts = []
    for seed in range(data.draw(st.integers(1, 3))):
        kind, rows = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(1, 150))
        matrix = Matrix(kind, rows, columns, seed)
        if width < columns:
            start = data.draw(st.integers(0, columns - width))
            parts.append(matrix.part(Slice(1, start, start + width)))
        else:
            start = data.draw(st.integers(0, rows - 1))
            parts.append(matrix.part(Slice(0, start, data.draw(st.integers(start + 1, rows)))))
    check(parts)


@pytest.mark.parametrize("bits", [0x00000001, 0x00008000, 0x00018000, 0x007FFFFF, 0x80000001, 0x7F7FFFFF, 0x7F800000])
def test_edges_of_rounding(bits: int) -> None:
    """Subnormal numbers are kept, ties go to even, what is too large becomes infinite: as torch rounds."""
    values = torch.full((3, 40), bits - (bits >> 31 << 32), dtype=torch.int32)
    stored = Stored(address=values.data_ptr(), kind=0, rows=3, columns=40, num_bytes=480, owner=values)
    assert_same_bits(NativePacker().widen([StoredPart(stored)]), values.view(torch.float32).bfloat16())


def test_a_matrix_in_memory() -> None:
    for rows, columns in [(1, 2), (100, 64), (130, 770)]:
        weight = torch.randn(rows, columns).bfloat16()
        assert_same_bits(lay_out(weight), packed(weight))
        assert_same_bits(lay_out(weight.t().contiguous().t()), packed(weight))
        assert packed_elements(rows, columns) == packed(weight).numel()
    assert lay_out(torch.zeros(4, 3, dtype=torch.bfloat16)) is None
    assert lay_out(torch.zeros(4, 4)) is None
    assert lay_out(torch.zeros(0, 4, dtype=torch.bfloat16)) is None


@needs_onednn
def test_onednn_lays_out_the_same() -> None:
    """So a weight that is packed here and one that is packed there give the same sums."""
    weight = torch.randn(200, 96).bfloat16()
    theirs = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    x, own = torch.randn(7, 96).bfloat16(), lay_out(weight)
    address = native.packed_address(theirs, weight)
    assert own is not None
    assert address is not None
    assert torch.equal(native.linear(own.data_ptr(), 200, x, None), native.linear(address, 200, x, None))


def test_types_and_sizes_that_do_not_fit_are_left_to_others() -> None:
    matrix = Matrix(GGMLQuantizationType.Q8_0, 4, 64).stored
    fields = {name: getattr(matrix, name) for name in matrix.__slots__}
    packer = NativePacker()
    assert packer.pack([StoredPart(Stored(**fields))]) is not None
    for change in ({"kind": 10}, {"kind": 99}, {"num_bytes": 4}, {"columns": 60}, {"rows": 5}, {"half": 3}):
        stored = [StoredPart(Stored(**fields | change))]
        assert packer.pack(stored) is None, change
        assert packer.widen(stored) is None, change


def test_blocks_are_as_the_package_says() -> None:
    for kind in GGMLQuantizationType:
        assert block_of(kind.value) == (GGML_QUANT_SIZES[kind] if kind in KINDS else None)
