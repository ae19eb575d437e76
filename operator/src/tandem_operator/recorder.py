"""Kubernetes Events on InferenceModels. They are for people: one that cannot be written is logged and forgotten."""

from __future__ import annotations

import datetime
import logging
import uuid

import aiohttp
from tandem_api import names

from tandem_operator.errors import APIError
from tandem_operator.kube.client import KubeClient
from tandem_operator.manifests import EVENT, Manifest, ModelKey
from tandem_operator.transitions import Happening

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
            await self._client.create(EVENT.path(key.namespace), self._build(key, uid, happening))
        except (APIError, aiohttp.ClientError, TimeoutError) as error:
            log.warning("cannot write an event", extra={"model": str(key), "error": str(error)})

    def _build(self, key: ModelKey, uid: str, happening: Happening) -> Manifest:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {"name": f"{key.name}.{uuid.uuid4().hex[:16]}", "namespace": key.namespace},
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
