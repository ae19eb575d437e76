"""Worker processes whose model brings its own draft head: what they serve, and what they say of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tandem_worker.model.draft.modules import SPECS, ModuleSpec, save_model
from tests.tandem_worker.process.test_disaggregated import prompt_of

OWN = {"method": "Draft", "adaptive": False, "maxTokens": 3}
ASKED: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def predicting(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 with a module for multi-token prediction that is right now and then, and the tokenizer of bytes."""
    spec = ModuleSpec(settings=SPECS["experts"].settings | {"vocab_size": 257, "max_position_embeddings": 1024})
    folder = save_model(tmp_path_factory.mktemp("predicting"), spec, counts=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (tiny_model / name).exists():
            (folder / name).write_text((tiny_model / name).read_text())
    return folder


def answer(worker: Any, prompt: list[int], **options: Any) -> dict[str, Any]:
    return worker.complete(prompt, **ASKED, **options)


def test_a_remote_prefill_brings_what_the_module_keeps(
    workers: SimpleNamespace, predicting: Path, tmp_path: Path
) -> None:
    with (
        workers.run(tmp_path, "prefill", predicting, speculative=OWN) as prefill,
        workers.run(tmp_path, "decode", predicting, speculative=OWN) as decode,
    ):
        for worker in (prefill, decode):
            workers.await_ready(worker)
            assert worker.logged("own module for multi-token prediction is its draft head")
        told = [answer(decode, prompt_of(70 + n, seed=n), prefill=prefill.kv) for n in range(3)]
        assert {each["headers"]["x-tandem-prefill-worker"] for each in told} == {"prefill-0"}
        drafted, accepted = (
            decode.metric(f"tandem_worker_{kind}_tokens_total", source="head") for kind in ("draft", "accepted_draft")
        )
    assert 0.2 < accepted / drafted < 0.9


def test_a_model_without_a_module_ends_a_start_that_asks_for_it(
    workers: SimpleNamespace, tiny_model: Path, tmp_path: Path
) -> None:
    with workers.run(tmp_path, "decode", tiny_model, speculative=OWN) as worker:
        assert worker.process.wait(60) != 0
    (told,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.termination"))
    assert told["reason"] == "DraftUnsupported"
    assert "the model is not of an architecture that has them" in told["message"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param({}, {}, id="one and one"),
        pytest.param({"pipeline": 2}, {"tensor": 2}, id="PP2-TP2"),
        pytest.param({"tensor": 2}, {"pipeline": 2}, id="TP2-PP2"),
    ],
)
def test_after_remote_prefills_it_is_right_as_often(
    workers: SimpleNamespace, predicting: Path, tmp_path: Path, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    split = [{"group": {"parallelism": shape}} if shape else {} for shape in (prefill, decode)]
    with (
        workers.run(tmp_path, "unified", predicting, speculative=OWN) as single,
        workers.run(tmp_path, "prefill", predicting, speculative=OWN, **split[0]) as far,
        workers.run(tmp_path, "decode", predicting, speculative=OWN, **split[1]) as near,
    ):
        for worker in (single, far, near):
            workers.await_ready(worker)
        for number in range(10):
            prompt = prompt_of(40 + 17 * number, seed=number)
            told = answer(near, prompt, prefill=far.kv)
            assert told["choices"][0]["token_ids"] == answer(single, prompt)["choices"][0]["token_ids"]
            assert told["headers"]["x-tandem-prefill-worker"] == "prefill-0"
        rates = [
            worker.metric("tandem_worker_accepted_draft_tokens_total", source="head")
            / worker.metric("tandem_worker_draft_tokens_total", source="head")
            for worker in (single, near)
        ]
    assert 0.2 < rates[0] < 0.9
    assert abs(rates[0] - rates[1]) <= 0.01
