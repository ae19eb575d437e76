"""The gateway of one model: what connections, exchanges and discovery share, and the routing between them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

from tandem_api.launch import GatewayConfig, GatewayRouting, StoreLimits, TracingConfig
from tandem_api.names import Role
from tandem_api.telemetry import WorkerTelemetry
from tandem_api.tracing import Tracer, describe_pod

from tandem_gateway.errors import ShuttingDown
from tandem_gateway.exchange.queueing import RequestQueue
from tandem_gateway.exchange.state import ExchangeState
from tandem_gateway.http.budget import Budget
from tandem_gateway.http.sse import find_cached
from tandem_gateway.http.tls import Certificate
from tandem_gateway.paths import COMPUTES
from tandem_gateway.process.surroundings import Surroundings
from tandem_gateway.records.access_log import AccessLog
from tandem_gateway.records.metrics import Metrics
from tandem_gateway.records.traffic import TrafficCounter
from tandem_gateway.requests.cors import CORSPolicy
from tandem_gateway.responses.service import Responses
from tandem_gateway.scheduling import KEPT, Decision, Endpoint, Estimator, Scheduler, Terms, Worker
from tandem_gateway.scheduling.isolation import Isolation
from tandem_gateway.upstream.engines import build_engines
from tandem_gateway.upstream.engines.contract import Kinds
from tandem_gateway.workers.credentials import Credentials
from tandem_gateway.workers.telemetry import describe_cache, describe_pulls, describe_share
from tandem_gateway.workers.upstreams import Upstreams

UNAUTHORIZED_LOG_SECONDS = 10.0
"""A worker that does not take this gateway's key is named this often, however many requests it turns away."""
REFUSED = frozenset((400, 404, 413, 422))
"""What a worker answers to a request that nobody is to compute."""
log = logging.getLogger(__name__)


