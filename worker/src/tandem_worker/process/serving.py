"""The life of a process that serves: ports from its first moment, a start on a thread, a drain, an orderly end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tandem_api.launch import TracingConfig, TTFTDeadline, WorkerConfig
from tandem_api.names import REASON_STEP_HUNG, REASON_WAKE_TIMED_OUT

from tandem_worker.engine.errors import GroupLostError
from tandem_worker.group.control.link import Loss
from tandem_worker.group.pods.leading import LeadingPod
from tandem_worker.group.topology import NodePlace
from tandem_worker.host.ending import end_process
from tandem_worker.host.environment import PodFacts
from tandem_worker.host.runtime import Runtime
from tandem_worker.process.build import build_worker
from tandem_worker.process.figures import Refusals
from tandem_worker.process.progress import StartProgress, Switches, observe_age
from tandem_worker.process.staging import StagedApp
from tandem_worker.process.standby import WAKE_SECONDS, Standby, WakeDoor
from tandem_worker.process.stop import Stop
from tandem_worker.process.watchdog import StepWatchdog
from tandem_worker.process.worker import Worker
from tandem_worker.server.wire.gate import TokenGate
from tandem_worker.server.wire.serving import open_ports
from tandem_worker.server.wire.status import StatusApp

logger = logging.getLogger("tandem_worker")

_DRAIN_POLL_SECONDS = 0.05
_CHILDREN_SECONDS = 1.0
_TARGET_SECONDS = 5.0
"""Between two looks at the target for first tokens, and at whether requests are traced."""
_FAREWELL_SECONDS = 5.0
"""What it takes to answer everybody that the worker has failed, and to end; then it ends anyway."""


class ServingProcess:
    """The life of the process on its event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        pod: PodFacts,
        place: NodePlace,
        runtime: Runtime,
        drain_seconds: Callable[[], float],
        step_seconds: Callable[[], float | None],
        ttft_target: Callable[[], TTFTDeadline | None],
        tracing: Callable[[], TracingConfig | None],
        standby: Callable[[], bool] = lambda: False,
    ) -> None:
        self._drain_seconds = drain_seconds
        self._step_seconds = step_seconds
        self._ttft_target = ttft_target
        self._tracing = tracing
        self._watchdog: StepWatchdog | None = None
        self._config = config
        self._pod = pod
        self._place = place
        self._runtime = runtime
        self._progress = StartProgress(age=observe_age())
        self._switches = Switches()
        self._standby = Standby(self._progress, standby, self._limit_wake)
        self._stop = Stop(self._switches)

    async def run(self) -> None:
        """Open the ports, build the worker, serve, drain and close. Returns after an ordinary stop.

        Raises what opening the ports or building the worker raises. When the group is lost it ends the process instead.
        """
        self._loop = asyncio.get_running_loop()
        app = StagedApp(lambda: self._progress.phase)
        door = WakeDoor(app, self._standby, self._switches)
        gate = TokenGate(door, self._runtime.api)
        status = StatusApp(problems=self._runtime.vitals.problems, waits_for=self._waits_for, rests=self._rests)
        ports = await open_ports(self._config, self._runtime.host, api=gate, status=status)
        self._stop.handle_signals(starting=True)
        if self._runtime.files is not None:
            self._runtime.files.open(self._runtime.host)
        group = self._open_group()
        try:
            worker = await self._build(group, self._refusals(gate, group))
        except BaseException as error:
            door.fail()
            if group is not None:
                group.leader.lose(Loss(f"rank 0 cannot start: {error}", getattr(error, "reason", "GroupLost")))
            await ports.close()
            raise
        self._stop.handle_signals(starting=False)
        await app.install(worker.app)
        status.figures = worker.figures
        self._watch_steps(worker, group)
        if self._runtime.files is not None:
            self._runtime.files.watch(lambda: not worker.idle)
        following = asyncio.create_task(self._follow(worker))
        self._switches.ready = True
        door.open()
        worker.begin_background(self._runtime.vitals)
        await self._stop.asked.wait()
        following.cancel()
        await self._drain(worker)
        if (loss := self._stop.loss) is not None:
            await worker.fail(loss.message)
            if group is not None:  # one that hangs does not notice that its leader ends
                await asyncio.to_thread(group.children.stop, _CHILDREN_SECONDS)
            end_process(self._pod, loss.reason, loss.message)
        await ports.close()
        if self._watchdog is not None:
            self._watchdog.stop()
        await asyncio.to_thread(self._close, worker)
        await asyncio.to_thread(self._runtime.tracer.close)
        logger.info("ended")

    def _refusals(self, gate: TokenGate, group: LeadingPod | None) -> dict[str, Refusals]:
        """Counts of refusals at every port that strangers may knock at, by its name."""
        refusals: dict[str, Refusals] = {"http": lambda: gate.refusals}
        if self._runtime.files is not None:
            refusals["files"] = self._runtime.files.refusals
        if group is not None:
            refusals["group"] = lambda: group.leader.refusals
        return refusals

    def _close(self, worker: Worker) -> None:
        if self._runtime.files is not None:
            self._runtime.files.close()
        worker.close()

    def _rests(self) -> bool:
        return self._standby.reached and not self._switches.draining

    def _waits_for(self) -> str | None:
        if self._switches.draining:
            return "draining"
        if not self._switches.ready:
            return self._progress.phase
        return None if self._watchdog is None else self._watchdog.problem

    async def _follow(self, worker: Worker) -> None:
        """A target for first tokens, or tracing, that is written down while the worker runs restarts nobody."""
        known = self._config.ttft_target
        while True:
            await asyncio.sleep(_TARGET_SECONDS)
            self._runtime.tracer.follow(self._tracing())
            target = self._ttft_target()
            if target != known:
                known = target
                worker.engine.order_by(target)
                logger.info("prompts are ordered by another target", extra={"target": target and target.to_json()})

    def _watch_steps(self, worker: Worker, group: LeadingPod | None) -> None:
        """From now on; while the worker starts, warming up has limits of its own."""
        loop = asyncio.get_running_loop()

        def on_hung(cause: str) -> None:
            loss = Loss(cause, REASON_STEP_HUNG)
            if group is not None:
                group.leader.lose(loss)  # the other ranks wait inside the same step; it calls `lose`
            else:
                loop.call_soon_threadsafe(self._stop.lose, loss)
            time.sleep(_FAREWELL_SECONDS)
            end_process(self._pod, loss.reason, loss.message)  # the event loop does not get there

        self._watchdog = StepWatchdog(worker.engine, configured=self._step_seconds, on_hung=on_hung)
        self._watchdog.start(self._runtime.vitals)

    def _limit_wake(self) -> None:
        """On the thread of the step that waited."""
        self._loop.call_soon_threadsafe(self._loop.call_later, WAKE_SECONDS, self._end_late_wake)

    def _end_late_wake(self) -> None:
        if not self._switches.ready:
            text = f"The worker was woken {WAKE_SECONDS:g} s ago and is still {self._progress.phase}."
            end_process(self._pod, REASON_WAKE_TIMED_OUT, text)

    async def _build(self, group: LeadingPod | None, refusals: dict[str, Refusals]) -> Worker:
        """Raises StartupError; GroupLostError without waiting for a step that a lost rank will never take part in."""
        # The thread must end: libgomp counts the helpers of every thread that ever computed, and as soon as it counts
        # more threads than cores, none of them waits for work without going to sleep (decode steps take half as long
        # again).
        builder = ThreadPoolExecutor(1, thread_name_prefix="build")
        building = asyncio.get_running_loop().run_in_executor(
            builder,
            build_worker,
            self._config,
            self._pod,
            self._runtime,
            self._progress,
            self._switches,
            group,
            refusals,
            self._standby if self._config.standby and group is None else None,
        )
        builder.shutdown(wait=False)
        stopped = asyncio.ensure_future(self._stop.asked.wait())
        await asyncio.wait({building, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if (loss := self._stop.loss) is not None:
            end_process(self._pod, loss.reason, loss.message)
        try:
            return await building
        except GroupLostError:
            await stopped  # the cause comes by way of `on_lost`
            loss = self._stop.loss
            assert loss is not None
            end_process(self._pod, loss.reason, loss.message)
        finally:
            stopped.cancel()

    def _open_group(self) -> LeadingPod | None:
        if self._config.group.parallelism.num_ranks == 1:
            return None

        loop = asyncio.get_running_loop()

        def on_lost(cause: Loss) -> None:
            loop.call_soon_threadsafe(self._stop.lose, cause)

        def on_leaving() -> None:
            loop.call_soon_threadsafe(self._stop.leave)

        return LeadingPod(self._config, self._pod, self._place, self._runtime, on_lost=on_lost, on_leaving=on_leaving)

    async def _drain(self, worker: Worker) -> None:
        """Until nothing is left to finish, or nothing can be finished any more."""
        worker.drain()
        timeout = self._drain_seconds()
        logger.info("draining for at most %g s", timeout)
        deadline = time.monotonic() + timeout
        flushed = asyncio.create_task(asyncio.to_thread(worker.flush, timeout))
        # The engine ends requests on its own thread and has nobody to tell: a look now and then is all it takes.
        while not worker.idle and not self._is_broken(worker) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        if not worker.idle:
            logger.warning("requests are cut off: the drain timeout has passed or the engine has failed")
        if self._stop.loss is None:
            await worker.give_up("The worker stopped before the answer was complete.")
        if not self._is_broken(worker):
            await flushed
            await asyncio.to_thread(worker.flush, deadline - time.monotonic())

    def _is_broken(self, worker: Worker) -> bool:
        return self._stop.loss is not None or worker.engine.failure is not None
