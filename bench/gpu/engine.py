"""An 8B model with random weights through the engine as it serves: tokens first, then speeds, then where time goes."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from tandem_api.launch import SpeculativeConfig, WeightsForm
from tandem_worker.engine.build import build_engine
from tandem_worker.engine.core import EngineCore
from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.schedule.params import TokenDelta
from tandem_worker.model.contract import CausalLM

from bench.gpu.guesses import (
    ANSWER,
    MOST_GUESSES,
    DrawnGuesser,
    KnowingGuesser,
    measure_guessed_steps,
    measure_guesses,
)
from bench.gpu.host_memory import measure_host_memory
from bench.gpu.item import Figures, Item, Setting, WrongError
from bench.gpu.random_model import QWEN3_8B, SMALL, build_random_model, count_step_weights
from bench.gpu.shapes import Ceiling
from bench.gpu.steps import (
    answer,
    build_config,
    build_recorder,
    compare_recorded,
    find_divergences,
    let_guess,
    random_prompts,
    submit,
)
from bench.gpu.torch_step import TorchStep
from bench.kernels.measure import graphed, median_seconds

_STEP_ERROR = 5e-2
"""Of a recorded step's logits through 36 layers in bfloat16."""
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "top-p": {"temperature": 1.0, "top_p": 0.9}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the engine is given."""

    raw: Any
    batches: tuple[int, ...]
    prompt: int
    new_tokens: int
    rounds: int
    prompts: tuple[int, ...]
    """Lengths whose time to first token is measured."""
    steps: tuple[tuple[int, ...], ...]
    """Contexts of the sequences of single steps."""
    max_rows: int
    max_batch_tokens: int
    cache_tokens: int
    longest: int
    """Length of a prompt that is found in host memory."""
    guessed_contexts: tuple[int, ...]
    """Of a step with guesses."""
    guessed_tokens: int
    """Of an answer with guesses."""

    @property
    def max_model_len(self) -> int:
        return max(*self.prompts, self.prompt + self.new_tokens, *map(max, self.steps)) + 64


REAL = Load(
    raw=QWEN3_8B, batches=(1, 8, 64, 256), prompt=64, new_tokens=128, rounds=3, prompts=(64, 512, 2048),
    steps=((300,), (4096, 17, 700), tuple(range(40, 40 + 64 * 48, 48))), max_rows=256, max_batch_tokens=8192,
    cache_tokens=120_000, longest=32_768, guessed_contexts=(500, 2000), guessed_tokens=256,
)  # fmt: skip
DRY = Load(
    raw=SMALL, batches=(1, 3), prompt=6, new_tokens=8, rounds=1, prompts=(5, 40), steps=((30,), (40, 2, 17)),
    max_rows=3, max_batch_tokens=64, cache_tokens=2000, longest=400, guessed_contexts=(70,), guessed_tokens=60,
)  # fmt: skip


class Collector:
    """When tokens came, and ends."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str, int]] = []
        self.errors: list[str | RequestError] = []
        self._ended = 0
        self._changed = threading.Condition()

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        now = time.perf_counter()
        with self._changed:
            for delta in deltas:
                self.events.append((now, delta.request_id, len(delta.token_ids)))
                self.errors += [delta.error] if delta.error else []
                self._ended += delta.finish_reason is not None
            self._changed.notify_all()

    def wait(self, count: int, seconds: float = 60.0) -> None:
        """Until `count` requests have ended; then forget them."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended >= count or self.errors, seconds):
                raise TimeoutError(f"{self._ended} of {count} requests ended in {seconds:g} s")
            if self.errors:
                raise RuntimeError(self.errors[0])
            self._ended = 0


class Session:
    """The model and its engine, made when an item first needs them."""

    def __init__(self, setting: Setting, *, weights: WeightsForm = "Plain") -> None:
        self._form: WeightsForm = weights
        self.device = torch.device(setting.place)
        self.load = DRY if setting.tiny else REAL
        self.ceiling = Ceiling(setting)
        self.weights = count_step_weights(self.load.raw)
        self.collector = Collector()
        self.recordings: Figures = {}
        self._runs = 0
        self.guesser = DrawnGuesser()
        """The engine's, which guesses nothing until an item says so."""

    @cached_property
    def model(self) -> CausalLM:
        torch.manual_seed(1)
        return build_random_model(self.load.raw, self.device, weights=self._form)

    @cached_property
    def engine(self) -> EngineCore:
        """Recorded and running ahead, as on a GPU; guesses are made where an item asks for them."""
        load = self.load
        config = build_config(
            self.model, num_blocks=load.cache_tokens // 16, max_rows=load.max_rows,
            max_batch_tokens=load.max_batch_tokens, max_model_len=load.max_model_len,
            speculative=SpeculativeConfig(method="Lookup", max_tokens=MOST_GUESSES),
        )  # fmt: skip
        engine = build_engine(self.model, config, self.collector, runs_ahead=True)
        let_guess(engine, self.guesser)
        began = time.perf_counter()
        engine._executor.record_graphs(build_recorder(self.device), max_rows=max(load.max_rows, 1 + MOST_GUESSES))
        self.recordings = {"seconds": time.perf_counter() - began, "bytes": engine.graph_bytes}
        return engine

    def run(self, prompts: list[list[int]], new_tokens: int, **sampling: Any) -> list[tuple[float, str, int]]:
        """Answer them all; when which tokens came."""
        self.collector.events = []
        self._runs += 1
        submit(self.engine, prompts, new_tokens, prefix=f"{self._runs}-", **sampling)
        self.collector.wait(len(prompts))
        return self.collector.events

    def limit(self, tokens: int, kv_tokens: int) -> float:
        """Seconds that weights, KV and arithmetic of a step of `tokens` tokens take at the ceilings."""
        spec = self.model.kv_cache_spec(16)
        num_bytes = 2 * self.weights + kv_tokens * spec.bytes_per_block / spec.block_size
        return self.ceiling.found.limit_seconds(num_bytes, 2 * self.weights * tokens)


