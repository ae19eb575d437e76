"""Keeps the store equal to the cluster: a list, then a watch, again and again.

kopf watches InferenceModels. Children are watched here because a list after a broken watch has to remove what vanished
meanwhile, which kopf's event handlers are not told.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp
from tandem_api import names

from tandem_operator.errors import APIError, ExpiredError
from tandem_operator.kube.client import KubeClient
from tandem_operator.kube.store import ChildStore, model_of
from tandem_operator.manifests import Kind, Manifest, ModelKey

SELECTOR = f"{names.MANAGED_BY_LABEL}={names.MANAGED_BY},{names.LABEL_MODEL}"
"""Evaluated by the API server: other people's objects never travel."""
_BACKOFF_SECONDS = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
_HEALTHY_SECONDS = 30.0
"""A watch that lasted this long had worked: that it breaks now says nothing about the failures before it."""

log = logging.getLogger(__name__)


class Watcher:
    """Watches one kind in one namespace, or in all (None)."""

    def __init__(
        self,
        client: KubeClient,
        store: ChildStore,
        kind: Kind,
        namespace: str | None,
        *,
        on_change: Callable[[ModelKey], None],
    ) -> None:
        self._client = client
        self._store = store
        self._kind = kind
        self._namespace = namespace
        self._on_change = on_change
        self._path = kind.path(namespace)
        self.synced = asyncio.Event()
        """Set once the store has everything that was there at the start."""

    async def run(self) -> None:
        """Never returns; failures are logged and tried again."""
        failures = 0
        version: str | None = None
        while True:
            started = time.monotonic()
            try:
                version = version or await self._list()
                version = await self._follow(version)
                failures = 0
            except ExpiredError:
                version = None
            except (APIError, aiohttp.ClientError, TimeoutError, ValueError) as error:
                failures = 0 if time.monotonic() - started > _HEALTHY_SECONDS else failures
                delay = _BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)]
                failures += 1
                log.warning("watch failed", extra={"kind": self._kind.name, "error": str(error), "retry_in": delay})
                await asyncio.sleep(delay)

    async def _list(self) -> str:
        present: set[tuple[ModelKey, str]] = set()
        version = ""
        async for page in self._client.list_pages(self._path, selector=SELECTOR):
            version = page["metadata"]["resourceVersion"]
            for item in page["items"]:
                if (model := self._store.put(self._kind, item)) is not None:
                    present.add((model, item["metadata"]["name"]))
        gone = self._store.retain(self._kind, self._namespace, present)
        self.synced.set()
        for model in gone | {model for model, _ in present}:
            self._on_change(model)
        return version

    async def _follow(self, version: str) -> str:
        """Apply watch events until the stream ends; returns the version to go on from."""
        async for event in self._client.watch(self._path, selector=SELECTOR, resource_version=version):
            item: Manifest = event["object"]
            if event["type"] == "ERROR":
                message = str(item.get("message"))
                raise ExpiredError(410, message) if item.get("code") == 410 else APIError(item.get("code", 0), message)
            version = item["metadata"]["resourceVersion"]
            if event["type"] == "BOOKMARK" or model_of(item) is None:
                continue
            change = self._store.remove if event["type"] == "DELETED" else self._store.put
            if (model := change(self._kind, item)) is not None:
                self._on_change(model)
        return version
