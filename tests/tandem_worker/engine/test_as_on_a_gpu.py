"""Everything that a single GPU switches on, at once and on the CPU: no answer differs from the plain engine's.

Steps run ahead, decode steps are recordings, the device has a block table and a sampler of its own, and tokens come
late. What is left to a real device are its streams.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tandem_api.launch import SpeculativeConfig
from tandem_worker.engine.sample.device_sampler import DeviceSampler

from tests.tandem_worker.engine.execute.test_cuda_graphs import CallAgain, PaddedModel
from tests.tandem_worker.engine.rig import Collector, Rig
from tests.tandem_worker.engine.test_ahead import LateCopier
from tests.tandem_worker.engine.test_speculation import Knowing, answers_of, replace_guesser

VOCAB = 64
LIMITS = {"max_batch_tokens": 24, "max_running_requests": 7}


def switch_on(rig: Rig) -> CallAgain:
    executor, recorder = rig.engine._executor, CallAgain()
    executor.record_graphs(recorder)
    executor.sampler = DeviceSampler(VOCAB, torch.device("cpu"))
    executor._copier = LateCopier(rig.model)
    table = executor._builder.table
    table._tensor = table._tensor.clone()
    return recorder


def random_request(rng: random.Random) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Prompts up to three steps long, in which some share a beginning."""
    head = tuple(range(rng.choice([0, 4, 9, 30])))
    prompt = head + tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40)))
    options: dict[str, Any] = {"max_tokens": rng.randint(1, 25), "n": rng.choice([1, 1, 1, 3]), "ignore_eos": True}
    if rng.random() < 0.5:
        options |= {"temperature": 1.0, "seed": rng.randrange(1 << 40), "top_k": rng.choice([0, 5]), "min_p": 0.01}
    if rng.random() < 0.4:
        options |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    if rng.random() < 0.3:
        options |= {"logit_bias": {rng.randrange(VOCAB): -100.0, rng.randrange(VOCAB): 2.0}}
    if rng.random() < 0.3:
        options |= {"min_tokens": 3, "stop_token_ids": frozenset(rng.sample(range(VOCAB), 8))}
    if rng.random() < 0.15:
        options |= {"num_logprobs": 2}
    return prompt, options


def submit(rig: Rig, named: dict[str, tuple[tuple[int, ...], dict[str, Any]]]) -> None:
    """All at once; returns when all have been answered."""
    for name, (prompt, options) in named.items():
        rig.submit(name, prompt, **options)
    rig.wait()


_plain: dict[int, Collector] = {}
"""What a plain engine answers to the requests of each seed."""


@pytest.mark.parametrize("host_blocks", [0, 20])
@pytest.mark.parametrize("guesses", ["none", "fixed", "adaptive"])
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_the_plain_engines(make_rig: Callable[..., Rig], seed: int, host_blocks: int, guesses: str) -> None:
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(30)]
    named = {f"r{number}": request for number, request in enumerate(requests)}
    if seed not in _plain:
        rig = make_rig(PaddedModel(), num_blocks=200)
        submit(rig, named)
        _plain[seed] = rig.out
    plain = _plain[seed]
    method = "Off" if guesses == "none" else "Lookup"
    rig = make_rig(
        PaddedModel(), num_blocks=40, host_blocks=host_blocks, scheduler=LIMITS, runs_ahead=True,
        speculative=SpeculativeConfig(method=method, adaptive=guesses == "adaptive", max_tokens=5),
    )  # fmt: skip
    recorder = switch_on(rig)
    check, checked_at_launch = rig.engine._executor.check, 0

    def count(output: Any) -> Any:
        nonlocal checked_at_launch
        copy = check(output)
        checked_at_launch += copy is not None
        assert output.layout.checked is output.layout.checked, "the end of the step is to have it from here"
        return copy

    rig.engine._executor.check = count
    if guesses != "none":
        replace_guesser(rig, Knowing(answers_of(plain, named)))
    submit(rig, named)
    for name, (_, options) in named.items():
        for choice in range(options["n"]):
            assert rig.out.tokens(name, choice) == plain.tokens(name, choice)
            assert rig.out.reason(name, choice) == plain.reason(name, choice)
    assert recorder.num_replays > 20
    assert guesses != "fixed" or checked_at_launch > 20
    assert guesses != "fixed" or sum(rig.engine.stats().accepted_draft_tokens_total.values()) > 20
    assert rig.engine.stats().preemptions_total > 0, "there was room for all of them"
