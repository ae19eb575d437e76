"""Reads the GPU quotas of namespaces whose models follow demand: few objects, every ten seconds, by the leader alone.

A ResourceQuota is what Kubernetes enforces. Of its `requests.nvidia.com/gpu`, or of another kind of GPUs, what pods of
other owners use is not there for models; the rest is their budget, of each kind apart. Quotas with scopes hold for some
pods only, and are left to Kubernetes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import floor

import aiohttp
from tandem_api.quantities import parse_quantity

from tandem_operator.autoscale.accelerators import quota_resource
from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.errors import APIError
from tandem_operator.objects.manifests import RESOURCE_QUOTA, Manifest, dig, dig_dict

_PERIOD_SECONDS = 10.0
_KEPT_SECONDS = 60.0
"""For so long the last answer counts while the API server gives none."""
_SETTLED_LOOKS = 3
"""Looks of which the largest budget counts. What quotas count as used and what pods the operator knows of are never of
one moment: a pod that has just been made, or has just gone, would pass for another owner's, and a model would drain a
replica for it."""
_MOST_QUOTAS = 100
"""Quotas that are read of one namespace."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GPUPool:
    """GPUs of one kind in one namespace."""

    namespace: str
    resource: str
    """For example `nvidia.com/gpu`."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What one ResourceQuota says, in GPUs."""

    hard: int
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUBudget:
    """What a namespace has for its models."""

    gpus: int | None = None
    """None: no quota limits them, or it is not known."""
    problem: str = ""
    """Why it is not known."""


NO_BUDGET = GPUBudget()


def read_limits(quota: Manifest) -> dict[str, Limit]:
    """What a ResourceQuota says, by GPU resource; empty where it says nothing about any, or holds for some pods only.

    Raises:
        ValueError: a figure is none.
    """
    if dig(quota, "spec", "scopes") or dig(quota, "spec", "scopeSelector"):
        return {}
    return {
        resource: Limit(
            floor(parse_quantity(str(amount))), floor(parse_quantity(str(dig(quota, "status", "used", name) or 0)))
        )
        for name, amount in dig_dict(quota, "spec", "hard").items()
        if (resource := quota_resource(name)) is not None
    }


def find_budget(limits: Iterable[Limit], present: int) -> int | None:
    """GPUs for models: by the tightest quota, less what others use. `present`: those that pods of models take."""
    return min((max(0, limit.hard - max(0, limit.used - present)) for limit in limits), default=None)


class QuotaWatch:
    """Not thread-safe: it belongs to one event loop."""

    def __init__(
        self,
        client: KubeClient,
        present: Callable[[], Mapping[GPUPool, int]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`present`: the pools that models take GPUs of, and how many their pods take now."""
        self._client = client
        self._present = present
        self._clock = clock
        self._known: dict[GPUPool, tuple[float, GPUBudget]] = {}
        self._lately: dict[GPUPool, deque[int]] = {}
        self._problems: dict[str, str] = {}

    def budget(self, pool: GPUPool) -> GPUBudget:
        """As it was read last."""
        at, known = self._known.get(pool, (0.0, NO_BUDGET))
        if (problem := self._problems.get(pool.namespace)) and self._clock() - at > _KEPT_SECONDS:
            return GPUBudget(problem=problem)
        return known

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            await self.read_all()
            await asyncio.sleep(_PERIOD_SECONDS)

    async def read_all(self) -> None:
        """Every namespace once."""
        pools = self._present()
        namespaces = dict.fromkeys(pool.namespace for pool in pools)
        for gone in self._known.keys() - pools.keys():
            del self._known[gone]
            self._lately.pop(gone, None)
        for gone in self._problems.keys() - namespaces.keys():
            del self._problems[gone]
        for namespace in namespaces:
            try:
                await self._read(namespace)
                self._problems.pop(namespace, None)
            except (APIError, aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
                # Also an answer of another form, from something in between, which ends nothing here.
                said = str(error) or type(error).__name__
                if namespace not in self._problems:
                    log.warning("cannot read the GPU quota", extra={"namespace": namespace, "error": said})
                self._problems[namespace] = said

    async def _read(self, namespace: str) -> None:
        limits: dict[str, list[Limit]] = {}
        count = 0
        async for page in self._client.list_pages(RESOURCE_QUOTA.path(namespace), selector={}):
            for item in page["items"]:
                for resource, limit in read_limits(item).items():
                    limits.setdefault(resource, []).append(limit)
            count += len(page["items"])
            if count >= _MOST_QUOTAS:
                break
        # Pods are counted when the quota is read: what others use is the difference of the two.
        for pool, present in self._present().items():
            if pool.namespace == namespace:
                self._keep(pool, find_budget(limits.get(pool.resource, ()), present))

    def _keep(self, pool: GPUPool, gpus: int | None) -> None:
        if gpus is None:
            self._lately.pop(pool, None)
        else:
            looks = self._lately.setdefault(pool, deque(maxlen=_SETTLED_LOOKS))
            looks.append(gpus)
            gpus = max(looks)
        self._known[pool] = self._clock(), GPUBudget(gpus=gpus)