class Gateway:
    def __init__(
        self,
        config: GatewayConfig,
        surroundings: Surroundings,
        *,
        access_log: AccessLog | None = None,
        tracing: TracingConfig | None = None,
        certificate: Certificate | None = None,
    ) -> None:
        """`tracing` holds while nothing else is configured. Without a `certificate` clients speak no TLS.

        Raises:
            ConfigError: the keys cannot be read.
        """
        self.config = config
        self.served_names: tuple[str, ...] = (config.served_name,)
        """Names that clients may pass as `model`, the present one first."""
        self.timeouts = config.timeouts
        self.cors = CORSPolicy(config.cors) if config.cors is not None else None
        self.drain_timeout_seconds = config.drain_timeout_seconds
        self.min_priority, self.explains = config.min_priority, config.explain
        self.max_body_bytes = config.max_body_bytes
        self.budget = Budget(config.max_held_bytes)
        self.responses = _build_store(config.response_store, self.budget)
        """Those that are kept; None: none are."""
        self.scheduler = Scheduler(_find_terms(config))
        self.engines = build_engines(self, worker_model=config.model_name)
        self.kinds, self.draining = Kinds(), False
        self.decisions: deque[Decision] = deque(maxlen=KEPT)
        self.metrics = Metrics()
        self.traffic = TrafficCounter()
        self.queue = RequestQueue(config.queue, self.scheduler, self.metrics, on_join=surroundings.on_waiting)
        self.isolation = Isolation()
        self.access_log = access_log
        self.certificate = certificate
        self.tracer = _build_tracer(config, tracing)
        self.exchanges: set[ExchangeState] = set()
        self.idle_watchers: set[Callable[[], None]] = set()
        """Each is called once, and forgotten, when a request is under way where none was."""
        self._credentials = Credentials(config.keys_path)
        self.token_line = self._credentials.line
        self.upstreams = Upstreams(connect_seconds=lambda: self.timeouts.connect_seconds, on_stale=self._on_stale)
        self.link = self.upstreams.find
        self._complained_at: dict[str, float] = {}
        """When a worker that does not take the key was last named."""
        self.started_at, self.idle_since = time.time(), monotonic()
        """When the last exchange ended."""

    # discovery

    def apply_workers(self, workers: Iterable[Worker]) -> None:
        """The model's workers are now these. Requests on workers that left run on; waiting ones are placed."""
        workers = list(workers)
        self.kinds = Kinds.of(workers)
        left = self.scheduler.apply_workers(workers)
        self.upstreams.drop(left)
        self.place_waiting()

    def apply_routing(self, routing: GatewayRouting) -> None:
        """From now on it is so. Requests that run keep the deadline they have until they next show a sign of life."""
        self.served_names = tuple(routing.served_names)
        self.timeouts = routing.timeouts
        self.cors = CORSPolicy(routing.cors) if routing.cors is not None else None
        self.queue.settings = routing.queue
        self.drain_timeout_seconds = routing.drain_timeout_seconds
        self.min_priority, self.explains = routing.min_priority, routing.explain
        self.scheduler.apply_canary(routing.canary)
        self.scheduler.terms = _find_terms(routing)
        self.tracer.follow(routing.tracing)
        self._follow_store(routing.response_store)

    def _follow_store(self, limits: StoreLimits | None) -> None:
        if self.responses is None:
            self.responses = _build_store(limits, self.budget)
            return
        self.responses.follow(limits)
        if limits is None:
            self.responses = None

    def take_sample(self, worker: Worker, sample: WorkerTelemetry | None) -> None:
        """What a worker has just told about itself; None: it has missed several times."""
        endpoint = self.scheduler.endpoints.get(worker.name)
        if endpoint is None or endpoint.worker != worker:
            return
        if sample is None:
            self.scheduler.miss(endpoint)
            endpoint.own.keeps_steps = False  # how full its steps are is not known
            return
        endpoint.own.tell(
            keeps_steps=sample.keeps_step_seconds is True,
            decode_seconds=sample.plain_step_seconds or sample.decode_step_seconds,
            running=sample.running_requests,
        )
        if sample.decode_tokens_per_step is not None:
            endpoint.tokens_per_event = sample.decode_tokens_per_step
        now = asyncio.get_running_loop().time()
        horizon, kv_tokens = describe_cache(sample)
        evicted_until = None
        if sample.at is not None:
            # Nothing was evicted, or what was last used so long ago.
            evicted_until = now - (sample.at - horizon) if horizon else 0.0
        self.scheduler.observe(
            endpoint,
            now,
            queued_tokens=sample.queued_prefill_tokens,
            evicted_until=evicted_until,
            kv_tokens=kv_tokens,
            prompts=sample.prompts,
            pull_rate=describe_pulls(sample),
            share=describe_share(sample),
        )

    # requests

    def on_exchange_end(self, exchange: ExchangeState) -> None:
        now = monotonic()  # the loop's own clock counts whole milliseconds
        self.exchanges.discard(exchange)
        self.idle_since = now
        if exchange.recording is not None:
            exchange.recording.close()
        began, first, status, path = exchange.started_at, exchange.first_byte_at, exchange.status, exchange.request.path
        choice, ratio = exchange.choice, None
        if choice is not None:
            choice.status, expected = status, choice.expected
            if expected is not None and choice.measured:
                ratio = expected / choice.measured
        self.metrics.count_exchange(path, status, now - began, first - began if first else None, ratio)
        well, computes = status == 200 and exchange.error is None, path in COMPUTES
        if well:
            self.traffic.finished += computes
        elif computes and status in REFUSED:
            self.traffic.take_back(exchange.inquiry.prompt_tokens)
        usage, stream = exchange.usage, exchange.stream
        events = 0 if stream is None else stream.events
        if usage is not None or events > 2:
            if computes:
                self.traffic.count_answer(usage, events, well=well)
            _learn(self.scheduler.estimator, exchange)
        if exchange.trace is not None:
            exchange.trace.end(exchange, self.served_names[0], now)
        if self.access_log is not None:
            self.access_log.add(exchange, now)

    def _on_stale(self) -> None:
        self.metrics.retries["stale"] += 1

    def on_prefill_lost(self, endpoint: Endpoint, reason: str) -> None:
        self.metrics.retries["prefill"] += 1
        log.info("a prefill worker failed", extra={"worker": endpoint.worker.name, "reason": reason})

    def on_unauthorized(self, endpoint: Endpoint) -> None:
        now, name = monotonic(), endpoint.worker.name
        if now - self._complained_at.get(name, -UNAUTHORIZED_LOG_SECONDS) < UNAUTHORIZED_LOG_SECONDS:
            return
        self._complained_at[name] = now
        log.warning(
            "a worker does not take this gateway's key; other workers are asked",
            extra={"worker": name, "key": self._credentials.key_name},
        )

    # time

    def follow_keys(self) -> None:
        """Show workers the key that holds now."""
        self._credentials.refresh()
        if self._credentials.line is not self.token_line:
            self.token_line = self._credentials.line

    def place_waiting(self) -> None:
        """Send on who waits for a worker, or for what a connection to one needs."""
        for exchange in tuple(self.exchanges):
            if exchange.waiting and not exchange.queued:
                exchange.dispatch()
        if self.queue.line.size:
            self.queue.place(asyncio.get_running_loop().time())

    # shutting down

    def start_draining(self) -> None:
        """Answers from now on end their connections, so that clients move elsewhere."""
        self.draining = True

    def stop(self) -> None:
        """End what still runs."""
        for exchange in tuple(self.exchanges):
            exchange.stop(ShuttingDown("this gateway is shutting down; send the request again"))

    def close(self) -> None:
        """Nothing runs any more."""
        self.upstreams.close()
        if self.access_log is not None:
            self.access_log.flush()


def name_pod() -> str:
    return os.environ.get("POD_NAME") or socket.gethostname()


def _find_terms(told: GatewayConfig | GatewayRouting) -> Terms | None:
    seconds = told.convert_step_seconds
    return None if seconds is None else Terms(step_seconds=seconds, ttft=told.queue.ttft_target)


def _build_store(limits: StoreLimits | None, budget: Budget) -> Responses | None:
    return None if limits is None else Responses(limits, budget, clock=monotonic)


def _build_tracer(config: GatewayConfig, fallback: TracingConfig | None) -> Tracer:
    facts = describe_pod(name_pod(), config.namespace, config.model_name, Role.GATEWAY)
    tracer = Tracer("tandem-gateway", facts, fallback=fallback)
    tracer.follow(config.tracing)
    return tracer


def _learn(estimator: Estimator, exchange: ExchangeState) -> None:
    """What an answer tells of prompts and answers to come."""
    usage = exchange.usage
    if usage is None:
        if exchange.status == 200 and exchange.error is None:
            estimator.learn_output(exchange.events - 2)
        return
    prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if isinstance(prompt, int) and isinstance(output, int):
        estimator.learn(prompt_bytes=exchange.inquiry.prompt_bytes, prompt_tokens=prompt, output_tokens=output)
        cached = find_cached(usage)
        if cached is not None and exchange.choice is not None:
            estimator.learn_cached(prompt_tokens=prompt, expected=exchange.choice.known_tokens, cached=cached)
            exchange.choice.learn_stored(cached)
