"""transformers' `generate` and its continuous batching in a process of its own: the baselines of `bench.engine`.

The process loads the model once and answers one job at a time over a pipe, so baseline and Tandem take turns on the
same cores and neither pays the other's start. Its memory is bounded: what wants more is refused to it and not paid for
by whatever the kernel would kill. A process that ended is replaced for the next job.
"""

from __future__ import annotations

import logging
import multiprocessing
import resource
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PAGE_TOKENS = 256
"""Of a block of continuous batching, which holds all layers; a request here needs one."""


class BaselineError(Exception):
    """The baseline could not do a job."""


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
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(max_new_tokens=job.new_tokens, do_sample=False, pad_token_id=0)
    tokens = sum(map(len, job.prompts)) + len(job.prompts) * job.new_tokens
    # By itself it takes nine tenths of the machine's free memory for its cache.
    cache = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=len(job.prompts) + -(-tokens // PAGE_TOKENS),
        max_batch_tokens=max(256, sum(map(len, job.prompts))),
    )
    answers = model.generate_batch(
        job.prompts, generation_config=config, continuous_batching_config=cache, warmup=False
    )
    produced = sum(len(answer.generated_tokens) for answer in answers.values())
    if produced != len(job.prompts) * job.new_tokens:
        raise RuntimeError(f"asked for {job.new_tokens} tokens each, got {produced} for {len(job.prompts)} prompts")


def serve(pipe: Connection, model_path: str, file_name: str, dtype: str, threads: int, most_bytes: int) -> None:
    """`most_bytes` bounds what the process may write to of its own; a job that wants more is answered with why."""
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
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
        try:
            with torch.inference_mode():
                (generate_continuously if job.continuous else generate)(model, job)
        except Exception as error:  # whatever it is, the other rows can be measured
            pipe.send(f"{type(error).__name__}: {error}"[:500])
            continue
        pipe.send(Cost(time.perf_counter() - wall, time.process_time() - cpu))


class Baseline:
    """Handle on the process. Use as a context manager."""

    def __init__(self, model_path: str, file_name: str, dtype: str, threads: int, *, most_bytes: int) -> None:
        self._arguments = (model_path, file_name, dtype, threads, most_bytes)
        self._most_bytes = most_bytes

    def __enter__(self) -> Baseline:
        self._start()
        return self

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()  # else the end of the process would not be seen
        self._receive()

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(10)

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join(10)
            raise BaselineError(
                f"The baseline's process ended (exit code {self._process.exitcode}); it may use "
                f"{self._most_bytes / 2**30:.1f} GiB."
            ) from None

    def run(self, prompts: list[list[int]], new_tokens: int, *, continuous: bool = False) -> Cost:
        """What one call cost. Raises BaselineError, after which others may be tried."""
        if not self._process.is_alive():
            self._start()
        self._pipe.send(Job(prompts, new_tokens, continuous))
        answer = self._receive()
        if isinstance(answer, str):
            raise BaselineError(f"The baseline, which may use {self._most_bytes / 2**30:.1f} GiB, failed: {answer}")
        return answer
