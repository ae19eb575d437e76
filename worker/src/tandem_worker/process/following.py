"""The life of a pod that only follows: its first rank on a thread, its probes and the way to the leader on the loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable

from starlette.types import Receive, Scope, Send
from tandem_api.launch import WorkerConfig
from tandem_api.names import HEADER_RETRY, RETRY_WORKER
from tandem_api.openai import error_body

from tandem_worker.group.control.link import Loss
from tandem_worker.group.pods.following import FollowingProcess
from tandem_worker.group.topology import NodePlace, RankOrder, describe_identity
from tandem_worker.host.environment import PodFacts
from tandem_worker.host.runtime import Runtime
from tandem_worker.server.wire.gate import TokenGate
from tandem_worker.server.wire.http import send_json
from tandem_worker.server.wire.serving import open_ports
from tandem_worker.server.wire.status import StatusApp, answer_lifespan

logger = logging.getLogger(__name__)


class FollowerApp:
    """The inference port: where to go instead."""

    def __init__(self, leader: str) -> None:
        """`leader` is the name of the pod that serves the API."""
        self._leader = leader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await answer_lifespan(receive, send)
        elif scope["type"] == "http":
            leader = self._leader
            message = f"This pod computes for the worker {leader} and takes no requests itself: ask {leader}."
            body = error_body(message, kind="overloaded_error", code="group_follower")
            await send_json(send, body, status=503, headers={HEADER_RETRY: RETRY_WORKER})


class FollowerPod:
    """The life of a pod that does not lead: its first rank on a thread, its probes on the event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        pod: PodFacts,
        place: NodePlace,
        runtime: Runtime,
        drain_seconds: Callable[[], float],
    ) -> None:
        self._drain_seconds = drain_seconds
        self._config, self._pod, self._place, self._runtime = config, pod, place, runtime
        order = RankOrder(
            config=config,
            rank=place.ranks[0],
            local_rank=0,
            leader_host=place.leader_host,
            leader_port=place.port,
            host=runtime.host,
        )
        self._follower = FollowingProcess(order, pod, runtime, describe_identity(config))
        self._phase = "starting"
        self._ready = False
        self._leaving = False

    async def run(self) -> None:
        """Until the leader stops this pod. Raises StartupError."""
        api = TokenGate(FollowerApp(self._place.leader_pod), self._runtime.api)
        status = StatusApp(
            problems=self._runtime.vitals.problems, waits_for=lambda: None if self._ready else self._phase
        )
        ports = await open_ports(self._config, self._runtime.host, api=api, status=status)
        if self._runtime.files is not None:
            self._runtime.files.open(self._runtime.host)
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
        time.sleep(self._drain_seconds() + 5.0)
        self._follower.lose(Loss("the leader did not stop this pod within its drain timeout"))
