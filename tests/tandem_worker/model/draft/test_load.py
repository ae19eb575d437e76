"""Heads that cannot be computed, or belong to another model, are refused in a sentence when they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tandem_worker.host.errors import StartupError
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.draft.load import check_draft, load_draft
from tandem_worker.model.load import load_model, open_checkpoint
from tandem_worker.parallel.context import ParallelContext
from tandem_worker.transfer.layout import KVLayout

from tests.tandem_worker.model.draft.heads import HeadSpec, draw_tensors, head_config, save_head, save_target

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float32)


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("config", "reason", "message"),
    [
        ({"vocab_size": 60}, "DraftMismatch", "its vocabulary has 60 tokens, the model's 61"),
        ({"hidden_size": 32, "head_dim": 16}, "DraftMismatch", "states of width 32, the model's have 64"),
        ({"target_hidden_size": 128}, "DraftMismatch", "states of width 128, the model's have 64"),
        ({"num_hidden_layers": 2}, "DraftUnsupported", "num_hidden_layers is 2"),
        ({"draft_vocab_size": 62}, "DraftUnsupported", "draft_vocab_size is 62, of a vocabulary of 61"),
        ({"quantization_config": {"quant_method": "fp8"}}, "DraftUnsupported", "it is quantized"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "DraftUnsupported", "use_aux_hidden_state is False"),
        ({"eagle_config": {"a_new_switch": 1}}, "DraftUnsupported", "eagle_config.a_new_switch is 1"),
        ({"eagle_config": 3}, "DraftUnsupported", "must be an object"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, "DraftMismatch", "different ones of the model's 7"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 1, 5]}, "DraftMismatch", "in ascending order"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "ConfigInvalid", "must be a list of whole numbers"),
        ({"sliding_window": 128}, "UnsupportedConfig", "sliding_window is 128"),
        ({"model_type": "qwen3"}, "UnsupportedConfig", "model_type is 'qwen3'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "UnsupportedConfig", "rope_type is 'dynamic'"),
        ({"architectures": None}, "ConfigInvalid", "names no architecture"),
    ],
)
def test_configurations_that_do_not_fit(
    model: CausalLM, folder: Path, tmp_path: Path, config: dict[str, Any], reason: str, message: str
) -> None:
    head = save_head(tmp_path / "head", HeadSpec(), **config)
    for load in (lambda: load_draft(head, model, head), lambda: check_draft(head, open_checkpoint(folder)[0])):
        with pytest.raises(StartupError, match=message) as refusal:
            load()
        assert refusal.value.reason == reason
        assert str(refusal.value).startswith("The draft head")


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        (without("fc.weight"), "WeightsIncomplete", "lacks tensor fc.weight"),
        (without("midlayer.hidden_norm.weight"), "WeightsIncomplete", "lacks tensor layers.0.hidden_norm.weight"),
        (without("lm_head.weight"), "WeightsIncomplete", "lacks tensor lm_head.weight"),
        (without("norm.weight"), "WeightsIncomplete", "lacks tensor norm.weight"),
        (without("d2t"), "WeightsIncomplete", "no d2t that says which"),
        (put("fc.weight", torch.zeros(64, 128)), "WeightsShapeMismatch", r"shape \[64, 128\].*asks for \[64, 192\]"),
        (put("midlayer.self_attn.q_proj.weight", torch.zeros(64, 64)), "WeightsShapeMismatch", r"\[64, 64\]"),
        (put("d2t", torch.zeros(39, dtype=torch.int64)), "WeightsShapeMismatch", r"d2t has shape \[39\]"),
        (put("d2t", torch.full((40,), 30)), "WeightsShapeMismatch", "not in the model's vocabulary of 61"),
        (put("d2t", torch.full((40,), -1)), "WeightsShapeMismatch", "not in the model's vocabulary of 61"),
        (put("d2t", torch.zeros(40, dtype=torch.int64)), "WeightsShapeMismatch", "tokens that t2d leaves out"),
        (put("t2d", torch.ones(60, dtype=torch.bool)), "WeightsShapeMismatch", r"t2d has shape \[60\]"),
        (put("midlayer.self_attn.q_norm.weight", torch.ones(16)), "DraftUnsupported", "self_attn.q_norm.weight"),
        (put("fc_norm.0.weight", torch.ones(64)), "DraftUnsupported", "lacks the switch that they belong to"),
        (put("layers.0.extra.weight", torch.ones(4)), "DraftUnsupported", "both of the layouts"),
        (put("layers.1.mlp.up_proj.weight", torch.ones(4, 4)), "DraftUnsupported", "layers.1.mlp.up_proj.weight"),
    ],
)
def test_tensors_that_do_not_fit(model: CausalLM, tmp_path: Path, change: Change, reason: str, message: str) -> None:
    tensors = draw_tensors(HeadSpec())
    change(tensors)
    head = save_head(tmp_path / "head", HeadSpec(), tensors)
    with pytest.raises(StartupError, match=message) as refusal:
        load_draft(head, model, head)
    assert refusal.value.reason == reason
    assert str(refusal.value).startswith("The draft head")


def test_a_head_of_another_width_brings_its_embedding(model: CausalLM, tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", HeadSpec(hidden_size=96))
    with pytest.raises(StartupError, match=r"no embed_tokens\.weight, and the model's embedding has 64 elements"):
        load_draft(head, model, head)


@pytest.mark.parametrize("kind", ["nothing", "no folder", "a folder of a model", "a broken file"])
def test_what_is_no_head_at_all(model: CausalLM, folder: Path, tmp_path: Path, kind: str) -> None:
    head = tmp_path / "head"
    if kind == "a folder of a model":
        head = folder
    elif kind != "no folder":
        head.mkdir()
    if kind == "a broken file":
        save_head(head, HeadSpec())
        (head / "model.safetensors").write_bytes(b"\x40")
    with pytest.raises(StartupError, match=r"^The draft"):
        load_draft(head, model, head)


def test_a_speculator_of_another_algorithm_is_refused(model: CausalLM, tmp_path: Path) -> None:
    spec = HeadSpec(prefix="layers.0.", nested=True)
    save_head(tmp_path, spec, speculators_model_type="dflash", mask_token_id=3)
    with pytest.raises(StartupError, match=r"speculators_model_type is 'dflash'.*mask_token_id is 3"):
        load_draft(tmp_path, model, tmp_path)
    assert head_config(spec)["transformer_layer_config"]["num_hidden_layers"] == 1


def test_shards_of_a_head_are_one(model: CausalLM, tmp_path: Path) -> None:
    whole, parts = save_head(tmp_path / "whole", HeadSpec()), save_head(tmp_path / "parts", HeadSpec())
    tensors = draw_tensors(HeadSpec())
    names = sorted(tensors)
    for number, some in enumerate((names[:5], names[5:]), start=1):
        save_file({name: tensors[name] for name in some}, parts / f"model-0000{number}-of-00002.safetensors")
    (parts / "model.safetensors").unlink()
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    heads = [load_draft(each, model, each).head for each in (whole, parts)]
    rows = [head.enter(torch.tensor([1, 2, 3]), states)[0] for head in heads if head is not None]
    assert torch.equal(*rows)


def test_blocks_with_a_head_are_other_blocks(model: CausalLM, tmp_path: Path) -> None:
    drafted = load_draft(save_head(tmp_path / "head", HeadSpec()), model, tmp_path)
    wide = load_draft(save_head(tmp_path / "wide", HeadSpec(hidden_size=96, own_embedding=True)), model, tmp_path)
    layouts = [KVLayout.of(each.kv_cache_spec(16)).fingerprint for each in (model, drafted, wide)]
    assert layouts == [
        "v1/float32/16/7x(2,h2,16,16)",
        "v1/float32/16/8x(2,h2,16,16)+1x(64)",
        "v1/float32/16/8x(2,h2,16,16)+1x(96)",
    ]


@pytest.mark.parametrize(
    ("context", "spec", "reason", "message"),
    [
        (
            ParallelContext(tp_rank=1, tp_size=4),
            HeadSpec(settings={"num_attention_heads": 2, "head_dim": 32}),
            "ParallelismInvalid",
            "2 attention heads with 2 KV heads cannot be split over 4",
        ),
        (
            ParallelContext(tp_rank=1, tp_size=2),
            HeadSpec(settings={"intermediate_size": 111}),
            "ParallelismInvalid",
            "intermediate_size",
        ),
        (ParallelContext(pp_rank=1, pp_size=2), HeadSpec(norm_before_fc=True), "DraftUnsupported", "norm_before_fc"),
    ],
    ids=["attention heads", "intermediate width", "one norm for all stages"],
)
def test_heads_that_a_group_cannot_share(
    folder: Path, tmp_path: Path, context: ParallelContext, spec: HeadSpec, reason: str, message: str
) -> None:
    share = load_model(folder, device=torch.device("cpu"), dtype=torch.float32, context=context)
    with pytest.raises(StartupError, match=message) as refusal:
        load_draft(save_head(tmp_path / "head", spec), share, folder)
    assert refusal.value.reason == reason
    assert str(refusal.value).startswith("The draft head")


def test_a_head_in_stages_has_tensors_of_its_own_alone(folder: Path, tmp_path: Path) -> None:
    """Columns of the other stages are theirs, but what nobody computes with is refused as ever."""
    last = ParallelContext(pp_rank=1, pp_size=2)
    share = load_model(folder, device=torch.device("cpu"), dtype=torch.float32, context=last)
    spec = HeadSpec(fc_norm=True)
    drafted = load_draft(save_head(tmp_path / "head", spec), share, folder)
    assert drafted.head is not None
    assert KVLayout.of(drafted.kv_cache_spec(16)).fingerprint == "v1/float32/16/4x(2,h2,16,16)+1x(64)"
    tensors = draw_tensors(spec) | {"midlayer.self_attn.q_norm.weight": torch.ones(16)}
    with pytest.raises(StartupError, match=r"self_attn\.q_norm\.weight"):
        load_draft(save_head(tmp_path / "more", spec, tensors), share, folder)