def engine_items(setting: Setting) -> Iterator[Item]:
    session = Session(setting)
    load = session.load
    yield Item(name="ceilings", run=session.ceiling.figures)
    yield Item(name="model", run=lambda: describe_model(session), seconds=120)
    yield Item(name="recorded steps", run=lambda: check_steps(session), seconds=180, needs=("model",))
    yield Item(name="tokens", run=lambda: check_tokens(session), seconds=150, needs=("model",))
    verified = ("recorded steps", "tokens")
    yield Item(name="recordings", run=lambda: record(session), seconds=120, needs=("model",))
    for name, sampling in SAMPLINGS.items():
        for batch in load.batches:
            yield Item(
                name=f"decode {name} x{batch}", seconds=60, needs=verified,
                run=lambda batch=batch, sampling=sampling: measure_decode(session, batch, sampling),
            )  # fmt: skip
    for context in load.guessed_contexts:
        yield Item(
            name=f"step with {MOST_GUESSES} guesses, context {context}", seconds=60, needs=("model",),
            run=lambda context=context: measure_guessed_steps(session.model, context),
        )  # fmt: skip
    for batch in load.batches:
        yield Item(
            name=f"guesses x{batch}", seconds=90, needs=verified,
            run=lambda batch=batch: measure_guessed_decode(session, batch),
        )  # fmt: skip
    for length in load.prompts:
        yield Item(
            name=f"first token of {length}", seconds=60, needs=verified,
            run=lambda length=length: measure_first_token(session, length),
        )  # fmt: skip
    yield Item(
        name=f"host memory, {load.longest}", seconds=120, needs=verified,
        run=lambda: measure_host_memory(session.model, Collector, load.longest, load.max_batch_tokens),
    )  # fmt: skip
    yield Item(name="profile of decode x1", run=lambda: profile(session, 1), seconds=90, needs=("model",))
    yield Item(name=f"profile of decode x{load.batches[-1]}", seconds=90, needs=("model",),
               run=lambda: profile(session, load.batches[-1]))  # fmt: skip


