"""What is recorded of a trace and what becomes of it: contexts, samples, the queue; and that off loads nothing."""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api import tracing
from tandem_api.collectors import check_collector
from tandem_api.crd.observability import Tracing
from tandem_api.launch import TracingConfig
from tandem_api.span_export import SpanExport
from tandem_api.spans import Span, TraceContext, read_context
from tandem_api.tracing import Tracer, read_environment

from tests.collector import run_collector

CONTEXT = TraceContext("4a" * 16, "ab" * 8)


def eventually(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def make_span(**fields: Any) -> Span:
    now = time.monotonic()
    return Span(
        **({"name": "one", "context": CONTEXT.child(), "parent": CONTEXT, "began": now - 2, "ended": now} | fields)
    )


@given(trace=st.integers(1, 2**128 - 1), span=st.integers(1, 2**64 - 1), sampled=st.booleans())
def test_a_context_is_read_as_it_is_written(trace: int, span: int, sampled: bool) -> None:
    context = TraceContext(f"{trace:032x}", f"{span:016x}", sampled)
    assert read_context(context.header.encode()) == context
    assert context.child().trace_id == context.trace_id
    assert context.child().span_id != context.span_id


@given(st.binary(max_size=80))
def test_what_is_no_context_is_none(data: bytes) -> None:
    found = read_context(data)
    assert found is None or data[3:35] == found.trace_id.encode()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}, ("http://c:4318/v1/traces", 100)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:1/x"}, ("http://c:1/x", 100)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, None),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
             "OTEL_TRACES_SAMPLER_ARG": "0.25"},
            ("http://c/v1/traces", 25),
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_SAMPLER": "parentbased_always_off"},
            ("http://c/v1/traces", 0),
        ),
    ],
)  # fmt: skip
def test_the_usual_variables_switch_it_on(environment: dict[str, str], expected: tuple[str, float] | None) -> None:
    found = read_environment(environment)
    assert (found and (found.traces_url, found.sampling_percent)) == expected


@pytest.mark.parametrize("ratio", ["2", "-1", "much", "nan"])
def test_a_ratio_that_is_none_is_refused(ratio: str) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_SAMPLER": "traceidratio"}
    with pytest.raises(ValueError, match="write a number from 0 to 1"):
        read_environment(environment | {"OTEL_TRACES_SAMPLER_ARG": ratio})


def test_as_many_as_configured_are_recorded_and_clients_decide_for_themselves() -> None:
    with run_collector() as collector:
        tracer = Tracer("t", {})
        assert tracer.begin(None) is None
        tracer.follow(TracingConfig(endpoint=collector.url, sampling_percent=25))
        taken = sum(tracer.begin(None) is not None for _ in range(4000))
        assert 800 < taken < 1200  # within 7 standard deviations
        tracer.follow(TracingConfig(endpoint=collector.url, sampling_percent=0))
        assert tracer.begin(None) is None
        inherited = tracer.begin(CONTEXT)
        assert inherited is not None
        assert inherited.trace_id == CONTEXT.trace_id
        assert tracer.begin(TraceContext("4a" * 16, "ab" * 8, sampled=False)) is None
        tracer.close()
        assert not tracer.active


def test_a_span_arrives_as_it_was_recorded() -> None:
    with run_collector() as collector:
        tracer = Tracer("t", {"k8s.pod.name": "p-0"})
        tracer.follow(TracingConfig(endpoint=collector.url))
        before = time.time()
        span = make_span(attributes={"n": 3, "none": None, "names": ["a", "b"]}, kind="client", error="reset",
                         links=(CONTEXT,))  # fmt: skip
        tracer.add([span])
        eventually(lambda: collector.spans)
        tracer.close()
    (seen,) = collector.spans
    assert (seen.trace_id, seen.span_id, seen.parent_id) == (CONTEXT.trace_id, span.context.span_id, CONTEXT.span_id)
    assert (seen.name, seen.kind, seen.failed) == ("one", "client", True)
    assert seen.attributes == {"n": 3, "names": ["a", "b"], "error.type": "reset"}
    assert seen.links == [CONTEXT.span_id]
    assert (seen.resource["service.name"], seen.resource["k8s.pod.name"]) == ("t", "p-0")
    assert seen.ended - seen.began == pytest.approx(2e9, abs=2e3)
    assert seen.ended / 1e9 == pytest.approx(before, abs=5)
    assert tracer.counts == {"exported": 1}
    assert collector.posts[0]["path"] == "/v1/traces"


