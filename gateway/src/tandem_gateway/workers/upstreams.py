"""The link to each worker: made when it is first needed, closed when the worker leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tandem_gateway.scheduling import Endpoint
from tandem_gateway.upstream.base import Link
from tandem_gateway.upstream.engines import idle_seconds
from tandem_gateway.upstream.http1 import Http1Link


class Upstreams:
    def __init__(self, *, connect_seconds: Callable[[], float], on_stale: Callable[[], None]) -> None:
        """`connect_seconds`: of a link that is made now. `on_stale`: as for `Http1Link`."""
        self._connect_seconds = connect_seconds
        self._on_stale = on_stale
        self.links: dict[int, Link] = {}
        """Those there are, by the serial number of their endpoints."""

    def find(self, endpoint: Endpoint) -> Link:
        link = self.links.get(endpoint.serial)
        if link is None:
            link = self.links[endpoint.serial] = Http1Link(
                endpoint.worker.address,
                connect_seconds=self._connect_seconds(),
                on_stale=self._on_stale,
                idle_seconds=idle_seconds(endpoint.worker.engine),
            )
        return link

    def drop(self, left: Iterable[Endpoint]) -> None:
        """These have gone: what runs at them ends as it will."""
        for endpoint in left:
            link = self.links.pop(endpoint.serial, None)
            if link is not None:
                link.close()

    def reap(self, now: float) -> None:
        """Close what was idle for too long."""
        for link in self.links.values():
            link.reap(now)

    def close(self) -> None:
        for link in self.links.values():
            link.close()
