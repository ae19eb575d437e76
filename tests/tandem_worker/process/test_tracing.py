"""One request through a gateway, a prefill and a decode worker, all processes: one tree of spans."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.clients.stack import run_gateway
from tests.collector import Collector, Seen, run_collector
from tests.tandem_worker.process.conftest import MODEL, eventually

SKEW = 5_000_000
"""Nanoseconds: clocks of one machine, read one after the other."""
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
WHOLE = {
    ("chat tiny", "server"): 1, ("route", "internal"): 1, ("POST /v1/chat/completions", "client"): 1,
    ("POST /v1/chat/completions", "server"): 1, ("prepare", "internal"): 1, ("queue", "internal"): 1,
    ("remote prefill", "client"): 1, ("kv receive", "internal"): 1, ("decode", "internal"): 1,
    ("prefill", "server"): 1, ("prefill queue", "internal"): 1, ("prefill compute", "internal"): 1,
    ("kv send", "internal"): 1,
}  # fmt: skip
PARENTS = {
    "route": "chat tiny", "POST /v1/chat/completions client": "chat tiny",
    "POST /v1/chat/completions server": "POST /v1/chat/completions client",
    "prepare": "POST /v1/chat/completions server", "queue": "POST /v1/chat/completions server",
    "remote prefill": "POST /v1/chat/completions server", "decode": "POST /v1/chat/completions server",
    "kv receive": "remote prefill", "prefill": "remote prefill", "prefill queue": "prefill",
    "prefill compute": "prefill", "kv send": "prefill",
}  # fmt: skip


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with run_collector() as running:
        yield running


@pytest.fixture(scope="module")
def stack(
    collector: Collector, workers: SimpleNamespace, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("traced")
    tracing = {"endpoint": collector.url}
    with (
        workers.run(folder, "prefill", tiny_model, tracing=tracing) as prefill,
        workers.run(folder, "decode", tiny_model, tracing=tracing) as decode,
    ):
        flags: list[str] = ["--worker", "role=decode,url=127.0.0.1:9,revision=r1,name=gone-0"]
        for role, worker in (("prefill", prefill), ("decode", decode)):
            workers.await_ready(worker)
            flags += ["--worker", f"role={role},url={worker.url},kv={worker.kv},revision=r1,name={role}-0"]
        told: dict[str, Any] = {"model_name": MODEL, "served_name": MODEL, "disaggregated": True}
        with run_gateway(folder, flags, **told, tracing=tracing) as url:
            yield SimpleNamespace(url=url, prefill=prefill, decode=decode, log=folder / "gateway.log")


def ask(url: str, trace_id: str, *, flags: str = "01", **options: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": trace_id + PROMPT}], "max_tokens": 6} | options
    headers = {"traceparent": f"00-{trace_id}-{'ab' * 8}-{flags}"}
    answer = httpx.post(url + "/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def name_of(span: Seen) -> str:
    return f"{span.name} {span.kind}" if span.name.startswith("POST") else span.name


def await_tree(collector: Collector, trace_id: str, names: set[str]) -> dict[str, Seen]:
    """The spans of a trace by their names, once all those are there."""
    eventually(lambda: names <= {name_of(span) for span in collector.of(trace_id)}, 60, f"spans {names}")
    return {name_of(span): span for span in collector.of(trace_id)}


@pytest.mark.parametrize("stream", [False, True])
def test_one_request_is_one_tree(stack: SimpleNamespace, collector: Collector, stream: bool) -> None:
    trace_id = ("5a" if stream else "4a") * 16
    ask(stack.url, trace_id, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    tree = await_tree(collector, trace_id, {*PARENTS, "chat tiny"})
    spans = [span for span in collector.of(trace_id) if span.attributes.get("server.port") != 9]
    root = tree["chat tiny"]
    assert root.parent_id == "ab" * 8
    assert {(span.name, span.kind) for span in spans} == set(WHOLE)
    by_id = {span.span_id: span for span in collector.of(trace_id)}
    answered = {name_of(span): span for span in spans}
    for name, parent in PARENTS.items():
        span = answered[name]
        assert name_of(by_id[span.parent_id]) == parent, name
        assert root.began - SKEW <= span.began <= span.ended, name
    usage = root.attributes
    assert usage["gen_ai.operation.name"] == "chat"
    assert usage["gen_ai.request.model"] == usage["gen_ai.response.model"] == MODEL
    assert usage["gen_ai.usage.input_tokens"] == answered["prefill"].attributes["gen_ai.usage.input_tokens"] > 180
    assert usage["gen_ai.usage.output_tokens"] == answered["decode"].attributes["gen_ai.usage.output_tokens"] > 0
    assert usage["http.response.status_code"] == 200
    assert ("gen_ai.response.time_to_first_chunk" in usage) is stream
    assert answered["kv receive"].attributes["tandem.kv.bytes"] == answered["kv send"].attributes["tandem.kv.bytes"] > 0
    assert {span.resource["service.name"] for span in spans} == {"tandem-gateway", "tandem-worker"}
    assert answered["prefill"].resource["tandem.role"] == "prefill"
    assert not any(span.failed for span in spans)


def test_the_trace_is_in_the_logs(stack: SimpleNamespace, collector: Collector) -> None:
    """Also where the client names none."""
    body = {"model": MODEL, "prompt": "logged " + PROMPT, "max_tokens": 2}
    headers = {"x-request-id": "find-me"}
    httpx.post(stack.url + "/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()

    def roots() -> list[Seen]:
        return collector.find(lambda span: span.attributes.get("tandem.request_id") == "find-me")

    eventually(lambda: len(roots()) == 2, 60, "the gateway's and the worker's span of it")
    trace_id = roots()[0].trace_id
    assert {span.trace_id for span in roots()} == {trace_id}
    for log in (stack.log, stack.decode.log):
        lines = [json.loads(line) for line in log.read_text().splitlines() if '"find-me"' in line]
        assert [line["trace_id"] for line in lines] == [trace_id]


def test_a_client_that_wants_no_trace_gets_none(stack: SimpleNamespace, collector: Collector) -> None:
    ask(stack.url, "6b" * 16, flags="00")
    ask(stack.url, "6c" * 16)
    await_tree(collector, "6c" * 16, {*PARENTS, "chat tiny"})  # those before it are there by then
    assert collector.of("6b" * 16) == []


def test_every_attempt_is_seen(stack: SimpleNamespace, collector: Collector) -> None:
    """One of the decode workers is not there: requests that go to it first go on to the other."""

    def attempts() -> list[Seen]:
        return collector.find(lambda span: span.attributes.get("server.port") == 9)

    numbers = itertools.count(0x7000)

    def retried() -> bool:
        ask(stack.url, f"{next(numbers):032x}")
        return bool(attempts())

    eventually(retried, 100, "a request went to the worker that is gone")
    failed = attempts()[0]
    tree = await_tree(collector, failed.trace_id, {"chat tiny", "decode"})
    both = [span for span in collector.of(failed.trace_id) if span.kind == "client" and span.name.startswith("POST")]
    good = next(span for span in both if span.span_id != failed.span_id)
    assert len(both) == 2
    assert failed.failed
    assert failed.attributes["error.type"] == "refused"
    assert {span.parent_id for span in both} == {tree["chat tiny"].span_id}
    assert good.attributes["http.request.resend_count"] == 1
    assert tree["POST /v1/chat/completions server"].parent_id == good.span_id
    assert tree["chat tiny"].attributes["tandem.attempts"] == 2


def test_a_prefill_that_fails_is_seen(stack: SimpleNamespace, collector: Collector) -> None:
    body = {"model": MODEL, "prompt": "fails " + PROMPT, "max_tokens": 2}
    headers = {"x-tandem-prefill": "127.0.0.1:1", "traceparent": f"00-{'8d' * 16}-{'ab' * 8}-01"}
    httpx.post(stack.decode.url + "/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()
    tree = await_tree(collector, "8d" * 16, {"remote prefill", "prefill", "decode"})
    assert tree["remote prefill"].failed
    assert "cannot connect" in tree["remote prefill"].attributes["tandem.failure"]
    assert tree["prefill"].kind == "internal"
    assert tree["prefill"].began >= tree["remote prefill"].ended - SKEW


def test_spans_that_go_nowhere_are_counted(stack: SimpleNamespace, collector: Collector) -> None:
    """Last: a collector that refuses costs spans, and no request."""
    collector.status = 400
    ask(stack.url, "9e" * 16)
    name = "tandem_worker_trace_spans_total"
    eventually(lambda: "export_failed" in stack.decode.get("/metrics").text, 60, "the worker counts them")
    assert stack.decode.metric(name, outcome="export_failed") > 0
    assert stack.decode.metric(name, outcome="exported") > 0
    assert collector.of("9e" * 16) == []
