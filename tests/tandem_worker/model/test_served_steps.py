"""A step gives the same logits and an answer the same tokens, eager, recorded and ahead of its tokens.

On a GPU the recordings are CUDA graphs of real steps; on a CPU the functions are called again, and kernels are twins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tandem_worker.model.backends.contract import BackendName
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.load import load_model

from bench.gpu.random_model import SMALL, build_random_model, count_step_weights
from bench.gpu.steps import Repeater, answer, compare_recorded, find_divergences, random_prompts
from tests.tandem_worker.model.backends.test_backends import CASES, DEVICES, save_family

EXPERTS = ("moe", "deepseek", "kimi", "llama4", "gpt_oss")
"""Families that choose experts: in bfloat16 a rounding may choose another one."""
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 1.2e-2}
CONTEXTS = [[1], [37, 5, 16], [60, 1, 33, 17, 2, 48], [9] * 8]


def exact_type(family: str) -> torch.dtype:
    return torch.float32 if any(name in family for name in EXPERTS) else torch.bfloat16


def load(family: str, device: str, dtype: torch.dtype, save_random_model: Any, folder: Path) -> CausalLM:
    save_family(family, save_random_model, folder)
    return load_model(folder, device=torch.device(device), dtype=dtype, backend=BackendName.TRITON)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", CASES)
def test_a_recorded_step_gives_an_eager_ones_logits(
    family: str, device: str, save_random_model: Any, tmp_path: Path
) -> None:
    dtype = exact_type(family)
    model = load(family, device, dtype, save_random_model, tmp_path)
    for found in compare_recorded(model, CONTEXTS, max_context=64):
        assert found.error < LIMITS[dtype], found
        assert found.repeats
        assert found.flips == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", CASES)
def test_a_recorded_step_with_guesses_gives_an_eager_ones_logits(
    family: str, device: str, save_random_model: Any, tmp_path: Path
) -> None:
    """The rows of one recording belong to one sequence, to several, to each its own, and to padding."""
    dtype = exact_type(family)
    model = load(family, device, dtype, save_random_model, tmp_path)
    widths = [[8], [3, 1, 4], [1] * 8, [5], [2, 1], [1], [3, 3, 1]]
    contexts = [[60, 17, 5, 33, 9, 12, 1, 20][: len(rows)] for rows in widths]
    for found in compare_recorded(model, contexts, max_context=64, widths=widths):
        assert found.error < LIMITS[dtype], found
        assert found.repeats
        assert found.flips == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", CASES)
def test_an_answer_is_the_same_eager_recorded_and_ahead(
    family: str, device: str, save_random_model: Any, tmp_path: Path
) -> None:
    model = load(family, device, torch.bfloat16, save_random_model, tmp_path)
    prompts = random_prompts(3, 19, model.vocab_size)
    ways = {
        (recorded, ahead): answer(model, prompts, 12, recorded=recorded, ahead=ahead)
        for recorded in (False, True)
        for ahead in (False, True)
    }
    assert ways[False, True] == ways[False, False]
    assert ways[True, True] == ways[True, False]
    assert all(len(tokens) == 12 for tokens in ways[False, False])
    if exact_type(family) is torch.bfloat16:
        apart = find_divergences(model, prompts, ways[False, False], ways[True, False])
        assert all(each.is_tie for each in apart), apart


@pytest.mark.parametrize("family", CASES)
def test_few_rows_are_exact_where_no_product_is_cublas(family: str, save_random_model: Any, tmp_path: Path) -> None:
    """Which scores experts, and brings latents in and out."""
    model = load(family, "cpu", torch.bfloat16, save_random_model, tmp_path)
    assert model.exact_rows == (1 if exact_type(family) is torch.float32 else 32)
    assert model.inexact is not None


@pytest.mark.parametrize("device", DEVICES)
def test_sampled_answers_are_the_same_ahead(device: str) -> None:
    model = build_random_model(SMALL, torch.device(device))
    prompts = random_prompts(3, 19, model.vocab_size)
    for recorded in (False, True):
        plain, ahead = (
            answer(model, prompts, 12, recorded=recorded, ahead=ahead, temperature=1.0, top_p=0.9)
            for ahead in (False, True)
        )
        assert plain == ahead


class Forgetful(Repeater):
    """Replays leave the logits of the recording as they are."""

    def record(self, run: Any) -> Any:
        _, result = super().record(run)
        return lambda: None, result


def test_a_recording_that_computes_nothing_is_found() -> None:
    model = build_random_model(SMALL, torch.device("cpu"))
    found = compare_recorded(model, CONTEXTS, max_context=64, recorder=Forgetful())
    assert all(each.error > 0.1 for each in found)
    assert sum(each.flips for each in found) > 10


def test_a_wrong_token_is_no_tie() -> None:
    model = build_random_model(SMALL, torch.device("cpu"))
    prompts = random_prompts(2, 9, model.vocab_size)
    eager = answer(model, prompts, 5, recorded=False, ahead=False)
    assert find_divergences(model, prompts, eager, eager) == []
    wrong = [list(tokens) for tokens in eager]
    wrong[1][3] = (wrong[1][3] + 7) % model.vocab_size
    (found,) = find_divergences(model, prompts, eager, wrong)
    assert (found.prompt, found.position, found.is_tie) == (1, 3, False)
    (short,) = find_divergences(model, prompts, eager, [eager[0], eager[1][:2]])
    assert not short.is_tie


def test_a_random_model_is_a_model_of_that_size() -> None:
    model = build_random_model(SMALL, torch.device("cpu"))
    assert model.vocab_size == SMALL["vocab_size"]
    assert len(model.kv_cache_spec(16).layers) == 2
    layer = 64 * (4 + 2 * 2) * 32 + 4 * 32 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 32
    assert count_step_weights(SMALL) == 2 * layer + 64 + 320 * 64
