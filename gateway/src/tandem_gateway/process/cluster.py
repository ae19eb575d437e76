"""Discovery in Kubernetes: the pods of the model, those among them that sleep or start, and its own settings."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from tandem_api.launch import GatewayConfig

from tandem_gateway.process.gateway import Gateway
from tandem_gateway.workers.discovery.kube import ApiServer
from tandem_gateway.workers.discovery.pods import PodWatcher
from tandem_gateway.workers.discovery.routing import RoutingWatcher
from tandem_gateway.workers.probation import Probation
from tandem_gateway.workers.starting import StartWatch
from tandem_gateway.workers.waker import Sleeper, Waker


class Cluster:
    def __init__(self, config: GatewayConfig, gateway: Gateway, probation: Probation) -> None:
        """`probation` passes on the workers that may serve. Raises ConfigError: this is no pod of a cluster."""
        server, queue, seconds = ApiServer.in_cluster(), gateway.queue, config.timeouts.connect_seconds
        self.starts = StartWatch(connect_seconds=seconds)
        self._probation = probation
        self._pods = PodWatcher(
            server,
            namespace=config.namespace,
            model=config.model_name,
            apply=probation.take,
            tell_sleepers=self._tell_sleepers,
        )
        self.waker = Waker(
            waits=lambda: queue.settings.wakes and queue.line.size > 0,
            token_line=lambda: gateway.token_line,
            connect_seconds=seconds,
            on_awake=self._pods.admit,
        )
        self.routing = RoutingWatcher(
            server, namespace=config.namespace, model=config.model_name, apply=gateway.apply_routing
        )

    def _tell_sleepers(self, sleepers: list[Sleeper]) -> None:
        self.waker.take(sleepers)
        self.starts.take(sleepers)

    def jobs(self) -> list[Coroutine[Any, Any, None]]:
        """What is to run for as long as the process does."""
        return [self._pods.run(), self.routing.run(), self.waker.run(), self.starts.run(), self._probation.run()]
