"""Processes that follow: a pod's further ranks, and the first process of a pod that does not lead."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable

from tandem_api.launch import WorkerConfig

from tandem_worker.ending import end_process
from tandem_worker.environment import PodFacts, raise_descriptor_limit
from tandem_worker.errors import GroupLostError, StartupError
from tandem_worker.group.app import FollowerApp
from tandem_worker.group.children import Children, RankOrder, read_order
from tandem_worker.group.leading import start_children
from tandem_worker.group.link import Loss
from tandem_worker.group.member import GroupMember
from tandem_worker.group.topology import NodePlace, describe_identity
from tandem_worker.observe.logging import configure_logging
from tandem_worker.runtime import Runtime, open_runtime
from tandem_worker.server.gate import TokenGate
from tandem_worker.server.status import StatusApp

logger = logging.getLogger(__name__)


def run_child(pod: PodFacts) -> None:
    """A further rank of a pod, as its order on standard input says. Ends the process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the leader finishes what is running and then stops everybody
    order = read_order(sys.stdin)
    config = order.config
    fields = {"pod": pod.pod, "model": config.model_name, "role": config.role.value, "rank": str(order.rank)}
    configure_logging(pod.log_level, fields)
    raise_descriptor_limit()
    runtime = open_runtime(config, order.host)
    _Follower(order, pod, runtime, describe_identity(config)).run(logger.info, lambda: None)
    logging.shutdown()
    os._exit(0)  # torch's own end would wait for ranks that are ending too


class _Follower:
    """One rank that follows, in this process."""

    def __init__(self, order: RankOrder, pod: PodFacts, runtime: Runtime, identity: str) -> None:
        self._order, self._pod, self._runtime = order, pod, runtime
        self.member = GroupMember(
            order.rank,
            pod=pod.pod,
            identity=identity,
            on_lost=self.lose,
            ring=runtime.peers,
            vitals=runtime.vitals,
        )
        self._children = Children(self._give_up, runtime.vitals)

    def run(self, enter: Callable[[str], None], on_ready: Callable[[], None], ranks: range = range(0)) -> None:
        """Until the leader stops it. `ranks` are those of the pod, where this process starts the others of them."""
        try:
            self._run(enter, on_ready, ranks)
        except GroupLostError as error:
            self.lose(Loss(str(error)))
        except StartupError as error:
            self._give_up(Loss(str(error), error.reason))
        except Exception as error:
            logger.exception("rank %d cannot go on", self._order.rank)
            cause = Loss(f"{type(error).__name__}: {error}")
            self.member.blame(cause)
            self.lose(cause)

    def _run(self, enter: Callable[[str], None], on_ready: Callable[[], None], ranks: range) -> None:
        from tandem_worker.sources.digest import ModelDigest
        from tandem_worker.sources.resolve import resolve_model

        order, config = self._order, self._order.config
        enter("fetching the model")
        path = resolve_model(config.model, self._pod.token)
        start_children(self._children, order, path, ranks)
        enter("loading libraries")
        from tandem_worker.bootstrap import resolve_device, resolve_dtype
        from tandem_worker.group.rank import Follower, check_checkpoint

        follower = Follower(
            member=self.member,
            order=order,
            pod=self._pod,
            runtime=self._runtime,
            path=path,
            figures=check_checkpoint(config, path),
            hashing=ModelDigest(path),
            device=resolve_device(config.device, order.local_rank),
            dtype=resolve_dtype(config.dtype),
        )
        follower.run(enter, on_ready)
        self._children.stop(timeout=5.0)

    def lose(self, cause: Loss) -> None:
        end_process(self._pod, cause.reason, cause.message)

    def _give_up(self, cause: Loss) -> None:
        """For a cause that is certainly this pod's own."""
        self.member.blame(cause, patience=0.0)
        self.lose(cause)


class FollowerPod:
    """The life of a pod that does not lead: its first rank on a thread, its probes on the event loop."""

    def __init__(self, config: WorkerConfig, pod: PodFacts, place: NodePlace, runtime: Runtime) -> None:
        self._config, self._pod, self._place, self._runtime = config, pod, place, runtime
        order = RankOrder(
            config=config,
            rank=place.ranks[0],
            local_rank=0,
            leader_host=place.leader_host,
            leader_port=place.port,
            host=runtime.host,
        )
        self._follower = _Follower(order, pod, runtime, describe_identity(config))
        self._phase = "starting"
        self._ready = False
        self._leaving = False

    async def run(self) -> None:
        """Until the leader stops this pod. Raises StartupError."""
        from tandem_worker.server.ports import open_ports

        api = TokenGate(FollowerApp(self._place.leader_pod), self._runtime.api)
        status = StatusApp(
            problems=self._runtime.vitals.problems, waits_for=lambda: None if self._ready else self._phase
        )
        ports = await open_ports(self._config, self._runtime.host, api=api, status=status)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        await asyncio.to_thread(self._follower.run, self._enter, self._on_ready, self._place.ranks)
        self._ready = False
        await ports.close()
        logger.info("ended")
        logging.shutdown()
        os._exit(0)  # torch's own end would wait for ranks that are ending too

    def _enter(self, phase: str) -> None:
        self._phase = phase
        logger.info("%s", phase)

    def _on_ready(self) -> None:
        self._ready = True
        logger.info("ranks %s follow %s", list(self._place.ranks), self._place.leader_pod)

    def _on_signal(self) -> None:
        member = self._follower.member
        if not member.formed or self._leaving:
            logger.info("ending at once")
            logging.shutdown()
            os._exit(1 if member.formed else 0)
        self._leaving, self._ready = True, False
        self._phase = "draining"
        member.leave()
        self._runtime.vitals.start_thread("drain", self._end_late)

    def _end_late(self) -> None:
        """A leader that does not stop this pod in time is left behind."""
        time.sleep(self._config.drain_timeout_seconds + 5.0)
        self._follower.lose(Loss("the leader did not stop this pod within its drain timeout"))
