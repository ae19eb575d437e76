"""Which of several operators serves a model. Two that write the same objects would put each other's right for ever.

People divide models up by `spec.managedBy`. Of what is left to several, a model is served by the one that is named in
its `status.operator`: the first that wrote its status. Another one stands off until the holder is gone, which its Lease
tells: it was deleted, or nobody has renewed it for minutes. A restart, or an upgrade, is over long before that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from tandem_api.crd.status import OperatorClaim

from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.errors import APIError
from tandem_operator.objects.manifests import LEASE, Manifest, ModelKey, dig

LOOK_SECONDS = 30.0
"""Between two looks at the Lease of another operator, and at a model that is its."""
GONE_SECONDS = 300.0
"""A Lease that has not changed for so long has nobody."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sighting:
    """A Lease as it was last seen to change, by a clock of this process."""

    version: str | None
    """None where there is no such Lease."""
    since: float
    looked_at: float


class Claims:
    """The claims of one operator. Not thread-safe: it belongs to one event loop."""

    def __init__(
        self,
        client: KubeClient,
        identity: str = "",
        *,
        managed_by: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`identity` is NAMESPACE/NAME of the operator's Lease, the same for all of its replicas; empty: it claims
        nothing."""
        self.identity = identity
        self._client = client
        self.managed_by = managed_by
        self._clock = clock
        self._seen: dict[str, _Sighting] = {}
        self._told: dict[ModelKey, tuple[str, str]] = {}

    @property
    def claim(self) -> OperatorClaim | None:
        """What the status of a model says that this operator serves."""
        return OperatorClaim(lease=self.identity, managed_by=self.managed_by) if self.identity else None

    async def find_other(self, raw: Manifest) -> str | None:
        """The operator that serves this model, in words; None: this one."""
        wanted = dig(raw, "spec", "managedBy")
        if wanted != self.managed_by:
            return "an operator without managedBy" if wanted is None else f"the operator with managedBy {wanted}"
        holder = dig(raw, "status", "operator", "lease")
        is_void = dig(raw, "status", "operator", "managedBy") != wanted
        if not self.identity or is_void or holder in (None, self.identity) or not isinstance(holder, str):
            return None
        return f"the operator of the Lease {holder}" if await self._is_there(holder) else None

    def is_news(self, key: ModelKey, raw: Manifest, other: str | None) -> bool:
        """Whether nobody has been told yet whose a model is."""
        if other is None:
            self._told.pop(key, None)
            return False
        told = str(dig(raw, "metadata", "uid")), other
        is_news = self._told.get(key) != told
        self._told[key] = told
        return is_news

    async def _is_there(self, holder: str) -> bool:
        """What cannot be read is taken to be there: its models stay as they are."""
        now, seen = self._clock(), self._seen.get(holder)
        if seen is None or now - seen.looked_at >= LOOK_SECONDS:
            namespace, _, name = holder.partition("/")
            try:
                lease = await self._client.find(LEASE.path(namespace, name))
            except (APIError, aiohttp.ClientError, TimeoutError) as error:
                log.warning("cannot read the lease of another operator", extra={"lease": holder, "error": str(error)})
                return True
            version = None if lease is None else str(dig(lease, "metadata", "resourceVersion"))
            since = now if seen is None or seen.version != version else seen.since
            seen = self._seen[holder] = _Sighting(version=version, since=since, looked_at=now)
        return seen.version is not None and now - seen.since < GONE_SECONDS
