"""What the gateways of each model say of its workers, read again and again from their metrics ports.

Reports are asked for every `FAST_SECONDS` while something is under way and every `SLOW_SECONDS` else, by a fixed number
of tasks whatever the number of models. Gateways of a model that sleeps are asked besides to answer once a request
comes: that is three questions a minute, and known at once. A report that cannot be read is counted and told; it is
never made up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
from pydantic import ValidationError
from tandem_api.fleet import FLEET_PATH, WAITING_PATH, WAITING_SECONDS, FleetReport, StartingReport, WorkerReport
from tandem_api.names import GATEWAY_METRICS_PORT
from tandem_api.telemetry import KVTransportTelemetry, TierTelemetry, WeightsTelemetry, WorkerTelemetry

from tandem_operator.gateways.tiers import forget_gone, summarize_peers
from tandem_operator.gateways.transports import summarize
from tandem_operator.objects.manifests import ModelKey
from tandem_operator.rollout.figures import STALE_SECONDS
from tandem_operator.runtime import metrics
from tandem_operator.runtime.workqueue import WorkQueue

FAST_SECONDS, SLOW_SECONDS = 2.0, STALE_SECONDS / 3
MAX_BYTES = 4 * 1024 * 1024
"""Size of one report at most: some three thousand workers with their telemetry."""
ANSWER_SECONDS = 3.0
_POLLERS = 16
"""Models that are asked about at a time; the gateways of one are asked together."""
_GATEWAYS_AT_ONCE = 8
_PAUSE_SECONDS = 0.5
"""Between two questions of the other kind."""
REJECTED_SECONDS = (10.0, 60.0)
"""A worker that every gateway leaves out for so long is not admitted: one that never was, and one that had been."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One worker, by all the gateways that report."""

    host: str
    """The pod's address: another pod of the same name has another one."""
    admitted: bool
    """At least one has admitted it."""
    reason: str | None = None
    """Why no gateway has."""
    rejected_seconds: float = 0.0
    """For how long no gateway has admitted it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """What is known of one model from its gateways, now."""

    standings: Mapping[str, Standing] = field(default_factory=dict[str, Standing])
    """Workers by the name of the pod."""
    reporting: frozenset[str] = frozenset()
    """Gateways with a fresh report."""
    unable: frozenset[str] = frozenset()
    """Gateways of a release that has no reports."""
    silent: Mapping[str, str] = field(default_factory=dict[str, str])
    """Gateways without a fresh report, and why."""
    starting: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Workers that are not ready, by the name of the pod: its address, and what it says that it is doing."""
    tiers: Mapping[str, TierTelemetry] = field(default_factory=dict[str, TierTelemetry])
    """What workers say of the disks that they keep blocks on, by the name of the pod; of others there is nothing."""
    peers: Mapping[str, TierTelemetry] = field(default_factory=dict[str, TierTelemetry])
    """As `tiers`, of the blocks that they get of other workers."""
    transports: Mapping[str, KVTransportTelemetry] = field(default_factory=dict[str, KVTransportTelemetry])
    """What workers say of how their blocks move, by the name of the pod."""
    stores: Mapping[str, TierTelemetry] = field(default_factory=dict[str, TierTelemetry])
    """As `tiers`, of the store that workers share blocks through."""
    weights: Mapping[str, WeightsTelemetry | None] = field(default_factory=dict[str, WeightsTelemetry | None])
    """In which form workers keep the model's matrices, by the name of the pod; None of one that tells about itself and
    not this, as those of earlier releases do."""
    asked: bool = False
    """Every gateway has been asked at least once: what is not known now is not known for a reason."""


@dataclass(slots=True)
class _Gateway:
    address: str
    report: FleetReport | None = None
    heard_at: float = 0.0
    asked: bool = False
    unable: bool = False
    error: str = ""
    waiter: asyncio.Task[None] | None = None
    """Asks to hear of a request, while the model sleeps."""

    def stop_waiting(self) -> None:
        if self.waiter is not None:
            self.waiter.cancel()
            self.waiter = None


