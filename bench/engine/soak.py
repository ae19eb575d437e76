"""Thousands of random requests through an engine whose block space is far too small for them.

Lengths, shared prefixes, choices, priorities, sampling, tenants, aborts and remote prefill are drawn at random, and so
is whether a preempted request's KV is moved to the host or computed again. Every other request goes to an engine that
runs one step ahead of its tokens. At the end no block may be in use, every answer must equal that of an engine with
room for everything, and an aborted answer must be the beginning of one. The model's next token depends on every token
that it reads through the block tables, so a block that was lost, shared wrongly or overwritten shows as a wrong answer.

    python -m bench.engine.soak --requests 10000
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from tandem_worker.engine.build import build_engine
from tandem_worker.engine.contract import EngineStats
from tandem_worker.engine.core import EngineCore
from tandem_worker.engine.schedule.params import FinishReason, GenerationRequest, SamplingParams, TokenDelta

from tests.tandem_worker.engine.history_model import HistoryModel, greedy_answer
from tests.tandem_worker.engine.rig import BLOCK_SIZE, build_config
from tests.tandem_worker.engine.wire import Wire

WINDOW = 80
"""Requests inside at a time."""
MAX_PROMPT, MAX_OUTPUT = 70, 40
TIGHT_BLOCKS = 40
"""Room for one and a half of the longest requests."""
HOST_BLOCKS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    request: GenerationRequest
    abort_after: int | None
    """Abort when choice 0 has this many tokens; 0: right after submission."""


def draw_job(rng: random.Random, index: int, prefixes: list[tuple[int, ...]], *, remote: bool) -> Job:
    prefix = rng.choice(prefixes)[: rng.randint(0, 40)]
    prompt = prefix + tuple(rng.randrange(64) for _ in range(rng.randint(1, MAX_PROMPT - 40)))
    temperature, top_p, frequency_penalty = 0.0, 1.0, 0.0
    if rng.random() < 0.3:
        temperature, top_p, frequency_penalty = 0.9, 0.95, rng.choice([0.0, 0.2])
    sampling = SamplingParams(
        max_tokens=rng.randint(1, MAX_OUTPUT), seed=index, stop_token_ids=frozenset(rng.sample(range(64), 1)),
        temperature=temperature, top_p=top_p, frequency_penalty=frequency_penalty,
    )  # fmt: skip
    request = GenerationRequest(
        request_id=f"r{index}",
        prompt_token_ids=prompt,
        sampling=sampling,
        n=rng.choice([1, 1, 1, 2, 3]),
        priority=rng.choice([0, 0, 0, -1, 2]),
        cache_salt=rng.choice(["", "", "tenant"]),
        prefill_endpoints=("prefill-0:1",) if remote and rng.random() < 0.3 else (),
    )
    abort_after = rng.choice([0, 1, rng.randint(1, 20)]) if rng.random() < 0.12 else None
    return Job(request=request, abort_after=abort_after)


@dataclass(slots=True)
class Run:
    """Feeds jobs to an engine and keeps the answers by (request, choice)."""

    jobs: list[Job]
    with_aborts: bool
    answers: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[tuple[str, int], FinishReason] = field(default_factory=dict[tuple[str, int], FinishReason])
    engine: EngineCore | None = None
    _inside: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(WINDOW))
    _open: dict[str, int] = field(default_factory=dict[str, int])
    _abort_after: dict[str, int] = field(default_factory=dict[str, int])
    _done: threading.Event = field(default_factory=threading.Event)

    def deliver(self, deltas: Sequence[TokenDelta]) -> None:
        assert self.engine is not None
        for delta in deltas:
            key = (delta.request_id, delta.choice)
            assert key not in self.reasons, f"{key} goes on after its end"
            self.answers[key].extend(delta.token_ids)
            limit = self._abort_after.get(delta.request_id)
            if limit is not None and delta.choice == 0 and len(self.answers[key]) >= limit:
                self.engine.abort(delta.request_id)
            if delta.finish_reason is not None:
                self.reasons[key] = delta.finish_reason
                self._open[delta.request_id] -= 1
                if self._open[delta.request_id] == 0:
                    self._inside.release()

    def feed(self, engine: EngineCore) -> None:
        self.engine = engine
        for job in self.jobs:
            if not self._inside.acquire(timeout=60):
                raise TimeoutError(f"a request hangs: {engine.stats()}")
            request = job.request
            self._open[request.request_id] = request.n
            if self.with_aborts and job.abort_after:
                self._abort_after[request.request_id] = job.abort_after
            engine.submit(request)
            if self.with_aborts and job.abort_after == 0:
                engine.abort(request.request_id)
        for _ in range(WINDOW):
            if not self._inside.acquire(timeout=60):
                raise TimeoutError(f"a request hangs: {engine.stats()}")


def start_engine(
    run: Run, num_blocks: int, *, host_blocks: int = 0, ahead: bool = False, **scheduler: int
) -> EngineCore:
    model = HistoryModel()
    config = build_config(num_blocks, model.kv_cache_spec(BLOCK_SIZE).bytes_per_block, host_blocks, None, **scheduler)
    return build_engine(model, config, run.deliver, runs_ahead=ahead)


def wait_idle(engine: EngineCore) -> None:
    end = time.monotonic() + 10
    while not engine.idle and time.monotonic() < end:
        time.sleep(0.01)


def run_tight(jobs: list[Job], *, remote: bool, ahead: bool) -> tuple[Run, EngineStats, list[str]]:
    """The run under pressure, and what is wrong with the engines after it."""
    run = Run(jobs, with_aborts=True)
    limits = {"max_running_requests": 12, "max_batch_tokens": 32, "local_prefill_max_tokens": 8}
    engine = start_engine(run, TIGHT_BLOCKS, host_blocks=HOST_BLOCKS, ahead=ahead, **limits)
    rng = random.Random(len(jobs))
    assert engine._scheduler.host is not None
    engine._scheduler.host.prefers_fetch = lambda: rng.random() < 0.9
    engines = [engine]
    if remote:
        prefill = start_engine(Run([], with_aborts=False), 3 * TIGHT_BLOCKS, max_batch_tokens=32)
        Wire(prefill, engine)
        engines.append(prefill)
    run.feed(engine)
    problems: list[str] = []
    for each in engines:
        wait_idle(each)
        each.stop()
        if not each.idle or each.failure is not None:
            problems.append(f"the engine is not idle, or failed: {each.failure}")
        if each.stats().kv_blocks_used:
            problems.append(f"{each.stats().kv_blocks_used} blocks are still in use")
        host = each._scheduler.host
        if host is not None and host.blocks.num_held:
            problems.append(f"{host.blocks.num_held} host blocks are still in use")
    return run, engine.stats(), problems


def compare(tight: Run, roomy: Run) -> list[str]:
    problems: list[str] = []
    for job in tight.jobs:
        for choice in range(job.request.n):
            key = (job.request.request_id, choice)
            answer, expected, reason = tight.answers[key], roomy.answers[key], tight.reasons.get(key)
            if reason is FinishReason.ABORT and job.abort_after is not None:
                if answer != expected[: len(answer)]:
                    problems.append(f"{key}: the aborted answer is no beginning of the whole one")
            elif reason is not roomy.reasons[key] or answer != expected:
                problems.append(f"{key}: {reason} {answer} instead of {roomy.reasons[key]} {expected}")
    return problems


def check_oracle(jobs: list[Job], roomy: Run) -> list[str]:
    """The roomy run itself against the model computed without an engine, on a sample of its greedy answers."""
    greedy = [job for job in jobs if job.request.sampling.greedy][:300]
    return [
        f"{job.request.request_id}: the unpressured answer is wrong"
        for job in greedy
        for answer in [roomy.answers[job.request.request_id, 0]]
        if answer != greedy_answer(job.request.prompt_token_ids, len(answer))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-remote", action="store_true", help="without a prefill engine beside")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    prefixes = [tuple(rng.randrange(64) for _ in range(40)) for _ in range(12)]
    jobs = [draw_job(rng, index, prefixes, remote=not options.no_remote) for index in range(options.requests)]
    began = time.monotonic()
    runs = [run_tight(jobs[ahead::2], remote=not options.no_remote, ahead=bool(ahead)) for ahead in range(2)]
    seconds = time.monotonic() - began
    unpressured = [replace(job, request=replace(job.request, prefill_endpoints=(), priority=0)) for job in jobs]
    roomy = Run(unpressured, with_aborts=False)
    roomy_engine = start_engine(roomy, 40_000, max_batch_tokens=4096)
    roomy.feed(roomy_engine)
    roomy_engine.stop()
    problems = check_oracle(jobs, roomy)
    for tight, _, wrong in runs:
        problems += wrong + compare(tight, roomy)
    total = {
        name: sum(getattr(stats, name) for _, stats, _ in runs)
        for name in EngineStats.__slots__
        if name.endswith(("_total", "_used")) and isinstance(getattr(runs[0][1], name), int)
    }
    num_aborted = sum(reason is FinishReason.ABORT for tight, _, _ in runs for reason in tight.reasons.values())
    print(f"{options.requests} requests in {seconds:.0f} s with {TIGHT_BLOCKS} blocks of {BLOCK_SIZE} tokens")
    print(f"steps {total['steps_total']}, tokens {total['generated_tokens_total']}")
    out, back = (sum(getattr(stats.host, f"blocks_{way}_total") for _, stats, _ in runs) for way in ("out", "in"))
    print(f"preemptions {total['preemptions_total']}; {out} blocks to the host ({HOST_BLOCKS} blocks), {back} back")
    print(f"cached prompt tokens {total['cached_tokens_total']} of {total['prompt_tokens_total']}")
    print(f"remote prefills {total['prefills_remote_total']}, fallbacks {total['prefills_fallback_total']}")
    print(f"aborted choices {num_aborted}")
    for problem in problems[:20]:
        print("WRONG:", problem)
    print(
        json.dumps(
            {
                "bench": "engine/soak",
                "passed": not problems,
                "requests": options.requests,
                "seconds": round(seconds, 1),
                "preemptions": total["preemptions_total"],
                "blocks_to_host": out,
                "blocks_from_host": back,
                "blocks_in_use": total["kv_blocks_used"],
                "wrong": len(problems),
            }
        )
    )
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
