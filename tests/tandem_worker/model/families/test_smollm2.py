"""The demo model itself, from its GGUF file, against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.load import load_model
from tandem_worker.model.tokenization.template import render_chat
from tandem_worker.model.tokenizer import load_tokenizer

from e2e.model import find_model

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def gguf() -> Path:
    return find_model()


@pytest.fixture(scope="module")
def model(gguf: Path) -> CausalLM:
    return load_model(gguf, device=torch.device("cpu"), dtype=torch.float32)


def generate(model: CausalLM, paged_sequences: Any, tokens: list[int], count: int, chunk: int) -> list[int]:
    run = paged_sequences(model, block_size=16)
    run.add()
    logits = torch.empty(0)
    for start in range(0, len(tokens), chunk):
        logits = run.step({0: tokens[start : start + chunk]})
    answer: list[int] = []
    for _ in range(count):
        answer.append(int(logits[0].argmax()))
        logits = run.step({0: [answer[-1]]})
    return answer


def test_answers_the_demo_question(gguf: Path, model: CausalLM, paged_sequences: Any) -> None:
    tokenizer = load_tokenizer(gguf)
    prompt = render_chat(str(tokenizer.chat_template), QUESTION, add_generation_prompt=True)
    answer = generate(model, paged_sequences, tokenizer.encode(prompt), 8, chunk=13)
    assert tokenizer.decode(answer, skip_special_tokens=True).strip() == "The capital of France is Paris."


@pytest.mark.full
@pytest.mark.timeout(300)
def test_equals_transformers(
    gguf: Path, model: CausalLM, paged_sequences: Any, logits_error: Callable[[torch.Tensor, torch.Tensor], float]
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for length, chunk in ((1, 8), (16, 16), (33, 16), (200, 64)):
        tokens = torch.randint(100, 40000, (length,), generator=generator).tolist()
        expected = reference.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, length),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
        )
        assert generate(model, paged_sequences, tokens, 24, chunk) == expected[0, length:].tolist()
