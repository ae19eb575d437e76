"""transformers' `generate` and its continuous batching in a process of its own: the baselines of `bench.engine`.

The process loads the model once and answers one job at a time over a pipe, so baseline and Tandem take turns on the
same cores and neither pays the other's start.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """Generate exactly `new_tokens` for each prompt: equally long ones as one batch, or by continuous batching."""

    prompts: list[list[int]]
    new_tokens: int
    continuous: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one job: on the clock, and of all threads together."""

    wall: float
    cpu: float


def generate(model: Any, job: Job) -> None:
    import torch

    tokens = torch.tensor(job.prompts)
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        min_new_tokens=job.new_tokens,
        max_new_tokens=job.new_tokens,
        pad_token_id=0,
    )


def generate_continuously(model: Any, job: Job) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=job.new_tokens, do_sample=False, pad_token_id=0)
    answers = model.generate_batch(job.prompts, generation_config=config, warmup=False)
    produced = sum(len(answer.generated_tokens) for answer in answers.values())
    if produced != len(job.prompts) * job.new_tokens:
        raise RuntimeError(f"asked for {job.new_tokens} tokens each, got {produced} for {len(job.prompts)} prompts")


def serve(pipe: Connection, model_path: str, file_name: str, dtype: str, threads: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    torch.set_num_threads(threads)
    # Dequantized, as Tandem does it: left packed, every product is cast to float32 and the baseline is 8 times slower.
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_path, gguf_file=file_name, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
    )
    model.eval()
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        wall, cpu = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            (generate_continuously if job.continuous else generate)(model, job)
        pipe.send(Cost(time.perf_counter() - wall, time.process_time() - cpu))


class Baseline:
    """Handle on the process. Use as a context manager."""

    def __init__(self, model_path: str, file_name: str, dtype: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, model_path, file_name, dtype, threads), daemon=True)

    def __enter__(self) -> Baseline:
        self._process.start()
        self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join(10)

    def run(self, prompts: list[list[int]], new_tokens: int, *, continuous: bool = False) -> Cost:
        """What one call cost."""
        self._pipe.send(Job(prompts, new_tokens, continuous))
        return self._pipe.recv()
