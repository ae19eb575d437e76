"""transformers' `generate` in a process of its own: the baseline of `bench.engine`.

The process loads the model once and answers one job at a time over a pipe, so baseline and Tandem take turns on the
same cores and neither pays the other's start.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """Generate exactly `new_tokens` for a batch of equally long prompts."""

    prompts: list[list[int]]
    new_tokens: int


def serve(pipe: Connection, model_path: str, file_name: str, dtype: str, threads: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    torch.set_num_threads(threads)
    # Dequantized, as Tandem does it: left packed, every product is cast to float32 and the baseline is 8 times slower.
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_path, gguf_file=file_name, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
    )
    model.eval()
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        tokens = torch.tensor(job.prompts)
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                min_new_tokens=job.new_tokens,
                max_new_tokens=job.new_tokens,
                pad_token_id=0,
            )
        pipe.send(time.perf_counter() - started)


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

    def seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Wall time of one `generate` call."""
        self._pipe.send(Job(prompts, new_tokens))
        return self._pipe.recv()
