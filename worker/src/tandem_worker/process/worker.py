"""Everything that runs in a serving process but its HTTP servers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_api.launch import WorkerConfig

from tandem_worker.engine.errors import GroupLostError
from tandem_worker.host.environment import dies_with_container
from tandem_worker.process.figures import Figures
from tandem_worker.server.answer.deltas import DeltaHub

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from tandem_worker.engine.core import EngineCore
    from tandem_worker.engine.execute.pages import BlockPages
    from tandem_worker.group.pods.leading import LeadingPod
    from tandem_worker.host.vitals import Vitals
    from tandem_worker.model.prepared.kernels import PreparedKernels
    from tandem_worker.model.prepared.weights import PreparedWeights
    from tandem_worker.process.known import KnownStart
    from tandem_worker.process.tiers import Tiers
    from tandem_worker.server.structured.compiler import GrammarCompiler
    from tandem_worker.transfer.decode.client import TcpPrefillClient
    from tandem_worker.transfer.prefill.server import TcpPrefillServer


_GRAMMARS_SECONDS = 2.0
"""In which the request that woke the worker has its first token."""
_FIRST_ANSWER_SECONDS = 2.0
"""In which a request that waited for the worker has come."""
_LATE_SECONDS = 300.0
"""After which kernels are kept once more: steps of several sequences before their size was recorded have some too."""
_MOST_RECORDING_SECONDS = 600.0
"""After which kernels are kept though batch sizes are still to be recorded; what these compile is kept next time."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """Everything that runs in this process but the HTTP servers."""

    config: WorkerConfig
    app: ASGIApp
    """The inference API."""
    figures: Figures
    engine: EngineCore
    pages: BlockPages
    prepared: PreparedWeights | None
    """None for a GPU."""
    kernels: PreparedKernels | None
    """None where there is no GPU."""
    known: KnownStart | None
    """None where nothing is measured for the next start."""
    hub: DeltaHub
    prefill_server: TcpPrefillServer | None
    prefill_client: TcpPrefillClient | None
    tiers: Tiers | None = None
    """None where blocks are kept in memory alone."""
    grammars: GrammarCompiler
    grammars_later: bool = False
    """The process that compiles grammars is not started yet, and is to be once nobody waits for the first answer."""
    group: LeadingPod | None = None

    @property
    def idle(self) -> bool:
        """Whether the engine has no request and nobody waits for an answer: there is nothing left to drain."""
        return self.engine.idle and self.hub.num_open == 0

    def begin_background(self, vitals: Vitals) -> None:
        """What nobody waits for: memory for blocks to come, a copy of the weights where a next start finds it, and what
        a worker that was woken has left for later."""
        self.pages.start(vitals)
        if self.engine.graphs_pending:
            vitals.start_thread("resume-recordings", self._resume_recordings)
        if self.grammars_later:
            vitals.start_thread("start-grammars", self._start_grammars)
        if not dies_with_container(Path(self.config.model.cache_dir).absolute()):
            vitals.start_thread("save-prepared", self._save_prepared)

    def _save_prepared(self) -> None:
        """What the next start need not make again. Kernels are all there once every batch size is recorded."""
        if self.prepared is not None:
            self.prepared.save()
        if self.kernels is None:
            return
        deadline = time.monotonic() + _MOST_RECORDING_SECONDS
        while self.engine.graphs_pending and time.monotonic() < deadline:
            time.sleep(1.0)
        if self.kernels.save() and self.known is not None:
            self.known.save()
        time.sleep(_LATE_SECONDS)
        self.kernels.save()

    def _resume_recordings(self) -> None:
        """Once the first answer has begun, or nobody has asked for one."""
        deadline, warm_up = time.monotonic() + _FIRST_ANSWER_SECONDS, self.engine.stats().generated_tokens_total
        while self.engine.stats().generated_tokens_total == warm_up and time.monotonic() < deadline:
            time.sleep(0.02)
        self.engine.hold_recordings(held=False)

    def _start_grammars(self) -> None:
        time.sleep(_GRAMMARS_SECONDS)
        with contextlib.suppress(RuntimeError):  # it is closed by now
            self.grammars.start()

    def drain(self) -> None:
        """Take no new requests and no new orders of other workers; those inside go on."""
        self.engine.drain()
        if self.prefill_server is not None:
            self.prefill_server.drain()

    def flush(self, seconds: float) -> None:
        """Blocks that are in memory alone go to the disk, for so long at most. Blocks the calling thread."""
        if self.tiers is not None and self.engine.failure is None and seconds > 0:
            self.tiers.flush(seconds)

    def close(self) -> None:
        """End everything at once: peers first, whose blocks the engine holds, then the engine and its processes."""
        if self.prefill_server is not None:
            self.prefill_server.close()
        if self.prefill_client is not None:
            self.prefill_client.close()
        self.pages.stop()
        if self.tiers is not None:
            self.tiers.close()
        self.engine.stop(timeout=5.0)
        self.grammars.close()
        if self.group is not None:
            self.group.stop()

    async def fail(self, cause: str, grace_seconds: float = 2.0) -> None:
        """End every request with an error, for the engine cannot; on the event loop. Waits until they are answered."""
        self.engine.fail(GroupLostError(cause))
        await self.give_up(f"The worker has lost a part of itself: {cause}", grace_seconds)

    async def give_up(self, cause: str, grace_seconds: float = 2.0) -> None:
        """End every request here, so that other workers take them; on the event loop. Waits until they are told."""
        self.hub.abort_all(cause)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while self.hub.num_open:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
