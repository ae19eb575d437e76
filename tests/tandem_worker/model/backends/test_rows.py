"""A row's logits have the same bits however it is computed: decoded, in a chunk, after a resume, alone or in company.

The reference is one prompt of all tokens, whose every row is read. The gate goes around the places where sums are cut;
the sweeps over every length are `full`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tandem_worker.model.backends import native
from tandem_worker.model.backends.contract import BackendName
from tandem_worker.model.backends.native.layers import MAX_ROWS
from tandem_worker.model.backends.select import find_backend
from tandem_worker.model.contract import KVLayerSpec
from tandem_worker.model.layers.routers import ChosenSoftmaxRouter, SigmoidRouter, SoftmaxRouter
from tandem_worker.model.load import load_model
from transformers import GptOssConfig, Llama4TextConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

pytestmark = pytest.mark.skipif(native.find_obstacle() is not None, reason=str(native.find_obstacle()))

LENGTH = 4000
BLOCK_SIZE = 64
EDGES = sorted({at + step for at in (8, 64, 128, 512, 1024, 2048, 3072) for step in (-1, 0, 1, 2)} | {1, LENGTH})
"""Lengths around the ends of blocks, of tiles and of segments."""


def edges_of(family: str) -> list[int]:
    """All of them for a family of each kind of attention; the others share them out."""
    others = [each for each in CONFIGS if each not in ("llama", "gpt_oss")]
    return EDGES[others.index(family) :: len(others)] if family in others else EDGES


COMMON = {
    "vocab_size": 41,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
}
MIXTURE = {"num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "qwen3": lambda: Qwen3Config(**COMMON, use_sliding_window=True, sliding_window=700, max_window_layers=1),
    "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "gpt_oss": lambda: GptOssConfig(**COMMON, **MIXTURE, num_local_experts=4, sliding_window=700),
    "llama4": lambda: Llama4TextConfig(
        **COMMON, **MIXTURE, intermediate_size_mlp=64, num_local_experts=4, attention_chunk_size=600,
        no_rope_layers=[1, 0], interleave_moe_layer_step=1, floor_scale=6,
    ),
}  # fmt: skip
TOKENS = torch.randint(3, 41, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
OTHERS = (1, 5, 90, 511, 70, 40, 300)
"""Contexts of the seven beside."""


class Rows:
    """One model and the reference's logits `[LENGTH, vocab]`."""

    def __init__(self, folder: Path, paged_sequences: Any) -> None:
        model = load_model(folder, device=torch.device("cpu"), dtype=torch.bfloat16, backend=BackendName.NATIVE)
        self.model: Any = model
        self._sequences: Callable[[], Any] = lambda: paged_sequences(model, block_size=BLOCK_SIZE)
        self.whole = self._sequences()
        self.reference = self.feed(self.whole, self.whole.add(), TOKENS)

    def feed(
        self, run: Any, sequence: int, tokens: list[int], beside: Iterable[int] = (), width: int = 1
    ) -> torch.Tensor:
        """Logits of every one of `tokens` `[len(tokens), vocab]`, which come after the sequence's; others `width`."""
        first = len(run.tokens[sequence])
        batch = run.batch({**{other: [7] * width for other in beside}, sequence: tokens})
        batch = replace(batch, logits_rows=torch.arange(len(batch.token_ids))[-len(tokens) :])
        with torch.inference_mode():
            logits = self.model.forward(batch, run.cache)
        assert len(run.tokens[sequence]) == first + len(tokens)
        return logits

    def differing(
        self, run: Any, sequence: int, pieces: Iterable[int], beside: Iterable[int] = (), width: int = 1
    ) -> list[int]:
        """Lengths at which a sequence that goes on in `pieces` tokens has other bits than the reference."""
        found = []
        for piece in pieces:
            first = len(run.tokens[sequence])
            tokens = TOKENS[first : first + piece]
            logits = self.feed(run, sequence, tokens, beside, width)
            same = (logits == self.reference[first : first + piece]).all(1)
            found += [first + int(row) + 1 for row in (~same).nonzero()[:, 0]]
        return found

    def resume(self, length: int) -> int:
        """A sequence that has the reference's blocks up to `length`, a multiple of their size."""
        return self.whole.add(TOKENS[:length], self.whole.blocks[0][: length // BLOCK_SIZE])

    def forget(self, sequence: int, length: int) -> None:
        """Give back what a sequence that resumed at `length` has of its own."""
        self.whole._free += self.whole.blocks[sequence][length // BLOCK_SIZE :]

    def fresh(self) -> tuple[Any, int]:
        run = self._sequences()
        return run, run.add()

    def company(self, run: Any) -> list[int]:
        """Seven further sequences in `run`."""
        sequences = [run.add() for _ in OTHERS]
        for sequence, length in zip(sequences, OTHERS, strict=True):
            run.step({sequence: TOKENS[:length]})
        return sequences


@pytest.fixture
def rows(family: str, save_random_model: Any, paged_sequences: Any, tmp_path: Path) -> Rows:
    save_random_model(CONFIGS[family]())
    return Rows(tmp_path, paged_sequences)


@pytest.mark.parametrize("family", CONFIGS)
def test_rows_have_the_same_bits_however_they_come(rows: Rows, family: str) -> None:
    """In chunks of any size, token by token after a resume, and beside seven others."""
    for pieces in ([1] * 70 + [2, 3, 500, 37, 600, 1, 1100], [509] * 7, [1024, 1024, 1024]):
        run, sequence = rows.fresh()
        assert rows.differing(run, sequence, pieces) == [], "in chunks"
    beside = rows.company(rows.whole)
    for length in edges_of(family):
        start = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        for company in ((), beside):
            sequence = rows.resume(start)
            gap = [length - 1 - start] if length - 1 > start else []
            assert rows.differing(rows.whole, sequence, [*gap, 1], company) == [], f"{length} beside {company}"
            rows.forget(sequence, start)


def check_rows_that_are_checked(rows: Rows, lengths: Iterable[int], families: str) -> None:
    """A newest token with guesses behind it, alone and beside others that have as many."""
    run = rows.whole
    for number, length in enumerate(lengths):
        width = 2 + number % 8
        start = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        for beside in ((), rows.company(run)):
            sequence = rows.resume(start)
            gap = [length - 1 - start] if length - 1 > start else []
            pieces = [*gap, min(width, LENGTH - length + 1)]
            assert rows.differing(run, sequence, pieces, beside, width) == [], f"{families} {length} {width} {beside}"
            rows.forget(sequence, start)
            for other in beside:
                run._free += run.blocks[other]


@pytest.mark.parametrize("family", CONFIGS)
def test_rows_that_are_checked_have_the_bits_of_decoded_ones(rows: Rows, family: str) -> None:
    check_rows_that_are_checked(rows, edges_of(family), family)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", CONFIGS)
def test_rows_that_are_checked_at_every_length(rows: Rows, family: str) -> None:
    check_rows_that_are_checked(rows, range(1, LENGTH, 3), family)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        ("llama", (700, 1027, 1300, 2051)),
        *(pytest.param(family, range(3, LENGTH, 4), marks=pytest.mark.full) for family in ("llama", "gpt_oss")),
    ],
)
def test_streams_that_move_go_on_with_the_same_bits(rows: Rows, lengths: Iterable[int]) -> None:
    """The worker that takes over computes all tokens so far as one prompt, then decodes."""
    different = []
    for length in lengths:
        run, sequence = rows.fresh()
        if rows.differing(run, sequence, [length, *[1] * min(3, LENGTH - length)]):
            different.append(length)
    assert different == []


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", CONFIGS)
def test_every_length_alone_and_beside_seven(rows: Rows) -> None:
    for accompanied in (False, True):
        run, sequence = rows.fresh()
        for start in range(0, LENGTH, 64):
            beside = rows.company(run) if accompanied else []
            assert rows.differing(run, sequence, [1] * min(64, LENGTH - start), beside) == []
            for other in beside:
                run._free += run.blocks[other]


@pytest.mark.parametrize(("hidden", "experts"), [(7168, 256), (48, 16)])
@pytest.mark.parametrize("kind", ["softmax", "chosen softmax", "sigmoid"])
def test_a_row_goes_to_the_same_experts_with_the_same_weights(kind: str, hidden: int, experts: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    weight, bias = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((experts, hidden), (experts,)))
    router = {
        "softmax": lambda: SoftmaxRouter(weight, 2, normalize=True),
        "chosen softmax": lambda: ChosenSoftmaxRouter(weight, bias, 2),
        "sigmoid": lambda: SigmoidRouter(weight, 1),
    }[kind]()
    route = find_backend(BackendName.NATIVE).route(router)
    x = torch.randn(100, hidden, generator=generator).bfloat16()
    together = route(x, None)
    for count in (1, 3):
        for first in range(0, 99, count):
            some = route(x[first : first + count], None)
            assert torch.equal(some.experts, together.experts[first : first + count])
            assert torch.equal(some.weights, together.weights[first : first + count])
    expected = router(x, None)
    assert (together.experts == expected.experts).float().mean() > 0.9


def test_models_say_whether_their_rows_are_exact(save_random_model: Any, tmp_path: Path) -> None:
    save_random_model(CONFIGS["llama"]())
    for backend, dtype, exact in (
        (BackendName.NATIVE, torch.bfloat16, sys.maxsize == MAX_ROWS),
        (BackendName.TORCH, torch.float32, False),
    ):
        model = load_model(tmp_path, device=torch.device("cpu"), dtype=dtype, backend=backend)
        assert (model.inexact is None) is exact
    heads = KVLayerSpec(block_shape=(2, 2, 16, 16), head_dim_index=1)
    for layer in (
        KVLayerSpec(block_shape=(16, 96), head_dim_index=None),
        KVLayerSpec(block_shape=(2, 2, 16, 24), head_dim_index=1),
    ):
        assert find_backend(BackendName.NATIVE).find_inexact([heads, layer]), "torch computes such a layer"
