"""Every bench case is compared with float64 or its twin; on a CPU the operations are twins in bfloat16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tandem_worker import kernels
from tandem_worker.kernels.quantized import SplitByteWeight
from tandem_worker.kernels.split_byte import HEAD, num_blocks

from bench.kernels.case import TINY, Case, Place
from bench.kernels.cases import THEMES
from bench.kernels.check import check, compare, same_bits
from bench.kernels.weight_cases import random_weight

PLACE = Place(device=torch.device("cpu"), sizes=TINY)
CASES = {case.name: case for build in THEMES.values() for case in build(PLACE)}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(7)


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_right(name: str) -> None:
    found = check(CASES[name])
    assert found.passed, found


def spoiled(case: Case, spoil: object) -> Case:
    """The case whose first output is spoiled before it is compared."""

    def outputs(result: object, *inputs: object) -> tuple[torch.Tensor, ...]:
        first, *rest = case.outputs(result, *inputs)
        first = first.clone()
        spoil(first)  # type: ignore[operator]
        return first, *rest

    return replace(case, outputs=outputs)


@pytest.mark.parametrize("name", CASES)
def test_a_row_that_is_wrong_is_found_in_every_case(name: str) -> None:
    def spoil(tensor: torch.Tensor) -> None:
        row = tensor.view(-1, tensor.shape[-1])[-1] if tensor.dim() > 1 else tensor
        row.copy_(row.roll(1, 0) + 1)

    found = check(spoiled(CASES[name], spoil))
    assert not found.passed
    assert found.repeats
    assert found.evidence or CASES[name].error is not None


def test_one_wrong_row_of_many_is_found() -> None:
    expected = torch.randn(10_000, 64, dtype=torch.float64)
    actual = expected.clone()
    actual[77] = -actual[77]
    whole, worst = compare(actual, expected)
    assert whole < 0.03
    assert worst > 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_value_that_is_not_finite_passes(value: float) -> None:
    expected = torch.ones(3, 4)
    actual = expected.clone()
    actual[1, 2] = value
    assert compare(actual, expected)[0] == float("inf")
    assert compare(expected, actual)[0] == float("inf")


def test_infinities_in_the_same_places_are_right() -> None:
    expected = torch.ones(3, 4)
    expected[0] = -torch.inf
    assert compare(expected, expected.clone()) == (0.0, 0.0)


def test_a_result_that_changes_from_run_to_run_is_found() -> None:
    runs: list[int] = []

    def wobble(tensor: torch.Tensor) -> None:
        runs.append(0)
        tensor.view(-1)[3] *= 1.0 + 2**-7 * (len(runs) % 2)

    name = next(name for name in CASES if name.startswith("rms_norm"))
    found = check(spoiled(CASES[name], wobble))
    assert not found.repeats
    assert not found.passed
    assert found.evidence["the second run differs"]["count"] == 1
    assert found.evidence["the second run differs"]["first"][0]["at"] == [0, 3]


def test_bits_are_compared_and_not_values() -> None:
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_an_element_that_nobody_writes_is_found() -> None:
    name = next(name for name in CASES if name.startswith("rms_norm"))
    case = replace(CASES[name], run=lambda x, w: torch.empty_like(x).copy_(x) if x is None else torch.empty(x.shape))
    assert not check(case).passed


@pytest.mark.parametrize("shape", [(128, 256), (4, 128, 64), (300, 192), (70, 12288)])
def test_weights_of_12_bits_are_what_packing_makes_of_their_values(shape: tuple[int, ...]) -> None:
    """Products rely on what stands in an escape's place, which no twin reads."""
    weight = random_weight(PLACE, "lossless", *shape)
    assert isinstance(weight, SplitByteWeight)
    packed = SplitByteWeight.pack(weight.dequantize(torch.bfloat16))
    assert packed is not None
    for part in ("low", "codes", "beside"):
        assert torch.equal(getattr(weight, part), getattr(packed, part)), part


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("small_batch_linear lossless")])
def test_escapes_that_are_lost_are_found(name: str) -> None:
    def lose(x: torch.Tensor, weight: SplitByteWeight) -> torch.Tensor:
        begins = slice(2, num_blocks(weight.shape[0]) + HEAD)
        beside = weight.beside.clone()
        beside[begins] = beside[begins].max()
        return kernels.small_batch_linear(x, replace(weight, beside=beside))

    assert check(replace(CASES[name], run=lose)).excess > 2


def test_the_cache_of_the_cases_is_the_engines() -> None:
    """`[N, 2, Hk, S, D]`, contiguous: keys of one head of a block lie together."""
    for case in CASES.values():
        if case.name.startswith(("paged_", "kv_write")):
            caches = [value for value in case.make() if isinstance(value, torch.Tensor) and value.dim() == 5]
            assert len(caches) == 1
            assert caches[0].is_contiguous()
            assert caches[0].shape[1] == 2
            assert caches[0].shape[3] == TINY.block_size
