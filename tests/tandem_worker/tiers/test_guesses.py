"""Guesses and a disk together: what comes back, what guesses write and what goes out are never mixed up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tandem_worker.engine.guess.contract import Guess

from tests.tandem_worker.engine.history_model import HistoryModel
from tests.tandem_worker.engine.rig import Rig
from tests.tandem_worker.engine.test_head import DRAFT, load, watch
from tests.tandem_worker.engine.test_own_head import load as load_own
from tests.tandem_worker.engine.test_speculation import LOOKUP, Knowing, accepted, replace_guesser
from tests.tandem_worker.model.draft.heads import HeadSpec, save_head, save_target
from tests.tandem_worker.model.draft.modules import SPECS as MODULES
from tests.tandem_worker.model.draft.modules import save_model
from tests.tandem_worker.tiers.rig import DiskRig, wait_until
from tests.tandem_worker.tiers.test_disk import make_prompt

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 4, "n": 3},
    {"prompt_logprobs": 1},
    {"temperature": 0.8, "seed": 9, "frequency_penalty": 0.6},
    {"step_seconds": 1e-6},
    {"resumed": True},
]


def prompt_of(number: int) -> tuple[int, ...]:
    """Two neighbours share a prefix."""
    return make_prompt(number // 2, 30 + number % 7 * 6)


def ask(rig: Rig, name: str, number: int) -> None:
    prompt = prompt_of(number)
    options = dict(KINDS[number % len(KINDS)])
    if options.pop("resumed", False):
        prompt, said = prompt[:-6], prompt[-6:]
        rig.resume(name, prompt, (said,), max_tokens=30)
    else:
        rig.submit(name, prompt, max_tokens=24, **options)


def answers(rig: Rig, count: int) -> dict[tuple[str, int], list[int]]:
    return {
        (f"{number}", choice): rig.out.tokens(f"{number}", choice)
        for number in range(count)
        for choice in range(KINDS[number % len(KINDS)].get("n", 1))
    }


@pytest.mark.parametrize("lies", [0.0, 0.4])
@pytest.mark.parametrize("host_blocks", [0, 24])
def test_answers_are_those_without_both(tmp_path: Path, lies: float, host_blocks: int) -> None:
    """A space so small that sequences are preempted and blocks go out and come back all the time."""
    count = 24
    plain = Rig(HistoryModel(), num_blocks=400)
    for number in range(count):
        ask(plain, f"{number}", number)
    plain.wait()
    expected = answers(plain, count)
    known = {
        (prompt_of(number), choice): plain.out.tokens(f"{number}", choice)
        for number in range(count)
        for choice in range(KINDS[number % len(KINDS)].get("n", 1))
    }
    for prompt, choice in list(known):
        known[prompt[:-6], choice] = [*prompt[-6:], *known[prompt, choice]]
    plain.close()
    filling = DiskRig(tmp_path / "disk", num_blocks=400)
    for number in range(count):
        filling.run(f"{number}", prompt_of(number), max_tokens=1)
    assert filling.tier.flush(5.0)
    filling.close()
    rng = random.Random(7)
    rig = DiskRig(tmp_path / "disk", num_blocks=48, write_through=True, speculative=LOOKUP, host_blocks=host_blocks)
    replace_guesser(rig, Knowing(known, lies))
    for turn in range(3):
        order = list(range(count))
        rng.shuffle(order)
        for number in order:
            name = f"{number}" if turn == 2 else f"{turn}-{number}"
            ask(rig, name, number)
            if turn < 2 and rng.random() < 0.3:
                rig.engine.abort(name)
        rig.wait()
    assert answers(rig, count) == expected
    assert accepted(rig) > 50
    assert rig.tier.stats().tokens_read > 0
    scheduler = rig.engine._scheduler
    wait_until(lambda: scheduler.blocks.num_held == 0)
    assert not scheduler.queues.loading
    assert scheduler.queues.queued_prefill_tokens == 0
    assert scheduler.queues.num_queued == 0
    assert scheduler.host is None or scheduler.host.counts.blocks_in > 0
    rig.close()


@pytest.mark.parametrize("kind", ["head", "module"])
def test_a_head_guesses_the_same_behind_blocks_that_come_back(tmp_path: Path, kind: str) -> None:
    """Its entries and states were written with the blocks, and are read with them."""
    if kind == "head":
        target, head = save_target(tmp_path / "target"), save_head(tmp_path / "head", HeadSpec())
    else:
        target, head = save_model(tmp_path / "target", MODULES["experts"]), None

    def run(folder: str) -> tuple[DiskRig, dict[tuple[int, ...], Guess], list[list[int]]]:
        rig = DiskRig(
            tmp_path / folder, num_blocks=200, segment_bytes=1 << 20, size=32 << 20, write_through=True,
            model=load_own(target) if head is None else load(target, head), speculative=DRAFT,
        )  # fmt: skip
        seen = watch(rig)
        told = [rig.run(f"{n}", tuple((n + 5 * place) % 61 for place in range(40 + n)), 12) for n in range(4)]
        assert rig.tier.flush(5.0)
        return rig, seen, told

    filling, fresh, expected = run("disk")
    filling.close()
    loading, seen, told = run("disk")
    assert told == expected
    assert loading.tier.stats().tokens_read >= 4 * 32
    assert seen.keys() == fresh.keys()
    assert {text: guess.tokens for text, guess in seen.items()} == {text: one.tokens for text, one in fresh.items()}
    assert min(map(len, seen)) == 41, "the first step guesses"
    loading.close()
