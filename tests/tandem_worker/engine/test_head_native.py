"""A draft head on the CPU kernels: every bit of every answer is that of an engine without one, whatever it guesses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tandem_api.launch import ModelSource, SpeculativeConfig
from tandem_worker.engine.guess.contract import Source
from tandem_worker.model.backends import native
from tandem_worker.model.backends.native.layers import PACKS
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.draft.drafted import DraftedLM
from tandem_worker.model.draft.eagle3 import Eagle3Head
from tandem_worker.model.draft.load import load_draft
from tandem_worker.model.load import load_model
from transformers import AutoModelForCausalLM

from tests.tandem_worker.engine.rig import BLOCK_SIZE, Rig
from tests.tandem_worker.engine.test_head import watch
from tests.tandem_worker.engine.test_speculation import run_all, tell
from tests.tandem_worker.engine.test_speculation_native import OFF, draw_requests, drop_cached
from tests.tandem_worker.engine.wire import Wire
from tests.tandem_worker.model.draft.heads import HeadSpec, draw_tensors, save_head, save_target

pytestmark = pytest.mark.skipif(native.find_obstacle() is not None, reason=str(native.find_obstacle()))
MakeRig = Callable[..., Rig]
Load = Callable[..., CausalLM]
SOURCE = ModelSource(uri="file:///head")
EAGER = SpeculativeConfig(method="Draft", draft=SOURCE, adaptive=False, max_tokens=5)
BOTH = SpeculativeConfig(method="Auto", draft=SOURCE)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """The model, with its head or without. The head repeats its state's likeliest token: it is right now and then. The
    library computes it in one call."""
    target = save_target(tmp_path_factory.mktemp("target"))
    spec = HeadSpec(draft_vocab_size=61, settings={"intermediate_size": 128})
    head = save_head(tmp_path_factory.mktemp("head"), spec, copycat(target, spec))

    def load(*, with_head: bool = True) -> CausalLM:
        model = load_model(target, device=torch.device("cpu"), dtype=torch.bfloat16)
        if not with_head:
            return model
        drafted = load_draft(head, model, target)
        assert isinstance(drafted, DraftedLM)
        assert isinstance(drafted.head, Eagle3Head)
        assert PACKS is (drafted.head._find_calls(BLOCK_SIZE) is not None)
        return drafted

    return load


def copycat(target: Path, spec: HeadSpec) -> dict[str, torch.Tensor]:
    """A head that passes the last feature on to the model's output matrix: a poor head that is right at times."""
    tensors = draw_tensors(spec)
    published = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tensors["fc.weight"] = torch.cat((torch.zeros(64, 128), torch.eye(64)), 1)
    tensors["midlayer.self_attn.o_proj.weight"] = tensors["midlayer.self_attn.o_proj.weight"] * 0.3
    tensors["midlayer.mlp.down_proj.weight"] = tensors["midlayer.mlp.down_proj.weight"] * 0.1
    tensors["lm_head.weight"] = published.get_parameter("lm_head.weight").detach().clone()
    tensors["norm.weight"] = published.get_parameter("model.norm.weight").detach().clone()
    return tensors


def drafted(rig: Rig) -> int:
    return rig.engine.stats().draft_tokens_total[Source.HEAD.value]


def accepted(rig: Rig) -> int:
    return rig.engine.stats().accepted_draft_tokens_total[Source.HEAD.value]


@pytest.mark.parametrize("together", [1, 16])
def test_answers_are_the_same_to_the_last_bit(make_rig: MakeRig, load: Load, together: int) -> None:
    requests = draw_requests(16, together, 120)
    plain = make_rig(load(with_head=False), num_blocks=20_000, speculative=OFF)
    rigs = [make_rig(load(), num_blocks=20_000, speculative=each) for each in (EAGER, BOTH)]
    names = list(requests)
    for start in range(0, len(names), together):
        some = {name: requests[name] for name in names[start : start + together]}
        expected = run_all(plain, some)
        for rig in rigs:
            assert run_all(rig, some) == expected
    assert accepted(rigs[0]) > 5
    assert drafted(rigs[0]) > 3 * accepted(rigs[0])


@pytest.mark.parametrize("host_blocks", [0, 200])
def test_preemption_changes_nothing(make_rig: MakeRig, load: Load, host_blocks: int) -> None:
    requests = {
        name: (prompt, options | {"max_tokens": 40, "ignore_eos": True})
        for name, (prompt, options) in draw_requests(10, 4, 60).items()
        if not options.keys() & {"prompt_logprobs", "grammar"}
    }
    expected = run_all(make_rig(load(with_head=False), num_blocks=20_000, speculative=OFF), requests)
    roomy, tight = (
        make_rig(load(), num_blocks=count, host_blocks=host_blocks, speculative=EAGER) for count in (20_000, 110)
    )
    seen, seen_tight = watch(roomy), watch(tight)
    assert run_all(roomy, requests) == expected
    assert drop_cached(run_all(tight, requests)) == drop_cached(expected)
    assert tight.engine.stats().preemptions_total > 0
    same(seen, seen_tight)


def ask_seldom(rig: Rig, every: int) -> None:
    """The head is asked in each of so many steps alone."""
    (lane,) = rig.engine._runner.lanes
    assert lane.speculator is not None
    guesser: Any = lane.speculator._guesser
    propose, turns = guesser.propose, itertools.count(1)
    guesser.propose = lambda *asked: {} if next(turns) % every else propose(*asked)


