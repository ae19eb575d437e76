"""The engine over a real architecture: greedy tokens equal transformers', in whatever way the steps are cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.load import load_model
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.tandem_worker.engine.rig import Rig
from tests.tandem_worker.engine.wire import Wire

MakeRig = Callable[..., Rig]
VOCAB = 97
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Callable[[], CausalLM]]:
    """A transformers model with random weights, and what loads it into the worker: a model serves one engine."""
    folder: Path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    reference.save_pretrained(folder)
    return reference, lambda: load_model(folder, device=torch.device("cpu"), dtype=torch.float32)


def expected_tokens(reference: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def draw_prompts(count: int) -> list[list[int]]:
    rng = random.Random(4)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    lengths = [1, 4, 15, 16, 17, 32, 33, 48] + [rng.randint(1, 60) for _ in range(count - 8)]
    return [shared[: length // 2] + [rng.randrange(VOCAB) for _ in range(length - length // 2)] for length in lengths]


def test_tokens_equal_transformers_batched_chunked_cached_and_preempted(
    checkpoint: tuple[Any, Callable[[], CausalLM]], make_rig: MakeRig
) -> None:
    reference, load = checkpoint
    rig = make_rig(load(), num_blocks=30, scheduler={"max_batch_tokens": 24, "max_running_requests": 8})
    prompts = draw_prompts(16)
    for index, prompt in enumerate(prompts + prompts):  # the second time they are partly cached
        rig.submit(f"r{index}", prompt, NUM_TOKENS)
    rig.wait()
    for index, prompt in enumerate(prompts):
        expected = expected_tokens(reference, prompt)
        assert rig.out.tokens(f"r{index}") == expected
        assert rig.out.tokens(f"r{index + len(prompts)}") == expected
    assert rig.engine.stats().cached_tokens_total > 0


def test_tokens_equal_transformers_when_the_prompt_is_computed_elsewhere(
    checkpoint: tuple[Any, Callable[[], CausalLM]], make_rig: MakeRig
) -> None:
    reference, load = checkpoint
    prefill = make_rig(load(), num_blocks=60, scheduler={"max_batch_tokens": 24})
    decode = make_rig(load(), num_blocks=60, scheduler={"local_prefill_max_tokens": 2})
    Wire(prefill.engine, decode.engine)
    prompts = draw_prompts(12)
    for index, prompt in enumerate(prompts):
        decode.submit(f"r{index}", prompt, NUM_TOKENS, prefill_endpoints=("prefill-0:1",))
    decode.wait()
    for index, prompt in enumerate(prompts):
        assert decode.out.tokens(f"r{index}") == expected_tokens(reference, prompt)
    assert decode.engine.stats().prefills_remote_total > 5
