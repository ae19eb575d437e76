"""Weights in 12 bits: every bit comes back, and products and models give the bits that plain weights give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.host.errors import StartupError
from tandem_worker.model.backends import native
from tandem_worker.model.backends.contract import BackendName
from tandem_worker.model.checkpoint.split import HEAD
from tandem_worker.model.checkpoint.stored import PackedWeight
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.load import load_model
from tandem_worker.model.prepared.store import PreparedStore
from tandem_worker.model.prepared.weights import PreparedWeights, open_prepared_weights
from tandem_worker.model.weighing import count_matrices, count_weight_bytes, walk
from tandem_worker.parallel.context import ParallelContext

from tests.tandem_worker.model.backends.test_backends import CASES, CONFIGS, save_family, steps, three_sequences
from tests.tandem_worker.model.layers.ranks import run_ranks

if (obstacle := native.find_lossless_obstacle()) is not None:
    pytest.skip(obstacle, allow_module_level=True)

from tandem_worker.model.backends.native import library
from tandem_worker.model.backends.native.packing import LosslessPacker, lay_out

CPU = torch.device("cpu")
SHAPES = ((1, 2), (64, 2), (70, 6), (128, 130), (200, 258), (65, 64))


@pytest.fixture(autouse=True, scope="module")
def several_threads() -> None:
    native.use_threads(4)


def trained(rows: int, columns: int, *, seed: int, odd: float = 0.0, zeros: float = 0.0) -> torch.Tensor:
    """A matrix as training leaves it, with a share of any bit patterns and of exact zeros."""
    generator = np.random.default_rng(seed)
    values = torch.from_numpy(generator.normal(0, 0.02, (rows, columns))).bfloat16()
    patterns = torch.from_numpy(generator.integers(-(2**15), 2**15, (rows, columns), dtype=np.int16))
    values = torch.where(
        torch.from_numpy(generator.random((rows, columns)) < odd), patterns.view(torch.bfloat16), values
    )
    return values.masked_fill(torch.from_numpy(generator.random((rows, columns)) < zeros), 0.0)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])


def place(memory: torch.Tensor) -> tuple[int, bool]:
    """Address and form for a product."""
    is_split = library.is_split(memory)
    return memory.data_ptr() + (0 if is_split else HEAD), is_split


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**20), odd=st.sampled_from((0.0, 0.001, 0.03, 1.0)),
    zeros=st.sampled_from((0.0, 0.004, 1.0)),
)  # fmt: skip
def test_every_bit_comes_back(shape: tuple[int, int], seed: int, odd: float, zeros: float) -> None:
    values = trained(*shape, seed=seed, odd=odd, zeros=zeros)
    memory = LosslessPacker().lay_out(values)
    packed = lay_out(values)
    assert memory is not None
    assert packed is not None
    assert torch.equal(bits(library.unsplit(memory, *shape)), bits(packed))
    ids = torch.arange(shape[0]).flip(0)
    assert torch.equal(bits(library.split_rows(memory, *shape, ids)), bits(values[ids]))


def test_every_pattern_of_bfloat16_comes_back() -> None:
    values = trained(1024, 1024, seed=1)
    values.view(-1)[::16] = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    memory = LosslessPacker().lay_out(values)
    assert memory is not None
    assert torch.equal(bits(library.split_rows(memory, 1024, 1024, torch.arange(1024))), bits(values))


@pytest.mark.parametrize(("odd", "form"), [(0.0, True), (0.004, True), (1.0, False)])
def test_a_matrix_that_would_not_shrink_by_a_fifth_stays_plain(odd: float, form: bool) -> None:
    memory = LosslessPacker().lay_out(trained(640, 576, seed=2, odd=odd))
    assert memory is not None
    assert library.is_split(memory) is form
    assert memory.nbytes * 8 / (640 * 576) < (12.2 if form else 16.01)


def test_bits_a_weight_of_a_trained_matrix() -> None:
    memory = LosslessPacker().lay_out(trained(3072, 576, seed=3, zeros=0.003))
    assert memory is not None
    assert memory.nbytes * 8 / (3072 * 576) <= 12.15


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 40, 250])
@pytest.mark.parametrize("odd", [0.0, 0.003, 1.0])
def test_products_equal_those_of_plain_weights_in_every_bit(rows: int, odd: float) -> None:
    out_features, width = 256, 514
    # Of patterns that are no number sums are none either, of which any bits are as good as any others.
    values = trained(out_features, width, seed=rows, odd=odd).nan_to_num(0.25, 3.0, -3.0).clamp(-8, 8)
    plain, memory = lay_out(values), LosslessPacker().lay_out(values)
    assert plain is not None
    assert memory is not None
    address, is_split = place(memory)
    x, bias, residual = (trained(*shape, seed=9) for shape in ((rows, width), (1, out_features), (rows, out_features)))
    for options in ((None, None), (bias[0], residual)):
        expected = native.linear(plain.data_ptr(), out_features, x, *options)
        assert torch.equal(native.linear(address, out_features, x, *options, is_split=is_split), expected)
    wide = [
        native.linear(where, out_features, x, bias[0], dtype=torch.float32, is_split=form)
        for where, form in ((plain.data_ptr(), False), (address, is_split))
    ]
    assert torch.equal(*wide)
    expected = native.gate_up_silu(plain.data_ptr(), out_features // 2, x, bias[0])
    assert torch.equal(native.gate_up_silu(address, out_features // 2, x, bias[0], is_split=is_split), expected)


def load(path: Path, weights: Any, prepared: PreparedWeights | None = None, **options: Any) -> CausalLM:
    return load_model(
        path,
        device=CPU,
        dtype=torch.bfloat16,
        backend=BackendName.NATIVE,
        prepared=prepared,
        weights=weights,
        **options,
    )


def answers(model: CausalLM, paged_sequences: Any) -> Iterator[torch.Tensor]:
    run = three_sequences(model, paged_sequences)
    size = model.vocab_size
    for new in steps():
        yield run.step({row: [token % size for token in tokens] for row, tokens in new.items()})


@pytest.mark.parametrize("family", CASES)
def test_every_family_computes_the_same(
    family: str, save_random_model: Any, paged_sequences: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all its matrices, stacked experts and what was quantized among them. So does a start that finds what the first
    one prepared."""
    monkeypatch.setattr(library, "is_worth", lambda size, plain: True)  # some are small, and mostly padding
    save_family(family, save_random_model, tmp_path)
    store = PreparedStore(tmp_path / "prepared")
    expected = list(answers(load(tmp_path, "Plain"), paged_sequences))
    for again in (False, True):
        prepared = open_prepared_weights(store, "0" * 32, {}, ["lossless"])
        assert prepared.found is again
        model = load(tmp_path, "Lossless", prepared)
        assert prepared.is_whole is again
        assert count_matrices(model).keys() == {"lossless"}
        for one, other in zip(answers(model, paged_sequences), expected, strict=True):
            assert torch.equal(one, other)
        assert prepared.save()


