"""A draft head in an engine: what it guesses is what an independent reference guesses, place by place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from tandem_api.launch import ModelSource, SpeculativeConfig
from tandem_worker.engine.guess.contract import Guess, Source
from tandem_worker.model.draft.load import load_draft
from tandem_worker.model.load import load_model

from tests.tandem_worker.engine.rig import Rig
from tests.tandem_worker.model.draft.heads import VOCAB, Draw, HeadSpec, Reference, save_head, save_target

MakeRig = Callable[..., Rig]
DRAFT = SpeculativeConfig(method="Draft", draft=ModelSource(uri="file:///head"), adaptive=False, max_tokens=4)
SPECS = {
    "eagle": HeadSpec(),
    "layers.0": HeadSpec(prefix="layers.0."),
    "own embedding": HeadSpec(own_embedding=True),
    "another width": HeadSpec(own_embedding=True, hidden_size=96),
    "the whole vocabulary": HeadSpec(draft_vocab_size=VOCAB),
    "norm before residual": HeadSpec(norm_before_residual=True),
    "biases": HeadSpec(attention_bias=True),
    "other layers": HeadSpec(layer_ids=(0, 3, 6)),
    "two layers": HeadSpec(layer_ids=(1, 4), ids_in_eagle_config=True),
    "another base": HeadSpec(settings={"rope_theta": 500000.0}),
    "3.1": HeadSpec(fc_norm=True, norm_output=True),
    "norm before fc": HeadSpec(norm_before_fc=True),
    "speculators": HeadSpec(prefix="layers.0.", nested=True, own_embedding=True),
    "speculators, switched": HeadSpec(prefix="layers.0.", nested=True, norm_before_residual=False, norm_output=True),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def load(target: Path, head: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_draft(head, load_model(target, device=torch.device("cpu"), dtype=dtype), target)


class Seen(dict[tuple[int, ...], Guess]):
    """Guesses by the text behind which they were made, and how their tokens are drawn, where they are."""

    def __init__(self) -> None:
        self.draws: dict[tuple[int, ...], Draw] = {}


def watch(rig: Rig, answers: Mapping[Any, list[int]] | None = None) -> Seen:
    """Guesses of the head, by the text behind which they were made.

    With `answers`, by prompt and choice, others are checked in their place: right ones, of which every third ends with
    a wrong token.
    """
    seen = Seen()

    def watching(propose: Any, sequences: Any, most: Any, plan: Any) -> Any:
        found = propose(sequences, most, plan)
        for sequence, guess in found.items():
            text = (*sequence.prompt, *sequence.output)
            sampling = sequence.request.sampling
            if text not in seen and not sampling.greedy:
                seen.draws[text] = Draw(sampling.seed, sequence.choice, sampling.temperature)
            seen.setdefault(text, guess)
            rest = (answers or {}).get((sequence.prompt, sequence.choice), [])[len(sequence.output) :]
            if rest:
                tokens = rest[: most[sequence]]
                tokens[-1] = (tokens[-1] + (len(seen) % 3 == 0)) % VOCAB
                found[sequence] = Guess(tuple(tokens), Source.HEAD, (0.9,) * len(tokens))
        return found

    for lane in rig.engine._runner.lanes:
        assert lane.speculator is not None
        guesser: Any = lane.speculator._guesser
        guesser.propose = partial(watching, guesser.propose)
    return seen


class Guessing(Protocol):
    """What a head guesses, by an independent reference."""

    def guess(self, text: list[int], depth: int, draw: Draw | None = None) -> tuple[list[int], list[torch.Tensor]]:
        """Tokens behind `text`, and the logits or scores of each."""
        ...


def check(seen: Seen, reference: Guessing) -> None:
    """A guess may be another one only where the reference holds both to be as good."""
    for text, guess in seen.items():
        assert guess.source is Source.HEAD
        expected, rows = reference.guess(list(text), len(guess.tokens), seen.draws.get(text))
        for mine, theirs, logits in zip(guess.tokens, expected, rows, strict=True):
            if mine != theirs:
                best = logits.topk(2).values
                assert best[0] - best[1] < 1e-3, (text, guess, expected)
                break


@pytest.mark.parametrize("kind", SPECS)
def test_guesses_are_those_of_an_independent_reference(
    make_rig: MakeRig, target: Path, tmp_path: Path, kind: str
) -> None:
    spec = SPECS[kind]
    head = save_head(tmp_path / "head", spec)
    rig = make_rig(load(target, head), speculative=DRAFT)
    seen = watch(rig)
    ask(rig)
    assert len(seen) > 30
    check(seen, Reference(target, spec))


@pytest.mark.parametrize("kind", ["eagle", "speculators, switched"])
def test_guesses_behind_guesses_that_were_right_are_those_of_the_reference(
    make_rig: MakeRig, target: Path, tmp_path: Path, kind: str
) -> None:
    """States and entries of tokens that were guessed are kept as far as they stay, over the ends of blocks too."""
    head = save_head(tmp_path / "head", SPECS[kind])
    plain = make_rig(load(target, head), speculative=SpeculativeConfig())
    ask(plain)
    answers = {
        (PROMPTS[name], choice): [token for delta in deltas for token in delta.token_ids]
        for (name, choice), deltas in plain.out.deltas.items()
    }
    rig = make_rig(load(target, head), speculative=DRAFT)
    seen = watch(rig, answers)
    ask(rig)
    assert sum(rig.engine.stats().accepted_draft_tokens_total.values()) > 30
    assert all(rig.out.tokens(*key) == plain.out.tokens(*key) for key in list(plain.out.deltas))
    check(seen, Reference(target, SPECS[kind]))


PROMPTS = {"a": (5, 9, 2, 40, 17, 33, 8), "b": (1,), "c": tuple(range(3, 30))}


def ask(rig: Rig) -> None:
    rig.submit("a", PROMPTS["a"], max_tokens=20)
    rig.submit("b", PROMPTS["b"], max_tokens=9)
    rig.submit("c", PROMPTS["c"], max_tokens=12, temperature=1.0, seed=4, n=2)
    rig.wait()