def describe_model(session: Session) -> Figures:
    began = time.perf_counter()
    model = session.model
    spec = model.kv_cache_spec(16)
    return {
        "seconds": time.perf_counter() - began,
        "weight_gb_per_step": 2 * session.weights / 1e9,
        "kv_bytes_per_token": spec.bytes_per_block // spec.block_size,
        "limit_tokens_per_s": 1 / session.limit(1, 0),
    }


def check_steps(session: Session) -> Figures:
    """Single recorded steps over random KV."""
    found = compare_recorded(session.model, session.load.steps, max_context=max(map(max, session.load.steps)) + 8)
    figures: Figures = {"error": max(each.error for each in found), "steps": [asdict(each) for each in found]}
    if any(not each.error <= _STEP_ERROR or not each.repeats or each.flips for each in found):
        raise WrongError("recorded steps give other logits than eager ones", figures)
    return figures


def check_tokens(session: Session) -> Figures:
    """Whole answers, every way of running."""
    load, count = session.load, min(4, session.load.max_rows)
    prompts = random_prompts(count, load.prompt, session.model.vocab_size)
    new = min(32, load.new_tokens)
    figures: Figures = {"answers": count, "tokens_each": new}
    wrong: list[str] = []
    for name, sampling in SAMPLINGS.items():
        ways = {
            (recorded, ahead): answer(session.model, prompts, new, recorded=recorded, ahead=ahead, **sampling)
            for recorded in (False, True)
            for ahead in (False, True)
        }
        for recorded in (False, True):
            if ways[recorded, False] != ways[recorded, True]:
                wrong.append(f"{name}: {'recorded' if recorded else 'eager'} steps ahead of their tokens differ")
                figures[wrong[-1]] = first_apart(ways[recorded, False], ways[recorded, True])
            guesser = KnowingGuesser(prompts, ways[recorded, True], session.model.vocab_size)
            guessed = answer(session.model, prompts, new, recorded=recorded, ahead=True, guesser=guesser, **sampling)
            assert guesser.guessed, "nobody was asked for guesses"
            if guessed != ways[recorded, True] and session.device.type == "cuda":  # twins round by the number of rows
                wrong.append(f"{name}: {'recorded' if recorded else 'eager'} steps with guesses differ")
                figures[wrong[-1]] = first_apart(ways[recorded, True], guessed)
        if name == "greedy":
            apart = find_divergences(session.model, prompts, ways[False, False], ways[True, False])
            figures["recorded answers that part at a tie"] = sum(each.is_tie for each in apart)
            if bad := [asdict(each) for each in apart if not each.is_tie]:
                wrong.append("recorded answers differ from eager ones")
                figures["apart"] = bad
    if wrong:
        raise WrongError("; ".join(wrong), figures)
    return figures