@pytest.mark.parametrize("vocab_size", [256, 301])
@pytest.mark.parametrize("tied", [True, False])
def test_shares_of_tensor_ranks_compute_the_same(
    vocab_size: int, tied: bool, save_random_model: Any, paged_sequences: Any, tmp_path: Path
) -> None:
    """Their rows of the embedding table and of the output matrix are packed too, and the last rank may have fewer."""
    config = CONFIGS["llama"]()
    config.vocab_size, config.tie_word_embeddings = vocab_size, tied
    save_random_model(config)

    def logits(weights: str) -> list[list[torch.Tensor]]:
        def work(collective: Any) -> list[torch.Tensor]:
            context = ParallelContext(tp_rank=collective.rank, tp_size=2, tp=collective)
            model = load(tmp_path, weights, context=context)
            assert count_matrices(model).keys() == {weights.lower()}
            packed = [thing for thing in walk(model) if isinstance(thing, PackedWeight)]
            assert (len(packed) == 1) == (weights == "Lossless")
            return list(answers(model, paged_sequences))

        return run_ranks(2, work)

    for plain, lossless in zip(logits("Plain"), logits("Lossless"), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(plain, lossless, strict=True))


def test_the_demo_model_takes_two_thirds_of_the_memory_and_answers_the_same(paged_sequences: Any) -> None:
    from e2e.model import find_model

    plain, lossless = (load(find_model(), form) for form in ("Plain", "Lossless"))
    assert count_weight_bytes(lossless) < 0.66 * count_weight_bytes(plain)
    for one, other in zip(answers(lossless, paged_sequences), answers(plain, paged_sequences), strict=True):
        assert torch.equal(one, other)


def test_is_refused_in_words_where_it_cannot_be_had(save_random_model: Any, tmp_path: Path) -> None:
    save_family("llama", save_random_model, tmp_path)
    with pytest.raises(StartupError, match=r"12 bits.*those for CPUs.*Choose engine.weights: Auto or Plain"):
        load_model(tmp_path, device=CPU, backend=BackendName.TORCH, weights="Lossless")
