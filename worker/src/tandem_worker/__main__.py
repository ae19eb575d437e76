"""`tandem-worker`: one worker process, from its configuration to its orderly end.

    tandem-worker [--config FILE] [--host ADDRESS] [--prewarm files|weights]

In a pod the configuration is mounted; on a developer's machine `--config` names any file with the same JSON. SIGTERM
drains: no new requests, those inside finish within `drainTimeoutSeconds`. A second one ends the process at once.
With `--prewarm` it fills the cache for others and ends, with status 0 when all is there.
A worker that cannot start leaves `{"reason", "message"}` in the termination message and exits with status 1.
"""

from __future__ import annotations

from tandem_worker.host.collector import hold_collector

hold_collector()  # before anything else is imported

import argparse
import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from tandem_api import names
from tandem_api.launch import WorkerConfig
from tandem_api.tracing import Tracer, describe_pod, read_environment

from tandem_worker.host.ending import end_process
from tandem_worker.host.environment import (
    PodFacts,
    find_interface,
    observe_pod,
    observe_threads,
    prepare_environment,
    raise_descriptor_limit,
)
from tandem_worker.host.errors import StartupError
from tandem_worker.host.logging import configure_logging
from tandem_worker.host.postponed import postpone_imports

logger = logging.getLogger("tandem_worker")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the worker until it is told to stop; `arguments` defaults to the command line's.

    What keeps it from starting ends the process, with the reason in the pod's termination message: it does not return.
    """
    options = _parse(arguments)
    pod = observe_pod(os.environ)
    configure_logging(pod.log_level, {"pod": pod.pod})
    postpone_imports(os.environ)
    try:
        if options.follow:
            from tandem_worker.group.pods.following import run_child

            run_child(pod)
        host = options.host or ("::" if ":" in pod.pod_ip else "0.0.0.0")
        config = _configure(options.config, pod, host)
        if options.prewarm:
            from tandem_worker.process.prewarm import prewarm

            return prewarm(config, pod, options.prewarm)
        _run(config, pod, host, options.config)
    except StartupError as error:
        end_process(pod, error.reason, str(error))
    except Exception as error:
        logger.exception("the worker cannot start")
        end_process(pod, "StartFailed", f"The worker failed unexpectedly: {type(error).__name__}: {error}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tandem-worker", description="The Tandem inference worker.")
    parser.add_argument("--config", type=Path, default=Path(names.CONFIG_PATH), help="launch configuration (JSON)")
    parser.add_argument("--host", default=None, help="address of every port (default: all)")
    parser.add_argument("--prewarm", choices=("files", "weights"), help="fill the cache for later starts, and end")
    # A worker starts the processes of its other ranks itself, and orders them on their standard input.
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _configure(path: Path, pod: PodFacts, host: str) -> WorkerConfig:
    """Read the configuration, then set up what torch and others read when they are imported."""
    from tandem_worker.group.topology import plan_node, plan_rank_address
    from tandem_worker.process.configuration import load_config

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


def _run(config: WorkerConfig, pod: PodFacts, host: str, path: Path) -> None:
    import uvloop

    from tandem_worker.group.topology import check_support, plan_node
    from tandem_worker.host.runtime import open_runtime
    from tandem_worker.process.configuration import (
        read_drain_seconds,
        read_standby,
        read_step_seconds,
        read_tracing,
        read_ttft_target,
    )

    def drain_seconds() -> float:
        return read_drain_seconds(path, config)

    place = plan_node(config.group, pod.pod)
    check_support(config)
    runtime = open_runtime(config, host, _open_tracer(config, pod) if place.leads else None)
    if place.leads:
        from tandem_worker.process.serving import ServingProcess

        process = ServingProcess(
            config,
            pod,
            place,
            runtime,
            drain_seconds,
            step_seconds=lambda: read_step_seconds(path, config),
            ttft_target=lambda: read_ttft_target(path, config),
            tracing=lambda: read_tracing(path, config),
            standby=lambda: read_standby(path, config),
        )
    else:
        from tandem_worker.process.following import FollowerPod

        process = FollowerPod(config, pod, place, runtime, drain_seconds)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(process.run())


def _open_tracer(config: WorkerConfig, pod: PodFacts) -> Tracer:
    """Raises StartupError where the environment says something about tracing that cannot be read."""
    try:
        fallback = read_environment(os.environ)
    except ValueError as error:
        raise StartupError("InvalidConfig", f"{error}.") from error
    facts = describe_pod(pod.pod, pod.namespace, config.model_name, config.role)
    tracer = Tracer("tandem-worker", facts | {"tandem.revision": config.revision}, fallback)
    tracer.follow(config.tracing)
    return tracer


if __name__ == "__main__":
    main()
