"""Guesses in groups of processes: answers are those of one process, and so is what a head guesses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_api.launch import ModelSource, SpeculativeConfig
from tandem_worker.engine.schedule.params import FinishReason, GenerationRequest, SamplingParams
from tandem_worker.group.control.wire import HeadCall

from tests.tandem_worker.engine.test_head import Seen, check, watch
from tests.tandem_worker.engine.test_head_native import copycat, same
from tests.tandem_worker.group.test_group_engine import draw_prompts
from tests.tandem_worker.model.draft.heads import VOCAB, HeadSpec, Reference, draw_tensors, save_head, save_target
from tests.tandem_worker.model.draft.modules import SPECS as MODULES
from tests.tandem_worker.model.draft.modules import ModuleReference, save_model

pytestmark = pytest.mark.timeout(180)
StartGroup = Callable[..., AbstractContextManager[Any]]
SPECS = {
    "eagle": HeadSpec(draft_vocab_size=VOCAB),
    "3.1": HeadSpec(own_embedding=True, fc_norm=True, norm_output=True, attention_bias=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The first head is right now and then."""
    target = save_target(tmp_path_factory.mktemp("target"))
    tensors = {kind: draw_tensors(spec) for kind, spec in SPECS.items()} | {"eagle": copycat(target, SPECS["eagle"])}
    heads = {kind: save_head(tmp_path_factory.mktemp("head"), SPECS[kind], each) for kind, each in tensors.items()}
    return SimpleNamespace(target=target, heads=heads, tensors=tensors)


def drafting(head: Path, **settings: Any) -> SpeculativeConfig:
    source = ModelSource(uri=f"file://{head}")
    return SpeculativeConfig(**({"method": "Draft", "draft": source, "adaptive": False, "max_tokens": 4} | settings))


def answer(rig: Any, most: int | None = None) -> list[list[int]]:
    """To so many prompts."""
    prompts = [[token % VOCAB for token in prompt] for prompt in draw_prompts()[:most]]
    likeliest = rig.answer(prompts, 12)
    assert rig.answer(prompts, 12) == likeliest  # from the prefix cache
    return likeliest + rig.answer(prompts, 12, temperature=1.0, seed=3, top_p=0.9)


def drafted(rig: Any) -> tuple[int, int]:
    stats = rig.engine.stats()
    return stats.draft_tokens_total["head"], stats.accepted_draft_tokens_total["head"]


