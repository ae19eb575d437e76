"""The link to each worker: made when it is first needed, native where the worker has one, closed when it leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric as Family

from tandem_gateway.scheduling import Endpoint, Worker
from tandem_gateway.upstream.base import Link
from tandem_gateway.upstream.engines import idle_seconds
from tandem_gateway.upstream.http1 import Http1Link
from tandem_gateway.workers.links import NativeLinks, describe

log = logging.getLogger(__name__)


class Upstreams:
    def __init__(
        self, native: NativeLinks | None, *, connect_seconds: Callable[[], float], on_stale: Callable[[], None]
    ) -> None:
        """Without `native` all workers are asked over HTTP. `connect_seconds`: of a link that is made now. `on_stale`:
        as for `Http1Link`."""
        self._native = native
        self._connect_seconds = connect_seconds
        self._on_stale = on_stale
        self.links: dict[int, Link] = {}
        """Those there are, by the serial number of their endpoints."""

    def find(self, endpoint: Endpoint) -> Link:
        link = self.links.get(endpoint.serial)
        if link is None:
            link = self.links[endpoint.serial] = self._open(endpoint.worker)
        return link

    def take(self, there: Iterable[Endpoint], left: Iterable[Endpoint]) -> None:
        """These are there now, and those have gone: what runs at them ends as it will."""
        for endpoint in left:
            link = self.links.pop(endpoint.serial, None)
            if link is not None:
                link.close()
        if self._native is not None:
            endpoints = list(there)
            self._native.take(len(endpoints))
            for endpoint in endpoints:
                self.find(endpoint)

    def _open(self, worker: Worker) -> Link:
        seconds = self._connect_seconds()
        http = Http1Link(
            worker.address,
            connect_seconds=seconds,
            on_stale=self._on_stale,
            idle_seconds=idle_seconds(worker.engine),
        )
        if self._native is None or worker.engine != "Tandem":
            return http
        if not worker.link_address:
            log.warning(
                "a worker has no port for the native link; it is asked over HTTP", extra={"worker": worker.name}
            )
            return http
        return self._native.open(worker, http, seconds)

    def renew(self) -> None:
        """This gateway shows another key from now on."""
        if self._native is not None:
            self._native.renew(self.links.values())

    def reap(self, now: float) -> None:
        """Close what was idle for too long."""
        for link in self.links.values():
            link.reap(now)

    def close(self) -> None:
        for link in self.links.values():
            link.close()

    def describe(self, endpoint: Endpoint) -> str:
        """How this worker is asked, in one word."""
        return "http" if self._native is None else describe(self.links.get(endpoint.serial))

    def families(self) -> list[Family]:
        """For metrics."""
        return [] if self._native is None else self._native.families(self.links.values())
