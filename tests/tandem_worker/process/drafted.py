"""Answers of a decode worker with a draft head, behind prompts that another one computed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tandem_worker.process.test_disaggregated import prompt_of

SPLITS = pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param({}, {}, id="one and one"),
        pytest.param({"pipeline": 2}, {"tensor": 2}, id="PP2-TP2"),
        pytest.param({"tensor": 2}, {"pipeline": 2}, id="TP2-PP2"),
    ],
)
"""Shapes of the groups that compute prompts and answers."""


def compare_right(
    workers: SimpleNamespace,
    folder: Path,
    model: Path,
    asked: dict[str, Any],
    prefill: dict[str, int],
    decode: dict[str, int],
) -> list[float]:
    """How often the head is right on a worker that does both, and behind remote prefills, where answers are the same.
    `asked`: the speculation of all of them."""
    split = [{"group": {"parallelism": shape}} if shape else {} for shape in (prefill, decode)]
    with (
        workers.run(folder, "unified", model, speculative=asked) as single,
        workers.run(folder, "prefill", model, speculative=asked, **split[0]) as far,
        workers.run(folder, "decode", model, speculative=asked, **split[1]) as near,
    ):
        for worker in (single, far, near):
            workers.await_ready(worker)
        for number in range(10):
            prompt = prompt_of(40 + 17 * number, seed=number)
            options = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
            alone = single.complete(prompt, **options)
            answer = near.complete(prompt, prefill=far.kv, **options)
            assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
            assert answer["headers"]["x-tandem-prefill-worker"] == "prefill-0"
        return [
            worker.metric("tandem_worker_accepted_draft_tokens_total", source="head")
            / worker.metric("tandem_worker_draft_tokens_total", source="head")
            for worker in (single, near)
        ]
