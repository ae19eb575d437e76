"""Native links of one gateway: who gets one, what became of it, and what workers say over it."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from tandem_api import link
from tandem_api.telemetry import Metric

from tandem_gateway.families import by_label
from tandem_gateway.scheduling import Worker
from tandem_gateway.upstream.base import Link
from tandem_gateway.upstream.native import NativeLink

STATES = ("native", "connecting", "http_unannounced", "http_version")
SAMPLES_PER_SECOND = 400
"""From all workers together: of more than a hundred each tells about itself more seldom."""


class NativeLinks:
    """Opens them, and hears what comes over them. Owned by one event loop."""

    def __init__(
        self,
        *,
        token: Callable[[], str | None],
        on_sample: Callable[[Worker, bytes], None],
        on_drain: Callable[[Worker], None],
    ) -> None:
        """`token`: what to show a worker now. `on_sample` is called with the JSON of a worker's sample, `on_drain` when
        a worker takes no new requests."""
        self._token = token
        self._on_sample, self._on_drain = on_sample, on_drain
        self.ends: Counter[str] = Counter()
        """Links that ended or did not come about, by why."""
        self._workers = 0

    def open(self, worker: Worker, http: Link, connect_seconds: float) -> NativeLink:
        """`http`: what takes over where the worker speaks another version."""
        return NativeLink(worker, http, greet=self._greet, connect_seconds=connect_seconds, watcher=self)

    def take(self, workers: int) -> None:
        """There are so many now: links that are made from now on ask for samples accordingly."""
        self._workers = workers

    def renew(self, links: Iterable[Link]) -> None:
        """This gateway shows another key from now on."""
        for each in links:
            if isinstance(each, NativeLink):
                each.renew()

    def _greet(self) -> link.Hello:
        return link.Hello(
            token=self._token(),
            telemetry_seconds=max(link.TELEMETRY_SECONDS, self._workers / SAMPLES_PER_SECOND),
            name=(os.environ.get("POD_NAME") or socket.gethostname())[:253],
        )

    def families(self, links: Iterable[Link]) -> list[Family]:
        """For metrics."""
        counts = Counter(map(describe, links))
        known = GaugeMetricFamily(
            Metric.GATEWAY_LINKS, "Workers by how they are asked: over the native link, or why not.", labels=("state",)
        )
        for state in STATES:
            known.add_metric((state,), counts[state])
        text = "Native links that ended or did not come about, by why."
        return [known, by_label(Metric.GATEWAY_LINK_ENDS_TOTAL, text, self.ends)]

    # of links

    def on_link_sample(self, worker: Worker, payload: bytes) -> None:
        self._on_sample(worker, payload)

    def on_link_drain(self, worker: Worker) -> None:
        self._on_drain(worker)

    def on_link_end(self, worker: Worker, code: str) -> None:
        self.ends[code] += 1


def describe(found: Link | None) -> str:
    """One of `STATES`, of the link of a gateway that wants native ones."""
    return found.state if isinstance(found, NativeLink) else "http_unannounced"
