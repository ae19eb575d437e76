"""Every tensor of a checkpoint is used, or known to be of no use; otherwise the load is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tandem_worker.host.errors import StartupError
from tandem_worker.model.coverage import check_coverage, settle_output_matrix
from tandem_worker.model.families.registry import find_family
from tandem_worker.model.load import find_prefix, load_model, open_checkpoint
from tandem_worker.model.pooling import EmbeddingSpec, Pooling
from tandem_worker.parallel.context import ParallelContext

from tests.tandem_worker.families import FAMILIES, save_family
from tests.tandem_worker.model.checkpoint.test_checkpoints import write_gguf

CPU = torch.device("cpu")
Edit = Callable[[dict[str, torch.Tensor]], None]


def edit(folder: Path, change: Edit, **config: Any) -> None:
    """Rewrite the checkpoint with other tensors and keys."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **config}))


def add(**tensors: torch.Tensor) -> Edit:
    return lambda held: held.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})


CHECK = """
import sys
from pathlib import Path
import torch
from tandem_worker.model.coverage import check_coverage, settle_output_matrix
from tandem_worker.model.load import find_family, find_prefix, open_checkpoint
for folder in sys.argv[1:]:
    config, source = open_checkpoint(Path(folder))
    prefix = find_prefix(source)
    with torch.inference_mode():
        config = settle_output_matrix(config, source, prefix)
        check_coverage(config, find_family(config.architecture), source, prefix)
assert "torch._dynamo" not in sys.modules
"""