@dataclass(slots=True)
class _Model:
    gateways: dict[str, _Gateway] = field(default_factory=dict[str, _Gateway])
    fast: bool = True
    asleep: bool = False
    rejected_since: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """Times by name and host of workers."""
    admitted: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Those that some gateway has admitted, as long as they are reported."""
    told: object = None
    """What the last reconcile could have known."""


class FleetWatch:
    """Not thread-safe: it belongs to one event loop. It asks only while `run` runs, which is the leader's."""

    def __init__(
        self,
        on_change: Callable[[ModelKey], None] = lambda key: None,
        *,
        port: int = GATEWAY_METRICS_PORT,
        clock: Callable[[], float] = time.monotonic,
        seconds: tuple[float, float] = (FAST_SECONDS, SLOW_SECONDS),
        on_request: Callable[[ModelKey], None] = lambda key: None,
    ) -> None:
        """`on_change` is called when the workers that are admitted may have become others, `on_request` when a gateway
        of a model that sleeps has a request."""
        self._on_change = on_change
        self._on_request = on_request
        self._waiting: tuple[asyncio.TaskGroup, aiohttp.ClientSession] | None = None
        """Whom, and by what, to ask to hear of requests, while `run` runs."""
        self._port = port
        self._clock = clock
        self._fast, self._slow = seconds
        self._models: dict[ModelKey, _Model] = {}
        self._queue = WorkQueue()

    def follow(self, key: ModelKey, gateways: Mapping[str, str], *, fast: bool, asleep: bool = False) -> None:
        """The gateway pods of a model are these, by name with their addresses. `fast`: something is under way;
        `asleep`: a request wakes the model."""
        model = self._models.setdefault(key, _Model())
        news = model.fast < fast
        for name in list(model.gateways):
            if gateways.get(name) != model.gateways[name].address:
                model.gateways.pop(name).stop_waiting()
        for name, address in gateways.items():
            if name not in model.gateways:
                model.gateways[name] = _Gateway(address)
                news = True
        model.fast, model.asleep = fast, asleep
        self._tend(key, model)
        if news:
            self._queue.add_later(key, 0.0 if any(not g.asked for g in model.gateways.values()) else self._fast)

    def forget(self, key: ModelKey) -> None:
        """The model is gone."""
        model = self._models.pop(key, None)
        for gateway in () if model is None else model.gateways.values():
            gateway.stop_waiting()
        self._queue.forget(key)

    def reports(self, key: ModelKey) -> Sequence[FleetReport]:
        """The fresh reports of a model's gateways."""
        return tuple(report for report, _ in self.heard(key))

    def heard(self, key: ModelKey) -> Sequence[tuple[FleetReport, float]]:
        """The fresh reports of a model's gateways, each with the seconds since it was read."""
        model, now = self._models.get(key), self._clock()
        gateways = () if model is None else model.gateways.values()
        return tuple((g.report, now - g.heard_at) for g in gateways if g.report is not None and _is_fresh(g, now))

    def view(self, key: ModelKey) -> FleetView:
        """What is known now."""
        model, now = self._models.get(key), self._clock()
        if model is None:
            return FleetView()
        reports = self.reports(key)
        samples = _newest_samples(self.heard(key))
        fresh = {name for name, gateway in model.gateways.items() if _is_fresh(gateway, now)}
        unable = {name for name, gateway in model.gateways.items() if gateway.unable}
        return FleetView(
            standings=_standings(model, reports, now),
            reporting=frozenset(fresh),
            unable=frozenset(unable),
            silent={
                name: gateway.error or "it has not been asked yet"
                for name, gateway in model.gateways.items()
                if name not in fresh and not gateway.unable
            },
            starting={one.name: (_host(one), one.waits_for) for report in reports for one in report.starting},
            tiers=_tiers(samples, "disk"),
            peers=forget_gone(_tiers(samples, "peer"), _hosts(reports)),
            transports=_transports(samples),
            stores=_tiers(samples, "store"),
            weights=_weights(samples),
            asked=all(gateway.asked for gateway in model.gateways.values()),
        )

    async def run(self) -> None:
        """Ask until cancelled."""
        limits = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        connector = aiohttp.TCPConnector(limit=_POLLERS * _GATEWAYS_AT_ONCE, force_close=True)
        patient = aiohttp.ClientTimeout(total=WAITING_SECONDS + ANSWER_SECONDS, connect=ANSWER_SECONDS)
        async with (
            aiohttp.ClientSession(timeout=limits, connector=connector, auto_decompress=False) as session,
            aiohttp.ClientSession(
                timeout=patient, connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
            ) as waiting,
            asyncio.TaskGroup() as group,
        ):
            self._waiting = group, waiting
            for key, model in self._models.items():
                self._tend(key, model)
            try:
                for _ in range(_POLLERS):
                    group.create_task(self._poll_forever(session))
                await asyncio.Event().wait()
            finally:
                self._waiting = None
                for key, model in self._models.items():
                    self._tend(key, model)

    def _tend(self, key: ModelKey, model: _Model) -> None:
        """Have each gateway of a model that sleeps asked to tell of a request, and no other."""
        for name, gateway in model.gateways.items():
            if not model.asleep or self._waiting is None:
                gateway.stop_waiting()
            elif gateway.waiter is None:
                group, session = self._waiting
                gateway.waiter = group.create_task(self._wait_for_requests(session, key, name, gateway))

    async def _poll_forever(self, session: aiohttp.ClientSession) -> None:
        while True:
            key = await self._queue.take()
            try:
                await self._poll(session, key)
            finally:
                self._queue.done(key)
            if (model := self._models.get(key)) is not None and model.gateways:
                self._queue.add_later(key, self._fast if model.fast else self._slow)

    async def _wait_for_requests(
        self, session: aiohttp.ClientSession, key: ModelKey, name: str, gateway: _Gateway
    ) -> None:
        """Ask until cancelled. What fails is told by the other questions."""
        while True:
            pause = self._fast
            try:
                async with session.get(self._url(gateway, WAITING_PATH), allow_redirects=False) as response:
                    if response.status == 200:
                        gateway.report = parse_report(await _read(response), gateway=name)
                        gateway.heard_at, pause = self._clock(), 0.0
                        traffic = gateway.report.traffic
                        if traffic is not None and (traffic.waiting_requests or traffic.idle_seconds == 0):
                            pause = _PAUSE_SECONDS  # it would answer at once again
                            self._on_request(key)
            except (TimeoutError, aiohttp.ClientError, ValueError) as failure:
                log.debug(
                    "no word of requests", extra={"gateway": name, "error": f"{type(failure).__name__}: {failure}"}
                )
            await asyncio.sleep(pause)

    def _url(self, gateway: _Gateway, path: str) -> str:
        host = f"[{gateway.address}]" if ":" in gateway.address else gateway.address
        return f"http://{host}:{self._port}{path}"

    async def _poll(self, session: aiohttp.ClientSession, key: ModelKey) -> None:
        model = self._models.get(key)
        if model is None:
            return
        gateways = list(model.gateways.items())
        for start in range(0, len(gateways), _GATEWAYS_AT_ONCE):
            await asyncio.gather(
                *(self._ask(session, name, gateway) for name, gateway in gateways[start : start + _GATEWAYS_AT_ONCE])
            )
        now = self._clock()
        standings = _merge(self.reports(key))
        model.rejected_since = {
            (name, report.host): model.rejected_since.get((name, report.host), now)
            for name, report in standings.items()
            if not report.admitted
        }
        view = self.view(key)
        model.admitted = {
            worker
            for worker in ((name, standing.host) for name, standing in standings.items())
            if worker in model.admitted or worker not in model.rejected_since
        }
        told = (
            {
                name: (s.host, _phase(s, was_admitted=(name, s.host) in model.admitted))
                for name, s in view.standings.items()
            },
            view.reporting,
            view.unable,
            dict(view.silent),
            dict(view.starting),
            {name: tier.reason for name, tier in view.tiers.items()},
            summarize_peers(view.peers),
            summarize(view.transports),
            {name: tier.reason for name, tier in view.stores.items()},
            {name: told for name, told in view.weights.items() if told is not None},
            view.asked,
        )
        if told != model.told:
            model.told = told
            self._on_change(key)

    async def _ask(self, session: aiohttp.ClientSession, name: str, gateway: _Gateway) -> None:
        gateway.unable, error = False, ""
        try:
            async with session.get(self._url(gateway, FLEET_PATH), allow_redirects=False) as response:
                if response.status == 404:
                    gateway.unable = True
                elif response.status != 200:
                    error = f"it answers {response.status}"
                else:
                    gateway.report = parse_report(await _read(response), gateway=name)
                    gateway.heard_at = self._clock()
        except (TimeoutError, aiohttp.ClientError) as failure:
            # Which of them it is changes with the load, and with it would the status of every model.
            error = f"it cannot be reached within {ANSWER_SECONDS:g} s"
            log.debug("no connection", extra={"gateway": name, "error": f"{type(failure).__name__}: {failure}"})
        except ValueError as failure:
            error = str(failure)
        gateway.asked = True
        gateway.error = error and (gateway.error or error)  # of several in a row the first: words must not alternate
        metrics.FLEET_REPORTS.labels("error" if error else "unable" if gateway.unable else "success").inc()
        if error:
            log.debug("no report", extra={"gateway": name, "error": error})


