"""Following a collection of the API server: list, then watch from the list's resource version.

Bookmarks move that version on, so that a reconnect costs nothing. Version too old (410): list again. Server unreachable
or refusing: what was last seen holds, and it is tried again with growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

from tandem_gateway.errors import DiscoveryError
from tandem_gateway.workers.discovery.kube import LIST_SECONDS, ApiServer, Response, get, parse_object

log = logging.getLogger(__name__)
WATCH_SECONDS = 300
SILENCE_SECONDS = 90.0
"""A watch without events brings a bookmark about every minute; one that brings nothing at all is taken for dead."""
BACKOFF_FIRST = 0.5
BACKOFF_MAX = 15.0

Thing = dict[str, Any]


class Follower:
    """Tells of every list and of every change after it."""

    def __init__(
        self,
        server: ApiServer,
        path: str,
        selector: Mapping[str, str],
        *,
        on_list: Callable[[list[Thing]], None],
        on_change: Callable[[str, Thing], None],
        on_failure: Callable[[], None] = lambda: None,
        silence_seconds: float = SILENCE_SECONDS,
        backoff_first: float = BACKOFF_FIRST,
    ) -> None:
        """`selector` is a query, `labelSelector` or `fieldSelector`. `on_list` gets all objects, `on_change` the type
        of an event (ADDED, MODIFIED or DELETED) and its object; `on_failure` is called for every failed attempt."""
        self._server = server
        self._path = path
        self._selector = dict(selector)
        self._what = path.rsplit("/", 1)[1]
        self._on_list = on_list
        self._on_change = on_change
        self._on_failure = on_failure
        self._silence = silence_seconds
        self._backoff_first = backoff_first
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
            except (DiscoveryError, OSError, ValueError, KeyError) as error:
                self._note(error)
            if loop.time() - began > BACKOFF_MAX:
                pause = self._backoff_first  # it had worked for a while
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, BACKOFF_MAX)

    def _note(self, error: Exception) -> None:
        about = {"what": self._what, "error": str(error) if isinstance(error, DiscoveryError) else repr(error)}
        if isinstance(error, DiscoveryError) and error.gone:
            self._version = None
            log.info("the watch is too old; listing again", extra=about)
        elif isinstance(error, DiscoveryError):
            log.warning("the API server's answer cannot be used; what was last seen holds", extra=about)
        else:
            log.warning("the API server is out of reach; what was last seen holds", extra=about)
        self._on_failure()

    async def _list(self) -> None:
        # resourceVersion 0 may be answered from the API server's cache: cheap, and the watch brings what it lacks.
        response = await get(self._server, self._path, self._selector | {"resourceVersion": "0"})
        try:
            async with asyncio.timeout(LIST_SECONDS):
                body = parse_object(await response.read())
        finally:
            response.close()
        if response.status != 200:
            raise DiscoveryError(f"listing {self._what}: {response.status} {body.get('message', '')}")
        self._version = body["metadata"]["resourceVersion"]
        self._on_list(body.get("items") or [])

    async def _watch(self) -> None:
        assert self._version is not None
        query = self._selector | {
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
        raise DiscoveryError(f"watching {self._what}: {response.status} {body[:200]!r}", gone=response.status == 410)

    def _take(self, event: Thing) -> None:
        """One watch event.

        Raises:
            DiscoveryError: it reports an error; `gone` for a version that is too old.
        """
        kind: str = event.get("type", "")
        thing: Thing = event.get("object") or {}
        if kind == "ERROR":
            raise DiscoveryError(f"the watch ended: {thing.get('message', '')}", gone=thing.get("code") == 410)
        self._version = thing["metadata"]["resourceVersion"]
        if kind != "BOOKMARK":
            self._on_change(kind, thing)
