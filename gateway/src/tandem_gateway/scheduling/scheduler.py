"""The scheduler's state for one model: endpoints, prefix index and learned ratios, and the choice made from them."""

from __future__ import annotations

from collections.abc import Iterable

from tandem_gateway.scheduling.demand import Demand, Estimator
from tandem_gateway.scheduling.endpoint import Endpoint, Reservation, Worker
from tandem_gateway.scheduling.picker import Choice, Group, group_by_revision, pick
from tandem_gateway.scheduling.prefix import CHUNK_BYTES, PrefixIndex


class Scheduler:
    """Owned by one event loop; nothing in it blocks or waits."""

    def __init__(self, *, disaggregated: bool) -> None:
        self.disaggregated = disaggregated
        self.endpoints: dict[str, Endpoint] = {}
        self.estimator = Estimator()
        self.index = PrefixIndex()
        self._groups: list[Group] = []
        self._unhealthy_until = 0.0
        """No endpoint backs off after this: the groups can be used as they are."""

    def apply_workers(self, workers: Iterable[Worker]) -> list[Endpoint]:
        """Make the endpoints those of `workers`; returns the endpoints that left.

        A worker that kept name and address keeps its load and health. One that came back under another address is a
        new endpoint: what was promised to the old one is released by its own requests.
        """
        wanted = {worker.name: worker for worker in workers}
        left = [endpoint for name, endpoint in self.endpoints.items() if wanted.get(name) != endpoint.worker]
        for endpoint in left:
            endpoint.gone = True
            del self.endpoints[endpoint.worker.name]
        for name, worker in wanted.items():
            if name not in self.endpoints:
                self.endpoints[name] = Endpoint(worker)
        self._groups = group_by_revision(self.endpoints.values())
        return left

    def fail(self, endpoint: Endpoint, now: float) -> None:
        """The endpoint refused or dropped a request: leave it out for a short while."""
        endpoint.fail(now)
        self._unhealthy_until = max(self._unhealthy_until, endpoint.backoff_until)

    def choose(self, demand: Demand, now: float, excluded: set[str] | None = None) -> Choice | None:
        """The pair for this request, or None when no decode endpoint may serve it now. Changes nothing."""
        groups = self._groups
        if excluded or now < self._unhealthy_until:
            groups = group_by_revision(filter_available(self.endpoints.values(), now, excluded))
        cached: dict[int, int] = {}
        if demand.prefix:
            tokens = CHUNK_BYTES / self.estimator.bytes_per_token
            cached = {serial: int(chunks * tokens) for serial, chunks in self.index.match(demand.prefix).items()}
        return pick(groups, demand, cached, disaggregated=self.disaggregated)

    def reserve(self, choice: Choice, demand: Demand) -> Reservation:
        """Count the request on its endpoints and remember where its prefix now is."""
        prefill = choice.prefill[0] if choice.prefill else choice.decode
        if demand.prefix:
            decode = choice.decode
            self.index.record(demand.prefix, (decode.serial,) if prefill is decode else (prefill.serial, decode.serial))
        return Reservation(
            choice.decode, prefill, prefill_tokens=choice.uncached_tokens, decode_tokens=demand.output_tokens
        )


def filter_available(endpoints: Iterable[Endpoint], now: float, excluded: set[str] | None) -> list[Endpoint]:
    """Endpoints that are not backing off and were not tried by this request already."""
    if excluded:
        return [e for e in endpoints if e.backoff_until <= now and e.worker.name not in excluded]
    return [endpoint for endpoint in endpoints if endpoint.backoff_until <= now]
