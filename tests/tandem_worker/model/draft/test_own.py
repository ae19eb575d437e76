"""A checkpoint's own module for multi-token prediction: when it is a draft head, and what is said where it is not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tandem_api.launch import ModelSource, SpeculativeConfig
from tandem_worker.host.errors import StartupError
from tandem_worker.model.assembly.decoder import DecoderLM
from tandem_worker.model.contract import CausalLM, allocate_kv_cache, has_head
from tandem_worker.model.draft.attach import attach_head
from tandem_worker.model.draft.drafted import DraftedLM
from tandem_worker.model.draft.own import check_own_head
from tandem_worker.model.load import load_model, open_checkpoint
from tandem_worker.parallel.context import SINGLE, ParallelContext
from tandem_worker.transfer.layout import KVLayout

from tests.tandem_worker.families import save_family
from tests.tandem_worker.model.draft.heads import save_target
from tests.tandem_worker.model.draft.modules import LAYERS, NAME, SPECS, VOCAB, ModuleSpec, Tensors, save_model
from tests.tandem_worker.model.draft.test_drafted import step

CPU = torch.device("cpu")
DRAFT, AUTO = SpeculativeConfig(method="Draft"), SpeculativeConfig()
Change = Callable[[Tensors], Any]


def load(
    folder: Path, config: SpeculativeConfig, context: ParallelContext = SINGLE, *, is_exact: bool = False
) -> CausalLM:
    """`is_exact`: as if a row of latents had the same bits in any company."""
    model = load_model(folder, device=CPU, dtype=torch.float32, context=context)
    if is_exact:
        assert isinstance(model, DecoderLM)
        model.inexact_layers = model.inexact = None
    return attach_head(model, folder, None, config)


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(NAME + name)


def put(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({NAME + name: torch.ones(shape)})


def test_draft_takes_it_and_blocks_have_its_layers(tmp_path: Path) -> None:
    folder = save_model(tmp_path, SPECS["experts"])
    plain, drafted = load(folder, SpeculativeConfig(method="Off")), load(folder, DRAFT)
    assert isinstance(drafted, DraftedLM)
    assert has_head(drafted)
    assert not has_head(plain)
    own, more = plain.kv_cache_spec(4).layers, drafted.kv_cache_spec(4).layers
    assert more[: len(own)] == own
    assert [layer.block_shape for layer in more[len(own) :]] == [(4, 16 + 8), (48,)]
    one, other = (KVLayout.of(each.kv_cache_spec(4)).fingerprint for each in (plain, drafted))
    assert one != other, "workers with and without it exchange no blocks"


@pytest.mark.parametrize("method", ["Off", "Lookup"])
def test_other_methods_leave_it_out(tmp_path: Path, method: Any) -> None:
    assert not has_head(load(save_model(tmp_path, SPECS["experts"]), SpeculativeConfig(method=method)))


def test_a_head_that_is_named_comes_first(tmp_path: Path) -> None:
    """It is the one of another model, which is told of it."""
    folder, config = save_model(tmp_path / "model", SPECS["experts"]), AUTO
    model = load_model(folder, device=CPU, dtype=torch.float32)
    named = SpeculativeConfig(draft=ModelSource(uri="file:///head"))
    assert not named.may_use_own_head
    assert config.may_use_own_head
    with pytest.raises(StartupError, match="The draft at"):
        attach_head(model, folder, tmp_path / "nothing", named)


def test_auto_takes_it_where_answers_stay_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_model(tmp_path, SPECS["two modules"])
    with caplog.at_level(logging.INFO):
        assert not has_head(load(folder, AUTO))
    (record,) = (each for each in caplog.records if "multi-token prediction" in each.message)
    assert "is left out" in record.message
    assert record.levelno == logging.INFO
    assert vars(record)["why"].startswith("answers might differ from those without it, because")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert has_head(load(folder, AUTO, is_exact=True))
    (record,) = (each for each in caplog.records if "multi-token prediction" in each.message)
    assert record.message == "the model's own module for multi-token prediction is its draft head"
    assert (vars(record)["layer"], vars(record)["modules_left_out"]) == (LAYERS, 1)


DAMAGES = {
    "a norm is missing": (without("enorm.weight"), "WeightsIncomplete", f"lacks tensor {NAME}enorm.weight"),
    "the join is missing": (without("eh_proj.weight"), "WeightsIncomplete", f"lacks tensor {NAME}eh_proj.weight"),
    "the last norm is missing": (without("shared_head.norm.weight"), "WeightsIncomplete", "shared_head.norm.weight"),
    "an expert is missing": (without("mlp.experts.5.up_proj.weight"), "WeightsIncomplete", "experts.5.up_proj.weight"),
    "another width": (put("eh_proj.weight", 48, 48), "WeightsShapeMismatch", r"\[48, 48\].*asks for \[48, 96\]"),
    "another vocabulary": (put("embed_tokens.weight", 90, 48), "WeightsShapeMismatch", r"asks for \[97, 48\]"),
    "something more": (put("self_attn.q_norm.weight", 12), "UnusedWeights", f"{NAME}self_attn.q_norm.weight"),
    "all of it": (
        lambda tensors: [tensors.pop(key) for key in list(tensors) if key.startswith(NAME)],
        "WeightsIncomplete",
        f"lacks tensor {NAME}",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_module_that_is_damaged_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """It ends a start that asks for it, on each rank alike; Auto goes on without and says why."""
    change, reason, message = DAMAGES[kind]
    folder = save_model(tmp_path, ModuleSpec(change=change))
    for context in (SINGLE, ParallelContext(pp_rank=0, pp_size=2)):
        with pytest.raises(StartupError, match=message) as refusal:
            load(folder, DRAFT, context)
        assert refusal.value.reason == reason
        assert str(refusal.value).startswith("The model's own module for multi-token prediction")
        assert "Name a head in engine.speculative.draft" in str(refusal.value)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert not has_head(load(folder, AUTO, is_exact=True))
    (record,) = (each for each in caplog.records if "multi-token prediction" in each.message)
    assert str(refusal.value).startswith(vars(record)["why"])
    assert "engine.speculative" not in vars(record)["why"]
    assert record.levelno == logging.WARNING


@pytest.mark.parametrize("kind", ["no modules", "another family"])
def test_draft_without_anybody_to_guess_is_refused(tmp_path: Path, kind: str) -> None:
    if kind == "no modules":
        save_family("deepseek-v3", tmp_path)
        says = "has num_nextn_predict_layers 0"
    else:
        save_target(tmp_path)
        says = "is not of an architecture that has them"
    for ask in (lambda: load(tmp_path, DRAFT), lambda: check_own_head(*open_checkpoint(tmp_path))):
        with pytest.raises(StartupError, match=says) as refusal:
            ask()
        assert refusal.value.reason == "DraftUnsupported"
    assert not has_head(load(tmp_path, AUTO))


@pytest.mark.parametrize("count", [-1, 65, 10**9])
def test_a_number_of_modules_that_no_model_has_is_refused(tmp_path: Path, count: int) -> None:
    """Each of a thousand million would be looked for among the tensors."""
    save_family("deepseek-v3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
    with pytest.raises(StartupError, match=f"num_nextn_predict_layers is {count}; it must be from 0 to 64"):
        load(tmp_path, AUTO)


def test_what_the_checkpoint_repeats_is_shared_with_the_model(tmp_path: Path) -> None:
    repeated, other = (
        load(save_model(tmp_path / kind, SPECS[kind]), DRAFT) for kind in ("experts", "a vocabulary of its own")
    )
    for drafted, is_shared in ((repeated, True), (other, False)):
        assert isinstance(drafted, DraftedLM)
        head: Any = drafted.head
        assert (head._output is drafted._model.output) == is_shared
        assert (head._embed == drafted._model.embed) == is_shared


def test_the_language_model_of_a_multimodal_one_has_it(tmp_path: Path) -> None:
    """Kimi K2.5 puts the language model's name before those of its tensors."""

    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)

    folder = save_model(tmp_path, ModuleSpec(change=rename))
    inner = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": inner}
    (folder / "config.json").write_text(json.dumps(outer))
    assert has_head(load(folder, DRAFT))


def test_logits_are_those_of_the_model_alone(tmp_path: Path) -> None:
    folder = save_model(tmp_path, SPECS["experts"])
    text = [number % VOCAB for number in range(0, 90, 3)]
    told = []
    for config in (DRAFT, SpeculativeConfig(method="Off")):
        model: Any = load(folder, config)
        cache = allocate_kv_cache(model.kv_cache_spec(4), 12, CPU)
        told.append(step(model, cache, text, 0, 30, list(range(1, 9))))
    assert torch.equal(*told)
