"""The gateway of one model: what connections, exchanges and discovery share, and the routing between them."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count, islice
from typing import Any
from urllib.parse import unquote

from tandem_api.fleet import FleetReport, WorkerReport
from tandem_api.launch import GatewayConfig, GatewayRouting, StoreLimits, TracingConfig
from tandem_api.logs import format_time
from tandem_api.names import Role
from tandem_api.telemetry import Metric, WorkerTelemetry
from tandem_api.tracing import Tracer, describe_pod

from tandem_gateway.access_log import AccessLog
from tandem_gateway.cors import CORSPolicy, is_preflight
from tandem_gateway.credentials import Credentials
from tandem_gateway.errors import GatewayFull, NotRouted, RequestError, ShuttingDown
from tandem_gateway.exchange import Exchange
from tandem_gateway.fairness import Sources
from tandem_gateway.http.budget import FREE_BYTES, Budget
from tandem_gateway.http.connection import ClientConnection
from tandem_gateway.http.request import Request
from tandem_gateway.http.response import build_empty, build_error, build_json
from tandem_gateway.http.tls import Certificate
from tandem_gateway.links import NativeLinks
from tandem_gateway.links import describe as describe_link
from tandem_gateway.metrics import Metrics, by_label
from tandem_gateway.own_answers import OWN_PATHS, answer_own
from tandem_gateway.prompt import (
    COMPUTES,
    INFERENCE_PATHS,
    MODELS,
    RESPONSES,
    TOKENIZER_INFO,
    Said,
    check_name,
    read_inquiry,
)
from tandem_gateway.queueing import RequestQueue
from tandem_gateway.responses.recording import Recording
from tandem_gateway.responses.service import Asked, Responses, name_path, refuse_off
from tandem_gateway.scheduling import (
    KEPT,
    Decision,
    Endpoint,
    Outcome,
    Scheduler,
    Terms,
    Worker,
    describe_choice,
    describe_decision,
    predict,
)
from tandem_gateway.scheduling.isolation import Isolation
from tandem_gateway.sse import find_cached
from tandem_gateway.surroundings import Surroundings
from tandem_gateway.telemetry import describe_cache, describe_pulls
from tandem_gateway.tracing import begin_trace
from tandem_gateway.traffic import TrafficCounter
from tandem_gateway.turns import LARGE_BYTES, Turns
from tandem_gateway.upstream.base import Link
from tandem_gateway.upstream.engines import build_engines, idle_seconds
from tandem_gateway.upstream.engines.contract import Kinds
from tandem_gateway.upstream.http1 import Http1Link

TICK_SECONDS = 0.1
"""Resolution of all deadlines and of the token ledger. One timer for all requests: timers of their own would cost more
than the requests' own work."""
UNAUTHORIZED_LOG_SECONDS = 10.0
"""A worker that does not take this gateway's key is named this often, however many requests it turns away."""
REFUSED = frozenset((400, 404, 413, 422))
"""What a worker answers to a request that nobody is to compute."""
LOOKED_AT = 64
"""Connections looked at, of who has most, for one that nobody asks over."""
REFUSALS = 64
"""Connections beyond the limit that are told so before they are closed."""
_REQUEST_ID = re.compile(rb"[\w.:/+=-]{1,128}")
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
        self.max_connections = config.max_connections
        self.budget = Budget(config.max_held_bytes)
        self.responses = self._build_store(config.response_store)
        """Those that are kept; None: none are."""
        self.turns = Turns()
        """Requests that wait for one of their own."""
        self.scheduler = Scheduler(_find_terms(config))
        self.engines = build_engines(self, worker_model=config.model_name)
        self.kinds, self.draining = Kinds(), False
        self.decisions: deque[Decision] = deque(maxlen=KEPT)
        self.metrics = Metrics()
        self.traffic = TrafficCounter()
        self._surroundings = surroundings
        self.queue = RequestQueue(config.queue, self.scheduler, self.metrics, on_join=surroundings.on_waiting)
        self.isolation = Isolation()
        self.access_log = access_log
        self.certificate = certificate
        self.tracer = _build_tracer(config, tracing)
        self.exchanges: set[Exchange] = set()
        self.on_busy: Callable[[], None] | None = None
        """Called once, when a request is under way where none was; for who asked to be told."""
        self.connections, self.sources = set[ClientConnection](), Sources[ClientConnection]()
        """All of them, and by whose they are."""
        self._credentials = Credentials(config.keys_path)
        self.token_line = self._credentials.line
        self.native = self._build_native() if config.link == "Native" else None
        """None: workers are asked over HTTP."""
        self._links, self._complained_at = dict[int, Link](), dict[str, float]()
        """When a worker that does not take the key was last named."""
        self._request_ids, self._started_at = _RequestIds(), time.time()
        self._idle_since = time.monotonic()
        """When the last exchange ended."""

    # discovery

    def apply_workers(self, workers: Iterable[Worker]) -> None:
        """The model's workers are now these. Requests on workers that left run on; waiting ones are placed."""
        workers = list(workers)
        self.kinds = Kinds.of(workers)
        for endpoint in self.scheduler.apply_workers(workers):
            link = self._links.pop(endpoint.serial, None)
            if link is not None:
                link.close()
        if self.native is not None:
            self.native.take(len(self.scheduler.endpoints))
            for endpoint in self.scheduler.endpoints.values():
                self.link(endpoint)
        self._place_waiting()

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

    def _build_native(self) -> NativeLinks:
        return NativeLinks(
            token=lambda: self._credentials.token,
            on_sample=self._surroundings.on_pushed_sample,
            on_drain=self._on_drain,
        )

    def _build_store(self, limits: StoreLimits | None) -> Responses | None:
        return None if limits is None else Responses(limits, self.budget, clock=time.monotonic)

    def _follow_store(self, limits: StoreLimits | None) -> None:
        if self.responses is None:
            self.responses = self._build_store(limits)
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
            decode_seconds=sample.decode_step_seconds,
            running=sample.running_requests,
        )
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
        )

    def link(self, endpoint: Endpoint) -> Link:
        link = self._links.get(endpoint.serial)
        if link is None:
            link = self._links[endpoint.serial] = self._open_link(endpoint.worker)
        return link

    def _open_link(self, worker: Worker) -> Link:
        seconds = self.timeouts.connect_seconds
        http = Http1Link(
            worker.address,
            connect_seconds=seconds,
            on_stale=self._on_stale,
            idle_seconds=idle_seconds(worker.engine),
        )
        if self.native is None or worker.engine != "Tandem":
            return http
        if not worker.link_address:
            log.warning(
                "a worker has no port for the native link; it is asked over HTTP", extra={"worker": worker.name}
            )
            return http
        return self.native.open(worker, http, seconds)

    def _on_drain(self, worker: Worker) -> None:
        """It says so itself, before it turns a request away."""
        endpoint = self.scheduler.endpoints.get(worker.name)
        if endpoint is not None and endpoint.worker == worker:
            self.scheduler.report(endpoint, Outcome.DRAINING, asyncio.get_running_loop().time())

    # connections

    def on_connect(self, connection: ClientConnection) -> None:
        self.connections.add(connection)
        self.sources.add(connection.source, connection)
        over = len(self.connections) - self.max_connections
        if over <= 0:
            return
        excess = self.sources.find_excess(connection.source)
        if over > REFUSALS:
            connection.transport.abort()
        elif excess is not None:
            newest = [*islice(self.sources.newest(excess), LOOKED_AT)]
            leaving = next((other for other in newest if other.exchange is None), newest[0])
            if leaving.exchange is None:
                self.on_disconnect(leaving)
            else:  # it is told first, and counts until it has gone
                self.sources.remove(leaving.source, leaving)
            leaving.leave()
        else:
            connection.refuse(
                GatewayFull(f"the gateway has as many connections as it may, {self.max_connections}; try again shortly")
            )

    def on_disconnect(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        self.sources.remove(connection.source, connection)

    def on_request(self, connection: ClientConnection, request: Request) -> None:
        given = request.headers.get(b"x-request-id")
        request_id = given if given is not None and _REQUEST_ID.fullmatch(given) else self._request_ids.next()
        cors = self.cors
        if cors is not None:
            request.answer_fields = cors.fields(request.headers.get(b"origin"))
        try:
            if cors is not None and is_preflight(request):
                self._answer_preflight(connection, request, request_id, cors)
            elif request.path in INFERENCE_PATHS:
                if len(request.body) <= LARGE_BYTES:
                    if request.path != RESPONSES or self.responses is None:
                        self._start_exchange(connection, request, request_id)
                    else:
                        self._begin_stored(connection, request, request_id, self.responses)
                else:
                    held = len(request.body)
                    work = partial(self._infer, connection, request, request_id)
                    self._defer(connection, request, request_id, work, held_bytes=held)
            elif request.path.startswith(f"{RESPONSES}/"):
                self._answer_stored(connection, request, request_id)
            else:
                self._tell(connection, request, request_id, self._answer(request))
        except RequestError as error:
            self._refuse(connection, request, request_id, error)

    def _infer(self, connection: ClientConnection, request: Request, request_id: bytes) -> None:
        """A request that a worker is to answer. Raises RequestError."""
        if request.path != RESPONSES or self.responses is None:
            self._start_exchange(connection, request, request_id)
        else:
            self._begin_stored(connection, request, request_id, self.responses)

    def _defer(
        self,
        connection: ClientConnection,
        request: Request,
        request_id: bytes,
        work: Callable[[], None],
        *,
        held_bytes: int = 0,
        drop: Callable[[], None] = lambda: None,
    ) -> None:
        """Do `work` in a turn of its own; a RequestError of it is told. The rest as in `Turns.add`."""

        def attempt() -> None:
            try:
                work()
            except RequestError as error:
                self._refuse(connection, request, request_id, error)

        self.turns.add(connection, attempt, held_bytes=held_bytes, drop=drop)

    def _answer_stored(self, connection: ClientConnection, request: Request, request_id: bytes) -> None:
        """A question about responses that are kept. Raises RequestError."""
        if self.responses is None:
            raise refuse_off()
        reply = self.responses.answer(request)
        if reply.size <= LARGE_BYTES:
            self._tell(connection, request, request_id, reply.build())
            return

        def work() -> None:
            self._tell(connection, request, request_id, reply.build())

        self._defer(connection, request, request_id, work)

    def _tell(self, connection: ClientConnection, request: Request, request_id: bytes, payload: object) -> None:
        """An answer of the gateway's own."""
        keep_alive = request.keep_alive and not self.draining
        more, with_body = request.answer_fields, request.method != b"HEAD"
        answer = build_json(200, payload, request_id, keep_alive=keep_alive, more=more, with_body=with_body)
        self._record(request.path, 200, request_id, None, len(answer))
        self._reply(connection, answer, keep_alive=keep_alive)

    def _refuse(self, connection: ClientConnection, request: Request, request_id: bytes, error: RequestError) -> None:
        keep_alive = request.keep_alive and not self.draining
        more, with_body = request.answer_fields, request.method != b"HEAD"
        answer = build_error(error, request_id, keep_alive=keep_alive, more=more, with_body=with_body)
        self._record(request.path, error.status, request_id, error.code or error.kind, len(answer))
        self._reply(connection, answer, keep_alive=keep_alive)

    def _reply(self, connection: ClientConnection, answer: bytes, *, keep_alive: bool) -> None:
        connection.exchange = None
        connection.write(answer)
        if len(answer) > FREE_BYTES:
            connection.account()
        connection.finish(keep_alive=keep_alive)

    def on_refused(self, connection: ClientConnection, error: RequestError) -> None:
        """The connection could not read a request; it closes itself after this answer."""
        request_id = self._request_ids.next()
        fields = b"" if self.cors is None else self.cors.fields(connection.refused_origin)
        answer = build_error(error, request_id, keep_alive=False, more=fields)
        self._record("", error.status, request_id, error.code or error.kind, len(answer))
        connection.write(answer)

    # requests

    def _answer_preflight(
        self, connection: ClientConnection, request: Request, request_id: bytes, cors: CORSPolicy
    ) -> None:
        keep_alive = request.keep_alive and not self.draining
        answer = build_empty(request_id, cors.answer_preflight(request), keep_alive=keep_alive)
        self._record(request.path, 204, request_id, None, len(answer))
        connection.write(answer)
        connection.finish(keep_alive=keep_alive)

    def _begin_stored(
        self, connection: ClientConnection, request: Request, request_id: bytes, responses: Responses
    ) -> None:
        """A request for a response that may be kept. Raises RequestError."""
        if request.method != b"POST":
            raise NotRouted.wrong_method(request.method, request.path, "POST")
        asked = responses.read(request)
        if asked.size <= LARGE_BYTES:
            self._begin_response(connection, request, request_id, responses, asked)
            return

        def work() -> None:
            self._begin_response(connection, request, request_id, responses, asked)

        held = len(request.body)
        self._defer(connection, request, request_id, work, held_bytes=held, drop=responses.keep_hold(asked))

    def _begin_response(
        self, connection: ClientConnection, request: Request, request_id: bytes, responses: Responses, asked: Asked
    ) -> None:
        """A request for a response that may continue another. Raises RequestError."""
        expanded = responses.expand(asked, body=request.body, max_bytes=self.max_body_bytes)
        fields, said, recording = asked.question.fields, None, None
        if expanded is not None:
            request.body, said, recording = expanded.body, expanded.said, responses.record(asked, expanded)
        self._start_exchange(connection, request, request_id, recording, fields=fields, said=said)

    def _start_exchange(
        self,
        connection: ClientConnection,
        request: Request,
        request_id: bytes,
        recording: Recording | None = None,
        *,
        fields: dict[str, Any] | None = None,
        said: Said | None = None,
    ) -> None:
        """`fields` of the body and what is `said` in it, where they are known. Raises RequestError."""
        method = b"GET" if request.path == TOKENIZER_INFO else b"POST"
        if request.method != method:
            raise NotRouted.wrong_method(request.method, request.path, method.decode())
        names, estimator = self.served_names, self.scheduler.estimator
        inquiry = read_inquiry(
            request, served_names=names, estimator=estimator, fields=fields, said=said, min_priority=self.min_priority
        )
        for engine in self.kinds.others:
            self.engines[engine].admit(request.path, request.body, inquiry)
        exchange = Exchange(self, connection, request, inquiry, request_id)
        if recording is not None:
            recording.hold()
            exchange.recording = recording
        if self.tracer.active and request.path in COMPUTES:
            exchange.trace = begin_trace(self.tracer, request.headers)
        connection.exchange = exchange
        if recording is not None:
            connection.account()
        is_first = not self.exchanges
        self.exchanges.add(exchange)
        self.metrics.in_flight += 1
        if request.path in COMPUTES:
            traffic, tokens = self.traffic, inquiry.demand.prompt_tokens
            if traffic.ahead:
                traffic.make_up(tokens)
            else:
                traffic.requests += 1
                traffic.prompt_tokens += tokens
                traffic.prompt_squares += tokens * tokens
        exchange.dispatch()
        if is_first and self.on_busy is not None:
            on_busy, self.on_busy = self.on_busy, None
            on_busy()

    def _answer(self, request: Request) -> object:
        """What the gateway knows by itself."""
        own = request.path in OWN_PATHS
        if not own and request.path != MODELS and not request.path.startswith(f"{MODELS}/"):
            raise NotRouted(f"unknown path {request.path[:200]!r}", code="unknown_url")
        if request.method not in (b"GET", b"HEAD"):
            raise NotRouted.wrong_method(request.method, request.path, "GET, HEAD")
        if own:
            return answer_own(
                request.path,
                self.scheduler,
                in_flight=len(self.exchanges),
                draining=self.draining,
                wakes=self.queue.settings.wakes,
            )
        if request.path == MODELS:
            return {"object": "list", "data": [self._describe(self.served_names[0])]}
        name = unquote(request.path[len(MODELS) + 1 :])  # clients write the slash of a name as %2F
        check_name(name, self.served_names)
        return self._describe(name)

    def _describe(self, name: str) -> dict[str, object]:
        told = self._surroundings.describe_model()
        return {"id": name, "object": "model", "created": int(self._started_at), "owned_by": "tandem", **told}

    def on_exchange_end(self, exchange: Exchange) -> None:
        now = time.monotonic()  # the loop's own clock counts whole milliseconds
        self.exchanges.discard(exchange)
        self._idle_since = now
        if exchange.recording is not None:
            exchange.recording.close()
        began, first = exchange.started_at, exchange.first_byte_at
        choice, ratio = exchange.choice, None
        if choice is not None:
            choice.status = exchange.status
            if choice.expected is not None and choice.measured:
                ratio = choice.expected / choice.measured
        self.metrics.count_exchange(
            exchange.request.path, exchange.status, now - began, first - began if first else None, ratio
        )
        well = exchange.status == 200 and exchange.error is None
        computes = exchange.request.path in COMPUTES
        self.traffic.finished += well and computes
        if computes and exchange.status in REFUSED:
            self.traffic.take_back(exchange.inquiry.demand.prompt_tokens)
        if exchange.usage is not None or exchange.events > 2:
            if computes:
                self.traffic.count_answer(exchange.usage, exchange.events, well=well)
            self._learn(exchange)
        if exchange.trace is not None:
            exchange.trace.end(exchange, self.served_names[0], now)
        if self.access_log is not None:
            self.access_log.add(exchange, now)

    def _on_stale(self) -> None:
        self.metrics.retries["stale"] += 1

    def on_retry(self, exchange: Exchange, reason: str) -> None:
        self.metrics.retries[reason] += 1

    def on_prefill_lost(self, endpoint: Endpoint, reason: str) -> None:
        self.metrics.retries["prefill"] += 1
        log.info("a prefill worker failed", extra={"worker": endpoint.worker.name, "reason": reason})

    def on_resumed(self, reason: str) -> None:
        self.metrics.resumes[reason] += 1

    def on_resume_failed(self, reason: str) -> None:
        self.metrics.failed_resumes[reason] += 1

    def on_unauthorized(self, endpoint: Endpoint) -> None:
        now, name = time.monotonic(), endpoint.worker.name
        if now - self._complained_at.get(name, -UNAUTHORIZED_LOG_SECONDS) < UNAUTHORIZED_LOG_SECONDS:
            return
        self._complained_at[name] = now
        log.warning(
            "a worker does not take this gateway's key; other workers are asked",
            extra={"worker": name, "key": self._credentials.key_name},
        )

    def _learn(self, exchange: Exchange) -> None:
        usage = exchange.usage
        if usage is None:
            if exchange.status == 200 and exchange.error is None:
                self.scheduler.estimator.learn_output(exchange.events - 2)
            return
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt, int) and isinstance(output, int):
            self.scheduler.estimator.learn(
                prompt_bytes=exchange.inquiry.prompt_bytes, prompt_tokens=prompt, output_tokens=output
            )
            cached = find_cached(usage)
            if cached is not None and exchange.choice is not None:
                self.scheduler.estimator.learn_cached(
                    prompt_tokens=prompt, expected=exchange.choice.known_tokens, cached=cached
                )

    # time

    def tick(self, now: float) -> None:
        """Everything that happens because time passes."""
        self._follow_keys()
        if self.certificate is not None:
            self.certificate.refresh(now)
        self.scheduler.tick(now)
        if self.responses is not None:
            self.responses.store.expire(time.monotonic())
        for exchange in tuple(self.exchanges):
            exchange.tick(now)
        self._place_waiting()
        for connection in tuple(self.connections):
            connection.tick(now)
        for link in self._links.values():
            link.reap(now)
        if self.access_log is not None:
            self.access_log.flush()

    def _follow_keys(self) -> None:
        self._credentials.refresh()
        if self._credentials.line is not self.token_line:
            self.token_line = self._credentials.line
            if self.native is not None:
                self.native.renew(self._links.values())

    def _place_waiting(self) -> None:
        for exchange in tuple(self.exchanges):
            if exchange.waiting and not exchange.queued:
                exchange.dispatch()
        if self.queue.line.size:
            self.queue.place(asyncio.get_running_loop().time())

    # shutting down

    def start_draining(self) -> None:
        """Answers from now on end their connections, so that clients move elsewhere."""
        self.draining = True

    @property
    def busy(self) -> bool:
        """Something runs, or was answered and is not on its way yet."""
        return bool(self.exchanges) or len(self.turns) > 0 or any(connection.unsent for connection in self.connections)

    def close_idle(self) -> bool:
        """Close connections on which nobody asks. False where a next request may be on its way."""
        now = asyncio.get_running_loop().time()
        settled = True
        for connection in tuple(self.connections):
            settled &= connection.close_if_idle(now)
        return settled

    def stop(self) -> None:
        """End what still runs."""
        for exchange in tuple(self.exchanges):
            exchange.stop(ShuttingDown("this gateway is shutting down; send the request again"))
        for connection in tuple(self.connections):
            connection.transport.close()
        for link in self._links.values():
            link.close()
        if self.access_log is not None:
            self.access_log.flush()

    # records

    def render_metrics(self) -> bytes:
        endpoints: dict[tuple[str, str], int] = {}
        for endpoint in self.scheduler.endpoints.values():
            key = (endpoint.worker.role.value, endpoint.state)
            endpoints[key] = endpoints.get(key, 0) + 1
        known = self.scheduler.endpoints.values()
        tokens = {
            "prefill": sum(endpoint.prefill_tokens for endpoint in known),
            "decode": sum(endpoint.decode_tokens for endpoint in known),
        }
        return self.metrics.render(
            endpoints=endpoints,
            tokens=tokens,
            queued=self.queue.line.size,
            failures={outcome.value: count for outcome, count in self.scheduler.failures.items()},
            ejections={outcome.value: count for outcome, count in self.scheduler.ejections.items()},
            canary=self.scheduler.canary_requests,
            telemetry=self._surroundings.telemetry_reads,
            spans=self.tracer.counts,
            more=[
                by_label(
                    Metric.GATEWAY_CONVERSIONS_TOTAL,
                    "Requests for which a decode worker might have computed the prompt, by what was decided.",
                    {verdict.value: count for verdict, count in self.scheduler.conversions.items()},
                    label="verdict",
                ),
                *(() if self.certificate is None else self.certificate.families()),
                *(() if self.native is None else self.native.families(self._links.values())),
                *(() if self.responses is None else self.responses.families()),
            ],
        )

    def describe_endpoints(self) -> list[dict[str, object]]:
        """For people: what the scheduler believes of each worker."""
        now = asyncio.get_running_loop().time()
        return [
            {
                "name": endpoint.worker.name,
                "address": endpoint.worker.address,
                "role": endpoint.worker.role.value,
                "revision": endpoint.worker.revision,
                "requests": endpoint.requests,
                "prefillTokens": endpoint.prefill_tokens,
                "decodeTokens": endpoint.decode_tokens,
                "otherTokens": endpoint.others,
                "kvTokens": endpoint.kv_tokens,
                "forgottenBeforeSeconds": round(now - endpoint.evicted_until, 1) if endpoint.evicted_until else None,
                "tokensPerSecond": round(endpoint.speed.value),
                "state": endpoint.state,
                "link": "http" if self.native is None else describe_link(self._links.get(endpoint.serial)),
                "failures": endpoint.health.total,
                "failuresInARow": endpoint.health.failures,
                "ejections": endpoint.health.ejections,
                "backoffSeconds": round(max(0.0, endpoint.health.until - now), 3),
            }
            for endpoint in self.scheduler.endpoints.values()
        ]

    def describe_decisions(self) -> list[dict[str, object]]:
        """For people: the last decisions, newest first."""
        behind = time.time() - asyncio.get_running_loop().time()
        return [describe_decision(each, at=format_time(behind + each[1])) for each in reversed(self.decisions)]

    def describe_responses(self) -> dict[str, object]:
        """For people: what is kept of responses, in numbers."""
        if self.responses is None:
            return {"enabled": False}
        return {"enabled": True} | self.responses.store.describe(time.monotonic())

    def preview(self, request: Request) -> dict[str, object]:
        """For people: what would be decided for a request now, which is not sent. Its path is that of its API.

        Raises:
            RequestError: the gateway would refuse it.
        """
        now, responses, fields, said = asyncio.get_running_loop().time(), self.responses, None, None
        if request.path == RESPONSES and responses is not None:
            asked = responses.read(request, look=True)
            expanded = responses.expand(asked, body=request.body, max_bytes=self.max_body_bytes)
            fields, said = asked.question.fields, None if expanded is None else expanded.said
        names, estimator = self.served_names, self.scheduler.estimator
        inquiry = read_inquiry(
            request, served_names=names, estimator=estimator, fields=fields, said=said, min_priority=self.min_priority
        )
        waiting: dict[str, object] = {"waitingRequests": self.queue.line.size}
        choice = self.scheduler.preview(inquiry.demand, now)
        if choice is None:
            return waiting | {"decode": None, "why": self.queue.explain()}
        predict(choice, output_tokens=inquiry.demand.output_tokens, now=now)
        return waiting | describe_choice(choice)

    def describe_fleet(self) -> FleetReport:
        """For the operator: how the workers do, and nothing of what was asked."""
        canary = self.scheduler.canary
        return FleetReport(
            gateway=_name_pod(),
            started_at=self._started_at,
            at=time.time(),
            served_names=list(self.served_names),
            canary_percent=None if canary is None else canary.percent,
            workers=[*map(self._report_on, self.scheduler.endpoints.values()), *self._surroundings.report_held()],
            starting=self._surroundings.report_starting(),
            traffic=self.traffic.report(
                waiting_requests=self.queue.line.size,
                waiting_tokens=self.queue.line.tokens,
                idle_seconds=0.0 if self.exchanges else time.monotonic() - self._idle_since,
            ),
        )

    def _report_on(self, endpoint: Endpoint) -> WorkerReport:
        worker, reason = endpoint.worker, endpoint.health.reason
        admitted = endpoint.level >= 0
        telemetry, age = self._surroundings.find_sample(worker) or (None, None)
        if telemetry is not None and telemetry.prompts:  # for gateways alone
            telemetry = telemetry.model_copy(update={"prompts": []})
        return WorkerReport(
            name=worker.name,
            address=worker.address,
            role=worker.role,
            revision=worker.revision,
            state="Admitted" if admitted else "Ejected",
            reason=None if admitted or reason is None else reason.value,
            requests=endpoint.ended,
            failures=endpoint.failed,
            ttft_counts=[] if worker.role is Role.PREFILL else endpoint.ttft_counts,
            telemetry=telemetry,
            telemetry_age=age,
        )

    def _record(self, path: str, status: int, request_id: bytes, error: str | None, size: int) -> None:
        """An answer of the gateway's own."""
        path = name_path(path)
        self.metrics.count(path, status)
        if self.access_log is not None:
            self.access_log.add_own(path, status, request_id, error, size)


class _RequestIds:
    """For requests whose clients name none."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._prefix = os.urandom(6).hex().encode()

    def next(self) -> bytes:
        return b"req-%b%08x" % (self._prefix, next(self._numbers))


def _name_pod() -> str:
    return os.environ.get("POD_NAME") or socket.gethostname()


def _find_terms(told: GatewayConfig | GatewayRouting) -> Terms | None:
    seconds = told.convert_step_seconds
    return None if seconds is None else Terms(step_seconds=seconds, ttft=told.queue.ttft_target)


def _build_tracer(config: GatewayConfig, fallback: TracingConfig | None) -> Tracer:
    facts = describe_pod(_name_pod(), config.namespace, config.model_name, Role.GATEWAY)
    tracer = Tracer("tandem-gateway", facts, fallback=fallback)
    tracer.follow(config.tracing)
    return tracer
