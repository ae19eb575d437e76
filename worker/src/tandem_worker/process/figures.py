"""What a running worker counts and measures, in the two forms that the metrics port gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Protocol

from tandem_api.launch import WorkerConfig
from tandem_api.telemetry import WeightsTelemetry, WorkerTelemetry

from tandem_worker.engine.contract import Engine
from tandem_worker.host.environment import PodFacts
from tandem_worker.host.nvml import GpuReader, GpuSample
from tandem_worker.process.metrics import build_metrics_text
from tandem_worker.process.progress import StartProgress
from tandem_worker.process.telemetry import WorkerFacts, WorkerSample, build_telemetry
from tandem_worker.server.answer.request_metrics import RequestMetrics
from tandem_worker.server.prepare.counts import PreparationCounts
from tandem_worker.server.wire.prompt_names import PromptNames
from tandem_worker.transfer.contract import TransferStats, join_stats

if TYPE_CHECKING:
    from tandem_worker.host.files.exchange import FileExchange
    from tandem_worker.model.backends.form import FormChoice
    from tandem_worker.model.weighing import Matrices
    from tandem_worker.server.answer.request_metrics import RequestOutcome
    from tandem_worker.server.structured.compiler import GrammarCompiler
    from tandem_worker.tiers.stats import TierStats

Refusals = Callable[[], Mapping[str, int]]
"""Connections or requests that a port did not let through, by reason."""


class Transport(Protocol):
    def stats(self) -> TransferStats:
        """What the transport has counted so far. Any thread."""
        ...


def join_transports(*ends: Transport | None) -> Transport | None:
    """The transport's ends of this process as one; None where there are none."""
    there = [end for end in ends if end is not None]
    return _Joined(there) if len(there) > 1 else there[0] if there else None


class _Joined:
    def __init__(self, ends: Sequence[Transport]) -> None:
        self._ends = ends

    def stats(self) -> TransferStats:
        return reduce(join_stats, (end.stats() for end in self._ends))


class Tiers(Protocol):
    def stats(self) -> Sequence[TierStats]:
        """What every tier has done so far, and what is there now. Any thread."""
        ...


class Figures:
    """Answers `/metrics` and `/telemetry`, and counts finished requests."""

    def __init__(
        self,
        config: WorkerConfig,
        pod: PodFacts,
        engine: Engine,
        *,
        transport: Transport | None,
        grammars: GrammarCompiler,
        draining: Callable[[], bool],
        gpu: GpuReader,
        memory_bytes: Callable[[], Mapping[str, int]],
        matrices: Mapping[str, Matrices],
        weights: FormChoice | None,
        start: StartProgress,
        refusals: Mapping[str, Refusals],
        spans: Mapping[str, int],
        files: FileExchange | None = None,
        others: Callable[[], Mapping[int, GpuSample]] = dict,
        tiers: Tiers | None = None,
    ) -> None:
        """`others`: what the GPUs of the group's other ranks told last."""
        self._facts = WorkerFacts(
            model_name=config.model_name,
            role=config.role,
            revision=config.revision,
            pod=pod.pod,
            weights=None if weights is None else WeightsTelemetry(form=weights.form, why=weights.why[:1000]),
        )
        self._engine, self._transport, self._draining, self._gpu = engine, transport, draining, gpu
        self.memory_bytes = memory_bytes
        """What the process's memory, or the device's, holds now."""
        self._matrices = matrices
        self._start, self._refusals = start, refusals
        self._grammars = grammars
        self._spans, self._files, self._others = spans, files, others
        self._tiers = tiers
        self._requests = RequestMetrics()
        self.preparation = PreparationCounts()
        self.prompts = PromptNames()

    def telemetry(self) -> WorkerTelemetry:
        return build_telemetry(self._facts, self._sample())

    def metrics_text(self) -> str:
        sizes, start = self.memory_bytes(), self._start.seconds()
        return build_metrics_text(
            self._facts, self._sample(), self._requests, sizes, self._matrices, start, self.preparation
        )

    def observe_request(self, outcome: RequestOutcome) -> None:
        """An answer that is sent in one piece ends as it begins."""
        first, usage = outcome.first_token_seconds, outcome.usage
        self._requests.record(
            status=outcome.status,
            seconds=outcome.seconds,
            first_token_seconds=first,
            num_generated=0 if usage is None else usage.completion_tokens,
            streamed=first is not None and outcome.seconds - first > 1e-3,
        )

    def _sample(self) -> WorkerSample:
        return WorkerSample(
            at=time.time(),
            draining=self._draining(),
            engine=self._engine.stats(),
            gpu=self._gpu.sample(),
            transfer=None if self._transport is None else self._transport.stats(),
            grammars=self._grammars.counts,
            grammar_restarts=self._grammars.num_restarts,
            refusals={port: dict(count()) for port, count in self._refusals.items()},
            spans=dict(self._spans),
            others=dict(self._others()),
            graphs_pending=self._engine.graphs_pending,
            files=None if self._files is None else self._files.sample(),
            start=self._start.figure(),
            prompts=self.prompts.recent(),
            tiers=() if self._tiers is None else self._tiers.stats(),
        )
