"""A checkpoint's own module for multi-token prediction in an engine: its guesses are an independent reference's, place
by place, and answers are those without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tandem_api.launch import SpeculativeConfig
from tandem_worker.model.checkpoint.packed_folder import Form
from tandem_worker.model.draft.own import add_own_head
from tandem_worker.model.load import load_model
from tandem_worker.model.lossless.packing import pack

from tests.tandem_worker.engine.rig import BLOCK_SIZE, Rig
from tests.tandem_worker.engine.test_head import PROMPTS, ask, check, watch
from tests.tandem_worker.engine.test_head_native import accepted, drafted, same
from tests.tandem_worker.engine.wire import Wire
from tests.tandem_worker.model.backends.test_backends import quantize
from tests.tandem_worker.model.draft.modules import NAME, SPECS, VOCAB, ModuleReference, save_model
from tests.tandem_worker.model.lossless.test_loading import needs_kernels, packs_everything

__all__ = ["packs_everything"]
MakeRig = Callable[..., Rig]
OWN = SpeculativeConfig(method="Draft", adaptive=False, max_tokens=4)
OFF = SpeculativeConfig(method="Off")
GATE = {"experts", "dense", "no query rank", "rotation of halves", "a vocabulary of its own", "a tied output matrix"}
"""The full run has the others."""


def load(folder: Path, *, with_head: bool = True) -> Any:
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    return add_own_head(folder, model, "Draft") if with_head else model


@pytest.mark.parametrize(
    "kind", [kind if kind in GATE else pytest.param(kind, marks=pytest.mark.full) for kind in SPECS]
)
def test_guesses_are_those_of_an_independent_reference(make_rig: MakeRig, tmp_path: Path, kind: str) -> None:
    folder = save_model(tmp_path, SPECS[kind])
    rig = make_rig(load(folder), speculative=OWN)
    seen = watch(rig)
    ask(rig)
    assert len(seen) > 30
    check(seen, ModuleReference(folder))


@pytest.mark.parametrize("kind", ["experts", "dense"])
def test_guesses_behind_guesses_that_were_right_are_those_of_the_reference(
    make_rig: MakeRig, tmp_path: Path, kind: str
) -> None:
    """States and entries of tokens that were guessed are kept as far as they stay, over the ends of blocks too."""
    folder = save_model(tmp_path, SPECS[kind])
    plain = make_rig(load(folder, with_head=False), speculative=OFF)
    ask(plain)
    answers = {
        (PROMPTS[name], choice): [token for delta in deltas for token in delta.token_ids]
        for (name, choice), deltas in plain.out.deltas.items()
    }
    rig = make_rig(load(folder), speculative=OWN)
    seen = watch(rig, answers)
    ask(rig)
    assert sum(rig.engine.stats().accepted_draft_tokens_total.values()) > 30
    assert all(rig.out.tokens(*key) == plain.out.tokens(*key) for key in list(plain.out.deltas))
    check(seen, ModuleReference(folder))


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose module is right now and then."""
    return save_model(tmp_path_factory.mktemp("counting"), SPECS["experts"], counts=True)


def draw_prompts(count: int, seed: int, lengths: range) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(VOCAB, (lengths[number % len(lengths)],), generator=generator).tolist())
        for number in range(count)
    ]


def rate(rig: Rig) -> float:
    return accepted(rig) / drafted(rig)


def test_answers_are_those_without_it(make_rig: MakeRig, counting: Path) -> None:
    plain = make_rig(load(counting, with_head=False), num_blocks=2000, speculative=OFF)
    both = SpeculativeConfig(method="Draft", max_tokens=6)
    rigs = [make_rig(load(counting), num_blocks=2000, speculative=each) for each in (OWN, both)]
    for number, prompt in enumerate(draw_prompts(8, 3, range(5, 60, 7))):
        options = {} if number % 2 else {"temperature": 0.8, "seed": number, "n": 2, "frequency_penalty": 0.3}
        for rig in (plain, *rigs):
            rig.submit(f"{number}", prompt, max_tokens=24, ignore_eos=True, **options)
    for rig in (plain, *rigs):
        rig.wait()
    for rig in rigs:
        assert all(rig.out.tokens(*key) == plain.out.tokens(*key) for key in list(plain.out.deltas))
    assert 0.2 < rate(rigs[0]) < 0.9


