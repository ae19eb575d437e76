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


def test_finds_the_answer_to_the_demo_question_likely(gguf: Path, model: CausalLM, paged_sequences: Any) -> None:
    """What it likes best may differ with a CPU's arithmetic; that it likes the right words does not."""
    tokenizer = load_tokenizer(gguf)
    question = tokenizer.encode(render_chat(str(tokenizer.chat_template), QUESTION, add_generation_prompt=True))
    run = paged_sequences(model, block_size=16)
    run.add()
    logits = torch.empty(0)
    for start in range(0, len(question), 13):
        logits = run.step({0: question[start : start + 13]})
    for token in tokenizer.encode("The capital of France is Paris."):
        assert logits[0].log_softmax(-1)[token] > -2.5, tokenizer.decode([token])
        logits = run.step({0: [token]})


@pytest.mark.full
@torch.inference_mode()
def test_equals_transformers(
    gguf: Path, model: CausalLM, paged_sequences: Any, logits_error: Callable[[torch.Tensor, torch.Tensor], float]
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for length, chunk in ((1, 8), (16, 16), (33, 16), (200, 64)):
        tokens = torch.randint(100, 40000, (length,), generator=generator).tolist()
        after = torch.randint(100, 40000, (8,), generator=generator).tolist()
        run = paged_sequences(model, block_size=16)
        run.add()
        got = torch.cat([run.step({0: tokens[start : start + chunk]}) for start in range(0, length, chunk)])
        got = torch.cat([got, *(run.step({0: [token]}) for token in after)])
        expected = reference(torch.tensor([tokens + after])).logits[0]
        places = [min(start + chunk, length) - 1 for start in range(0, length, chunk)]
        places += range(length, length + len(after))
        assert logits_error(got, expected[places]) < 1e-3
