"""The same tokens whatever way a step runs: eager, recorded, ahead of its tokens, or recorded and ahead.

Ways that launch the same kernels over the same shapes must give equal bits. A recording serves any length, so it splits
contexts otherwise than an eager step and rounds otherwise: there logits are compared, and tokens may differ only where
the two best are as close as rounding.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tandem_api.launch import KVConfig, ModelSource, SchedulerConfig, SpeculativeConfig, WorkerConfig
from tandem_api.names import Role
from tandem_worker.engine.build import build_engine
from tandem_worker.engine.core import EngineCore
from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.execute.arena import build_prompt_batch
from tandem_worker.engine.execute.cuda_graphs import CudaRecorder, DecodeGraphs, Recorder
from tandem_worker.engine.guess.contract import Guesser
from tandem_worker.engine.schedule.params import GenerationRequest, SamplingParams, TokenDelta
from tandem_worker.model.contract import CausalLM, ForwardBatch, KVCache, allocate_kv_cache

BLOCK_SIZE = 16
_TIE = 0.1
"""Of the logits' standard deviation: how far apart two tokens may be that rounding may exchange."""


class Repeater:
    """A recorder for a CPU: what it records is called again on the same tensors."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        result = run()
        return lambda: (result.copy_(run()), None)[1], result

    def memory_bytes(self) -> int:
        return 0


def build_recorder(device: torch.device) -> Recorder:
    return CudaRecorder(device) if device.type == "cuda" else Repeater()


# -- one real step, both ways ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepComparison:
    """Of one decode step's logits."""

    rows: int
    error: float
    """|recorded - eager| / |eager|."""
    repeats: bool
    """A second replay gave the same bits."""
    flips: int
    """Rows whose best token differs though it leads by more than a tie."""


