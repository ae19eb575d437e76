"""Logits of several processes equal those of one, for every family and grid."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tandem_worker.parallel.shape import GroupShape, axis_ranks

from tests.tandem_worker.process.forking import Forker

PROGRAM = Path(__file__).with_name("rank_program.py")
VOCABULARY = 97
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
DENSE = ("llama", "qwen3")
SPARSE = ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text")


def family_config(family: str) -> Any:
    from transformers import AutoConfig

    own: dict[str, Any] = {
        "llama": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        "qwen3": {},
        "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "deepseek_v3": {
            **LATENT,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
        "gpt_oss": {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "llama4_text": {
            "num_local_experts": 4,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 8,
            "interleave_moe_layer_step": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    }[family]
    options = {**COMMON, **own}
    if family == "deepseek_v3":
        options.pop("head_dim")
    return AutoConfig.for_model(family, **options)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A small random model per family that a test asks for, its prompts and the logits of one process."""
    from transformers import AutoModelForCausalLM

    spec = importlib.util.spec_from_file_location("rank_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)

    def build(family: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(family)
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(family_config(family), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder)
        prompts = torch.randint(3, VOCABULARY, (2, 3, 20)).tolist()
        single = program.load(str(folder))
        expected = [program.run_steps(single, group) for group in prompts]
        return {"folder": str(folder), "prompts": prompts, "expected": expected}

    class Built(dict[str, dict[str, Any]]):
        def __missing__(self, family: str) -> dict[str, Any]:
            return self.setdefault(family, build(family))

    return Built()


def run_ranks(
    shape: dict[str, int], models: dict[str, dict[str, Any]], families: tuple[str, ...], out: Path, forker: Forker
) -> None:
    """Run the grid and compare every last stage's logits with those of one process."""
    job = {
        "shape": shape,
        "rendezvous": str(out / "rendezvous"),
        "out": str(out / "logits"),
        "models": [{key: models[family][key] for key in ("folder", "prompts")} for family in families],
    }
    path = out / "job.json"
    path.write_text(json.dumps(job))
    grid = GroupShape(**shape)
    log = out / "log"
    ranks = forker.start([str(path)], os.environ | {"OMP_NUM_THREADS": "1"}, log, program=PROGRAM)
    assert ranks.wait(280) == 0, log.read_text()
    for number, family in enumerate(families):
        for rank in range(grid.world_size):
            _, ep_rank, pp_rank, _ = grid.coordinates(rank)
            logits = torch.load(out / f"logits-{number}-{rank}.pt")
            if pp_rank < grid.pp - 1:
                assert logits.shape[1] == 0
                continue
            expected = models[family]["expected"][ep_rank]
            ratio = float((logits - expected).norm() / expected.norm())
            assert ratio < 1e-5, (family, shape, rank, ratio)
            assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    ("shape", "families"),
    [
        pytest.param({"tp": 2}, ("llama", "deepseek_v3"), id="TP2-quick"),
        pytest.param({"ep": 2}, ("deepseek_v3",), id="EP2-quick"),
        pytest.param({"tp": 2}, DENSE + SPARSE, id="TP2", marks=pytest.mark.full),
        pytest.param({"pp": 2}, DENSE + SPARSE, id="PP2", marks=pytest.mark.full),
        pytest.param({"ep": 2}, SPARSE, id="EP2", marks=pytest.mark.full),
        pytest.param({"tp": 2, "pp": 2}, DENSE + SPARSE, id="TP2xPP2", marks=pytest.mark.full),
        pytest.param({"tp": 2, "ep": 2}, SPARSE, id="TP2xEP2", marks=pytest.mark.full),
    ],
)
def test_equals_one_process(shape, families, models, tmp_path: Path, forker: Forker) -> None:
    run_ranks(shape, models, families, tmp_path, forker)


def test_every_rank_is_in_one_group_per_axis() -> None:
    shape = GroupShape(tp=2, ep=3, pp=2, dp=2)
    for axis, size in (("tp", 2), ("ep", 3), ("pp", 2), ("dp", 2)):
        groups = axis_ranks(shape, axis)
        assert {len(group) for group in groups} == {size}
        assert sorted(rank for group in groups for rank in group) == list(range(24))


def test_coordinates_are_the_inverse_of_rank() -> None:
    shape = GroupShape(tp=2, ep=3, pp=2, dp=2)
    assert [shape.rank(*shape.coordinates(rank)) for rank in range(24)] == list(range(24))


def test_every_lane_has_one_speaker_on_its_last_stage() -> None:
    shape = GroupShape(tp=2, ep=3, pp=2, dp=2)
    speakers = [shape.speaker(lane) for lane in range(shape.num_lanes)]
    assert [shape.lane(rank) for rank in speakers] == list(range(6))
    assert {(shape.coordinates(rank).tp, shape.coordinates(rank).pp) for rank in speakers} == {(0, 1)}
