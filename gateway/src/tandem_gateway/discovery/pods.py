"""How the set of workers follows the API server; which Pods are workers is decided in `members`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem_api.names import LABEL_MODEL

from tandem_gateway.discovery.follow import BACKOFF_FIRST, SILENCE_SECONDS, Follower
from tandem_gateway.discovery.kube import ApiServer
from tandem_gateway.discovery.members import Member, Pod, read_member, select_workers
from tandem_gateway.scheduling import Worker

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
        silence_seconds: float = SILENCE_SECONDS,
        backoff_first: float = BACKOFF_FIRST,
    ) -> None:
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
        self._members: dict[str, Member] = {}
        self._workers: list[Worker] | None = None

    async def run(self) -> None:
        """Never returns; every failure is logged and tried again."""
        await self._follower.run()

    def _replace(self, pods: list[Pod]) -> None:
        members = (read_member(pod) for pod in pods)
        self._members = {member.worker.name: member for member in members if member is not None}
        self._report()

    def _take(self, kind: str, pod: Pod) -> None:
        name: str = pod["metadata"]["name"]
        member = read_member(pod) if kind in ("ADDED", "MODIFIED") else None
        if member == self._members.get(name):
            return
        if member is None:
            del self._members[name]
        else:
            self._members[name] = member
        self._report()

    def _report(self) -> None:
        workers = select_workers(self._members.values())
        if workers == self._workers:
            return
        self._workers = workers
        log.info("workers changed", extra={"workers": sorted(worker.name for worker in workers)})
        self._apply(workers)
