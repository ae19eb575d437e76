"""Worker processes with a draft head: what they serve, count and refuse, and whom they exchange blocks with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tandem_api.launch import ModelSource, SpeculativeConfig, WorkerConfig
from tandem_api.names import Role
from tandem_worker.host.errors import StartupError
from tandem_worker.model.sources.resolve import resolve_draft
from transformers import AutoModelForCausalLM

from tests.tandem_worker.engine.test_head_native import copycat
from tests.tandem_worker.model.draft.heads import HeadSpec, draw_tensors, save_head
from tests.tandem_worker.process.drafted import SPLITS, compare_right
from tests.tandem_worker.process.test_disaggregated import oracle, prompt_of

SPEC = HeadSpec(draft_vocab_size=257, layer_ids=(1, 2, 3), vocab_size=257)


def speculative(head: Path) -> dict[str, Any]:
    return {"method": "Draft", "draft": {"uri": f"file://{head}"}, "adaptive": False, "maxTokens": 3}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Two of them, whose layers have one shape."""
    folder = tmp_path_factory.mktemp("heads")
    return SimpleNamespace(
        one=save_head(folder / "one", SPEC),
        other=save_head(folder / "other", SPEC, draw_tensors(SPEC, seed=6)),
    )


@pytest.fixture(scope="module")
def pair(
    workers: SimpleNamespace, tiny_model: Path, heads: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """A prefill and a decode worker with one head."""
    folder, asked = tmp_path_factory.mktemp("pair"), speculative(heads.one)
    with (
        workers.run(folder, "prefill", tiny_model, speculative=asked) as prefill,
        workers.run(folder, "decode", tiny_model, speculative=asked) as decode,
    ):
        yield SimpleNamespace(prefill=workers.await_ready(prefill), decode=workers.await_ready(decode))


def test_answers_are_the_models(pair: SimpleNamespace, tiny_model: Path) -> None:
    prompt = prompt_of(70, seed=5)
    answer = pair.decode.complete(
        prompt, prefill=pair.prefill.kv, max_tokens=16, ignore_eos=True, return_token_ids=True
    )
    assert answer["choices"][0]["token_ids"] == oracle(tiny_model, prompt, 16)
    assert answer["headers"]["x-tandem-prefill-worker"] == "prefill-0"
    assert pair.decode.metric("tandem_worker_draft_tokens_total", source="head") > 10
    assert pair.decode.metric("tandem_worker_accepted_draft_tokens_total", source="head") >= 0
    assert pair.decode.metric("tandem_worker_memory_bytes", kind="guesses") > 0, "what the head has read"


def test_workers_with_unlike_heads_exchange_no_blocks(
    pair: SimpleNamespace, workers: SimpleNamespace, tiny_model: Path, heads: SimpleNamespace, tmp_path: Path
) -> None:
    """The shapes of their blocks are the same, and what they mean is not."""
    with workers.run(tmp_path, "prefill", tiny_model, speculative=speculative(heads.other)) as unlike:
        workers.await_ready(unlike)
        prompt = prompt_of(90, seed=6)
        answer = pair.decode.complete(prompt, prefill=unlike.kv, max_tokens=6, ignore_eos=True, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == oracle(tiny_model, prompt, 6)
    assert answer["headers"]["x-tandem-prefill-worker"] == "decode-0"
    assert pair.decode.logged("model digest")


def test_a_head_of_another_model_ends_the_start(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    wrong = save_head(tmp_path / "wrong", HeadSpec())
    with workers.run(tmp_path, "decode", tiny_model, speculative=speculative(wrong)) as worker:
        assert worker.process.wait(60) != 0
    (told,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.termination"))
    assert told["reason"] == "DraftMismatch"
    assert "its vocabulary has 61 tokens, the model's 257" in told["message"]


def test_a_head_that_cannot_be_fetched_names_its_own_fields(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub's answers are told in the words of a model's."""

    def refuse(source: ModelSource, token: str | None, *_: Any) -> Path:
        raise StartupError("AccessDenied", f"{source.uri} denies {token}. Check spec.model.secretRef.")

    monkeypatch.setattr("tandem_worker.model.sources.resolve.resolve_model", refuse)
    head = ModelSource(uri="hf://org/head")
    asked = SpeculativeConfig(method="Draft", draft=head)
    config = WorkerConfig(
        model_name="m", served_name="m", role=Role.UNIFIED, revision="r", model=head, speculative=asked
    )
    with pytest.raises(StartupError, match=r"The draft head .* denies own\. Check spec\.engine\.speculative\.draft\.s"):
        resolve_draft(config, "own")


@pytest.fixture(scope="module")
def repeating(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model that says a token again every other time, and a head that knows that."""
    folder = tmp_path_factory.mktemp("repeating")
    shutil.copytree(tiny_model, folder / "model")
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").copy_(model.get_parameter("model.embed_tokens.weight"))
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.04)
    model.save_pretrained(folder / "model")
    tensors = copycat(folder / "model", SPEC)
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        tensors[name] = 0.04 * tensors[name]
    return SimpleNamespace(model=folder / "model", head=save_head(folder / "head", SPEC, tensors))


@pytest.mark.full
@SPLITS
def test_after_remote_prefills_a_head_is_right_as_often(
    workers: SimpleNamespace,
    repeating: SimpleNamespace,
    tmp_path: Path,
    prefill: dict[str, int],
    decode: dict[str, int],
) -> None:
    """What it keeps of prompts comes along, cut anew where groups are split in other ways."""
    rates = compare_right(workers, tmp_path, repeating.model, speculative(repeating.head), prefill, decode)
    assert 0.1 < rates[0] < 0.9
    assert abs(rates[0] - rates[1]) <= 0.01
