"""How the set of workers follows the API server; which Pods are workers is decided in `members`.

List, then watch from the list's resource version; bookmarks move that version on, so that a reconnect costs nothing.
Version too old (410): list again. Server unreachable: keep the last workers and try again with growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from tandem_api.names import LABEL_MODEL

from tandem_gateway.discovery.kube import LIST_SECONDS, ApiServer, Response, get, parse_object
from tandem_gateway.discovery.members import Member, Pod, read_member, select_workers
from tandem_gateway.errors import DiscoveryError
from tandem_gateway.scheduling import Worker

log = logging.getLogger(__name__)
WATCH_SECONDS = 300
SILENCE_SECONDS = 90.0
"""A watch without events brings a bookmark about every minute; one that brings nothing at all is taken for dead."""
BACKOFF_FIRST = 0.5
BACKOFF_MAX = 15.0


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
        self._server = server
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._selector = f"{LABEL_MODEL}={model}"
        self._apply = apply
        self._silence = silence_seconds
        self._backoff_first = backoff_first
        self._members: dict[str, Member] = {}
        self._workers: list[Worker] | None = None
        self._version: str | None = None

    async def run(self) -> None:
        """Never returns; every failure is logged and tried again."""
        loop = asyncio.get_running_loop()
        pause = self._backoff_first
        while True:
            began = loop.time()
            try:
                if self._version is None:
                    await self._list()
                await self._watch()
                # The server ends a watch after minutes. One that ends at once is a fault: no hurry to open the next.
                if loop.time() - began > self._backoff_first:
                    pause = self._backoff_first
                    continue
            except DiscoveryError as error:
                if error.gone:
                    self._version = None
                    log.info("the watch is too old; listing again")
                else:
                    log.warning("discovery failed; the last known workers stay", extra={"error": str(error)})
            except (OSError, ValueError, KeyError) as error:
                log.warning("the API server is out of reach; the last known workers stay", extra={"error": repr(error)})
            if loop.time() - began > BACKOFF_MAX:
                pause = self._backoff_first  # it had worked for a while
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, BACKOFF_MAX)

    async def _list(self) -> None:
        # resourceVersion 0 may be answered from the API server's cache: cheap, and the watch brings what it lacks.
        response = await get(self._server, self._path, {"labelSelector": self._selector, "resourceVersion": "0"})
        try:
            async with asyncio.timeout(LIST_SECONDS):
                body = parse_object(await response.read())
        finally:
            response.close()
        if response.status != 200:
            raise DiscoveryError(f"listing Pods: {response.status} {body.get('message', '')}")
        self._version = body["metadata"]["resourceVersion"]
        pods: list[Pod] = body.get("items") or []
        members = (read_member(pod) for pod in pods)
        self._members = {member.worker.name: member for member in members if member is not None}
        self._report()

    async def _watch(self) -> None:
        assert self._version is not None
        query = {
            "labelSelector": self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        response = await get(self._server, self._path, query)
        try:
            await self._check(response)
            async for line in response.lines(self._silence):
                self._take(parse_object(line))
        finally:
            response.close()

    async def _check(self, response: Response) -> None:
        if response.status == 200:
            return
        async with asyncio.timeout(LIST_SECONDS):
            body = await response.read()
        raise DiscoveryError(f"watching Pods: {response.status} {body[:200]!r}", gone=response.status == 410)

    def _take(self, event: dict[str, Any]) -> None:
        """One watch event.

        Raises:
            DiscoveryError: it reports an error; `gone` for a version that is too old.
        """
        kind: str = event.get("type", "")
        thing: dict[str, Any] = event.get("object") or {}
        if kind == "ERROR":
            raise DiscoveryError(f"the watch ended: {thing.get('message', '')}", gone=thing.get("code") == 410)
        self._version = thing["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return
        name: str = thing["metadata"]["name"]
        member = read_member(thing) if kind in ("ADDED", "MODIFIED") else None
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