def first_apart(one: list[list[int]], other: list[list[int]]) -> dict[str, Any]:
    row = next(index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    return {"answer": row, "one": one[row][:16], "other": other[row][:16]}


def record(session: Session) -> Figures:
    assert session.engine is not None
    return session.recordings


def measure_decode(session: Session, batch: int, sampling: dict[str, float]) -> Figures:
    """Tokens per second while all of them decode: from the last first token to the first last one."""
    load = session.load
    rates = []
    for number in range(load.rounds + 1):  # the first warms up
        prompts = random_prompts(batch, load.prompt, session.model.vocab_size, seed=number)
        rates.append(steady_rate(session.run(prompts, load.new_tokens, **sampling)))
    rate = statistics.median(rates[1:])
    limit = session.limit(batch, batch * (load.prompt + load.new_tokens // 2))
    return {
        "tokens_per_s": rate,
        "tokens_per_s_each": rate / batch,
        "rounds": [round(each, 1) for each in rates[1:]],
        "ratio": rate * limit / batch,
        "of": "weights and KV at copy speed, or matmul",
    }


def measure_guessed_decode(session: Session, batch: int) -> Figures:
    """As `measure_decode`, with guesses of a known chance and without, over answers that are known."""
    load, engine = session.load, session.engine

    def measure_rate(number: int) -> float:
        prompts = random_prompts(batch, load.prompt, session.model.vocab_size, seed=number)
        return steady_rate(session.run(prompts, load.guessed_tokens, **ANSWER))

    return measure_guesses(engine, session.guesser, batch, load.rounds, measure_rate)


def steady_rate(events: Sequence[tuple[float, str, int]]) -> float:
    """Tokens per second between the moment when all have begun and the moment when the first has ended."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for at, name, count in events:
        if count:
            first.setdefault(name, at)
            last[name] = at
    began, ended = max(first.values()), min(last.values())
    tokens = sum(count for at, _, count in events if began < at <= ended)
    if tokens == 0:
        raise RuntimeError("no token came while all requests were decoding: more of them are needed")
    return tokens / (ended - began)


def measure_first_token(session: Session, length: int) -> Figures:
    """Of a lone prompt."""
    times = []
    for number in range(2 * session.load.rounds + 1):
        prompts = random_prompts(1, length, session.model.vocab_size, seed=100 + number)
        began = time.perf_counter()
        events = session.run(prompts, 1)
        times.append(events[0][0] - began)
    middle = statistics.median(times[1:])
    return {"milliseconds": middle * 1e3, "ratio": session.limit(length, length) / middle, "of": "copy or matmul"}


def profile(session: Session, batch: int) -> Figures:
    """Where the time of a few decode steps behind their prompts goes: the kernels that take the most."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    prompts = random_prompts(batch, session.load.prompt, session.model.vocab_size, seed=7)
    on_gpu = session.device.type == "cuda"

    def work(new_tokens: int) -> None:
        if on_gpu:
            session.run(prompts, new_tokens)
        else:  # of a CPU the profiler sees this thread alone
            answer(session.model, prompts, new_tokens, recorded=False, ahead=True)

    work(4)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    began = time.perf_counter()
    with profiled(activities=activities) as found:
        work(12)
    seconds = time.perf_counter() - began
    kernels = [
        (event.key, event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count)
        for event in found.key_averages()
        if (event.device_type == DeviceType.CUDA) == on_gpu
    ]
    kernels.sort(key=lambda entry: -entry[1])
    busy = sum(entry[1] for entry in kernels) / 1e6
    if not busy:
        raise RuntimeError("the profiler saw no kernel")
    table = [
        {
            "name": name[:90],
            "milliseconds": round(micros / 1e3, 3),
            "calls": count,
            "share": round(micros / 1e6 / busy, 4),
        }
        for name, micros, count in kernels[:25]
    ]
    return {"seconds": seconds, "busy": busy / seconds, "kernels": table}


def baseline_items(setting: Setting) -> Iterator[Item]:
    """Torch's own step, recorded: what the same GPU does without this project."""
    load, ceiling, device = DRY if setting.tiny else REAL, Ceiling(setting), torch.device(setting.place)
    context = load.prompt + load.new_tokens // 2
    build: Callable[[], TorchStep] = _once(lambda: TorchStep(load.raw, load.batches[0], context, device))
    for batch in load.batches:
        yield Item(
            name=f"torch with SDPA, recorded, x{batch}", seconds=60,
            run=lambda batch=batch: measure_torch(build(), load, batch, ceiling, device),
        )  # fmt: skip


def _once(make: Callable[[], TorchStep]) -> Callable[[], TorchStep]:
    made: list[TorchStep] = []
    return lambda: made[0] if made else (made.append(make()), made[0])[1]


@torch.inference_mode()
def measure_torch(step: TorchStep, load: Load, batch: int, ceiling: Ceiling, device: torch.device) -> Figures:
    step.resize(batch)
    seconds = median_seconds(graphed(lambda tokens: step.run(), [(step.tokens,)]), device)
    weights = count_step_weights(load.raw)
    head = 2 * load.raw["num_key_value_heads"] * load.raw["head_dim"] * load.raw["num_hidden_layers"] * 2
    kv = batch * (load.prompt + load.new_tokens // 2) * head
    limit = ceiling.found.limit_seconds(2 * weights + kv, 2 * weights * batch)
    return {"tokens_per_s": batch / seconds, "ratio": limit / seconds, "of": "weights and KV at copy speed, or matmul"}
