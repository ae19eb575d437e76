"""How the set of workers follows the API server; which Pods are workers is decided in `members`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from tandem_api.names import LABEL_MODEL

from tandem_gateway.scheduling import Worker
from tandem_gateway.workers.discovery.follow import BACKOFF_FIRST, SILENCE_SECONDS, Follower
from tandem_gateway.workers.discovery.kube import ApiServer
from tandem_gateway.workers.discovery.members import Member, Pod, read_member, read_sleeper, select_workers
from tandem_gateway.workers.waker import Sleeper

ADMITTED_SECONDS = 60.0
"""In which a worker that says that it serves is to be ready by its probe, too."""
V = TypeVar("V")
log = logging.getLogger(__name__)


class PodWatcher:
    """Follows the Pods of one model and reports its workers."""

    def __init__(
        self,
        server: ApiServer,
        *,
        namespace: str,
        model: str,
        apply: Callable[[list[Worker]], None],
        tell_sleepers: Callable[[list[Sleeper]], None] = lambda sleepers: None,
        silence_seconds: float = SILENCE_SECONDS,
        backoff_first: float = BACKOFF_FIRST,
    ) -> None:
        """`tell_sleepers` is told of the workers that take no requests yet."""
        self._follower = Follower(
            server,
            f"/api/v1/namespaces/{namespace}/pods",
            {"labelSelector": f"{LABEL_MODEL}={model}"},
            on_list=self._replace,
            on_change=self._take,
            silence_seconds=silence_seconds,
            backoff_first=backoff_first,
        )
        self._apply = apply
        self._tell_sleepers = tell_sleepers
        self._members: dict[str, Member] = {}
        self._sleepers: dict[str, Sleeper] = {}
        self._awake: dict[str, Sleeper] = {}
        """Those that said themselves that they serve, which Kubernetes has not seen yet."""
        self._workers: list[Worker] | None = None

    async def run(self) -> None:
        """Never returns; every failure is logged and tried again."""
        await self._follower.run()

    def admit(self, sleeper: Sleeper) -> None:
        """It serves: it has said so itself. Kubernetes is to see it too within `ADMITTED_SECONDS`."""
        if self._sleepers.get(sleeper.worker.name) == sleeper:
            self._awake[sleeper.worker.name] = sleeper
            asyncio.get_running_loop().call_later(ADMITTED_SECONDS, self._dismiss, sleeper)
            self._report()

    def _dismiss(self, sleeper: Sleeper) -> None:
        if self._awake.get(sleeper.worker.name) == sleeper:
            log.warning("a worker said that it serves and is not ready", extra={"worker": sleeper.worker.name})
            del self._awake[sleeper.worker.name]
            self._report()

    def _replace(self, pods: list[Pod]) -> None:
        members = (read_member(pod) for pod in pods)
        self._members = {member.worker.name: member for member in members if member is not None}
        sleepers = (read_sleeper(pod) for pod in pods)
        self._sleepers = {sleeper.worker.name: sleeper for sleeper in sleepers if sleeper is not None}
        self._tell_sleepers(list(self._sleepers.values()))
        self._report()

    def _take(self, kind: str, pod: Pod) -> None:
        name: str = pod["metadata"]["name"]
        is_there = kind in ("ADDED", "MODIFIED")
        member = read_member(pod) if is_there else None
        sleeper = read_sleeper(pod) if is_there else None
        if (member, sleeper) == (self._members.get(name), self._sleepers.get(name)):
            return
        _put(self._members, name, member)
        if sleeper != self._sleepers.get(name):
            _put(self._sleepers, name, sleeper)
            self._tell_sleepers(list(self._sleepers.values()))
        self._report()

    def _report(self) -> None:
        self._awake = {name: one for name, one in self._awake.items() if self._sleepers.get(name) == one}
        workers = select_workers(
            [*self._members.values(), *(Member(worker=one.worker) for one in self._awake.values())]
        )
        if workers == self._workers:
            return
        self._workers = workers
        log.info("workers changed", extra={"workers": sorted(worker.name for worker in workers)})
        self._apply(workers)


def _put(known: dict[str, V], name: str, value: V | None) -> None:
    if value is None:
        known.pop(name, None)
    else:
        known[name] = value