def test_after_a_hit_the_first_step_guesses_and_guesses_the_same(make_rig: MakeRig, counting: Path) -> None:
    fresh, warm = (make_rig(load(counting), num_blocks=2000, speculative=OWN) for _ in range(2))
    seen, seen_warm = watch(fresh), watch(warm)
    for number, prompt in enumerate(draw_prompts(12, 1, range(30, 42))):
        fresh.run(f"{number}", prompt, max_tokens=10, ignore_eos=True)
        warm.run(f"{number} before", prompt[: 20 + number], max_tokens=1)
        assert warm.run(f"{number}", prompt, max_tokens=10, ignore_eos=True) == fresh.out.tokens(f"{number}")
        hit = max(delta.num_cached_tokens or 0 for delta in warm.out.deltas[f"{number}", 0])
        assert hit >= (20 + number) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
    firsts = [text for text in seen if len(text) in range(31, 43)]
    assert len(firsts) >= 12
    assert all(text in seen_warm for text in firsts)
    same(seen, seen_warm)
    assert abs(rate(fresh) - rate(warm)) < 0.01


def test_after_a_remote_prefill_it_is_right_as_often(make_rig: MakeRig, counting: Path) -> None:
    alone, prefill = (make_rig(load(counting), num_blocks=2000, speculative=OWN) for _ in range(2))
    decode = make_rig(load(counting), num_blocks=2000, speculative=OWN, scheduler={"local_prefill_max_tokens": 4})
    seen, seen_remote = watch(alone), watch(decode)
    Wire(prefill.engine, decode.engine)
    for number, prompt in enumerate(draw_prompts(8, 2, range(20, 100, 10))):
        expected = alone.run(f"{number}", prompt, max_tokens=20, ignore_eos=True)
        told = decode.run(f"{number}", prompt, max_tokens=20, ignore_eos=True, prefill_endpoints=("p:1",))
        assert told == expected
        assert (*prompt, told[0]) in seen_remote, "the first step guesses"
    assert decode.engine.stats().prefills_remote_total == 8
    same(seen, seen_remote)
    assert abs(rate(alone) - rate(decode)) < 0.01


def test_streams_that_move_are_guessed_for_at_once(make_rig: MakeRig, counting: Path) -> None:
    rigs = [make_rig(load(counting), num_blocks=2000, speculative=OWN) for _ in range(2)]
    seen = [watch(rig) for rig in rigs]
    for number, prompt in enumerate(draw_prompts(10, 2, range(12, 13))):
        tokens = rigs[0].run(f"{number}", prompt, max_tokens=16, ignore_eos=True)
        cut = 3 + number % 8
        rigs[1].resume(f"{number}", prompt, (tuple(tokens[:cut]),), max_tokens=16, ignore_eos=True)
        rigs[1].wait()
        assert rigs[1].out.tokens(f"{number}") == tokens[cut:]
        assert (*prompt, *tokens[: cut + 1]) in seen[1]
    common = seen[0].keys() & seen[1].keys()
    assert len(common) >= 5
    assert all(seen[0][text].tokens == seen[1][text].tokens for text in common)


def test_a_quantized_module_guesses_by_what_its_numbers_stand_for(make_rig: MakeRig, tmp_path: Path) -> None:
    plain, folder = (save_model(tmp_path / name, SPECS["experts"]) for name in ("plain", "quantized"))
    quantize(folder, "fp8")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scale, stored = tensors.pop(name), tensors[name.removesuffix("_scale_inv")]
        spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[: stored.shape[0], : stored.shape[1]]
        tensors[name.removesuffix("_scale_inv")] = stored.float() * spread
        assert stored.dtype == torch.float8_e4m3fn
    assert f"{NAME}mlp.experts.0.up_proj.weight" in tensors
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    rig = make_rig(load(folder), speculative=OWN)
    seen = watch(rig)
    ask(rig)
    assert len(seen) > 30
    check(seen, ModuleReference(plain))


@needs_kernels
@pytest.mark.usefixtures("packs_everything")
@pytest.mark.parametrize("form", ["fixed", pytest.param("archive", marks=pytest.mark.full)])
def test_a_packed_checkpoint_has_the_same_module(make_rig: MakeRig, tmp_path: Path, form: Form) -> None:
    source = save_model(tmp_path / "source", SPECS["a vocabulary of its own"])
    tensors = load_file(source / "model.safetensors")
    plain = {name: tensor if "gate.e_score" in name else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(plain, source / "model.safetensors")
    assert pack(source, tmp_path / "packed", form).packed_tensors > 3
    told = []
    for folder, weights in ((source, "Plain"), (tmp_path / "packed", "Plain"), (tmp_path / "packed", "Lossless")):
        model: Any = load_model(folder, device=torch.device("cpu"), dtype=torch.bfloat16, weights=weights)
        rig = make_rig(add_own_head(folder, model, "Draft"), speculative=OWN)
        seen = watch(rig)
        ask(rig)
        told.append({text: guess.tokens for text, guess in seen.items()})
    assert len(told[0]) > 30
    assert told[1] == told[0]
    assert told[2] == told[0]
