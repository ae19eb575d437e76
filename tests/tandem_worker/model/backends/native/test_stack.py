"""Layers in one call give the bits of layers computed kernel by kernel, and only layers that qualify are taken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tandem_worker.model.backends import native
from tandem_worker.model.backends.contract import BackendName
from tandem_worker.model.layers.pre_norm import LayerStack, Taps
from tandem_worker.model.layers.step import Step
from tandem_worker.model.load import load_model
from transformers import GptOssConfig, Llama4TextConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

pytestmark = pytest.mark.skipif(native.find_obstacle() is not None, reason=str(native.find_obstacle()))

VOCABULARY = 41
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
MIXTURE: dict[str, Any] = {"num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def llama_config(**changes: Any) -> Any:
    shape: dict[str, Any] = COMMON | changes
    return LlamaConfig(**shape)


EXPERTS = "its MLP is a mixture of experts"
CONFIGS: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "llama": (llama_config, {}),
    "llama with biases": (lambda: llama_config(attention_bias=True, mlp_bias=True), {}),
    "qwen3 with windows": (
        lambda: Qwen3Config(**COMMON, use_sliding_window=True, sliding_window=21, max_window_layers=1),
        {},
    ),
    "qwen3_moe, its second layer alone": (
        lambda: Qwen3MoeConfig(**COMMON, num_experts=4, moe_intermediate_size=16, mlp_only_layers=[0, 2], **MIXTURE),
        {EXPERTS: 1},
    ),
    "narrow heads": (
        lambda: llama_config(head_dim=8),
        {"the width of its heads is no multiple of 16": 3},
    ),
    "narrow MLP": (
        lambda: llama_config(intermediate_size=80),
        {"the width of its MLP is no multiple of 64": 3},
    ),
    "odd hidden width": (
        lambda: llama_config(hidden_size=51, num_attention_heads=3, num_key_value_heads=1),
        {"its matrices have another layout": 3},
    ),
    "gpt_oss": (
        lambda: GptOssConfig(**COMMON, **MIXTURE, num_local_experts=4, sliding_window=21),
        {EXPERTS: 3},
    ),
    "llama4": (
        lambda: Llama4TextConfig(
            **COMMON, **MIXTURE, intermediate_size_mlp=64, num_local_experts=4, attention_chunk_size=60,
            no_rope_layers=[1, 0, 1], interleave_moe_layer_step=1, floor_scale=6,
        ),
        {EXPERTS: 3},
    ),
}  # fmt: skip


class Twins:
    """One model, by its stack and layer by layer, each with a cache of its own."""

    def __init__(self, folder: Path, paged_sequences: Any, weights: Any = "Auto") -> None:
        model: Any = load_model(
            folder, device=torch.device("cpu"), dtype=torch.bfloat16, backend=BackendName.NATIVE, weights=weights
        )
        self.model, self.stack = model, model._stack
        self.apart = LayerStack(model._stack.layers)
        self.runs = [paged_sequences(model, seed=3), paged_sequences(model, seed=3)]

    def add(self) -> int:
        first, _second = (run.add() for run in self.runs)
        return first

    def step(self, new: dict[int, list[int]], on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Logits, after both ways were compared in every bit, their caches too."""
        self.model._stack = self.apart
        expected = self.runs[1].step(new)
        self.model._stack = self.stack
        logits = self.runs[0].step(new, on_layer)
        assert torch.equal(logits, expected)
        for layer, other in zip(self.runs[0].cache.layers, self.runs[1].cache.layers, strict=True):
            assert torch.equal(layer.view(torch.int16), other.view(torch.int16))
        return logits


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("weights", ["Plain", "Lossless"])
def test_bits_are_those_of_layers_kernel_by_kernel(
    family: str, weights: str, save_random_model: Any, paged_sequences: Any, tmp_path: Path
) -> None:
    """Prompts in chunks, decodes, and both in one step; layers that are not taken stand between those that are."""
    if weights == "Lossless" and native.find_lossless_obstacle() is not None:
        pytest.skip(str(native.find_lossless_obstacle()))
    config, apart = CONFIGS[family]
    save_random_model(config())
    twins = Twins(tmp_path, paged_sequences, weights)
    assert dict(twins.stack.obstacles) == apart
    one, two, three = twins.add(), twins.add(), twins.add()
    twins.step({one: tokens(1, 1)})
    twins.step({one: tokens(30, 2), two: tokens(5, 3)})
    twins.step({one: [7], two: [9], three: tokens(70, 4)})
    for token in range(5, 9):
        twins.step({one: [token], two: [token], three: [token]})
    twins.step({three: tokens(4, 5)})


