"""Worker processes whose model brings its own draft head: what they serve, and what they say of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tandem_worker.model.draft.modules import SPECS, ModuleSpec, save_model
from tests.tandem_worker.process.drafted import SPLITS, compare_right
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
@SPLITS
def test_after_remote_prefills_it_is_right_as_often(
    workers: SimpleNamespace, predicting: Path, tmp_path: Path, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    rates = compare_right(workers, tmp_path, predicting, OWN, prefill, decode)
    assert 0.2 < rates[0] < 0.9
    assert abs(rates[0] - rates[1]) <= 0.01
