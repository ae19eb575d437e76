"""Which models there are, and what causes a look at one."""

from __future__ import annotations

import asyncio

from tandem_operator.objects.manifests import ModelKey
from tandem_operator.runtime import metrics
from tandem_operator.runtime.workqueue import WorkQueue
from tandem_operator.weights.hub import Hub

_CHILDREN_SECONDS = 0.2
"""How long changes of children are gathered: one pod alone changes four times until it is ready."""


class ModelRegistry:
    """Not thread-safe: it belongs to one event loop."""

    def __init__(self, queue: WorkQueue, hub: Hub) -> None:
        self._queue = queue
        self._hub = hub
        self._models: set[ModelKey] = set()

    def __contains__(self, key: ModelKey) -> bool:
        return key in self._models

    def add(self, key: ModelKey) -> None:
        """A model is there, or has changed."""
        self._models.add(key)
        metrics.MODELS.set(len(self._models))

    def on_gone(self, key: ModelKey) -> None:
        """A model is not there any more."""
        self._models.discard(key)
        metrics.forget_model(key)
        self._hub.forget(key)
        metrics.MODELS.set(len(self._models))

    def on_missing(self, key: ModelKey) -> None:
        """A look has not found a model: its deletion was missed, unless one of that name was made since."""
        if not self._queue.is_due(key):
            self.on_gone(key)

    def on_child(self, key: ModelKey) -> None:
        """Something of a model has changed: its children, or what gateways report."""
        self._queue.add_later(key, _CHILDREN_SECONDS)

    def on_creation(self, key: ModelKey) -> None:
        """A StatefulSet of this name could create a pod, or could not."""
        if key in self._models:  # Events name StatefulSets of anybody
            self.on_child(key)

    def look_at_all(self) -> None:
        """Look at every model: something has changed that may concern any of them."""
        for key in self._models:
            self._queue.add(key)

    async def resync(self, seconds: float) -> None:
        """Look at every model now and then, until cancelled: what was missed is found."""
        while True:
            await asyncio.sleep(seconds)
            self.look_at_all()
