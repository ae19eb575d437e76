"""What is kept of a stream, and when it may move."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.journal import COMMIT, MAX_JOURNAL_BYTES, MOVED, USAGE
from tandem_api.launch import TracingConfig
from tandem_gateway.exchange.recovery import MAX_DEATHS, MAX_STALLS, POLICIES, AttemptProgress, Ending, decide
from tandem_gateway.exchange.resume import SECONDS, Continuation, may_keep
from tandem_gateway.http.budget import Budget
from tandem_gateway.http.journal import JournaledStream
from tandem_gateway.http.sse import EventTooLarge
from tandem_gateway.records.access_log import AccessLog

from tests.collector import run_collector

HEAD = b'{"id":"x"}'
HALF = b'data: {"choices":[{"index":0,"delta":{"content":"half'
UNITS = [
    (b'data: {"a":"\\n: t 0 1"}\n\n', b": b 0 4\n"),
    (b'data: {"a":1}\n\ndata: {"b":2}\n\n', b": t 0 1,2\n"),
    (b'event: a\ndata: {"type":"a","text":"\\n: e 0 1"}\n\nevent: b\ndata: {}\n\n', b": e 0 5 17\n"),
    (b"", b": b 1 0\n"),
    (b'data: {"a":"' + b"x" * 300 + b'"}\n\n', b": t 1 7 [[0,7,-0.5,[]]]\n"),
    (b"data: [DONE]\n\n", USAGE + b"900 800 70\n"),
]


@given(cuts=st.lists(st.integers(0, 500)), whole=st.booleans())
def test_events_and_journal_do_not_depend_on_how_they_arrive(cuts: list[int], whole: bool) -> None:
    data = b"".join(events + mark for events, mark in UNITS)
    stream = JournaledStream(HEAD)
    out = b""
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    if whole:
        places = [0, len(data)]
    for start, end in itertools.pairwise(places):
        part = stream.feed(data[start:end]) if end > start else b""
        assert not part or part.endswith(b"\n\n")
        out += part
    assert out == b"".join(events for events, _ in UNITS)
    assert bytes(stream.journal) == b"".join(mark for _, mark in UNITS)
    assert stream.events == 7
    assert stream.done


@given(end=st.integers(0, sum(len(events) + len(mark) for events, mark in UNITS)))
def test_what_is_passed_on_and_what_is_kept_agree_wherever_the_worker_dies(end: int) -> None:
    data = b"".join(events + mark for events, mark in UNITS)[:end]
    stream = JournaledStream(HEAD)
    out = stream.feed(data) if data else b""
    complete, length = 0, 0
    for events, mark in UNITS:
        length += len(events) + len(mark)
        complete += length <= end
    assert out == b"".join(events for events, _ in UNITS[:complete])
    assert stream.build_prefix() == HEAD + b"\n" + b"".join(mark for _, mark in UNITS[:complete])
    stream.restart()
    assert stream.feed(b"data: {}\n\n: t 0 9\n") == b"data: {}\n\n"


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(
    ("last", "told"),
    [
        (USAGE + b"900 800 70\n", (900, 800, 70)),
        (USAGE + b"900 800\n", None), (USAGE + b"900 -1 70\n", None), (USAGE + b"a b c\n", None), (COMMIT, None),
    ],
)  # fmt: skip
def test_the_last_mark_tells_the_usage_that_the_client_did_not_ask_for(keeps: bool, last: bytes, told) -> None:
    stream = JournaledStream(HEAD)
    assert stream.read_usage() is None
    stream.feed(b"data: {}\n\n: t 0 9\n")
    if not keeps:
        stream.stop_keeping()
    assert stream.feed(b"data: [DONE]\n\n" + last) == b"data: [DONE]\n\n"
    usage = stream.read_usage()
    found = usage and (
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
    )
    assert found == told


async def test_streams_that_tell_no_usage_are_counted_and_learned_from(start_gateway, start_worker, chat) -> None:
    async def stream(worker, request, writer) -> None:
        text = b'data: {"choices":[]}\n\n' * 4 + b": t 0 1\n" + b"data: [DONE]\n\n" + USAGE + b"4000 3000 70\n"
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-tandem-resume: {}\r\n"
            b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
        )

    running = await start_gateway(await start_worker(default=stream))
    lines: list[bytes] = []
    running.gateway.access_log = AccessLog(lines.append)
    answer = await running.raw(chat(stream=True, headers="connection: close\r\n", user="x" * 64))
    assert USAGE not in answer
    running.gateway.access_log.flush()
    (line,) = map(json.loads, lines)
    assert [line[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")] == [4000, 3000, 70]
    report = running.gateway.traffic.report()
    assert (report.computed_prompt_tokens, report.computed_tokens, report.output_tokens) == (4000, 1000, 70)
    assert running.gateway.scheduler.estimator.output_tokens != 128


def test_a_worker_that_hands_its_stream_on_leaves_no_trace_in_the_journal() -> None:
    stream = JournaledStream(HEAD)
    assert stream.feed(b"data: {}\n\n: t 0 9\n" + MOVED) == b"data: {}\n\n"
    assert stream.moved
    stream.restart()
    assert not stream.moved
    assert stream.build_prefix() == HEAD + b"\n: t 0 9\n"


def test_what_comes_without_a_mark_is_passed_on_before_it_is_too_much() -> None:
    """The echo of a long prompt, once for each choice. What is held is bounded, and searched once."""
    event = b'data: "' + b"x" * (1 << 20) + b'"\n\n'
    data = event * 12 + b": b 0 4\n" + b"data: 1\n\n: t 0 9\n" + MOVED
    stream = JournaledStream(HEAD)
    parts = [stream.feed(data[start : start + 50_000]) for start in range(0, len(data), 50_000)]
    assert b"".join(parts) == event * 12 + b"data: 1\n\n"
    assert max(map(len, parts)) < 6 << 20
    assert not stream.keeps
    assert stream.moved
    assert Continuation(stream, "r1").has_changed()
    assert fail(Continuation(stream, "r1"), Ending.DRAINING, 0.0) == "memory"
    with pytest.raises(EventTooLarge):
        JournaledStream(HEAD).feed(b"data: " + b"x" * (5 << 20))


def fail(moving: Continuation, ending: Ending, now: float) -> str | None:
    """What a stream does whose worker has failed so: None where it moves, else why it cannot."""
    policy = POLICIES[ending]
    assert policy.outcome is not None
    journal = moving.note_failure(policy.outcome.value, now, fatal=policy.fatal)
    return decide(ending, AttemptProgress(begun=True, journal=journal)).unmoved


def begun() -> Continuation:
    stream = JournaledStream(HEAD)
    stream.feed(b"data: {}\n\n: t 0 9\n")
    return Continuation(stream, "r1")


def test_workers_that_fail_one_after_another_end_it() -> None:
    moving = begun()
    for _ in range(MAX_STALLS):
        assert fail(moving, Ending.RESET, 0.0) is None
        moving.end_move()
    assert fail(moving, Ending.RESET, 0.0) == "deaths"


def test_progress_makes_up_for_deaths_but_not_without_end() -> None:
    moving = begun()
    for _ in range(MAX_DEATHS):
        assert fail(moving, Ending.RESET, 0.0) is None
        moving.end_move()
        moving.stream.feed(b"data: {}\n\n: t 0 9\n")
    assert moving.moves == MAX_DEATHS
    assert fail(moving, Ending.SILENT, 0.0) == "deaths"


def test_drains_and_refusals_cost_time_alone() -> None:
    moving = begun()
    for second in range(int(SECONDS)):
        assert fail(moving, (Ending.DRAINING, Ending.REFUSED, Ending.BUSY)[second % 3], float(second)) is None
    assert fail(moving, Ending.REFUSED, SECONDS) == "time"
    moving.stream.feed(b"data: {}\n\n: t 0 9\n")
    assert fail(moving, Ending.DRAINING, SECONDS) is None


def test_a_journal_beyond_the_bound_is_dropped() -> None:
    moving = begun()
    moving.stream.feed(b"data: {}\n\n: t 0 %b\n" % (b"1," * (MAX_JOURNAL_BYTES // 2)))
    assert moving.has_changed()
    assert moving.held_bytes == 0
    assert moving.stream.feed(b"data: {}\n\n: t 0 9\n") == b"data: {}\n\n", "the client sees no marks"
    assert fail(moving, Ending.RESET, 0.0) == "memory"


def test_kept_bodies_leave_half_of_the_budget_to_requests() -> None:
    budget = Budget(1000)
    assert may_keep(budget, 100_000)
    budget.used = 501
    assert not may_keep(budget, 100_000)
    assert may_keep(budget, 1000)


def journaled(units: int, *, then: str, first: int = 0, partial: bytes = b""):
    """A worker that keeps a journal: `then` is `die`, `hang`, `moved`, `done`, `refuse` or a status."""

    async def behave(worker, request, writer) -> None:
        size = int(request.headers["x-tandem-resume"])
        worker.journals.append(request.body[:size])
        assert json.loads(request.body[size:])["stream"]
        if then.isdigit():
            retry = "x-tandem-retry: 1\r\n" if then == "503" else ""
            writer.write(f"HTTP/1.1 {then} No\r\n{retry}content-length: 2\r\n\r\n{{}}".encode())
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            b"x-tandem-resume: " + HEAD + b"\r\n\r\n"
        )

        def send(data: bytes) -> None:
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))

        for index in range(first, first + units):
            send(b'data: {"choices":[{"index":0,"delta":{"content":"t%d "}}]}\n\n: t 0 %d\n' % (index, index))
            await writer.drain()
        if partial:
            send(partial)
        await writer.drain()
        await asyncio.sleep(0.05)
        if then == "die":
            writer.transport.abort()
        elif then == "hang":
            await asyncio.sleep(3600)
        else:
            send(MOVED if then == "moved" else b"data: [DONE]\n\n" + COMMIT)
            writer.write(b"0\r\n\r\n")

    return behave


@pytest.fixture
async def fleet(start_worker, start_gateway):
    async def start(*behaviours, **options):
        workers = [await start_worker(f"d{index}") for index in range(2)]
        queue = list(behaviours)

        async def behave(worker, request, writer) -> None:
            await queue.pop(0)(worker, request, writer)

        journals: list[bytes] = []
        for worker in workers:
            worker.default = behave
            worker.journals = journals
        running = await start_gateway(*workers, **options)
        return running, journals

    return start


async def read_stream(running, chat) -> str:
    answer = (await running.raw(chat(stream=True, headers="connection: close\r\n"))).decode()
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200")
    assert "x-tandem-resume" not in head
    assert "\n: " not in body
    return body


def tokens_of(body: str) -> list[str]:
    return [part.split(" ")[0] for part in body.split('"content":"')[1:]]


@pytest.mark.parametrize(
    ("then", "partial"),
    [("die", b""), ("hang", b""), ("moved", b""), ("die", HALF), ("hang", HALF), ("die", HALF + b'"}}]}\n\n')],
)
async def test_the_client_sees_one_stream(fleet, chat, then: str, partial: bytes) -> None:
    running, journals = await fleet(
        journaled(3, then=then, partial=partial),
        journaled(2, then="done", first=3),
        timeouts={"idle_seconds": 2.0} if then == "hang" else None,
    )
    body = await read_stream(running, chat)
    assert tokens_of(body) == [f"t{index}" for index in range(5)]
    assert body.count("[DONE]") == 1
    assert "error" not in body
    assert journals == [b"", HEAD + b"\n: t 0 0\n: t 0 1\n: t 0 2\n"]
    reason = {"die": "reset", "hang": "timeout", "moved": "draining"}[then]
    assert running.gateway.metrics.resumes == {reason: 1}
    assert not running.gateway.metrics.failed_resumes
    await running.idle()


async def test_a_traced_stream_shows_where_it_moved(fleet, chat, until) -> None:
    """The attempt that goes on with it is linked to the one that began it."""
    with run_collector() as collector:
        running, _ = await fleet(journaled(3, then="die"), journaled(2, then="done", first=3))
        running.gateway.tracer.follow(TracingConfig(endpoint=collector.url))
        assert tokens_of(await read_stream(running, chat)) == [f"t{index}" for index in range(5)]
        await until(lambda: collector.find(lambda span: span.kind == "server"), wait=60)
    (root,) = collector.find(lambda span: span.kind == "server")
    first, second = sorted(collector.find(lambda span: span.kind == "client"), key=lambda span: span.began)
    assert {span.parent_id for span in (first, second)} == {root.span_id}
    assert (first.failed, first.attributes["error.type"]) == (True, "reset")
    assert (second.failed, second.links, second.attributes["tandem.resumed"]) == (False, [first.span_id], True)
    assert root.attributes["tandem.resumes"] == 1
    assert root.attributes["gen_ai.response.time_to_first_chunk"] > 0


async def test_it_moves_as_often_as_it_must(fleet, chat) -> None:
    running, journals = await fleet(
        journaled(3, then="die"),
        journaled(0, then="503"),
        journaled(0, then="429"),
        journaled(1, then="moved", first=3),
        journaled(0, then="die"),
        journaled(1, then="done", first=4),
    )
    body = await read_stream(running, chat)
    assert tokens_of(body) == [f"t{index}" for index in range(5)]
    assert journals[-1] == HEAD + b"\n" + b"".join(b": t 0 %d\n" % index for index in range(4))
    assert running.gateway.metrics.resumes["reset"] >= 1
    await running.idle()


async def test_a_worker_that_cannot_go_on_ends_it_in_an_error(fleet, chat) -> None:
    running, _ = await fleet(journaled(3, then="die"), journaled(0, then="409"))
    body = await read_stream(running, chat)
    assert tokens_of(body) == ["t0", "t1", "t2"]
    assert 'data: {"error"' in body
    assert running.gateway.metrics.failed_resumes == {"refused": 1}
    assert (
        'tandem_gateway_failed_resumes_total{reason="refused"} 1.0' in running.server.reports.render_metrics().decode()
    )
    await running.idle()


async def test_a_stream_that_kills_its_workers_does_not_meet_all(fleet, chat) -> None:
    running, journals = await fleet(journaled(1, then="die"), *[journaled(0, then="die")] * 20)
    body = await read_stream(running, chat)
    assert 'data: {"error"' in body
    assert len(journals) == MAX_STALLS + 1
    assert running.gateway.metrics.failed_resumes == {"deaths": 1}
    await running.idle()


async def test_only_workers_of_the_same_revision_go_on(start_worker, start_gateway, chat) -> None:
    workers = [await start_worker(f"d{index}", revision=f"r{index // 2}") for index in range(3)]
    journals: list[bytes] = []
    begun_at: list[str] = []
    served: list[str] = []

    async def behave(worker, request, writer) -> None:
        served.append(worker.revision)
        if not begun_at:
            begun_at.append(worker.revision)
            await journaled(3, then="die")(worker, request, writer)
        else:
            await journaled(1, then="done", first=3)(worker, request, writer)

    for worker in workers:
        worker.default = behave
        worker.journals = journals
    running = await start_gateway(*workers)
    assert tokens_of(await read_stream(running, chat)) == ["t0", "t1", "t2", "t3"]
    assert len(set(served)) == 1
    await running.idle()


async def test_a_slow_client_gets_all_of_it(fleet, chat, until) -> None:
    """It takes nothing while its stream moves: the next worker is asked when it reads again."""
    running, _ = await fleet(journaled(60_000, then="die"), journaled(3, then="done", first=60_000))
    reader, writer = await running.connect(limit=4096)
    writer.write(chat(stream=True, headers="connection: close\r\n"))
    await asyncio.sleep(1.0)
    body = b""
    async with asyncio.timeout(30):
        while part := await reader.read(1 << 16):
            body += part
    text = body.decode()
    assert text.count('"content"') == 60_003
    assert "[DONE]" in text
    await running.idle()


async def test_who_drops_a_stream_that_moves_is_to_blame_however_slow_its_client(fleet, chat) -> None:
    """What a worker may do to whom nobody reads from is no excuse for one that has sent nothing."""
    blamed: list[int] = []

    def failures() -> int:
        return sum(endpoint.health.total for endpoint in running.gateway.scheduler.endpoints.values())

    async def drop(worker, request, writer) -> None:
        blamed.append(failures())
        (exchange,) = running.gateway.exchanges
        exchange.on_client_slow()
        exchange.on_client_ready()
        writer.transport.abort()

    running, _ = await fleet(journaled(3, then="die"), drop, journaled(2, then="done", first=3))
    assert tokens_of(await read_stream(running, chat)) == [f"t{index}" for index in range(5)]
    assert failures() == blamed[0] + 1
    await running.idle()


async def test_a_client_cannot_say_how_its_stream_began(fleet, chat) -> None:
    running, journals = await fleet(journaled(2, then="done"))
    data = chat(stream=True, headers="x-tandem-resume: 20\r\nconnection: close\r\n")
    assert b"[DONE]" in await running.raw(data)
    assert journals == [b""]
    await running.idle()
