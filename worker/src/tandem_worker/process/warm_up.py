"""What a worker computes before it says that it is ready.

One token through the whole engine: memory is touched, and a broken model is found out before users find it. On a GPU
Triton compiles a kernel when it is first called, which takes seconds and holds up every stream: there the requests go
through what serving will need, unless all of it is compiled.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tandem_worker.engine.schedule.params import FinishReason, GenerationRequest, SamplingParams, TokenDelta
from tandem_worker.host.errors import StartupError
from tandem_worker.model.pooling import EmbeddingSpec

if TYPE_CHECKING:
    from tandem_worker.engine.core import EngineCore

WARM_UP_SECONDS = 300.0
"""For each request: compiling is part of it."""
_NAME = "tandem-warm-up"
_LONGEST = 2048
"""Tokens of a prompt from which on attention and experts take their largest tiles."""


class Ends:
    """The engine's delivery function while it is warmed up: keeps the ends of requests."""

    def __init__(self) -> None:
        self._ends: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()

    def deliver(self, deltas: Sequence[TokenDelta]) -> None:
        """Keep those deltas that have a finish reason. Called on the engine thread."""
        for delta in deltas:
            if delta.finish_reason is not None:
                self._ends.put(delta)

    def await_next(self, timeout: float) -> TokenDelta | None:
        """The end of a request; None when none ends in `timeout` seconds."""
        try:
            return self._ends.get(timeout=timeout)
        except queue.Empty:
            return None


def plan_warm_up(max_model_len: int, embedding: EmbeddingSpec | None, *, compiles: bool) -> list[GenerationRequest]:
    """The requests, in order. The first is the smallest. `compiles`: kernels that serving needs are still to be
    compiled."""
    sampled = SamplingParams(
        max_tokens=1,
        temperature=1.0,
        top_p=0.9,
        top_k=8,
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={0: 0.0},
        ignore_eos=True,
    )
    greedy = SamplingParams(max_tokens=1 if embedding is None else 0, temperature=0.0, ignore_eos=True)
    requests: list[tuple[int, SamplingParams]] = [(2, greedy)]
    if compiles:
        if embedding is None and max_model_len > 3:
            requests.append((2, replace(greedy, max_tokens=2)))  # a step of a decode alone, which is not recorded yet
        longest = min(_LONGEST, max_model_len - 1)
        requests += [(length, greedy) for length in _powers_of_two(4, longest)]
        if embedding is None:
            requests += [(2, replace(sampled, num_logprobs=count)) for count in (0, 1, 20)]
    return [
        GenerationRequest(
            request_id=f"{_NAME}-{number}",
            prompt_token_ids=(0, 1, *(0,) * (length - 2)),
            sampling=sampling,
            cache_salt=f"{_NAME}-{number}",  # or the longer would find the shorter in the cache
            pooling=None if embedding is None else embedding.pooling,
        )
        for number, (length, sampling) in enumerate(requests)
    ]


def warm_up(engine: EngineCore, ends: Ends, requests: Sequence[GenerationRequest]) -> None:
    """Compute the requests one after another; `ends` is where `engine` delivers to.

    Raises StartupError when one of them fails.
    """
    for request in requests:
        engine.submit(request)
        end = ends.await_next(WARM_UP_SECONDS)
        what = f"a prompt of {len(request.prompt_token_ids)} tokens"
        if end is None:
            raise StartupError("WarmUpFailed", f"Warming up: {what} was not computed within {WARM_UP_SECONDS:g} s.")
        if end.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP):
            raise StartupError("WarmUpFailed", f"Warming up: {what} could not be computed: {end.error}")


def _powers_of_two(first: int, last: int) -> list[int]:
    return [1 << bits for bits in range(first.bit_length() - 1, last.bit_length()) if 1 << bits <= last]