@given(data=st.data())
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_bits_at_any_shape(data: st.DataObject, save_random_model: Any, paged_sequences: Any, tmp_path: Path) -> None:
    draw = data.draw
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    config = llama_config(
        hidden_size=2 * num_kv_heads * group * draw(st.integers(1, 9)),
        intermediate_size=64 * draw(st.integers(1, 3)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_key_value_heads=num_kv_heads,
        num_attention_heads=num_kv_heads * group,
        head_dim=16 * draw(st.integers(1, 4)),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
    )
    save_random_model(config)
    twins = Twins(tmp_path, paged_sequences)
    assert not twins.stack.obstacles
    sequences = [twins.add() for _ in range(draw(st.integers(1, 4)))]
    for turn in range(draw(st.integers(1, 4))):
        some = draw(st.lists(st.sampled_from(sequences), min_size=1, unique=True))
        twins.step({sequence: tokens(draw(st.integers(1, 19)), turn) for sequence in some})


@pytest.fixture
def llama(save_random_model: Any, paged_sequences: Any, tmp_path: Path) -> Twins:
    save_random_model(llama_config())
    return Twins(tmp_path, paged_sequences)


def enter(llama: Twins) -> tuple[Step, torch.Tensor, list[torch.Tensor]]:
    """A step of nine tokens, what its layers are given, and their blocks."""
    run = llama.runs[0]
    batch = run.batch({run.add(): tokens(9, 1)})
    with torch.inference_mode():
        return llama.model.begin_step(batch, run.block_size), llama.model._embedding(batch.token_ids), run.cache.layers


def test_the_stream_between_any_two_layers_is_there_for_whoever_asks(llama: Twins) -> None:
    """In two calls the layers give what they give in one, and what they are given stays as it is."""
    step, entered, layers = enter(llama)
    with torch.inference_mode():
        whole = llama.stack.forward(entered, step, layers)
        for cut in range(4):
            between = llama.stack.forward(entered, step, layers, end=cut)
            kept = between.clone()
            assert torch.equal(between, llama.apart.forward(entered, step, layers, end=cut))
            assert torch.equal(llama.stack.forward(between, step, layers, cut), whole)
            assert torch.equal(between, kept)
        assert torch.equal(entered, llama.model._embedding(step.batch.token_ids))


@pytest.mark.parametrize("places", [(0, 1, 2), (3, 1), (2, 0, 3), ()], ids=str)
def test_streams_are_taken_out_of_one_call(llama: Twins, places: tuple[int, ...]) -> None:
    """In the order in which they are asked for, whatever the rows stand between."""
    step, entered, layers = enter(llama)
    with torch.inference_mode():
        width = entered.shape[1]
        wanted = [llama.apart.forward(entered, step, layers, end=place) for place in places]
        for stack in (llama.stack, llama.apart):
            around = torch.full((len(entered), len(places) * width + 3), -7.0, dtype=entered.dtype)
            taken = Taps(places, around[:, : len(places) * width])
            assert torch.equal(
                stack.forward(entered, step, layers, taps=taken), llama.stack.forward(entered, step, layers)
            )
            for place, stream in enumerate(wanted):
                assert torch.equal(taken.features[:, place * width : (place + 1) * width], stream)
            assert bool((around[:, -3:] == -7.0).all())


def test_whoever_listens_is_told_of_each_layer_and_may_end_the_step(llama: Twins) -> None:
    told: list[int] = []
    llama.step({llama.add(): tokens(9, 1)}, told.append)
    assert told == [0, 1, 2]

    class Enough(Exception):
        pass

    def stop(layer: int) -> None:
        if layer == 1:
            raise Enough

    run = llama.runs[0]
    before = run.cache.layers[2].clone()
    with pytest.raises(Enough):
        run.step({run.add(): tokens(9, 1)}, stop)
    assert torch.equal(run.cache.layers[2], before)


def test_it_is_said_at_load_how_many_layers_are_computed_together(
    save_random_model: Any, paged_sequences: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, apart = CONFIGS["qwen3_moe, its second layer alone"]
    save_random_model(config())
    with caplog.at_level(logging.INFO):
        Twins(tmp_path, paged_sequences)
    (record,) = (record for record in caplog.records if record.getMessage() == "layers are computed together")
    assert (record.__dict__["layers"], record.__dict__["apart"]) == (2, apart)
