"""Kinds that the API server may not have: watched from when it serves them, forgotten when it does so no longer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import cast

import aiohttp

from tandem_operator.kube.client import KubeClient
from tandem_operator.kube.watch import KindWatcher, Store
from tandem_operator.objects.errors import APIError, NotFoundError
from tandem_operator.objects.manifests import Kind, ModelKey, dig_list

_POLL_SECONDS = 30.0
_SYNC_SECONDS = 10.0
"""How long is waited for the first list: who may not read the kind shall not keep everything else from beginning."""

log = logging.getLogger(__name__)


class OptionalWatch:
    """Watches one kind while it is there."""

    def __init__(
        self,
        client: KubeClient,
        store: Store,
        kind: Kind,
        namespaces: Sequence[str | None],
        *,
        on_change: Callable[[ModelKey], None],
        on_served: Callable[[], None],
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        self.kind = kind
        self.is_served = False
        self.looked = asyncio.Event()
        """Set once it is known whether the kind is served, and the store has what there is."""
        self._client = client
        self._store = store
        self._namespaces = namespaces
        self._on_change = on_change
        self._on_served = on_served
        self._poll_seconds = poll_seconds
        self._tasks: list[asyncio.Task[None]] = []

    def __str__(self) -> str:
        return self.kind.name

    async def run(self) -> None:
        """Never returns. `on_served` is called whenever the kind comes or goes."""
        try:
            while True:
                try:
                    await self._look()
                except (APIError, aiohttp.ClientError, TimeoutError) as error:
                    log.warning("cannot see which kinds there are", extra={"kind": str(self), "error": str(error)})
                self.looked.set()
                await asyncio.sleep(self._poll_seconds)
        finally:
            await self._stop()

    async def _look(self) -> None:
        is_served = await self._ask()
        if is_served == self.is_served:
            return
        log.info("a kind is served" if is_served else "a kind is served no longer", extra={"kind": str(self)})
        if is_served:
            await self._start()
        else:
            await self._stop()
            self._store.retain(self.kind, None, ())
        self.is_served = is_served
        self._on_served()

    async def _ask(self) -> bool:
        try:
            found = await self._client.get(f"/apis/{self.kind.api_version}")
        except NotFoundError:
            return False
        return any(cast(str, resource.get("name")) == self.kind.plural for resource in dig_list(found, "resources"))

    async def _start(self) -> None:
        watchers = [
            KindWatcher(self._client, self._store, self.kind, namespace, on_change=self._on_change)
            for namespace in self._namespaces
        ]
        self._tasks = [asyncio.create_task(watcher.run(), name=f"watch {watcher}") for watcher in watchers]
        synced = [asyncio.create_task(watcher.synced.wait()) for watcher in watchers]
        _, late = await asyncio.wait(synced, timeout=_SYNC_SECONDS)
        for task in late:
            task.cancel()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
