"""Both forms of a tensor: every bit comes back, and what says it is one and is not is refused."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.model.backends import native
from tandem_worker.model.checkpoint import exponents, split, split_kernels
from tandem_worker.model.checkpoint.exponents import CHUNK, ExponentsError, PackedNumbers, pack_numbers
from tandem_worker.model.checkpoint.split import SplitError, SplitMatrix
from tandem_worker.model.load import open_checkpoint

from e2e.model import find_model
from tests.tandem_worker.model.lossless.checkpoints import every_pattern, trained

Words = npt.NDArray[np.uint16]
needs_kernels = pytest.mark.skipif(
    native.find_lossless_obstacle() is not None, reason=f"no CPU kernels: {native.find_lossless_obstacle()}"
)


def words(tensor: torch.Tensor) -> Words:
    return tensor.view(torch.int16).numpy().view(np.uint16)


def memory_of(matrix: SplitMatrix) -> split.Bytes:
    memory = np.empty(matrix.nbytes, np.uint8)
    matrix.write(memory)
    return memory


def encode(values: Words) -> SplitMatrix:
    chosen, num_beside = split.choose_values(split.count_highs(values))
    matrix = split.encode(values, chosen)
    assert len(matrix.beside) == num_beside
    return matrix


matrices = st.builds(
    lambda rows, pairs, seed, odd, zeros: words(trained(rows, 2 * pairs, seed=seed, odd=odd, zeros=zeros)),
    st.integers(1, 200), st.integers(1, 140), st.integers(0, 2**16), st.sampled_from((0.0, 0.002, 0.05, 1.0)),
    st.sampled_from((0.0, 0.004, 1.0)),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(values=matrices)
def test_twelve_bits_give_every_bit_back(values: Words) -> None:
    matrix = SplitMatrix.parse(memory_of(encode(values)), *values.shape)
    assert np.array_equal(matrix.decode(), values)


@settings(max_examples=60, deadline=None)
@given(values=matrices, data=st.data())
def test_rows_and_columns_are_taken_without_decoding(values: Words, data: st.DataObject) -> None:
    matrix = encode(values)
    rows, columns = values.shape
    start = 64 * data.draw(st.integers(0, (rows - 1) // 64))
    stop = data.draw(st.sampled_from([rows, *range(start + 64, rows + 1, 64)]))
    low, high = sorted(data.draw(st.lists(st.integers(0, columns // 2), min_size=2, max_size=2, unique=True)))
    taken = matrix.take_rows(start, stop)
    assert taken is not None
    cut = taken.take_columns(2 * low, 2 * high)
    assert cut is not None
    cut = SplitMatrix.parse(memory_of(cut), stop - start, 2 * (high - low))
    assert np.array_equal(cut.decode(), values[start:stop, 2 * low : 2 * high])
    below = split.join([cut, cut])
    assert (below is None) == bool((stop - start) % 64)
    if below is not None:
        again = SplitMatrix.parse(memory_of(below), 2 * cut.rows, cut.columns).decode()
        assert np.array_equal(again, np.concatenate([cut.decode()] * 2))


def test_blocks_are_not_cut_and_neither_are_pairs() -> None:
    matrix = encode(words(trained(200, 66)))
    assert matrix.take_rows(3, 128) is None
    assert matrix.take_rows(0, 100) is None
    assert matrix.take_columns(1, 20) is None


@needs_kernels
@settings(max_examples=40, deadline=None)
@given(values=matrices)
def test_kernels_and_numpy_write_the_same_bytes(values: Words) -> None:
    from tandem_worker.model.backends.native import library
    from tandem_worker.model.backends.native.packing import lay_out

    packed = lay_out(torch.from_numpy(values.view(np.int16)).view(torch.bfloat16))
    assert packed is not None
    counts = library.count_highs(packed, *values.shape)
    assert np.array_equal(counts, split.count_highs(values))
    chosen, num_beside = split.choose_values(counts)
    rows, columns = values.shape
    memory = np.empty(split.SplitPlaces(rows, columns).size(num_beside), np.uint8)
    library.split_pack(packed, rows, columns, chosen, num_beside, memory.ctypes.data)
    assert np.array_equal(memory, memory_of(encode(values)))
    decoded = split_kernels.decode_rows(SplitMatrix.parse(memory, rows, columns), 0, rows)
    assert np.array_equal(decoded, values)


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=needs_kernels), False])
def test_strips_make_the_matrix_that_is_made_at_once(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(split_kernels, "_kernels", lambda: None)
    monkeypatch.setattr(split_kernels, "_AT_ONCE", 130 * 64)
    values = words(trained(318, 130, odd=0.002))
    plan = split_kernels.plan(np.concatenate([values] * 3))
    assert plan is not None
    made = b"".join(bytes(piece) for piece in split_kernels.encode(np.concatenate([values] * 3), *plan))
    assert made == memory_of(encode(np.concatenate([values] * 3))).tobytes()


def test_every_pattern_takes_few_bits() -> None:
    values = words(every_pattern())
    matrix = encode(values)
    assert np.array_equal(matrix.decode(), values)
    packed = np.frombuffer(b"".join(bytes(piece) for piece in pack_numbers(values.reshape(-1))), np.uint8)
    assert np.array_equal(PackedNumbers.parse(packed, values.size).read(0, values.size), values.reshape(-1))


def test_bits_a_weight_of_a_trained_matrix() -> None:
    values = words(trained(3072, 576))
    assert 8 * encode(values).nbytes / values.size <= 12.15
    assert 8 * sum(len(piece) for piece in pack_numbers(values.reshape(-1))) / values.size <= 10.75


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.3.mlp.down_proj.weight"])
def test_bits_a_weight_of_a_real_matrix(name: str) -> None:
    """Of a quantized model: its values are what quantization left, and some are exactly zero."""
    values = words(open_checkpoint(find_model())[1].read(name).bfloat16())
    plan = split_kernels.plan(values)
    assert plan is not None
    assert 8 * plan[1] / values.size <= 12.15
    assert 8 * sum(len(piece) for piece in pack_numbers(values.reshape(-1))) / values.size <= 10.75


@settings(max_examples=15, deadline=None)
@given(
    count=st.sampled_from((1, 2, 1023, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77)), seed=st.integers(0, 99),
    odd=st.sampled_from((0.0, 1.0)), threads=st.integers(1, 3),
)  # fmt: skip
def test_numbers_come_back_whole_and_in_parts(count: int, seed: int, odd: float, threads: int) -> None:
    values = words(trained(count, seed=seed, odd=odd))
    packed = b"".join(bytes(piece) for piece in pack_numbers(values, threads))
    assert packed == b"".join(bytes(piece) for piece in pack_numbers(values, 1))
    assert len(packed) % 64 == 0
    numbers = PackedNumbers.parse(np.frombuffer(packed, np.uint8), count)
    for start, stop in ((0, count), (count // 3, count), (0, max(1, count // 2)), (count - 1, count)):
        assert np.array_equal(numbers.read(start, stop, threads), values[start:stop])


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_lies_about_twelve_bits_are_seen_or_harmless(data: st.DataObject) -> None:
    """Nobody looks while decoding, so what passes must be decodable: kernels and numpy agree on it."""
    values = words(trained(130, 140, odd=0.01))
    memory = memory_of(encode(values))
    places = split.SplitPlaces(*values.shape)
    parts = [0, places.values, places.flags, places.first, places.beside, len(memory)]
    for _ in range(data.draw(st.integers(1, 3))):
        low, high = data.draw(st.sampled_from(list(zip(parts, [split.HEAD, *parts[2:]], strict=False))))
        memory[data.draw(st.integers(low, max(low, high - 1)))] ^= 1 << data.draw(st.integers(0, 7))
    memory = memory[: len(memory) - data.draw(st.sampled_from((0, 0, 0, 1, 4)))]
    try:
        matrix = SplitMatrix.parse(memory, *values.shape)
    except SplitError:
        return
    assert np.array_equal(split_kernels.decode_rows(matrix, 0, len(values)), matrix.decode())


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 2**31), bit=st.integers(0, 7), cut=st.sampled_from((0, 0, 1, 64)), tail=st.booleans())
def test_lies_about_numbers_are_seen_or_harmless(at: int, bit: int, cut: int, tail: bool) -> None:
    values = words(trained(5000))
    memory = np.frombuffer(b"".join(bytes(piece) for piece in pack_numbers(values)), np.uint8).copy()
    at = len(memory) - 1 - at % 100 if tail else 5000 + at % (len(memory) - 5000)
    memory[at] ^= 1 << bit
    try:
        found = PackedNumbers.parse(memory[: len(memory) - cut], 5000).read(0, 5000)
    except ExponentsError:
        return
    assert found.shape == values.shape


def test_a_frame_that_would_become_long_is_not_unpacked() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    with pytest.raises(ExponentsError, match="another length"):
        exponents._decompress(memoryview(bomb), 4096)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4096))
    with pytest.raises(ExponentsError):
        exponents._decompress(memoryview(unsized), 4096)
