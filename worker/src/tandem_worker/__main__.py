"""`tandem-worker`: one worker process, from its configuration to its orderly end.

    tandem-worker [--config FILE] [--host ADDRESS]

In a pod the configuration is mounted; on a developer's machine `--config` names any file with the same JSON. SIGTERM
drains: no new requests, those inside finish within `drainTimeoutSeconds`. A second one ends the process at once.
A worker that cannot start leaves `{"reason", "message"}` in the termination message and exits with status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_api import names
from tandem_api.launch import WorkerConfig

from tandem_worker.environment import PodFacts, observe_pod, observe_threads, prepare_environment
from tandem_worker.errors import StartupError
from tandem_worker.observe.logging import configure_logging

if TYPE_CHECKING:
    from tandem_worker.bootstrap import Worker

logger = logging.getLogger("tandem_worker")

_DRAIN_POLL_SECONDS = 0.05


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    pod = observe_pod(os.environ)
    configure_logging(pod.log_level, {"pod": pod.pod})
    try:
        config = _configure(options.config, pod)
        _run(config, pod, options.host)
    except StartupError as error:
        _fail(pod, error.reason, str(error))
    except Exception as error:
        logger.exception("the worker cannot start")
        _fail(pod, "StartFailed", f"The worker failed unexpectedly: {type(error).__name__}: {error}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tandem-worker", description="The Tandem inference worker.")
    parser.add_argument("--config", type=Path, default=Path(names.CONFIG_PATH), help="launch configuration (JSON)")
    parser.add_argument("--host", default=None, help="address to listen on (default: all)")
    return parser.parse_args(arguments)


def _configure(path: Path, pod: PodFacts) -> WorkerConfig:
    """Read the configuration, then set up what torch and others read when they are imported."""
    from tandem_worker.bootstrap import load_config

    config = load_config(path)
    configure_logging(pod.log_level, {"pod": pod.pod, "model": config.model_name, "role": config.role.value})
    prepare_environment(os.environ, num_threads=observe_threads(), cache_dir=config.model.cache_dir)
    return config


def _run(config: WorkerConfig, pod: PodFacts, host: str | None) -> None:
    import uvloop

    address = host or ("::" if ":" in pod.pod_ip else "0.0.0.0")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Process(config, pod).run(address))


class _Process:
    """The life of the process on its event loop."""

    def __init__(self, config: WorkerConfig, pod: PodFacts) -> None:
        from tandem_worker.bootstrap import Progress, Switches

        self._config = config
        self._pod = pod
        self._progress = Progress()
        self._switches = Switches()
        self._stop = asyncio.Event()

    async def run(self, host: str) -> None:
        from tandem_worker.bootstrap import build_worker
        from tandem_worker.server.serving import serve
        from tandem_worker.staging import StagedApp

        app = StagedApp(lambda: self._progress.phase)
        try:
            server = await serve(app, host, self._config.http_port)
        except OSError as error:
            raise StartupError("PortInUse", f"Port {self._config.http_port} cannot be opened: {error}") from error
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        try:
            worker = await asyncio.to_thread(build_worker, self._config, self._pod, self._progress, self._switches)
        except BaseException:
            await server.stop()
            raise
        await app.install(worker.app)
        self._switches.ready = True
        await self._stop.wait()
        await self._drain(worker)
        await server.stop(grace_seconds=1.0)
        await asyncio.to_thread(worker.close)
        logger.info("ended")

    def _on_signal(self) -> None:
        if not self._switches.ready or self._switches.draining:
            # Nothing to finish yet, or somebody is in a hurry. The loading thread cannot be interrupted otherwise.
            logger.info("ending at once")
            logging.shutdown()
            os._exit(0 if not self._switches.ready else 1)
        self._switches.draining = True
        self._stop.set()

    async def _drain(self, worker: Worker) -> None:
        worker.drain()
        timeout = self._config.drain_timeout_seconds
        logger.info("draining for at most %g s", timeout)
        deadline = time.monotonic() + timeout
        # The engine ends requests on its own thread and has nobody to tell: a look now and then is all it takes.
        while not worker.idle and worker.engine.failure is None and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        if not worker.idle:
            logger.warning("requests are cut off: the drain timeout has passed or the engine has failed")


def _fail(pod: PodFacts, reason: str, message: str) -> None:
    """Tell the operator, through the kubelet, and a person, through the log. Ends the process."""
    logger.critical("cannot start: %s", message, extra={"reason": reason})
    if pod.termination_path.exists():  # the kubelet makes it; outside Kubernetes there is none
        with contextlib.suppress(OSError):
            pod.termination_path.write_text(json.dumps({"reason": reason, "message": message[:3000]}))
    logging.shutdown()
    sys.stderr.flush()
    os._exit(1)  # threads of torch or of a half-built engine must not keep the pod from restarting


if __name__ == "__main__":
    main()
