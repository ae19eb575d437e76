"""Where a pipeline is cut."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.model.stages import StageCosts, balance_stages, estimate_costs, measure_costs
from transformers import AutoConfig, AutoModelForCausalLM

COST = st.floats(0.0, 100.0)


def cost_of_slowest_stage(costs: StageCosts, ends: tuple[int, ...]) -> float:
    starts = (0, *ends[:-1])
    stages = [sum(costs.layers[start:end]) for start, end in zip(starts, ends, strict=True)]
    stages[0] += costs.first
    stages[-1] += costs.last
    return max(stages)


@given(layers=st.lists(COST, min_size=1, max_size=9), first=COST, last=COST, data=st.data())
def test_no_other_cut_is_better(layers: list[float], first: float, last: float, data: st.DataObject) -> None:
    costs = StageCosts(layers=tuple(layers), first=first, last=last)
    num_stages = data.draw(st.integers(1, len(layers)))
    ends = balance_stages(costs, num_stages)
    assert len(ends) == num_stages
    assert ends[-1] == len(layers)
    assert all(before < after for before, after in itertools.pairwise((0, *ends)))
    cuts = itertools.combinations(range(1, len(layers)), num_stages - 1)
    best = min(cost_of_slowest_stage(costs, (*cut, len(layers))) for cut in cuts)
    assert cost_of_slowest_stage(costs, ends) == pytest.approx(best)


def test_a_costly_output_projection_leaves_its_stage_fewer_layers() -> None:
    costs = StageCosts(layers=(1.0,) * 8, first=0.0, last=2.0)
    assert balance_stages(costs, 2) == (5, 8)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot make 3 stages"):
        balance_stages(StageCosts(layers=(1.0, 1.0), first=0.0, last=0.0), 3)


def test_costs_of_a_model_with_two_kinds_of_layers(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, q_lora_rank=20, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10, n_routed_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=24, n_group=4, topk_group=2, first_k_dense_replace=1, num_nextn_predict_layers=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    measured = measure_costs(tmp_path, device=torch.device("cpu"), dtype=torch.float32, tp_size=2)
    assert measured.layers[1] == measured.layers[2] > 0, "layers of one kind are measured once"
    assert measured.layers[0] not in (0, measured.layers[1])
    assert measured.last > 0
    estimated = estimate_costs(tmp_path)
    assert estimated.layers[1] == estimated.layers[2] > estimated.layers[0]
    assert estimated.last == 97 * 48