def test_what_does_not_fit_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_QUEUED", 10)
    monkeypatch.setattr(tracing._Sender, "_run", lambda sender: None)  # the exporter never comes
    tracer = Tracer("t", {})
    tracer.follow(TracingConfig(endpoint="http://127.0.0.1:9"))
    tracer.add([make_span() for _ in range(8)])
    tracer.add([make_span() for _ in range(5)])
    assert tracer.counts == {"queue_full": 3}
    tracer.close()
    assert tracer.counts == {"queue_full": 3, "export_failed": 10}


@pytest.fixture
def laborious(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When each batch began, all of which take 10 ms of CPU."""
    begun: list[float] = []

    def send(export: SpanExport, spans: object) -> bool:
        begun.append(time.monotonic())
        enough = time.thread_time() + 0.01
        while time.thread_time() < enough:
            pass
        return True

    monkeypatch.setattr(SpanExport, "send", send)
    return begun


def test_exporting_takes_its_share_of_a_core_and_no_more(laborious: list[float]) -> None:
    """However many spans clients ask for: what it does not get to is dropped."""
    tracer = Tracer("t", {})
    tracer.follow(TracingConfig(endpoint="http://127.0.0.1:9"))
    tracer.add([make_span()] * (5 * tracing.MAX_BATCH))
    eventually(lambda: tracer.counts["exported"] == 5 * tracing.MAX_BATCH)
    tracer.close()
    for before, after in itertools.pairwise(laborious):
        assert after - before > 0.01 / 0.25 * 0.99


def test_at_the_end_it_takes_what_it_can_get(monkeypatch: pytest.MonkeyPatch, laborious: list[float]) -> None:
    monkeypatch.setattr(tracing, "MAX_SHARE", 1e-9)  # months between two batches
    tracer = Tracer("t", {})
    tracer.follow(TracingConfig(endpoint="http://127.0.0.1:9"))
    tracer.add([make_span()] * (3 * tracing.MAX_BATCH))
    eventually(lambda: laborious)
    tracer.close(60)
    assert tracer.counts == {"exported": 3 * tracing.MAX_BATCH}


def test_a_collector_that_hangs_holds_nobody_up() -> None:
    """It takes connections and never answers: recording returns, and so does the end."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = Tracer("t", {})
        tracer.follow(TracingConfig(endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}"))
        began = time.monotonic()
        for _ in range(100):
            tracer.add([make_span()])
        assert time.monotonic() - began < 5
        silent.settimeout(60)
        connection, _ = silent.accept()  # the exporter waits for an answer
        with connection:
            began = time.monotonic()
            tracer.close(seconds=0.2)
            assert time.monotonic() - began < 8


def test_switched_off_and_on_again_what_waits_is_sent() -> None:
    with run_collector() as collector:
        config = TracingConfig(endpoint=collector.url)
        tracer = Tracer("t", {})
        for count in (1, 2):
            tracer.follow(config)
            tracer.add([make_span()])
            tracer.follow(None)
            assert not tracer.active
            eventually(lambda count=count: len(collector.spans) == count)


OFF = """
import sys
{setup}
loaded = sorted(name for name in sys.modules if name.startswith(("opentelemetry", "google.protobuf", "requests")))
assert not loaded, loaded
"""


@pytest.mark.parametrize(
    "setup",
    [
        "import tandem_gateway.__main__; from tandem_gateway.process.server import Server\n"
        "from tandem_gateway.process.settings import parse_settings\n"
        "server = Server(parse_settings(['--worker=role=decode,url=127.0.0.1:9']))\n"
        "assert not server.gateway.tracer.active",
        "import tandem_worker.__main__, tandem_worker.host.runtime, tandem_api.logs\n"
        "import tandem_worker.server.answer.tracing, tandem_worker.transfer.prefill.tracing\n"
        "import tandem_worker.engine.trace",
    ],
    ids=["gateway", "worker"],
)
def test_nothing_is_loaded_where_nothing_is_traced(setup: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFF.format(setup=setup)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "endpoint",
    [
        "collector:4318", "junk", "ftp://c", "http://", "http://c:99999", "http://c:0", "http://c:x", "http://[::1",
        "http://[:::::]:4318", "http://c c", "http://c\n", "http://u:secret@c:4318",
    ],
)  # fmt: skip
def test_what_is_no_collector_is_refused_wherever_it_is_written(endpoint: str) -> None:
    """Here, and so neither where a gateway follows a change nor where a policy is written for its port."""
    readers: list[Callable[[], object]] = [
        lambda: TracingConfig(endpoint=endpoint),
        lambda: Tracing(endpoint=endpoint),
        lambda: read_environment({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint + "/v1/traces"}),
    ]
    for read in readers:
        with pytest.raises(ValueError, match=r"for example http|OTEL_EXPORTER_OTLP_HEADERS"):
            read()
    with pytest.raises(ValueError, match="collector") as caught:
        check_collector(endpoint)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["http://[::1]:4318", "https://c", "http://c:65535", "http://10.0.0.1:1/x"])
def test_what_is_a_collector_is_taken_wherever_it_is_written(endpoint: str) -> None:
    assert Tracing(endpoint=endpoint).endpoint == TracingConfig(endpoint=endpoint).endpoint == endpoint


def test_a_span_that_cannot_be_sent_takes_no_other_batch_with_it(caplog: pytest.LogCaptureFixture) -> None:
    with run_collector() as collector:
        tracer = Tracer("t", {})
        tracer.follow(TracingConfig(endpoint=collector.url))
        tracer.add([make_span(), make_span(began=float("nan"))])
        eventually(lambda: tracer.counts["export_failed"] == 2)
        tracer.add([make_span(name="after")])
        eventually(lambda: collector.spans)
        tracer.close()
    assert [span.name for span in collector.spans] == ["after"]
    assert "a batch of spans cannot be exported" in caplog.text


def test_a_number_that_the_protocol_has_no_room_for_is_left_out_quietly(caplog: pytest.LogCaptureFixture) -> None:
    """It may be a client's `max_tokens`: a line in the log for each would be the client's to write."""
    with run_collector() as collector:
        tracer = Tracer("t", {})
        tracer.follow(TracingConfig(endpoint=collector.url))
        tracer.add([make_span(attributes={"most": 2**63 - 1, "more": 2**63, "flag": True})])
        eventually(lambda: collector.spans)
        tracer.close()
    assert collector.spans[0].attributes == {"most": 2**63 - 1, "flag": True}
    assert "encode" not in caplog.text  # threads of tests before this one may still say something else


@contextlib.contextmanager
def run_answer(head: bytes, body: Iterator[bytes]) -> Iterator[tuple[str, threading.Event]]:
    """The URL of what answers one post so, and whether the client has closed the connection before the end."""
    closed = threading.Event()

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(60)
            connection.recv(65536)
            try:
                connection.sendall(head)
                for piece in body:
                    connection.sendall(piece)
            except OSError:
                closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", closed
        thread.join(60)


def test_of_an_answer_without_end_little_is_read() -> None:
    """It would be the process's memory, and the exporter's thread for good."""
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\n\r\n"
    with run_answer(head, itertools.repeat(bytes(1 << 16))) as (url, closed):
        tracer = Tracer("t", {})
        tracer.follow(TracingConfig(endpoint=url))
        tracer.add([make_span()])
        eventually(lambda: tracer.counts["exported"])
        assert closed.wait(60)
        tracer.close()


def test_a_collector_that_has_moved_is_no_success(caplog: pytest.LogCaptureFixture) -> None:
    head = b"HTTP/1.1 302 Found\r\nlocation: http://elsewhere:4318/\r\ncontent-length: 0\r\n\r\n"
    with run_answer(head, iter(())) as (url, _):
        tracer = Tracer("t", {})
        tracer.follow(TracingConfig(endpoint=url))
        tracer.add([make_span()])
        eventually(lambda: tracer.counts["export_failed"])
        tracer.close()
    assert "the collector is at 'http://elsewhere:4318/' now; name that as the endpoint" in caplog.text
