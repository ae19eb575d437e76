"""What the gateway tells of itself: metrics, the operator's report, and what it decides and why, for people."""

from __future__ import annotations

import asyncio
import time

from tandem_api.fleet import FleetReport, WorkerReport
from tandem_api.logs import format_time
from tandem_api.names import Role
from tandem_api.telemetry import Metric

from tandem_gateway.families import by_label
from tandem_gateway.http.request import Request
from tandem_gateway.paths import RESPONSES
from tandem_gateway.process.gateway import Gateway, name_pod
from tandem_gateway.process.surroundings import Surroundings
from tandem_gateway.requests.prompt import read_inquiry
from tandem_gateway.scheduling import Endpoint, describe_choice, describe_decision, predict


class Reports:
    def __init__(self, gateway: Gateway, surroundings: Surroundings) -> None:
        self._gateway = gateway
        self._surroundings = surroundings

    def render_metrics(self) -> bytes:
        gateway = self._gateway
        endpoints: dict[tuple[str, str], int] = {}
        for endpoint in gateway.scheduler.endpoints.values():
            key = (endpoint.worker.role.value, endpoint.state)
            endpoints[key] = endpoints.get(key, 0) + 1
        known = gateway.scheduler.endpoints.values()
        tokens = {
            "prefill": sum(endpoint.prefill_tokens for endpoint in known),
            "decode": sum(endpoint.decode_tokens for endpoint in known),
        }
        return gateway.metrics.render(
            endpoints=endpoints,
            tokens=tokens,
            in_flight=len(gateway.exchanges),
            queued=gateway.queue.line.size,
            failures={outcome.value: count for outcome, count in gateway.scheduler.failures.items()},
            ejections={outcome.value: count for outcome, count in gateway.scheduler.ejections.items()},
            canary=gateway.scheduler.canary_requests,
            telemetry=self._surroundings.telemetry_reads,
            spans=gateway.tracer.counts,
            more=[
                by_label(
                    Metric.GATEWAY_CONVERSIONS_TOTAL,
                    "Requests for which a decode worker might have computed the prompt, by what was decided.",
                    {verdict.value: count for verdict, count in gateway.scheduler.conversions.items()},
                    label="verdict",
                ),
                *(() if gateway.certificate is None else gateway.certificate.families()),
                *(() if gateway.responses is None else gateway.responses.families()),
            ],
        )

    def describe_endpoints(self) -> list[dict[str, object]]:
        """For people: what the scheduler believes of each worker."""
        gateway = self._gateway
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
                "failures": endpoint.health.total,
                "failuresInARow": endpoint.health.failures,
                "ejections": endpoint.health.ejections,
                "backoffSeconds": round(max(0.0, endpoint.health.until - now), 3),
            }
            for endpoint in gateway.scheduler.endpoints.values()
        ]

    def describe_decisions(self) -> list[dict[str, object]]:
        """For people: the last decisions, newest first."""
        gateway = self._gateway
        behind = time.time() - asyncio.get_running_loop().time()
        return [describe_decision(each, at=format_time(behind + each[1])) for each in reversed(gateway.decisions)]

    def describe_responses(self) -> dict[str, object]:
        """For people: what is kept of responses, in numbers."""
        gateway = self._gateway
        if gateway.responses is None:
            return {"enabled": False}
        return {"enabled": True} | gateway.responses.store.describe(time.monotonic())

    def preview(self, request: Request) -> dict[str, object]:
        """For people: what would be decided for a request now, which is not sent. Its path is that of its API.

        Raises:
            RequestError: the gateway would refuse it.
        """
        gateway = self._gateway
        now, responses, fields, said = asyncio.get_running_loop().time(), gateway.responses, None, None
        if request.path == RESPONSES and responses is not None:
            asked = responses.read(request, look=True)
            expanded = responses.expand(asked, body=request.body, max_bytes=gateway.max_body_bytes)
            fields, said = asked.question.fields, None if expanded is None else expanded.said
        names, estimator = gateway.served_names, gateway.scheduler.estimator
        inquiry = read_inquiry(
            request,
            served_names=names,
            estimator=estimator,
            fields=fields,
            said=said,
            min_priority=gateway.min_priority,
        )
        waiting: dict[str, object] = {"waitingRequests": gateway.queue.line.size}
        choice = gateway.scheduler.preview(inquiry, now)
        if choice is None:
            return waiting | {"decode": None, "why": gateway.queue.explain()}
        predict(choice, output_tokens=inquiry.output_tokens, now=now)
        return waiting | describe_choice(choice)

    def describe_fleet(self) -> FleetReport:
        """For the operator: how the workers do, and nothing of what was asked."""
        gateway = self._gateway
        canary = gateway.scheduler.canary
        return FleetReport(
            gateway=name_pod(),
            started_at=gateway.started_at,
            at=time.time(),
            served_names=list(gateway.served_names),
            canary_percent=None if canary is None else canary.percent,
            workers=[*map(self._report_on, gateway.scheduler.endpoints.values()), *self._surroundings.report_held()],
            starting=self._surroundings.report_starting(),
            traffic=gateway.traffic.report(
                waiting_requests=gateway.queue.line.size,
                waiting_tokens=gateway.queue.line.tokens,
                idle_seconds=0.0 if gateway.exchanges else time.monotonic() - gateway.idle_since,
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
