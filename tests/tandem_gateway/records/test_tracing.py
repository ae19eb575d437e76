"""Spans of exchanges over real sockets: waits, endings, and collectors that are not there."""

from __future__ import annotations

import json

from tandem_api.launch import GatewayRouting, TracingConfig

from tests.collector import Collector, Seen, run_collector

PARENT = f"traceparent: 00-{'a1' * 16}-{'b2' * 8}-01\r\nconnection: close\r\n"


def roots(collector: Collector) -> list[Seen]:
    return collector.find(lambda span: span.kind == "server")


async def test_a_wait_for_a_worker_is_a_span(start_gateway, start_worker, chat, until) -> None:
    with run_collector() as collector:
        running = await start_gateway(tracing=TracingConfig(endpoint=collector.url))
        reader, writer = await running.connect()
        writer.write(chat(headers=PARENT))
        await until(lambda: running.gateway.queue.line.size, wait=30)
        worker = await start_worker()
        running.apply(worker)
        assert b" 200 " in await reader.readline()
        await until(lambda: roots(collector), wait=60)
        writer.close()
    spans = {span.name: span for span in collector.of("a1" * 16)}
    (root,) = roots(collector)
    assert set(spans) == {"queue", "route", "POST /v1/chat/completions", root.name}
    assert root.parent_id == "b2" * 8
    assert {span.parent_id for span in spans.values() if span is not root} == {root.span_id}
    assert spans["queue"].attributes == {"tandem.queue.outcome": "placed"}
    assert spans["queue"].ended <= spans["route"].began + 5_000_000
    sent = worker.received[-1].headers["traceparent"]
    assert sent == f"00-{'a1' * 16}-{spans['POST /v1/chat/completions'].span_id}-01"


async def test_a_failure_is_named(start_gateway, start_worker, chat, fault, until) -> None:
    with run_collector() as collector:
        running = await start_gateway(
            await start_worker(default=fault.die), tracing=TracingConfig(endpoint=collector.url)
        )
        answer = await running.raw(chat(headers=PARENT), wait=60)
        assert b" 502 " in answer.split(b"\r\n")[0] or b" 503 " in answer.split(b"\r\n")[0]
        await until(lambda: roots(collector), wait=60)
    (root,) = roots(collector)
    assert root.failed
    assert root.attributes["error.type"] == json.loads(answer.rpartition(b"\r\n")[2])["error"]["code"]
    attempts = collector.find(lambda span: span.kind == "client")
    assert attempts
    assert all(span.failed for span in attempts)


async def test_it_is_switched_on_and_off_while_the_gateway_runs(start_gateway, start_worker, chat, until) -> None:
    with run_collector() as collector:
        running = await start_gateway(await start_worker())
        for on in (False, True, False):
            tracing = TracingConfig(endpoint=collector.url) if on else None
            running.gateway.apply_routing(GatewayRouting(served_names=["m"], tracing=tracing))
            await running.raw(chat(headers=f"x-request-id: {on}\r\nconnection: close\r\n", model=None))
        await until(lambda: roots(collector), wait=60)
        await until(lambda: running.gateway.tracer.counts.total() == len(collector.spans), wait=60)
    assert [span.attributes["tandem.request_id"] for span in roots(collector)] == ["True"]


async def test_without_a_collector_requests_are_answered_and_spans_counted(
    start_gateway, start_worker, chat, until
) -> None:
    running = await start_gateway(await start_worker(), tracing=TracingConfig(endpoint="http://127.0.0.1:9"))
    for _ in range(5):
        assert b" 200 " in await running.raw(chat(headers="connection: close\r\n"))
    running.gateway.tracer.follow(None)  # what waits is tried once more, and given up
    await until(lambda: running.gateway.tracer.counts["export_failed"] == 15, wait=60)
    text = running.server.reports.render_metrics().decode()
    assert 'tandem_gateway_trace_spans_total{outcome="export_failed"} 15.0' in text
    assert "trace_spans" not in (await _fresh(start_gateway)).render_metrics().decode()


async def _fresh(start_gateway):
    return (await start_gateway()).server.reports