def watch_releases(rig: Rig) -> None:
    """Nothing is to be written to blocks any more when they are let go of."""
    model, manager = rig.model, rig.engine._scheduler.blocks
    assert isinstance(model, DraftedLM)
    release = manager.release

    def releasing(blocks: Any, names: Any, now: float) -> None:
        assert not {slot // BLOCK_SIZE for slot in model._waiting.slots}.intersection(blocks)
        release(blocks, names, now)

    manager.release = releasing


@pytest.mark.parametrize("every", [2, 7, 40])
def test_one_that_is_asked_seldom_guesses_the_same(make_rig: MakeRig, load: Load, every: int) -> None:
    """What it keeps of tokens is written late, and never into blocks that are others' by then."""
    requests = {
        name: (prompt, options | {"max_tokens": 60, "ignore_eos": True})
        for name, (prompt, options) in draw_requests(10, 4, 60).items()
        if not options.keys() & {"prompt_logprobs", "grammar"}
    }
    often, seldom = (make_rig(load(), num_blocks=count, speculative=EAGER) for count in (20_000, 150))
    seen = watch(often)
    expected = drop_cached(run_all(often, requests))
    ask_seldom(seldom, every)
    watch_releases(seldom)
    seen_seldom = watch(seldom)
    for round in range(3):  # later ones find blocks of the answers before them
        run_all(seldom, {f"{round}/{name}": request for name, request in requests.items()})
    told = drop_cached({key: tell(deltas) for key, deltas in seldom.out.deltas.items()})
    for (name, choice), one in told.items():
        assert one == expected[name.partition("/")[2], choice]
    assert seldom.engine.stats().preemptions_total > 0
    same(seen, seen_seldom)


def same(one: dict[Any, Any], other: dict[Any, Any], share: float = 0.97) -> None:
    """Both guess the same behind texts that both guessed behind, but where rounding decides."""
    common = one.keys() & other.keys()
    assert len(common) > 30
    equal = sum(one[text].tokens[:1] == other[text].tokens[:1] for text in common)
    assert equal >= share * len(common), f"{equal} of {len(common)}"


def test_after_a_hit_the_first_step_guesses_and_guesses_the_same(make_rig: MakeRig, load: Load) -> None:
    fresh, warm = (make_rig(load(), num_blocks=20_000, speculative=EAGER) for _ in range(2))
    seen, seen_warm = watch(fresh), watch(warm)
    generator = torch.Generator().manual_seed(1)
    for number in range(12):
        prompt = tuple(torch.randint(61, (30 + number,), generator=generator).tolist())
        fresh.run(f"{number}", prompt, max_tokens=10)
        warm.run(f"{number} before", prompt[: 20 + number], max_tokens=1)
        assert fresh.out.tokens(f"{number}") == warm.run(f"{number}", prompt, max_tokens=10)
        deltas = tell(warm.out.deltas[f"{number}", 0])
        assert max(deltas["cached"]) >= (20 + number) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
    firsts = [text for text in seen if len(text) in range(31, 43)]
    assert len(firsts) >= 12
    assert all(text in seen_warm for text in firsts)
    same(seen, seen_warm)


def test_after_a_remote_prefill_the_first_step_guesses_and_guesses_the_same(make_rig: MakeRig, load: Load) -> None:
    requests = {
        name: (prompt, {**options, "max_tokens": 20})
        for name, (prompt, options) in draw_requests(12, 3, 150).items()
        if "prompt_logprobs" not in options
    }
    alone = make_rig(load(), num_blocks=5000, speculative=EAGER)
    seen = watch(alone)
    expected = run_all(alone, requests)
    prefill = make_rig(load(), num_blocks=5000, speculative=BOTH)
    decode = make_rig(load(), num_blocks=5000, speculative=EAGER, scheduler={"local_prefill_max_tokens": 4})
    seen_remote = watch(decode)
    Wire(prefill.engine, decode.engine)
    remote = {name: (prompt, options | {"prefill_endpoints": ("p:1",)}) for name, (prompt, options) in requests.items()}
    assert drop_cached(run_all(decode, remote)) == drop_cached(expected)
    assert decode.engine.stats().prefills_remote_total > 5
    same(seen, seen_remote)
    rates = [accepted(rig) / drafted(rig) for rig in (alone, decode)]
    assert abs(rates[0] - rates[1]) < 0.01


def test_streams_that_move_are_guessed_for_at_once(make_rig: MakeRig, load: Load) -> None:
    rigs = [make_rig(load(), num_blocks=5000, speculative=EAGER) for _ in range(2)]
    seen = [watch(rig) for rig in rigs]
    generator = torch.Generator().manual_seed(2)
    for number in range(8):
        prompt = tuple(torch.randint(61, (25,), generator=generator).tolist())
        tokens = rigs[0].run(f"{number}", prompt, max_tokens=16, ignore_eos=True)
        cut = 3 + number
        rigs[1].resume(f"{number}", prompt, (tuple(tokens[:cut]),), max_tokens=16, ignore_eos=True)
        rigs[1].wait()
        assert rigs[1].out.tokens(f"{number}") == tokens[cut:]
        assert (*prompt, *tokens[: cut + 1]) in seen[1]
    same(seen[0], seen[1])