def compare_recorded(
    model: CausalLM,
    contexts: Sequence[Sequence[int]],
    *,
    max_context: int,
    widths: Sequence[Sequence[int]] | None = None,
    recorder: Recorder | None = None,
) -> list[StepComparison]:
    """Decode steps over random KV, eager and from recordings; each of `contexts` are the lengths of one step.

    `widths`: how many of each sequence's last tokens the step computes, guesses included; None: one.
    """
    widths = widths or [[1] * len(lengths) for lengths in contexts]
    most = max(map(sum, widths))
    per_sequence = -(-max_context // BLOCK_SIZE)
    cache = allocate_kv_cache(model.kv_cache_spec(BLOCK_SIZE), most * per_sequence + 1, model.device)
    generator = torch.Generator().manual_seed(5)
    with torch.inference_mode():
        for layer in cache.layers:
            layer[1:].normal_()
        graphs = DecodeGraphs(
            model, cache, max_blocks=per_sequence, batch_sizes=sorted({1, 2, 4, 8, most}),
            recorder=recorder or build_recorder(model.device),
        )  # fmt: skip
        tables = (torch.randperm(most * per_sequence, generator=generator) + 1).view(most, per_sequence)
        return [
            _compare(model, graphs, cache, tables, lengths, generator, rows)
            for lengths, rows in zip(contexts, widths, strict=True)
        ]


def _compare(
    model: CausalLM,
    graphs: DecodeGraphs,
    cache: KVCache,
    tables: torch.Tensor,
    lengths: Sequence[int],
    generator: torch.Generator,
    widths: Sequence[int],
) -> StepComparison:
    batch = build_decode_batch(model, tables[: len(lengths)], lengths, generator, widths)
    eager = model.forward(batch, cache).double()
    replays = []
    for _ in range(2):
        logits = graphs.run(batch)
        assert logits is not None, "no recording fits the batch"
        replays.append(logits.clone())
    recorded = replays[0].double()
    best = recorded.argmax(1, keepdim=True)
    lead = (eager.amax(1, keepdim=True) - eager.gather(1, best))[:, 0]
    return StepComparison(
        rows=sum(widths),
        error=float((recorded - eager).norm() / eager.norm()),
        repeats=torch.equal(replays[0], replays[1]),
        flips=int((~(lead <= _TIE * eager.std(1))).sum()),
    )


def build_decode_batch(
    model: CausalLM,
    tables: torch.Tensor,
    lengths: Sequence[int],
    generator: torch.Generator,
    widths: Sequence[int] | None = None,
) -> ForwardBatch:
    """Random tokens for each sequence, the last ones of its length, over blocks `tables`: one of each, or `widths`."""
    device, sequences = model.device, len(lengths)
    rows = torch.tensor([1] * sequences if widths is None else list(widths))
    ends, count = rows.cumsum(0), int(rows.sum())
    ids = torch.arange(sequences).repeat_interleave(rows)
    positions = torch.tensor(lengths)[ids] - ends[ids] + torch.arange(count)
    slots = tables[ids, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    width = -(-max(lengths) // BLOCK_SIZE)
    return ForwardBatch(
        token_ids=torch.randint(0, model.vocab_size, (count,), generator=generator).to(device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        block_tables=tables[:, :width].int().contiguous().to(device),
        query_start=torch.tensor([0, *ends.tolist()], dtype=torch.int32, device=device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        logits_rows=torch.arange(count, device=device),
        query_lens_host=tuple(rows.tolist()),
        context_lens_host=tuple(lengths),
        num_decodes=sequences,
        sequence_ids=ids.int().to(device),
    )


# -- whole answers --------------------------------------------------------------------------------------------------


NO_GUESSES = SpeculativeConfig(method="Off")


def build_config(
    model: CausalLM,
    *,
    num_blocks: int,
    max_rows: int,
    max_batch_tokens: int,
    max_model_len: int | None = None,
    speculative: SpeculativeConfig = NO_GUESSES,
) -> WorkerConfig:
    spec = model.kv_cache_spec(BLOCK_SIZE)
    return WorkerConfig(
        model_name="bench",
        served_name="bench",
        role=Role.UNIFIED,
        revision="bench",
        model=ModelSource(uri="file:///bench"),
        max_model_len=max_model_len,
        kv=KVConfig(memory_bytes=num_blocks * spec.bytes_per_block, block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(max_running_requests=max_rows, max_batch_tokens=max_batch_tokens),
        speculative=speculative,
    )


def answer(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    recorded: bool,
    ahead: bool,
    guesser: Guesser | None = None,
    **sampling: Any,
) -> list[list[int]]:
    """Tokens of all prompts, submitted before the first step, so that every way takes the same steps.

    With a `guesser` its guesses are in all steps in which `Auto` may have them, and steps are others.
    """
    tokens: dict[str, list[int]] = defaultdict(list)
    errors: list[str | RequestError] = []

    def deliver(deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            tokens[delta.request_id] += delta.token_ids
            errors.extend([delta.error] if delta.error else [])

    engine = build_stepped_engine(model, prompts, new_tokens, deliver, ahead=ahead, guesser=guesser)
    if recorded:
        engine._executor.record_graphs(build_recorder(model.device))
    submit(engine, prompts, new_tokens, **sampling)
    with torch.inference_mode():
        engine.steps.run_commands()
        while engine._runner.step():
            engine._turns.flush()
        engine._turns.flush()
    if errors:
        raise RuntimeError(errors[0])
    return [tokens[f"r{index}"] for index in range(len(prompts))]


def build_stepped_engine(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    deliver: Callable[[Sequence[TokenDelta]], None],
    *,
    ahead: bool,
    guesser: Guesser | None = None,
) -> EngineCore:
    """An engine whose steps are taken by the caller."""
    guesses = 0 if guesser is None else 5
    longest = max(map(len, prompts)) + new_tokens + BLOCK_SIZE
    num_blocks = len(prompts) * -(-longest // BLOCK_SIZE) + 2
    config = build_config(
        model, num_blocks=num_blocks, max_rows=len(prompts) * (1 + guesses), max_model_len=longest,
        max_batch_tokens=sum(map(len, prompts)) + BLOCK_SIZE + 1,
        speculative=SpeculativeConfig(max_tokens=guesses, adaptive=False) if guesses else NO_GUESSES,
    )  # fmt: skip
    engine = build_engine(model, config, deliver, runs_ahead=ahead)
    engine.steps.start = lambda: None  # no thread of its own
    if guesser is not None:
        let_guess(engine, guesser)
    return engine


def let_guess(engine: EngineCore, guesser: Guesser) -> None:
    """Have this one asked in place of texts."""
    (lane,) = engine._runner.lanes
    assert lane.speculator is not None, "guesses are off"
    lane.speculator._guesser = guesser


def submit(
    engine: EngineCore, prompts: Sequence[Sequence[int]], new_tokens: int, *, prefix: str = "r", **sampling: Any
) -> None:
    """Each under a name of its own, which also keeps it out of the others' prefix cache."""
    for index, prompt in enumerate(prompts):
        options = {"temperature": 0.0, **sampling, "seed": index}
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, **options)
        name = f"{prefix}{index}"
        engine.submit(
            GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=params, cache_salt=name)
        )


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a recorded answer leaves the eager one."""

    prompt: int
    position: int
    gap: float
    """Between the two tokens' logits, in standard deviations."""

    @property
    def is_tie(self) -> bool:
        return self.gap <= _TIE


def find_divergences(
    model: CausalLM, prompts: Sequence[Sequence[int]], eager: Sequence[Sequence[int]], other: Sequence[Sequence[int]]
) -> list[Divergence]:
    """First differences of each answer; what follows one is about another text."""
    found: list[Divergence] = []
    for index, (prompt, ours, theirs) in enumerate(zip(prompts, eager, other, strict=True)):
        if list(ours) == list(theirs):
            continue
        place = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        if place is None:  # one is shorter
            found.append(Divergence(index, min(len(ours), len(theirs)), float("inf")))
            continue
        row = next_logits(model, [*prompt, *ours[:place]])
        gap = float((row[ours[place]] - row[theirs[place]]).abs() / row.std())
        found.append(Divergence(index, place, gap))
    return found


def next_logits(model: CausalLM, tokens: Sequence[int]) -> torch.Tensor:
    """Of what follows these tokens, `[vocab]`, computed as one prompt."""
    batch = build_prompt_batch(len(tokens), 1, BLOCK_SIZE, model.device)
    batch = replace(batch, token_ids=torch.tensor(tokens, device=model.device))
    cache = allocate_kv_cache(model.kv_cache_spec(BLOCK_SIZE), -(-len(tokens) // BLOCK_SIZE) + 1, model.device)
    with torch.inference_mode():
        return model.forward(batch, cache)[0].double()
