"""The ranks of a model replica, run as a program by the tests of `tandem_worker.parallel`: a process each.

Reads the model's folder, the grid and the prompts from a JSON file. Every rank runs prefill in two chunks and two
decode steps, and saves the logits of every step. Ranks are forked once torch is imported, which takes more computing
than what they do.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from tandem_worker.model.contract import CausalLM, ForwardBatch, KVCache, allocate_kv_cache
from tandem_worker.model.load import load_model
from tandem_worker.parallel.context import SINGLE, ParallelContext
from tandem_worker.parallel.groups import join_group, leave_group
from tandem_worker.parallel.shape import GroupShape

BLOCK_SIZE = 4


def make_batch(prompts: list[list[int]], start: int, stop: int) -> ForwardBatch:
    """Tokens `start` to `stop` of every prompt; prompt i owns blocks i * 8 + 1 and following."""
    pieces = [prompt[start:stop] for prompt in prompts]
    tables = [[index * 8 + block for block in range(1, 9)] for index in range(len(prompts))]
    positions = [start + offset for piece in pieces for offset in range(len(piece))]
    slots = [
        tables[index][(start + offset) // BLOCK_SIZE] * BLOCK_SIZE + (start + offset) % BLOCK_SIZE
        for index, piece in enumerate(pieces)
        for offset in range(len(piece))
    ]
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + len(piece))
    contexts = [start + len(piece) for piece in pieces]
    return ForwardBatch(
        token_ids=torch.tensor([token for piece in pieces for token in piece]),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        logits_rows=torch.tensor(starts[1:]) - 1,
        query_lens_host=tuple(map(len, pieces)),
        context_lens_host=tuple(contexts),
    )


def run_steps(model: CausalLM, prompts: list[list[int]]) -> torch.Tensor:
    """Logits `[steps, prompts, vocab]`; no rows on stages before the last."""
    cache: KVCache = allocate_kv_cache(model.kv_cache_spec(BLOCK_SIZE), 32, model.device)
    edges = [0, 7, 18, 19, 20]
    with torch.inference_mode():
        steps = [model.forward(make_batch(prompts, start, stop), cache) for start, stop in itertools.pairwise(edges)]
    return torch.stack(steps)


def load(folder: str, context: ParallelContext = SINGLE) -> CausalLM:
    torch.set_num_threads(1)
    return load_model(Path(folder), device=torch.device("cpu"), dtype=torch.float32, context=context)


def main() -> int:
    """The number of ranks that failed."""
    job = json.loads(Path(sys.argv[1]).read_text())
    shape = GroupShape(**job["shape"])
    assert threading.active_count() == 1 == len(os.listdir("/proc/self/task")), "a fork would lose threads"
    ranks = [os.fork() or run_forked(job, shape, rank) for rank in range(shape.world_size)]
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in ranks)


def run_forked(job: dict, shape: GroupShape, rank: int) -> NoReturn:
    """One rank, to the end of its process."""
    status = 1
    try:
        run_rank(job, shape, rank)
        status = 0
    except Exception:
        sys.stderr.write(f"rank {rank}: {traceback.format_exc()}")
        sys.stderr.flush()
    finally:
        os._exit(status)


def run_rank(job: dict, shape: GroupShape, rank: int) -> None:
    store = dist.FileStore(job["rendezvous"], shape.world_size)
    context = join_group(shape, rank, store=store, device=torch.device("cpu"))
    for number, model in enumerate(job["models"]):
        prompts = model["prompts"][context.ep_rank]  # expert ranks serve different requests
        logits = run_steps(load(model["folder"], context), prompts)
        torch.save(logits, f"{job['out']}-{number}-{rank}.pt")
    leave_group()


if __name__ == "__main__":
    sys.exit(main())
