"""Kubernetes Events on InferenceModels. They are for people: one that cannot be written is logged and forgotten.

An Event is named after what it says. One that repeats, as those of a pod that crashes again and again do, is counted on
the Event that is there and fills neither `kubectl describe` nor the API server.
"""

from __future__ import annotations

import datetime
import hashlib
import logging

import aiohttp
from tandem_api import names

from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.errors import APIError, ConflictError
from tandem_operator.objects.happening import Happening
from tandem_operator.objects.manifests import EVENT, Manifest, ModelKey, format_time

_MESSAGE_MAX = 1000
"""The API server refuses longer ones."""

log = logging.getLogger(__name__)


class EventRecorder:
    def __init__(self, client: KubeClient, *, instance: str) -> None:
        self._client = client
        self._instance = instance

    async def record(self, key: ModelKey, uid: str, happening: Happening) -> None:
        """Write one Event about the model with this uid."""
        log.info(happening.message, extra={"model": str(key), "event": happening.reason})
        try:
            event = self._build(key, uid, happening)
            path = EVENT.path(key.namespace, event["metadata"]["name"])
            try:
                await self._client.create(EVENT.path(key.namespace), event)
            except ConflictError:
                earlier = await self._client.get(path)
                await self._client.replace(path, repeated(earlier, now=event["lastTimestamp"]))
        except (APIError, aiohttp.ClientError, TimeoutError) as error:
            log.warning("cannot write an event", extra={"model": str(key), "error": str(error)})

    def _build(self, key: ModelKey, uid: str, happening: Happening) -> Manifest:
        said = f"{uid} {happening.kind} {happening.reason} {happening.message}"
        name = f"{key.name}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"
        now = format_time(datetime.datetime.now(datetime.UTC))
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {"name": name, "namespace": key.namespace},
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": key.name,
                "namespace": key.namespace,
                "uid": uid,
            },
            "type": happening.kind,
            "reason": happening.reason,
            "message": happening.message[:_MESSAGE_MAX],
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": names.FIELD_MANAGER},
            "reportingComponent": names.FIELD_MANAGER,
            "reportingInstance": self._instance,
        }


def repeated(event: Manifest, *, now: str) -> Manifest:
    """`event`, seen once more."""
    return event | {"count": (event.get("count") or 1) + 1, "lastTimestamp": now}