@pytest.mark.parametrize(
    ("kind", "parallelism"),
    [
        pytest.param("eagle", {"tensor": 2}, id="TP2"),
        pytest.param("eagle", {"pipeline": 2}, id="PP2"),
        pytest.param("eagle", {"data": 2}, id="DP2", marks=pytest.mark.full),
        pytest.param("eagle", {"data": 2, "pipeline": 2}, id="DP2xPP2", marks=pytest.mark.full),
        pytest.param("3.1", {"tensor": 2}, id="TP2, 3.1", marks=pytest.mark.full),
        pytest.param("3.1", {"pipeline": 3}, id="PP3, 3.1", marks=pytest.mark.full),
        pytest.param("eagle", {"tensor": 2, "pipeline": 2}, id="TP2xPP2", marks=pytest.mark.full),
    ],
)
def test_ranks_guess_what_one_process_guesses(
    folders: SimpleNamespace, start_group: StartGroup, kind: str, parallelism: dict[str, int]
) -> None:
    with start_group(folders.target) as plain:
        expected = answer(plain)
    with start_group(folders.target, drafting(folders.heads[kind])) as single:
        alone = watch(single)
        assert answer(single) == expected
        rates = [drafted(single)]
    with start_group(folders.target, drafting(folders.heads[kind]), **parallelism) as group:
        seen = watch(group)
        assert answer(group) == expected
        rates.append(drafted(group))
    assert min(rate[0] for rate in rates) > 200
    greedy = Seen()
    greedy.update({text: guess for text, guess in seen.items() if text not in seen.draws})
    if "data" not in parallelism:  # there two lanes have twice the room for guesses
        (one, other) = (accepted / asked for asked, accepted in rates)
        assert abs(one - other) < 0.01
        assert greedy.keys() == {text for text in alone if text not in alone.draws}
    check(greedy, Reference(folders.target, SPECS[kind], folders.tensors[kind]))
    assert kind != "eagle" or rates[1][1] > 3


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose own module for multi-token prediction is right now and then."""
    return save_model(tmp_path_factory.mktemp("predicting"), MODULES["experts"], counts=True)


@pytest.mark.parametrize(
    "parallelism",
    [
        pytest.param({"tensor": 2}, id="TP2"),
        pytest.param({"pipeline": 2}, id="PP2", marks=pytest.mark.full),
        pytest.param({"expert": 2}, id="EP2", marks=pytest.mark.full),
        pytest.param({"tensor": 2, "pipeline": 2}, id="TP2xPP2", marks=pytest.mark.full),
    ],
)
def test_ranks_guess_with_the_models_own_module(
    predicting: Path, start_group: StartGroup, parallelism: dict[str, int]
) -> None:
    own = SpeculativeConfig(method="Draft", adaptive=False, max_tokens=4)
    with start_group(predicting, SpeculativeConfig(method="Off")) as plain:
        expected = answer(plain, 5)
    with start_group(predicting, own) as single:
        alone = watch(single)
        assert answer(single, 5) == expected
    with start_group(predicting, own, **parallelism) as group:
        seen = watch(group)
        assert answer(group, 5) == expected
        asked, accepted = drafted(group)
    assert 0.2 < accepted / asked < 0.9
    same(alone, seen)
    greedy = Seen()
    greedy.update({text: guess for text, guess in seen.items() if text not in seen.draws})
    assert len(greedy) > 10
    check(greedy, ModuleReference(predicting))


@pytest.mark.parametrize(
    "parallelism",
    [{"data": 2}, *(pytest.param({axis: 2}, marks=pytest.mark.full) for axis in ("tensor", "pipeline"))],
    ids=str,
)
def test_groups_check_guesses_by_text(
    folders: SimpleNamespace, start_group: StartGroup, parallelism: dict[str, int]
) -> None:
    lookup = SpeculativeConfig(method="Lookup", adaptive=False, max_tokens=6)
    with start_group(folders.target) as plain:
        expected = answer(plain)
    with start_group(folders.target, lookup, **parallelism) as group:
        assert answer(group) == expected
        accepted = group.engine.stats().accepted_draft_tokens_total
        assert accepted["history"] + accepted["text"] > 50


@pytest.mark.full
def test_expert_ranks_check_guesses_each_for_its_lane(checkpoints: dict[str, Path], start_group: StartGroup) -> None:
    lookup = SpeculativeConfig(method="Lookup", adaptive=False, max_tokens=6)
    prompts = draw_prompts()
    with start_group(checkpoints["qwen3_moe"]) as plain:
        expected = plain.answer(prompts, 12)
    with start_group(checkpoints["qwen3_moe"], lookup, expert=2) as group:
        assert group.answer(prompts, 12) == expected
        assert group.answer(prompts, 12) == expected
        assert sum(group.engine.stats().accepted_draft_tokens_total.values()) > 20


@pytest.mark.parametrize(
    "parallelism", [{"pipeline": 2}, pytest.param({"tensor": 2}, marks=pytest.mark.full)], ids=["PP2", "TP2"]
)
def test_a_rank_that_is_killed_in_a_pass_of_the_head_ends_what_runs(
    folders: SimpleNamespace, start_group: StartGroup, parallelism: dict[str, int]
) -> None:
    """Rank 0 waits for it while it plans a step."""
    with start_group(folders.target, drafting(folders.heads["eagle"]), **parallelism) as rig:
        (lane,), (follower,) = rig.engine._runner.lanes, rig.group.children.pids
        head: Any = lane._drafting._ranks
        tell, passes = head._tell, iter(range(100))

        def tell_or_kill(call: HeadCall, *lists: Any) -> None:
            if call is HeadCall.COMPUTE and next(passes) == 9:
                os.kill(follower, signal.SIGKILL)
            tell(call, *lists)

        head._tell = tell_or_kill
        sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        rig.engine.submit(GenerationRequest(request_id="long", prompt_token_ids=(1, 2, 3), sampling=sampling))
        assert rig.causes.get(timeout=30).message.startswith("rank 1 was killed by SIGKILL")
        rig.out.wait_finished(1, timeout=30)
        assert rig.out.reason("long") is FinishReason.ERROR
        assert "rank 1 was killed" in (rig.out.last("long").error or "")
