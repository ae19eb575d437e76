"""One working operator among several replicas, by a Lease.

Invariant: two replicas never believe to lead at the same time, as long as their clocks run at the same speed. A holder
that could not renew stops before its lease runs out; others judge a lease by how long they themselves have seen it
unchanged, so clocks need not agree on the time of day.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.errors import APIError, ConflictError
from tandem_operator.objects.manifests import LEASE, Manifest, dig
from tandem_operator.runtime import metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """The Lease that one operator replica holds while it works."""

    name: str = "tandem-operator"
    namespace: str
    identity: str
    duration_seconds: int = 15
    """A lease that was not renewed for this long is free."""
    renew_seconds: float = 3.0
    give_up_seconds: float = 10.0
    """A leader that could not renew for this long stops: shorter than the duration, so that two never work at once."""


@dataclass(slots=True)
class Sighting:
    """A lease as it was last seen to change."""

    version: str
    since: float


class LeaderElection:
    """Takes, renews and releases one Lease."""

    def __init__(
        self, client: KubeClient, settings: LeaseSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._settings = settings
        self._clock = clock
        self._collection = LEASE.path(settings.namespace)
        self._path = LEASE.path(settings.namespace, settings.name)
        self._seen: Sighting | None = None
        self._held: Manifest | None = None

    async def acquire(self) -> None:
        """Wait until this replica leads."""
        while True:
            try:
                if await self._try_acquire():
                    log.info("leading", extra={"lease": self._settings.name, "identity": self._settings.identity})
                    return
            except (APIError, aiohttp.ClientError, TimeoutError) as error:
                log.warning("cannot read or write the lease", extra={"error": str(error)})
            await asyncio.sleep(self._settings.renew_seconds)

    async def hold(self) -> None:
        """Renew for as long as this replica leads; returns when leadership is lost."""
        renewed = self._clock()
        while self._clock() - renewed < self._settings.give_up_seconds:
            await asyncio.sleep(self._settings.renew_seconds)
            started = self._clock()
            try:
                async with asyncio.timeout(self._settings.give_up_seconds - (started - renewed)):
                    if not await self._renew():
                        break
                renewed = started
            except (APIError, aiohttp.ClientError, TimeoutError) as error:
                metrics.LEASE_FAILURES.inc()
                log.warning("cannot renew the lease", extra={"error": str(error)})
        log.error("leadership lost", extra={"lease": self._settings.name})
        self._held = None

    async def release(self) -> None:
        """Give the lease up, so that another replica takes over at once."""
        if self._held is None:
            return
        lease, self._held = self._held, None
        lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
        try:
            await self._client.replace(self._path, lease)
        except (APIError, aiohttp.ClientError, TimeoutError) as error:
            log.warning("cannot release the lease; it runs out by itself", extra={"error": str(error)})

    async def _try_acquire(self) -> bool:
        lease = await self._client.find(self._path)
        try:
            if lease is None:
                metadata = {"name": self._settings.name, "namespace": self._settings.namespace}
                body = {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": metadata}
                self._held = await self._client.create(self._collection, body | {"spec": self._spec(transitions=0)})
                return True
            if not self._is_free(lease):
                return False
            lease["spec"] = self._spec(transitions=(dig(lease, "spec", "leaseTransitions") or 0) + 1)
            self._held = await self._client.replace(self._path, lease)
        except ConflictError:
            return False
        return True

    async def _renew(self) -> bool:
        """False when somebody else has taken the lease."""
        assert self._held is not None
        lease = self._held | {"spec": self._held["spec"] | {"renewTime": _now()}}
        try:
            self._held = await self._client.replace(self._path, lease)
        except ConflictError:
            present = await self._client.get(self._path)
            if dig(present, "spec", "holderIdentity") != self._settings.identity:
                return False
            self._held = present
        return True

    def _is_free(self, lease: Manifest) -> bool:
        version = str(lease["metadata"]["resourceVersion"])
        if not dig(lease, "spec", "holderIdentity"):
            return True
        now = self._clock()
        if self._seen is None or self._seen.version != version:
            self._seen = Sighting(version, now)
        return now - self._seen.since > (dig(lease, "spec", "leaseDurationSeconds") or self._settings.duration_seconds)

    def _spec(self, *, transitions: int) -> Manifest:
        now = _now()
        return {
            "holderIdentity": self._settings.identity,
            "leaseDurationSeconds": self._settings.duration_seconds,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
