"""A head that learns computes what it does when it is served: every depth of every chain is the reference's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tandem_worker.model.draft.load import load_draft
from tandem_worker.model.load import load_model

from bench.speculation.head import HeadShape, LearningHead, Lesson
from bench.speculation.train import choose_vocabulary, measure, train
from tests.tandem_worker.model.draft.heads import TARGET, VOCAB, HeadSpec, Reference, save_target

LENGTH, DEPTHS = 9, 3


@pytest.fixture
def head() -> LearningHead:
    torch.manual_seed(1)
    shape = HeadShape(
        vocab_size=VOCAB, draft_vocab_size=40, hidden_size=64, intermediate_size=112, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=4096,
    )  # fmt: skip
    return LearningHead(shape, torch.randperm(VOCAB)[:40].sort().values, torch.randn(VOCAB, 64))


def draw_lesson() -> Lesson:
    shares, likeliest = torch.randn(LENGTH, VOCAB).mul(3).softmax(-1).topk(8)
    return Lesson(torch.randint(VOCAB, (LENGTH,)), torch.randn(LENGTH, 3 * TARGET["hidden_size"]), likeliest, shares)


def test_every_depth_is_that_of_the_reference(head: LearningHead, tmp_path: Path) -> None:
    head.publish(tmp_path / "head")
    for weight in head.weights.values():  # as published
        weight.data = weight.data.bfloat16().float()
    tensors = {name: value.float() for name, value in load_file(tmp_path / "head" / "model.safetensors").items()}
    tensors["embed_tokens.weight"] = head._embedding
    reference = Reference(save_target(tmp_path / "target"), HeadSpec(), tensors)
    lesson = draw_lesson()
    fused = lesson.features @ tensors["fc.weight"].T
    with torch.no_grad():
        depths = list(head.guess(lesson, DEPTHS))
        for row in range(LENGTH - DEPTHS):
            states = list(fused[: row + 1])
            for depth in range(DEPTHS):
                logits, state = reference._last(torch.stack(states), lesson.tokens[1 : row + 2 + depth])
                torch.testing.assert_close(depths[depth][row], logits, atol=1e-3, rtol=1e-3)
                states.append(state)


def test_what_is_published_is_served(head: LearningHead, tmp_path: Path) -> None:
    head.publish(tmp_path / "head")
    target = save_target(tmp_path / "target")
    served = load_draft(tmp_path / "head", load_model(target, device=torch.device("cpu"), dtype=torch.float32), target)
    assert torch.equal(served.vocabulary, head.vocabulary)


def test_it_learns(head: LearningHead) -> None:
    lesson = draw_lesson()
    before, _ = head.unroll(lesson, DEPTHS)
    clock = iter(range(10_000))
    assert list(train(head, [lesson], 60, DEPTHS, 3e-3, clock=lambda: float(next(clock))))
    after, _ = head.unroll(lesson, DEPTHS)
    assert after < 0.7 * before
    assert len(measure(head, [lesson], DEPTHS)) == DEPTHS


def test_only_answers_count(head: LearningHead) -> None:
    lesson = draw_lesson()
    known = torch.full((LENGTH,), int(head.vocabulary[0]))
    with torch.no_grad():
        guessed = [head.vocabulary[logits.argmax(-1)] for logits in head.guess(lesson, DEPTHS)]
        for first in (1, 4, LENGTH - 1):
            likeliest = lesson.likeliest.clone()
            likeliest[:, 0] = known
            one = dataclasses.replace(lesson, likeliest=likeliest, first=first)
            _, right = head.unroll(one, DEPTHS)
            for depth in range(DEPTHS):
                places = range(max(first, 1 + depth), LENGTH)
                wanted = [float(guessed[depth][place - 1 - depth] == known[0]) for place in places]
                assert right[depth] == pytest.approx(sum(wanted) / len(wanted))


def test_vocabularies_have_the_most_frequent_tokens() -> None:
    texts = [[7, 7, 7, 3], [9, 9, 3, 50]]
    assert choose_vocabulary(texts, 2, 60).tolist() in ([3, 7], [7, 9])
    assert choose_vocabulary(texts, 6, 60).tolist() == [0, 1, 3, 7, 9, 50]
