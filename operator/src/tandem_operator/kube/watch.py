"""Keeps a store equal to the cluster: a list, then a watch, again and again.

kopf watches InferenceModels. Children are watched here because a list after a broken watch has to remove what vanished
meanwhile, which kopf's event handlers are not told. However the API server ends a watch, at once, by an error or with
410, it is asked again after a pause that grows until a watch has lasted.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import aiohttp
from tandem_api import names

from tandem_operator.kube.client import KubeClient
from tandem_operator.kube.store import Kept
from tandem_operator.objects.errors import APIError, ExpiredError
from tandem_operator.objects.manifests import EVENT, Kind, Manifest, ModelKey
from tandem_operator.runtime import metrics
from tandem_operator.runtime.turns import LoopTurns
from tandem_operator.workloads.child import COMPONENT_LABEL, HISTORY

CHILDREN = {"labelSelector": f"{names.MANAGED_BY_LABEL}={names.MANAGED_BY},{names.LABEL_MODEL}"}
"""Evaluated by the API server: other people's objects never travel."""
REVISIONS = {"labelSelector": f"{CHILDREN['labelSelector']},{COMPONENT_LABEL}={HISTORY}"}
"""The same of ControllerRevisions: those of the StatefulSets have their labels, and are not read."""
_AT_ONCE = 10
"""Objects that are kept before others get their turn."""
_BACKOFF_SECONDS = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
_HEALTHY_SECONDS = 10.0
"""A watch that lasted this long had worked: that it ends now says nothing about the failures before it."""
_SILENCE_SECONDS = 90.0
"""A watch without events brings a bookmark about every minute; one that brings nothing at all is taken for dead. Of
Events the API server keeps no cache and sends no bookmarks."""

log = logging.getLogger(__name__)


class Store(Protocol):
    """A place where objects are kept. Each method says which models an object or its absence is about."""

    def put(self, kind: Kind, manifest: Manifest) -> Kept | None: ...

    def remove(self, kind: Kind, manifest: Manifest) -> ModelKey | None: ...

    def retain(self, kind: Kind, namespace: str | None, present: Iterable[tuple[ModelKey, str]]) -> set[ModelKey]: ...


class KindWatcher:
    """Watches one kind in one namespace, or in all (None)."""

    def __init__(
        self,
        client: KubeClient,
        store: Store,
        kind: Kind,
        namespace: str | None,
        *,
        on_change: Callable[[ModelKey], None],
        selector: Mapping[str, str] = CHILDREN,
        backoff_seconds: tuple[float, ...] = _BACKOFF_SECONDS,
        silence_seconds: float = _SILENCE_SECONDS,
        loop_turns: LoopTurns | None = None,
    ) -> None:
        self._client = client
        self._store = store
        self._kind = kind
        self._namespace = namespace
        self._on_change = on_change
        self._selector = selector
        self._backoff = backoff_seconds
        self._silence = None if kind == EVENT else silence_seconds
        self._version: str | None = None
        self._loop_turns = loop_turns or LoopTurns()
        self._path = kind.path(namespace)
        self.synced = asyncio.Event()
        """Set once the store has everything that was there at the start."""

    def __str__(self) -> str:
        return self._kind.name if self._namespace is None else f"{self._kind.name} in {self._namespace}"

    async def run(self) -> None:
        """Never returns; failures are logged and tried again."""
        failures = 0
        while True:
            started = time.monotonic()
            error: Exception | None = None
            try:
                version = self._version = self._version or await self._list()
                started = time.monotonic()
                await self._follow(version)
            except ExpiredError as expired:
                self._version, error = None, expired
            except (APIError, aiohttp.ClientError, TimeoutError, ValueError) as failure:
                error = failure
            lasted = time.monotonic() - started
            if lasted > _HEALTHY_SECONDS:
                failures = 0
                if error is None:
                    continue
            delay = self._backoff[min(failures, len(self._backoff) - 1)] * random.uniform(0.75, 1.25)
            failures += 1
            metrics.WATCH_FAILURES.labels(self._kind.name).inc()
            said = f"it ended after {lasted:.1f} s" if error is None else f"{type(error).__name__}: {error}"
            log.warning("watch failed", extra={"watch": str(self), "error": said, "retry_in": round(delay, 3)})
            await asyncio.sleep(delay)

    async def _list(self) -> str:
        present: set[tuple[ModelKey, str]] = set()
        changed: set[ModelKey] = set()
        version = ""
        try:
            async for page in self._client.list_pages(self._path, selector=self._selector):
                version = page["metadata"]["resourceVersion"]
                for number, item in enumerate(page["items"]):
                    if number % _AT_ONCE == 0:
                        await self._loop_turns.next()
                    if (kept := self._store.put(self._kind, item)) is not None:
                        present.add((kept.model, item["metadata"]["name"]))
                        changed |= {kept.model} if kept.is_news else set()
                        changed |= set() if kept.left is None else {kept.left}
            changed |= self._store.retain(self._kind, self._namespace, present)
            self.synced.set()
        finally:  # for the next list, what this one brought before it broke off is no news
            for model in changed:
                self._on_change(model)
        return version

    async def _follow(self, version: str) -> None:
        """Apply watch events until the stream ends. However it does, the next one goes on from the last of them."""
        number = 0
        async for event in self._client.watch(
            self._path, selector=self._selector, resource_version=version, silence_seconds=self._silence
        ):
            if (number := number + 1) % _AT_ONCE == 0:
                await self._loop_turns.next()
            item: Manifest = event["object"]
            if event["type"] == "ERROR":
                message = str(item.get("message"))
                raise ExpiredError(410, message) if item.get("code") == 410 else APIError(item.get("code", 0), message)
            self._version = item["metadata"]["resourceVersion"]
            if event["type"] == "BOOKMARK":
                continue
            if event["type"] == "DELETED":
                model = self._store.remove(self._kind, item)
            else:
                kept = self._store.put(self._kind, item)
                model = kept.model if kept is not None and kept.is_news else None
                if kept is not None and kept.left is not None:
                    self._on_change(kept.left)
            if model is not None:
                self._on_change(model)
