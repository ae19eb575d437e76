"""Reports of gateways, read from real HTTP servers on two loopback addresses."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from tandem_api.fleet import FleetReport, WorkerReport
from tandem_api.names import Role
from tandem_operator import fleet
from tandem_operator.fleet import FleetView, FleetWatch, parse_report
from tandem_operator.manifests import ModelKey
from tandem_operator.metrics import FLEET_REPORTS

from bench.gateway.telemetry import SAMPLE

KEY = ModelKey("n", "m")
ONE, TWO = "127.0.0.1", "127.0.0.2"
GATEWAYS = {"m-one": ONE, "m-two": TWO}
FAST, SLOW = 0.05, 0.3


def worker(name: str, state: Any = "Admitted", reason: str | None = None, host: str = "10.0.0.1") -> WorkerReport:
    return WorkerReport(
        name=name, address=f"{host}:8000", role=Role.DECODE, revision="r", state=state, reason=reason
    )  # fmt: skip


def report(gateway: str, *workers: WorkerReport) -> FleetReport:
    return FleetReport(gateway=gateway, started_at=1.0, at=2.0, workers=list(workers))


class Gateways:
    """Two of them; each answers with what it was given."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[], web.StreamResponse]] = {}
        self.asked: Counter[str] = Counter()
        self.hangs = asyncio.Event()
        self.port = 0

    def say(self, name: str, *workers: WorkerReport) -> None:
        text = report(name, *workers).to_json()
        self.answers[GATEWAYS[name]] = lambda: web.Response(text=text, content_type="application/json")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.path == "/fleet"
        host = request.host.partition(":")[0]
        self.asked[host] += 1
        if host not in self.answers:
            await self.hangs.wait()
        return self.answers[host]()


@pytest.fixture
async def gateways() -> AsyncIterator[Gateways]:
    made = Gateways()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, ONE, 0).start()
    made.port = runner.addresses[0][1]
    await web.TCPSite(runner, TWO, made.port).start()
    yield made
    made.hangs.set()
    await runner.cleanup()


class Watching:
    def __init__(self, port: int) -> None:
        self.late = 0.0
        self.changes: list[ModelKey] = []
        self.watch = FleetWatch(
            self.changes.append, port=port, clock=lambda: time.monotonic() + self.late, seconds=(FAST, SLOW)
        )

    async def until(self, holds: Callable[[FleetView], object]) -> FleetView:
        async with asyncio.timeout(10):
            while not holds(view := self.watch.view(KEY)):  # noqa: ASYNC110 -- the other end is a server
                await asyncio.sleep(0.01)
        return view


@pytest.fixture
async def watching(gateways: Gateways) -> AsyncIterator[Watching]:
    made = Watching(gateways.port)
    running = asyncio.create_task(made.watch.run())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_worker_that_any_gateway_admits_is_admitted(gateways: Gateways, watching: Watching) -> None:
    gateways.say("m-one", worker("a", "Ejected", "silent"), worker("b", "Ejected", "error"))
    gateways.say("m-two", worker("a"), worker("b", "Ejected", "error"))
    assert not watching.watch.view(KEY).asked or not watching.watch.view(KEY).reporting
    watching.watch.follow(KEY, GATEWAYS, hurry=True)
    view = await watching.until(lambda view: len(view.reporting) == 2)
    assert (view.asked, view.silent, view.unable) == (True, {}, frozenset())
    assert view.standings["a"].admitted
    assert (view.standings["b"].admitted, view.standings["b"].reason) == (False, "error")
    assert {found.gateway for found in watching.watch.reports(KEY)} == {"m-one", "m-two"}
    assert {found.gateway for found, age in watching.watch.heard(KEY) if 0 <= age < 10} == {"m-one", "m-two"}
    watching.late = 20.0
    rejected = await watching.until(lambda view: view.standings["b"].rejected_seconds >= 20.0)
    assert rejected.standings["a"].rejected_seconds == 0.0


async def test_only_changes_of_admission_cause_a_look(gateways: Gateways, watching: Watching) -> None:
    gateways.say("m-one", worker("a"))
    watching.watch.follow(KEY, {"m-one": ONE}, hurry=True)
    await watching.until(lambda view: view.reporting)
    await until_asked(gateways, ONE, 5)
    assert watching.changes == [KEY]
    busier = report("m-one", worker("a").model_copy(update={"requests": 7})).to_json()
    gateways.answers[ONE] = lambda: web.Response(text=busier)
    await until_asked(gateways, ONE, gateways.asked[ONE] + 3)
    assert watching.changes == [KEY], "counts are no change"
    gateways.say("m-one", worker("a", "Ejected", "silent"))
    await watching.until(lambda view: not view.standings["a"].admitted)
    await until_asked(gateways, ONE, gateways.asked[ONE] + 2)
    assert watching.changes == [KEY], "busy for a moment is no change"
    watching.late = fleet.REJECTED_SECONDS[0]
    await until_asked(gateways, ONE, gateways.asked[ONE] + 3)
    assert watching.changes == [KEY, KEY]
    gateways.say("m-one", worker("a"))
    await watching.until(lambda view: view.standings["a"].admitted)
    await until_asked(gateways, ONE, gateways.asked[ONE] + 2)
    assert watching.changes == [KEY, KEY, KEY]
    gateways.say("m-one", worker("a"), worker("new", "Ejected", "kv"))
    await watching.until(lambda view: "new" in view.standings)
    await until_asked(gateways, ONE, gateways.asked[ONE] + 2)
    assert watching.changes == [KEY] * 4, "one that never was admitted is news at once"


