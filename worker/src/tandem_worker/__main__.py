"""`tandem-worker`: one worker process, from its configuration to its orderly end.

    tandem-worker [--config FILE] [--host ADDRESS]

In a pod the configuration is mounted; on a developer's machine `--config` names any file with the same JSON. SIGTERM
drains: no new requests, those inside finish within `drainTimeoutSeconds`. A second one ends the process at once.
A worker that cannot start leaves `{"reason", "message"}` in the termination message and exits with status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_api import names
from tandem_api.launch import WorkerConfig

from tandem_worker.ending import end_process
from tandem_worker.environment import (
    PodFacts,
    find_interface,
    observe_pod,
    observe_threads,
    prepare_environment,
    raise_descriptor_limit,
)
from tandem_worker.errors import GroupLostError, StartupError
from tandem_worker.observe.logging import configure_logging

if TYPE_CHECKING:
    from tandem_worker.bootstrap import Worker
    from tandem_worker.group.leading import LeadingPod
    from tandem_worker.group.link import Loss
    from tandem_worker.group.topology import NodePlace
    from tandem_worker.observe.figures import Refusals
    from tandem_worker.runtime import Runtime

logger = logging.getLogger("tandem_worker")

_DRAIN_POLL_SECONDS = 0.05


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    pod = observe_pod(os.environ)
    configure_logging(pod.log_level, {"pod": pod.pod})
    try:
        if options.follow:
            from tandem_worker.group.following import run_child

            run_child(pod)
        host = options.host or ("::" if ":" in pod.pod_ip else "0.0.0.0")
        config = _configure(options.config, pod, host)
        _run(config, pod, host)
    except StartupError as error:
        end_process(pod, error.reason, str(error))
    except Exception as error:
        logger.exception("the worker cannot start")
        end_process(pod, "StartFailed", f"The worker failed unexpectedly: {type(error).__name__}: {error}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tandem-worker", description="The Tandem inference worker.")
    parser.add_argument("--config", type=Path, default=Path(names.CONFIG_PATH), help="launch configuration (JSON)")
    parser.add_argument("--host", default=None, help="address of every port (default: all)")
    # A worker starts the processes of its other ranks itself, and orders them on their standard input.
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _configure(path: Path, pod: PodFacts, host: str) -> WorkerConfig:
    """Read the configuration, then set up what torch and others read when they are imported."""
    from tandem_worker.bootstrap import load_config
    from tandem_worker.group.topology import plan_node, plan_rank_address

    config = load_config(path)
    configure_logging(pod.log_level, {"pod": pod.pod, "model": config.model_name, "role": config.role.value})
    raise_descriptor_limit()
    place = plan_node(config.group, pod.pod)
    num_threads = max(1, observe_threads() // len(place.ranks))
    prepare_environment(
        os.environ,
        num_threads=num_threads,
        cache_dir=config.model.cache_dir,
        interface=find_interface(plan_rank_address(config.group, host, pod.pod_ip)),
    )
    return config


def _run(config: WorkerConfig, pod: PodFacts, host: str) -> None:
    import uvloop

    from tandem_worker.group.topology import check_support, plan_node
    from tandem_worker.runtime import open_runtime

    place = plan_node(config.group, pod.pod)
    check_support(config)
    runtime = open_runtime(config, host)
    if place.leads:
        process = _Process(config, pod, place, runtime)
    else:
        from tandem_worker.group.following import FollowerPod

        process = FollowerPod(config, pod, place, runtime)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(process.run())


class _Process:
    """The life of the process on its event loop."""

    def __init__(self, config: WorkerConfig, pod: PodFacts, place: NodePlace, runtime: Runtime) -> None:
        from tandem_worker.bootstrap import Progress, Switches

        self._config = config
        self._pod = pod
        self._place = place
        self._runtime = runtime
        self._progress = Progress()
        self._switches = Switches()
        self._stop = asyncio.Event()
        self._lost: Loss | None = None

    async def run(self) -> None:
        from tandem_worker.group.link import Loss
        from tandem_worker.server.gate import TokenGate
        from tandem_worker.server.ports import open_ports
        from tandem_worker.server.status import StatusApp
        from tandem_worker.staging import StagedApp

        app = StagedApp(lambda: self._progress.phase)
        gate = TokenGate(app, self._runtime.api)
        status = StatusApp(problems=self._runtime.vitals.problems, waits_for=self._waits_for)
        ports = await open_ports(self._config, self._runtime.host, api=gate, status=status)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        group = self._open_group()
        try:
            refusals: dict[str, Refusals] = {"http": lambda: gate.refusals}
            if group is not None:
                refusals["group"] = lambda: group.leader.refusals
            worker = await self._build(group, refusals)
        except BaseException as error:
            if group is not None:
                group.leader.lose(Loss(f"rank 0 cannot start: {error}", getattr(error, "reason", "GroupLost")))
            await ports.close()
            raise
        await app.install(worker.app)
        status.figures = worker.figures
        self._switches.ready = True
        await self._stop.wait()
        await self._drain(worker)
        if self._lost is not None:
            await worker.fail(self._lost.message)
            end_process(self._pod, self._lost.reason, self._lost.message)
        await ports.close()
        await asyncio.to_thread(worker.close)
        logger.info("ended")

    def _waits_for(self) -> str | None:
        if self._switches.draining:
            return "draining"
        return None if self._switches.ready else self._progress.phase

    async def _build(self, group: LeadingPod | None, refusals: dict[str, Refusals]) -> Worker:
        """Raises StartupError; GroupLostError without waiting for a step that a lost rank will never take part in."""
        from tandem_worker.bootstrap import build_worker

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
        )
        builder.shutdown(wait=False)
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({building, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if self._lost is not None:
            end_process(self._pod, self._lost.reason, self._lost.message)
        try:
            return await building
        except GroupLostError:
            await stopped  # the cause comes by way of `on_lost`
            assert self._lost is not None
            end_process(self._pod, self._lost.reason, self._lost.message)
        finally:
            stopped.cancel()

    def _open_group(self) -> LeadingPod | None:
        if self._config.group.parallelism.num_ranks == 1:
            return None
        from tandem_worker.group.leading import LeadingPod

        loop = asyncio.get_running_loop()

        def on_lost(cause: Loss) -> None:
            loop.call_soon_threadsafe(self._on_lost, cause)

        def on_leaving() -> None:
            loop.call_soon_threadsafe(self._on_leaving)

        return LeadingPod(self._config, self._pod, self._place, self._runtime, on_lost=on_lost, on_leaving=on_leaving)

    def _on_lost(self, cause: Loss) -> None:
        self._lost = cause
        self._switches.draining = True
        self._stop.set()

    def _on_leaving(self) -> None:
        """Another pod of the group must end. That ends the group, so finish what is running."""
        if self._switches.ready and not self._switches.draining:
            self._on_signal()

    def _on_signal(self) -> None:
        if not self._switches.ready or self._switches.draining:
            # Nothing to finish yet, or somebody is in a hurry. The loading thread cannot be interrupted otherwise.
            logger.info("ending at once")
            logging.shutdown()
            os._exit(0 if not self._switches.ready else 1)
        self._switches.draining = True
        self._stop.set()

    async def _drain(self, worker: Worker) -> None:
        """Until nothing is left to finish, or nothing can be finished any more."""
        worker.drain()
        timeout = self._config.drain_timeout_seconds
        logger.info("draining for at most %g s", timeout)
        deadline = time.monotonic() + timeout
        # The engine ends requests on its own thread and has nobody to tell: a look now and then is all it takes.
        while not worker.idle and not self._is_broken(worker) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        if not worker.idle:
            logger.warning("requests are cut off: the drain timeout has passed or the engine has failed")

    def _is_broken(self, worker: Worker) -> bool:
        return self._lost is not None or worker.engine.failure is not None


if __name__ == "__main__":
    main()
