"""New decode workers prove that key-value blocks reach them before they get requests of clients.

A decode worker whose prefill port is blocked, or whose blocks fail their checksums, is ready and answers: it computes
every prompt itself, slowly, and takes its share of the load with that. So discovery's workers come through here. A new
decode worker is held back until it has answered one short request for which a prefill worker of its revision computed
the prompt. The gateway asks, because it alone knows both ends, and over the very way that requests take.

Nobody is held back for want of a prefill worker, nor are those that serve already when this gateway starts, nor ever
the last one: it can compute prompts itself. How blocks reach a worker of another engine is that engine's business.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from tandem_api.fleet import LONGEST_TEXT, WorkerReport
from tandem_api.names import HEADER_PREFILL, HEADER_PREFILL_WORKER, HEADER_REQUEST_ID, Role

from tandem_gateway.http.response import ResponseHead
from tandem_gateway.scheduling import Worker
from tandem_gateway.upstream.base import Failure
from tandem_gateway.upstream.http1 import Http1Link

PROBE_SECONDS = 10.0
BACKOFF_SECONDS = (1.0, 2.0, 5.0, 15.0)
"""After the first failed probe, the second, and so on."""
AT_ONCE = 8
"""Workers that are probed at a time; each by one request at a time."""
PATIENCE = 3
"""Probes in a row that a worker which serves already may fail."""
_FIRST = -1000
"""Priority of probes: a queue says nothing about the way of the blocks."""
_TEXT_BYTES = 256
"""Bytes of hexadecimal digits in a probe's prompt: more tokens than decode workers compute themselves, whatever the
tokenizer."""
_PREFILL_WORKER = HEADER_PREFILL_WORKER.encode()

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Trial:
    """What is known of one decode worker on probation."""

    worker: Worker
    served: bool
    """It got requests before it was probed."""
    over: bool = False
    """It has proved itself, or cannot be asked to."""
    failures: int = 0
    """In a row."""
    due: float = 0.0
    reason: str = "not probed yet"

    @property
    def is_trusted(self) -> bool:
        return self.over or (self.served and self.failures < PATIENCE)


class Probation:
    """Owned by one event loop. `take` is discovery's, `apply` gets the workers that may have requests."""

    def __init__(
        self,
        apply: Callable[[list[Worker]], None],
        *,
        served_name: str,
        token_line: Callable[[], bytes],
        connect_seconds: float,
        backoff: tuple[float, ...] = BACKOFF_SECONDS,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_urgent`: whether requests wait for a worker."""
        self._apply = apply
        self._served_name = served_name
        self._token_line = token_line
        self._connect_seconds = connect_seconds
        self._backoff = backoff
        self._is_urgent = is_urgent
        self._trials: dict[tuple[str, str], _Trial] = {}
        self._workers: list[Worker] | None = None
        self._passed: list[Worker] | None = None
        self._changed = asyncio.Event()

    def take(self, workers: list[Worker]) -> None:
        """The model's workers are now these."""
        is_first = self._workers is None
        self._workers = workers
        before, self._trials = self._trials, {}
        for worker in workers:
            if worker.role is Role.DECODE and worker.engine == "Tandem":
                key = worker.name, worker.address
                self._trials[key] = before.get(key) or _Trial(worker, served=is_first)
        self._changed.set()
        self._pass_on()

    def reports(self) -> list[WorkerReport]:
        """A report for each worker that is held back."""
        passed = {worker.name for worker in self._passed or ()}
        return [
            WorkerReport(
                name=trial.worker.name,
                address=trial.worker.address,
                role=trial.worker.role,
                revision=trial.worker.revision,
                state="Ejected",
                reason=f"kv: {trial.reason}"[:LONGEST_TEXT],
            )
            for trial in self._trials.values()
            if trial.worker.name not in passed
        ]

    async def run(self) -> None:
        """Probe whoever is due. Never returns."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            waiting = [trial for trial in self._trials.values() if not trial.over and self._peers(trial.worker)]
            due = [trial for trial in waiting if trial.due <= loop.time()][:AT_ONCE]
            if due:
                await asyncio.gather(*(self._try(trial) for trial in due))
                self._pass_on()
                continue
            pause = min((trial.due - loop.time() for trial in waiting), default=None)
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _peers(self, worker: Worker) -> list[Worker]:
        return [
            other
            for other in self._workers or ()
            if other.role is Role.PREFILL and other.revision == worker.revision
        ]  # fmt: skip

    def _pass_on(self) -> None:
        held = [trial for trial in self._trials.values() if not trial.is_trusted and self._peers(trial.worker)]
        if held and len(held) == len(self._trials):
            # Nobody else decodes. Who was not asked yet will be in a moment; who failed is better than nobody, and
            # while requests wait everybody is: without blocks from others it computes prompts itself.
            held = [] if self._is_urgent() else [trial for trial in held if not trial.failures]
        names = {trial.worker.name for trial in held}
        for trial in self._trials.values():
            trial.served = trial.served or trial.worker.name not in names
        passed = [worker for worker in self._workers or () if worker.name not in names]
        if passed != self._passed:
            self._passed = passed
            self._apply(passed)

    async def _try(self, trial: _Trial) -> None:
        peers = self._peers(trial.worker)
        peer = peers[trial.failures % len(peers)]  # it may be the peer's fault
        verdict = await self._ask(trial.worker, peer)
        if verdict is None:
            trial.over, trial.failures = True, 0
            log.info("key-value blocks reach a new worker", extra={"worker": trial.worker.name, "from": peer.name})
            return
        if trial.reason != verdict:
            log.warning("a new worker is held back", extra={"worker": trial.worker.name, "reason": verdict})
        trial.reason = verdict
        trial.failures += 1
        trial.due = asyncio.get_running_loop().time() + self._backoff[min(trial.failures, len(self._backoff)) - 1]

    async def _ask(self, worker: Worker, peer: Worker) -> str | None:
        """Send one request. None: the worker may serve; else what was wrong."""
        body = json.dumps(
            {"model": self._served_name, "prompt": _unique_text(), "max_tokens": 1, "priority": _FIRST}
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {worker.address}\r\ncontent-type: application/json\r\n"
            f"{HEADER_PREFILL}: {peer.kv_address or peer.address}\r\n{HEADER_REQUEST_ID}: probe-{uuid.uuid4().hex}\r\n"
            f"content-length: {len(body)}\r\n"
        ).encode()
        link = Http1Link(worker.address, connect_seconds=self._connect_seconds, on_stale=lambda: None)
        answer = _Answer()
        call = link.start(answer, head + self._token_line() + b"\r\n", body)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await answer.ended.wait()
        except TimeoutError:
            call.cancel()
            return f"no answer within {PROBE_SECONDS:g} s to a prompt for prefill worker {peer.name}"
        finally:
            link.close()
        return judge(answer, peer)


def judge(answer: _Answer, peer: Worker) -> str | None:
    """What was wrong with an answer to a probe; None: nothing, or nothing that has to do with key-value blocks."""
    if answer.failure is not None or answer.head is None:
        return f"it cannot be asked: {answer.failure or 'no answer'}"
    status = answer.head.status
    if status == 200:
        used = answer.head.fields.get(_PREFILL_WORKER, b"").decode("latin-1")
        return (
            None if used == peer.name else f"the prompt was to come from {peer.name}, and came from {used or 'nobody'}"
        )
    if status in (401, 408, 429) or status >= 500:
        return f"it answers {status}"
    return None  # such a request is none for this model


class _Answer:
    """Satisfies `upstream.base.Sink`."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.failure: str | None = None
        self.ended = asyncio.Event()

    def on_upstream_head(self, head: ResponseHead) -> None:
        self.head = head

    def on_upstream_body(self, data: bytes, *, final: bool) -> None:
        pass

    def on_upstream_end(self) -> None:
        self.ended.set()

    def on_upstream_failure(self, failure: Failure, detail: str) -> None:
        self.failure = detail
        self.ended.set()


def _unique_text() -> str:
    """A random text, of which no worker has anything cached."""
    return "".join(uuid.uuid4().hex for _ in range(_TEXT_BYTES // 32))
