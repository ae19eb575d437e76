"""The bare model loop against transformers' `generate` in the same process: what serving can reach at best.

    python -m bench.engine.model_loop [--rounds 3] [--tokens 64] [--prompt 128] [--dtype bfloat16]

Baseline and Tandem take turns, so that noise of the machine meets both. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tandem_worker.model.contract import CausalLM, ForwardBatch, KVCache, allocate_kv_cache
from tandem_worker.model.load import load_model

from e2e.model import find_model

BLOCK_SIZE = 16


class Loop:
    """Prefill and greedy decode without an engine around them."""

    def __init__(self, model: CausalLM, num_blocks: int) -> None:
        self.model = model
        self.cache: KVCache = allocate_kv_cache(model.kv_cache_spec(BLOCK_SIZE), num_blocks, model.device)

    def prefill(self, prompts: list[list[int]], reserve: int, chunk: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
        """Equally long prompts, at most `chunk` tokens in a batch; their block tables and first tokens."""
        length = len(prompts[0])
        per_sequence = -(-(length + reserve) // BLOCK_SIZE)
        shuffled = torch.randperm(self.cache.num_blocks - 1)[: len(prompts) * per_sequence] + 1
        tables = shuffled.view(len(prompts), per_sequence).int()
        first = []
        together = max(1, chunk // length)
        for index in range(0, len(prompts), together):
            ids = torch.tensor(prompts[index : index + together])
            rows = tables[index : index + together]
            logits = torch.empty(0)
            for start in range(0, length, chunk):
                piece = ids[:, start : start + chunk]
                positions = torch.arange(start, start + piece.shape[1]).expand(len(rows), -1)
                logits = self._forward(piece.flatten(), positions, rows)
            first.append(logits.argmax(-1))
        return tables, torch.cat(first)

    def decode(self, tables: torch.Tensor, tokens: torch.Tensor, lengths: list[int], steps: int) -> torch.Tensor:
        produced = [tokens]
        positions = torch.tensor(lengths).view(-1, 1)
        for _ in range(steps):
            tokens = self._forward(tokens, positions, tables).argmax(-1)
            positions = positions + 1
            produced.append(tokens)
        return torch.stack(produced, 1)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        count, queries = positions.shape
        slots = tables.long().gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
        contexts = (positions[:, -1] + 1).int()
        batch = ForwardBatch(
            token_ids=ids,
            positions=positions.flatten(),
            slot_mapping=slots.flatten(),
            block_tables=tables,
            query_start=torch.arange(0, count * queries + 1, queries, dtype=torch.int32),
            context_lens=contexts,
            logits_rows=torch.arange(queries - 1, count * queries, queries),
            query_lens_host=(queries,) * count,
            context_lens_host=tuple(contexts.tolist()),
        )
        return self.model.forward(batch, self.cache)


def timed(work: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


def random_prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count * 1000 + length)
    return torch.randint(1000, 40000, (count, length), generator=generator).tolist()


def build_cases(loop: Loop, reference: Any, prompt: int, tokens: int) -> dict[str, tuple[int, Any, Any]]:
    """Per case: tokens that it yields, the baseline and Tandem."""

    def generate(prompts: list[list[int]], new: int) -> None:
        ids = torch.tensor(prompts)
        reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )

    def ours(prompts: list[list[int]], new: int) -> None:
        tables, first = loop.prefill(prompts, new)
        if new > 1:
            loop.decode(tables, first, [len(prompt) for prompt in prompts], new - 1)

    one, eight, many = random_prompts(1, prompt), random_prompts(8, prompt), random_prompts(32, prompt)
    cases: dict[str, tuple[int, Any, Any]] = {
        "single stream": (tokens, lambda: generate(one, tokens), lambda: ours(one, tokens)),
        "batch of 8": (8 * tokens, lambda: generate(eight, tokens), lambda: ours(eight, tokens)),
        # The sequential loop is measured on one prompt and stands for all of them.
        "8 concurrent / sequential loop": (tokens, lambda: generate(one, tokens), lambda: ours(eight, tokens)),
        "32 concurrent / sequential loop": (tokens, lambda: generate(one, tokens), lambda: ours(many, tokens)),
    }
    for length in (512, 2000, 4000):
        long = random_prompts(1, length)
        cases[f"prefill {length}"] = (length, lambda p=long: generate(p, 1), lambda p=long: ours(p, 1))
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--clock", default="wall", choices=("wall", "cpu"), help="cpu: for a machine that others use too"
    )
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    from transformers import AutoModelForCausalLM, GgufConfig

    path, dtype = find_model(), getattr(torch, options.dtype)
    reference = AutoModelForCausalLM.from_pretrained(  # as dense weights: packed ones are slower here
        str(path.parent), gguf_file=path.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )
    loop = Loop(load_model(path, device=torch.device("cpu"), dtype=dtype), num_blocks=1024)
    results: dict[str, Any] = {"dtype": options.dtype, "threads": options.threads, "clock": options.clock}
    print(f"{'case':34} {'transformers tok/s':>18} {'tandem tok/s':>13} {'ratio':>6}")
    with torch.inference_mode():
        for name, (tokens, baseline, ours) in build_cases(loop, reference, options.prompt, options.tokens).items():
            if options.cases not in name:
                continue
            baseline()
            ours()
            pairs = [(timed(baseline, clock), timed(ours, clock)) for _ in range(options.rounds)]
            factor = int(name.split()[0]) if "sequential" in name else 1
            theirs, mine = (min(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(factor * slow / fast for slow, fast in pairs)
            results[name] = {"transformers": tokens / theirs, "tandem": factor * tokens / mine, "ratio": ratio}
            print(f"{name:34} {tokens / theirs:18.1f} {factor * tokens / mine:13.1f} {ratio:6.2f}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
