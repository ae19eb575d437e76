"""Prefill and decode workers that are split differently over processes: the tokens of one process."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tandem_worker.families import save_family

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]
USED = "tandem_worker_kv_blocks_used"


def split(**parallelism: int) -> dict[str, Any]:
    return {"group": {"parallelism": parallelism}}


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(1, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def answer_of(worker: Any, prompt: list[int], **options: Any) -> list[int]:
    answer = worker.complete(prompt, ignore_eos=True, return_token_ids=True, **options)
    return answer["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def latent_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek-V3 with the other model's tokenizer: its KV is the same on every tensor rank."""
    folder = tmp_path_factory.mktemp("latent")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, folder)
    save_family("deepseek-v3", folder, vocab_size=257, max_position_embeddings=8192, num_hidden_layers=4)
    return folder


@pytest.fixture(scope="module", params=["heads", "latents"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue("tiny_model" if request.param == "heads" else "latent_model")


@pytest.fixture(scope="module")
def conversations(
    workers: SimpleNamespace, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[list[int], list[int]]]:
    """Prompts and what one process answers: two turns each, of lengths within, at and beyond blocks and chunks."""
    with workers.run(tmp_path_factory.mktemp("single"), "unified", model) as single:
        workers.await_ready(single)
        turns = []
        for length in (17, 32, 129, 500, 1800):
            prompt = prompt_of(length, seed=length)
            for _ in range(2):
                answer = answer_of(single, prompt, max_tokens=12)
                turns.append((prompt, answer))
                prompt = prompt + answer + prompt_of(40, seed=length + 1)
        return turns


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(split(tensor=2), {}, id="TP2-TP1"),
        pytest.param({}, split(pipeline=2), id="TP1-PP2"),
        pytest.param(split(pipeline=2), split(tensor=2), id="PP2-TP2"),
        pytest.param(split(tensor=2), split(tensor=4), id="TP2-TP4-copied-heads"),
    ],
)
def test_answers_equal_those_of_one_process(
    workers: SimpleNamespace,
    model: Path,
    tmp_path: Path,
    conversations: list[tuple[list[int], list[int]]],
    prefill: dict[str, Any],
    decode: dict[str, Any],
) -> None:
    with (
        workers.run(tmp_path, "prefill", model, **prefill) as one,
        workers.run(tmp_path, "decode", model, **decode) as other,
    ):
        workers.await_ready(one)
        workers.await_ready(other)
        for prompt, expected in conversations:
            assert answer_of(other, prompt, prefill=one.kv, max_tokens=12) == expected
        # A machine so busy that a rank is not heard of for 5 s costs an order its prefill worker, not its answer.
        assert other.metric("tandem_worker_prefills_total", where="remote") > len(conversations) / 2
        for worker in (one, other):
            workers.eventually(lambda worker=worker: worker.metric(USED) == 0, 60, "no block is in use")


def test_a_killed_rank_of_the_prefill_worker_costs_time_not_the_request(
    workers: SimpleNamespace, tiny_model: Path, tmp_path: Path
) -> None:
    prompt = prompt_of(3000, seed=5)
    with (
        workers.run(tmp_path, "prefill", tiny_model, scheduler={"maxBatchTokens": 32}, **split(tensor=2)) as victim,
        workers.run(tmp_path, "decode", tiny_model, **split(tensor=2)) as decode,
    ):
        workers.await_ready(victim)
        workers.await_ready(decode)
        answers: list[list[int]] = []
        request = threading.Thread(
            target=lambda: answers.append(answer_of(decode, prompt, prefill=victim.kv, max_tokens=6))
        )
        request.start()
        workers.eventually(lambda: victim.metric(USED) > 0, 60, "the prefill worker computes")
        (follower,) = children_of(victim.process.pid)
        os.kill(follower, signal.SIGKILL)
        request.join(60)
        assert victim.process.wait(60) == 1
        assert decode.metric("tandem_worker_prefills_total", where="fallback") == 1
        assert answer_of(decode, prompt, max_tokens=6) == answers[0]
    with workers.run(tmp_path, "unified", tiny_model) as single:
        workers.await_ready(single)
        assert answers == [answer_of(single, prompt, max_tokens=6)]


def children_of(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