def test_no_family_imports_compilers(tmp_path: Path) -> None:
    """A torch that is imported whole computes some shapes in Python, and imports its compilers with the first: 5 s."""
    for family in FAMILIES:
        save_family(family, tmp_path / family)
    folders = [str(tmp_path / family) for family in FAMILIES]
    done = subprocess.run([sys.executable, "-c", CHECK, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def load(folder: Path, **options: Any) -> Any:
    return load_model(folder, device=CPU, dtype=torch.float32, **options)


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(StartupError) as caught:
        load(folder, **options)
    assert caught.value.reason == "UnusedWeights", str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_take_every_tensor_of_their_checkpoints(family: str, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    load(tmp_path)
    edit(tmp_path, add(model__layers__1__self_attn__k_scaler=torch.ones(2)))
    assert "model.layers.1.self_attn.k_scaler" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.q_proj.bias", "model.layers.0.mlp.down_proj.bias", "lm_head.bias"]
)
def test_a_bias_that_the_configuration_does_not_mention(name: str, tmp_path: Path) -> None:
    """Except of zeros, as some quantizers write them beside every matrix."""
    save_family("llama3", tmp_path)
    edit(tmp_path, lambda held: held.update({name: torch.zeros(48)}))
    load(tmp_path)
    edit(tmp_path, lambda held: held.update({name: torch.ones(48)}))
    assert name in refusal(tmp_path)


def test_some_of_many_are_named(tmp_path: Path) -> None:
    save_family("llama3", tmp_path)
    edit(tmp_path, lambda held: held.update({f"extra.{index}": torch.ones(1) for index in range(9)}))
    assert "extra.0, extra.1, extra.2, extra.3 and 5 more. Without them" in refusal(tmp_path)


def test_layers_beyond_those_of_the_configuration(tmp_path: Path) -> None:
    save_family("llama3", tmp_path)
    edit(tmp_path, lambda held: None, num_hidden_layers=2)
    assert "model.layers.2." in refusal(tmp_path)


def test_frequencies_follow_from_the_configuration(tmp_path: Path) -> None:
    save_family("llama3", tmp_path)
    edit(tmp_path, lambda held: held.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    load(tmp_path)


def test_prediction_layers_are_known_by_their_number(tmp_path: Path) -> None:
    save_family("deepseek-v3", tmp_path)
    extra = {"model.layers.3.eh_proj.weight": torch.ones(4), "model.layers.3.mlp.gate.weight": torch.ones(4)}
    edit(tmp_path, lambda held: held.update(extra), num_nextn_predict_layers=1)
    load(tmp_path)
    edit(tmp_path, lambda held: held.update({"model.layers.4.eh_proj.weight": torch.ones(4)}))
    assert "model.layers.4.eh_proj.weight." in refusal(tmp_path)
    edit(tmp_path, lambda held: held.pop("model.layers.4.eh_proj.weight"), num_nextn_predict_layers=0)
    assert "model.layers.3.eh_proj.weight" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("family", "architecture", "vision"),
    [
        ("llama4", "Llama4ForConditionalGeneration", "vision_model.layers.0.weight"),
        ("kimi-k2", "KimiK25ForConditionalGeneration", "vision_tower.blocks.0.weight"),
    ],
)
def test_vision_towers_are_left_out(family: str, architecture: str, vision: str, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(path).items()}
    save_file({**tensors, vision: torch.ones(2)}, path)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": text}))
    load(tmp_path)
    edit(tmp_path, lambda held: held.update({"language_model.model.adapter": torch.ones(2)}))
    assert "language_model.model.adapter." in refusal(tmp_path)
    edit(
        tmp_path,
        lambda held: (held.pop("language_model.model.adapter"), held.update({"audio.weight": torch.ones(1)}))[0],
    )
    assert "audio.weight" in refusal(tmp_path)


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_an_output_matrix_beside_a_tied_embedding(
    scale: float, paged_sequences: Any, logits_error: Any, tmp_path: Path
) -> None:
    """Used where it differs, as transformers does; where it is a copy the embedding serves for both."""
    from transformers import AutoModelForCausalLM

    save_family("smollm2", tmp_path)
    edit(tmp_path, lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"] * scale}))
    config, source = open_checkpoint(tmp_path)
    assert settle_output_matrix(config, source, "").tie_word_embeddings is (scale == 1.0)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    run = paged_sequences(load(tmp_path))
    run.add()
    with torch.inference_mode():
        expected = reference(torch.tensor([[5, 6, 7, 8]])).logits[0, -1]
    assert logits_error(run.step({0: [5, 6, 7, 8]})[0], expected) < 1e-5


def test_an_embedding_model_has_no_output_matrix(tmp_path: Path) -> None:
    save_family("qwen3", tmp_path)
    config, source = open_checkpoint(tmp_path)
    spec = EmbeddingSpec(pooling=Pooling.LAST, normalize=True, size=48)
    check_coverage(replace(config, embedding=spec), find_family(config.architecture), source, find_prefix(source))


@pytest.mark.parametrize("family", ["llama3", "smollm2", "qwen3-moe", "deepseek-v3", "llama4", "gpt-oss"])
def test_every_share_of_a_model_comes_to_the_same_answer(family: str, tmp_path: Path) -> None:
    """Stages hold some layers, the last one the output; expert and tensor ranks hold parts of tensors."""
    save_family(family, tmp_path)
    contexts = [
        ParallelContext(pp_size=2, pp_rank=0),
        ParallelContext(pp_size=2, pp_rank=1),
        ParallelContext(layers=range(1, 2)),
        ParallelContext(tp_size=2, tp_rank=1),
        ParallelContext(ep_size=2, ep_rank=1),
    ]
    for context in contexts:
        load(tmp_path, context=context)
    edit(tmp_path, add(model__layers__0__extra__weight=torch.ones(2)))
    for context in contexts:
        assert "model.layers.0.extra.weight" in refusal(tmp_path, context=context)


def test_a_missing_tensor_of_another_stage_is_found_before_anything_is_read(tmp_path: Path) -> None:
    save_family("llama3", tmp_path)
    edit(tmp_path, lambda held: held.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(StartupError, match=r"lacks tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        load(tmp_path, context=ParallelContext(pp_size=3, pp_rank=0))


def test_the_same_weights_in_another_layout_lie_beside_them(tmp_path: Path) -> None:
    save_family("llama3", tmp_path)
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    load(tmp_path)


def test_tensors_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, gguf.GGMLQuantizationType.F16, extra={"blk.0.attn_sub_norm.weight": np.ones(4, dtype=np.float32)})
    assert "blk.0.attn_sub_norm.weight" in refusal(path)