async def until_asked(gateways: Gateways, host: str, count: int) -> None:
    async with asyncio.timeout(10):
        while gateways.asked[host] < count:  # noqa: ASYNC110 -- the other end is a server
            await asyncio.sleep(0.01)


def broken(**fields: Any) -> Callable[[], web.StreamResponse]:
    return lambda: web.Response(**fields)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (broken(status=500), "answers 500"),
        (broken(status=302, headers={"location": "http://127.0.0.1:1/"}), "answers 302"),
        (broken(text="not json"), "its report cannot be read"),
        (broken(text='{"gateway": "m-one", "startedAt": 1}'), "at: Field required"),
        (broken(text=report("m-one").to_json().replace('"workers":[]', '"workers":[{"state":"Fine"}]')), "workers.0"),
        (broken(text=report("m-other").to_json()), "answers as m-other"),
        (broken(body=b" " * (fleet.MAX_BYTES + 1)), "more than"),
        (None, "cannot be reached within"),
    ],
)
async def test_what_is_no_report_is_counted_and_told(
    gateways: Gateways,
    watching: Watching,
    answer: Callable[[], web.StreamResponse] | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "ANSWER_SECONDS", 0.5)
    if answer is not None:
        gateways.answers[ONE] = answer
    gateways.say("m-two", worker("a"))
    before = FLEET_REPORTS.labels("error")._value.get()
    watching.watch.follow(KEY, GATEWAYS, hurry=True)
    view = await watching.until(lambda view: view.asked)
    assert words in view.silent["m-one"]
    assert view.standings["a"].admitted, "another gateway's report counts nevertheless"
    assert FLEET_REPORTS.labels("error")._value.get() > before
    gateways.say("m-one")
    await watching.until(lambda view: not view.silent)


async def test_a_release_without_reports_is_told_apart(gateways: Gateways, watching: Watching) -> None:
    gateways.answers[ONE] = broken(status=404, text="try /metrics")
    watching.watch.follow(KEY, {"m-one": ONE}, hurry=False)
    view = await watching.until(lambda view: view.asked)
    assert (view.unable, view.silent, view.reporting) == (frozenset({"m-one"}), {}, frozenset())


async def test_a_report_goes_stale_and_a_gateway_that_left_says_nothing(gateways: Gateways, watching: Watching) -> None:
    gateways.say("m-one", worker("a"))
    watching.watch.follow(KEY, {"m-one": ONE}, hurry=False)
    await watching.until(lambda view: view.reporting)
    gateways.answers[ONE] = broken(status=503)
    await until_asked(gateways, ONE, gateways.asked[ONE] + 2)
    assert watching.watch.view(KEY).standings["a"].admitted, "one answer that did not come takes nothing back"
    watching.late = fleet.STALE_SECONDS + 1
    view = watching.watch.view(KEY)
    assert (view.standings, view.reporting, watching.watch.reports(KEY)) == ({}, frozenset(), ())
    assert "answers 503" in view.silent["m-one"]
    watching.watch.follow(KEY, {}, hurry=False)
    assert watching.watch.view(KEY).silent == {}
    watching.watch.forget(KEY)
    assert watching.watch.view(KEY) == FleetView()


async def test_it_asks_often_only_while_something_is_under_way(gateways: Gateways, watching: Watching) -> None:
    gateways.say("m-one", worker("a"))
    watching.watch.follow(KEY, {"m-one": ONE}, hurry=False)
    await watching.until(lambda view: view.reporting)
    began, seen = time.monotonic(), gateways.asked[ONE]
    await asyncio.sleep(4 * SLOW)
    assert gateways.asked[ONE] - seen <= (time.monotonic() - began) / SLOW + 1
    watching.watch.follow(KEY, {"m-one": ONE}, hurry=True)
    began, seen = time.monotonic(), gateways.asked[ONE]
    await until_asked(gateways, ONE, seen + 10)
    assert time.monotonic() - began < 10 * SLOW, "faster than the slow pace"


async def test_gateways_that_hang_take_a_bounded_number_of_tasks(
    gateways: Gateways, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(200):
        watching.watch.follow(ModelKey("n", f"m{number}"), {"m-one": ONE, "m-two": TWO}, hurry=True)
    await until_asked(gateways, ONE, fleet._POLLERS)
    await asyncio.sleep(0.2)
    assert gateways.asked[ONE] <= fleet._POLLERS
    assert len(asyncio.all_tasks()) < 8 * fleet._POLLERS


def test_a_newer_gateway_may_say_more() -> None:
    text = report("g", worker("a")).to_json().replace('"gateway"', '"mood": "good", "gateway"')
    assert parse_report(text.encode(), gateway="g").workers[0].name == "a"


def test_a_report_of_a_thousand_workers_with_all_their_figures_is_read() -> None:
    """It has 1.2 MB: more than a report without telemetry, and well below what is read."""
    workers = [
        WorkerReport(
            name=f"llama-70b-production-decode-{index}", address="10.123.123.123:8000", role=Role.DECODE,
            revision="5f2c9d7e81", state="Admitted", requests=123_456_789, failures=123_456,
            ttft_counts=[123_456] * 14, telemetry=SAMPLE, telemetry_age=0.123456789,
        )
        for index in range(1000)
    ]  # fmt: skip
    text = FleetReport(gateway="g", started_at=1.0, at=2.0, workers=workers).to_json()
    assert 1024 * 1024 < len(text) < fleet.MAX_BYTES / 2
    assert FleetReport.model_validate_json(text).workers[-1].telemetry == SAMPLE
