"""Blocks in host memory: first tokens of a long prompt that is computed, found there, and found in the GPU's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from tandem_worker.engine.build import build_engine
from tandem_worker.engine.schedule.params import TokenDelta
from tandem_worker.model.contract import CausalLM

from bench.gpu.item import Figures, WrongError
from bench.gpu.steps import BLOCK_SIZE, build_config, random_prompts, submit

PINNED_GOAL, EXPOSED_GOAL = 50e9, 0.04
"""Bytes per second of pinned memory, and how much later a prompt's first token may be from there than from the GPU's
memory, as a share of computing it."""


class Waiting(Protocol):
    """Takes an engine's deltas."""

    def __call__(self, deltas: Sequence[TokenDelta], /) -> None: ...

    def wait(self, count: int, seconds: float = 60.0) -> None:
        """Until so many requests have ended."""
        ...


def measure_host_memory(model: CausalLM, build_collector: Callable[[], Waiting], length: int, step: int) -> Figures:
    """Of a prompt of `length` tokens, beside memory for little more than one of them, in steps of `step` tokens. Raises
    WrongError where its answer differs by where it is found, or it is not found at all."""
    blocks = -(-length // BLOCK_SIZE) + 8
    config = build_config(model, num_blocks=blocks, max_rows=4, max_batch_tokens=step, max_model_len=length + 8)
    size = model.kv_cache_spec(BLOCK_SIZE).bytes_per_block
    config = config.model_copy(update={"kv": config.kv.model_copy(update={"host_memory_bytes": 3 * blocks * size})})
    out = build_collector()
    said: list[tuple[int, ...]] = []

    def hear(deltas: Sequence[TokenDelta]) -> None:
        said.extend(delta.token_ids for delta in deltas if delta.token_ids)
        out(deltas)

    engine = build_engine(model, config, hear, runs_ahead=model.device.type == "cuda")
    seconds: dict[str, float] = {}
    answers: dict[str, tuple[int, ...]] = {}
    first, other = (random_prompts(1, length, model.vocab_size, seed=seed) for seed in (1, 2))
    # Each under the name of its prompt, which is its salt. The first time of each way touches what others only read.
    for way, prompt in (
        ("warm", "a"), ("evicting", "b"), ("warm from host", "a"), ("computed", "c"), ("from host", "a"),
        ("from memory", "a"),
    ):  # fmt: skip
        began = time.perf_counter()
        submit(engine, first if prompt == "a" else other, 1, prefix=prompt)
        out.wait(1)
        seconds[way] = time.perf_counter() - began
        (answers[way],) = said
        said.clear()
    host = engine.stats().host
    engine.stop()
    assert host is not None
    figures: Figures = {f"milliseconds {way}": 1e3 * value for way, value in seconds.items() if "warm" not in way}
    if host.blocks_in_total < 2 * (blocks - 16):
        raise WrongError("the prompt was not found in host memory", {**figures, "blocks": host.blocks_in_total})
    if len({answers[way] for way in ("warm", "warm from host", "from host", "from memory")}) > 1:
        raise WrongError("the answer differs by where the prompt was found", {**figures, **answers})
    rate = host.blocks_in_total * size / max(host.seconds_in_total, 1e-9)
    exposed = (seconds["from host"] - seconds["from memory"]) / seconds["computed"]
    figures |= {"bytes per second in": rate, "exposed": exposed, "ratio": rate / PINNED_GOAL, "of": "50 GB/s pinned"}
    figures["bytes per second out"] = host.blocks_out_total * size / max(host.seconds_out_total, 1e-9)
    figures["met"] = rate >= PINNED_GOAL and exposed <= EXPOSED_GOAL
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return figures
