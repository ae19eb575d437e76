"""An engine over a small block space, and a client that collects its deltas."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from tandem_api.launch import KVConfig, ModelSource, SchedulerConfig, SpeculativeConfig, WorkerConfig
from tandem_api.names import Role
from tandem_worker.engine.build import build_engine
from tandem_worker.engine.core import EngineCore
from tandem_worker.engine.schedule.params import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from tandem_worker.model.contract import CausalLM

BLOCK_SIZE = 4
_FETCH_SECONDS = 1e-7
"""For a block from host memory: less than any machine computes one in."""


def build_config(
    num_blocks: int,
    bytes_per_block: int,
    host_blocks: int = 0,
    speculative: SpeculativeConfig | None = None,
    **scheduler: int,
) -> WorkerConfig:
    """`num_blocks` and `host_blocks` can be given out, block 0 not counted."""
    return WorkerConfig(
        model_name="m",
        served_name="m",
        role=Role.DECODE,
        revision="r",
        model=ModelSource(uri="file:///m"),
        kv=KVConfig(
            memory_bytes=(num_blocks + 1) * bytes_per_block,
            host_memory_bytes=(host_blocks + 1) * bytes_per_block if host_blocks else 0,
            block_size=BLOCK_SIZE,
        ),
        scheduler=SchedulerConfig(**scheduler),
        speculative=speculative or SpeculativeConfig(),
    )


class Collector:
    """Deltas by (request, choice)."""

    def __init__(self) -> None:
        self.deltas: dict[tuple[str, int], list[TokenDelta]] = defaultdict(list)
        self.num_calls = 0
        self.num_finished = 0
        self._changed = threading.Condition()
        self._awaited: Callable[[], bool] | None = None
        """What is waited for: who waits is woken once it is there, and not by every step of an engine."""

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        with self._changed:
            self.num_calls += 1
            for delta in deltas:
                self.deltas[delta.request_id, delta.choice].append(delta)
                self.num_finished += delta.finish_reason is not None
            if self._awaited is not None and self._awaited():
                self._changed.notify_all()

    def wait_finished(self, count: int, timeout: float = 60.0) -> None:
        assert self._wait_for(lambda: self.num_finished >= count, timeout), (
            f"{self.num_finished} of {count} choices finished"
        )

    def wait_tokens(self, request_id: str, count: int, choice: int = 0, timeout: float = 60.0) -> None:
        assert self._wait_for(lambda: len(self.tokens(request_id, choice)) >= count, timeout)

    def _wait_for(self, awaited: Callable[[], bool], timeout: float) -> bool:
        """One thread at a time."""
        with self._changed:
            assert self._awaited is None
            self._awaited = awaited
            try:
                return self._changed.wait_for(awaited, timeout)
            finally:
                self._awaited = None

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        return [token for delta in self.deltas[request_id, choice] for token in delta.token_ids]

    def last(self, request_id: str, choice: int = 0) -> TokenDelta:
        return self.deltas[request_id, choice][-1]

    def reason(self, request_id: str, choice: int = 0) -> FinishReason | None:
        return self.last(request_id, choice).finish_reason

    def logprobs(self, request_id: str, choice: int = 0) -> list[TokenLogprob]:
        return [entry for delta in self.deltas[request_id, choice] for entry in delta.logprobs or ()]


_REQUEST_FIELDS = (
    "n", "priority", "cache_salt", "prefill_endpoints", "prompt_logprobs", "pooling", "resumed", "step_seconds",
    "kv_source", "kv_source_tokens",
    "prediction", "literals",
)  # fmt: skip


class Rig:
    def __init__(
        self,
        model: CausalLM,
        num_blocks: int = 64,
        *,
        host_blocks: int = 0,
        scheduler: dict[str, int] | None = None,
        speculative: SpeculativeConfig | None = None,
        **kw: Any,
    ) -> None:
        bytes_per_block = model.kv_cache_spec(BLOCK_SIZE).bytes_per_block
        config = build_config(num_blocks, bytes_per_block, host_blocks, speculative, **(scheduler or {}))
        self.model = model
        self.out = Collector()
        self.engine: EngineCore = build_engine(model, config, self.out, **kw)
        if host_blocks:  # else the one copy that was timed decides whether blocks come back at all
            for lane in self.engine._runner.lanes:
                lane.executor.fetch_seconds = _FETCH_SECONDS
        self._submitted = 0

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> None:
        request_fields = {name: options.pop(name) for name in _REQUEST_FIELDS if name in options}
        sampling = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0} | options))
        self.engine.submit(
            GenerationRequest(
                request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling, **request_fields
            )
        )
        self._submitted += request_fields.get("n", 1)

    def resume(
        self, request_id: str, prompt: Sequence[int], resumed: tuple[tuple[int, ...] | None, ...], **options: Any
    ) -> None:
        """Submit a request that began elsewhere. All of its choices must be open for `wait`."""
        self.submit(request_id, prompt, resumed=resumed, **options)

    def wait(self) -> None:
        """Until every choice submitted so far has ended."""
        self.out.wait_finished(self._submitted)

    def run(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> list[int]:
        self.submit(request_id, prompt, max_tokens, **options)
        self.wait()
        return self.out.tokens(request_id)

    def close(self) -> None:
        self.engine.stop()
        self.engine._scheduler.blocks.check()