def parse_report(data: bytes, *, gateway: str) -> FleetReport:
    """A report of the pod `gateway`.

    Raises:
        ValueError: it is not one; says what is wrong with it.
    """
    try:
        report = FleetReport.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise ValueError(f"its report cannot be read: {place}: {first['msg']}") from error
    if report.gateway != gateway:
        raise ValueError(f"its address answers as {report.gateway[:100]}")
    return report


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Raises ValueError where it is more than a report may have."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_BYTES:
            raise ValueError(f"its report has more than {MAX_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _is_fresh(gateway: _Gateway, now: float) -> bool:
    return gateway.report is not None and not gateway.unable and now - gateway.heard_at <= STALE_SECONDS


def _standings(model: _Model, reports: Sequence[FleetReport], now: float) -> dict[str, Standing]:
    return {
        name: Standing(
            host=found.host,
            admitted=found.admitted,
            reason=found.reason,
            rejected_seconds=0.0 if found.admitted else now - model.rejected_since.get((name, found.host), now),
        )
        for name, found in _merge(reports).items()
    }


def _phase(standing: Standing, *, was_admitted: bool) -> object:
    """What somebody has to know of a worker: a busy one that is left out for moments is as it was."""
    steps = sum(standing.rejected_seconds >= limit for limit in REJECTED_SECONDS)
    return "admitted" if standing.admitted or (was_admitted and not steps) else (steps, standing.reason)


def _merge(reports: Sequence[FleetReport]) -> dict[str, Standing]:
    """Workers as all gateways together see them. Of two addresses under one name, the one that is admitted counts."""
    found: dict[str, Standing] = {}
    for report in reports:
        for worker in report.workers:
            known = found.get(worker.name)
            if known is None or (worker.state == "Admitted" and not known.admitted):
                found[worker.name] = Standing(
                    host=_host(worker), admitted=worker.state == "Admitted", reason=worker.reason
                )
    return found


def _hosts(reports: Sequence[FleetReport]) -> set[str]:
    """Addresses of all workers that are there, ready or not."""
    return {_host(one) for report in reports for one in (*report.workers, *report.starting)}


def _tiers(samples: Mapping[str, WorkerTelemetry], kind: str) -> dict[str, TierTelemetry]:
    """What workers tell of their tiers of one kind, by worker."""
    return {name: tier for name, sample in samples.items() for tier in sample.kv_tiers if tier.tier == kind}


def _transports(samples: Mapping[str, WorkerTelemetry]) -> dict[str, KVTransportTelemetry]:
    """What workers tell of the transport of their blocks, by worker."""
    return {name: sample.kv_transport for name, sample in samples.items() if sample.kv_transport is not None}


def _weights(samples: Mapping[str, WorkerTelemetry]) -> dict[str, WeightsTelemetry | None]:
    """What workers tell of the form of their matrices, by worker."""
    return {name: sample.weights for name, sample in samples.items()}


def _newest_samples(heard: Sequence[tuple[FleetReport, float]]) -> dict[str, WorkerTelemetry]:
    """The newest sample of each worker, of reports that were read so many seconds ago: that of a gateway which has
    stopped answering grows older."""
    found: dict[str, tuple[float, WorkerTelemetry]] = {}
    for report, since in heard:
        for worker in report.workers:
            if worker.telemetry is None:
                continue
            age = since + (worker.telemetry_age or 0.0)
            if worker.name not in found or age < found[worker.name][0]:
                found[worker.name] = age, worker.telemetry
    return {name: sample for name, (_, sample) in found.items()}


def _host(worker: WorkerReport | StartingReport) -> str:
    return worker.address.rpartition(":")[0].strip("[]")
