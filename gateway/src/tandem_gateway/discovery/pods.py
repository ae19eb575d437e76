"""Workers as Pods: which Pod is one, and how the set follows the API server.

List, then watch from the list's resource version; bookmarks move that version on, so that a reconnect costs nothing.
Version too old (410): list again. Server unreachable: keep the last workers and try again with growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from tandem_api.names import LABEL_MODEL, LABEL_REVISION, LABEL_ROLE, WORKER_HTTP_PORT, WORKER_KV_PORT, Role

from tandem_gateway.discovery.kube import LIST_SECONDS, ApiServer, Response, get, parse_object
from tandem_gateway.errors import DiscoveryError
from tandem_gateway.scheduling import Worker

log = logging.getLogger(__name__)
WATCH_SECONDS = 300
SILENCE_SECONDS = 90.0
"""A watch without events brings a bookmark about every minute; one that brings nothing at all is taken for dead."""
BACKOFF_FIRST = 0.5
BACKOFF_MAX = 15.0
_ROLES = {Role.PREFILL.value: Role.PREFILL, Role.DECODE.value: Role.DECODE, Role.UNIFIED.value: Role.UNIFIED}

Pod = dict[str, Any]


def read_worker(pod: Pod) -> Worker | None:
    """The worker that a Pod is, or None while it is none: not ready, being deleted, without address or role."""
    meta: dict[str, Any] = pod.get("metadata") or {}
    status: dict[str, Any] = pod.get("status") or {}
    labels: dict[str, str] = meta.get("labels") or {}
    role = _ROLES.get(labels.get(LABEL_ROLE, ""))
    address = status.get("podIP")
    if role is None or not address or meta.get("deletionTimestamp"):
        return None
    conditions: list[dict[str, Any]] = status.get("conditions") or []
    if not any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions):
        return None
    host = f"[{address}]" if ":" in address else address
    return Worker(
        name=meta["name"],
        address=f"{host}:{_port(pod, 'http', WORKER_HTTP_PORT)}",
        role=role,
        revision=labels.get(LABEL_REVISION, ""),
        kv_address=f"{host}:{_port(pod, 'kv', WORKER_KV_PORT)}",
    )


def _port(pod: Pod, name: str, usual: int) -> int:
    """The container port of that name, else the port that workers use."""
    spec: dict[str, Any] = pod.get("spec") or {}
    containers: list[dict[str, Any]] = spec.get("containers") or []
    ports: list[dict[str, Any]] = []
    for container in containers:
        ports += container.get("ports") or []
    return next((int(port["containerPort"]) for port in ports if port.get("name") == name), usual)


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
        self._workers: dict[str, Worker] = {}
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
            except (OSError, ValueError, KeyError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
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
        workers = (read_worker(pod) for pod in pods)
        self._workers = {worker.name: worker for worker in workers if worker is not None}
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
        worker = read_worker(thing) if kind in ("ADDED", "MODIFIED") else None
        if worker == self._workers.get(name):
            return
        if worker is None:
            del self._workers[name]
        else:
            self._workers[name] = worker
        self._report()

    def _report(self) -> None:
        log.info("workers changed", extra={"workers": sorted(self._workers)})
        self._apply(list(self._workers.values()))
